"""Pickle only the bytes that a tensor view covers, without a copy where the protocol allows it."""

from typing import Any

import torch
from tensordict import TensorDict


def pack_tensor(value: Any) -> Any:
    """Return (bytes as a numpy array, dtype, shape) for a plain CPU tensor.

    From protocol 5 on, numpy passes its buffer without a copy; torch would write the whole storage
    behind a view. A view of a device tensor becomes a copy of its rows. Any other tensor or value
    is returned as it is.
    """
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return value
    if value.device.type != "cpu":
        is_view = value.untyped_storage().nbytes() > value.nbytes
        return value.clone() if is_view else value
    return (
        value.detach().contiguous().reshape(-1).view(torch.uint8).numpy(),
        value.dtype,
        tuple(value.shape),
    )


def unpack_tensor(packed: Any) -> Any:
    """Undo `pack_tensor`."""
    if not isinstance(packed, tuple):
        return packed
    raw, dtype, shape = packed
    if not raw.size:  # its buffer may come back without strides
        return torch.empty(shape, dtype=dtype)
    # Copy a buffer that belongs to the sender (Ray's object store): it is read-only, and writing to
    # it would crash.
    if not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def pack_tensor_dict(batch: TensorDict | None) -> Any:
    """Apply `pack_tensor` to every column; keep batch sizes and device."""
    if batch is None:
        return None
    return (
        {key: pack_tensor(value) for key, value in batch.items()},
        tuple(batch.batch_size),
        batch.device,
    )


def unpack_tensor_dict(packed: Any) -> Any:
    """Undo `pack_tensor_dict`."""
    if packed is None:
        return None
    columns, sizes, device = packed
    return TensorDict(
        {key: unpack_tensor(column) for key, column in columns.items()}, sizes, device=device
    )
