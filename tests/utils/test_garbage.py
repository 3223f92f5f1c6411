"""Pauses of the garbage collector."""

import gc

import pytest

from verl.utils.garbage import loading_packages


def test_the_collector_pauses_while_packages_load_and_skips_them_later():
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), loading_packages():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    # Frozen objects of other tests may have been freed meanwhile.
    assert gc.get_freeze_count() <= before

    with loading_packages():
        made = [[]]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert all(found is not made for found in gc.get_objects())
