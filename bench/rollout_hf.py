"""`generate` of transformers at the work of `rollout.py`, which starts this script.

It has no limit of one row, so every batch runs to its longest sample and only the wanted tokens
count. It gives tokens
alone: its log-probs would be the logits of all steps, (steps, rows, vocabulary).
"""

import os
from collections.abc import Sequence
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from rollout_models import random_model, versions
from rollout_work import Answer, Ask, Job, serve
from transformers import GenerationConfig


class HF:
    """A `Side`."""

    def __init__(self, job: Job) -> None:
        self.versions = versions(job.device)
        self.device = torch.device(job.device)
        self.max_num_seqs = job.max_num_seqs
        self.model: Any = random_model(job.folder, job.device)
        # Without an end-of-sequence id no row ends early.
        self.model.generation_config = GenerationConfig()

    def prepare(self, asks: Sequence[Ask]) -> list[tuple[tuple[int, ...], int]]:
        return [(ask.prompt_ids, limit) for ask in asks for limit in ask.limits]

    def generate(self, prepared: list[tuple[tuple[int, ...], int]]) -> list[int]:
        """How many of the wanted tokens each sample has."""
        counts: list[int] = []
        for first in range(0, len(prepared), self.max_num_seqs):
            counts += self._generate_batch(prepared[first : first + self.max_num_seqs])
        return counts

    def _generate_batch(self, rows: Sequence[tuple[tuple[int, ...], int]]) -> list[int]:
        input_ids = torch.tensor([prompt for prompt, _ in rows], device=self.device)
        longest = max(limit for _, limit in rows)
        config = GenerationConfig(
            max_new_tokens=longest, do_sample=True, top_k=0, temperature=1.0, pad_token_id=0
        )
        with torch.inference_mode():
            tokens = self.model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
            )
        responses = tokens[:, input_ids.shape[1] :].cpu()
        return [len(response[:limit]) for response, (_, limit) in zip(responses, rows)]

    def answers(self, generated: list[int], asks: Sequence[Ask]) -> list[Answer]:
        return [Answer(count, finite=None) for count in generated]

    def statistics(self) -> dict[str, float]:
        return {}


if __name__ == "__main__":
    serve(HF, __doc__)
