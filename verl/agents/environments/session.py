"""One episode in an environment: deadlines, counted outcomes, and a close in every case."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

from verl.agents.environments.base import Observation, name_of
from verl.agents.user_thread import UserCall, UserSession, UserThread, flag_of, is_finite_number
from verl.utils.errors import RolloutError
from verl.utils.json_text import whole_characters
from verl.utils.signatures import missing_of


class EnvironmentSession(UserSession):
    """Drives an environment for one trajectory. As `async with`, `close` is always called.

    All calls of the episode run in one thread of its own, so an environment may hold objects that
    belong to a thread or to an event loop.

    Args:
        make: makes the environment, an object with reset, step and close as coroutines or plain
            functions. Called at `reset`, in the same thread: a constructor may block as well.
        timeout_s: deadline of each call, in seconds.
    """

    def __init__(self, make: Callable[[], Any], timeout_s: float) -> None:
        super().__init__(UserThread("environment", serial=True), timeout_s)
        self.environment: Any = None
        self.done = False
        self._make = make
        self._is_closed = False

    async def __aenter__(self) -> "EnvironmentSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def reset(self, /, **row: Any) -> Observation:
        """Begin the episode and return its opening messages.

        Args:
            row: fields of the row; `reset` gets those that it takes.

        Raises:
            RolloutError: the environment returned something other than an Observation.
        """
        made = await self._call(self._make)
        if made.outcome != "ok":
            return self._failed(made)
        self.environment = made.value

        missing = missing_of(self.environment.reset, row)
        if missing:
            error = _describe_missing(name_of(self.environment), missing, row)
            self.outcomes["crashed"] += 1
            self.failure = UserCall(outcome="crashed", error=error)
            return self._failed(self.failure)
        return await self._observe("reset", **row)

    async def step(self, action: str) -> Observation:
        """Apply the model's text and return the answer.

        After a call that failed the episode is done, with reward 0 and no messages; `info` holds
        "outcome" ("timeout" or "crashed") and "error".

        Raises:
            RolloutError: the episode is over, or the environment returned something other than an
                Observation.
        """
        if self.done:
            raise RolloutError(
                f"The episode in {name_of(self.environment)} is over. Begin another one with a "
                "session of its own."
            )
        return await self._observe("step", action)

    async def close(self) -> None:
        """Close the environment, once, also after a failure or a cancelled episode."""
        if self._is_closed:
            return
        self._is_closed = True
        close = getattr(self.environment, "close", None)
        try:
            if close is not None:
                await self._call_last(close)
        finally:
            self._thread.stop()

    async def _observe(self, method: str, /, *args: Any, **kwargs: Any) -> Observation:
        call = await self._call(getattr(self.environment, method), *args, **kwargs)
        if call.outcome != "ok":
            return self._failed(call)
        observation = checked(call.value, f"{name_of(self.environment)}.{method}")
        self.done = observation.done
        return observation

    def _failed(self, call: UserCall) -> Observation:
        self.done = True
        return Observation([], done=True, info=call.facts)


def _describe_missing(environment: str, missing: Sequence[str], row: Mapping[str, Any]) -> str:
    """Say which fields `reset` asks for that the row lacks, and where they may be."""
    name = missing[0]
    fields = ", ".join(sorted(row))
    way_out = "Add it to the data, or give the parameter a default."

    extra = row.get("extra_info")
    if isinstance(extra, Mapping) and name in extra:
        way_out = f"extra_info holds it: let reset take extra_info, and read extra_info['{name}']."
    return (
        f"{environment}.reset asks for '{name}', which is no field of the row. Its fields are: "
        f"{fields}. {way_out}"
    )


def checked(value: Any, where: str) -> Observation:
    """Return the Observation that a method gave, with copies of its messages.

    Raises RolloutError for anything else.
    """
    if not isinstance(value, Observation):
        raise RolloutError(
            f"{where} must return a verl.agents.environments.Observation, got "
            f"{type(value).__name__}. A class that returns gym's values sets verl_adapter = 'gym'; "
            "environment.name=openenv and verifiers are adapters of these libraries."
        )

    for field, kind in (("messages", Sequence), ("info", Mapping), ("rewards", Mapping)):
        given = getattr(value, field)
        if not isinstance(given, kind) or isinstance(given, str):
            name = "list" if kind is Sequence else "dict"
            raise RolloutError(
                f"{where} must return an Observation with a {name} as {field}, got "
                f"{type(given).__name__}."
            )

    messages = [_checked_message(message, where) for message in value.messages]
    for reward in (value.reward, *value.rewards.values()):
        if not is_finite_number(reward):
            raise RolloutError(f"{where} must return a finite reward, got {reward!r}.")
    done = flag_of(value.done)
    if done is None:
        raise RolloutError(
            f"{where} must return True or False as done, got {value.done!r}. The fields of an "
            "Observation are, in this order, messages, reward, done and info."
        )
    observation = copy(value)  # the environment may change or return its own again
    observation.messages = messages
    observation.reward = float(value.reward)
    observation.done = done
    return observation


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    """Return a copy of a message of text. Raises RolloutError for another one."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RolloutError(
            f"{where} must return messages such as {{'role': 'user', 'content': 'Hi'}}, got "
            f"{str(message)[:80]!r}."
        )

    content = message.get("content")
    if isinstance(content, str):
        return {**deepcopy(message), "content": whole_characters(content)}
    if not isinstance(content, list) and not message.get("tool_calls"):
        raise RolloutError(
            f"{where} must return messages with a text as content, got "
            f"{str(message)[:80]!r}. The model would read an empty message."
        )

    for part in content or ():
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RolloutError(
                f"{where} must return messages of text alone, got the part {str(part)[:80]!r}. "
                "Write the text as the content. Images come from prompts and from tools of "
                "tool_agent."
            )
    return deepcopy(message)
