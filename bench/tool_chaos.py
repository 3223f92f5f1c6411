"""Have one tool call in five do harm, over many trajectories at once, and print the outcomes.

    python bench/tool_chaos.py --trajectories 1000 --timeout-s 2

A call hangs (asleep, busy, a coroutine that blocks its loop, C code that keeps the interpreter's
lock), raises, ends its process, floods or is late. All trajectories must end, each call must have a
result within its deadline and GRACE_S, and threads and memory of the trainer must stay flat.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil

from verl.agents.formats.base import ToolCall
from verl.agents.tools import BaseTool, ToolResult, ToolSet
from verl.agents.tools.processes import GRACE_S, NUM_PROCESSES
from verl.utils.logging import logger

FAULT_SHARE = 0.2
TURNS = 4
SLACK_S = 1.0  # for a busy machine
HARMS = {
    "await": "waits for an hour",
    "sleep": "plain method that sleeps for an hour",
    "busy": "loop without end",
    "block": "coroutine that blocks its loop for an hour",
    "stuck": "C code that keeps the interpreter's lock",
    "raise": "exception",
    "exit": "SystemExit",
    "flood": "100 MB of text",
    "late": "answers after its deadline",
    "_exit": "os._exit",
    "kill": "SIGKILL",
}


class Coroutine(BaseTool):
    """Answers after a few milliseconds, or does the harm that its argument names."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        harm = parameters["harm"]
        if harm == "await":
            await asyncio.sleep(3600)
        elif harm == "late":
            await asyncio.sleep(1.5 * self.config["timeout_s"])
        elif harm == "block":
            time.sleep(3600)
        await asyncio.sleep(0.005)
        return do(harm)


class Plain(Coroutine):
    """The same as a plain method, which runs in a thread."""

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if parameters["harm"] == "sleep":
            time.sleep(3600)
        time.sleep(0.005)
        return do(parameters["harm"])


def do(harm: str) -> Any:
    """Do the harm that needs no particular place."""
    if harm == "busy":
        while True:
            pass
    elif harm == "stuck":
        re.match(r"(a+)+$", "a" * 40 + "b")
    elif harm == "raise":
        raise KeyError("no such thing")
    elif harm == "exit":
        raise SystemExit(3)
    elif harm == "flood":
        return "x" * 100_000_000
    elif harm == "_exit":
        os._exit(7)
    elif harm == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def write_config(folder: str, timeout_s: float) -> Path:
    """Write the tool configuration: both tools, in helper processes."""
    tools = []
    for class_name in ("Coroutine", "Plain"):
        parameters = {"type": "object", "properties": {"harm": {"type": "string"}}}
        function = {"name": class_name, "description": "A tool.", "parameters": parameters}
        tools.append(
            {
                "class_name": f"{Path(__file__).resolve()}:{class_name}",
                "config": {"timeout_s": timeout_s},
                "tool_schema": {"type": "function", "function": function},
            }
        )
    path = Path(folder) / "tools.yaml"
    path.write_text(json.dumps({"tools": tools}))
    return path


def choose(row: int, turn: int) -> ToolCall:
    """Return the call of a turn, the same in every run."""
    draw = random.Random(1000 * row + turn)
    harm = draw.choice(list(HARMS)) if draw.random() < FAULT_SHARE else "none"
    name = "Plain" if harm == "sleep" else draw.choice(["Coroutine", "Plain"])
    if harm in ("await", "block", "late"):
        name = "Coroutine"
    return ToolCall(name=name, arguments={"harm": harm})


async def run(tools: ToolSet, trajectories: int, at_once: int) -> list[tuple[str, ToolResult]]:
    """Run all trajectories and return (harm, result) of each call."""
    slots = asyncio.Semaphore(at_once)
    results: list[tuple[str, ToolResult]] = []

    async def trajectory(row: int) -> None:
        async with slots:
            session = await tools.open(f"row {row}", row=row)
            try:
                for turn in range(TURNS):
                    call = choose(row, turn)
                    (result,) = await session.call([call], turn=turn)
                    assert call.arguments is not None
                    results.append((call.arguments["harm"], result))
            finally:
                await session.finish()

    await asyncio.gather(*(trajectory(row) for row in range(trajectories)))
    return results


def report(results: list[tuple[str, ToolResult]], limit_s: float) -> None:
    """Print a line for each kind of harm."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    longest_s: dict[str, float] = defaultdict(float)
    for harm, result in results:
        outcomes[harm][result.outcome] += 1
        longest_s[harm] = max(longest_s[harm], result.seconds)

    print(f"{'call':44} {'count':>6} {'longest s':>10}  outcomes")
    for harm in ("none", *HARMS):
        counts = ", ".join(f"{kind} {count}" for kind, count in outcomes[harm].most_common())
        total = sum(outcomes[harm].values())
        print(f"{HARMS.get(harm, 'harmless'):44} {total:6} {longest_s[harm]:10.2f}  {counts}")
    over = sum(1 for _, result in results if result.seconds > limit_s)
    print(f"{len(results)} calls; over deadline, grace and slack ({limit_s:g} s): {over}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--timeout-s", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=NUM_PROCESSES)
    arguments = parser.parse_args()
    logger.setLevel("ERROR")

    me = psutil.Process()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(folder, arguments.timeout_s)
        tools = ToolSet.from_config(path, num_processes=arguments.processes)
        asyncio.run(run(tools, 8, 8))  # imports of the first calls
        threads = threading.active_count()
        memory = me.memory_info().rss

        results = asyncio.run(run(tools, arguments.trajectories, arguments.at_once))
        took_s = time.monotonic() - began
        report(results, arguments.timeout_s + GRACE_S + SLACK_S)
        grown_mib = (me.memory_info().rss - memory) / 1024**2
        print(f"trajectories: {arguments.trajectories} in {took_s:.0f} s")
        print(f"threads of the trainer: {threads} before, {threading.active_count()} after")
        print(f"memory of the trainer: {grown_mib:+.1f} MiB")
        print(f"processes at the end: {len(me.children(recursive=True))}")
        tools.close()
        print(f"processes after close: {len(me.children(recursive=True))}")


if __name__ == "__main__":
    main()
