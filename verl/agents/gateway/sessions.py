"""Answer the requests of recorded sessions with the engine of a training run."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from verl.agents.engine_client import EngineClient, Generated
from verl.agents.gateway.backend import Listen
from verl.agents.gateway.errors import TOO_LONG, ApiError
from verl.agents.gateway.recorder import SessionRecorder, Turn
from verl.agents.gateway.requests import ChatRequest, CompletionRequest, DrawSettings
from verl.agents.gateway.wording import Reply
from verl.agents.tools.threads import gather_all
from verl.rollout.stopping import StopRule
from verl.utils.errors import RolloutError

_IGNORE_KEY = "actor_rollout_ref.rollout.agent.gateway.on_mismatch=ignore"


class SessionBackend:
    """A `Backend` that records its replies.

    The noise of a reply depends on the number of its request within the session. An agent that
    sends one request after the other draws the same tokens in every run.

    Args:
        client: draws the replies, with the sampling parameters of the rollout.
        recorder: of the sessions.
        on_mismatch: "error": refuse a request that asks for other sampling parameters than the
            rollout's, or for anything that the engine does not do; "ignore": draw as the rollout
            does.
    """

    model = "policy"  # the name that clients get

    def __init__(
        self, client: EngineClient, recorder: SessionRecorder, *, on_mismatch: str = "error"
    ) -> None:
        self.client = client
        self.recorder = recorder
        self.wording = recorder.wording
        self.is_lenient = on_mismatch == "ignore"

    def admit(self, key: str, session: str | None) -> str:
        """See `Backend.admit`."""
        return self.recorder.admit(key, session)

    def stops(self, draw: DrawSettings) -> tuple[str, ...]:
        """See `Backend.stops`."""
        return (*self.client.params.stop, *(draw.stop or ()))

    async def run(self) -> None:
        """See `Backend.run`: drop abandoned sessions."""
        while True:
            await asyncio.sleep(self.recorder.look_interval_s)
            self.recorder.drop_idle()

    async def chat(
        self, session: str | None, request: ChatRequest, listen: Listen | None = None
    ) -> list[Reply]:
        """See `Backend.chat`. The replies come whole, so `listen` is not called."""
        assert session is not None, "admit returns one"
        self.wording.check_tools(request.tools)
        self._check_draw(request.draw)
        turn = self.recorder.begin_chat(session, request.messages, request.tools, request.draw.n)
        return await self._answer(session, turn, request.draw, request.tools)

    async def complete(
        self, session: str | None, request: CompletionRequest, listen: Listen | None = None
    ) -> list[Reply]:
        """See `Backend.complete`. The replies come whole, so `listen` is not called."""
        assert session is not None, "admit returns one"
        self._check_draw(request.draw)
        replies = []
        for prompt in request.prompts:
            turn = self.recorder.begin_text(session, prompt, request.draw.n)
            replies += await self._answer(session, turn, request.draw, ())
        return replies

    async def _answer(
        self, session: str, turn: Turn, draw: DrawSettings, tools: Sequence[dict]
    ) -> list[Reply]:
        """Draw and record the replies of a turn."""
        try:
            drawn = await self._draw(turn, draw)
            if draw.stop:
                drawn = [self._up_to_stop(each, draw.stop) for each in drawn]
            replies = []
            for number, each in zip(turn.numbers, drawn):
                reply = await self.wording.reply(
                    turn.prompt_ids,
                    each,
                    tools=tools,
                    stop=self.stops(draw),
                    name=f"{session}/{number}",
                )
                replies.append(reply)
        except BaseException:
            turn.drop()
            raise

        turn.record(replies, drawn)
        return replies

    async def _draw(self, turn: Turn, draw: DrawSettings) -> list[Generated]:
        """Draw the replies of a turn. Raises ApiError where there is no room, or none comes."""
        room = room_for_reply(turn.prompt_ids, self.client.max_model_len, draw)
        limit = min(turn.room, room)
        draw_one = partial(
            self.client.generate, prompt_ids=turn.prompt_ids, row=turn.row, limit=limit
        )
        try:
            return await gather_all(draw_one(turn=number) for number in turn.numbers)
        except RolloutError as error:
            raise ApiError(str(error)) from error

    def _up_to_stop(self, drawn: Generated, stops: tuple[str, ...]) -> Generated:
        """Return a reply that ends with the token that completes one of the request's stop strings.

        The engine knows the rollout's stop strings alone. Tokens are drawn one after the other, so
        those before the cut are the ones that an engine with these stop strings would draw.
        """
        params = replace(self.client.params, stop=stops)
        rule = StopRule(params, (), self.wording.tokenizer)
        token_ids = np.array(drawn.token_ids)
        for count in range(1, len(token_ids) + 1):
            if rule.completes_string(token_ids[:count]):
                return replace(drawn.first(count), finish_reason="stop")
        return drawn

    def _check_draw(self, draw: DrawSettings) -> None:
        """Raise ApiError for sampling parameters that are not those of the rollout."""
        if self.is_lenient:
            return
        params = self.client.params
        ours = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "seed": "own seed",
        }

        for name, value in ours.items():
            asked = getattr(draw, name)
            if asked is not None and asked != value:
                raise ApiError(
                    f"{name}={asked!r} differs from the rollout's {value!r}, and recorded "
                    "log-probs are defined at the rollout's settings. Leave it out, or set "
                    f"{_IGNORE_KEY}.",
                    field=name,
                )


def room_for_reply(prompt_ids: Sequence[int], max_model_len: int, draw: DrawSettings) -> int:
    """Return the most tokens of a reply: those that fit after the prompt, or the request's limit.

    Raises ApiError where none fits.
    """
    room = max_model_len - len(prompt_ids)
    if room < 1:
        raise ApiError(
            f"The prompt has {len(prompt_ids)} tokens, which leaves no room for a reply: prompt "
            f"and reply may have {max_model_len} tokens together.",
            field="messages",
            code=TOO_LONG,
        )
    return room if draw.max_tokens is None else min(room, draw.max_tokens)
