"""The other managers, the policy retry, and functions that fail and hang among a thousand
samples."""

import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from tests.launches import run_code
from tests.rewards.batches import CharTokenizer, make_batch
from tests.rewards.plain_functions import fails_or_sleeps
from verl.rewards.calls import Caller
from verl.rewards.custom import load_custom_reward
from verl.rewards.helper import HelperTimeout
from verl.rewards.manager import NaiveRewardManager
from verl.rewards.managers import (
    BatchRewardManager,
    DAPORewardManager,
    PrimeRewardManager,
    get_reward_manager_cls,
    register_reward_manager,
    reward_managers,
)
from verl.rewards.processes import ProcessFunction
from verl.rewards.results import call_reward, checked_result
from verl.utils.errors import ConfigError, RewardError

FILE = """
import asyncio, os, sys, time
from verl.rewards.helper import HelperTimeout  # a call that is late, on every machine

calls = []

def length(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    calls.append(solution_str)
    return {"score": len(solution_str) + bonus, "pid": os.getpid(), "call": len(calls)}

async def slowly(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return len(solution_str)

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

def moody(data_source, solution_str, ground_truth, extra_info=None):
    print("a print must not get between the answers")
    if solution_str == "raises":
        raise KeyError("the key")
    if solution_str == "odd":
        raise Odd(1, 2)
    if solution_str == "exits":
        sys.exit(3)
    if solution_str == "dies":
        os._exit(7)
    if solution_str == "hangs":
        while True:
            pass
    if solution_str == "sleeps":
        time.sleep(10**6)
    return 1.0

def one_in_a_hundred(data_source, solution_str, ground_truth, extra_info=None):
    number = int(solution_str)
    if number % 100 == 13:
        raise ValueError(f"unlucky {number}")
    if number % 100 == 57:
        raise HelperTimeout
    return 1.0

def hangs_at(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hangs":
        time.sleep(10**6)
    return 1.0

def whole(data_sources, solution_strs, ground_truths, extra_infos, factor=1):
    return [factor * len(text) for text in solution_strs]
"""


