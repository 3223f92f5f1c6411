"""Out of memory: errors name the keys, and smaller passes give the same gradients."""

import errno
import logging
import pickle
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.batches import COLUMNS, gradients_of, make_batch, smooth_loss
from tests.tiny_models import tiny_model
from tests.trainer.runs import run_in_child
from verl.config import FSDPConfig, OptimConfig
from verl.distributed.collectives import Axis
from verl.distributed.mesh import close_process_group
from verl.engine import agreement
from verl.engine.base import TrainEngine
from verl.engine.memory import PassGuard, memory_hints, reports_out_of_memory, shortage_of
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.packed import PackedCausalLM
from verl.utils.errors import OutOfMemoryError
from verl.utils.logging import logger

CPU = torch.device("cpu")
SHAPES = [(5, 9), (1, 3), (12, 20), (7, 1), (3, 14), (6, 6), (9, 2), (4, 4)]
KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
TOKENS = TokenBudget(max_tokens=16384, key=KEY, phase="the actor's update")
FROZEN = EngineOptions(device=CPU)
ON_CUDA = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 512.00 MiB is free. Including non-PyTorch memory, this process has 139.30 GiB memory in "
    "use."
)
ON_HOST = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(autouse=True)
def process_group():
    yield
    close_process_group()


class NarrowLM(PackedCausalLM):
    """A model that runs out of memory after its first layer with more than `room` tokens.

    The error comes in the forward or the backward pass.
    """

    room = 100_000
    in_backward = False
    error: BaseException = torch.OutOfMemoryError(ON_CUDA)

    def __init__(self, model) -> None:
        super().__init__(model)
        self.sizes: list[int] = []
        model.model.layers[0].register_forward_hook(self.after_first_layer)

    def forward(self, batch, **arguments):
        self.sizes.append(len(batch.input_ids))
        return super().forward(batch, **arguments)

    def after_first_layer(self, layer, arguments, output):
        if self.sizes[-1] > self.room:
            if not self.in_backward:
                raise self.error
            output.register_hook(self.run_out)

    def run_out(self, gradient):
        raise self.error


def make_engine(*, shard: bool = False, fsdp: FSDPConfig | None = None) -> TrainEngine:
    return TrainEngine(
        NarrowLM(tiny_model("qwen2")),
        EngineOptions(
            device=CPU,
            optim=OptimConfig(lr=1e-2),
            fsdp_config=fsdp or FSDPConfig(),
            grad_clip=1.0,
            enable_gradient_checkpointing=shard,
            shard=shard,
        ),
        total_steps=5,
    )


def update(engine: TrainEngine, budget: TokenBudget = TOKENS, **arguments):
    metrics = engine.forward_backward(make_batch(SHAPES), budget, smooth_loss, COLUMNS, **arguments)
    return metrics, gradients_of(engine)


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_mini_batch_restarts_with_half_the_tokens(shard: bool, in_backward: bool, caplog):
    expected_metrics, expected = update(make_engine(shard=shard))
    engine = make_engine(shard=shard)
    engine.module.room = 50
    engine.module.in_backward = in_backward
    with caplog.at_level("WARNING", logger="verl"):
        metrics, gradients = update(engine)
    total = sum(map(sum, SHAPES))
    assert engine.module.sizes[0] == total == 106

    lowered = [record.message for record in caplog.records]
    assert len(lowered) == 2, "106 tokens, 53, 32: the longest row"
    assert lowered[0].startswith(
        "Out of GPU memory in the actor's update: 1.50 GiB asked, 0.50 GiB free."
    )
    assert f"Set {KEY}=53 to start with it" in lowered[0]
    assert f"Set {KEY}=32 to start with it" in lowered[1]
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)

    # The lower budget is kept, and the step succeeds.
    assert not engine.step().skipped
    engine.module.sizes.clear()
    update(engine)
    assert max(engine.module.sizes) <= 32
    assert len(caplog.records) == 2


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "sharding",
    [{}, {"shard": True}, {"shard": True, "fsdp": FSDPConfig(reshard_after_forward=False)}],
)
def test_successful_passes_do_not_count_twice(sharding, in_backward: bool):
    _, expected = update(make_engine(**sharding))
    engine = make_engine(**sharding)
    engine.module.room = 35
    engine.module.in_backward = in_backward
    _, gradients = update(engine, TokenBudget(rows=2, key=KEY))
    assert engine.module.sizes == [18, 40, 14, 4, 32, 8, 17, 12, 11, 8]
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_evaluation_restarts_with_half_the_rows():
    engine = make_engine()
    batch = make_batch(SHAPES)
    expected = engine.infer(batch, TOKENS)["log_probs"]
    engine.module.room = 40
    rows = TokenBudget(rows=8, key=KEY)
    torch.testing.assert_close(
        engine.infer(batch, rows)["log_probs"], expected, rtol=1e-5, atol=1e-5
    )
    engine.module.sizes.clear()
    engine.infer(batch, rows)
    assert len(engine.module.sizes) == 4, "two rows each"
    with pytest.raises(OutOfMemoryError, match="A single row of 32 tokens does not fit"):
        engine.module.room = 20
        engine.infer(batch, rows)


