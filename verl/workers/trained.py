"""What actor and critic have in common: an engine that is trained, and its checkpoint."""

from pathlib import Path
from typing import Any

from verl.engine.base import TrainEngine
from verl.single_controller import Dispatch, Worker, register


class TrainedWorker(Worker):
    """A worker whose `engine` learns. `tokenizer` is saved beside the weights."""

    engine: TrainEngine
    tokenizer: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path) -> None:
        """Weights in Hugging Face format with the tokenizer, optimizer and schedule."""
        self.engine.save(folder, tokenizer=self.tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: Path) -> None:
        """Undo `save_checkpoint`."""
        self.engine.load(folder)
