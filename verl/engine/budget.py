"""Choose the tokens of a pass where the user does not: first predicted, then measured.

Gradients do not depend on the choice (`plan_micro_batches`), so it may fill the device.
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
        """Return the bytes that a pass may take now."""
        ...

    def start(self) -> None:
        """Begin to count for `taken`."""
        ...

    def taken(self) -> int:
        """Return the most bytes since `start`, beyond those that were taken then."""
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
        reserved = torch.cuda.memory_reserved(self._device)
        unused = reserved - torch.cuda.memory_allocated(self._device)
        return free + unused - self._to_come()

    def start(self) -> None:
        phase_peaks.restart(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def taken(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


class AutomaticBudgets:
    """Tokens of a pass by the key that would set them. Every rank makes every call; all get the
    same answers.

    A call of t tokens that took g bytes of a room of r bytes suggests that t * r / g tokens fit.
    Bytes that do not grow with the tokens (gathered weights, gradients, a chunk of logits) are
    spread over them, so a larger pass takes less than that. A few calls come near from below.

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
        """Return the budget of a call over rows of these lengths.

        It is the given one or, where that sets no size, the one that fits: at least the longest
        row of all ranks.

        Args:
            predict: bytes of a pass by its tokens.
        """
        if not budget.is_automatic:
            return budget

        key = budget.key
        size = DEFAULT_TOKENS
        if self._meter is not None:
            if key not in self.tokens:
                fits = largest_that_fits(predict, START_SHARE * self._meter.room())
                self.tokens[key] = self._least_of_all(fits)
            size = self.tokens[key]
            self._room = self._meter.room()
            self._largest = 0
            self._meter.start()

        longest = max_of(max(lengths, default=1), self._world)
        return replace(budget, max_tokens=max(size, longest))

    def saw(self, micro_batch: MicroBatch) -> MicroBatch:
        """Note that a pass over it is about to be made; return it."""
        self._largest = max(self._largest, len(micro_batch.packed.input_ids))
        return micro_batch

    def end(self, budget: TokenBudget) -> None:
        """Settle the size of the next call, after one that went well."""
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
        """Return the sizes that are settled, and for how many ranks."""
        state = {"ranks": self._world.size}
        for key, size in self.tokens.items():
            if self._calls[key] == MEASURED_CALLS:
                state[key] = size
        return state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the sizes of a saved run, without measuring, so that its bits come again.

        Sizes for another number of ranks mean nothing and are ignored.
        """
        sizes = dict(state)
        if sizes.pop("ranks", self._world.size) == self._world.size:
            self.tokens.update(sizes)
            self._calls.update(dict.fromkeys(sizes, MEASURED_CALLS))

    def _least_of_all(self, tokens: int) -> int:
        return -max_of(-tokens, self._world)


def _rounded(tokens: float) -> int:
    return max(TOKEN_STEP, int(tokens) // TOKEN_STEP * TOKEN_STEP)


def largest_that_fits(predict: Callable[[int], int], room: float) -> int:
    """Return the most tokens with predicted bytes within `room`.

    They are a multiple of TOKEN_STEP, at most MOST_TOKENS.
    """
    low = 1
    high = MOST_TOKENS // TOKEN_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if predict(middle * TOKEN_STEP) <= room:
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_STEP
