"""The end of a hand-over within a vLLM server: memory of the same GPU or host, instead of a folder.

vLLM mixes the class into its worker: `--worker-extension-cls` names it, and PYTHONPATH of the
server must have this package.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import torch

from verl.utils.logging import show_log
from verl.weight_sync.base import NamedTensors, copies_of, reported
from verl.weight_sync.ipc import receiver_at
from verl.weight_sync.recorded_copies import RecordedLoad

EXTENSION = "verl.weight_sync.vllm_worker.TakesWeights"
METHOD = "verl_take_weights"
VERSION = "verl_weight_version"
END_WITH = "verl_end_with"
_LOOK_S = 0.5


class TakesWeights:
    """Methods that a vLLM worker gets in addition; `device` and `model_runner` are its own."""

    device: torch.device
    model_runner: Any
    verl_loads: RecordedLoad | None = None
    verl_version: str | None = None  # of the weights; None: not the trainer's, or not all of them

    def verl_take_weights(self, address: str, key: str, version: str) -> str | None:
        """Take the weights of one hand-over from the trainer that listens at `address`.

        Returns the version that the worker has now.

        Args:
            address: a socket of this machine.
            key: hexadecimal; proves to the trainer that the caller may read its weights.
            version: name of the weights, recorded when all of them are here.
        """
        self.verl_version = None
        receiver = receiver_at(address, bytes.fromhex(key), self.device)
        with reported(receiver, receiver.buckets()) as buckets:
            self._verl_load(buckets)
        self.verl_version = version
        return self.verl_weight_version()

    def verl_weight_version(self) -> str | None:
        """Return the version of the last hand-over; None: there was none, or it ended half-way."""
        return self.verl_version

    def verl_end_with(self, process: int) -> None:
        """End this worker as soon as a process of this machine has ended, also by kill -9."""

        def wait() -> None:
            with suppress(psutil.NoSuchProcess):
                watched = psutil.Process(process)
                # One that was killed stays as a zombie until its parent asks for its status.
                while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(_LOOK_S)
            os._exit(1)

        threading.Thread(target=wait, name="verl-end", daemon=True).start()

    def _verl_load(self, buckets: Iterator[NamedTensors]) -> None:
        if self.device.type == "cpu":
            # Layers are packed on a CPU, and vLLM keeps tensors until their layer is complete.
            self.model_runner.reload_weights(weights_iterator=copies_of(buckets))
            return
        if self.verl_loads is None:
            show_log()  # this process is vLLM's, which shows its own log alone
            self.verl_loads = RecordedLoad(self.model_runner.model)
        self.verl_loads.load(buckets)
