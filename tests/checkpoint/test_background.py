"""Work in the background raises its error where it is awaited, also after an interrupted wait."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from verl.checkpoint.background import Background


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt also where a shell started the tests with SIGINT ignored."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_wait_loses_no_error():
    background = Background()
    may_fail = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def work() -> None:
        time.sleep(0.2)  # until the wait has begun
        signal.pthread_kill(main, signal.SIGINT)
        may_fail.wait(timeout=2)
        raise OSError("no space left")

    background.start(work)
    with pytest.raises(KeyboardInterrupt):
        background.is_done(wait=True)
    may_fail.set()
    with pytest.raises(OSError, match="no space left"):
        background.is_done(wait=True)
    assert background.is_done(wait=False), "an error is raised once"
