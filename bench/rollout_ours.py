"""The embedded engine at the work of `rollout.py`, which starts this script. Its configuration is
the default one apart from sizes."""

import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# the package next to this folder, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rollout_models import random_model, versions
from rollout_work import Answer, Ask, Job, serve

from verl.config.rollout import RolloutConfig
from verl.rollout import Completion, Request, SamplingParams, create_rollout_engine
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.utils.units import GIB


class Ours:
    """A `Side`."""

    def __init__(self, job: Job) -> None:
        self.versions = versions(job.device)
        self.seed = job.seed
        self.response_tokens = job.response_tokens
        self.calls = 0
        self.engine = create_rollout_engine(
            RolloutConfig(
                prompt_length=job.prompt_tokens,
                response_length=job.response_tokens,
                max_num_seqs=job.max_num_seqs,
                gpu_memory_utilization=job.gpu_memory_utilization,
                deterministic=job.deterministic,
                quantization=job.quantization,
                kv_cache_dtype=job.kv_cache_dtype,
            ),
            model=random_model(job.folder, job.device),
            tokenizer=None,
            device=torch.device(job.device),
        )

    def prepare(self, asks: Sequence[Ask]) -> list[Request]:
        ids = itertools.count()
        return [
            Request(
                prompt_ids=ask.prompt_ids,
                sample_ids=tuple(itertools.islice(ids, len(ask.limits))),
                limits=ask.limits,
            )
            for ask in asks
        ]

    def generate(self, prepared: list[Request]) -> list[Completion]:
        params = SamplingParams(
            max_new_tokens=self.response_tokens, temperature=1.0, ignore_eos=True
        )
        self.calls += 1
        return list(self.engine.generate(prepared, params, seed=self.seed, step=self.calls))

    def answers(self, generated: list[Completion], asks: Sequence[Ask]) -> list[Answer]:
        answers = []
        for completion in sorted(generated, key=lambda completion: completion.sample_id):
            # A count of log-probs that differs from the tokens' is as wrong as one that is not
            # finite.
            whole = len(completion.log_probs) == len(completion.token_ids)
            answers.append(
                Answer(
                    len(completion.token_ids),
                    whole and all(map(math.isfinite, completion.log_probs)),
                )
            )
        return answers

    def statistics(self) -> dict[str, float]:
        assert isinstance(self.engine, EmbeddedEngine)
        kept = {
            f"asleep_gib/{what}": size / GIB for what, size in self.engine.kept_asleep().items()
        }
        return {**self.engine.statistics(), **kept}


if __name__ == "__main__":
    serve(Ours, __doc__)
