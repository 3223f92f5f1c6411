"""The helper processes of `verl.agents.tools.processes`, and the nursery that they are forked from.

A helper makes the tools, then answers calls.
"""

import asyncio
import pickle
import socket
import sys
import traceback
from typing import Any

from verl.agents.tools import nursery
from verl.agents.tools.homes import ordered_tools
from verl.agents.tools.host import Done, LocalHost
from verl.agents.tools.processes import pack_frame, read_frame
from verl.utils.children import end_with_parent, take_connection
from verl.utils.errors import ConfigError, describe_error, sendable


def main() -> None:
    """Fork helpers until the trainer is gone."""
    control = socket.socket(fileno=take_connection())
    nursery.serve(control, _help)


def _help(connection: socket.socket) -> None:
    """Answer calls until the trainer closes the connection, also by being killed."""
    connection.set_inheritable(False)
    end_with_parent(connection.fileno())
    try:
        asyncio.run(_serve(connection))
    except Exception:  # noqa: BLE001  (nothing above would show it)
        traceback.print_exc()


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    first = pickle.loads((await read_frame(reader))[1])
    sys.path[:] = first["path"]
    try:
        tools = await asyncio.to_thread(ordered_tools, first["entries"], first["function_path"])
        host = LocalHost(tools, in_process=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's file; the parent raises it)
        writer.write(pack_frame(0, _sendable(error)))
        await writer.drain()
        return

    writer.write(pack_frame(0, host.facts))
    tasks: dict[int, asyncio.Task[None]] = {}
    while True:
        try:
            number, body = await read_frame(reader)
        except (EOFError, OSError):
            return
        work = pickle.loads(body)
        if work is None:
            if number in tasks:
                tasks[number].cancel()
            continue
        tasks[number] = asyncio.ensure_future(_answer(host, writer, number, work))
        tasks[number].add_done_callback(lambda _, number=number: tasks.pop(number))


async def _answer(host: Any, writer: asyncio.StreamWriter, number: int, work: Any) -> None:
    """Make a call and send its outcome."""
    done = await host.perform(host, work)
    try:
        frame = pack_frame(number, (done, host.is_worn))
    except Exception as error:  # noqa: BLE001  (images of a user's class)
        text = f"Error: the answer cannot be sent from its process: {error}"
        failure = Done("error", text=work.limit.cut(text))
        frame = pack_frame(number, (failure, host.is_worn))
    writer.write(frame)


def _sendable(error: BaseException) -> BaseException:
    """Return the error, or a ConfigError with its text where it does not survive the way."""
    sent = sendable(error)
    if isinstance(sent, Exception):
        return sent
    return ConfigError(f"Making the tools raised {describe_error(error)}")
