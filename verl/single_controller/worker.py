"""Base class of SPMD workers: rank and world size."""

import os


class Worker:
    """Base class of all roles. A worker does not know whether Ray, torchrun or one process runs it.

    It may add columns to the batches it gets, but not write into their tensors: rank 0 may share
    them with the driver.
    """

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def data_rank(self) -> int:
        """Return the share of a batch that this rank works on; read once, after `__init__`.

        Ranks that split the tokens of the same rows (sequence parallel) have the same.
        """
        return self.rank

    @property
    def data_size(self) -> int:
        """Return the number of shares."""
        return self.world_size
