"""The manager prime, and reward functions in processes of their own."""

import os
import time

import psutil
import pytest

from tests.launches import run_code
from tests.rewards.batches import CharTokenizer, make_batch
from verl.rewards.custom import load_custom_reward
from verl.rewards.helper import HelperTimeout
from verl.rewards.managers import (
    PrimeRewardManager,
)
from verl.utils.errors import ConfigError, RewardError

SIGNALS = """
import signal

def with_signals(data_source, solution_str, ground_truth, extra_info=None):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 1.0
"""


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
