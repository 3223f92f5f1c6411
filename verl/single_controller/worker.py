"""What every SPMD worker knows: its rank and how many there are."""

import os


class Worker:
    """Base of all roles. A worker never knows whether Ray, torchrun or one process carries it.

    It may add columns to the batches it is given, but not write into their tensors: rank 0 may
    share them with the driver.
    """

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank works on; asked once, after `__init__`. Ranks that split
        the tokens of the same rows (sequence parallel) have the same."""
        return self.rank

    @property
    def data_size(self) -> int:
        """How many shares there are."""
        return self.world_size
