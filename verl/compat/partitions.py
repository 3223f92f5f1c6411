"""Partitions of sequences with nearly equal sums of lengths (`verl.utils.seqlen_balancing`)."""

from collections.abc import Sequence

from verl.single_controller.dealing import Parts, largest_differencing, merge_partitions
from verl.utils.arithmetic import ceil_div, round_up
from verl.utils.errors import BatchError

Lengths = Sequence[int]
Partitions = list[list[int]]  # indices of the sequences in each part


def get_seqlen_balanced_partitions(
    seqlen_list: Lengths, k_partitions: int, equal_size: bool
) -> Partitions:
    """Divide the indices into `k_partitions` ascending parts with nearly equal sums of lengths.

    With `equal_size`, all parts have the same size, so `k_partitions` must divide the number of
    sequences. Raises BatchError otherwise.
    """
    if len(seqlen_list) < k_partitions:
        raise BatchError(
            f"{k_partitions} partitions need at least as many sequences, got {len(seqlen_list)}."
        )
    return karmarkar_karp(seqlen_list, k_partitions, equal_size)


def karmarkar_karp(seqlen_list: Lengths, k_partitions: int, equal_size: bool) -> Partitions:
    """Divide the indices by the largest differencing method (Karmarkar and Karp 1982)."""
    if not equal_size:
        positive = [max(length, 1) for length in seqlen_list]
        return largest_differencing(positive, k_partitions)

    _require_equal_size(seqlen_list, k_partitions)
    order = sorted(range(len(seqlen_list)), key=lambda index: (-seqlen_list[index], index))
    starts = range(0, len(order), k_partitions)
    windows = [order[start : start + k_partitions] for start in starts]

    # One entry of each window goes to each part.
    partitions: list[Parts] = []
    for window in windows:
        partitions.append([(seqlen_list[index], [index]) for index in window])
    return sorted(sorted(indices) for _, indices in merge_partitions(partitions, tie_step=-1))


def greedy_partition(seqlen_list: Lengths, k_partitions: int, equal_size: bool) -> Partitions:
    """Assign each sequence, in order, to the part with the smallest sum."""
    if equal_size:
        _require_equal_size(seqlen_list, k_partitions)
    room = len(seqlen_list) // k_partitions if equal_size else len(seqlen_list)
    parts: Partitions = [[] for _ in range(k_partitions)]
    sums = [0] * k_partitions
    for index, length in enumerate(seqlen_list):
        open_parts = [number for number in range(k_partitions) if len(parts[number]) < room]
        smallest = min(open_parts, key=sums.__getitem__)
        parts[smallest].append(index)
        sums[smallest] += length
    return parts


def _require_equal_size(seqlen_list: Lengths, k_partitions: int) -> None:
    if len(seqlen_list) % k_partitions:
        raise BatchError(
            f"Parts of equal size need a number of sequences divisible by {k_partitions}, got "
            f"{len(seqlen_list)}."
        )


def log_seqlen_unbalance(
    seqlen_list: Lengths, partitions: Partitions, prefix: str
) -> dict[str, float]:
    """Return the smallest, largest and mean sum of lengths of a part.

    The plain keys are for parts in the order of the list, `balanced_*` for `partitions`.
    """
    size = len(seqlen_list) // len(partitions)
    starts = range(0, size * len(partitions), size)
    in_order = [sum(seqlen_list[start : start + size]) for start in starts]

    balanced: list[int] = []
    for part in partitions:
        balanced.append(sum(seqlen_list[index] for index in part))

    return {
        f"{prefix}/min": min(in_order),
        f"{prefix}/max": max(in_order),
        f"{prefix}/minmax_diff": max(in_order) - min(in_order),
        f"{prefix}/balanced_min": min(balanced),
        f"{prefix}/balanced_max": max(balanced),
        f"{prefix}/mean": sum(seqlen_list) / len(partitions),
    }


def ceildiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return ceil_div(a, b)


def roundup_divisible(a: int, b: int) -> int:
    """Return the smallest multiple of b that is at least a."""
    return round_up(a, b)
