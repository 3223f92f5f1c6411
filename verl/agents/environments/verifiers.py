"""Environments of the `verifiers` library, which call the model themselves, through the gateway.

A taskset has the tasks and their rewards, a harness is the program that the model works in. Both
run in verifiers; every turn that it asks for is drawn and recorded here.
"""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from verl.agents.environments.base import environments
from verl.utils.errors import DataError, RolloutError
from verl.utils.imports import require

_INSTALL = "pip install 'verifiers>=0.4'"
_TASK = "task"  # in extra_info


@environments.register("verifiers")
class VerifiersEnvironment:
    """Plays rows, each of which names a task of one taskset.

    The sum of the task's rewards is the score. One object plays all episodes of a run.

    Args:
        settings: of `verifiers.v1.EnvConfig`, such as `taskset={"id": "gsm8k"}` and
            `agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}`.

    Raises:
        MissingDependencyError: verifiers is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        self._library = verifiers_library()
        self._env = self._library.load_environment(self._library.resolve_env_config(settings))
        self._unread: Iterator[Any] = iter(self._env.taskset)
        self._tasks: list[Any] = []
        self._num_playing = 0
        self._begins = asyncio.Lock()
        self._open = AsyncExitStack()

    async def play(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Play the task of a row against the model at `base_url`. Return its reward and metrics.

        Raises DataError for a row without a task, RolloutError for an episode that failed.
        """
        task = self.task(row)
        async with self._serving(), _exported(api_key) as variable:
            library = self._library
            client = library.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = library.ModelContext(model="policy", client=client)
            (slot,) = self._env.slots(task)
            episode = await self._env.run_slot(slot, context)

        traces = episode.traces
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if errors or not episode.ok:
            cause = "it is not complete"
            if errors:
                cause = f"{errors[0].type}: {errors[0].message}"
            raise RolloutError(f"The episode of task {task.data.idx} failed in verifiers: {cause}")
        if len(traces) != 1:
            raise RolloutError(
                f"Environments of verifiers must have one agent, got an episode with {len(traces)}. "
                "Train those of several agents with an environment of your own that has `roles`."
            )
        return {"reward": float(traces[0].reward), "verifiers": dict(traces[0].metrics)}

    def task(self, row: Mapping[str, Any]) -> Any:
        """Return the task whose number in the taskset is `extra_info.task`."""
        number = (row.get("extra_info") or {}).get(_TASK)
        if not isinstance(number, int) or number < 0:
            raise DataError(
                f"A row for the environment 'verifiers' needs extra_info.{_TASK}, the number of a "
                f"task, got {number!r}. `verl.agents.environments.verifiers.write_rows` writes "
                "such rows."
            )

        missing = number + 1 - len(self._tasks)
        self._tasks += islice(self._unread, max(missing, 0))
        if number >= len(self._tasks):
            raise DataError(
                f"extra_info.{_TASK}={number} is beyond the taskset, which has "
                f"{len(self._tasks)} tasks."
            )
        return self._tasks[number]

    def rows(self, num_tasks: int) -> list[dict[str, Any]]:
        """Return rows of data for the first tasks."""
        rows = []
        for number in range(num_tasks):
            prompt = self.task({"extra_info": {_TASK: number}}).data.prompt
            messages = [{"role": "user", "content": prompt or ""}]
            if isinstance(prompt, list):
                messages = [message.model_dump(exclude_none=True) for message in prompt]

            rows.append(
                {
                    "prompt": messages,
                    "data_source": "verifiers",
                    "reward_model": {"ground_truth": ""},
                    "extra_info": {_TASK: number},
                }
            )
        return rows

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Hold the environment's servers from the first episode at work to the last."""
        async with self._begins:
            if self._num_playing == 0:
                await self._open.enter_async_context(self._env.serving())
            self._num_playing += 1
        try:
            yield
        finally:
            async with self._begins:
                self._num_playing -= 1
                if self._num_playing == 0:
                    await self._open.aclose()


def verifiers_library(**_: Any) -> Any:
    """Import the library. Raises MissingDependencyError where it is not installed."""
    return require("verifiers.v1", "The environment 'verifiers'", _INSTALL)


def write_rows(path: str | Path, num_tasks: int, **settings: Any) -> None:
    """Write a file of JSON lines with the first tasks of a taskset.

    Args:
        path: of the file.
        num_tasks: rows to write.
        settings: of the environment, as for training.
    """
    rows = VerifiersEnvironment(**settings).rows(num_tasks)
    lines = [json.dumps(row) for row in rows]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


@asynccontextmanager
async def _exported(key: str) -> AsyncIterator[str]:
    """Put a key into the environment, where verifiers reads keys. Give the variable's name."""
    name = f"VERL_GATEWAY_KEY_{secrets.token_hex(8)}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]
