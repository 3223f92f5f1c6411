"""The tokens that a chat template puts between turns, derived by rendering.

A model drew the ids of its reply; the next prompt must begin with exactly these ids, since text
that is tokenized again may give others. So only the part behind the reply is rendered and encoded:
the rest of the end of the turn, the new messages and the generation prompt.

The history before it is the shortest that the template accepts. So it does not matter that many
templates rewrite earlier turns (drop reasoning, move the tools, write JSON anew). Checks at
construction, and once for each shape of messages, show that this is exact for the template at hand.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from verl.agents.rendering import ChatTemplate
from verl.agents.turns import (
    PROBE_TOOL,
    REPLY,
    Messages,
    Tools,
    TurnPlan,
    Turns,
    asking,
    calling,
    saying,
    tool_result,
)
from verl.data.chat import Message
from verl.utils.errors import BoundaryError, DataError

# Replies of the check at construction: texts that tokens may span, that templates trim or parse.
_REPLIES = ("Two words.", "A line\n\nÄ {brace} 好 🙂", '{"a": [1]}', "x")


class ChatBoundary:
    """Continues a conversation behind the ids that the model drew.

    Args:
        tokenizer: A transformers tokenizer, with or without chat template.
        stop_ids: Ids that end a reply, in addition to the tokenizer's and the usual ones.

    Raises BoundaryError, here or in `extension`, where the template allows no exact continuation.
    """

    def __init__(self, tokenizer: Any, *, stop_ids: Iterable[int] = ()) -> None:
        self._template = ChatTemplate(tokenizer)
        self._turns = Turns(self._template, stop_ids)
        self._checked = self._check()

    # ------------------------------------------------------------ for callers

    def prompt(
        self, messages: Messages, tools: Tools = None, *, enough: int | None = None
    ) -> list[int]:
        """Return the ids of a conversation with the generation prompt.

        With `enough`, a longer list may end anywhere from there on, and its last ids be others.
        Raises DataError where the template refuses the messages.
        """
        text = self._template.render(messages, tools=tools)
        if enough is not None:
            text = self._template.beginning(text, enough)
        return self._template.encode(text)

    def extension(
        self,
        history: Messages,
        reply: Message,
        new: Messages,
        tools: Tools = None,
        *,
        drawn: Sequence[int],
        enough: int | None = None,
    ) -> list[int]:
        """Return the ids to append behind `drawn`.

        They hold the rest of the end of the turn, the new messages and the generation prompt.

        Args:
            history: The messages before the reply.
            reply: The assistant's message that was drawn, with its `tool_calls`.
            new: The messages after the reply, from tools or the user.
            tools: OpenAI schemas of the tools in the prompt.
            drawn: The ids of the reply, with the one that ended it if there was one.
            enough: A longer list may end anywhere from here on, and its last ids be others.

        Raises BoundaryError where the template refuses the messages or moves them elsewhere.
        """
        plan = self._turns.plan(reply, new, tools)
        text = self._turns.behind(plan, history, reply, new, tools)
        if enough is not None:
            text = self._template.beginning(text, enough + len(plan.tail_ids))
        ids = self._template.encode_part(text)
        return ids[self._already_drawn(plan, drawn, ids) :]

    def rewrites(
        self,
        history: Messages,
        reply: Message,
        new: Messages,
        tools: Tools = None,
        *,
        drawn: Sequence[int],
    ) -> bool:
        """Return whether rendering the whole conversation changes the text before `new`.

        Then a caller that follows the template has to begin a new sample. Compares with the text
        that was drawn, to the last character. Raises DataError where the template refuses the
        messages.
        """
        prompt = self._template.render(history, tools=tools)
        whole = self._template.render([*history, reply, *new], tools=tools)
        if not whole.startswith(prompt):
            return True

        try:
            plan = self._turns.plan(reply, new, tools)
            behind = self._turns.behind(plan, history, reply, new, tools)
        except BoundaryError:
            return True
        text = self._template.decode_part(drawn[: len(drawn) - self._overlap(plan, drawn)])
        return whole != prompt + text + behind

    def text_of(self, drawn: Sequence[int]) -> str:
        """Return the text of a drawn reply without the token that ends its turn.

        Other special tokens stay, such as <think> and the tags of calls.
        """
        is_ended = bool(drawn) and drawn[-1] in self._turns.ends
        return self._template.decode(drawn[:-1] if is_ended else drawn)

    def has_tools(self) -> bool:
        """Return whether the template describes tools to the model."""
        try:
            text = self._template.render(self._turns.start, tools=[PROBE_TOOL])
        except DataError:
            return False
        return PROBE_TOOL["function"]["name"] in text

    def report(self) -> str:
        """Return one line for the log: the texts between turns, and the traits of the template."""
        reply, new = self._checked[0]
        plan = self._turns.plan(reply, new, None)
        tail = self._template.decode(plan.tail_ids) if plan.closes else ""
        separator = self._turns.head(reply, new).removeprefix(tail)

        generation = self._generation_prompt()
        return (
            f"Chat template: a reply ends with {tail!r}, a {new[0]['role']}'s message begins with "
            f"{separator!r}, the generation prompt is {generation!r}; "
            f"{'describes' if self.has_tools() else 'ignores'} tools, "
            f"{'drops' if self._drops_reasoning() else 'keeps'} earlier reasoning."
        )

    # ------------------------------------------------------------ drawn ids

    def _already_drawn(self, plan: TurnPlan, drawn: Sequence[int], ids: Sequence[int]) -> int:
        """Return how many ids of the text behind a reply its last drawn ids stand for."""
        overlap = self._overlap(plan, drawn)
        if not overlap and drawn and drawn[-1] in self._turns.stop_ids:
            # Another end token, such as <|return|>, or the last of several. But where only the role
            # of the next message ends a turn, that role has to follow it.
            own_end = plan.end_ids[-1] if plan.end_ids else None
            if plan.closes or drawn[-1] == own_end:
                overlap = len(plan.end_ids)

        if tuple(ids[:overlap]) != plan.tail_ids[:overlap]:
            raise BoundaryError(
                "The chat template must end every turn alike, but here it does not write "
                f"{self._template.decode(plan.end_ids)!r} behind a reply. Use another template "
                "(data.custom_chat_template)."
            )
        return overlap

    def _overlap(self, plan: TurnPlan, drawn: Sequence[int]) -> int:
        """Return how many ids of the template's end of a turn were drawn, from its first on."""
        for length in range(min(len(plan.tail_ids), len(drawn)), 0, -1):
            end = plan.tail_ids[:length]
            # Ordinary text, such as a newline, may be the reply's own.
            is_end = not self._template.special_ids.isdisjoint(end)
            if is_end and tuple(drawn[-length:]) == end:
                return length
        return 0

    def _generation_prompt(self) -> str:
        prompt = self._template.encode(self._template.render(self._turns.start))
        closed = self._template.encode(self._template.render(self._turns.start, generate=False))
        shared = 0
        while prompt[shared : shared + 1] == closed[shared : shared + 1] != []:
            shared += 1
        return self._template.decode(prompt[shared:])

    def _drops_reasoning(self) -> bool:
        reply = saying(f"<think>\nverlThought\n</think>\n\n{REPLY}")
        try:
            text = self._template.render([*self._turns.start, reply, asking("verlQuestion")])
        except DataError:
            return False
        return "verlThought" not in text

    # ------------------------------------------------------------ the check at construction

    def _check(self) -> list[tuple[Message, list[Message]]]:
        """Check extensions against the template's own text. Return the pairs that it accepts.

        Each is a reply and the messages after it. Raises BoundaryError.
        """
        answer = [tool_result()]
        by_user = (saying(REPLY), [asking("verlNextQuestion")])
        by_tool = (calling({}, answer), answer)

        accepted = []
        refusals = []
        for reply, new in (by_user, by_tool):
            try:
                plan = self._turns.plan(reply, new, None)
            except BoundaryError as error:
                refusals.append(error)
                continue
            self._check_new(plan, new)
            accepted.append((reply, new))

        # A template without tools, or one for tools alone, is good for the other.
        if not accepted:
            raise refusals[0]
        return accepted

    def _check_new(self, plan: TurnPlan, new: list[Message]) -> None:
        replies = [saying(content) for content in _REPLIES]
        if plan.with_calls:
            replies = [calling({}, new)]

        for reply in replies:
            for history in self._turns.histories(reply, new):
                behind = self._turns.behind(plan, history, reply, new, None)
                whole = self._template.render([*history, reply, *new])
                if not whole.endswith(behind):
                    raise BoundaryError(
                        "The chat template must write the same text behind any reply, but behind "
                        f"{reply['content']!r} it does not write {behind!r}. Use another template "
                        "(data.custom_chat_template)."
                    )
                self._check_ids(whole, behind)

    def _check_ids(self, whole: str, behind: str) -> None:
        """Check that the text behind a reply has the ids that it has in the whole conversation."""
        ids = self._template.encode_part(behind)
        whole_ids = self._template.encode(whole)
        same_ids = whole_ids[len(whole_ids) - len(ids) :] == ids
        same_text = self._template.decode(whole_ids).endswith(self._template.decode_part(ids))

        # Without a special token in between, a token of the whole text may span the boundary.
        starts_apart = bool(ids) and ids[0] in self._template.special_ids
        if not same_text or (starts_apart and not same_ids):
            raise BoundaryError(
                f"The tokenizer must give the text {behind!r} behind a reply the ids that it has "
                "in the whole conversation, but it gives others."
            )
