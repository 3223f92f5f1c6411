"""Reward functions that end their process, block the interpreter, fork, change their arguments, or
return objects that raise."""

import sys
import threading
import time

import pytest

from tests.launches import run_code
from tests.rewards.batches import CharTokenizer, make_batch
from verl.rewards.calls import Caller
from verl.rewards.custom import load_custom_reward
from verl.rewards.helper import Helper, HelperTimeout
from verl.rewards.managers import BatchRewardManager, NaiveRewardManager, PrimeRewardManager
from verl.rewards.processes import ProcessFunction, pack_call
from verl.rewards.texts import cut, on_one_line
from verl.utils.errors import ConfigError, RewardError

FILE = """
import os, re, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "exits":
        os._exit(0)
    if solution_str == "loops":
        while True:
            pass
    if solution_str == "backtracks":
        re.match("(a+)+$", "a" * 60 + "b")
    if solution_str == "forks":
        os.fork()
    return float(solution_str) if solution_str.isdigit() else 0.5

async def exits_later(data_source, solution_str, ground_truth, extra_info=None):
    os._exit(0)
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "hostile.py"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize(
    "kind", [NaiveRewardManager, pytest.param(PrimeRewardManager, marks=pytest.mark.slow)]
)
def test_a_function_of_a_file_cannot_stop_the_trainer(reward_file, kind):
    texts = ["1", "exits", "loops", "backtracks", "2", "forks", "3", "4"]
    manager = kind(
        CharTokenizer(), 0, load_custom_reward(reward_file), timeout_s=2.0, on_error="drop"
    )
    before = threading.active_count()
    result = manager(make_batch(texts), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0, 0, 0, 2.0, 0.5, 3.0, 4.0]
    assert result["metrics"] == {"reward/num_errors": 1, "reward/num_timeouts": 2}
    assert threading.active_count() <= before + 2, "no thread is left behind"

    with pytest.raises(RewardError, match=r"response 0 of (?s:.)*ended with exit code 0") as caught:
        kind(CharTokenizer(), 0, load_custom_reward(reward_file))(make_batch(["exits"]))
    assert str(caught.value).count("the process that called") == 1, "nothing was raised there"


def test_a_function_that_forks_shifts_no_score(reward_file):
    function = load_custom_reward(reward_file)
    texts = [text for number in range(40) for text in ("forks", str(number))]
    scores = NaiveRewardManager(CharTokenizer(), 0, function)(make_batch(texts)).sum(-1).tolist()
    assert scores[1::2] == [float(number) for number in range(40)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("os._exit(0)", "exit code 0"),
        ("while True: pass", "no answer within 2 s"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt. Fix its file"),
    ],
)
def test_a_file_that_hangs_or_exits_at_load_is_an_error(tmp_path, monkeypatch, line, message):
    monkeypatch.setattr("verl.rewards.helper.START_TIMEOUT_S", 2.0)
    path = tmp_path / "reward.py"
    path.write_text(f"import os\n{line}\ndef compute_score(**sample): return 1.0\n")
    expected = rf"'compute_score' of '.*reward\.py'.*{message}"
    with pytest.raises((ConfigError, RewardError), match=expected):
        load_custom_reward(str(path))


def test_another_verl_in_the_current_folder_does_not_run(reward_file, tmp_path, monkeypatch):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError('not ours')")
    monkeypatch.chdir(tmp_path)
    load_custom_reward(reward_file)


def test_a_process_that_stops_reading_is_late(monkeypatch):
    code = "import os, time; os.write(0, b'1\\n'); time.sleep(1000)"
    helper = Helper([sys.executable, "-I", "-S", "-c", code], {}, name="the test")
    monkeypatch.setattr("verl.rewards.helper.START_TIMEOUT_S", 0.1)
    with pytest.raises(HelperTimeout, match=r"no answer within 0\.1 s"):
        helper.ask("x" * 2**20, timeout_s=0.1)  # more than a socket or pipe holds
    assert not helper.is_ours


COUNTING = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(LOG, "a") as log:
        log.write(solution_str + " ")
    if solution_str == "exits":
        os._exit(7)
    if solution_str == "hangs":
        while True:
            pass
    if solution_str == "raises":
        raise KeyError("odd")
    if solution_str == "interrupts":
        raise KeyboardInterrupt
    return float(solution_str)
"""


