"""A rank ends with the agent that launched it."""

import os
import subprocess
import sys
import time
from typing import IO

import psutil
import pytest

AGENT = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(rank.pid, flush=True)
time.sleep(60)
"""
# The second one cannot react to a signal: its main thread waits in C, as in a rendezvous.
LISTENS = "end_with_launcher(); print('ready', flush=True); time.sleep(60)"
EXITS = "signal.signal(15, lambda *_: sys.exit(143)); launcher._POLL_S = 60.0; " + LISTENS
DEAF = "signal.signal(15, lambda *_: None); launcher._GRACE_S = 0.5; " + LISTENS
IMPORTS = "import signal, sys, time; from verl.utils import launcher; "
IMPORTS += "from verl.utils.launcher import end_with_launcher; "


@pytest.mark.parametrize("program", [LISTENS, EXITS, DEAF], ids=["signal", "exit", "thread"])
def test_a_rank_ends_when_its_agent_is_killed(program):
    rank, errors = killed_agent_of(program)

    gives_up_at = time.monotonic() + 30
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > gives_up_at:
            rank.kill()
            pytest.fail("the rank outlives its agent")
        time.sleep(0.05)
    if program != LISTENS:  # the kernel ends LISTENS at once
        assert errors.read().count("The launcher (torchrun) of these ranks is gone") == 1
    errors.close()


def killed_agent_of(program: str) -> tuple[psutil.Process, IO[str]]:
    """Start a rank under an agent, and kill the agent. Returns the rank and its stderr."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, IMPORTS + program],
        env=os.environ | {"TORCHELASTIC_RUN_ID": "test", "LOCAL_RANK": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    assert agent.stderr is not None
    rank = psutil.Process(int(agent.stdout.readline()))
    assert agent.stdout.readline() == "ready\n"
    agent.kill()
    agent.wait()
    return rank, agent.stderr
