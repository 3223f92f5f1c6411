"""The page table, under random use."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.rollout.embedded.pages import PageAllocator


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 9))),
)
def test_the_page_table_is_consistent_after_any_sequence_of_calls(num_pages, calls):
    pages = PageAllocator(num_pages, page_size=2)
    holders: list[list[int]] = []
    for call, number in calls:
        if call == "allocate":
            free = pages.num_free
            assert pages.can_allocate(number) == (number <= free)
            if pages.can_allocate(number):
                held = pages.allocate(number)
                assert not {page for holder in holders for page in holder} & set(held)
                holders.append(held)
        elif holders and call == "share":
            holders.append(pages.share(holders[number % len(holders)]))
        elif holders:
            pages.free(holders.pop(number % len(holders)))
        pages.check_integrity(holders)

    for holder in holders:
        pages.free(holder)
    pages.check_integrity([])
    assert pages.num_free == num_pages


@given(
    st.integers(2, 8),
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.booleans()), max_size=20
    ),
)
def test_pages_are_found_by_their_contents(num_pages, sequences):
    """Add sequences that reuse found pages, write the rest, register, and stay or leave."""
    pages = PageAllocator(num_pages, page_size=2)
    holders: list[list[int]] = []
    contents: dict[int, list[int]] = {}  # page -> all tokens up to its end

    for tokens, stays in sequences:
        needed = -(-len(tokens) // 2)
        if not pages.can_allocate(needed):
            pages.free(holders.pop(0)) if holders else None
            continue
        found = pages.find(tokens)
        for number, page in enumerate(found):
            assert contents[page] == tokens[: 2 * number + 2]
        held = [*pages.share(found), *pages.allocate(needed - len(found))]
        for number in range(len(found), needed):
            contents[held[number]] = tokens[: 2 * number + 2]
        pages.register(tokens, held)
        if stays:
            holders.append(held)
        else:
            pages.free(held)
            assert pages.find(tokens)[: len(found)] == found
        pages.check_integrity(holders)


def test_the_page_released_first_is_evicted_first():
    pages = PageAllocator(3, page_size=1)
    for token in (1, 2, 3):
        held = pages.allocate(1)
        pages.register([token], held)
        pages.free(held)
    pages.free(pages.share(pages.find([1])))
    pages.allocate(1)
    assert [len(pages.find([token])) for token in (1, 2, 3)] == [1, 0, 1]


def test_the_garbage_collector_follows_nothing_that_pages_remember():
    pages = PageAllocator(4, page_size=2)
    pages.register([1, 2, 3, 4, 5], pages.allocate(3))
    for books in (pages._registered, pages._names, pages._keys):
        assert len(books) == 2
        assert not any(gc.is_tracked(part) for pair in books.items() for part in pair)


def test_a_shared_page_is_free_after_its_last_holder():
    pages = PageAllocator(2, page_size=1)
    first = pages.allocate(1)
    second = pages.share(first)
    assert pages.is_shared(first[0])
    pages.free(first)
    assert not pages.is_shared(second[0])
    assert pages.num_free == 1
    pages.free(second)
    assert pages.num_free == 2
    with pytest.raises(AssertionError, match="freed twice"):
        pages.free(second)
    assert pages.peak == 1


def test_integrity_notices_a_leak_and_a_forgotten_holder():
    pages = PageAllocator(3, page_size=1)
    held = pages.allocate(2)
    with pytest.raises(AssertionError, match="reference counts"):
        pages.check_integrity([])
    with pytest.raises(AssertionError, match="reference counts"):
        pages.check_integrity([held, held])
    pages._free.pop()
    with pytest.raises(AssertionError, match="free list"):
        pages.check_integrity([held])