@pytest.fixture
def counting(tmp_path):
    """Return the function, and the file that records the samples it was called with."""
    path = tmp_path / "counting.py"
    log = tmp_path / "calls.txt"
    path.write_text(COUNTING.replace("LOG", repr(str(log))))
    return load_custom_reward(str(path)), log


def pack_texts(texts):
    return [pack_call(data_source="s", solution_str=text, ground_truth=None) for text in texts]


def test_an_interrupt_of_a_function_is_an_error_of_one_call(counting, capfd):
    function, _ = counting
    first, second = function.call_each(pack_texts(["interrupts", "1"]), 600.0)
    assert second.value == 1.0, "the process goes on"
    assert str(first.error) == "the function raised KeyboardInterrupt"
    assert "raise KeyboardInterrupt" in str(first.error.__cause__)
    with pytest.raises(RewardError):
        function(data_source="s", solution_str="interrupts", ground_truth=None)
    assert capfd.readouterr().err == ""


def test_each_call_of_a_message_fails_alone_and_runs_once(counting):
    function, log = counting
    texts = ["1", "raises", "2", "exits", "3", "hangs", "4"]
    calls = pack_texts(texts)
    first = function.call_each(calls, 600.0)
    assert [outcome.value for outcome in first] == [1.0, None, 2.0, None]
    assert isinstance(first[1].error, KeyError)
    assert "exit code 7" in str(first[3].error)
    second = function.call_each(calls[4:], 2.0)
    assert [outcome.value for outcome in second] == [3.0, None]
    assert second[1].timed_out
    assert [outcome.value for outcome in function.call_each(calls[6:], 600.0)] == [4.0]
    assert log.read_text().split() == texts


def test_calls_of_one_message_end_at_a_failure_if_requested(counting):
    function, log = counting
    outcomes = function.call_each(pack_texts(["1", "raises", "2"]), 600.0, stop_at_failure=True)
    assert [outcome.failed for outcome in outcomes] == [False, True]
    (outcome,) = function.call_each(pack_texts(["3"]), 600.0)
    assert outcome.value == 3.0, "the answers of the message before are read"
    assert log.read_text().split() == ["1", "raises", "3"]


@pytest.mark.parametrize("kind", [NaiveRewardManager, PrimeRewardManager])
def test_a_batch_is_sent_to_its_process_in_few_messages(counting, kind, monkeypatch):
    function, log = counting
    sizes = []
    call_each = ProcessFunction.call_each

    def counted(self, calls, timeout_s, stop_at_failure=False):
        sizes.append(len(calls))
        return call_each(self, calls, timeout_s, stop_at_failure)

    monkeypatch.setattr(ProcessFunction, "call_each", counted)
    monkeypatch.setattr("verl.rewards.threads.CHUNK_S", 60.0)
    texts = [str(number) for number in range(500)]
    texts[300] = "exits"
    batch = make_batch(texts)
    scores = kind(CharTokenizer(), 0, function, on_error="zero")(batch).sum(-1).tolist()
    assert scores == [0.0 if row == 300 else float(row) for row in range(500)]
    assert len(sizes) < 60
    assert max(sizes) > 30
    assert sorted(log.read_text().split()) == sorted(texts), "each call was made once"


def test_a_function_of_a_file_takes_positional_arguments_too(counting):
    function, _ = counting
    assert function("source", "5", None) == 5.0
    assert function("source", "6", None, extra_info={}) == 6.0


RULES = """
import os, re
from verl.rewards.registry import reward_rules

@reward_rules.register("hostile*")
def score(solution_str, ground_truth, extra_info=None):
    if solution_str == "exits":
        os._exit(0)
    if solution_str == "backtracks":
        re.match("(a+)+$", "a" * 60 + "b")
    return 1.0
"""

