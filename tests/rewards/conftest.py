"""Services over HTTP, and a file of functions that work, fail, hang or end their process."""

import pytest

from tests.rewards.services import Service

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


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def serve():
    started = []

    def start(respond) -> Service:
        started.append(Service(respond))
        return started[-1]

    yield start
    for service in started:
        service.server.shutdown()
        service.server.server_close()
