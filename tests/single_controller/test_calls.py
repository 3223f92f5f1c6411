"""The driver's wait for a call, on ranks with scripted answers."""

from collections.abc import Mapping
from typing import Any

import pytest

from verl.single_controller.calls import ANSWER_S, REPORT_S, GroupFuture, Lost
from verl.single_controller.host import Raised
from verl.single_controller.worker_group import start_role
from verl.utils.errors import ConfigError, DeadlineError, WorkerError, WorkerLostError

DEADLINE_S = 100.0


class Scripted:
    """Two simulated ranks; each `wait` returns the next of `answers`. Records the order of
    calls."""

    size = 2

    def __init__(self, *answers: dict[int, Any]) -> None:
        self.answers = list(answers)
        self.events: list[tuple[str, float]] = []

    def wait(self, replies: Mapping[int, Any], timeout_s: float) -> dict[int, Any]:
        self.events.append(("wait", timeout_s))
        return self.answers.pop(0)

    def stacks(self, timeout_s: float) -> dict[int, str]:
        self.events.append(("stacks", timeout_s))
        return {0: "in a collective"}

    def values(self, replies: Any) -> list[Any]:
        return list(replies)

    def describe(self, rank: int) -> str:
        return f"machine, pid {rank}"

    def breadcrumbs(self) -> dict[int, str]:
        return {}

    def abort(self, reason: str) -> None:
        self.events.append(("abort", 0.0))


def call_on(ranks: Any) -> GroupFuture:
    return GroupFuture(ranks, "actor.update", {0: "a", 1: "b"}, [0, 1], list, DEADLINE_S)


def test_the_error_of_a_stuck_rank_is_raised_before_the_deadline():
    ranks = Scripted({}, {0: None})
    with pytest.raises(DeadlineError, match=r"within 100 s: rank 1 \(machine, pid 1\) does not an"):
        call_on(ranks).result()
    (_, until_asked), (_, for_stacks), (_, until_raised), (last, _) = ranks.events
    assert last == "abort"
    assert until_asked + for_stacks <= DEADLINE_S - REPORT_S
    assert until_raised <= DEADLINE_S - REPORT_S
    assert for_stacks == ANSWER_S


def test_a_call_that_ends_while_stacks_are_requested_is_no_error():
    ranks = Scripted({0: None}, {1: None})
    assert call_on(ranks).result() == ["a", "b"]
    assert [event for event, _ in ranks.events] == ["wait", "stacks", "wait"]


def test_a_rank_that_dies_while_stacks_are_requested_is_named_as_dead():
    ranks = Scripted({0: None}, {1: Lost("exit code 9")})
    with pytest.raises(WorkerLostError, match=r"rank 1 \(machine, pid 1\) died: exit code 9"):
        call_on(ranks).result()


def test_the_first_rank_that_raised_is_the_cause_also_if_another_was_earlier():
    first, other = Raised("A: 0", "", ValueError("0")), Raised("B: 1", "", ValueError("1"))
    ranks = Scripted({1: other}, {1: other}, {0: first})
    with pytest.raises(WorkerError, match=r"(?s)raised on rank 0 .*raised on rank 1 ") as raised:
        call_on(ranks).result()
    assert raised.value.__cause__ is first.error


@pytest.mark.parametrize("given", [dict, len])
def test_what_is_no_worker_is_named_before_it_is_built(given: Any):
    with pytest.raises(
        ConfigError, match=f"'actor' must be a subclass of .*Worker, got {given.__name__}"
    ):
        start_role(Scripted(), "actor", given, (), {}, DEADLINE_S)
