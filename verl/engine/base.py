"""The training engine: pack rows, run forward and backward, step the optimizer, save and load."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.checkpoint.sharded import ShardedWriter
from verl.distributed.collectives import max_of
from verl.distributed.fsdp import full_tensor, recover, reshard, sync_gradients
from verl.distributed.mesh import Mesh, init_mesh
from verl.distributed.offload import Offload
from verl.engine.apply import apply_to_module
from verl.engine.engine_setup import EngineSetup
from verl.engine.footprint import EngineFootprint
from verl.engine.guard import find_offenders_in_turns, names_on_all_ranks
from verl.engine.memory import Result
from verl.engine.microbatch import Plan, TokenBudget
from verl.engine.model_shape import ModelShape
from verl.engine.optim import build_optimizer, moment_tensors
from verl.engine.options import EngineOptions
from verl.engine.packing import MicroBatch, MiniBatch
from verl.engine.pass_sizes import PassSizes
from verl.engine.schedule import LearningRate
from verl.engine.state import load_state, save_state
from verl.engine.totals import LossFunction, LossOutput, Totals
from verl.models.attention import end_checkpoints
from verl.models.lora import adapted_layers, adapter_state, merged_parameters, plain_parameters
from verl.protocol import DataProto
from verl.single_controller import note_progress
from verl.utils.logging import logger
from verl.utils.peaks import phase_peaks
from verl.weight_sync.fingerprint import FingerprintLog
from verl.weight_sync.shards import gathered

# The engines of this process, which share its device.
_engines: "weakref.WeakSet[TrainEngine]" = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step. `offenders` names the rows that made it be skipped, as far as known."""

    grad_norm: float  # before clipping
    lr: float  # with which the step was made
    skipped: bool
    offenders: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Pending:
    """A mini-batch with gradients that wait for `step`, kept to find rows that are not finite."""

    mini_batch: MiniBatch
    plan: Plan
    loss_fn: LossFunction
    forward_arguments: dict[str, Any]
    loss_is_finite: bool


