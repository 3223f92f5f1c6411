"""Through a folder, to engines that somebody started elsewhere: safetensors as Hugging Face lays them out."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from verl.checkpoint.manager import CheckpointManager, step_of
from verl.utils.errors import CheckpointError
from verl.weight_sync.base import NamedTensors
from verl.weight_sync.buckets import travel_dtype
from verl.weight_sync.fingerprint import FingerprintLog

_WEIGHTS, _PROOF = "weights", "fingerprints.json"
_INDEX = "model.safetensors.index.json"
_KEPT = 2  # the newest, and the one that somebody may be reading


class DiskSender:
    """A `WeightSender` into `root/global_step_<number>/weights`, whole or not there at all, with the sums of all files
    in `manifest.json`. It does not know who reads them.

    Args:
        dtype: of the files, for what is floating point and wider.
    """

    def __init__(self, root: Path, *, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._folders = CheckpointManager(root, max_to_keep=_KEPT)
        self._bucket_bytes, self._dtype = bucket_bytes, dtype
        newest = self._folders.latest()
        self._number = 0 if newest is None else step_of(newest)

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """See `WeightSender.send`: returns when the folder is complete."""
        self._number += 1

        def write(folder: Path) -> None:
            _write(folder, named_tensors, self._bucket_bytes, self._dtype)
            if log is not None:
                (folder / _PROOF).write_text(json.dumps(log.read()), encoding="utf-8")

        self._folders.save(self._number, {_WEIGHTS: write})


class DiskReceiver:
    """A `WeightReceiver` of the newest complete folder under `root`. Raises CheckpointError where there is none."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._proof: Path | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightReceiver.tensors`. On the host."""
        newest = CheckpointManager(self._root).latest()
        if newest is None:
            raise CheckpointError(f"Expected weights in {self._root}/global_step_N, found none that are complete.")
        folder = newest / _WEIGHTS
        proof = folder / _PROOF
        self._proof = proof if proof.exists() else None
        for file in sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())):
            with safe_open(folder / file, framework="pt") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)

    def expected(self) -> Mapping[str, int] | None:
        """See `WeightReceiver.expected`."""
        return None if self._proof is None else json.loads(self._proof.read_text(encoding="utf-8"))

    def report(self, fault: str | None) -> None:
        """Nobody waits for it."""


def _write(folder: Path, named_tensors: NamedTensors, bucket_bytes: int, dtype: torch.dtype | None) -> None:
    """Files of about `bucket_bytes`, and the index that transformers reads them by."""
    place: dict[str, str] = {}
    waiting: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(place.values())) + 1:05}.safetensors"
        save_file(waiting, folder / file, metadata={"format": "pt"})
        place.update(dict.fromkeys(waiting, file))
        waiting.clear()

    total = waiting_bytes = 0
    for name, tensor in named_tensors:
        tensor = tensor.detach().to(travel_dtype(tensor, dtype))
        if waiting and waiting_bytes + tensor.nbytes > bucket_bytes:
            flush()
            waiting_bytes = 0
        # Of its own: what is handed over may be memory that the next tensor is in.
        waiting[name] = tensor.to("cpu", copy=True).contiguous()
        waiting_bytes += tensor.nbytes
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
