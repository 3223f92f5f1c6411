"""Units of memory. This module imports nothing, so that checks of a broken torch can use it."""

MIB = 2**20
GIB = 2**30
