"""The best that torch and transformers alone give at the work of `training.py`.

Rows are packed for `varlen_attn`, every layer is compiled, log-probs come in recomputed chunks,
AdamW is fused, and parameters are fp32 under bf16 autocast. `training.py` starts this script.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the FLOPs of the common part

import inspect
from itertools import accumulate

import torch
import torch.nn.functional as F
from rollout_models import versions
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from training_hf import Plain, autocast, policy_loss, with_lora
from training_work import Job, Numbers, Row, serve, trained_model
from transformers import AttentionInterface

CHUNK_LOGITS = 2**27
# torch 2.11 finds grouped heads by itself, later releases have an argument for them.
GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def packed_varlen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Return attention (1, N, H, D) of (1, H, N, D), causal within each sequence."""
    ends = asked["cu_seq_lens_q"]
    longest = asked["max_length_q"]
    # Autocast leaves RoPE in fp32, and does not know varlen_attn.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))

    if q.is_cuda:
        out = varlen_attn(
            q,
            k,
            v,
            ends,
            ends,
            longest,
            longest,
            scale=asked["scaling"],
            window_size=(-1, 0),
            **GROUPED,
        )
    else:
        out = one_by_one(q, k, v, ends)

    return out[None], None


@torch.compiler.disable
def one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """Do the same on a CPU, which has no such kernel: to try the script."""
    sizes = ends.diff().tolist()
    parts = [
        F.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in qkv), is_causal=True, enable_gqa=True
        )
        for qkv in zip(*(tensor.split(sizes) for tensor in (q, k, v)))
    ]
    return torch.cat([part[0].transpose(0, 1) for part in parts])


AttentionInterface.register("bench_varlen", packed_varlen)


class Torch(Plain):
    """A `Side`."""

    def __init__(self, job: Job) -> None:
        self.versions = versions(job.device)
        self.device = torch.device(job.device)
        self.micro_tokens = job.micro_tokens
        self.model = with_lora(trained_model(job), job.lora).train()
        self.model.set_attn_implementation("bench_varlen")
        self.train(job)
        self.chunk: Any = chunk_log_probs
        if job.compile:
            self.chunk = torch.compile(chunk_log_probs, backend=job.backend)
            for layer in self.model.base_model.layers:
                layer.compile(backend=job.backend)

    def gradients(self, rows: list[Row]) -> Numbers:
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(row.response) for row in rows)
        total = torch.zeros(2, device=self.device)

        for part in self._parts(rows):
            log_probs = self._log_probs(part, rows)
            counts = torch.tensor([len(row.response) for row in part])
            advantages = (
                torch.tensor([row.advantage for row in part])
                .repeat_interleave(counts)
                .to(self.device)
            )
            loss = policy_loss(
                log_probs, advantages, torch.full_like(log_probs.detach(), 1 / tokens)
            )
            loss.backward()
            total += torch.stack([loss.detach(), log_probs.detach().sum() / tokens])

        return Numbers(*total.tolist())

    @torch.no_grad()
    def log_probs(self, rows: list[Row]) -> float:
        total = sum(self._log_probs(part, rows).sum() for part in self._parts(rows))
        return float(total) / sum(len(row.response) for row in rows)

    def _parts(self, rows: list[Row]) -> list[list[Row]]:
        """Pack rows, longest first, each into the first micro-batch that has room."""
        parts: list[list[Row]] = []
        room: list[int] = []
        for row in sorted(rows, key=lambda row: -row.length):
            index = next(
                (index for index, free in enumerate(room) if free >= row.length), len(parts)
            )
            if index == len(parts):
                parts.append([])
                room.append(self.micro_tokens)
            parts[index].append(row)
            room[index] -= row.length
        return parts

    def _log_probs(self, part: list[Row], rows: list[Row]) -> Tensor:
        """Return log-probs (M,) of the response tokens of `part`, in order."""
        ids = torch.cat([piece for row in part for piece in (row.prompt, row.response)])
        positions = torch.cat([torch.arange(row.length) for row in part])
        starts = [0, *accumulate(row.length for row in part)]
        answered = torch.cat(
            [
                torch.arange(start + len(row.prompt), start + row.length)
                for start, row in zip(starts, part)
            ]
        )

        ids, positions, answered = (tensor.to(self.device) for tensor in (ids, positions, answered))
        ends = torch.tensor(starts, dtype=torch.int32, device=self.device)
        # The longest row of all: a number of the batch's own would compile the layers again.
        longest = max(row.length for row in rows)

        with autocast(self.device):
            output = self.model.base_model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                cu_seq_lens_q=ends,
                cu_seq_lens_k=ends,
                max_length_q=longest,
                max_length_k=longest,
            )
            hidden = output.last_hidden_state[0].index_select(0, answered - 1)
            weight = self.model.get_output_embeddings().weight
            count = max(1, CHUNK_LOGITS // weight.shape[0])
            pieces = [
                checkpoint(self.chunk, piece, weight, targets, use_reentrant=False)
                for piece, targets in zip(hidden.split(count), ids[answered].split(count))
            ]

        return torch.cat(pieces)


def chunk_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")


if __name__ == "__main__":
    serve(Torch, __doc__)
