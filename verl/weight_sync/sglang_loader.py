"""The end of a hand-over within an SGLang server: memory of its GPU or host, instead of a folder.

SGLang calls `take_weights` for a push that names it. `--custom-weight-loader` must name it, too,
and PYTHONPATH of the server must have this package.
"""

import base64
import functools
import json
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl.utils.logging import logger, show_log
from verl.weight_sync.base import NamedTensors, copies_of, reported
from verl.weight_sync.ipc import receiver_at
from verl.weight_sync.recorded_copies import RecordedLoad

LOADER = "verl.weight_sync.sglang_loader.take_weights"


def packed_address(address: str, key: bytes) -> str:
    """Return an address for `take_weights` in the form of SGLang's tensors.

    Args:
        address: a socket of this machine, where the trainer listens.
        key: proves to the trainer that the caller may read its weights.
    """
    text = json.dumps([address, key.hex()]).encode()
    tensors = [("address", torch.tensor(list(text), dtype=torch.uint8))]
    return base64.b64encode(pickle.dumps(tensors)).decode()


def take_weights(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Take the weights of one hand-over from the trainer whose `packed_address` was sent.

    A fault is reported to the trainer, which raises it. An error here would end the server.
    """
    [(_, packed)] = named_tensors
    address, key = json.loads(bytes(packed.tolist()))
    device = next(model.parameters()).device
    try:
        receiver = receiver_at(address, bytes.fromhex(key), device)
        with reported(receiver, receiver.buckets()) as buckets:
            _load(model, buckets)
    except Exception:  # noqa: BLE001 - the trainer has the error, see `reported`
        logger.exception("The weights of the trainer at %s were not taken.", address)


def _load(model: Any, buckets: Iterator[NamedTensors]) -> None:
    if next(model.parameters()).device.type == "cpu":
        # A layer may keep tensors until it is complete.
        model.load_weights(copies_of(buckets))
        return
    _recorded(model).load(buckets)


@functools.cache
def _recorded(model: Any) -> RecordedLoad:
    """Return the one load of this process's model, with its record."""
    show_log()  # this process is SGLang's, which shows its own log alone
    return RecordedLoad(model)
