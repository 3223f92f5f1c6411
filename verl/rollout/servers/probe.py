"""The probe of a server: fixed tokens, whose log-probs show by which weights it draws."""

import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl.config.rollout import RolloutConfig
from verl.rollout.servers.server import Draw, Drawn, Server
from verl.rollout.types import SamplingParams

_PROMPT = 48
_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Draws the same few tokens on a server, with the settings of training.

    Args:
        config: the settings.
        tokenizer: its special tokens are left out.
        vocabulary: ids that the model has.
        run_name: part of the names of requests.
    """

    config: RolloutConfig
    tokenizer: Any
    vocabulary: int
    run_name: str

    def draw(self, server: Server) -> Drawn:
        """Draw on a server."""
        config = self.config
        temperature = config.temperature if config.do_sample else 1.0
        draw = Draw(
            request_id=f"{self.run_name}-probe-{secrets.token_hex(4)}",
            prompt_ids=self.prompt_ids,
            params=SamplingParams(max_new_tokens=_TOKENS, temperature=temperature),
            limit=min(_TOKENS, config.response_length),
            seed=12345 << 33,
            stop_token_ids=(),
        )
        return server.draw(draw)

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        """Fixed tokens that are spread over the vocabulary."""
        special = set(getattr(self.tokenizer, "all_special_ids", ()))
        # Tokens of pictures are among those that were added.
        special.update(getattr(self.tokenizer, "added_tokens_decoder", {}))
        most = min(self.vocabulary, len(self.tokenizer))
        length = min(_PROMPT, self.config.prompt_length)
        ids = []
        place = most // 3
        while len(ids) < length:
            place = (place * 31 + 7919) % most
            if place not in special:
                ids.append(place)
            else:
                place += 1
        return tuple(ids)
