"""A rollout engine from a user's file that calls a tool in its first turn, and then answers.

It is loaded by `actor_rollout_ref.model.external_lib`. It accepts weights like every local engine,
and ignores them.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from verl.rollout import Completion, Request, SamplingParams, rollout_engines
from verl.rollout.base import Capabilities
from verl.rollout.local import LocalEngine


@rollout_engines.register("scripted")
class ScriptedLocalEngine(LocalEngine):
    """Answers 72 by way of the tool where one is offered, and then in words."""

    capabilities = Capabilities(aliases_weights=True)

    def __init__(self, *, model: Any, tokenizer: Any, config: Any, device: Any) -> None:
        super().__init__(
            model=model, tokenizer=tokenizer, config=config, device=device, attention="eager"
        )
        self._finished: list[Completion] = []

    @property
    def has_work(self) -> bool:
        return bool(self._finished)

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        for request in requests:
            text = self.tokenizer.decode(list(request.prompt_ids))
            for sample_id in request.sample_ids:
                turn, row = divmod(sample_id, 1 << 32)
                ids = self.tokenizer.encode(self.reply(text, turn, row), add_special_tokens=False)
                ids.append(self.tokenizer.eos_token_id)
                self._finished.append(
                    Completion(
                        sample_id=sample_id,
                        token_ids=ids,
                        log_probs=[-1.0] * len(ids),
                        finish_reason="stop",
                    )
                )

    def reply(self, prompt: str, turn: int, row: int) -> str:
        """Answer every second sample correctly at once, and the others after a correction."""
        name = re.search(r'"name": "(\w+)"', prompt)
        answer = "72" if row % 2 == 0 or turn > 0 else "71"
        if name is not None and turn < 2:
            arguments = f'{{"answer": "{answer}"}}'
            return f'<tool_call>\n{{"name": "{name[1]}", "arguments": {arguments}}}\n</tool_call>'
        return f"The answer is\n#### {answer}"

    def step(self) -> list[Completion]:
        finished = self._finished
        self._finished = []
        return finished

    def abort(self, sample_ids: Iterable[int] | None = None) -> list[Completion]:
        self._finished = []
        return []
