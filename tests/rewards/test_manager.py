"""Scores of whole batches: their position, and functions that fail, hang or return invalid
values."""

import asyncio
import math
import re
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launches import run_code
from tests.rewards.batches import PAD, CharTokenizer, make_batch, objects
from verl.rewards.custom import load_custom_reward
from verl.rewards.fields import collect_extra
from verl.rewards.manager import NaiveRewardManager
from verl.rewards.registry import reward_managers
from verl.utils.errors import ConfigError, RewardError


def manager(compute_score=None, **settings):
    return NaiveRewardManager(CharTokenizer(), 0, compute_score, **settings)


def by_length(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))


@given(st.lists(st.text(alphabet="abc", min_size=0, max_size=6), min_size=1, max_size=6))
@settings(max_examples=25)
def test_the_score_is_on_the_last_real_token_and_nowhere_else(responses):
    batch = make_batch(responses)
    scores = manager(lambda **sample: len(sample["solution_str"]) + 1.0)(batch)
    assert scores.shape == batch.batch["responses"].shape
    assert scores.dtype == torch.float32
    for row, text in enumerate(responses):
        last = int((batch.batch["responses"][row] != PAD).sum()) - 1
        # the special token is dropped by decoding, and carries the score
        assert scores[row, last] == len(text) + 1
        assert scores[row].count_nonzero() == 1


def test_every_argument_reaches_the_function():
    seen = []
    batch = make_batch(["one", "two"], [{"a": 1}, "g"], ["s", "t"], [{"index": 0}, {"index": 1}])
    manager(lambda **sample: seen.append(sample) or 0)(batch)

    assert seen == [
        {
            "data_source": "s",
            "solution_str": "one",
            "ground_truth": {"a": 1},
            "extra_info": {"index": 0},
        },
        {
            "data_source": "t",
            "solution_str": "two",
            "ground_truth": "g",
            "extra_info": {"index": 1},
        },
    ]


def test_a_data_set_of_prompts_alone_can_be_scored_by_a_custom_function():
    batch = make_batch(["one"])
    del batch.non_tensor_batch["data_source"]
    assert manager(by_length)(batch).sum() == 3


def test_the_default_is_the_rule_of_the_data_source_under_the_key_given():
    batch = make_batch(["#### 4", "4"], ["4", "4"], ["openai/gsm8k", "toy"])
    batch.non_tensor_batch["source"] = batch.non_tensor_batch.pop("data_source")
    assert manager(reward_fn_key="source")(batch).sum(-1).tolist() == [1.0, 1.0]
    assert reward_managers.get("naive") is NaiveRewardManager


@pytest.mark.parametrize("on_error", ["stop", "zero", "drop"])
def test_an_unknown_data_source_stops_the_run_under_any_policy(on_error):
    with pytest.raises(RewardError, match=r"mystery.*custom_reward_function\.path"):
        manager(on_error=on_error)(make_batch(["4"], ["4"], ["mystery"]))


def test_existing_scores_pass_through():
    batch = make_batch(["ab", "c"])
    given_scores = torch.rand(batch.batch["responses"].shape)
    batch.batch["rm_scores"] = given_scores
    result = manager(by_length)(batch, return_dict=True)
    assert result["reward_tensor"] is given_scores or torch.equal(
        result["reward_tensor"], given_scores
    )
    assert torch.equal(manager(by_length)(batch), given_scores)
    batch.batch["rm_scores"] = given_scores * math.nan
    with pytest.raises(RewardError, match="rm_scores"):
        manager(by_length)(batch)


def test_fields_of_agent_loops_come_with_their_scores():
    batch = make_batch(["ab", "c", "d"])
    batch.batch["rm_scores"] = torch.zeros(batch.batch["responses"].shape)
    infos = [{"reward_extra_info": {"acc": 1.0, "note": "n"}}, {}, {"reward_extra_info": None}]
    batch.non_tensor_batch["agent_info"] = objects(infos)
    extra = manager(by_length)(batch, return_dict=True)["reward_extra_info"]
    assert extra["acc"][0] == 1.0
    assert all(math.isnan(value) for value in extra["acc"][1:])
    assert extra["note"] == ["n", None, None]


