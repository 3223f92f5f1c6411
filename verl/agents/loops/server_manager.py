"""The engine as loops in verl's form ask for it."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl.agents.engine_client import Generated
from verl.agents.loops.base import AgentContext, Episode
from verl.rollout.types import SamplingParams
from verl.utils.errors import RolloutError

_LIMITS = ("max_tokens", "max_new_tokens")
# Sampling parameters that change no token: log-probs are always recorded, and loops get ids.
_WITHOUT_EFFECT = (
    *("logprobs", "return_logprob"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
)
NO_MEDIA = (
    "Agent loops of a user's own cannot generate from images and videos in this version. Leave "
    "them out, or play such prompts by tool_agent or single_turn_agent."
)


class TokenOutput(list[int]):
    """Drawn token ids, which also carry their log-probs: both forms of `generate`'s answer."""

    def __init__(
        self,
        *,
        token_ids: Sequence[int],
        log_probs: Sequence[float] | None = None,
        routed_experts: Any = None,
        stop_reason: str | None = None,
        num_preempted: int | None = 0,
        extra_fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(token_ids)
        self.token_ids = list(token_ids)
        self.log_probs = None if log_probs is None else list(log_probs)
        self.routed_experts = routed_experts
        self.stop_reason = stop_reason
        self.num_preempted = num_preempted
        self.extra_fields: dict[str, Any] = dict(extra_fields or {})


@dataclass(frozen=True)
class DrawnTurn:
    """A turn that a loop asked for.

    Args:
        prompt_ids: all tokens before it.
        policy: the role of the partner that drew it; empty: the actor.
        drawn: its tokens.
    """

    prompt_ids: list[int]
    policy: str
    drawn: Generated


NumberedTurns = Sequence[tuple[int, DrawnTurn]]


class ServerManager:
    """Draws turns for one episode of a user's loop, and records them.

    verl's name for it is AsyncLLMServerManager.
    """

    def __init__(self, context: AgentContext, episode: Episode) -> None:
        self._context = context
        self._episode = episode
        self._params = sampling_dict(context.client.params)
        self.drawn: list[DrawnTurn] = []
        self._turns: Counter[str] = Counter()  # by policy
        self._frozen_turn = 0
        self.seconds = 0.0  # in which the episode waited for turns, of several branches once
        self._asking = 0
        self._asked_at = 0.0

    async def reply(self, role: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the next turn of a frozen role (`rollout.agent.policies`) as text.

        Args:
            role: that the policy plays.
            messages: of the conversation as the role sees it.
        """
        turn = self._frozen_turn
        self._frozen_turn += 1
        own = [dict(message) for message in messages]
        return await self._context.reply_of(role, own, self._episode, turn)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        role: str = "",
        **_: Any,
    ) -> TokenOutput:
        """Draw the tokens after `prompt_ids`; see `TokenOutput`.

        `role` is drawn by the policy that is trained for it next to the actor
        (`rollout.agent.policies`), or else by the actor.

        Raises RolloutError for a frozen role, for a prompt that is no list of token ids, and for
        sampling parameters that are not the run's: recorded log-probs are defined at its
        temperature, and all turns end at the run's stops. A limit (`max_tokens` or
        `max_new_tokens`) is free.
        """
        if image_data or video_data:
            raise RolloutError(NO_MEDIA)
        if role in self._context.policies:
            raise RolloutError(
                f"The role '{role}' is frozen, so none of its tokens is learned from. Ask it by "
                "server_manager.reply(role, messages)."
            )

        limit = self._limit(sampling_params)
        policy = self._context.policy_of(role)
        turn = self._turns[policy]
        self._turns[policy] += 1

        ids = _plain_ids(prompt_ids)
        client = self._context.client_of(policy)
        most = client.room_after(ids, f"Turn {turn} of sample {self._episode.row}")

        with self._timed():
            drawn = await client.generate(
                prompt_ids=ids,
                row=self._episode.row,
                turn=turn,
                limit=most if limit is None else min(limit, most),
            )
        self.drawn.append(DrawnTurn(ids, policy, drawn))
        return TokenOutput(
            token_ids=drawn.token_ids,
            log_probs=drawn.log_probs,
            stop_reason=drawn.finish_reason,
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the seconds of a turn, without those in which another one is already drawn."""
        if not self._asking:
            self._asked_at = time.perf_counter()
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                self.seconds += time.perf_counter() - self._asked_at

    def _limit(self, asked: Mapping[str, Any]) -> int | None:
        for name, own in self._params.items():
            value = asked.get(name, own)
            if value is not None and value != own:
                raise RolloutError(
                    f"sampling_params['{name}'] is {value!r} in an agent loop, the rollout's is "
                    f"{own!r}. Leave it as given: log-probs are recorded at the rollout's settings."
                )

        for name, value in asked.items():
            is_known = name in self._params or name in _LIMITS or name in _WITHOUT_EFFECT
            if not is_known and value and (name, value) != ("n", 1):
                raise RolloutError(
                    f"sampling_params['{name}']={value!r} cannot be set for one turn of an agent "
                    "loop. Leave it out; actor_rollout_ref.rollout.stop and stop_token_ids hold "
                    "for all turns."
                )

        limits = [asked[name] for name in _LIMITS if asked.get(name)]
        return min(limits) if limits else None


def _plain_ids(prompt_ids: Any) -> list[int]:
    """Return a prompt as a list of token ids. Raises RolloutError for anything else."""
    try:
        ids = [int(token) for token in prompt_ids]
    except (TypeError, ValueError) as error:
        raise RolloutError(
            "prompt_ids of server_manager.generate must be a list of token ids, got "
            f"{type(prompt_ids).__name__} {str(prompt_ids)[:80]!r}. Encode a text by "
            "self.tokenizer.encode(text, add_special_tokens=False); of a tokenizer's dict take "
            "['input_ids'], and of a batch [0]."
        ) from error

    if not ids:
        raise RolloutError(
            "prompt_ids of server_manager.generate is empty. Give it the tokens of the prompt: one "
            "at least is due."
        )
    return ids


def sampling_dict(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters under the names that verl's loops get."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": 1.0,
    }