SIGNALS = """
import signal

def with_signals(data_source, solution_str, ground_truth, extra_info=None):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 1.0
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(FILE)
    return str(path)


def test_all_four_are_registered_and_a_user_may_add_one():
    for name, kind in {
        "naive": NaiveRewardManager,
        "batch": BatchRewardManager,
        "prime": PrimeRewardManager,
    }.items():
        assert get_reward_manager_cls(name) is kind
    assert get_reward_manager_cls("dapo") is DAPORewardManager

    @register_reward_manager("test_only")
    class Own(NaiveRewardManager):
        pass

    assert reward_managers.get("test_only") is Own


# ---------------------------------------------------------------- prime


def test_prime_reuses_its_processes(reward_file):
    function = load_custom_reward(reward_file, "length", {"bonus": 10})
    manager = PrimeRewardManager(CharTokenizer(), 0, function, num_processes=2)
    result = manager(make_batch(["a" * n for n in range(1, 21)]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [float(n + 10) for n in range(1, 21)]
    pids = result["reward_extra_info"]["pid"]
    assert 1 <= len(set(pids)) <= 2
    assert max(result["reward_extra_info"]["call"]) >= 10, "a process serves many samples"
    assert manager(make_batch(["b"])).sum() == 11


def test_prime_takes_coroutines_and_signals(reward_file, tmp_path):
    (tmp_path / "signals.py").write_text(SIGNALS)
    for file, name, total in (
        (reward_file, "slowly", 3.0),
        (str(tmp_path / "signals.py"), "with_signals", 2.0),
    ):
        manager = PrimeRewardManager(
            CharTokenizer(), 0, load_custom_reward(file, name), num_processes=1
        )
        assert manager(make_batch(["aa", "b"])).sum() == total


def test_prime_without_a_function_uses_the_rules():
    manager = PrimeRewardManager(CharTokenizer(), 0, num_processes=1)
    result = manager(make_batch(["#### 4", "5"], ["4", "4"], ["gsm8k", "toy"]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0]
    assert result["reward_extra_info"]["pred"] == ["4", "5"]
    with pytest.raises(RewardError, match="^response 1 of the batch: No reward rule"):
        manager(make_batch(["4", "x"], ["4", "4"], ["toy", "mystery"]))


@pytest.mark.slow
def test_prime_survives_every_kind_of_failed_call(reward_file):
    function = load_custom_reward(reward_file, "moody")
    texts = ["raises", "odd", "exits", "dies", "hangs", "sleeps", "fine"]
    manager = PrimeRewardManager(
        CharTokenizer(), 0, function, num_processes=2, timeout_s=2.0, on_error="drop"
    )
    result = manager(make_batch(texts), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [0.0] * 6 + [1.0]
    assert result["dropped"] == [0, 1, 2, 3, 4, 5]

    assert result["metrics"] == {"reward/num_errors": 4, "reward/num_timeouts": 2}
    for text, timeout_s, message in (
        ("raises", 60.0, r"KeyError: 'the key'(?s:.)*my_rewards\.py\", line"),
        ("odd", 60.0, "Odd: 1 and 2"),
        ("dies", 60.0, "exit code 7"),
        ("hangs", 0.5, "no answer within 0.5 s"),
    ):
        strict = PrimeRewardManager(
            CharTokenizer(), 0, function, num_processes=1, timeout_s=timeout_s
        )
        with pytest.raises(RewardError, match=message):
            strict(make_batch([text]))


def test_a_function_that_cannot_be_sent_is_reported_when_the_manager_is_made():
    with pytest.raises(
        ConfigError, match=r"cannot be sent to another process.*custom_reward_function\.path"
    ):
        PrimeRewardManager(CharTokenizer(), 0, lambda **_: 1.0)


@pytest.mark.slow
def test_processes_end_with_the_trainer(reward_file):
    code = f"""
        from verl.rewards.custom import load_custom_reward
        function = load_custom_reward({reward_file!r}, "length").limited(60)
        print(function(data_source="s", solution_str="abc", ground_truth=None)["pid"])
    """
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


HANGING = """
import os, re, time
from pathlib import Path

def sleeps(data_source, solution_str, ground_truth, extra_info=None):
    Path(solution_str).write_text(str(os.getpid()))
    time.sleep(10**6)

def keeps_the_interpreter(data_source, solution_str, ground_truth, extra_info=None):
    Path(solution_str).write_text(str(os.getpid()))
    re.match("(a+)+$", "a" * 60 + "b")
