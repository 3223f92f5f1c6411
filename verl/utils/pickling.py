"""Tensors in pickles: only the bytes that a view shows, and no copy where the protocol can do
without."""

from typing import Any

import torch
from tensordict import TensorDict


def pack_tensor(value: Any) -> Any:
    """What stands for a tensor in a pickle: (bytes as a numpy array, dtype, shape) for a plain
    tensor on the CPU.

    numpy hands its buffer over without a copy from protocol 5 on; torch would write the whole
    storage that a view looks into. Other tensors and other values keep their own way, a view of a
    device tensor as a copy of its rows.
    """
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return value
    if value.device.type != "cpu":
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
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
    # A buffer that stays the sender's (Ray's object store) is read-only: writing to it would crash,
    # so it is copied.
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(dtype).reshape(shape)


def pack_tensor_dict(batch: TensorDict | None) -> Any:
    """`pack_tensor` of every column, with batch sizes and device."""
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
