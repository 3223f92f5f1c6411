"""The tokens and messages of one episode while it runs."""

from collections.abc import Sequence

from verl.agents.boundary import ChatBoundary
from verl.agents.engine_client import Generated
from verl.agents.formats.base import ToolSchemas
from verl.data.chat import Message
from verl.data.pictures import PictureReader
from verl.models.pictures import Pictures
from verl.rollout.trajectory import Segment, Trajectory
from verl.utils.errors import RolloutError


class Conversation:
    """A prompt that grows by drawn turns and by messages, token by token as the model sees it.

    Drawn tokens are never tokenized again: the next prompt extends them. Where `follow_template` is
    set and the chat template would render an earlier turn differently, the context is rendered anew
    and a further trajectory begins, so each trajectory is exact by itself.

    Args:
        row: number of the sample in the whole batch.
        messages: of the prompt.
        prompt_ids: the tokens of `messages`, ready for an answer.
        boundary: of the tokenizer's chat template.
        tools: schemas of the offered tools.
        max_response_tokens: most tokens after the prompt, other sources' included.
        follow_template: whether each prompt is the one that the template renders at inference.
        pictures: of the prompt.
        reader: gives pictures their tokens; None: the model reads text alone.
    """

    def __init__(
        self,
        row: int,
        messages: Sequence[Message],
        prompt_ids: Sequence[int],
        boundary: ChatBoundary,
        *,
        tools: ToolSchemas = (),
        max_response_tokens: int,
        follow_template: bool = False,
        pictures: Pictures = (),
        reader: PictureReader | None = None,
    ) -> None:
        self.row = row
        self.messages = list(messages)
        self.boundary = boundary
        self.tools = list(tools)
        self.max_response_tokens = max_response_tokens
        self.follow_template = follow_template
        self.reader = reader
        self.turns = 0  # of the model
        self._prompt_width = len(prompt_ids)
        self._finished: list[Trajectory] = []
        self._current = Trajectory(
            row=row, prompt_ids=list(prompt_ids), segments=[], pictures=pictures
        )
        self._ids = list(prompt_ids)

    @property
    def ids(self) -> list[int]:
        """The prompt of the next turn; it grows with the conversation."""
        return self._ids

    @property
    def pictures(self) -> Pictures:
        """The pictures in `ids`, in the order of their tokens."""
        return self._current.pictures

    @property
    def room(self) -> int:
        """How many tokens the trajectory may still get."""
        used = len(self._ids) - len(self._current.prompt_ids)
        return self.max_response_tokens - used

    def add_drawn(self, drawn: Generated) -> None:
        """Append a turn of the model."""
        if not drawn.token_ids:
            raise RolloutError(f"The engine drew no token for turn {self.turns} of row {self.row}.")
        self._current.segments.append(drawn.segment(self.turns))
        self._ids += drawn.token_ids
        self.turns += 1

    def add_reply(self, reply: Message) -> None:
        """Note the message of the last drawn turn, after which nothing follows."""
        self.messages.append(reply)

    def extend(
        self, reply: Message, new: Sequence[Message], source: str, pictures: Pictures = ()
    ) -> bool:
        """Append the messages after the last drawn turn, up to the next turn of the model.

        Args:
            reply: the last drawn turn as a message.
            new: messages of tools or of the user.
            source: "tool" or "user".
            pictures: in the new messages.

        Returns False, and appends no token, where they leave no room for a turn. The messages are
        noted in both cases.
        """
        history = self.messages
        self.messages = [*history, reply, *new]
        drawn = self._current.segments[-1].token_ids
        is_rewritten = self.follow_template and self.boundary.rewrites(
            history, reply, new, self.tools, drawn=drawn
        )
        if is_rewritten:
            return self._begin_again()

        # The reader looks for places of pictures in the whole text.
        enough = self.room if self.reader is None else None
        added = self.boundary.extension(history, reply, new, self.tools, drawn=drawn, enough=enough)
        if self.reader is not None:
            added = self.reader.expand(added, pictures)
            self.reader.check_number([*self.pictures, *pictures])
        if len(added) >= self.room:
            return False
        self._current.pictures += pictures
        self._current.segments.append(Segment(source=source, token_ids=added, turn=self.turns))
        self._ids += added
        return True

    def mask_last_turn(self) -> None:
        """Leave the last drawn turn out of what is learned."""
        for segment in reversed(self._current.segments):
            if segment.is_model:
                segment.is_trained = False
                return

    def trajectories(self) -> list[Trajectory]:
        """Return the finished trajectories, at least one."""
        current = self._current
        while current.segments and not current.segments[-1].is_model:
            current.segments.pop()  # context without an answer has nothing to learn from
        parts = [*self._finished, current] if current.segments else list(self._finished)
        for number, part in enumerate(parts):
            part.part = number
        return parts

    def _begin_again(self) -> bool:
        """Begin a further trajectory, with the whole conversation as the template renders it.

        Its first tokens, as many as the first prompt had, stand in the prompt's column; the rest of
        the context is part of the response, without a share in the loss.
        """
        enough = self._prompt_width + self.max_response_tokens
        rendered = self.boundary.prompt(self.messages, self.tools, enough=enough)
        width = min(self._prompt_width, len(rendered) - 1)
        context = rendered[width:]
        if len(context) >= self.max_response_tokens:
            return False

        self._finished.append(self._current)
        segments = [Segment(source="template", token_ids=context, turn=self.turns)]
        self._current = Trajectory(row=self.row, prompt_ids=rendered[:width], segments=segments)
        self._ids = rendered
        return True
