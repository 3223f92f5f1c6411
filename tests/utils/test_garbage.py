"""Pauses of the garbage collector, and actions at the end of objects."""

import gc

import pytest

from tests.launches import run_code
from verl.utils.garbage import finalize, loading_packages


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


class Thing:
    pass


def test_a_collected_object_is_finalized_once():
    calls = []
    thing = Thing()
    finalizer = finalize(thing, calls.append, 1)
    assert finalizer.alive
    del thing
    gc.collect()
    finalizer()
    assert calls == [1]


def test_an_object_that_lives_is_finalized_at_exit():
    code = """
        from verl.utils.garbage import finalize
        thing = set()
        finalize(thing, print, "finalized")
    """
    assert run_code(code).stdout == "finalized\n"
