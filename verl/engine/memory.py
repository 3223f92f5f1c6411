"""Out of memory: what an error says of it, the message for the user, and a restart with smaller
passes.

A pass that ran out is made again in halves, since gradients do not depend on how rows are packed.
That takes a rank that is alone: several are in the middle of a collective, where the others wait
for the one that failed, so that it can only stop the run with its name.
"""

import errno
import gc
import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import psutil
import torch

from verl.config import FSDPConfig
from verl.distributed.collectives import Axis
from verl.engine.microbatch import TokenBudget
from verl.utils.errors import OutOfMemoryError, VerlError
from verl.utils.logging import logger
from verl.utils.peaks import phase_peaks

Result = TypeVar("Result")
Plan = list[list[int]]

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_DEVICE_SIGNS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_HOST_SIGNS = ("can't allocate memory", "Cannot allocate memory")


@dataclass(frozen=True)
class Shortage:
    """What an exception says: on the GPU or the host, how many bytes were asked, and how much was
    free."""

    on_device: bool
    asked: int | None
    free: str

    def __str__(self) -> str:
        asked = "an amount that was not told" if self.asked is None else _gib(self.asked)
        return f"{asked} asked, {self.free}"


def shortage_of(error: BaseException, device: torch.device) -> Shortage | None:
    """The shortage that made `error` be raised by torch, Python or the system; None for any other
    error."""
    text = str(error)
    if isinstance(error, VerlError):
        return None
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _DEVICE_SIGNS):
        return Shortage(
            True, _bytes_in(text, r"[Tt]ried to allocate"), _free_on_device(text, device)
        )
    is_host = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    if is_host or (isinstance(error, RuntimeError) and any(sign in text for sign in _HOST_SIGNS)):
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        free = (
            f"{_gib(memory.available)} of {_gib(memory.total)} RAM and {_gib(swap.free)} of swap "
            "free"
        )
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            free += f", in a process that may have {_gib(limit)} of addresses (ulimit -v)"
        return Shortage(False, _bytes_in(text, r"tried to allocate"), free)
    return None


@contextmanager
def told_as_out_of_memory(
    phase: str, device: torch.device, way_out: str, *, rank: str = ""
) -> Iterator[None]:
    """Turn a shortage within into an OutOfMemoryError that names the phase, and the keys in
    `way_out`. The phase's peak is kept (`verl.utils.peaks`)."""
    try:
        with phase_peaks.phase(phase, device):
            yield
    except (RuntimeError, MemoryError, OSError) as error:
        shortage = shortage_of(error, device)
        if shortage is None:
            raise
        raise OutOfMemoryError(f"{_headline(shortage, phase, rank)} {way_out}") from error


