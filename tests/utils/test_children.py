import signal
import socket
import sys

import pytest

from verl.rewards.helper import HelperDied
from verl.utils.children import describe_end, start


def test_a_process_answers_on_its_standard_input_and_prints_to_stderr(capfd):
    code = "import os; print('noise', flush=True); os.write(0, str(os.get_blocking(0)).encode())"
    default_timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(60.0)  # as a user's code may have done
    try:
        process, connection = start([sys.executable, "-I", "-S", "-c", code], {})
    finally:
        socket.setdefaulttimeout(default_timeout)

    with connection:
        assert connection.recv(100) == b"True"
        assert connection.recv(100) == b""
    assert process.wait() == 0
    assert capfd.readouterr().err == "noise\n"


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (3, "ended with exit code 3"),
        (-signal.SIGSEGV, "was ended by the signal SIGSEGV"),
        (-signal.SIGKILL, "was killed (SIGKILL); the machine may have run out of memory"),
        (-250, "was ended by the signal 250"),
    ],
)
def test_the_end_of_a_process_is_described_alike_everywhere(exit_code, text):
    assert describe_end(exit_code) == text
    assert str(HelperDied(exit_code)) == f"the process {text}"
