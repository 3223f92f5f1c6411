"""The least time that a GRPO step can take on this machine.

Operations at its best matrix speed, cache reads at its best memory speed. Element-wise work,
sampling and Python count nothing here, so no program reaches it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

REPEATS = 12


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds measured on this machine, with as many threads as the run has."""

    gflops: float  # fp32 matrix products, 10^9 operations a second
    gb_per_s: float  # copying, bytes read and written


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model that decide how long a token takes.

    Parameters are those of linear layers; a multiply-add is two operations.
    """

    body: int  # parameters of all matrices but the head and experts
    head: int
    attention: int  # operations for each pair of a query and a key, all layers
    cache_bytes: int  # keys and values of one token, all layers, fp32
    experts: int = 0  # parameters of all experts
    active: float = 1.0  # share of the experts that a token visits
    # a sliding window, and the share of `cache_bytes` in layers that have it
    window: int | None = None
    windowed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step: P prompts of `prompt` tokens, `samples` responses of `new` tokens each."""

    prompts: int
    prompt: float
    samples: int
    new: int

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


def measure_machine(cache_bytes: int) -> Machine:
    """Measure products of 1,024 x 1,024 matrices and copies of `cache_bytes` bytes."""
    one = torch.randn(1024, 1024)
    other = torch.randn(1024, 1024)
    source = torch.ones(max(1, cache_bytes // 4))
    target = torch.empty_like(source)
    return Machine(
        gflops=2 * 1024**3 / _best(lambda: torch.mm(one, other)) / 1e9,
        gb_per_s=8 * source.numel() / _best(lambda: target.copy_(source)) / 1e9,
    )


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def read_shape(folder: Path) -> Shape:
    """Return the sizes of the configuration in `folder`, counted on a model without memory."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embedded = {id(model.get_input_embeddings().weight)}
    head = model.get_output_embeddings().weight
    body = experts = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or id(parameter) in embedded or parameter is head:
            continue
        if ".experts." in name:
            experts += parameter.numel() if parameter.ndim == 3 else 0
        else:
            body += parameter.numel()

    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return Shape(
        body=body,
        head=head.numel(),
        attention=4 * config.num_attention_heads * width * config.num_hidden_layers,
        cache_bytes=8 * config.num_key_value_heads * width * config.num_hidden_layers,
        experts=experts,
        active=config.num_experts_per_tok / count if experts else 1.0,
        window=getattr(config, "sliding_window", None),
        windowed=kinds.count("sliding_attention") / len(kinds),
    )


def cached_bytes(shape: Shape, work: Work) -> int:
    """Return the size of the key-value cache halfway through the responses."""
    return int(work.rows * (work.prompt + work.new / 2) * shape.cache_bytes)


def rollout_floor(machine: Machine, shape: Shape, work: Work) -> float:
    """Return the least seconds of a rollout.

    Prompts are computed once. Then every token takes a forward pass, which reads all keys and
    values before it.
    """
    mean_context = work.prompt + work.new / 2
    # the last token drawn is not fed back
    tokens = work.prompts * work.prompt + work.rows * (work.new - 1)
    operations = 2 * shape.body * tokens + 2 * shape.head * work.rows * work.new
    operations += shape.attention * mean_context * work.rows * work.new
    read = cached_bytes(shape, work) * work.new
    return operations / machine.gflops / 1e9 + read / machine.gb_per_s / 1e9


def update_floor(machine: Machine, shape: Shape, work: Work) -> float:
    """Return the least seconds of an update.

    Forward and backward take three times the operations of a forward pass, over prompts and
    responses.
    """
    length = work.prompt + work.new
    forward = 2 * shape.body * work.rows * length + 2 * shape.head * work.rows * work.new
    forward += shape.attention * work.rows * length * length / 2
    return 3 * forward / machine.gflops / 1e9
