"""How many tokens a pass takes where the user does not say: begun by prediction, settled by
measurement.

Gradients do not depend on it (`plan_micro_batches`), so that it may be whatever the device has room
for.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from verl.distributed.collectives import Axis, max_of
from verl.engine.microbatch import TokenBudget
from verl.engine.packing import MicroBatch
from verl.utils.logging import logger
from verl.utils.peaks import phase_peaks

# Without a device to measure: verl's default. A CPU's passes are smaller anyway.
DEFAULT_TOKENS = 16_384
# Larger passes gain nothing: on an H200 twice 16,384 tokens made an update 5 % faster, and kernels
# count elements of (tokens, MLP width) in 32 bits.
MOST_TOKENS = 65_536
# Sizes are multiples of this, so that a few bytes more or less seldom change the plan.
TOKEN_STEP = 1024
# The first call fills this part of the room by prediction, the later ones the other by measurement.
# The rest is for holes in the allocator, and for batches that are packed less evenly than those
# measured.
START_SHARE = 0.6
FILLED_SHARE = 0.85
# Calls of each kind that are measured; the size after the last one stays for the rest of the run.
MEASURED_CALLS = 3


class Meter(Protocol):
    """Memory of the device that passes run on."""

    def room(self) -> int:
        """Bytes that a pass may take now."""
        ...

    def start(self) -> None:
        """From here on counts what `taken` tells."""
        ...

    def taken(self) -> int:
        """Most bytes since `start`, beyond those that were taken then."""
        ...


class CudaMeter:
    """A `Meter` of torch's allocator.

    Args:
        to_come: bytes that will lie on the device for good, and do not yet.
    """

    def __init__(self, device: torch.device, to_come: Callable[[], int]) -> None:
        self._device = device
        self._to_come = to_come
        self._before = 0

    def room(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return free + unused - self._to_come()

    def start(self) -> None:
        phase_peaks.restart(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def taken(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


class AutomaticBudgets:
    """Tokens of a pass by the key that would set them. Every rank makes every call; all get the
    same answers.

    A call of t tokens that took g bytes beside a room of r bytes says that t * r / g tokens fit:
    what does not grow with the tokens (gathered weights, gradients, a chunk of logits) is spread
    over them, so that a larger pass takes less than that says. A few calls come near from below.

    Args:
        meter: None where nothing can be measured: DEFAULT_TOKENS then.
    """

    def __init__(self, meter: Meter | None, world: Axis) -> None:
        self.tokens: dict[str, int] = {}
        self._meter = meter
        self._world = world
        self._calls = Counter[str]()
        self._room = 0
        self._largest = 0

    def begin(
        self, budget: TokenBudget, lengths: Sequence[int], predict: Callable[[int], int]
    ) -> TokenBudget:
        """The budget of a call over rows of these lengths: as it was given, or what fits, at least
        the longest row of all ranks. `predict` tells the bytes that a pass of so many tokens
        takes."""
        if not budget.is_automatic:
            return budget
        key, size = budget.key, DEFAULT_TOKENS
        if self._meter is not None:
            if key not in self.tokens:
                fits = largest_that_fits(predict, START_SHARE * self._meter.room())
                self.tokens[key] = self._least_of_all(fits)
            size = self.tokens[key]
            self._room, self._largest = self._meter.room(), 0
            self._meter.start()
        return replace(budget, max_tokens=max(size, max_of(max(lengths, default=1), self._world)))

    def saw(self, micro_batch: MicroBatch) -> MicroBatch:
        """A pass over it is about to be made."""
        self._largest = max(self._largest, len(micro_batch.packed.input_ids))
        return micro_batch

    def end(self, budget: TokenBudget) -> None:
        """The call went well: settle the size of the next one."""
        key = budget.key
        if self._meter is None or not budget.is_automatic or self._calls[key] == MEASURED_CALLS:
            return
        self._calls[key] += 1
        fits = self._largest * FILLED_SHARE * self._room / max(1, self._meter.taken())
        self.tokens[key] = self._least_of_all(_rounded(min(fits, MOST_TOKENS)))
        if self._calls[key] == MEASURED_CALLS and self._world.rank == 0:
            logger.info(
                "%s=%d: what fits, by %d measured calls.", key, self.tokens[key], MEASURED_CALLS
            )

    def state_dict(self) -> dict[str, int]:
        """Sizes that are settled, and for how many ranks."""
        return {
            "ranks": self._world.size,
            **{
                key: size for key, size in self.tokens.items() if self._calls[key] == MEASURED_CALLS
            },
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with the sizes of a run that was saved, without measuring, so that its bits come
        again. Of another number of ranks they mean nothing."""
        sizes = dict(state)
        if sizes.pop("ranks", self._world.size) == self._world.size:
            self.tokens.update(sizes)
            self._calls.update(dict.fromkeys(sizes, MEASURED_CALLS))

    def _least_of_all(self, tokens: int) -> int:
        return -max_of(-tokens, self._world)


def _rounded(tokens: float) -> int:
    return max(TOKEN_STEP, int(tokens) // TOKEN_STEP * TOKEN_STEP)


def largest_that_fits(predict: Callable[[int], int], room: float) -> int:
    """Tokens whose predicted bytes are within `room`: a multiple of TOKEN_STEP, at most
    MOST_TOKENS."""
    low, high = 1, MOST_TOKENS // TOKEN_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if predict(middle * TOKEN_STEP) <= room else (low, middle - 1)
    return low * TOKEN_STEP