class PassGuard:
    """Runs the passes of one engine, with budgets that shortages have lowered for the rest of the
    run.

    Args:
        world: all ranks; only one that is alone can restart.
        hints: further keys that save memory, as `key=value`.
    """

    def __init__(self, device: torch.device, world: Axis, hints: Sequence[str]) -> None:
        self.device = device
        self.can_restart = world.size == 1
        self.rank = "" if world.size == 1 else f"rank {world.rank} of {world.size}"
        self.hints = hints
        self.lowered: dict[str, int] = {}  # key of a budget -> tokens or rows

    def lower(self, sizes: Mapping[str, int]) -> None:
        """Begin with at most these sizes of passes, {key of a budget: tokens or rows}."""
        for key, size in sizes.items():
            self.lowered[key] = min(size, self.lowered.get(key, size))

    def told(self, phase: str) -> AbstractContextManager[None]:
        """For what cannot be made smaller: a shortage within is an OutOfMemoryError that names
        `phase`."""
        return told_as_out_of_memory(
            phase, self.device, f"Set {'; '.join(self.hints)}.", rank=self.rank
        )

    def run(
        self,
        budget: TokenBudget,
        lengths: Sequence[int],
        plan: Callable[[TokenBudget], Plan],
        attempt: Callable[[Plan], Result],
        recover: Callable[[], None],
    ) -> Result:
        """`attempt` the planned passes. Where memory runs out: `recover`, then the same with at
        most half the tokens (or rows) of the largest pass, down to single rows.

        Raises:
            OutOfMemoryError: a single row does not fit, or there are several ranks.
        """
        while True:
            current = self._lowered(budget, lengths)
            rows = plan(current)
            try:
                return attempt(rows)
            except (RuntimeError, MemoryError, OSError) as error:
                shortage = shortage_of(error, self.device)
                if shortage is None:
                    raise
                smaller = _halved(current, rows, lengths)
                if smaller is None or not self.can_restart:
                    told = OutOfMemoryError(
                        self._message(shortage, current, rows, lengths, smaller)
                    )
                    if smaller is not None:
                        told.lowered = {budget.key: _size(smaller)}
                    raise told from error
            # Only here, where the exception is gone: its traceback holds every tensor of the pass.
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            recover()
            size = self.lowered[budget.key] = _size(smaller)
            logger.warning(
                "%s The passes restart from the beginning with at most %d %s, which stays so for "
                "the rest of the run. Set %s=%d to start with it.",
                _headline(shortage, budget.phase, self.rank),
                size,
                _unit(smaller),
                _key(smaller),
                size,
            )

    def _lowered(self, budget: TokenBudget, lengths: Sequence[int]) -> TokenBudget:
        size = self.lowered.get(budget.key)
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
        rows: Plan,
        lengths: Sequence[int],
        smaller: TokenBudget | None,
    ) -> str:
        tokens = max(sum(lengths[row] for row in group) for group in rows)
        ways = list(self.hints)
        if not shortage.on_device:
            ways = [hint for hint in ways if "offload" not in hint] + [
                "less off-loading, which takes host memory"
            ]
        if smaller is not None:
            what = f"Lower {_key(smaller)} to {_size(smaller)}"
        else:
            what = (
                f"A single row of {max(lengths)} tokens does not fit: shorten "
                "data.max_response_length"
            )
        return (
            f"{_headline(shortage, budget.phase, self.rank)} The largest pass has {tokens} tokens. "
            f"{what}, or set {'; '.join(ways)}."
        )


def memory_hints(fsdp: FSDPConfig, *, gradient_checkpointing: bool, is_trained: bool) -> list[str]:
    """Keys that save memory and are not set, beside the size of passes."""
    hints = []
    if is_trained and not gradient_checkpointing:
        hints.append("model.enable_gradient_checkpointing=True")
    if not fsdp.param_offload:
        hints.append("fsdp_config.param_offload=True")
    if is_trained and not fsdp.optimizer_offload:
        hints.append("fsdp_config.optimizer_offload=True")
    return [
        *hints,
        "a lower actor_rollout_ref.rollout.gpu_memory_utilization, with free_cache_engine=True",
    ]


def _headline(shortage: Shortage, phase: str, rank: str) -> str:
    return (
        f"Out of {'GPU' if shortage.on_device else 'host'} memory in "
        f"{phase}{rank and f' on {rank}'}: {shortage}."
    )


def _halved(budget: TokenBudget, rows: Plan, lengths: Sequence[int]) -> TokenBudget | None:
    """Half of what the largest pass took, at least one row; None where that was one already."""
    if budget.rows is not None:
        most = max(len(group) for group in rows)
        return replace(budget, rows=most // 2) if most > 1 else None
    assert budget.max_tokens is not None
    most = min(budget.max_tokens, max(sum(lengths[row] for row in group) for group in rows))
    return replace(budget, max_tokens=max(most // 2, *lengths)) if most > max(lengths) else None


def _size(budget: TokenBudget) -> int:
    size = budget.rows if budget.rows is not None else budget.max_tokens
    assert size is not None
    return size


def _unit(budget: TokenBudget) -> str:
    return "tokens" if budget.rows is None else "rows"


def _key(budget: TokenBudget) -> str:
    """The key that sets the size: of tokens, or its sibling of rows."""
    return (
        budget.key
        if budget.rows is None
        else budget.key.replace("max_token_len", "micro_batch_size")
    )


def _bytes_in(text: str, before: str) -> int | None:
    found = re.search(before + r"\D{0,3}([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return None if found is None else round(float(found.group(1)) * _UNITS[found.group(2)])


def _free_on_device(text: str, device: torch.device) -> str:
    # at the moment of the failure, when nothing was given back yet
    told = _bytes_in(text, "of which")
    if device.type != "cuda":
        return "free memory not told" if told is None else f"{_gib(told)} free"
    free, total = torch.cuda.mem_get_info(device)
    return f"{_gib(free if told is None else told)} of {_gib(total)} free"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
