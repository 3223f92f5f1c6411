"""Attention of vision towers that read pictures of any size: all windows of all pictures at once.

transformers' own modules call an attention that is no flash attention once for every window: a
picture of 4,096 patches has 64 of them in each layer of Qwen2.5-VL. The modules are given an
attention that takes the bounds of the windows.
"""

import copy
from collections.abc import MutableMapping
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PreTrainedModel

from verl.models.kernels.attention import packed_kernel_takes
from verl.utils.signatures import declares

# transformers passes bounds to an attention with "flash" in its name.
IMPLEMENTATION = "verl_flash_windows"
_LONGEST = "max_seqlen"  # what transformers calls the length of the longest window

# The longest window of bounds that are in use.
_known_longest: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()


def join_windows(tower: nn.Module) -> None:
    """Make attention modules of a vision tower that know bounds use `window_attention`, in place.

    Each gets a configuration of its own. The tower's stays as it is, so that a model that is built
    from it is one of transformers.
    """
    for module in _with_bounds(tower):
        own = copy.copy(module.config)
        own._attn_implementation = IMPLEMENTATION
        module.config = own
        if declares(type(module).forward, _LONGEST):
            module.register_forward_pre_hook(_leave_longest, with_kwargs=True)


def _leave_longest(
    module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave the longest window to `window_attention`.

    transformers would read it from the device in every layer: the host would wait for the device,
    and a compiled layer would break in two.
    """
    if named.get(_LONGEST) is None:
        named[_LONGEST] = 0  # is not read
    return inputs, named


def has_windows(tower: nn.Module) -> bool:
    """Return whether `join_windows` finds attention modules."""
    return bool(_with_bounds(tower))


def _with_bounds(tower: nn.Module) -> list[Any]:
    """Return the attention modules that are called with the bounds of windows."""
    found = []
    for module in tower.modules():
        if not hasattr(module, "config") or isinstance(module, PreTrainedModel):
            continue
        if declares(type(module).forward, "cu_seqlens"):
            found.append(module)
    return found


def window_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each window, in both directions.

    query, key and value (1, H, N, D) -> (1, N, H, D). Window i holds the tokens from
    `cu_seq_lens_q[i]` to `cu_seq_lens_q[i + 1]`.
    """
    assert attention_mask is None, "towers have no mask"
    assert not asked.get("dropout"), "and their dropout is zero"

    if not packed_kernel_takes(query):
        return _by_length(query, key, value, cu_seq_lens_q, scaling)[None], None

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    bounds = cu_seq_lens_q.to(torch.int32)
    longest = _longest(cu_seq_lens_q)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling)
    assert isinstance(out, Tensor)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, window_attention)


def _longest(bounds: Tensor) -> int:
    """Return the length of the longest window, read once for the layers that share `bounds`."""
    longest = _known_longest.get(bounds)
    if longest is None:
        longest = int(bounds.diff().max())
        _known_longest[bounds] = longest
    return longest


def _by_length(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """Attend in a batch for each run of windows of one length; return (N, H, D)."""
    lengths = bounds.diff().tolist()
    starts = [0, *accumulate(lengths)]
    outputs = []
    first = 0

    for length, run in groupby(lengths):
        count = len(list(run))
        part = slice(starts[first], starts[first + count])
        q, k, v = (
            tensor[0, :, part].unflatten(1, (count, length)).transpose(0, 1)
            for tensor in (query, key, value)
        )
        out = F.scaled_dot_product_attention(q, k, v, scale=scale)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        first += count

    return torch.cat(outputs)
