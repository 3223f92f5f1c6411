"""Features of pictures by a vision tower that is not trained: computed once, kept on the host.

Features are smaller than the pixels that they come from: of a picture of 1,024 tokens of a
Qwen2.5-VL-3B, 4 MiB in bfloat16 against 19 MiB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.pictures import Picture
from verl.utils.devices import send
from verl.utils.errors import DataError
from verl.utils.units import GIB

KEPT_BYTES = 2 * GIB  # most bytes of features that are kept, in each process
_STORE = "verl_picture_features"


@dataclass
class _Kept:
    features: Tensor  # (1 + layers with DeepStack, n, H), on the host
    last_round: int  # in which they were used
    arrived: Any  # event of CUDA after the copy to the host; None: no CUDA


class FeatureStore:
    """The features that one trainer's vision tower has for pictures, by the key of each.

    The trainer's model and a rollout's module with the same weights share a store, so that a
    picture is computed once, by whichever reads it first. A picture that is missing is computed by
    the model that needs it. Ranks need not agree on that: weights of a tower are gathered with
    those of the whole model, so a call of the tower makes no collective.

    Features are dropped when a parameter is written to or becomes trainable. At `max_bytes` those
    from earlier rounds go first. Those of the current round stay, and further ones are not kept: a
    batch that is larger than the store finds a part of its pictures there, and not none.

    Args:
        parameters: of the trainer's model, all that only pictures use.
        max_bytes: most bytes that are kept.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, max_bytes: int = KEPT_BYTES) -> None:
        self._parameters = list(parameters)
        self._max_bytes = max_bytes
        self._kept: dict[str, _Kept] = {}  # those used last come last
        self._num_bytes = 0
        self._round = 0
        self._version = self._current_version()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all features here."""
        return self._num_bytes

    def is_usable(self) -> bool:
        """Return whether the tower is not trained. Drops all features if its weights changed."""
        version = self._current_version()
        if version != self._version:
            self.clear()
            self._version = version
        return not any(parameter.requires_grad for parameter in self._parameters)

    def begin_round(self) -> None:
        """Let features go that are not used from now on, where their memory is needed."""
        self._round += 1

    def clear(self) -> None:
        """Drop all features."""
        self._kept.clear()
        self._num_bytes = 0

    def find(self, picture: Picture, device: torch.device) -> Tensor | None:
        """Return the features (1 + layers, n, H) of a picture on `device`; None: not here.

        Raises DataError if they are those of another picture with this key.
        """
        kept = self._kept.pop(picture.key, None)
        if kept is None:
            return None
        self._kept[picture.key] = kept
        kept.last_round = self._round

        rows = kept.features.shape[1]
        if rows != picture.num_tokens:
            raise DataError(
                f"Two pictures have the key '{picture.key}': one has {rows} tokens, the other "
                f"{picture.num_tokens}. Give a prepared picture a key that its content and size "
                "determine."
            )

        if kept.arrived is not None:
            torch.cuda.current_stream(device).wait_event(kept.arrived)
        return send(kept.features, device)

    def put(self, picture: Picture, features: Tensor) -> None:
        """Keep a copy of the features (1 + layers, n, H) of a picture, if there is room."""
        if picture.key in self._kept or not self._make_room(features.nbytes):
            return
        on_cuda = features.is_cuda
        # A rollout computes in inference mode, whose tensors autograd refuses.
        with torch.inference_mode(False), torch.no_grad():
            host = torch.empty(
                features.shape, dtype=features.dtype, device="cpu", pin_memory=on_cuda
            )
            host.copy_(features, non_blocking=True)
        arrived = None
        if on_cuda:
            arrived = torch.cuda.current_stream(features.device).record_event()
        self._kept[picture.key] = _Kept(host, self._round, arrived)
        self._num_bytes += host.nbytes

    def _make_room(self, num_bytes: int) -> bool:
        while self._num_bytes + num_bytes > self._max_bytes and self._kept:
            key, oldest = next(iter(self._kept.items()))
            if oldest.last_round == self._round:
                return False
            del self._kept[key]
            self._num_bytes -= oldest.features.nbytes
        return self._num_bytes + num_bytes <= self._max_bytes

    def _current_version(self) -> int:
        """Return autograd's count of the changes in place. It counts those of a shard at the shard."""
        total = 0
        for parameter in self._parameters:
            shard: Any = getattr(parameter, "_local_tensor", parameter)
            total += shard._version
        return total


def use_store(model: nn.Module, store: FeatureStore) -> None:
    """Let a model take features of pictures from `store`, and keep there those that it computes."""
    setattr(model, _STORE, store)


def store_of(model: nn.Module) -> FeatureStore | None:
    """Return the store that a model uses, if any."""
    return getattr(model, _STORE, None)
