"""What every SPMD worker knows: its rank and how many there are."""

import os


class Worker:
    """Base of all roles. A worker never knows whether Ray, torchrun or one process carries it."""

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))
