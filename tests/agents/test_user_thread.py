"""Calls of users' functions: deadlines, crashes, and event loops that stay free."""

import asyncio
import threading
import time
from functools import partial

import pytest

from verl.agents.tools.threads import WatchedLoop
from verl.agents.user_thread import UserThread
from verl.utils.deadline import time_left
from verl.utils.errors import MissingDependencyError


@pytest.fixture
def thread():
    made = UserThread("test")
    yield made
    made.stop()


def sleep_blocking(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


async def sleep_in_coroutine(seconds: float) -> str:
    time.sleep(seconds)  # blocks the loop by mistake, which must not affect the caller
    return "slept"


async def longest_pause(stop: asyncio.Event) -> float:
    """Return the longest time in which the running event loop did nothing."""
    longest = 0.0
    while not stop.is_set():
        begin = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - begin)
    return longest


@pytest.mark.parametrize("function", [sleep_blocking, sleep_in_coroutine])
def test_blocking_code_does_not_block_the_callers_loop(thread, function):
    async def main():
        stop = asyncio.Event()
        watch = asyncio.create_task(longest_pause(stop))
        call = await thread.call(function, 0.8, timeout_s=30)
        stop.set()
        return call, await watch

    call, pause = asyncio.run(main())
    assert (call.outcome, call.value) == ("ok", "slept")
    assert pause < 0.7


@pytest.mark.parametrize("function", [sleep_blocking, sleep_in_coroutine])
def test_a_late_call_times_out_and_later_calls_work(thread, function):
    async def main():
        late = await thread.call(function, 30, timeout_s=0.1)
        return late, await thread.call(sleep_blocking, 0, timeout_s=30)

    begin = time.monotonic()
    late, next_call = asyncio.run(main())
    assert late.outcome == "timeout"
    assert f"{function.__name__} did not answer within 0.1 s" in late.error
    assert next_call.outcome == "ok"
    assert time.monotonic() - begin < 20


async def compute_forever(computing: list[threading.Thread]) -> None:
    computing.append(threading.current_thread())
    while True:
        pass


def test_calls_that_block_their_loop_forever_are_interrupted(thread):
    """Require it: a thread that computes on would slow down the trainer for the rest of the run."""
    computing: list[threading.Thread] = []

    async def main():
        calls = []
        for timeout_s in (0.2, 0.2, 0.3):
            calls.append(thread.call(compute_forever, computing, timeout_s=timeout_s))
        late = await asyncio.gather(*calls)
        return late, await thread.call(sleep_blocking, 0, timeout_s=30)

    late, next_call = asyncio.run(main())
    assert [call.outcome for call in late] == ["timeout"] * 3
    assert next_call.outcome == "ok"
    assert len(computing) == 1, "the others waited for the loop"
    computing[0].join(20)
    assert not computing[0].is_alive()


@pytest.mark.parametrize("serial", [False, True])
def test_calls_read_their_deadline(serial):
    async def read_in_coroutine():
        return time_left()

    async def main():
        calls = []
        for timeout_s in (30, 60):
            calls.append(thread.call(time_left, timeout_s=timeout_s))
            calls.append(thread.call(read_in_coroutine, timeout_s=timeout_s))
        return [call.value for call in await asyncio.gather(*calls)]

    thread = UserThread("test", serial=serial)
    assert asyncio.run(main()) == pytest.approx([30, 30, 60, 60], abs=5)
    thread.stop()


def test_a_late_coroutine_is_cancelled(thread):
    ended = threading.Event()

    async def wait():
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    late = asyncio.run(thread.call(wait, timeout_s=0.05))
    assert late.outcome == "timeout"
    assert ended.wait(10)


def test_a_cancelled_caller_cancels_the_call(thread):
    ended = threading.Event()

    async def wait():
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    async def main():
        task = asyncio.create_task(thread.call(wait, timeout_s=60))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended.wait(10)


def test_coroutines_of_several_callers_share_one_loop(thread):
    lock = asyncio.Lock()  # an asyncio.Lock belongs to the first loop that waits for it

    async def hold():
        async with lock:
            await asyncio.sleep(0.01)
        return id(asyncio.get_running_loop())

    async def main():
        return await asyncio.gather(*[thread.call(hold, timeout_s=30) for _ in range(3)])

    loops = {call.value for _ in range(2) for call in asyncio.run(main())}
    assert len(loops) == 1


def test_plain_calls_run_concurrently_unless_serial():
    async def main(thread):
        calls = [thread.call(threading.get_ident, timeout_s=30) for _ in range(3)]
        return {call.value for call in await asyncio.gather(*calls)}

    serial = UserThread("serial", serial=True)
    assert len(asyncio.run(main(serial))) == 1

    barrier = threading.Barrier(2)
    parallel = UserThread("parallel")

    async def meet():
        calls = [parallel.call(barrier.wait, timeout=10, timeout_s=30) for _ in range(2)]
        return await asyncio.gather(*calls)

    assert [call.outcome for call in asyncio.run(meet())] == ["ok", "ok"]


def exit_program():
    raise SystemExit(3)


async def exit_in_coroutine():
    raise SystemExit(3)


async def cancel_itself():
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "fact"),
    [
        (exit_program, "exit_program raised SystemExit"),
        (exit_in_coroutine, "exit_in_coroutine raised SystemExit"),
        (cancel_itself, "cancel_itself was cancelled by its own code"),
    ],
)
def test_crash_is_an_outcome_with_its_location(thread, function, fact):
    async def main():
        crashed = await thread.call(function, timeout_s=30)
        return crashed, await thread.call(sleep_blocking, 0, timeout_s=30)

    crashed, next_call = asyncio.run(main())
    assert crashed.outcome == "crashed"
    assert fact in crashed.error
    assert ("raised" in fact) == (f"{__file__}:" in crashed.error)
    assert next_call.outcome == "ok"


def needs_a_package(size: int) -> None:
    raise MissingDependencyError("It needs the package 'x'. Install it: pip install x")


def test_an_error_of_this_package_is_a_sentence_with_the_name_of_the_function(thread):
    call = asyncio.run(thread.call(partial(needs_a_package, size=1), timeout_s=30))
    assert call.error.startswith("needs_a_package raised MissingDependencyError")
    assert call.error.endswith("Install it: pip install x.")


def test_closing_a_blocked_loop_ends_its_thread():
    """Require it: a thread that computes on would slow down the trainer for the rest of the run."""

    async def busy():
        while True:
            pass

    loop = WatchedLoop("blocked")
    loop.start(busy(), time.monotonic() + 3600)
    ends = time.monotonic() + 60
    while not loop.is_blocked:
        assert time.monotonic() < ends
        loop.check()
        time.sleep(0.05)
    loop.close()
    loop.thread.join(60)
    assert not loop.thread.is_alive()
