"""Single controller: one driver calls groups of SPMD workers."""

from verl.single_controller.breadcrumbs import breadcrumb, note_progress
from verl.single_controller.calls import GroupFuture
from verl.single_controller.dealing import Dealt
from verl.single_controller.dispatch import (
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.handles import (
    GroupOf,
    num_shares,
    of_all_ranks,
    of_each_share,
    start,
)
from verl.single_controller.host import Colocated, OnEmit, emit
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import WorkerGroup

__all__ = [
    "Colocated",
    "Dealt",
    "Dispatch",
    "Execute",
    "GroupFuture",
    "GroupOf",
    "OnEmit",
    "Worker",
    "WorkerGroup",
    "breadcrumb",
    "emit",
    "get_predefined_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "note_progress",
    "num_shares",
    "of_all_ranks",
    "of_each_share",
    "register",
    "register_dispatch_mode",
    "start",
    "update_dispatch_mode",
]
