"""Small tools that know nothing of the rest of the package. What looks into all of it is offered here by name alone."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    check_env: Any
    profile_memory: Any
    test_ray_connectivity: Any

_OFFERED = {
    "check_env": "verl.diagnostics.doctor",
    "profile_memory": "verl.diagnostics.profile",
    "test_ray_connectivity": "verl.diagnostics.connectivity",
}


def __getattr__(name: str) -> Any:
    if name in _OFFERED:
        return getattr(importlib.import_module(_OFFERED[name]), name)
    raise AttributeError(f"module 'verl.utils' has no attribute '{name}'")
