"""Division of whole numbers, rounded up."""


def ceil_div(number: int, size: int) -> int:
    """Return how many parts of `size` hold `number`."""
    return -(-number // size)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `number`."""
    return ceil_div(number, multiple) * multiple