def test_extra_fields_become_lists_with_one_filler_per_type():
    answers = [{"score": 1, "acc": 1.0, "pred": "x"}, 0.5, {"score": 0, "pred": None, "note": "n"}]
    batch = make_batch(["0", "1", "2"])
    result = manager(lambda **sample: answers[int(sample["solution_str"])])(batch, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.5, 0.0]
    extra = result["reward_extra_info"]
    assert list(extra) == ["acc", "pred", "note"]
    assert extra["acc"][0] == 1.0
    assert math.isnan(extra["acc"][1])
    assert math.isnan(extra["acc"][2])
    assert extra["pred"] == ["x", None, None]
    assert extra["note"] == [None, None, "n"]
    assert result["metrics"] == {"reward/num_errors": 0, "reward/num_timeouts": 0}


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(), st.text("ab 1"))),
        max_size=6,
    )
)
def test_collected_fields_always_have_one_entry_a_row(rows):
    collected = collect_extra(rows)
    assert all(len(values) == len(rows) for values in collected.values())
    for name, values in collected.items():
        assert [value for row, value in zip(rows, values) if name in row] == [
            row[name] for row in rows if name in row
        ]


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0)]
)
def test_every_numeric_type_is_a_score(value):
    assert manager(lambda **_: value)(make_batch(["a"])).sum() == 1.0
    assert manager(lambda **_: {"score": value})(make_batch(["a"])).sum() == 1.0


def failing(kind):
    values = {
        "nan": math.nan,
        "inf": math.inf,
        "text": "1.0",
        "none": None,
        "no score": {"reward": 1.0},
        "huge": 10**400,
        "overflows": -1e38,
        "nan inside": {"score": math.nan},
        "two": torch.ones(2),
        "complex": 1j,
        "unwritable": 10**5000,
    }

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if solution_str != "bad":
            return 1.0
        if kind == "raises":
            raise KeyError("the key")
        if kind == "exits":
            sys.exit(3)
        if kind == "sleeps":
            time.sleep(1000)
        return values[kind]

    async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "bad" and kind == "sleeps":
            await asyncio.sleep(1000)
        if solution_str == "bad" and kind == "cancels":
            raise asyncio.CancelledError
        if solution_str == "bad" and kind == "blocks":
            time.sleep(1000)
        return compute_score(data_source, solution_str, ground_truth, extra_info)

    return compute_score, compute_score_async


WRONG_VALUES = [
    "nan",
    "inf",
    "text",
    "none",
    "no score",
    "huge",
    "overflows",
    "nan inside",
    "two",
    "complex",
    "unwritable",
]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [*WRONG_VALUES, "raises", "exits", "sleeps"])
def test_policies_for_a_call_without_a_score(kind, is_async):
    function = failing(kind)[is_async]
    batch = make_batch(["ok", "bad", "ok"], prompts=["first?", "second?", "third?"])
    late = kind == "sleeps"
    timeout_s = 0.5 if late else 60.0
    with pytest.raises(RewardError) as caught:
        manager(function, timeout_s=timeout_s)(batch)
    for part in ("response 1 of the batch", "data_source 'toy'", "second?", "'bad'", "on_error"):
        assert part in str(caught.value)

    if kind == "raises":
        assert "KeyError: 'the key'" in str(caught.value)
        assert "in compute_score" in str(caught.value)
        assert isinstance(caught.value.__cause__, KeyError)

    for policy, dropped in (("zero", []), ("drop", [1])):
        result = manager(function, timeout_s=timeout_s, on_error=policy)(batch, return_dict=True)
        assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0, 1.0]
        assert result["dropped"] == dropped
        assert result["metrics"] == {
            "reward/num_errors": int(not late),
            "reward/num_timeouts": int(late),
        }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (re.match("a", "a"), "is of type Match and cannot be sent to another process"),
        (10**400, "is a whole number of 1329 bits, too large for a float"),
        (10**5000, "is a whole number of 16610 bits, too large for a float"),
        (["x", 10**5000], "is of type list and cannot be written as text"),
    ],
    # pytest would also write the values
    ids=["unsendable", "large", "unwritable", "unwritable inside"],
)
def test_a_field_that_no_batch_can_carry_is_a_failed_call(value, message):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0, "note": value if solution_str == "bad" else "fine"}

    batch = make_batch(["ok", "bad"])
    with pytest.raises(
        RewardError, match=rf"failed on response 1 of the batch .*its field 'note' {message}"
    ):
        manager(compute_score)(batch)
    result = manager(compute_score, on_error="drop")(batch, return_dict=True)
    assert (result["dropped"], result["metrics"]["reward/num_errors"]) == ([1], 1)
    assert result["reward_extra_info"] == {"note": ["fine", None]}


