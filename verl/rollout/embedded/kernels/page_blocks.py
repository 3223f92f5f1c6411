"""Take the pages of a row into the running softmax, one block of tokens after the other.

Page ids are loaded one block ahead. Loads of keys and values could not be pipelined if their
addresses waited for a load in the same block.
"""

import triton
import triton.language as tl
from triton import knobs

from verl.rollout.embedded.kernels.running_softmax import weigh, weights_of

# A weight times the scale of its value is at most 1/448 of the value's largest number, or 1/127.
# Products in float16 take 32 times that, so usual weights are normal numbers of float16, and only
# values beyond 900,000 make them infinite, or 260,000.
_HELD = tl.constexpr(32.0)
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_SMALLEST_QUERY = tl.constexpr(1e-30)  # a padding head is 0 throughout


@triton.jit
def weigh_pages(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    pages,
    page,
    begin,
    last,
    m,
    total,
    acc,
    scale,
    cap,
    key_page,
    key_token,
    value_page,
    value_token,
    scale_page,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Take the tokens [begin, last) into the softmax; `page` has ids for the first block.

    Keys and values in eight bits have scales. Products of queries that are not fp32 are then in
    float16, which holds every number of both formats. On Hopper one instruction converts two FP8
    numbers to float16; to bfloat16 each number takes a slow conversion of its own, and so does an
    integer. Integers are converted by assembly.

    Columns of such values are read in pairs, and even and odd ones are weighed apart. A product
    needs the values of two tokens next to each other, so they are transposed on their way from
    shared memory, which can be done for numbers of 16 bits, but not of 8.
    """
    if key_scales is not None:
        wide = tl.float32 if q.dtype == tl.float32 else tl.float16
        q = q.to(tl.float32)
        size = tl.maximum(tl.max(tl.abs(q), 1), _SMALLEST_QUERY)[:, None]
        q = (q / size).to(wide)
        scale = scale * size
        pairs = values.to(tl.pointer_type(tl.uint16))
        even, odd = tl.split(tl.reshape(acc * _HELD, [acc.shape[0], BLOCK_VALUE // 2, 2]))

    offsets = tl.arange(0, BLOCK_N)
    start = begin // BLOCK_N * BLOCK_N
    for block in range(start, last, BLOCK_N):
        tokens = block + offsets
        seen = (tokens >= begin) & (tokens < last)
        later = tokens + BLOCK_N
        next_page = tl.load(pages + later.to(tl.uint32) // PAGE_SIZE, mask=later < last, other=0)
        within = tokens.to(tl.uint32) % PAGE_SIZE
        k = _read(keys, page, key_page, within, key_token, seen, DIM, BLOCK_DIM)

        if key_scales is None:
            v = _read(values, page, value_page, within, value_token, seen, VALUE_DIM, BLOCK_VALUE)
            m, total, acc = weigh(q, k, v, seen, m, total, acc, scale, cap)
        else:
            pair = _read(
                pairs,
                page,
                value_page // 2,
                within,
                value_token // 2,
                seen,
                VALUE_DIM // 2,
                BLOCK_VALUE // 2,
            )
            at = page.to(tl.int64) * scale_page + within
            of_keys = tl.load(key_scales + at, mask=seen, other=0.0)
            of_values = tl.load(value_scales + at, mask=seen, other=0.0)

            p, alpha, m, total = weights_of(
                q, _converted(k, wide), seen, m, total, scale, cap, of_keys
            )
            p = (p * (of_values * _HELD)[None, :]).to(wide)
            alpha = alpha[:, None]
            low, high = _converted_pairs(pair, values.dtype.element_ty, wide)
            even = tl.dot(p, low, even * alpha, input_precision="ieee")
            odd = tl.dot(p, high, odd * alpha, input_precision="ieee")
        page = next_page

    if key_scales is not None:
        acc = tl.reshape(tl.join(even, odd), [acc.shape[0], BLOCK_VALUE]) * (1 / _HELD)
    return m, total, acc


@triton.jit
def _converted(small, wide: tl.constexpr):
    """Convert numbers of eight bits.

    As the last bits of 1,024 in float16, x + 128 gives 1,152 + x.
    """
    if small.dtype == tl.int8 and wide == tl.float16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, surplus;
            xor.b32 bytes, $2, 0x80808080;
            mov.b32 surplus, 0x64806480;
            prmt.b32 $0, bytes, 0x64646464, 0x4140;
            prmt.b32 $1, bytes, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, surplus;
            sub.f16x2 $1, $1, surplus;
            }""",
            "=r,=r,r",
            [small],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return small.to(wide)


@triton.jit
def _converted_pairs(pair, small: tl.constexpr, wide: tl.constexpr):
    """Convert the low bytes and the high bytes, which are numbers of the type `small`."""
    if small == tl.int8 and wide == tl.float16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 high, surplus;
            shr.b32 high, $2, 8;
            mov.b32 surplus, 0x64806480;
            lop3.b32 $0, $2, 0x00FF00FF, 0x64806480, 0x6A;
            lop3.b32 $1, high, 0x00FF00FF, 0x64806480, 0x6A;
            sub.f16x2 $0, $0, surplus;
            sub.f16x2 $1, $1, surplus;
            }""",
            "=r,=r,r",
            [pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = pair.to(tl.uint8).to(small, bitcast=True)
        high = (pair >> 8).to(tl.uint8).to(small, bitcast=True)
        return low.to(wide), high.to(wide)


@triton.jit
def _read(
    CACHE, page, page_stride, within, token_stride, seen, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Load keys or values (N, BLOCK) of N tokens."""
    dims = tl.arange(0, BLOCK)[None, :]
    # 64-bit: pages of all layers interleave, so the stride of a page is large.
    at = page.to(tl.int64) * page_stride + within * token_stride
    # The mask does not only save traffic: memory that no token was written to may hold NaN, and 0 *
    # NaN is NaN.
    mask = seen[:, None] if DIM == BLOCK else seen[:, None] & (dims < DIM)
    return tl.load(CACHE + at[:, None] + dims, mask=mask, other=0.0)
