"""Jobs for the ranks of a test: train a tiny model on their rows of a mini-batch.

A single process can run the same jobs.
"""

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.engine.batches import COLUMNS, Shape, gradients_of, make_batch, moments_of, smooth_loss
from tests.tiny_models import tiny_model
from verl.config import FSDPConfig, OptimConfig
from verl.distributed.collectives import Axis
from verl.distributed.fsdp import agree_on_weights, full_tensor
from verl.distributed.mesh import init_mesh
from verl.distributed.sequence_parallel import apply_sequence_parallel
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.engine.totals import LossOutput
from verl.models.critic import CriticModel
from verl.models.load import load_causal_lm
from verl.models.lora import apply_lora
from verl.models.packed import PackedCausalLM, PackedValueModel
from verl.protocol import DataProto
from verl.utils.errors import VerlError
from verl.workers.objective import Objective
from verl.workers.updates import run_updates

WHOLE = TokenBudget(max_tokens=100_000)
Deal = tuple[tuple[int, ...], ...]  # the rows of each data-parallel rank


@dataclass(frozen=True)
class Setup:
    """Settings of an engine for a test."""

    family: str = "qwen2"
    double: bool = True
    sequence: int = 1
    fsdp_size: int = -1
    checkpointing: bool = False
    activation_offload: bool = False
    param_offload: bool = False
    offload_policy: bool = False
    shard: bool | None = None
    share_prompts: bool = True
    lora: bool = False
    compiles: bool = False
    device: str = "cpu"
    compute_dtype: str | None = None


def new_engine(setup: Setup) -> TrainEngine:
    """Make an engine over a tiny model.

    On CUDA the model is larger, as bf16 kernels require, and has smaller weights, so that rounding
    errors stay small.
    """
    on_cuda = setup.device == "cuda"
    size = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96} if on_cuda else {}
    model = tiny_model(setup.family, dtype=torch.float64 if setup.double else torch.float32, **size)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 if on_cuda else 1.0)

    if setup.lora:
        apply_lora(model, rank=4, alpha=8)
        with torch.no_grad():
            for number, parameter in enumerate(
                part for part in model.parameters() if part.requires_grad
            ):
                # B starts at zero
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))

    options = EngineOptions(
        device=torch.device(setup.device),
        optim=OptimConfig(lr=1e-2),
        fsdp_config=FSDPConfig(
            fsdp_size=setup.fsdp_size,
            param_offload=setup.param_offload,
            optimizer_offload=setup.param_offload,
            offload_policy=setup.offload_policy,
            compute_dtype=setup.compute_dtype,
        ),
        grad_clip=0.5,
        enable_gradient_checkpointing=setup.checkpointing,
        ulysses_sequence_parallel_size=setup.sequence,
        enable_activation_offload=setup.activation_offload,
        shard=setup.shard,
        share_prompts=setup.share_prompts,
        use_torch_compile=setup.compiles,
    )
    return TrainEngine(PackedCausalLM(model), options, total_steps=5)


# Engines with constant weights are made once.
fixed_engine = functools.cache(new_engine)


def own_rows(engine: TrainEngine, batch: DataProto, deal: Deal) -> DataProto:
    return batch[list(deal[engine.mesh.data.rank])]


def gradient(
    setup: Setup,
    shapes: Sequence[Shape],
    deal: Deal,
    budget: TokenBudget,
    same_prompt: bool = False,
) -> dict[str, Any]:
    """Return gradient, norm, metrics and this rank's log-probs of one mini-batch."""
    engine = fixed_engine(setup)
    batch = make_batch(shapes)
    if same_prompt:
        prompt, _ = shapes[0]
        batch.batch["input_ids"][:, :prompt] = batch.batch["input_ids"][0, :prompt].clone()

    batch = own_rows(engine, batch, deal)
    log_probs = engine.infer(batch, budget, entropy=True)
    metrics = engine.forward_backward(batch, budget, smooth_loss, COLUMNS, entropy=True)
    # row numbers differ between ranks
    metrics = {name: value for name, value in metrics.items() if name != "row"}

    return {
        "gradient": gradients_of(engine),
        "norm": engine._gradient_norm().item(),
        "metrics": metrics,
        "log_probs": torch.stack(list(log_probs.values())),
        "mesh": (engine.mesh.data.size, engine.mesh.sequence.size),
    }


