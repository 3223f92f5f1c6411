"""Handle a lack of memory: read the error, write a message, restart with smaller passes.

A pass that ran out is made again in halves, since gradients do not depend on how rows are packed.
Only a rank that is alone can do so. Several ranks are in the middle of a collective, where the
others wait for the one that failed, so that it can only stop the run and name itself.
"""

import gc
import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import psutil
import torch

from verl.distributed.collectives import Axis
from verl.engine.microbatch import Plan, TokenBudget, most_tokens
from verl.engine.options import EngineOptions
from verl.utils.errors import OutOfMemoryError, VerlError, lacks_host_memory
from verl.utils.launcher import rank_title
from verl.utils.logging import logger
from verl.utils.peaks import phase_peaks

Result = TypeVar("Result")

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_DEVICE_SIGNS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


@dataclass(frozen=True)
class Shortage:
    """Facts of an out-of-memory error: GPU or host, bytes asked for, memory that was free."""

    on_device: bool
    asked: int | None
    free: str

    def __str__(self) -> str:
        asked = "an unknown amount" if self.asked is None else _gib(self.asked)
        return f"{asked} asked, {self.free}"


def shortage_of(error: BaseException, device: torch.device) -> Shortage | None:
    """Return the shortage behind an error of torch, Python or the system; None for other errors."""
    text = str(error)
    if isinstance(error, VerlError):
        return None
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _DEVICE_SIGNS):
        asked = _bytes_in(text, r"[Tt]ried to allocate")
        return Shortage(True, asked, _free_on_device(text, device))

    if lacks_host_memory(error):
        return Shortage(False, _bytes_in(text, r"tried to allocate"), _free_on_host())
    return None


@contextmanager
def reports_out_of_memory(
    phase: str, device: torch.device, way_out: Callable[[Shortage], str], *, rank: str = ""
) -> Iterator[None]:
    """Turn a shortage within into an OutOfMemoryError with the phase and its `way_out`.

    The phase's peak is kept (`verl.utils.peaks`).
    """
    try:
        with phase_peaks.phase(phase, device):
            yield
    except (RuntimeError, MemoryError, OSError) as error:
        shortage = shortage_of(error, device)
        if shortage is None:
            raise
        raise OutOfMemoryError(f"{_headline(shortage, phase, rank)} {way_out(shortage)}") from error


class PassGuard:
    """Run the passes of one engine, with budgets that shortages lower for the rest of the run.

    Args:
        device: of this rank.
        world: all ranks; only one that is alone can restart.
        options: of the engine; messages name those that would save memory.
    """

    def __init__(self, device: torch.device, world: Axis, options: EngineOptions) -> None:
        self.device = device
        self.can_restart = world.size == 1
        self.rank = rank_title(world.rank, world.size)
        self.options = options
        self.lowered: dict[str, int] = {}  # `TokenBudget.size_key` -> tokens or rows

    def lower(self, sizes: Mapping[str, int]) -> None:
        """Begin with at most these sizes of passes, {configuration key: tokens or rows}."""
        for key, size in sizes.items():
            self.lowered[key] = min(size, self.lowered.get(key, size))

    def reports(self, phase: str) -> AbstractContextManager[None]:
        """Turn a shortage within work that cannot be made smaller into an OutOfMemoryError."""

        def way_out(shortage: Shortage) -> str:
            return f"Set {'; '.join(memory_hints(self.options, shortage))}."

        return reports_out_of_memory(phase, self.device, way_out, rank=self.rank)

    def run(
        self,
        budget: TokenBudget,
        lengths: Sequence[int],
        plan: Callable[[TokenBudget], Plan],
        attempt: Callable[[Plan], Result],
        recover: Callable[[], None],
    ) -> Result:
        """Make the planned passes by `attempt`, in smaller ones where memory runs out.

        After a shortage `recover` is called, then `attempt` with at most half the tokens (or rows)
        of the largest pass, down to single rows.

        Raises:
            OutOfMemoryError: a single row does not fit, or there are several ranks.
        """
        while True:
            current = self._lowered(budget, lengths)
            passes = plan(current)
            try:
                return attempt(passes)
            except (RuntimeError, MemoryError, OSError) as error:
                shortage = shortage_of(error, self.device)
                if shortage is None:
                    raise
                smaller = _halved(current, passes, lengths)
                if smaller is None or not self.can_restart:
                    message = self._message(shortage, current, passes, lengths, smaller)
                    failure = OutOfMemoryError(message)
                    if smaller is not None:
                        failure.lowered = {current.size_key: smaller}
                    raise failure from error

            # Only here, where the exception is gone: its traceback holds every tensor of the pass.
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            recover()

            self.lowered[current.size_key] = smaller
            logger.warning(
                "%s The passes restart from the beginning with at most %d %s, which stays so for "
                "the rest of the run. Set %s=%d to start with it.",
                _headline(shortage, budget.phase, self.rank),
                smaller,
                current.unit,
                current.size_key,
                smaller,
            )

    def _lowered(self, budget: TokenBudget, lengths: Sequence[int]) -> TokenBudget:
        size = self.lowered.get(budget.size_key)
        if size is None:
            return budget
        if budget.rows is not None:
            return replace(budget, rows=min(size, budget.rows))
        assert budget.max_tokens is not None
        # A longer row than those before is tried whole before it is an error.
        return replace(budget, max_tokens=min(max([size, *lengths]), budget.max_tokens))

    def _message(
        self,
        shortage: Shortage,
        budget: TokenBudget,
        passes: Plan,
        lengths: Sequence[int],
        smaller: int | None,
    ) -> str:
        hints = memory_hints(self.options, shortage)
        if smaller is not None:
            advice = f"Lower {budget.size_key} to {smaller}"
        else:
            advice = (
                f"A single row of {max(lengths)} tokens does not fit: shorten "
                "data.max_response_length"
            )
        return (
            f"{_headline(shortage, budget.phase, self.rank)} The largest pass has "
            f"{most_tokens(passes, lengths)} tokens. {advice}, or set {'; '.join(hints)}."
        )


