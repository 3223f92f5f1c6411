"""Assign the tiles of a product to programs, so that neighbors read the same weights."""

import triton
import triton.language as tl


@triton.jit
def tile_in_group(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return the row and the column of a program's tile among `tiles_m` x `tiles_n` tiles.

    Tiles are in groups of GROUP rows of tiles, column by column: programs that run at the same time
    share their weights in the cache.
    """
    group = program // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + program % (GROUP * tiles_n) % height
    tile_n = program % (GROUP * tiles_n) // height
    return tile_m, tile_n