USE_RULES = """
    from verl.rewards import watch
    watch.LOCK_GRACE_S, watch.HEARTBEAT_S = 0.5, 0.1
    from tests.rewards.batches import CharTokenizer, make_batch
    from verl.rewards.managers import NaiveRewardManager, PrimeRewardManager
    from verl.utils.imports import load_module
    load_module({path!r})
    batch = make_batch(["a", {text!r}], ["x", "x"], ["hostile/set"] * 2)
    manager = {kind}(CharTokenizer(), 0, on_error="zero", timeout_s={timeout_s})
    print(manager(batch).sum(-1).tolist(), manager._caller.in_caller, flush=True)
"""


def run_rules(tmp_path, text, source=RULES, kind="NaiveRewardManager", timeout_s=30):
    path = tmp_path / "my_rules.py"
    path.write_text(source)
    return run_code(USE_RULES.format(path=str(path), text=text, kind=kind, timeout_s=timeout_s))


def test_a_registered_rule_cannot_exit_silently(tmp_path):
    done = run_rules(tmp_path, "exits")
    assert done.stdout == "[1.0, 0.0] False\n", done.stderr
    assert "SystemExit: os._exit(0) in the process of the trainer" in done.stderr


def test_a_registered_rule_that_blocks_the_interpreter_ends_the_run_with_its_stack(tmp_path):
    done = run_rules(tmp_path, "backtracks", timeout_s=0.5)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in score" in done.stderr


def test_a_registered_rule_that_uses_signals_runs_in_the_main_thread(tmp_path):
    done = run_rules(tmp_path, "b", source="import signal\n" + RULES)
    assert done.stdout == "[1.0, 1.0] True\n", done.stderr


def test_prime_calls_a_registered_rule_in_processes(tmp_path):
    done = run_rules(tmp_path, "exits", kind="PrimeRewardManager")
    assert done.stdout == "[1.0, 0.0] False\n", done.stderr
    assert "ended with exit code 0" in done.stderr


def test_reward_kwargs_must_reach_the_process(reward_file):
    with pytest.raises(ConfigError, match=r"reward_kwargs must be values that can be sent"):
        load_custom_reward(reward_file, reward_kwargs={"hook": lambda: None})


def test_a_python_function_cannot_exit_silently(reward_file):
    done = run_code(
        f"""
        import os
        from tests.rewards.batches import CharTokenizer, make_batch
        from verl.rewards.custom import load_custom_reward
        from verl.rewards.manager import NaiveRewardManager
        kind = lambda function: NaiveRewardManager(CharTokenizer(), 0, function, on_error="drop")
        for function in (lambda **_: os._exit(0), load_custom_reward({reward_file!r}, "exits_later")):
            print(kind(function)(make_batch(["a"]), return_dict=True)["dropped"], flush=True)
        os._exit(3)
        """
    )
    assert done.stdout == "[0]\n[0]\n", done.stderr

    assert "SystemExit: os._exit(0) in the process of the trainer" in done.stderr
    assert done.returncode == 3, "elsewhere it ends the process"


