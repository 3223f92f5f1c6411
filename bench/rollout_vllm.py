"""vLLM at the work of `rollout.py`, which starts this script. What makes it fast keeps its
defaults: compilation, prefix cache, asynchronous scheduling. CUDA graphs are captured for all batch
sizes: by default vLLM stops at 512 rows.

Each sample is a request of its own, as only a request has a limit; the prefix cache serves the
samples of one prompt. Log-probs are on; taking them out of vLLM's objects is not timed.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

# Before vllm reads them. FlashInfer's sampler is an optional package that compiles kernels at the
# first use.
os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", VLLM_USE_FLASHINFER_SAMPLER="0"
)

import torch
import vllm
from rollout_work import Answer, Ask, Job, serve


def graphs_up_to(rows: int) -> dict[str, Any]:
    """Return vLLM's configuration with CUDA graphs for batches of up to `rows`."""
    return {"max_cudagraph_capture_size": rows}


class VLLM:
    """A `Side`."""

    def __init__(self, job: Job) -> None:
        self.versions = f"vllm {vllm.__version__}, torch {torch.__version__}"
        self.engine = vllm.LLM(
            model=job.folder,
            load_format=job.load_format,
            skip_tokenizer_init=True,
            dtype=job.dtype,
            max_model_len=job.prompt_tokens + job.response_tokens,
            max_num_seqs=job.max_num_seqs,
            gpu_memory_utilization=job.gpu_memory_utilization,
            compilation_config=graphs_up_to(job.max_num_seqs),
        )

    def prepare(self, asks: Sequence[Ask]) -> tuple[list[Any], list[Any]]:
        prompts: list[Any] = [
            {"prompt_token_ids": list(ask.prompt_ids)} for ask in asks for _ in ask.limits
        ]
        # logprobs=0: those of the drawn tokens, and of no other.
        params = [
            vllm.SamplingParams(
                temperature=1.0, max_tokens=limit, ignore_eos=True, logprobs=0, detokenize=False
            )
            for ask in asks
            for limit in ask.limits
        ]
        return prompts, params

    def generate(self, prepared: tuple[list[Any], list[Any]]) -> list[Any]:
        prompts, params = prepared
        return self.engine.generate(prompts, params, use_tqdm=False)

    def answers(self, generated: list[Any], asks: Sequence[Ask]) -> list[Answer]:
        return [
            Answer(len(tokens), all(map(math.isfinite, drawn)))
            for tokens, drawn in self.drawn(generated)
        ]

    def drawn(self, generated: list[Any]) -> list[tuple[list[int], list[float]]]:
        """Tokens and their log-probs, sample by sample."""
        outputs = [request.outputs[0] for request in generated]
        return [
            (
                list(each.token_ids),
                [
                    at[token].logprob
                    for token, at in zip(each.token_ids, each.logprobs, strict=True)
                ],
            )
            for each in outputs
        ]

    def statistics(self) -> dict[str, float]:
        return {}


if __name__ == "__main__":  # vLLM starts a process of its own, which imports this file again
    serve(VLLM, __doc__)