def test_lower_number_of_rows_is_no_number_of_tokens():
    engine = make_engine()
    engine.module.room = 40
    engine.infer(make_batch(SHAPES), TokenBudget(rows=8, key=KEY))
    rows_key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    assert engine.sizes.guard.lowered == {rows_key: 2}

    engine.module.room = 1000
    engine.module.sizes.clear()
    engine.infer(make_batch(SHAPES), TOKENS)
    assert engine.module.sizes == [106]


def test_longer_row_is_tried_before_an_error():
    engine = make_engine()
    engine.module.room = 20
    engine.infer(make_batch([(5, 9), (1, 3), (3, 14)]), TOKENS)
    engine.module.room = 40
    assert engine.infer(make_batch(SHAPES), TOKENS)["log_probs"].shape == (8, 20)


def test_error_for_a_single_row_names_the_keys():
    engine = make_engine()
    engine.module.room = 31
    with pytest.raises(OutOfMemoryError) as raised:
        update(engine)
    text = str(raised.value)
    assert "the actor's update" in text
    assert "A single row of 32 tokens" in text

    for key in (
        "enable_gradient_checkpointing=True",
        "param_offload",
        "optimizer_offload",
        "gpu_memory_utilization",
    ):
        assert key in text

    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_are_raised_unchanged():
    engine = make_engine()
    engine.module.room, engine.module.error = 50, RuntimeError("size mismatch")
    with pytest.raises(RuntimeError, match="size mismatch"):
        update(engine)
    assert engine.module.sizes == [106]


def test_restart_callback_is_called():
    engine = make_engine()
    engine.module.room = 60
    restarts = []
    update(engine, on_restart=lambda: restarts.append(1))
    assert restarts == [1]


def test_resumed_run_keeps_the_lower_budget(tmp_path):
    engine = make_engine()
    other = make_engine()
    engine.module.room = 60
    update(engine)
    engine.step()
    engine.save(tmp_path)
    other.load(tmp_path)
    update(other)
    assert max(other.module.sizes) <= 53


def test_several_ranks_stop_and_name_the_rank():
    guard = PassGuard(CPU, Axis(size=4, rank=2), FROZEN)
    attempts = []

    def attempt(plan):
        attempts.append(plan)
        raise torch.OutOfMemoryError(ON_CUDA)

    for plan, way_out in (
        ([[0, 1], [2], []], f"Lower {KEY} to 20, or set fsdp_config.param_offload=True"),
        ([[0], [1]], "A single row"),
    ):
        with pytest.raises(OutOfMemoryError, match=f"on rank 2 of 4: 1.50 GiB asked.*{way_out}"):
            guard.run(
                TOKENS,
                [20, 20, 5],
                lambda budget, plan=plan: plan,
                attempt,
                lambda: pytest.fail("a restart"),
            )
    assert len(attempts) == 2


