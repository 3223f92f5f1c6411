"""The text that a chat template writes behind a reply, found by rendering probes.

A probe word stands for the reply, in its content or in the last argument of its calls. Which of the
two shows the boundary, and where it lies, is a `TurnPlan`: found once for each shape of messages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from verl.agents.formats.base import NEXT_ROLES, TURN_ENDS, ToolSchemas
from verl.agents.rendering import ChatTemplate
from verl.data.chat import Message
from verl.utils.errors import BoundaryError, DataError

Messages: TypeAlias = Sequence[Message]
Tools: TypeAlias = ToolSchemas | None

REPLY = "verlReplyOfTheModel"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "verl_probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "A key."}},
            "required": ["key"],
        },
    },
}
_PROBE_ID = "call00000"  # nine letters and digits, which Mistral's templates demand


def saying(content: str) -> Message:
    """Return a reply of the assistant."""
    return {"role": "assistant", "content": content}


def asking(content: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def tool_result() -> Message:
    """Return a message of the probe tool."""
    return {
        "role": "tool",
        "content": "verlToolResult",
        "name": "verl_probe_tool",
        "tool_call_id": _PROBE_ID,
    }


def calling(reply: Message, new: Messages, *, argument: str = REPLY) -> Message:
    """Return a reply with the same calls, the last of which has the probe word as its argument.

    A malformed call has an answer but is not in `tool_calls`. So if there are none, the names come
    from the answers.
    """
    named = []
    for call in reply.get("tool_calls") or ():
        function = call.get("function", call)
        named.append((call.get("id"), function.get("name")))
    if not named:
        answers = [message for message in new if message.get("role") == "tool"]
        named = [(each.get("tool_call_id"), each.get("name")) for each in answers]
    if not named:
        named = [(None, None)]

    calls = []
    for number, (call_id, name) in enumerate(named):
        is_last = number == len(named) - 1
        function = {
            "name": name or "verl_probe_tool",
            "arguments": {"key": argument if is_last else "verlArgument"},
        }
        calls.append({"id": call_id or _PROBE_ID, "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


@dataclass(frozen=True, kw_only=True)
class TurnPlan:
    """How to find the text behind a reply, for messages of one shape.

    Attributes:
        with_calls: The probe reply calls tools.
        cut: Token that the text behind a call begins with; empty for a probe without calls.
        with_tools: Tools change the text behind a reply.
        whole_history: So does the history.
        end_ids: Ids that end the turn, from the reply on. Empty if the template writes none.
        tail_ids: These and the rest of the turn, such as a newline.
        closes: Another end token may stand for the template's own.
    """

    with_calls: bool
    cut: str
    with_tools: bool
    whole_history: bool
    end_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]
    closes: bool


@dataclass(frozen=True)
class _Behind:
    """The text behind a reply, and its first characters up to the first new content."""

    text: str
    head: str


class Turns:
    """Finds the text between turns. Methods raise BoundaryError where the template has none.

    `start` is the shortest history that the template accepts. `stop_ids` are the ids that may end a
    reply, `ends` those of them that are no part of its text in any case.
    """

    def __init__(self, template: ChatTemplate, stop_ids: Iterable[int]) -> None:
        self.template = template
        self._plans: dict[Any, TurnPlan] = {}
        self.start = self._shortest_history()
        self._longer = self._longer_histories()
        self.ends, self.stop_ids = self._collect_ends(stop_ids)

    def plan(self, reply: Message, new: Messages, tools: Tools) -> TurnPlan:
        """Return how to extend messages of this shape."""
        kinds = tuple((each.get("role"), type(each.get("content"))) for each in new)
        calls = len(reply.get("tool_calls") or ())
        shape = (kinds, calls, bool(tools))
        if shape not in self._plans:
            self._plans[shape] = self._make_plan(reply, new, offers_tools=bool(tools))
        return self._plans[shape]

    def behind(
        self, plan: TurnPlan, history: Messages, reply: Message, new: Messages, tools: Tools
    ) -> str:
        """Return the text behind a reply that was cut before the end of its turn."""
        probe = calling(reply, new) if plan.with_calls else saying(REPLY)
        before = history if plan.whole_history else self.start
        text = self._text_behind(before, probe, new, tools if plan.with_tools else None)
        # Behind a call stand its own closing characters, which the model has drawn.
        return text[text.index(plan.cut) :]

    def histories(self, reply: Message, new: Messages) -> list[list[Message]]:
        """Return the shortest history, and others that these messages leave as they are.

        A template may move the system message to the newest one: it would be repeated otherwise.
        """
        kept = [self.start]
        for history in self._longer:
            try:
                if self._keeps(history, reply, new):
                    kept.append(history)
            except DataError:  # the template refuses the messages
                continue
        return kept

    def head(self, reply: Message, new: Messages) -> str:
        """Return the text between the end of a reply and the content of the first new message."""
        plan = self.plan(reply, new, None)
        probed = self._probe(new, calling(reply, new) if plan.with_calls else saying(REPLY))
        return probed.head[probed.head.index(plan.cut) :]

    # ------------------------------------------------------------ rendering probes

    def _text_behind(
        self,
        history: Messages,
        probe: Message,
        new: Messages,
        tools: Tools = None,
        *,
        generate: bool = True,
    ) -> str:
        """Return the text behind the probe word."""
        try:
            text = self.template.render([*history, probe, *new], tools=tools, generate=generate)
        except DataError as error:
            roles = ", ".join(str(message.get("role")) for message in new)
            raise BoundaryError(
                f"The chat template must accept messages of the roles [{roles}] after a reply of "
                f"the assistant, but refuses them: {error}"
            ) from error

        _, found, behind = text.partition(REPLY)
        if not found:
            raise BoundaryError(
                "The chat template must write the assistant's content as it is, but it leaves it "
                "out or changes it. Use another template (data.custom_chat_template)."
            )
        return behind

    def _probe(self, new: Messages, reply: Message) -> _Behind:
        """Return the text behind a reply when a word stands for each new content."""
        marked = []
        words: dict[int, str] = {}  # number of a message -> the word that stands for its content
        for number, message in enumerate(new):
            if isinstance(message.get("content"), str):
                words[number] = f"verlNewContent{number}End"
                message = {**message, "content": words[number]}
            marked.append(message)

        text = self._text_behind(self.start, reply, marked)
        if REPLY in text:
            raise BoundaryError(
                "The chat template must write a reply once, but it repeats it. Use another "
                "template (data.custom_chat_template)."
            )

        head = text
        for number, word in words.items():
            before, found, _ = text.partition(word)
            if not found:
                raise BoundaryError(
                    "The chat template must write new messages behind the reply, but message "
                    f"{number} ({new[number]['role']}) is left out or moved before it. Send its "
                    "content with another role, such as 'user'."
                )
            head = min(head, before, key=len)
        return _Behind(text, head)

    # ------------------------------------------------------------ making a plan

    def _make_plan(self, reply: Message, new: Messages, *, offers_tools: bool) -> TurnPlan:
        said = called = refusal = None
        try:
            said = self._probe(new, saying(REPLY))
        except BoundaryError as error:
            refusal = error
        if reply.get("tool_calls") or said is None:
            try:
                called = self._probe(new, calling(reply, new))
            except BoundaryError as error:
                refusal = refusal or error

        # A plain reply shows the boundary best. But a template may know no result without a call,
        # or end a turn with calls otherwise.
        if said is not None and (called is None or self._ends_alike(calling(reply, new), new)):
            return self._finished(said, saying(REPLY), "", new, offers_tools)
        if called is None:
            assert refusal is not None
            raise refusal

        cut = self._end_of_call(called.head)
        place = called.head.index(cut)
        behind = _Behind(called.text[place:], called.head[place:])
        return self._finished(behind, calling(reply, new), cut, new, offers_tools)

    def _ends_alike(self, called: Message, new: Messages) -> bool:
        """Return whether the text behind a call ends with the text behind a plain reply."""
        for history in self.histories(called, new):
            said = self._text_behind(history, saying(REPLY), new)
            if not self._text_behind(history, called, new).endswith(said):
                return False
        return True

    def _end_of_call(self, head: str) -> str:
        """Return the token that ends a turn with calls."""
        stops = [self.template.decode([each]) for each in self.stop_ids]
        places = [(head.find(stop), stop) for stop in stops if stop in head]
        if not places:
            raise BoundaryError(
                "The chat template must end a turn that calls tools with a special token, but it "
                f"writes {head!r} behind the last argument. Use another template "
                "(data.custom_chat_template), or pass the id of the token that ends a turn."
            )
        return min(places)[1]

    def _finished(
        self, behind: _Behind, probe: Message, cut: str, new: Messages, offers_tools: bool
    ) -> TurnPlan:
        """Return the plan of a probe, with everything else that its template does."""
        head_ids = self.template.encode_part(behind.head)
        ends = [place for place, each in enumerate(head_ids) if each in self.stop_ids]
        end_ids = head_ids[: ends[0] + 1] if ends else []

        alone = self._text_behind(self.start, probe, [], generate=False)
        alone_ids = self.template.encode_part(alone[max(alone.find(cut), 0) :])
        is_longer = len(alone_ids) > len(end_ids) and head_ids[: len(alone_ids)] == alone_ids
        return TurnPlan(
            with_calls=bool(cut),
            cut=cut,
            with_tools=offers_tools and self._tools_matter(probe, new),
            whole_history=self._history_matters(probe, new),
            end_ids=tuple(end_ids),
            tail_ids=tuple(alone_ids if is_longer else end_ids),
            closes=any(each in self.stop_ids for each in alone_ids),
        )

    def _tools_matter(self, probe: Message, new: Messages) -> bool:
        """Return whether tools change the text behind a reply and leave the text before it alone.

        A template that moves the tools to the newest message would repeat them otherwise.
        """
        tools = [PROBE_TOOL]
        without = self._text_behind(self.start, probe, new)
        if self._text_behind(self.start, probe, new, tools) == without:
            return False
        return self._keeps(self.start, probe, new, tools)

    def _history_matters(self, probe: Message, new: Messages) -> bool:
        """Return whether a longer history changes the text behind a reply."""
        histories = self.histories(probe, new)
        return len({self._text_behind(history, probe, new) for history in histories}) > 1

    def _keeps(self, history: Messages, probe: Message, new: Messages, tools: Tools = None) -> bool:
        """Return whether the template still writes the history as it did before the reply."""
        whole = self.template.render([*history, probe, *new], tools=tools)
        return whole.startswith(self.template.render(history, tools=tools, generate=False))

    # ------------------------------------------------------------ the template's habits

    def _shortest_history(self) -> list[Message]:
        question = asking("verlQuestion")
        refusals = []
        for history in ([question], [_system(), question]):
            try:
                self.template.render([*history, saying(REPLY)])
            except DataError as error:
                refusals.append(str(error))
            else:
                return history
        raise BoundaryError(
            "The chat template must accept a reply of the assistant to a user's message, but "
            f"refuses it: {refusals[0]}"
        )

    def _longer_histories(self) -> list[list[Message]]:
        """Return histories with a system message, an earlier answer, and an earlier result."""
        question = asking("verlQuestion")
        called = calling({}, [], argument="verlArgument")
        return [
            [_system(), question],
            [*self.start, saying("verlAnswer"), question],
            [*self.start, called, tool_result()],
        ]

    def _collect_ends(self, given: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Return the ids that end a turn in this template or family, and these with `given`.

        A caller may give the closing tag of a tool call, which is part of the reply.
        """
        ends = self.template.known_ids(TURN_ENDS)
        eos_id = self.template.tokenizer.eos_token_id
        if eos_id is not None:
            ends |= {eos_id}
        stops = ends | set(given)

        tail = self._text_behind(self.start, saying(REPLY), [], generate=False)
        try:
            head = self._probe([asking("verlQuestion")], saying(REPLY)).head
        except BoundaryError:
            head = tail

        own = [each for each in self.template.encode_part(head) if each in stops][:1]
        if not own:
            # A template with a token of its own: the last that stands behind a reply.
            tail_ids = self.template.encode_part(tail)
            own = [each for each in tail_ids if each in self.template.special_ids][-1:]
        others = self.template.known_ids(NEXT_ROLES).union(own)
        return ends | others, stops | others


def _system() -> Message:
    return {"role": "system", "content": "verlSystemMessage"}
