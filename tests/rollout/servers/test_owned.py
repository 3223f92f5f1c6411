"""The process that keeps a server ends all of its processes."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from verl.rollout.servers.owned import _KEEPER
from verl.rollout.servers.sglang import SGLangServer

# A server with a worker of its own.
SERVER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(worker.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("ends", ["server", "keeper's owner"])
def test_no_worker_outlives_its_server(ends: str):
    command = [sys.executable, "-c", _KEEPER, sys.executable, "-c", SERVER]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    worker = psutil.Process(int(keeper.stdout.readline()))

    if ends == "server":
        os.kill(worker.ppid(), signal.SIGKILL)
    else:
        keeper.stdin.close()
    keeper.wait(timeout=60)
    gone, _ = psutil.wait_procs([worker], timeout=60)
    keeper.stdout.close()
    assert gone


@pytest.mark.parametrize("name", ["enable_deterministic_inference", "skip_server_warmup"])
def test_a_user_can_take_flags_of_sglang_back(name):
    flag = "--" + name.replace("_", "-")
    assert flag in SGLangServer.command("python", "M", 8000)
    assert flag not in SGLangServer.command("python", "M", 8000, **{name: False})
