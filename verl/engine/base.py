"""The training engine: packs rows, runs forward and backward over them, steps the optimizer, saves and loads."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.config import FSDPConfig, OptimConfig
from verl.distributed.collectives import all_reduce_sum
from verl.distributed.fsdp import apply_fsdp, full_tensor, reshard
from verl.distributed.mesh import init_mesh
from verl.engine.guard import find_offenders
from verl.engine.microbatch import TokenBudget, plan_micro_batches
from verl.engine.optim import Schedule, build_adamw, build_schedule
from verl.engine.packing import MicroBatch, MiniBatch
from verl.engine.state import load_state, save_state, transformer_of
from verl.models.attention import apply_checkpointing
from verl.protocol import DataProto

# Activations of a pass stay nearer to the caches: on two cores, the update of a small model on 10,000 tokens took 0.6 s
# in passes of 4,096 tokens and 0.74 s in one.
CPU_PASS_TOKENS = 4096


@dataclass(frozen=True)
class LossOutput:
    """What a loss function returns for one micro-batch."""

    loss: torch.Tensor  # scalar: this micro-batch's share of the mini-batch's loss
    means: dict[str, torch.Tensor] = field(default_factory=dict)  # (M,), averaged over the mini-batch's response_mask
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # scalars: shares of a number of the mini-batch


# (outputs of the module, packed columns, row number of each token) -> LossOutput
LossFunction = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor], LossOutput]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step. `offenders` names the rows that made it be skipped, as far as they can be told."""

    grad_norm: float  # before clipping
    lr: float  # with which the step was made
    skipped: bool
    offenders: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Pending:
    """The mini-batch whose gradients wait for `step`, kept to find out which row spoilt it."""

    mini_batch: MiniBatch
    plan: list[list[int]]
    loss_fn: LossFunction
    forward_arguments: dict[str, Any]
    loss_is_finite: bool