def train(
    setup: Setup, shapes: Sequence[Shape], deal: Deal, budget: TokenBudget, steps: int
) -> dict[str, Any]:
    """Return the metrics of some steps, and the parameters and moments after them."""
    engine = new_engine(setup)
    log = _steps(engine, shapes, deal, budget, range(steps))
    return {"log": log, **state_of(engine)}


def _steps(
    engine: TrainEngine, shapes: Sequence[Shape], deal: Deal, budget: TokenBudget, seeds: range
) -> list[dict[str, float]]:
    log = []
    for seed in seeds:
        batch = own_rows(engine, make_batch(shapes, seed=seed), deal)
        metrics = engine.forward_backward(batch, budget, smooth_loss, COLUMNS)
        log.append({"loss": metrics["loss"], "norm": engine.step().grad_norm})
        engine.step_schedule()
    return log


def state_of(engine: TrainEngine) -> dict[str, Any]:
    with engine.on_device(optimizer=True):
        moments = [
            value.full_tensor() if hasattr(value, "full_tensor") else value
            for value in moments_of(engine)
        ]
        moments = [value.clone() for value in moments]
    return {
        "parameters": {name: value.clone() for name, value in engine.parameters_for_rollout()},
        "moments": moments,
    }


def save(setup: Setup, folder: Path, shapes: Sequence[Shape], deal: Deal) -> dict[str, Any]:
    """Take two steps, save a checkpoint, and take two more steps."""
    engine = new_engine(setup)
    _steps(engine, shapes, deal, WHOLE, range(2))
    saved = state_of(engine)
    engine.save(folder)
    return {**saved, "log": _steps(engine, shapes, deal, WHOLE, range(2, 4))}


def load(setup: Setup, folder: Path, shapes: Sequence[Shape], deal: Deal) -> dict[str, Any]:
    """Load the checkpoint of `save`, and take two steps from it."""
    engine = new_engine(setup)
    engine.load(folder)
    loaded = state_of(engine)
    return {**loaded, "log": _steps(engine, shapes, deal, WHOLE, range(2, 4))}


def spoilt_step(setup: Setup, shapes: Sequence[Shape], deal: Deal, row: int) -> dict[str, Any]:
    """Take one step, one with a NaN in `row`, and one more."""
    engine = new_engine(setup)
    budget = TokenBudget(rows=2)
    engine.forward_backward(
        own_rows(engine, make_batch(shapes), deal), budget, smooth_loss, COLUMNS
    )
    engine.step()
    before = state_of(engine)
    batch = make_batch(shapes, seed=1)

    batch.batch["advantages"][row, 0] = float("nan")
    engine.forward_backward(own_rows(engine, batch, deal), budget, smooth_loss, COLUMNS)
    spoilt = engine.step()
    after = state_of(engine)
    engine.forward_backward(
        own_rows(engine, make_batch(shapes, seed=1), deal), budget, smooth_loss, COLUMNS
    )
    unchanged = all(
        torch.equal(after["parameters"][name], value)
        for name, value in before["parameters"].items()
    )

    unchanged &= all(
        torch.equal(one, other)
        for one, other in zip(after["moments"], before["moments"], strict=True)
    )
    return {"spoilt": spoilt, "unchanged": unchanged, "next": engine.step()}


class Smooth(Objective):
    """`smooth_loss` as an objective of the workers."""

    def columns(self, available: set[str]) -> list[str]:
        return list(COLUMNS)

    def __call__(self, *args: Any) -> Any:
        return smooth_loss(*args)


