"""vLLM at the rollout of `vision.py`, which starts this script.

Every prompt is one request with all its samples, so vLLM prepares its picture once. That
preparation is timed; ours get their pictures prepared. vLLM keeps prepared pictures and the
features of its tower, so the same pictures are drawn from twice: new, and once more with an empty
prefix cache.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Before vllm reads them, see `rollout_vllm.py`.
os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", VLLM_USE_FLASHINFER_SAMPLER="0"
)

import numpy as np
from PIL import Image
from processes import JobFile, side_arguments


@dataclass(frozen=True, kw_only=True)
class Job(JobFile):
    """The work of one rollout."""

    folder: str  # of the model, with its tokenizer and processor
    dtype: str
    prompts: int
    samples: int
    text_tokens: int
    picture_tokens: int  # of a prompt's picture
    picture_side: int  # its pixels
    picture_token: int
    response_tokens: int
    gpu_memory_utilization: float = 0.6

    @property
    def rows(self) -> int:
        """Return the number of samples."""
        return self.prompts * self.samples


def make_requests(job: Job, seed: int) -> list[dict[str, Any]]:
    """Return prompts of random tokens, each with a picture of random pixels."""
    draw = np.random.default_rng(seed)
    requests = []
    for _ in range(job.prompts):
        ids = draw.integers(40, 500, size=job.text_tokens).tolist()
        pixels = draw.integers(256, size=(job.picture_side, job.picture_side, 3), dtype=np.uint8)
        requests.append(
            {
                # vLLM puts as many tokens as the picture has in place of one
                "prompt_token_ids": [*ids[:8], job.picture_token, *ids[8:]],
                "multi_modal_data": {"image": Image.fromarray(pixels)},
            }
        )
    return requests


def check(job: Job, outputs: Sequence[Any]) -> None:
    """Raise RuntimeError unless vLLM read and drew as many tokens as ours."""
    prompt_tokens = job.text_tokens + job.picture_tokens
    for request in outputs:
        if len(request.prompt_token_ids) != prompt_tokens:
            raise RuntimeError(
                f"vLLM read {len(request.prompt_token_ids)} tokens of a prompt of {prompt_tokens}"
            )
        drawn = [len(output.token_ids) for output in request.outputs]
        if drawn != [job.response_tokens] * job.samples:
            raise RuntimeError(
                f"vLLM drew {drawn} tokens for {job.samples} samples of {job.response_tokens}"
            )


def run(job: Job) -> dict[str, Any]:
    """Return the versions, and the seconds of each rollout."""
    import torch
    import vllm
    from rollout_vllm import graphs_up_to

    engine = vllm.LLM(
        model=job.folder,
        dtype=job.dtype,
        max_model_len=job.text_tokens + job.picture_tokens + job.response_tokens,
        max_num_seqs=job.rows,
        gpu_memory_utilization=job.gpu_memory_utilization,
        compilation_config=graphs_up_to(job.rows),
        limit_mm_per_prompt={"image": 1},
    )
    sampling = vllm.SamplingParams(
        n=job.samples,
        temperature=1.0,
        max_tokens=job.response_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )

    seconds = {}
    for name, seed in (("warm-up", 1), ("new pictures", 2), ("the same pictures", 2)):
        requests = make_requests(job, seed)
        engine.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = engine.generate(requests, sampling, use_tqdm=False)
        seconds[name] = time.perf_counter() - begin
        check(job, outputs)
    return {"versions": f"vllm {vllm.__version__}, torch {torch.__version__}", "seconds": seconds}


def main() -> None:
    given = side_arguments(__doc__)
    result = run(Job.read(given.job))
    given.json.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":  # vLLM starts a process of its own, which imports this file again
    main()
