"""A user's agent: a function of a file, or an external program, that talks to the gateway."""

import asyncio
import inspect
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from verl.agents.user_thread import UserThread, is_finite_number
from verl.utils.children import describe_end, kill_session
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.imports import load_extern_type
from verl.utils.json_text import parse_json

ARGUMENTS = ("base_url", "api_key", "row")
# Linux takes no longer value of an environment variable.
MAX_ROW_BYTES = 128 * 1024 - len("VERL_ROW=") - 1
_ERROR_CHARACTERS = 2000  # of a program's standard error
_KEY = "actor_rollout_ref.rollout.agent.gateway"


class AgentError(RolloutError):
    """An agent failed, or returned something other than a reward."""


class AgentTimeoutError(AgentError):
    """An agent took longer than an episode may."""


class Agent(Protocol):
    """Plays one episode against an OpenAI-compatible server. Returns its reward."""

    async def play(
        self, base_url: str, api_key: str, row: Mapping[str, Any], *, timeout_s: float
    ) -> Any:
        """Return a number, a dict with a "reward", or None where the reward function scores.

        A caller that is cancelled ends the agent, as far as it can be ended. Raises AgentError
        for an agent that fails, AgentTimeoutError for one that is late.
        """
        ...

    def close(self) -> None:
        """End what stays between episodes. A later episode starts it anew."""
        ...


def load_agent(path: str | None, name: str = "run", command: str | None = None) -> Agent:
    """Return the agent that a configuration names.

    Args:
        path: a .py file or an importable module.
        name: the function in it, `run(base_url, api_key, row)`, plain or `async`.
        command: a program with arguments, instead of a function.

    Raises ConfigError for a name that is not there, and where not exactly one agent is given.
    """
    if (path is None) == (command is None):
        given = "neither" if path is None else "both"
        raise ConfigError(f"Set one of {_KEY}.path and {_KEY}.command, got {given}.")

    if command is not None:
        return ProgramAgent(_words_of(command))
    assert path is not None
    function = load_extern_type(path, name, f"{_KEY}.path")
    return FunctionAgent(function, f"'{name}' of '{path}'")


def _words_of(command: str) -> list[str]:
    """Return the program of a command and its arguments.

    Raises ConfigError for quotes that do not close, and a program that is missing.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"{_KEY}.command must be a program with arguments, as a shell reads them, got "
            f"{command!r}: {error}. Correct its quotes."
        ) from error
    if words and shutil.which(words[0]) is None:
        raise ConfigError(
            f"{_KEY}.command must begin with a program, got '{words[0]}', which is none on the "
            "PATH and no file that can be executed. Correct its name, or give its path."
        )
    return words


class FunctionAgent:
    """A function `run(base_url, api_key, row)`.

    It runs outside of the engine's event loop, which has to answer it: coroutines in a loop of
    their own thread, a plain function in a thread of its own.
    """

    def __init__(self, function: Callable[..., Any], title: str) -> None:
        if not callable(function):
            raise ConfigError(f"The agent {title} must be a function, got {type(function)}.")
        signature = inspect.signature(function)
        try:
            signature.bind(*ARGUMENTS)
        except TypeError as error:
            raise ConfigError(
                f"The agent {title} must take ({', '.join(ARGUMENTS)}), got {signature}: {error}."
            ) from error
        self.function = function
        self._thread = UserThread("verl-agents")

    async def play(
        self, base_url: str, api_key: str, row: Mapping[str, Any], *, timeout_s: float
    ) -> Any:
        """See `Agent.play`. A plain function cannot be ended; its further requests are refused."""
        call = await self._thread.call(
            self.function, base_url, api_key, dict(row), timeout_s=timeout_s
        )
        if call.outcome == "timeout":
            raise AgentTimeoutError(call.error)
        if call.outcome != "ok":
            raise AgentError(call.error)
        return call.value

    def close(self) -> None:
        """End the thread of the function."""
        self._thread.stop()


class ProgramAgent:
    """An external program.

    Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, the row as JSON in VERL_ROW, and in
    VERL_RESULT the path of a file into which it may write its reward: a JSON number or object.
    """

    def __init__(self, command: list[str]) -> None:
        if not command:
            raise ConfigError(f"{_KEY}.command must name a program, got an empty text.")
        self.command = command

    async def play(
        self, base_url: str, api_key: str, row: Mapping[str, Any], *, timeout_s: float
    ) -> Any:
        """See `Agent.play`. The program is killed with its children."""
        text = row_as_json(row)
        if len(text.encode()) > MAX_ROW_BYTES:
            raise AgentError(
                f"The row has {len(text.encode())} bytes of JSON, and an environment variable "
                f"takes {MAX_ROW_BYTES}. Leave long columns out of the data, or use "
                f"{_KEY}.path."
            )

        with tempfile.TemporaryDirectory(prefix="verl-agent-") as folder:
            result = Path(folder) / "result.json"
            environment = {
                **os.environ,
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_KEY": api_key,
                "VERL_ROW": text,
                "VERL_RESULT": str(result),
            }
            await self._run(environment, timeout_s)
            return _result_of(result)

    async def _run(self, environment: dict[str, str], timeout_s: float) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(
                f"Cannot start the agent {self.command[0]!r}: {error.strerror}. Give the path of a "
                f"program in {_KEY}.command."
            ) from error

        try:
            _, errors = await asyncio.wait_for(process.communicate(), timeout_s)
        except asyncio.TimeoutError as error:
            raise AgentTimeoutError(
                f"The agent {self.command[0]!r} did not end within {timeout_s:g} s."
            ) from error
        finally:
            # A program that has ended may have left children.
            kill_session(process.pid)
            await process.wait()

        if process.returncode != 0:
            last_words = errors.decode(errors="replace").strip()[-_ERROR_CHARACTERS:]
            raise AgentError(
                f"The agent {self.command[0]!r} {describe_end(process.returncode)}: "
                f"{last_words or 'it wrote no error'}"
            )

    def close(self) -> None:
        """Do nothing: each episode has a program of its own."""


def read_reward(value: Any) -> tuple[float | None, dict[str, Any]]:
    """Return the reward of an agent's result, and the other entries of a dict.

    Raises AgentError for a result that is neither a finite number, a dict nor None.
    """
    extra: dict[str, Any] = {}
    if isinstance(value, Mapping):
        extra = {str(name): entry for name, entry in value.items() if name != "reward"}
        value = value.get("reward")
    if value is None:
        return None, extra

    if not is_finite_number(value):
        shown = repr(value)[:80]
        raise AgentError(
            f"The agent must return a finite number, a dict with 'reward', or None, got {shown}."
        )
    return float(value), extra


def row_as_json(row: Mapping[str, Any]) -> str:
    """Return a row of the data as JSON. Arrays become lists, other objects texts."""
    return json.dumps(dict(row), default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _result_of(file: Path) -> Any:
    if not file.exists():
        return None
    try:
        return parse_json(file.read_text())
    except ValueError as error:
        raise AgentError(f"The agent's file VERL_RESULT must be JSON: {error}.") from error