def test_a_field_of_a_class_in_the_functions_file_is_unknown_to_other_ranks(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "class Note: pass\ndef compute_score(**sample): return {'score': 1.0, 'note': Note()}\n"
    )
    with pytest.raises(
        RewardError,
        match=r"'note' is of type Note and cannot be sent to another process .*Return numbers",
    ):
        manager(load_custom_reward(str(path)))(make_batch(["a"]))


def test_fields_of_numbers_texts_lists_and_arrays_are_kept():
    fields = {
        "n": 10**300,
        "t": "x",
        "l": [1, {"a": None}],
        "array": np.ones(2),
        "tensor": torch.ones(2),
        "set": {1},
    }
    result = manager(lambda **_: {"score": 1.0, **fields})(make_batch(["a"]), return_dict=True)
    assert {name: values[0] for name, values in result["reward_extra_info"].items()} == fields


@pytest.mark.parametrize(("kind", "errors", "timeouts"), [("cancels", 1, 0), ("blocks", 0, None)])
def test_coroutines_that_cancel_themselves_or_block_the_loop(kind, errors, timeouts, monkeypatch):
    monkeypatch.setattr("verl.rewards.coroutines.CANCEL_GRACE_S", 0.2)
    scorer = manager(failing(kind)[1], timeout_s=2.0, on_error="zero")
    result = scorer(make_batch(["ok", "bad", "ok"]), return_dict=True)
    assert result["reward_tensor"][0].sum() == 1.0
    assert result["reward_tensor"][1].sum() == 0.0
    assert result["metrics"]["reward/num_errors"] == errors
    if kind == "blocks":
        # The code after the blocking call never ran; the next batch has its own loop.
        assert result["metrics"]["reward/num_timeouts"] == 2
    assert scorer(make_batch(["ok"] * 3)).sum() == 3.0


def test_the_loop_of_a_coroutine_that_blocks_it_ends(monkeypatch):
    monkeypatch.setattr("verl.rewards.coroutines.CANCEL_GRACE_S", 0.2)
    threads = []

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        threads.append(threading.current_thread())
        while True:
            pass

    scorer = manager(compute_score, timeout_s=0.2, on_error="zero")
    result = scorer(make_batch(["a"] * 3), return_dict=True)
    assert result["metrics"]["reward/num_timeouts"] == 3
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_stop_does_not_call_the_function_for_the_rest_of_the_batch():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        calls.append(solution_str)
        raise ValueError("no")

    with pytest.raises(RewardError, match="response 0 of the batch"):
        manager(compute_score)(make_batch(["a"] * 50))
    assert len(calls) == 1


def test_plain_functions_are_called_one_at_a_time_and_in_order():
    active = []
    order = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        active.append(1)
        assert len(active) == 1
        order.append(solution_str)
        time.sleep(0.001)
        active.pop()
        return 0.0

    manager(compute_score)(make_batch([str(i) for i in range(30)]))
    assert order == [str(i) for i in range(30)]