def test_lowered_budget_reaches_the_next_start():
    guard = PassGuard(CPU, Axis(size=4, rank=2), FROZEN)

    def attempt(plan):
        raise torch.OutOfMemoryError(ON_CUDA)

    with pytest.raises(OutOfMemoryError) as found:
        guard.run(TOKENS, [20, 20, 5], lambda budget: [[0, 1], [2]], attempt, lambda: None)

    lowered = pickle.loads(pickle.dumps(found.value)).lowered
    assert lowered == {KEY: 20}
    sizes = []
    again = PassGuard(CPU, Axis(size=4, rank=2), FROZEN)
    again.lower(lowered)
    again.lower({KEY: 40})
    again.run(
        TOKENS,
        [20, 20, 5],
        lambda budget: sizes.append(budget.max_tokens) or [],
        lambda plan: None,
        lambda: None,
    )
    assert sizes == [20]


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(ON_CUDA), 1.5 * 2**30),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            None,
        ),
        (RuntimeError(ON_HOST), 2**32),
        (MemoryError(), None),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), None),
    ],
)
def test_memory_errors_are_recognized(error: BaseException, asked: int | None):
    shortage = shortage_of(error, CPU)
    assert shortage is not None
    assert shortage.asked == asked
    assert shortage.on_device == ("CUDA" in str(error))
    expected = pytest.raises(OutOfMemoryError, match="Out of .* memory in generation.*Lower it")
    with expected, reports_out_of_memory("generation", CPU, lambda _: "Lower it."):
        raise error


@pytest.mark.parametrize(
    ("shortage", "is_advised"), [(torch.OutOfMemoryError(ON_CUDA), True), (MemoryError(), False)]
)
def test_off_loading_is_no_way_out_of_a_full_host(shortage: BaseException, is_advised: bool):
    guard = PassGuard(CPU, Axis(), FROZEN)
    with pytest.raises(OutOfMemoryError) as caught, guard.reports("the optimizer's step"):
        raise shortage
    assert ("param_offload=True" in str(caught.value)) == is_advised


def test_other_errors_are_not_memory_errors():
    for error in (
        RuntimeError("no"),
        OSError(errno.ENOSPC, "No space left"),
        OutOfMemoryError("reported already"),
    ):
        assert shortage_of(error, CPU) is None


def test_hints_name_unset_keys():
    on_gpu = shortage_of(torch.OutOfMemoryError(ON_CUDA), CPU)
    on_host = shortage_of(MemoryError(), CPU)
    assert on_gpu is not None
    assert on_host is not None

    plain = EngineOptions(device=CPU, optim=OptimConfig())
    full = replace(
        plain,
        fsdp_config=FSDPConfig(param_offload=True, optimizer_offload=True),
        enable_gradient_checkpointing=True,
    )
    assert len(memory_hints(full, on_gpu)) == 1
    assert len(memory_hints(plain, on_gpu)) == 4
    assert len(memory_hints(FROZEN, on_gpu)) == 2, "there is no backward pass"
    by_fsdp = replace(plain, fsdp_config=FSDPConfig(offload_policy=True))
    assert len(memory_hints(by_fsdp, on_gpu)) == 2, "off-loading is on"

    lesser = "less off-loading, which takes host memory"
    for options in (full, by_fsdp, replace(plain, enable_activation_offload=True)):
        assert lesser in memory_hints(options, on_host)
    assert lesser not in memory_hints(plain, on_host), "nothing is off-loaded"


def test_real_host_memory_limit(tmp_path, monkeypatch):
    """Limit the address space of a process so that only smaller passes fit."""
    monkeypatch.setattr(agreement, "CPU_PASS_TOKENS", 10**6)
    engine = make_engine()
    batch = make_batch([(8, 56)] * 1024)
    budget = replace(TOKENS, max_tokens=2**16)
    update(engine)  # load kernels and start their threads
    log = tmp_path / "log"

    def train_with_little_memory() -> int:
        logger.addHandler(logging.FileHandler(log))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 60 * 2**20, resource.RLIM_INFINITY))
        engine.forward_backward(batch, budget, smooth_loss, COLUMNS)
        return 0 if engine.module.sizes[-1] < 2**16 and engine.step().grad_norm > 0 else 3

    assert run_in_child(train_with_little_memory) == 0

    expected = r"Out of host memory in the actor's update: .* asked, .* RAM and .* of swap free, in a .*\(ulimit -v\)"
    assert re.search(expected, log.read_text())
