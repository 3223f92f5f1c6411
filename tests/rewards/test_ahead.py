"""Responses scored before their batch is complete get the same scores as with it, whatever goes
wrong."""

import asyncio
import os
import threading
import time

import pytest

from tests.rewards.batches import CharTokenizer, make_batch
from verl.protocol import DataProto
from verl.rewards.calls import Caller
from verl.rewards.custom import load_custom_reward
from verl.rewards.manager import NaiveRewardManager
from verl.rewards.managers import BatchRewardManager, DAPORewardManager, PrimeRewardManager
from verl.utils.errors import RewardError
from verl.utils.imports import load_extern_type

TEXTS = ["a", "bb", "ccc", "dddd", "e", "ff"]  # of three prompts, two each
TRUTHS = ["x", "x", "y", "y", "z", "z"]


def batch_of(texts=TEXTS) -> DataProto:
    return make_batch(texts, TRUTHS, extra_infos=[{"index": row // 2} for row in range(6)])


def prompts_of(batch: DataProto) -> DataProto:
    return batch.select_idxs([0, 2, 4]).select(batch_keys=["prompts"])


def score_ahead(manager, batch, order=(5, 0, 3, 1, 4, 2), texts=None, wait=lambda: None):
    """Return the result for a batch with responses that finish in another order.

    `texts` replaces the texts that are announced.
    """
    ids = [[*map(ord, text), 1] for text in texts or TEXTS]
    with manager.ahead(prompts_of(batch), 2, first_sample=40) as take:
        for row in order:
            take((40 + row, ids[row]))
        wait()
        return manager(batch, return_dict=True)


def by_everything(data_source, solution_str, ground_truth, extra_info):
    return {
        "score": len(solution_str) + extra_info["index"] / 8,
        "truth": ground_truth,
        "source": data_source,
    }


async def slowly(**sample):
    await asyncio.sleep(0.01)
    return by_everything(**sample)


def same(one, other) -> bool:
    scores = [result.pop("reward_tensor").tolist() for result in (one, other)]
    return scores[0] == scores[1] and one == other


@pytest.mark.parametrize("function", [by_everything, slowly])
@pytest.mark.parametrize("order", [(5, 0, 3, 1, 4, 2), (2, 0), (), (0, 0, 1, 1)])
def test_scores_equal_those_of_the_whole_batch_and_each_is_requested_once(function, order):
    """Include texts that are never announced, and texts that are announced twice."""
    calls = []

    async def counted_async(**sample):
        calls.append(sample["solution_str"])
        return await function(**sample)

    def counted(**sample):
        calls.append(sample["solution_str"])
        return function(**sample)

    batch = batch_of()
    manager = NaiveRewardManager(
        CharTokenizer(), 0, counted_async if function is slowly else counted
    )
    expected = NaiveRewardManager(CharTokenizer(), 0, by_everything)(batch, return_dict=True)
    assert same(score_ahead(manager, batch, order), expected)
    assert sorted(calls) == sorted(TEXTS)
    assert manager._begun is None
    assert manager(batch).sum() > 0
    assert len(calls) == 12, "of the next batch nothing is known"


def test_calls_overlap_generation_one_at_a_time_in_the_order_of_responses():
    calls = []
    active = []
    all_done = threading.Event()

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        active.append(1)
        assert len(active) == 1
        time.sleep(0.01)
        active.pop()
        calls.append(solution_str)
        if len(calls) == 6:
            all_done.set()
        return 1.0

    manager = NaiveRewardManager(CharTokenizer(), 0, compute_score)
    result = score_ahead(
        manager,
        batch_of(),
        wait=lambda: all_done.wait(20) or pytest.fail("not all calls were made"),
    )
    assert result["reward_tensor"].sum() == 6
    assert calls == ["ff", "a", "dddd", "bb", "e", "ccc"]


def test_texts_that_differ_from_the_announced_ones_are_scored_as_they_are():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        calls.append(solution_str)
        if solution_str == "other":
            raise ValueError("a failure that belongs to no row")
        return float(len(solution_str))

    manager = NaiveRewardManager(CharTokenizer(), 0, compute_score)
    result = score_ahead(manager, batch_of(), texts=["a", "other", "ccc", "dddd", "e", "ff"])
    assert result["reward_tensor"].sum(-1).tolist() == [1, 2, 3, 4, 1, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_first_failure_by_row_is_reported(is_async):
    calls = []

    def failing(data_source, solution_str, ground_truth, extra_info):
        calls.append(solution_str)
        if solution_str in ("bb", "dddd", "ff"):
            raise ValueError(f"not {solution_str}")
        return 1.0

    async def failing_async(**sample):
        return failing(**sample)

    manager = NaiveRewardManager(CharTokenizer(), 0, failing_async if is_async else failing)
    with pytest.raises(RewardError, match="failed on response 1 of the batch .*not bb"):
        score_ahead(manager, batch_of())
    if not is_async:
        assert calls == ["ff", "a", "dddd", "bb"], "rows behind a failure are not called any more"
    zero = NaiveRewardManager(CharTokenizer(), 0, manager.compute_score, on_error="zero")
    result = score_ahead(zero, batch_of())
    assert result["reward_tensor"].sum(-1).tolist() == [1, 0, 1, 0, 1, 0]
    assert result["metrics"] == {"reward/num_errors": 3, "reward/num_timeouts": 0}


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_the_deadline_of_a_call_counts_from_its_own_start(is_async):
    """Check that the wait for the batch does not count, and that a call that ended late fails.

    It fails even if no thread checked at the time of its deadline.
    """
    release = threading.Event()
    ended_late = threading.Event()

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "dddd":
            release.wait(2)
            ended_late.set()
        if solution_str == "e":
            release.wait(600)
        return 1.0

    async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
        try:
            await asyncio.sleep({"dddd": 2, "e": 600}.get(solution_str, 0))
        finally:
            if solution_str == "dddd":
                ended_late.set()
        return 1.0

    function = compute_score_async if is_async else compute_score
    manager = NaiveRewardManager(CharTokenizer(), 0, function, timeout_s=1.5, on_error="zero")
    result = score_ahead(manager, batch_of(), wait=lambda: ended_late.wait(60))
    release.set()
    assert result["reward_tensor"].sum(-1).tolist() == [1, 1, 1, 0, 0, 1]
    assert result["metrics"] == {"reward/num_errors": 0, "reward/num_timeouts": 2}


def test_a_hanging_reward_stops_the_run_at_its_time_out():
    release = threading.Event()
    manager = NaiveRewardManager(CharTokenizer(), 0, lambda **_: release.wait(600), timeout_s=0.2)
    with pytest.raises(
        RewardError, match=r"failed on response 0 of the batch .*no answer within 0\.2 s"
    ):
        score_ahead(manager, batch_of())
    release.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_abandoned_batch_causes_no_further_calls(is_async):
    """Announce responses after a failure, as another rank may still do."""
    calls = []

    async def noted_async(**sample):
        calls.append(sample["solution_str"])
        return 1.0

    def noted(**sample):
        calls.append(sample["solution_str"])
        return 1.0

    manager = NaiveRewardManager(CharTokenizer(), 0, noted_async if is_async else noted)
    with manager.ahead(prompts_of(batch_of()), 2) as take:
        assert take is not None
    take((0, [97, 1]))
    assert manager(batch_of()).sum() == 6
    assert sorted(calls) == sorted(TEXTS)


def test_no_thread_is_left_after_a_batch_that_never_comes():
    """Leave the block because generation failed, or without asking for a result."""

    def names() -> int:
        return sum(thread.name == "verl-reward" for thread in threading.enumerate())

    manager = NaiveRewardManager(CharTokenizer(), 0, by_everything)
    before = names()
    for _ in range(20):
        with pytest.raises(KeyError), manager.ahead(prompts_of(batch_of()), 2) as take:
            take((0, [97, 1]))
            raise KeyError
    gives_up_at = time.monotonic() + 10
    while names() > before and time.monotonic() < gives_up_at:
        time.sleep(0.01)
    assert names() == before
    assert manager._begun is None


def test_prime_processes_work_in_parallel_during_generation(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "import os, time\n"
        "def compute_score(**sample):\n"
        "    time.sleep(0.05)\n"
        "    return {'score': 1.0, 'pid': os.getpid()}"
    )
    manager = PrimeRewardManager(CharTokenizer(), 0, load_custom_reward(str(file)), num_processes=2)
    result = score_ahead(manager, batch_of())
    assert result["reward_tensor"].sum() == 6
    assert len({*result["reward_extra_info"]["pid"], os.getpid()}) == 3


def test_functions_that_need_the_batch_or_the_calling_thread_wait_for_it(tmp_path):
    prompts = prompts_of(batch_of())
    whole = BatchRewardManager(
        CharTokenizer(), 0, lambda data_sources, **_: [1.0] * len(data_sources)
    )
    file = tmp_path / "reward.py"
    file.write_text("import signal\ndef compute_score(**sample):\n    return 1.0\n")
    signals = NaiveRewardManager(CharTokenizer(), 0, load_extern_type(str(file), "compute_score"))
    for manager in (whole, signals):
        with manager.ahead(prompts, 2) as take:
            assert take is None
            assert manager(batch_of()).sum() == 6
    with BatchRewardManager(CharTokenizer(), 0).ahead(prompts, 2) as take:
        assert take is not None, "the rules score one sample after the other"


def test_a_function_found_to_need_the_main_thread_is_called_there():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal only works in main thread of the main interpreter")
        return 1.0

    manager = NaiveRewardManager(CharTokenizer(), 0, compute_score)
    assert score_ahead(manager, batch_of())["reward_tensor"].sum() == 6
    with manager.ahead(prompts_of(batch_of()), 2) as take:
        assert take is None


def test_the_penalty_for_a_long_response_is_subtracted():
    settings = {
        "max_resp_len": 4,
        "overlong_buffer_cfg": {"enable": True, "len": 2, "penalty_factor": 1.0},
    }
    managers = [DAPORewardManager(CharTokenizer(), 0, by_everything, **settings) for _ in range(2)]
    assert same(score_ahead(managers[0], batch_of()), managers[1](batch_of(), return_dict=True))


def test_responses_may_come_from_several_threads():
    manager = NaiveRewardManager(CharTokenizer(), 0, by_everything)
    batch = batch_of()
    with manager.ahead(prompts_of(batch), 2) as take:
        assert take is not None
        rows = [(row, [*map(ord, TEXTS[row]), 1]) for row in range(6)] * 50
        threads = [
            threading.Thread(target=lambda part=part: [take(each) for each in rows[part::4]])
            for part in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = manager(batch, return_dict=True)

    assert same(
        found, NaiveRewardManager(CharTokenizer(), 0, by_everything)(batch, return_dict=True)
    )


def test_several_threads_agree_on_the_first_failure_by_row():
    def compute_score(row):
        time.sleep(0.3 if row == 2 else 0.0)
        if row in (2, 3):
            raise ValueError(row)
        return row

    outcomes = Caller(compute_score, 60.0)(
        [{"row": row} for row in range(50)], stop_at_failure=True, at_once=4
    )
    failed = [row for row, outcome in enumerate(outcomes) if outcome is not None and outcome.failed]
    assert failed[0] == 2


def test_a_call_that_begins_while_its_caller_waits_has_a_deadline():
    """Give the lock to a woken thread only after its caller computed how long to wait."""
    release = threading.Event()
    first_done = threading.Event()

    def hang(number):
        first_done.set() if number == 0 else release.wait()

    caller = Caller(hang, timeout_s=0.2)
    calls = caller.begin()
    calls.add(0, lambda: {"number": 0})
    assert first_done.wait(60)
    while calls.outcomes[0] is None:
        time.sleep(0.01)
    with calls._changed:
        calls.add(1, lambda: {"number": 1})
        first, second = caller.finish(calls)
    release.set()
    assert not first.failed
    assert second.timed_out


def test_a_prompt_without_a_rule_is_named_before_its_responses_come():
    batch = make_batch(TEXTS, TRUTHS, ["toy"] * 4 + ["mystery"] * 2)
    manager = NaiveRewardManager(CharTokenizer(), 0)
    with (
        pytest.raises(RewardError, match="^Prompt 2 of the batch: No reward rule for .*'mystery'"),
        manager.ahead(prompts_of(batch), 2, first_sample=40),
    ):
        raise AssertionError("the prompts were accepted")