"""


@pytest.mark.parametrize(
    ("name", "way"), [("sleeps", "exits"), ("keeps_the_interpreter", "exits"), ("sleeps", "killed")]
)
def test_a_process_in_a_hanging_call_ends_with_the_trainer(tmp_path, name, way):
    file = tmp_path / "hanging.py"
    pid_file = tmp_path / "pid"
    file.write_text(HANGING)
    code = f"""
        import os, signal, threading, time
        from pathlib import Path
        from verl.rewards.custom import load_custom_reward
        function = load_custom_reward({str(file)!r}, {name!r}).limited(600)
        call = {{"data_source": "s", "solution_str": {str(pid_file)!r}, "ground_truth": None}}
        threading.Thread(target=function, kwargs=call, daemon=True).start()
        while not (Path({str(pid_file)!r}).exists() and Path({str(pid_file)!r}).read_text()):
            time.sleep(0.01)
        if {way!r} == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    """

    done = run_code(code)
    assert done.returncode == (0 if way == "exits" else -9)
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(pid)


def test_a_function_in_a_process_may_fork_processes_of_its_own(tmp_path):
    file = tmp_path / "forks.py"
    file.write_text(
        "import multiprocessing\n"
        "def answer(queue):\n"
        "    queue.put(3.0)\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    queue = context.Queue()\n"
        "    context.Process(target=answer, args=(queue,)).start()\n"
        "    return queue.get()\n"
    )
    function = load_custom_reward(str(file)).limited(30)
    assert function(data_source="s", solution_str="a", ground_truth=None) == 3.0


def test_a_late_call_is_abandoned_even_if_it_forked_a_process_that_lives_on(tmp_path):
    file = tmp_path / "forks.py"
    file.write_text(
        "import os, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    os.fork()\n"
        "    time.sleep(1000)\n"
    )
    function = load_custom_reward(str(file)).limited(0.5)
    with pytest.raises(HelperTimeout):
        function(data_source="s", solution_str="a", ground_truth=None)


@pytest.mark.slow
def test_prime_counts_a_shorter_deadline_from_the_call_and_not_from_the_start_of_its_process(
    tmp_path,
):
    file = tmp_path / "heavy.py"
    file.write_text(
        "import time\n"
        "time.sleep(1.5)  # such as an import\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    time.sleep(float(solution_str))\n"
        "    return 1.0\n"
    )

    manager = PrimeRewardManager(
        CharTokenizer(), 0, load_custom_reward(str(file)), num_processes=1, timeout_s=600
    )
    samples = manager.read(make_batch(["0", "999"]))
    quick, late = manager.call(samples, timeout_s=1.0)
    assert quick is not None and quick.value == 1.0  # noqa: PT018
    assert late is not None and late.timed_out  # noqa: PT018


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize("kind", [NaiveRewardManager, PrimeRewardManager])
@pytest.mark.parametrize("policy", ["zero", "drop", "retry", "stop"])
def test_a_thousand_samples_of_which_one_percent_raise_and_one_percent_hang(
    reward_file, kind, policy, caplog
):
    function = load_custom_reward(reward_file, "one_in_a_hundred")
    # Late calls are simulated: a real deadline would depend on the load of the machine.
    settings = {"num_processes": 2} if kind is PrimeRewardManager else {}
    manager = kind(
        CharTokenizer(), 0, function, on_error=policy, max_retries=1, timeout_s=600, **settings
    )
    batch = make_batch([str(number) for number in range(1000)])

    if policy == "stop":
        with pytest.raises(RewardError, match=r"response (13|57) of the batch"):
            manager(batch)
        return

    with caplog.at_level("WARNING", logger="verl"):
        result = manager(batch, return_dict=True)
    bad = {number for number in range(1000) if number % 100 in (13, 57)}
    assert result["reward_tensor"].sum(-1).tolist() == [
        0.0 if row in bad else 1.0 for row in range(1000)
    ]
    assert result["dropped"] == ([] if policy == "zero" else sorted(bad))
    expected = {"reward/num_errors": 10, "reward/num_timeouts": 10}

    assert result["metrics"] == (
        expected | {"reward/num_retries": 20} if policy == "retry" else expected
    )
    assert "20 of 1000 rewards failed, 10 of them late" in caplog.text


@pytest.mark.parametrize(
    "kind", [NaiveRewardManager, pytest.param(PrimeRewardManager, marks=pytest.mark.slow)]
)
def test_only_hanging_calls_are_late(reward_file, kind):
    function = load_custom_reward(reward_file, "hangs_at")
    manager = kind(CharTokenizer(), 0, function, on_error="drop", timeout_s=2.0)
    result = manager(make_batch(["a", "hangs", "b", "c"]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert result["metrics"] == {"reward/num_errors": 0, "reward/num_timeouts": 1}


@pytest.mark.slow
def test_calls_that_hang_step_after_step_move_to_processes_and_the_run_goes_on(monkeypatch, caplog):
    monkeypatch.setattr("verl.rewards.calls.MAX_HANGING", 1)
    manager = NaiveRewardManager(
        CharTokenizer(), 0, fails_or_sleeps, timeout_s=2.0, on_error="zero"
    )
    texts = ["fine"] * 50
    texts[13] = "raises"
    texts[37] = "sleeps"
    batch = make_batch(texts)
    with caplog.at_level("WARNING", logger="verl"):
        metrics = [manager(batch, return_dict=True)["metrics"] for _ in range(3)]
    assert metrics == [{"reward/num_errors": 1, "reward/num_timeouts": 1}] * 3
    assert caplog.text.count("From now on it is called in 4 processes") == 1
    assert isinstance(manager._caller.function, ProcessFunction)


def test_retry_repeats_only_failed_calls():
    calls: list[str] = []

    def flaky(data_source, solution_str, ground_truth, extra_info):
        calls.append(solution_str)
        if solution_str == "never" or (solution_str == "later" and calls.count("later") < 3):
            raise ConnectionError("not now")
        return 1.0

    manager = NaiveRewardManager(CharTokenizer(), 0, flaky, on_error="retry", max_retries=2)
    result = manager(make_batch(["fine", "later", "never"]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 1.0, 0.0]
    assert result["dropped"] == [2]
    assert result["metrics"] == {
        "reward/num_errors": 1,
        "reward/num_timeouts": 0,
        "reward/num_retries": 4,
    }
    assert calls == ["fine", "later", "never", "later", "never", "later", "never"]


def test_several_threads_call_a_function_that_allows_it():
    together = threading.Barrier(8)

    def meets_seven_others(**_):
        together.wait(60)
        return 1.0

    meets_seven_others.max_concurrent = 8  # pyright: ignore[reportFunctionMemberAccess]
    manager = NaiveRewardManager(CharTokenizer(), 0, meets_seven_others, timeout_s=None)
    assert manager(make_batch(["a"] * 16)).sum() == 16


# ---------------------------------------------------------------- batch


def test_batch_makes_one_call_for_all(reward_file):
    function = load_custom_reward(reward_file, "whole", {"factor": 2}, for_batches=True)
    assert BatchRewardManager(CharTokenizer(), 0, function)(make_batch(["a", "bbb"])).sum(
        -1
    ).tolist() == [2.0, 6.0]
    with pytest.raises(ConfigError, match="data_source, solution_str"):
        load_custom_reward(reward_file, "whole")
    seen = []

    def fields(data_sources, solution_strs, ground_truths, extra_infos):
        seen.append((data_sources, solution_strs, ground_truths, extra_infos))
        return [{"score": 1.0, "note": text} for text in solution_strs]

    batch = make_batch(["x", "y"], ["1", "2"], ["s", "t"], [{"i": 0}, {"i": 1}])
    result = BatchRewardManager(CharTokenizer(), 0, fields)(batch, return_dict=True)
    assert seen == [(["s", "t"], ["x", "y"], ["1", "2"], [{"i": 0}, {"i": 1}])]
    assert result["reward_extra_info"] == {"note": ["x", "y"]}


def test_a_batch_function_may_be_async_and_rules_need_none():
    async def ones(data_sources, solution_strs, ground_truths, extra_infos):
        return torch.ones(len(solution_strs))

    assert BatchRewardManager(CharTokenizer(), 0, ones)(make_batch(["a"] * 3)).sum() == 3
    assert BatchRewardManager(CharTokenizer(), 0)(make_batch(["4", "5"], ["4", "4"])).sum(
        -1
    ).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("answer", [[1.0], [1.0] * 3, 1.0, None, []])
def test_a_batch_function_that_returns_another_number_of_scores_is_an_error_under_any_policy(
    answer,
):
    manager = BatchRewardManager(CharTokenizer(), 0, lambda **_: answer, on_error="zero")
    with pytest.raises(RewardError, match="one score for each of the 2 responses"):
        manager(make_batch(["a", "b"]))


def test_a_failing_batch_function_fails_for_all_and_a_bad_score_for_one():
    def raises(**_):
        raise KeyError("the key")

    result = BatchRewardManager(CharTokenizer(), 0, raises, on_error="drop")(
        make_batch(["a", "b"]), return_dict=True
    )
    assert result["dropped"] == [0, 1]
    with pytest.raises(RewardError, match="KeyError"):
        BatchRewardManager(CharTokenizer(), 0, raises)(make_batch(["a", "b"]))
    one_bad = BatchRewardManager(
        CharTokenizer(), 0, lambda **_: [1.0, float("nan")], on_error="drop"
    )
    assert one_bad(make_batch(["a", "b"]), return_dict=True)["dropped"] == [1]


# ---------------------------------------------------------------- dapo


def slow_reference(length: int, longest: int, buffer: int, factor: float) -> float:
    """Compute eq. (13) of the paper, case by case."""
    if length <= longest - buffer:
        return 0.0
    return factor * ((longest - buffer) - length) / buffer


@pytest.mark.parametrize("as_mapping", [True, False])
def test_dapo_punishes_the_last_part_of_a_response(as_mapping):
    settings = {"enable": True, "len": 4, "penalty_factor": 0.5, "log": True}
    config = settings if as_mapping else SimpleNamespace(**settings)
    manager = DAPORewardManager(
        CharTokenizer(),
        0,
        lambda **_: 1.0,
        max_resp_len=10,
        overlong_buffer_cfg=config,
        on_error="zero",
    )

    lengths = list(range(1, 11))  # including the special token at the end
    result = manager(make_batch(["a" * (length - 1) for length in lengths]), return_dict=True)
    expected = [1 + slow_reference(length, 10, 4, 0.5) for length in lengths]
    assert result["reward_tensor"].sum(-1).tolist() == pytest.approx(expected)
    assert expected[:6] == [1.0] * 6
    assert expected[-1] == 0.5
    extra = result["reward_extra_info"]
    assert extra["overlong"] == [float(length > 6) for length in lengths]

    assert extra["overlong_reward"] == pytest.approx([value - 1 for value in expected])


def test_dapo_without_a_buffer_is_naive():
    for config in (None, {"enable": False, "len": 4}):
        manager = DAPORewardManager(
            CharTokenizer(), 0, lambda **_: 1.0, max_resp_len=2, overlong_buffer_cfg=config
        )
        result = manager(make_batch(["aaaa"]), return_dict=True)
        assert result["reward_tensor"].sum() == 1
        assert result["reward_extra_info"]["acc"] == [1.0]


def test_dapo_keeps_the_score_before_the_penalty_as_acc():
    buffer = {"enable": True, "len": 2, "penalty_factor": 1.0}
    for score, acc in ((lambda **_: 1.0, 1.0), (lambda **_: {"score": 1.0, "acc": 0.5}, 0.5)):
        manager = DAPORewardManager(
            CharTokenizer(), 0, score, max_resp_len=5, overlong_buffer_cfg=buffer
        )
        result = manager(make_batch(["aaaa"]), return_dict=True)
        assert result["reward_tensor"].sum() == 0
        assert result["reward_extra_info"]["acc"] == [acc]


@pytest.mark.parametrize(("length", "longest"), [(0, 10), (11, 10), (4, None)])
def test_a_buffer_must_fit_the_response(length, longest):
    config = {"enable": True, "len": length, "penalty_factor": 1.0}
    with pytest.raises(ConfigError, match="overlong_buffer"):
        DAPORewardManager(CharTokenizer(), 0, max_resp_len=longest, overlong_buffer_cfg=config)


# ---------------------------------------------------------------- results


def test_a_result_of_the_wrong_shape_is_an_error_at_once():
    responses = torch.zeros(2, 3)
    good = {"reward_tensor": torch.ones(2, 3), "reward_extra_info": {"a": [1, 2]}}
    assert checked_result(good, responses)["reward_extra_info"] == {"a": [1, 2]}

    for change, message in (
        ({"reward_tensor": torch.ones(2)}, r"shape \(2, 3\), got torch.float32 of shape \(2,\)"),
        ({"reward_tensor": torch.ones(3, 3)}, r"got torch.float32 of shape \(3, 3\)"),
        ({"reward_tensor": torch.ones(2, 3).long()}, r"got torch.int64 of shape \(2, 3\)"),
        ({"reward_tensor": torch.ones(2, 3).bool()}, r"got torch.bool of shape \(2, 3\)"),
        ({"reward_tensor": torch.ones(2, 3).numpy()}, "got ndarray"),
        ({"reward_tensor": [1, 2]}, "got list"),
        ({"reward_tensor": torch.full((2, 3), torch.nan)}, "row 0 is nan, not a finite float32"),
        ({"reward_tensor": torch.full((2, 3), -torch.inf)}, "row 0 is inf, not a finite float32"),
        (
            {"reward_tensor": torch.tensor([[0.0, 1e15, 0.0], [-1e38, 0.0, 2.0]])},
            r"row 1 is 1e\+38, in magnitude larger than 1e\+15",
        ),
        (
            {"reward_extra_info": {"a": [1]}},
            r"'a' must have one entry for each of 2 responses, got\s+1",
        ),
        ({"reward_extra_info": {"a": 3}}, "'a' must have one entry for each of 2 .* got 3"),
        ({"reward_extra_info": {"a": "ab"}}, "'a' must have one entry for each of 2 .* got 'ab'"),
        ({"reward_extra_info": None}, "reward_extra_info must be a dict of lists .* got None"),
        ({"reward_extra_info": [1, 2]}, r"must be a dict of lists .* by name, got \[1, 2\]"),
        ({"reward_extra_info": {1: [1, 2]}}, r"by name, got \{1: \[1, 2\]\}"),
        ({"metrics": [1]}, r"metrics must be a dict of numbers by name, got \[1\]"),
        ({"metrics": {"mine": "a"}}, "metric 'mine' must be a number, got 'a' of type str"),
        ({"metrics": {"mine": torch.ones(2)}}, "metric 'mine' must be a number, .* of type Tensor"),
        ({"dropped": 1}, "dropped must be a list of rows, got 1"),
        ({"dropped": ["a"]}, "dropped rows must be among the 2 of the batch, from 0, got a"),
        ({"dropped": [0, 2]}, "dropped rows must be among the 2 of the batch, from 0, got 2"),
    ):
        with pytest.raises(RewardError, match=message):
            checked_result(good | change, responses)

    message = r"of shape \(2, 3\), got a tensor of shape \(2, 3\) without the dict"
    with pytest.raises(RewardError, match=message):
        checked_result(torch.ones(2, 3), responses)


def test_a_result_comes_in_one_form():
    result = {
        "reward_tensor": torch.ones(2, 3, dtype=torch.float64, requires_grad=True),
        "reward_extra_info": {"a": torch.tensor([0.5, 1.5]), "b": np.array([1, 2]), "c": (1, "x")},
        "metrics": {"mine/x": torch.tensor([3.0]), "mine/y": np.float32(0.5)},
        "dropped": torch.tensor([1]),
    }
    checked = checked_result(result, torch.zeros(2, 3))
    scores = checked.pop("reward_tensor")
    assert scores.dtype == torch.float32
    assert not scores.requires_grad
    assert checked == {
        "reward_extra_info": {"a": [0.5, 1.5], "b": [1, 2], "c": [1, "x"]},
        "metrics": {"mine/x": 3.0, "mine/y": 0.5},
        "dropped": [1],
    }


def test_an_error_of_a_program_s_own_reward_names_it_and_its_line():
    def own(batch, return_dict=False):
        return 1 / 0

    with pytest.raises(
        RewardError,
        match=r"The reward '.*own' \(.*test_managers.py\) raised ZeroDivisionError in line",
    ):
        call_reward(own, make_batch(["a"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1.0]}, "got 1 scores and 2 dicts"),
        ({"extra": [{}]}, "got 2 scores and 1 dicts"),
        ({"scores": ["1", "2"]}, "got scores that are no numbers"),
        ({"scores": [(1, 2), (3, 4)]}, "got 2 scores and 2 dicts"),
        (None, "got NoneType"),
    ],
    ids=["one score", "one dict", "texts", "pairs", "nothing"],
)
def test_a_manager_of_ones_own_scores_every_response(change, message):
    class Own(NaiveRewardManager):
        def score(self, samples, data):
            result = super().score(samples, data)
            return None if change is None else replace(result, **change)

    manager = Own(CharTokenizer(), 0, lambda **_: 1.0)
    with pytest.raises(RewardError, match=f"Own.score must return Scores .* {message}"):
        manager(make_batch(["one", "two"], ["1", "2"]))


def test_a_shorter_deadline_for_some_calls():
    release = threading.Event()
    caller = Caller(lambda **_: release.wait(600), 600.0)
    (outcome,) = caller([{}], timeout_s=0.1)
    release.set()
    assert outcome is not None
    assert outcome.timed_out
