"""Record the tokens that a session drew, and extend them instead of tokenizing text again."""

import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from verl.agents.engine_client import Generated
from verl.agents.formats.base import ToolSchemas
from verl.agents.gateway.errors import TOO_LONG, ApiError
from verl.agents.gateway.requests import canonical, template_message
from verl.agents.gateway.wording import Reply, Wording
from verl.data.chat import Message
from verl.rollout.trajectory import Segment, Trajectory
from verl.utils.errors import VerlError

Messages = Sequence[Message]


@dataclass(eq=False)
class _Path:
    """A trajectory while its session runs."""

    prompt_ids: Sequence[int]
    segments: list[Segment]
    messages: list[Message] = field(default_factory=list)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    def token_ids(self, num_segments: int | None = None) -> list[int]:
        """Return the prompt's ids, and those of the first segments; None: of all."""
        ids = list(self.prompt_ids)
        for segment in self.segments[:num_segments]:
            ids += segment.token_ids
        return ids


@dataclass(eq=False)
class _Recorded:
    """A reply that was recorded: a place where the conversation can go on."""

    path: _Path
    num_segments: int  # of the path, up to and with this reply
    history: Messages
    message: Message  # the reply, in the shape of chat templates
    is_extended: bool = False  # whether a later reply of the same path follows, or is being drawn


@dataclass(eq=False)
class _Session:
    name: str
    row: int
    key: str
    last_used: float
    turns: int = 0
    num_open: int = 0  # requests that are being answered
    paths: list[_Path] = field(default_factory=list)
    recorded: dict[str, list[_Recorded]] = field(default_factory=dict)  # by conversation


@dataclass(frozen=True)
class _Asked:
    """The parts of a request that its turn needs later."""

    messages: Messages
    tools: ToolSchemas
    choices: int


class Turn:
    """A request of a session between its prompt and its replies.

    Attributes:
        row: of the session in the batch.
        numbers: of the replies among those of the session, one for each choice.
        prompt_ids: the tokens that the model reads.
        room: most tokens that a reply may have.
    """

    def __init__(
        self,
        recorder: "SessionRecorder",
        session: _Session,
        parent: _Recorded | None,
        path: _Path,
        asked: "_Asked",
    ) -> None:
        self.row = session.row
        self.numbers = range(session.turns, session.turns + asked.choices)
        self.prompt_ids = path.token_ids()
        self.room = recorder.max_response_tokens - path.num_response_tokens

        self._recorder = recorder
        self._session = session
        self._parent = parent  # the reply that this turn claims to extend
        self._path = path
        self._num_context = len(path.segments)
        self._asked = asked

        session.turns += asked.choices
        session.num_open += 1
        if parent is not None:
            parent.is_extended = True

    def record(self, replies: Sequence[Reply], drawn: Sequence[Generated]) -> None:
        """Note the replies, with the versions of the weights that drew them. Ends the turn.

        Raises ApiError where the session ended while they were drawn.
        """
        self._end()
        self._recorder.check_open(self._session)

        for number, reply, each in zip(self.numbers, replies, drawn):
            path = self._path_of(number)
            path.segments.append(each.segment(number))
            self._note(path, reply)

    def drop(self) -> None:
        """Forget the turn, because no reply was drawn. The conversation may go on as before."""
        self._end()
        if self._parent is not None:
            self._parent.is_extended = False

    def _path_of(self, number: int) -> _Path:
        """Return the path of a choice: the first one extends, the others branch off."""
        context = self._path.segments[: self._num_context]
        if number > self.numbers[0]:
            path = _Path(self._path.prompt_ids, context_of(context))
        elif self._parent is not None:
            path = self._parent.path
            path.segments = context
            return path
        else:
            path = _Path(self._path.prompt_ids, context)
        self._session.paths.append(path)
        return path

    def _note(self, path: _Path, reply: Reply) -> None:
        message = template_message(reply.message)
        history = self._asked.messages
        path.messages = [*history, message]
        recorded = _Recorded(path, len(path.segments), history, message)
        name = conversation_name(path.messages, self._asked.tools)
        self._session.recorded.setdefault(name, []).append(recorded)

    def _end(self) -> None:
        self._session.num_open -= 1
        self._session.last_used = self._recorder.clock()


