"""DataProto: a batch of tensors, object columns and meta entries that crosses process borders.

B is the number of rows, as in `verl/columns.py`. A method works in place if its docstring says so.
Any other method returns a new DataProto, which shares memory with this one where views allow it.
A wrong argument raises BatchError (a ValueError, and an AssertionError as in verl 0.5), which names
the columns.
"""

from verl.protocol.columns import DataProtoConfig
from verl.protocol.data_proto import DataProto, DataProtoItem
from verl.protocol.data_proto import _rebuild as _rebuild  # the name in older pickles
from verl.protocol.reshape import (
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl.utils.column_dicts import union_numpy_dict, union_tensor_dict
from verl.utils.lazy import lazy_names

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "collate_fn",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

__getattr__ = lazy_names(__name__, {}, old_names=True)
