"""When the garbage collector waits."""

import gc

import pytest

from verl.utils.garbage import loading_packages


def test_the_collector_waits_while_packages_load_and_passes_over_them_later():
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), loading_packages():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled()
        # Others' frozen objects may have been freed meanwhile.
        assert gc.get_freeze_count() <= before
        with loading_packages():
            made = [[]]
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        assert all(found is not made for found in gc.get_objects())
    finally:
        gc.unfreeze()