class SessionRecorder:
    """The sessions of a batch, each an agent that sends requests.

    A request that continues a recorded conversation extends its tokens: the drawn ids stay, and
    `ChatBoundary.extension` gives the ids of the new messages. Where a second request continues the
    same reply, a further trajectory begins, in which the tokens that both share are context: they
    are learned from once. Any other request begins a further trajectory with its own prompt.

    Args:
        wording: between messages and tokens.
        max_prompt_tokens: width of the prompt column. Further tokens of a longer prompt become
            context of the response.
        max_response_tokens: most tokens after the prompt, context included.
        idle_s: seconds without a request after which a session counts as abandoned.
        clock: returns seconds.
    """

    def __init__(
        self,
        wording: Wording,
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
        idle_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wording = wording
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self.idle_s = idle_s
        self.look_interval_s = max(idle_s / 4, 0.01)  # between two looks for abandoned sessions
        self.clock = clock

        self._sessions: dict[str, _Session] = {}
        self._over: dict[str, str] = {}  # session -> how it ended
        self._counts: Counter[str] = Counter()

    # ---------------------------------------------------------------- life of a session

    def open(self, session: str, *, row: int) -> str:
        """Begin a session and return its API key.

        Args:
            session: its name, part of its address.
            row: number of the sample in the whole batch.
        """
        if session in self._sessions:
            raise ValueError(f"A session named '{session}' runs already. Give each its own name.")
        self._over.pop(session, None)
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[session] = _Session(session, row, key, self.clock())
        self._counts["opened"] += 1
        return key

    def is_open(self, session: str) -> bool:
        """Whether requests of the session are answered."""
        return session in self._sessions

    def finish(self, session: str, reward: float | None = None) -> list[Trajectory]:
        """End a session and return its trajectories, in the order in which they began.

        Each has the whole reward; None: the run's reward function scores them. A session without
        any reply is counted as empty and returns no trajectory.
        """
        ended = self._end(session, "finished")
        trajectories = []
        for path in ended.paths:
            trajectory = _trajectory(path, ended.row, reward)
            trajectory.part = len(trajectories)
            trajectories.append(trajectory)

        self._counts["finished" if trajectories else "empty"] += 1
        self._counts["trajectories"] += len(trajectories)
        return trajectories

    def fail(self, session: str) -> None:
        """End a session that failed. Nothing of it is learned."""
        self._end(session, "failed")
        self._counts["failed"] += 1

    def drop_idle(self) -> list[str]:
        """End the sessions that were abandoned, and return their names."""
        now = self.clock()
        idle = []
        for session in self._sessions.values():
            if session.num_open == 0 and now - session.last_used >= self.idle_s:
                idle.append(session.name)
        for name in idle:
            self._end(name, "abandoned")
            self._counts["abandoned"] += 1
        return idle

    def counts(self) -> dict[str, int]:
        """Return the counts of sessions by how they ended, of requests and of trajectories.

        `rewritten` requests began a further trajectory with a prompt that no recorded one begins,
        `branched` ones continued a reply that had a continuation already.
        """
        names = ("opened", "finished", "empty", "failed", "abandoned", "requests", "trajectories")
        counts = {name: self._counts[name] for name in (*names, "rewritten", "branched")}
        return {**counts, "running": len(self._sessions)}

    # ---------------------------------------------------------------- requests

    def admit(self, key: str, session: str | None) -> str:
        """Return the session that a request with this key belongs to.

        Raises ApiError for a wrong key, and for a session that does not run.
        """
        if session is None:
            for each in self._sessions.values():
                if same_key(each.key, key):
                    return each.name
            raise wrong_key()

        found = self._sessions.get(session)
        if found is None:
            raise self._ended(session) if session in self._over else wrong_key()
        if not same_key(found.key, key):
            raise wrong_key()
        return session

    def check_open(self, session: _Session) -> None:
        """Raise ApiError where a session has ended."""
        if self._sessions.get(session.name) is not session:
            raise self._ended(session.name)

    def begin_chat(
        self, session: str, messages: Messages, tools: ToolSchemas = (), choices: int = 1
    ) -> Turn:
        """Begin a turn of a conversation, with so many replies.

        Raises ApiError where the prompt leaves no room for a reply.
        """
        running = self._begin(session)
        asked = _Asked(messages, tools, choices)
        found = self._last_reply(running, messages, tools)
        if found is not None:
            new = messages[len(found.history) + 1 :]
            added = self._extension(found, new, tools)
            if added is not None:
                is_tool = any(each["role"] == "tool" for each in new)
                source = "tool" if is_tool else "user"
                return self._continue(running, found, added, source, asked)

        ids = self.wording.chat_prompt(messages, tools)
        return self._begin_path(running, ids, asked)

    def begin_text(self, session: str, prompt: str | Sequence[int], choices: int = 1) -> Turn:
        """Begin a turn after a plain prompt. One that begins with recorded tokens extends them."""
        running = self._begin(session)
        ids = self.wording.text_prompt(prompt)
        longest: _Recorded | None = None
        length = 0
        for recorded in chain.from_iterable(running.recorded.values()):
            known = recorded.path.token_ids(recorded.num_segments)
            if length < len(known) < len(ids) and ids[: len(known)] == known:
                longest = recorded
                length = len(known)

        asked = _Asked((), (), choices)
        if longest is not None:
            return self._continue(running, longest, ids[length:], "user", asked)
        return self._begin_path(running, ids, asked)

    def _begin(self, session: str) -> _Session:
        running = self._sessions.get(session)
        if running is None:
            raise self._ended(session)
        running.last_used = self.clock()
        self._counts["requests"] += 1
        return running

    def _last_reply(
        self, session: _Session, messages: Messages, tools: ToolSchemas
    ) -> _Recorded | None:
        """Return the latest recorded reply that the messages continue, if possible a free one."""
        names = list(_names(messages, tools))
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1]["role"] != "assistant":
                continue
            found = session.recorded.get(names[end - 1])
            if found:
                free = [recorded for recorded in found if not recorded.is_extended]
                return free[0] if free else found[-1]
        return None

    def _extension(self, found: _Recorded, new: Messages, tools: ToolSchemas) -> list[int] | None:
        """Return the ids of new messages after a reply; None where no ids extend it exactly."""
        drawn = found.path.segments[found.num_segments - 1].token_ids
        try:
            return self.wording.boundary.extension(
                found.history, found.message, new, list(tools) or None, drawn=drawn
            )
        except VerlError:  # the caller renders the conversation, and reports a message at fault
            return None

    def _continue(
        self,
        session: _Session,
        found: _Recorded,
        added: Sequence[int],
        source: str,
        asked: _Asked,
    ) -> Turn:
        """Begin a turn after a recorded reply, in its path or in a branch of it."""
        context = found.path.segments[: found.num_segments]
        parent: _Recorded | None = found
        if found.is_extended:
            parent = None
            context = context_of(context)
            self._counts["branched"] += 1

        new = Segment(source=source, token_ids=list(added), turn=session.turns)
        path = _Path(found.path.prompt_ids, [*context, new])
        self._check_room(path)
        return Turn(self, session, parent, path, asked)

    def _begin_path(self, session: _Session, ids: Sequence[int], asked: _Asked) -> Turn:
        """Begin a turn after a prompt of its own."""
        path = _Path(list(ids[: self.max_prompt_tokens]), [])
        context = list(ids[self.max_prompt_tokens :])
        if context:
            path.segments.append(Segment(source="template", token_ids=context, turn=session.turns))
        self._check_room(path)
        if session.paths:
            self._counts["rewritten"] += 1
        return Turn(self, session, None, path, asked)

    def _check_room(self, path: _Path) -> None:
        used = path.num_response_tokens
        if used < self.max_response_tokens:
            return
        raise ApiError(
            f"The conversation has {len(path.prompt_ids)} tokens of prompt and {used} after it, "
            f"which leaves no room for a reply: at most {self.max_response_tokens} tokens may "
            "follow the prompt (data.max_response_length).",
            field="messages",
            code=TOO_LONG,
        )

    def _end(self, session: str, ending: str) -> _Session:
        ended = self._sessions.pop(session, None)
        if ended is None:
            raise self._ended(session)
        self._over[session] = ending
        return ended

    def _ended(self, session: str) -> ApiError:
        ending = self._over.get(session, "it was never opened")
        return ApiError(f"The session '{session}' does not run: {ending}.", status=410)


