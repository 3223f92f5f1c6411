"""vLLM's responses to the prompts of `agreement.py`.

That script starts this one with the folder of its files.
"""

import json
import sys
from pathlib import Path

from rollout_vllm import VLLM
from rollout_work import Ask, Job


def main() -> None:
    folder = Path(sys.argv[1])
    job = Job.read(folder / "job.json")
    (workload,) = job.workloads
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    side = VLLM(job)
    asks = [
        Ask(tuple(ids), tuple(row))
        for ids, row in zip(prompts, workload.limits(job.seed).tolist(), strict=True)
    ]
    drawn = side.drawn(side.generate(side.prepare(asks)))
    samples = [{"token_ids": tokens, "log_probs": log_probs} for tokens, log_probs in drawn]
    answer = {"versions": side.versions, "samples": samples}
    (folder / "vllm.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":  # vLLM starts a process of its own, which imports this file again
    main()