class TrainEngine:
    """Owns one packed module (`PackedCausalLM`, `PackedValueModel`), with optimizer and schedule if it is trained.

    On CUDA the module is sharded by FSDP2, also over a mesh of one: fp32 parameters, moments and accumulated gradients,
    bf16 forward and backward. On CPU it stays a plain module of its own dtype. The module is in train mode for every
    pass, so that log-probs before and during an update come from the same numerics (dropout is zeroed at load).

    Args:
        module: wrapper with the Hugging Face module as attribute `model`; moved to `device` and sharded in place.
        optim: None for a module that is only evaluated.
        grad_clip: largest total norm of the gradient; None or 0 clips nothing.
        total_steps: training steps of the run, for the schedule.
        shard, compute_dtype: instead of the defaults by device (CUDA: True and bf16; CPU: False and None, which means
            the dtype of the parameters).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optim: OptimConfig | None,
        fsdp: FSDPConfig,
        grad_clip: float | None,
        device: torch.device,
        total_steps: int,
        gradient_checkpointing: bool,
        shard: bool | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.device = device
        self.grad_clip = grad_clip
        self.is_sharded = device.type == "cuda" if shard is None else shard
        if compute_dtype is None and device.type == "cuda":
            compute_dtype = torch.bfloat16
        self.module = module.to(device).train()
        # Checkpointing before sharding: the recomputed forward must find the weights gathered by the layer's own hooks.
        if gradient_checkpointing:
            apply_checkpointing(transformer_of(self.hf_model))
        if self.is_sharded:
            apply_fsdp(self.module, init_mesh(device), fsdp, compute_dtype=compute_dtype)
        self.optimizer: torch.optim.AdamW | None = None
        self._schedule: Schedule = lambda step: 1.0
        self._base_lr = 0.0
        if optim is not None:
            # After sharding, which replaces the parameters.
            self.optimizer = build_adamw(self.module.parameters(), optim)
            self._schedule = build_schedule(optim, total_steps)
            self._base_lr = optim.lr
        self._pending: _Pending | None = None
        self._schedule_position = 0
        self._stepped_since_schedule = False
        self._set_schedule_position(0)

    # ---------------------------------------------------------------- evaluation

    @torch.no_grad()
    def infer(self, batch: DataProto, budget: TokenBudget, **forward_arguments: Any) -> dict[str, torch.Tensor]:
        """Outputs of the module for every response token: (B, R) fp32 on the host, zero where no token is.

        no_grad rather than inference_mode: rollout engines alias these weights, and inference tensors would leak.
        """
        self.module.train()
        mini_batch = MiniBatch(batch, (), self.device)
        plan = self._plan(mini_batch.lengths, budget)
        pieces: dict[str, list[torch.Tensor]] = {}
        for rows in plan:
            for name, values in self.module(mini_batch.pack(rows).packed, **forward_arguments).items():
                pieces.setdefault(name, []).append(values)
        if self.is_sharded:
            reshard(self.module)
        return {name: mini_batch.unpack(plan, parts) for name, parts in pieces.items()}

    # ---------------------------------------------------------------- training

    def forward_backward(
        self,
        batch: DataProto,
        budget: TokenBudget,
        loss_fn: LossFunction,
        columns: Iterable[str],
        **forward_arguments: Any,
    ) -> dict[str, float]:
        """Gradients of one whole mini-batch, from zero, whatever the micro-batches; returns its means and sums.

        `columns` are the batch's (B, R) columns that `loss_fn` reads, beside `response_mask` and `weights`, which it
        always gets. The host waits for the device once, at the end.
        """
        assert self.optimizer is not None, "an engine without optimizer cannot train"
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        mini_batch = MiniBatch(batch, dict.fromkeys(("response_mask", "weights", *columns)), self.device)
        plan = self._plan(mini_batch.lengths, budget)
        totals = _Totals(self.device)
        for rows in plan:
            micro_batch = mini_batch.pack(rows)
            totals.add(self._backward(micro_batch, loss_fn, forward_arguments), micro_batch.columns["response_mask"])
        metrics, loss_is_finite = totals.read()
        self._pending = _Pending(mini_batch, plan, loss_fn, forward_arguments, loss_is_finite)
        return metrics

    def step(self) -> StepResult:
        """Clip and step on the gradients of `forward_backward`, then drop them.

        A loss or gradient that is not finite changes nothing: parameters, moments and schedule stay as they are, and
        the rows that caused it are looked for, at the price of a few more passes.
        """
        assert self.optimizer is not None, "an engine without optimizer cannot train"
        assert self._pending is not None, "step() comes after forward_backward()"
        norm = self._gradient_norm()
        grad_norm, lr = norm.item(), self.optimizer.param_groups[0]["lr"]
        skipped = not (self._pending.loss_is_finite and math.isfinite(grad_norm))
        offenders: list[str] = []
        if skipped:
            offenders = self._find_offenders(self._pending)
        else:
            if self.grad_clip:
                nn.utils.clip_grads_with_norm_(self.module.parameters(), self.grad_clip, norm)
            self.optimizer.step()
            self._stepped_since_schedule = True
        self.optimizer.zero_grad(set_to_none=True)
        self._pending = None
        return StepResult(grad_norm=grad_norm, lr=lr, skipped=skipped, offenders=offenders)

    def step_schedule(self) -> None:
        """Advance the learning rate by one training step; once per training step, after its last `step`.

        Stays where it is if every optimizer step since the last call was skipped.
        """
        if self._stepped_since_schedule:
            self._set_schedule_position(self._schedule_position + 1)
            self._stepped_since_schedule = False

    # ---------------------------------------------------------------- weights

    def parameters_for_rollout(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of the Hugging Face module, as its `named_parameters` (a tied weight once).

        The tensors alias the parameters wherever this rank has all of them: read, don't write.
        """
        for name, parameter in self.hf_model.named_parameters():
            yield name, full_tensor(parameter)

    @property
    def hf_model(self) -> Any:
        """The Hugging Face module within the wrapper."""
        return self.module.model

    def save(self, folder: Path, *, tokenizer: Any = None) -> None:
        """`huggingface/` (configuration, fp32 weights, tokenizer if given) and, if trained, `optim.pt` in `folder`."""
        save_state(folder, self.hf_model, self.optimizer, self._schedule_position, tokenizer=tokenizer)

    def load(self, folder: Path) -> None:
        """Go back to what `save` wrote, bit for bit: weights, moments and the position in the schedule.

        Learning rate, decay and the shape of the schedule are those of this engine's configuration.
        """
        position = load_state(folder, self.hf_model, self.optimizer, self.device)
        if self.is_sharded:
            reshard(self.module)
        self._pending = None
        self._stepped_since_schedule = False
        self._set_schedule_position(position)

    # ---------------------------------------------------------------- inner parts

    def _plan(self, lengths: list[int], budget: TokenBudget) -> list[list[int]]:
        """The budget is the most a pass may take; on a CPU passes near CPU_PASS_TOKENS are faster than larger ones."""
        if self.device.type == "cpu" and budget.max_tokens is not None:
            enough = max([CPU_PASS_TOKENS, *lengths])
            budget = replace(budget, max_tokens=min(budget.max_tokens, enough))
        return plan_micro_batches(lengths, budget)

    def _backward(
        self, micro_batch: MicroBatch, loss_fn: LossFunction, forward_arguments: dict[str, Any]
    ) -> LossOutput:
        outputs = self.module(micro_batch.packed, **forward_arguments)
        result = loss_fn(outputs, micro_batch.columns, micro_batch.sequence)
        result.loss.backward()
        return result

    def _gradient_norm(self) -> torch.Tensor:
        """Total L2 norm of all gradients, a scalar on the device; the same on every rank."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        return full_tensor(nn.utils.get_total_norm(gradients))

    def _find_offenders(self, pending: _Pending) -> list[str]:
        assert self.optimizer is not None
        optimizer = self.optimizer

        def is_finite(rows: Sequence[int]) -> bool:
            optimizer.zero_grad(set_to_none=True)
            micro_batch = pending.mini_batch.pack(rows)
            loss = self._backward(micro_batch, pending.loss_fn, pending.forward_arguments).loss.detach()
            return bool((loss.isfinite() & self._gradient_norm().isfinite()).item())

        return [pending.mini_batch.describe(row) for row in find_offenders(pending.plan, is_finite)]

    def _set_schedule_position(self, position: int) -> None:
        self._schedule_position = position
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._base_lr * self._schedule(position)


class _Totals:
    """Numbers of a mini-batch, added up on the device in float64 so that their order hardly matters."""

    def __init__(self, device: torch.device) -> None:
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._loss = self._zero
        self._tokens = self._zero
        self._means: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, output: LossOutput, response_mask: torch.Tensor) -> None:
        """Count in one micro-batch; `response_mask` (M,)."""
        mask = response_mask.bool()
        self._loss = self._loss + output.loss.detach()
        self._tokens = self._tokens + mask.sum()
        for name, values in output.means.items():
            total = torch.where(mask, values.detach().double(), 0.0).sum()
            self._means[name] = self._means.get(name, self._zero) + total
        for name, value in output.sums.items():
            self._sums[name] = self._sums.get(name, self._zero) + value.detach()

    def read(self) -> tuple[dict[str, float], bool]:
        """All means and sums of all ranks, and whether the loss is finite."""
        everything = torch.stack([self._loss, self._tokens, *self._means.values(), *self._sums.values()])
        loss, tokens, *numbers = all_reduce_sum(everything).tolist()
        num_means = len(self._means)
        metrics = {name: number / max(tokens, 1.0) for name, number in zip(self._means, numbers[:num_means])}
        metrics.update(zip(self._sums, numbers[num_means:]))
        return metrics, math.isfinite(loss)
