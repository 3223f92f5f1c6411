"""New weights for servers: the folder that they read, and the proof that they use it."""

import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from verl.checkpoint.hf import published, save_weights
from verl.models.lora import save_adapters
from verl.rollout.servers.server import Server
from verl.rollout.types import Completion
from verl.utils.errors import RolloutError
from verl.utils.garbage import finalize
from verl.utils.scratch import hold_scratch, remove_left_behind, remove_scratch, scratch_path
from verl.weight_sync.base import NamedTensors
from verl.weight_sync.buckets import host_copies
from verl.weight_sync.link import Offer, Route

_SHARED_MEMORY = Path("/dev/shm")
# Mean difference of log-probs between two correct implementations. Measured: 1e-6 in float32;
# 0.12 in bfloat16 with random weights, which are the flattest.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_TOLERANCE_OF_HALVES = 0.2


@dataclass(frozen=True)
class FolderSource:
    """A `WeightSource` that any rank, and a server on any machine that sees the folder, can use."""

    folder: Path
    is_adapter: bool = False

    def fill(self, server: Server, version: str) -> None:
        """Implement `WeightSource.fill`."""
        read = server.read_adapter if self.is_adapter else server.read_folder
        read(self.folder, version)


@dataclass(frozen=True, kw_only=True)
class MemorySource:
    """A `WeightSource` for servers on the trainer's GPU, or on its host for a trainer on a CPU.

    Args:
        tensors: gives all tensors anew at each call, until the next update.
        model: describes the tensors; its weights are not read.
        device: of the trainer.
        bucket_bytes: two such buckets are in memory.
        dtype: of the servers.
    """

    tensors: Callable[[], NamedTensors]
    model: PreTrainedModel
    device: torch.device
    bucket_bytes: int
    dtype: torch.dtype
    is_adapter: bool = field(default=False, init=False)

    def fill(self, server: Server, version: str) -> None:
        """Implement `WeightSource.fill`. Connects anew each time: the server may have restarted."""
        on_gpu = self.device.type == "cuda"
        offer = Offer(
            Route("ipc" if on_gpu else "host", 0, (0,), "127.0.0.1"),
            device=self.device,
            bucket_bytes=self.bucket_bytes,
            dtype=self.dtype,
            folder=Path(),
        )
        meeting = offer.meeting

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.read_memory, meeting.address, meeting.key, version)
            # A refused call never connects: a connection of our own ends the wait.
            asked.add_done_callback(lambda _: _connect(meeting.address))
            tensors = with_head(self.tensors(), self.model)
            if server.needs_published_names:
                tensors = published(self.model, tensors)
            try:
                offer.accept(late=True).send(tensors)
            except (EOFError, OSError, AuthenticationError) as error:
                raise RolloutError(
                    f"{server.name} did not fetch the weights from the trainer's memory; its log "
                    "has the reason. Run it on the trainer's machine, or leave "
                    "actor_rollout_ref.rollout.weight_transport unset."
                ) from error
            finally:
                asked.result()  # the server's own reason comes first


def _connect(address: str) -> None:
    """End the wait of a listener, if it still waits."""
    with suppress(OSError, AuthenticationError, EOFError):
        Client(address, family="AF_UNIX").close()


class WeightFolder:
    """Writes each hand-over into a folder of its own. The last one stays, for a restarted server.

    Args:
        root: a folder that servers see under the same path; None: in shared memory, or the system's
            folder for temporary files.
        model: describes the tensors; its weights are not read.
    """

    def __init__(self, root: str | None, model: PreTrainedModel, dtype: torch.dtype) -> None:
        if root is not None:
            parent = Path(root).expanduser()
            parent.mkdir(parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix="verl-weights-", dir=parent))
        else:
            parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
            # Those of killed runs take memory until the machine restarts.
            remove_left_behind(parent)
            self._root = scratch_path(f"weights-{secrets.token_urlsafe(6)}", parent)
            hold_scratch(self._root)
        self._root.chmod(0o755)  # servers may run as another user
        finalize(self, remove_scratch, self._root)

        self._model = model
        self._dtype = dtype
        self._last: Path | None = None

    def write(self, named_tensors: NamedTensors, version: str) -> FolderSource:
        """Write whole tensors."""
        folder = self._root / version
        folder.mkdir()
        whole = with_head(named_tensors, self._model)
        save_weights(folder, self._model, host_copies(whole, self._dtype))
        self._keep(folder)
        return FolderSource(folder)

    def write_adapters(self, state: dict[str, torch.Tensor], version: str) -> FolderSource:
        """Write the factors of LoRA adapters (`adapter_state`)."""
        folder = self._root / version
        save_adapters(folder, self._model, state)
        self._keep(folder)
        return FolderSource(folder, is_adapter=True)

    def _keep(self, folder: Path) -> None:
        """Keep the new folder instead of the last one."""
        if self._last is not None:
            shutil.rmtree(self._last)
        self._last = folder


def with_head(named_tensors: NamedTensors, model: PreTrainedModel) -> NamedTensors:
    """Yield the tensors, and a tied head under its own name, too.

    vLLM on a CPU keeps a packed copy of the head, which would stay as it was.
    """
    for name, tensor in named_tensors:
        yield name, tensor
        for other, own in model.all_tied_weights_keys.items():
            if own == name:
                yield other, tensor


def prove(drawn: Mapping[str, Completion], own: Sequence[Sequence[float]], dtype: Any) -> None:
    """Raise RolloutError for a server whose log-probs are not the trainer's.

    Args:
        drawn: the probe that each server drew, by the server's name.
        own: the trainer's log-probs of the same tokens, in the order of `drawn`.
        dtype: of the servers' weights.
    """
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_OF_HALVES)
    flag = "--dtype " + str(dtype).removeprefix("torch.")

    for (name, probe), expected in zip(drawn.items(), own, strict=True):
        gaps = [abs(theirs - ours) for theirs, ours in zip(probe.log_probs, expected, strict=True)]
        mean = sum(gaps) / len(gaps)
        if not mean <= tolerance:  # also for NaN
            raise RolloutError(
                f"After new weights, {name} draws by other weights than the trainer's: the "
                f"log-probs of {len(gaps)} tokens differ by {mean:.2g} on average, at most "
                f"{tolerance:.2g} in {dtype} are right. Check that it was started with the model "
                f"that is trained and {flag}, and that no other run pushes "
                "weights to it; or restart it."
            )
