"""New weights for servers: the folder that they read, and the proof that they use it."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from verl.checkpoint.hf import save_weights
from verl.rollout.servers.server import Drawn
from verl.utils.errors import RolloutError
from verl.weight_sync.base import NamedTensors
from verl.weight_sync.buckets import travel_dtype

_SHARED_MEMORY = Path("/dev/shm")
# Mean difference of log-probs between two correct implementations. Measured: 1e-6 in float32;
# 0.12 in bfloat16 with random weights, which are the flattest.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_TOLERANCE_OF_HALVES = 0.2


class WeightFolder:
    """Writes each hand-over into a folder of its own. The last one stays, for a restarted server.

    Args:
        root: a folder that servers see under the same path; None: in shared memory, or the system's
            folder for temporary files.
        model: describes the tensors; its weights are not read.
    """

    def __init__(self, root: str | None, model: PreTrainedModel, dtype: torch.dtype) -> None:
        parent = Path(root).expanduser() if root is not None else _SHARED_MEMORY
        if root is not None:
            parent.mkdir(parents=True, exist_ok=True)
        self._root = Path(
            tempfile.mkdtemp(prefix="verl-weights-", dir=parent if parent.is_dir() else None)
        )
        self._root.chmod(0o755)  # servers may run as another user
        weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self._model = model
        self._dtype = dtype
        self._last: Path | None = None

    def write(self, named_tensors: NamedTensors, version: str) -> tuple[Path, int]:
        """Write whole tensors; return the folder and its bytes."""
        folder = self._root / version
        folder.mkdir()
        save_weights(folder, self._model, self._owned(named_tensors))
        if self._last is not None:
            shutil.rmtree(self._last)
        self._last = folder
        return folder, sum(file.stat().st_size for file in folder.iterdir())

    def _owned(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies, and a tied head under its own name.

        vLLM on a CPU keeps a packed copy of the head, which a file without it leaves stale.
        """
        tied = tied_names(self._model)
        head = None
        for name, tensor in named_tensors:
            # Copies: the next tensor may reuse the memory of this one.
            cast = tensor.detach().to(travel_dtype(tensor, self._dtype))
            copied = cast.to("cpu", copy=True)
            if tied is not None and name in tied:
                head = copied
            yield name, copied
        if tied is not None and head is not None:
            yield tied[1], head.clone()


def tied_names(model: PreTrainedModel) -> tuple[str, str] | None:
    """Return the names of the input and the output embedding if they are one tensor."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return None
    names = {}
    for name, module in model.named_modules():
        names[id(module)] = name
    embedding = names[id(model.get_input_embeddings())]
    output = names[id(model.get_output_embeddings())]
    return f"{embedding}.weight", f"{output}.weight"


def prove(
    servers: Sequence[str], drawn: Sequence[Drawn], own: Sequence[Sequence[float]], dtype: Any
) -> float:
    """Raise RolloutError for a server whose log-probs are not the trainer's.

    Args:
        servers: their names.
        drawn: the probe that each server drew.
        own: the trainer's log-probs of the same tokens.
        dtype: of the servers' weights.

    Returns the largest mean difference.
    """
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_OF_HALVES)
    worst = 0.0
    for name, probe, expected in zip(servers, drawn, own, strict=True):
        gaps = [abs(theirs - ours) for theirs, ours in zip(probe.log_probs, expected, strict=True)]
        mean = sum(gaps) / len(gaps)
        if not mean <= tolerance:  # also for NaN
            raise RolloutError(
                f"After new weights, {name} draws by other weights than the trainer's: the "
                f"log-probs of {len(gaps)} tokens differ by {mean:.2g} on average, at most "
                f"{tolerance:.2g} in {dtype} are right. Check that it runs the model that is "
                "trained, in the dtype actor_rollout_ref.rollout.dtype; that no other run pushes "
                "weights to it; and restart it."
            )
        worst = max(worst, mean)
    return worst
