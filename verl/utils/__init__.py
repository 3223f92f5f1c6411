"""Small tools that depend on no other room.

Checks of the whole package (`check_env`, ...) are public here as well; they load on first use.
"""

from typing import TYPE_CHECKING, Any

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    check_env: Any
    profile_memory: Any
    test_ray_connectivity: Any

__all__ = ["check_env", "profile_memory", "test_ray_connectivity"]

__getattr__ = lazy_names(
    __name__,
    {
        "check_env": "verl.diagnostics.doctor",
        "profile_memory": "verl.diagnostics.profile",
        "test_ray_connectivity": "verl.diagnostics.connectivity",
    },
    old_names=True,
)