def test_a_python_function_that_blocks_the_interpreter_ends_the_run_with_its_stack():
    done = run_code(
        """
        import re
        from verl.rewards import watch
        watch.LOCK_GRACE_S, watch.HEARTBEAT_S = 0.5, 0.1
        from verl.rewards.calls import Caller
        def backtracks():
            re.match("(a+)+$", "a" * 60 + "b")
        print(Caller(backtracks, 0.5)([{}]))
        """
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in backtracks" in done.stderr


def test_a_python_loop_past_its_deadline_is_ended():
    """End the thread: otherwise it would slow down the trainer for the rest of the run."""

    def loops(**_):
        while True:
            pass

    before = set(threading.enumerate())  # other tests leave calls behind that only wait
    manager = NaiveRewardManager(CharTokenizer(), 0, loops, timeout_s=0.2, on_error="zero")
    result = manager(make_batch(["a"] * 3), return_dict=True)
    assert result["metrics"]["reward/num_timeouts"] == 3
    ends = time.monotonic() + 60
    while any(thread.name == "verl-reward" for thread in set(threading.enumerate()) - before):
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize("as_batch", [False, True])
def test_a_function_that_changes_its_arguments_changes_no_data(as_batch):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        extra_info["seen"].append(solution_str)
        ground_truth["target"] = 0
        return float(len(extra_info["seen"]))

    def whole(data_sources, solution_strs, ground_truths, extra_infos):
        return list(map(compute_score, data_sources, solution_strs, ground_truths, extra_infos))

    shared = {"seen": []}  # the samples of a prompt share one object
    batch = make_batch(["a", "b"], [{"target": 4}, {"target": 5}], extra_infos=[shared, shared])
    kind, function = (
        (BatchRewardManager, whole) if as_batch else (NaiveRewardManager, compute_score)
    )
    manager = kind(CharTokenizer(), 0, function)
    for _ in range(2):
        assert manager(batch).sum(-1).tolist() == [1.0, 1.0]
    assert shared == {"seen": []}
    truths = [entry["ground_truth"]["target"] for entry in batch.non_tensor_batch["reward_model"]]
    assert truths == [4, 5]


class Odd(float):
    """Raise in every conversion."""

    def __float__(self):
        raise KeyError("no number")


class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")


class Unlike(float):
    def __le__(self, other):
        raise KeyError("no order")

    __ge__ = __le__


def raises(error):
    raise error


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda **_: Odd(1.0), "returned Odd, which raised KeyError: 'no number'"),
        (lambda **_: Unlike(1.0), "returned Unlike, which raised KeyError: 'no order'"),
        (lambda **_: raises(Mute()), "Mute: <Mute, which __str__ cannot write: KeyError>"),
    ],
)
def test_a_value_or_error_of_a_class_that_raises_is_a_failed_call(answer, message):
    with pytest.raises(RewardError, match=message):
        NaiveRewardManager(CharTokenizer(), 0, answer)(make_batch(["a"]))
    manager = NaiveRewardManager(CharTokenizer(), 0, answer, on_error="zero")
    assert manager(make_batch(["a"]), return_dict=True)["metrics"]["reward/num_errors"] == 1


@pytest.mark.parametrize("in_file", [False, True])
def test_the_text_of_an_error_is_truncated(tmp_path, caplog, in_file):
    def compute_score(**_):
        raise ValueError("begins " + "x" * 5_000_000 + " ends")

    if in_file:
        path = tmp_path / "long.py"
        path.write_text(
            "def compute_score(**sample):\n"
            "    raise ValueError('begins ' + 'x' * 5_000_000 + ' ends')\n"
        )
        compute_score = load_custom_reward(str(path))
    with pytest.raises(RewardError, match="begins") as caught:
        NaiveRewardManager(CharTokenizer(), 0, compute_score)(make_batch(["a"]))
    assert len(str(caught.value)) < 15_000
    with caplog.at_level("WARNING", logger="verl"):
        NaiveRewardManager(CharTokenizer(), 0, compute_score, on_error="zero")(make_batch(["a"]))
    assert len(caplog.text) < 2_000


def test_failure_to_start_a_thread_is_a_named_error(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    caller = Caller(lambda: 1.0, 60.0)
    with monkeypatch.context() as patch, pytest.raises(RewardError, match="No thread could be"):
        patch.setattr(threading.Thread, "start", refuse)
        caller([{}])
    assert caller([{}])[0].value == 1.0, "a later batch is called again"


def test_each_example_is_one_truncated_line(caplog):
    manager = NaiveRewardManager(CharTokenizer(), 1, lambda **_: 1.0)
    with caplog.at_level("INFO", logger="verl"):
        manager(make_batch(["one\ntwo\x1b[2J" + "x" * 100_000], ["4\n5"], prompts=["a\nb"]))
    (record,) = caplog.records
    message = record.getMessage()
    assert len(message) < 2_000
    assert message.count("\n") == 4, "a line for each label"
    assert "[prompt] a\\nb" in message
    assert "[response] one\\ntwo\\x1b[2Jxxx" in message


def test_texts_are_truncated_in_the_middle():
    assert cut("abc", 3) == "abc"
    assert cut("a" * 10 + "b" * 10, 4) == "aa ... (16 characters cut) ... bb"
    assert on_one_line("é\t中\u202e") == "é\\t中\\u202e"