def update(
    setup: Setup, shapes: Sequence[Shape], deal: Deal, mode: str, rows: int | None
) -> dict[str, Any]:
    """Run `run_updates` over the rows with `loss_agg_mode` = `mode`."""
    engine = new_engine(setup)
    metrics = run_updates(
        engine,
        own_rows(engine, make_batch(shapes), deal),
        Smooth(),
        name="actor",
        mini_batch_rows=rows,
        epochs=1,
        shuffle=False,
        loss_agg_mode=mode,
        budget=WHOLE,
    )
    return {"loss": metrics["loss"], "norm": metrics["actor/grad_norm"], **state_of(engine)}


def values_gradient(sequence: int, shapes: Sequence[Shape], deal: Deal) -> dict[str, torch.Tensor]:
    """Return the critic's gradient of one mini-batch."""
    critic = CriticModel.from_causal_lm(tiny_model("llama", dtype=torch.float64))
    options = EngineOptions(
        device=torch.device("cpu"), optim=OptimConfig(), ulysses_sequence_parallel_size=sequence
    )
    engine = TrainEngine(PackedValueModel(critic), options, total_steps=1)

    def loss_fn(outputs: Any, columns: Any, row: torch.Tensor) -> Any:
        return smooth_loss({"log_probs": outputs["values"]}, columns, row)

    engine.forward_backward(own_rows(engine, make_batch(shapes), deal), WHOLE, loss_fn, COLUMNS)
    return gradients_of(engine)


def error_of_update(shapes: Sequence[Shape], deal: Deal, rows: int | None) -> str:
    return _error(lambda: update(Setup(), shapes, deal, "token-mean", rows))


def error_of_metrics(shapes: Sequence[Shape], deal: Deal) -> str:
    """Return the error of a loss that has a metric on the second rank alone."""
    engine = new_engine(Setup())
    own = {"only_here": torch.ones(())} if engine.mesh.data.rank == 1 else {}

    def loss_fn(*args: Any) -> LossOutput:
        output = smooth_loss(*args)
        return replace(output, sums={**output.sums, **own})

    rows = own_rows(engine, make_batch(shapes), deal)
    return _error(lambda: engine.forward_backward(rows, WHOLE, loss_fn, COLUMNS))


def error_of_heads() -> str:
    model = tiny_model("qwen2", num_attention_heads=3, num_key_value_heads=1, head_dim=8)
    return _error(lambda: apply_sequence_parallel(PackedCausalLM(model), Axis(size=2)))


def _error(function: Any) -> str:
    try:
        function()
    except VerlError as error:
        numbers = re.search(r"got \w+ (and|to) \w+", str(error))
        return f"{type(error).__name__}: {numbers[0] if numbers else error}"
    return "none"


def weights_that_were_read(
    folder: Path, dtype: str, lora_rank: int = 0, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of an engine after the first rank has read the model."""
    # adapters are initialized at random
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    model = load_causal_lm(folder, dtype=dtype, weights=os.environ["RANK"] == "0")
    if lora_rank:
        apply_lora(model, rank=lora_rank, alpha=8)
    engine = TrainEngine(PackedCausalLM(model), EngineOptions(device=torch.device(device)))

    found = {name: full_tensor(value).cpu() for name, value in engine.hf_model.named_parameters()}
    return {**found, **{name: value.cpu() for name, value in engine.hf_model.named_buffers()}}


def mismatch_of_folders(folders: list[Path]) -> str:
    """Return the error of a rank with a different model folder than the first rank."""
    rank = int(os.environ["RANK"])
    model = load_causal_lm(folders[rank], dtype="float32", weights=rank == 0)
    mesh = init_mesh(torch.device("cpu"))
    assert mesh.weights is not None
    try:
        agree_on_weights(model)
    except VerlError as error:
        return str(error)
    return ""
