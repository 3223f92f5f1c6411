"""Fuse several workers into one, by verl 0.5's names."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from verl.single_controller import Dispatch, Worker, register
from verl.single_controller.dispatch import CallPlan, registered_methods
from verl.single_controller.ray_groups import RayClassWithInitArgs, fused_name


class FusedWorker(Worker):
    """A worker that builds the workers of `fused_classes`, each as the attribute of its role."""

    fused_classes: ClassVar[Mapping[str, RayClassWithInitArgs]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.fused_worker_dict: dict[str, Worker] = {}
        for role, entry in self.fused_classes.items():
            worker = entry.cls(*entry.args, **entry.kwargs)
            self.fused_worker_dict[role] = worker
            setattr(self, role, worker)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mesh_place(self, mesh_name: str) -> tuple[int, bool] | None:
        """Return the place of the worker of a role that has registered the mesh."""
        for worker in self.fused_worker_dict.values():
            if mesh_name in vars(worker).get("_mesh_places", {}):
                return worker.mesh_place(mesh_name)
        return super().mesh_place(mesh_name)


def create_colocated_worker_raw_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> type[FusedWorker]:
    """Make a FusedWorker class of these classes, which may be subclassed.

    `RayWorkerGroup.fuse` offers the methods of each role.
    """
    members: dict[str, Any] = {"fused_classes": dict(class_dict)}
    for role, entry in class_dict.items():
        for method, plan in registered_methods(entry.cls).items():
            members[fused_name(role, method)] = _forwarded(role, method, plan)
    return type("FusedWorker_" + "_".join(class_dict), (FusedWorker,), members)


def create_colocated_worker_cls_fused(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> RayClassWithInitArgs:
    """Make the class of `create_colocated_worker_raw_cls`, for a RayWorkerGroup."""
    return RayClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))


def _forwarded(role: str, method: str, plan: CallPlan) -> Callable[..., Any]:
    def forward(self: FusedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.fused_worker_dict[role], method)(*args, **kwargs)

    forward.__name__ = fused_name(role, method)
    mark = register(plan.dispatch_mode, plan.execute_mode, plan.blocking, plan.materialize_futures)
    return mark(forward)