class TrainEngine:
    """Own one packed module (`PackedCausalLM`, `PackedValueModel`) and its optimizer.

    On CUDA the module is sharded by FSDP2, also over a mesh of one: fp32 parameters, moments and
    accumulated gradients, bf16 forward and backward. On CPU one process keeps a plain module of its
    own dtype, and several shard it. The module is in train mode for every pass, so that log-probs
    before and during an update come from the same numerics (dropout is zeroed at load).

    Several ranks (see `Mesh`) make every call together. Each data-parallel rank gives its own rows
    of the mini-batch, and as many calls; ranks along the sequence axis give the same rows. Losses
    are shares of the whole mini-batch's, so gradients are summed over the ranks; metrics, the
    gradient's norm, skipped steps and offenders are the same on all.

    Parallelism is applied from outside, in this order: LoRA (by the worker, before this engine),
    `apply_to_module`, the optimizer, off-load of parameters and moments.

    Args:
        module: wrapper with the Hugging Face module as attribute `model`; moved to the device and
            sharded in place.
        options: see `EngineOptions`.
        total_steps: training steps of the run, for the schedule of the learning rate.
    """

    def __init__(self, module: nn.Module, options: EngineOptions, *, total_steps: int = 0) -> None:
        self.options = options
        fsdp = options.fsdp_config
        self.mesh: Mesh = init_mesh(
            options.device,
            fsdp_size=fsdp.fsdp_size,
            sequence_parallel_size=options.ulysses_sequence_parallel_size,
            shard=options.shards_alone(next(module.parameters()).itemsize),
        )
        self.device = device = self.mesh.device

        # A sharded module comes to the device layer by layer, as it is cut.
        self.module = (module if self.is_sharded else module.to(device)).train()
        self._applied = apply_to_module(self.module, self.mesh, options)

        self.optimizer: torch.optim.Optimizer | None = None
        if options.optim is not None:
            # After sharding, which replaces the parameters.
            self.optimizer = build_optimizer(self.module, options.optim)
            self._learning_rate = LearningRate(self.optimizer, options.optim, total_steps)
        self._pending: _Pending | None = None

        self._is_adapted = bool(adapted_layers(self.hf_model))
        # Listing them takes a third of a hand-over.
        self._named_parameters = list(plain_parameters(self.hf_model))
        self.sizes = PassSizes(self.mesh, options, self._bytes_to_come)
        _engines.add(self)

        # A plain module lies on the host anyway, and rollout engines may alias its weights.
        moves = self.is_sharded and not fsdp.offload_policy
        self._checkpoints = ShardedWriter(self.mesh.world)
        self._parameters: Offload | None = None
        if moves and fsdp.param_offload:
            self._parameters = Offload(self.module.parameters, device)
        self._moments: Offload | None = None
        if moves and fsdp.optimizer_offload:
            self._moments = Offload(partial(moment_tensors, self.optimizer), device)

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are shards (FSDP2), also where one rank has all of them."""
        return self.mesh.weights is not None

    @cached_property
    def footprint(self) -> EngineFootprint:
        """Bytes of this engine and of its passes, predicted from shapes."""
        shape = ModelShape.from_module(self.module)
        setup = EngineSetup.of(
            self.options,
            shape,
            self.mesh.world.size,
            fused_mlp=self._applied.fused_mlp,
            keeps_gathered=self._applied.keeps_gathered,
        )
        return EngineFootprint(shape, setup)

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        """Keep parameters, and moments if asked for, on the device within this context.

        Tensors that `param_offload` and `optimizer_offload` keep on the host come and go with the
        outermost context. Every method opens one for itself; hold one around several calls, and
        all is moved once.
        """
        with ExitStack() as stack:
            if self._parameters is not None:
                stack.enter_context(self._parameters.on_device())
            if optimizer and self._moments is not None:
                stack.enter_context(self._moments.on_device())
            yield

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Surround forward and backward passes.

        No weights stay gathered after them, because they may change before the next ones.
        """
        with self.on_device():
            yield
            reshard(self.module)

    # ---------------------------------------------------------------- evaluation

    @torch.no_grad()
    def infer(
        self,
        batch: DataProto,
        budget: TokenBudget,
        columns: Iterable[str] = (),
        **forward_arguments: Any,
    ) -> dict[str, Tensor]:
        """Compute the outputs of the module for every response token.

        Outputs are (B, R) fp32 on the host, zero where no token is; vectors are (B, R, H) in their
        own dtype.

        no_grad rather than inference_mode: rollout engines alias these weights, and inference
        tensors would leak.

        Args:
            columns: those of the batch that the module reads in addition to its tokens.
        """
        self.module.train()
        mini_batch = self._mini_batch(batch, columns)

        def passes(plan: Plan) -> dict[str, Tensor]:
            pieces: dict[str, list[Tensor]] = {}
            with self._passes():
                for number, rows in enumerate(plan):
                    note_progress(number, len(plan), "micro-batches")
                    packed = self.sizes.budgets.saw(mini_batch.pack(rows)).packed
                    for name, values in self.module(packed, **forward_arguments).items():
                        # Vectors of all passes would be as large as activations.
                        kept = values if values.ndim == 1 else values.cpu()
                        pieces.setdefault(name, []).append(kept)
            return {name: mini_batch.unpack(plan, parts) for name, parts in pieces.items()}

        return self._with_room(
            mini_batch, budget, passes, lambda *tokens: self.footprint.forward(*tokens)
        )

    # ---------------------------------------------------------------- training

    def forward_backward(
        self,
        batch: DataProto,
        budget: TokenBudget,
        loss_fn: LossFunction,
        columns: Iterable[str],
        *,
        on_restart: Callable[[], None] = lambda: None,
        **forward_arguments: Any,
    ) -> dict[str, float]:
        """Compute the gradients of one whole mini-batch, from zero; return its means and sums.

        The gradients do not depend on the micro-batches. The host waits for the device once, at
        the end. Where memory runs out (see `PassGuard`), all starts again with smaller passes.

        Args:
            columns: the batch's (B, R) columns that `loss_fn` reads, in addition to `response_mask`
                and `weights`, which it always gets.
            on_restart: called before a restart, for a `loss_fn` that remembers its calls.
        """
        assert self.optimizer is not None, "an engine without optimizer cannot train"
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        mini_batch = self._mini_batch(batch, dict.fromkeys(("response_mask", "weights", *columns)))

        def passes(plan: Plan) -> dict[str, float]:
            totals = Totals(self.mesh)
            with self._passes():
                for number, rows in enumerate(plan):
                    if self._applied.keeps_gathered:
                        sync_gradients(self.module, number == len(plan) - 1)
                    micro_batch = self.sizes.budgets.saw(mini_batch.pack(rows))
                    output = self._backward(
                        micro_batch, loss_fn if rows else None, forward_arguments
                    )
                    if output is not None:
                        totals.add(output, micro_batch.columns["response_mask"])
            metrics, loss_is_finite = totals.read()
            self._pending = _Pending(mini_batch, plan, loss_fn, forward_arguments, loss_is_finite)
            return metrics

        return self._with_room(
            mini_batch, budget, passes, lambda *tokens: self.footprint.update(*tokens), on_restart
        )

    def step(self) -> StepResult:
        """Clip and step on the gradients of `forward_backward`, then drop them.

        A loss or gradient that is not finite changes nothing: parameters, moments and schedule stay
        as they are, and the rows that caused it are looked for, at the price of a few more passes.
        """
        assert self.optimizer is not None, "an engine without optimizer cannot train"
        assert self._pending is not None, "step() comes after forward_backward()"

        norm = self._gradient_norm()
        grad_norm = norm.item()
        lr = self._learning_rate.value
        skipped = not (self._pending.loss_is_finite and math.isfinite(grad_norm))

        offenders: list[str] = []
        if skipped:
            offenders = self._find_offenders(self._pending)
        else:
            if self.options.grad_clip:
                parameters = self.module.parameters()
                nn.utils.clip_grads_with_norm_(parameters, self.options.grad_clip, norm)
            with self.sizes.guard.reports("the optimizer's step"), self.on_device(optimizer=True):
                self.optimizer.step()
            self._learning_rate.note_step()

        self.optimizer.zero_grad(set_to_none=True)
        self._pending = None
        return StepResult(grad_norm=grad_norm, lr=lr, skipped=skipped, offenders=offenders)

    def step_schedule(self) -> None:
        """Advance the learning rate by one training step, after its last `step`.

        The rate stays where it is if every optimizer step since the last call was skipped.
        """
        self._learning_rate.advance()

    # ---------------------------------------------------------------- weights

    def parameters_for_rollout(
        self,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 512 << 20,
        log: FingerprintLog | None = None,
        place: Callable[[str], Tensor | None] = lambda name: None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Give (name, whole tensor) of the plain Hugging Face module, a tied weight once.

        Names are those of its `named_parameters`. The tensors alias the parameters wherever this
        rank has all of them: read, don't write. Shards are gathered a bucket at a time, in `dtype`
        if that is narrower, each to its `place`; see `gathered`. Adapters are merged into new
        tensors, one after the other.
        """
        named = self._named_parameters
        if self._is_adapted:
            named = merged_parameters(self.hf_model)
            bucket_bytes = 0
        with self.on_device():
            for name, tensor in gathered(
                named, bucket_bytes=bucket_bytes, dtype=dtype, log=log, place=place
            ):
                # A tensor that this rank has whole is the parameter's own memory, which goes away
                # afterwards.
                yield name, tensor if self._parameters is None else tensor.clone()
                del tensor  # or it would live while the next one is made

    def adapters_for_rollout(self) -> dict[str, Tensor]:
        """Return the LoRA factors, whole and on the host. Every rank must call it."""
        with self.on_device():
            return adapter_state(self.hf_model)

    def trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Give (name, tensor) of the parameters that learn, as they lie now, whole or sharded."""
        for name, parameter in self.hf_model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    @property
    def hf_model(self) -> Any:
        """The Hugging Face module within the wrapper."""
        return self.module.model

    def save(
        self,
        folder: Path,
        *,
        tokenizer: Any = None,
        merged: bool = False,
        optimizer: bool = True,
        extra: bool = True,
        in_background: bool = False,
    ) -> None:
        """Write a checkpoint of weights, or of adapters, see `save_state`.

        Args:
            tokenizer: saved along, if given.
            merged: also write weights that transformers loads.
            optimizer: also write the moments, if any exist.
            extra: also write the position in the schedule.
            in_background: training may go on while shards are written; see `is_saved`.
        """
        progress = {
            "schedule_position": 0 if self.optimizer is None else self._learning_rate.position,
            **self.sizes.state_dict(),
        }
        with phase_peaks.phase("a checkpoint", self.device), self.on_device(optimizer=True):
            save_state(
                folder,
                self.hf_model,
                self.optimizer if optimizer else None,
                progress if extra else {},
                self._checkpoints,
                tokenizer=tokenizer,
                merged=merged,
                in_background=in_background,
            )

    def is_saved(self, *, wait: bool) -> bool:
        """Return whether the background part of `save` is written; on rank 0: by all ranks.

        Raises the error that stopped it.
        """
        return self._checkpoints.is_done(wait=wait)

    def load(self, folder: Path, *, optimizer: bool = True, extra: bool = True) -> None:
        """Load a checkpoint of `save`, bit for bit: weights, moments and position in the schedule.

        Learning rate, decay and the shape of the schedule are those of this engine's configuration.
        """
        with self.on_device(optimizer=True):
            progress = load_state(folder, self.hf_model, self.optimizer if optimizer else None)
            reshard(self.module)

        if not extra:
            progress = {}
        if self.optimizer is not None and optimizer and "schedule_position" not in progress:
            logger.warning(
                "The learning-rate schedule begins anew: %s goes on with its optimizer, but "
                "without its position. Have 'extra' in checkpoint.save_contents and load_contents.",
                folder,
            )

        self._pending = None
        if self.optimizer is not None:
            self._learning_rate.go_to(progress.get("schedule_position", 0))
        self.sizes.load_state_dict(progress)

    # ---------------------------------------------------------------- inner parts

    def _with_room(
        self,
        mini_batch: MiniBatch,
        budget: TokenBudget,
        passes: Callable[[Plan], Result],
        predict: Callable[[int, int, int], dict[str, int]],
        on_restart: Callable[[], None] = lambda: None,
    ) -> Result:
        """Run `passes` in sizes that fit, see `PassSizes.run`."""

        def start_again() -> None:
            with self.on_device():
                recover(self.module)
            self.module.zero_grad(set_to_none=True)
            on_restart()

        return self.sizes.run(mini_batch, budget, passes, predict=predict, recover=start_again)

    def _mini_batch(self, batch: DataProto, columns: Iterable[str]) -> MiniBatch:
        return MiniBatch(
            batch,
            columns,
            self.device,
            share_prompts=self.options.share_prompts,
            sequence=self.mesh.sequence,
        )

    def _backward(
        self,
        micro_batch: MicroBatch,
        loss_fn: LossFunction | None,
        forward_arguments: dict[str, Any],
    ) -> LossOutput | None:
        """Run forward and backward; without `loss_fn` only take part in the collectives.

        That is for a micro-batch of no rows.
        """
        try:
            outputs = self.module(micro_batch.packed, **forward_arguments)
        except BaseException as error:
            end_checkpoints(error)
            raise
        if loss_fn is None:
            torch.stack([values.sum() for values in outputs.values()]).sum().backward()
            return None
        result = loss_fn(outputs, micro_batch.columns, micro_batch.sequence)
        result.loss.backward()
        return result

    def _gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients, a scalar on the device, equal on every rank."""
        gradients = [each.grad for each in self.module.parameters() if each.grad is not None]
        return full_tensor(nn.utils.get_total_norm(gradients))

    def _find_offenders(self, pending: _Pending) -> list[str]:
        """Return the names of all ranks' rows that have no finite loss or gradient."""
        assert self.optimizer is not None
        optimizer = self.optimizer

        def is_finite(rows: Sequence[int]) -> bool:
            optimizer.zero_grad(set_to_none=True)
            loss_fn = pending.loss_fn if rows else None
            micro_batch = pending.mini_batch.pack(rows)
            output = self._backward(micro_batch, loss_fn, pending.forward_arguments)
            finite = math.isfinite(self._gradient_norm().item())
            finite = finite and (output is None or math.isfinite(output.loss.item()))
            return max_of(int(not finite), self.mesh.world) == 0

        groups = [rows for rows in pending.plan if rows]
        with self._passes():
            rows = find_offenders_in_turns(groups, is_finite, self.mesh)
        return names_on_all_ranks(rows, pending.mini_batch.uids, self.mesh.data)

    def _bytes_to_come(self) -> int:
        """Return the bytes of moments that first optimizer steps in this process will make."""
        total = 0
        for engine in _engines:
            has_to_come = engine.optimizer is not None and not engine.optimizer.state
            stays = engine is self or engine._moments is None
            if has_to_come and stays:
                total += engine.footprint.moments
        return total