def memory_hints(options: EngineOptions, shortage: Shortage) -> list[str]:
    """Return the settings that help against `shortage`, other than the size of passes.

    Off-loading helps a GPU, where it is not on yet, and takes memory of the host.
    """
    fsdp = options.fsdp_config
    hints = []
    if options.learns and not options.enable_gradient_checkpointing:
        hints.append("model.enable_gradient_checkpointing=True")

    if shortage.on_device and not fsdp.offload_policy:
        if not fsdp.param_offload:
            hints.append("fsdp_config.param_offload=True")
        if options.learns and not fsdp.optimizer_offload:
            hints.append("fsdp_config.optimizer_offload=True")

    off_loads = fsdp.param_offload or fsdp.optimizer_offload or fsdp.offload_policy
    if not shortage.on_device and (off_loads or options.enable_activation_offload):
        hints.append("less off-loading, which takes host memory")

    rollout = "actor_rollout_ref.rollout.gpu_memory_utilization"
    return [*hints, f"a lower {rollout}, with free_cache_engine=True"]


def _headline(shortage: Shortage, phase: str, rank: str) -> str:
    kind = "GPU" if shortage.on_device else "host"
    place = f" on {rank}" if rank else ""
    return f"Out of {kind} memory in {phase}{place}: {shortage}."


def _halved(budget: TokenBudget, passes: Plan, lengths: Sequence[int]) -> int | None:
    """Return half the size of the largest pass, at least one row; None where that was one row."""
    if budget.rows is not None:
        most = max(len(rows) for rows in passes)
        return most // 2 if most > 1 else None

    assert budget.max_tokens is not None
    most = min(budget.max_tokens, most_tokens(passes, lengths))
    longest = max(lengths)
    return max(most // 2, longest) if most > longest else None


def _bytes_in(text: str, before: str) -> int | None:
    found = re.search(before + r"\D{0,3}([\d.]+) (bytes|KiB|MiB|GiB)", text)
    if found is None:
        return None
    number = float(found.group(1))
    return round(number * _UNITS[found.group(2)])


def _free_on_device(text: str, device: torch.device) -> str:
    # The error's figure is that of the failure, when nothing was given back yet.
    reported = _bytes_in(text, "of which")
    if device.type != "cuda":
        return "free memory unknown" if reported is None else f"{_gib(reported)} free"

    free, total = torch.cuda.mem_get_info(device)
    if reported is not None:
        free = reported
    return f"{_gib(free)} of {_gib(total)} free"


def _free_on_host() -> str:
    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    free = (
        f"{_gib(memory.available)} of {_gib(memory.total)} RAM and {_gib(swap.free)} of swap free"
    )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free += f", in a process that may have {_gib(limit)} of addresses (ulimit -v)"
    return free


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