def context_of(segments: Sequence[Segment]) -> list[Segment]:
    """Return segments as the context of another trajectory, which learns nothing of them."""
    context = []
    for segment in segments:
        context.append(replace(segment, is_trained=False) if segment.is_model else segment)
    return context


def conversation_name(messages: Messages, tools: ToolSchemas) -> str:
    """Return a digest of a conversation: equal for messages that mean the same."""
    return list(_names(messages, tools))[-1]


def wrong_key() -> ApiError:
    """Return the error for a request with a wrong API key, or without any."""
    return ApiError(
        "The API key is wrong or missing. Send the header 'Authorization: Bearer KEY' with the "
        "key of this server.",
        status=401,
        code="invalid_api_key",
    )


def _names(messages: Messages, tools: ToolSchemas) -> Iterator[str]:
    """Yield a digest of the first message, of the first two, and so on."""
    digest = hashlib.blake2b(_text(list(tools)), digest_size=16)
    for message in messages:
        digest.update(_text(canonical(message)))
        yield digest.copy().hexdigest()


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass")


def same_key(one: str, other: str) -> bool:
    """Compare API keys, in a time that does not depend on them."""
    return secrets.compare_digest(one.encode(), other.encode("utf-8", "replace"))


def _trajectory(path: _Path, row: int, reward: float | None) -> Trajectory:
    answers = sum(segment.source in ("tool", "user") for segment in path.segments)
    turns = sum(segment.is_model for segment in path.segments)
    return Trajectory(
        row=row,
        prompt_ids=path.prompt_ids,
        segments=path.segments,
        reward=reward,
        num_turns=turns + answers + 1,
        extra={"messages": [dict(message) for message in path.messages]},
    )