def test_a_batch_of_hanging_calls_ends_after_a_few_time_outs_not_one_a_sample():
    release = threading.Event()

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        release.wait(600)
        return 1.0

    began = time.monotonic()
    result = manager(compute_score, timeout_s=0.1, on_error="zero")(
        make_batch(["a"] * 250), return_dict=True
    )
    elapsed = time.monotonic() - began
    release.set()  # late answers change nothing
    assert result["metrics"]["reward/num_timeouts"] == 250
    assert result["reward_tensor"].sum() == 0
    assert elapsed < 20, "250 samples in turn would take 25 s, and 12 time-outs 1.2 s"


def test_too_many_hanging_calls_are_an_error_in_the_end(monkeypatch):
    monkeypatch.setattr("verl.rewards.calls.MAX_HANGING", 3)
    release = threading.Event()
    scorer = manager(lambda **_: release.wait(60) or 0.0, timeout_s=0.05, on_error="zero")
    with pytest.raises(RewardError, match="still hang"):
        scorer(make_batch(["a"] * 8))
    release.set()


def test_coroutines_run_concurrently_in_one_persistent_loop():
    loops = set()
    waiting = []
    all_wait = asyncio.Event()

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        loops.add(asyncio.get_running_loop())
        waiting.append(1)
        if len(waiting) == 40:
            all_wait.set()
        await all_wait.wait()
        return 1.0

    scorer = manager(compute_score)
    assert scorer(make_batch(["a"] * 40)).sum() == 40
    assert scorer(make_batch(["a"] * 40)).sum() == 40
    assert len(loops) == 1


def test_a_function_that_uses_signals_is_called_in_the_main_thread(tmp_path):
    body = """
        import importlib
        {how}
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
            except {caught}:
                return 0.0
            return 1.0
    """
    # The first ignores errors outside the main thread; the second hides the import from us, but
    # raises.
    ways = [
        ("import signal", "ValueError"),
        ("signal = importlib.import_module('signal')", "KeyError"),
    ]

    for number, (how, caught) in enumerate(ways):
        path = tmp_path / f"reward{number}.py"
        path.write_text(textwrap.dedent(body.format(how=how, caught=caught)))
        assert manager(load_custom_reward(str(path)))(make_batch(["a", "b"])).sum() == 2


def test_a_hanging_call_does_not_block_process_exit():
    done = run_code(
        """
        import time
        from tests.rewards.batches import CharTokenizer, make_batch
        from verl.rewards.manager import NaiveRewardManager
        manager = NaiveRewardManager(
            CharTokenizer(), 0, lambda **_: time.sleep(1000), timeout_s=0.2, on_error="zero"
        )
        print(manager(make_batch(["a", "b"])).sum().item())
        """
    )
    assert (done.returncode, done.stdout) == (0, "0.0\n"), done.stderr


def test_examples_are_printed_per_data_source(caplog):
    scorer = NaiveRewardManager(CharTokenizer(), 1, by_length)
    with caplog.at_level("INFO", logger="verl"):
        scorer(
            make_batch(
                ["one", "two", "three"], ["g"] * 3, ["s", "s", "t"], prompts=["p?", "q?", "r?"]
            )
        )
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert text.count("Example of") == 2
    assert all(
        part in text for part in ("p?", "r?", "[response] one", "[response] three", "[score] 5.0")
    )
    assert "two" not in text


def test_a_response_without_a_token_is_an_error():
    batch = make_batch(["a", "b"])
    batch.batch["attention_mask"][1, -batch.batch["responses"].shape[1] :] = 0
    with pytest.raises(RewardError, match="row 1 has no token"):
        manager(by_length)(batch)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="on_error"):
        manager(on_error="ignore")
    with pytest.raises(ConfigError, match="timeout_s"):
        manager(timeout_s=0)
    assert manager(by_length, timeout_s=None)(make_batch(["abc"])).sum() == 3


def test_the_overhead_of_a_trivial_function_is_small():
    """Expect 20-30 us of CPU time a sample, without the tokenizer; independent of the load."""
    scorer = manager(lambda **_: 1.0)
    batch = make_batch(["a"] * 1000)
    samples = scorer.read(batch)

    def seconds() -> float:
        began = time.process_time()
        scorer.score(samples, batch)
        return time.process_time() - began

    assert min(seconds() for _ in range(5)) < 1000 * 200e-6
