import socket
import sys

from verl.utils.children import start


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
