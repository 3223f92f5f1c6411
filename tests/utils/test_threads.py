"""Event loops in threads of their own."""

import asyncio
import threading
import time

import pytest

from verl.utils.threads import LoopThread


async def compute_forever():
    while True:
        pass


def test_an_abandoned_loop_ends_although_a_coroutine_blocks_it():
    loop = LoopThread("test")
    waiting = loop.submit(asyncio.sleep(600))
    loop.submit(compute_forever())
    assert not asyncio.run(loop.answers(0.1))

    loop.abandon()
    loop.thread.join(10)
    assert not loop.thread.is_alive()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError):
        loop.submit(asyncio.sleep(0))


def test_a_loop_that_ends_in_the_meantime_does_not_answer():
    loop = LoopThread("test")

    blocks = threading.Event()

    async def block():
        blocks.set()
        time.sleep(0.5)

    async def ask():
        loop.submit(block())
        assert blocks.wait(10)
        asking = asyncio.create_task(loop.answers(30))
        await asyncio.sleep(0.1)
        loop.close()
        return await asking

    assert not asyncio.run(ask())


def test_a_loop_goes_on_after_a_callback_that_raises():
    loop = LoopThread("test")
    loop.loop.call_soon_threadsafe(exit)
    time.sleep(0.05)
    assert loop.call(lambda: 3) == 3
    loop.close()
    loop.thread.join(10)
    assert not loop.thread.is_alive()
