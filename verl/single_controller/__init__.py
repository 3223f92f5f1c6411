"""Single controller: one driver calls groups of SPMD workers."""

from verl.single_controller.dispatch import Dispatch, Execute, register, register_dispatch_mode
from verl.single_controller.spmd import WorkerGroup
from verl.single_controller.worker import Worker

__all__ = ["Dispatch", "Execute", "Worker", "WorkerGroup", "register", "register_dispatch_mode"]
