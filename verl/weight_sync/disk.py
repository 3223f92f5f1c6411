"""Hand over through a folder of safetensors in Hugging Face's layout, to engines run elsewhere."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from verl.checkpoint.folders import step_of
from verl.checkpoint.hf import save_weights
from verl.checkpoint.manager import CheckpointManager
from verl.utils.errors import CheckpointError
from verl.weight_sync.base import NamedTensors, TensorStream
from verl.weight_sync.buckets import host_copies
from verl.weight_sync.fingerprint import FingerprintLog

_WEIGHTS = "weights"
_PROOF = "fingerprints.json"
_KEPT = 2  # the newest, and the one that an engine may be reading


class DiskSender:
    """A `WeightSender` into `root/global_step_<number>/weights`.

    A folder gets its name when it is complete, with the sums of all files in `manifest.json`. The
    sender does not know its readers.

    Args:
        root: created at the first hand-over.
        bucket_bytes: most bytes of one file.
        dtype: of the files; wider floating-point tensors are cast.
    """

    def __init__(self, root: Path, *, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._folders = CheckpointManager(root, max_to_keep=_KEPT)
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        newest = self._folders.latest()
        self._number = 0 if newest is None else step_of(newest)

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """Send as `WeightSender.send` describes. Returns when the folder is complete."""
        self._number += 1

        def write(folder: Path) -> None:
            tensors = host_copies(named_tensors, self._dtype)
            save_weights(folder, None, tensors, max_file_bytes=self._bucket_bytes)
            if log is not None:
                (folder / _PROOF).write_text(json.dumps(log.read()), encoding="utf-8")

        self._folders.save(self._number, {_WEIGHTS: write})


class DiskReceiver:
    """A `WeightReceiver` that reads the newest complete folder under `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._proof: Path | None = None

    def tensors(self) -> TensorStream:
        """Yield as `WeightReceiver.tensors` describes. The tensors are on the host.

        Raises CheckpointError if no folder is complete.
        """
        newest = CheckpointManager(self._root).latest()
        if newest is None:
            raise CheckpointError(
                f"Expected weights in {self._root}/global_step_N, found none that are complete."
            )

        folder = newest / _WEIGHTS
        proof = folder / _PROOF
        self._proof = proof if proof.exists() else None

        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)

    def expected(self) -> Mapping[str, int] | None:
        """Return the sender's fingerprints, as `WeightReceiver.expected` describes."""
        if self._proof is None:
            return None
        return json.loads(self._proof.read_text(encoding="utf-8"))

    def report(self, fault: str | None) -> None:
        """Do nothing: the sender waits for no reader."""
