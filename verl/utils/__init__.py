"""Small tools that know nothing of the rest of the package.

A few public tools that inspect the whole package are offered here as well, and load on first use.
"""

from typing import TYPE_CHECKING, Any

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    check_env: Any
    profile_memory: Any
    test_ray_connectivity: Any

__getattr__ = lazy_names(
    __name__,
    {
        "check_env": "verl.diagnostics.doctor",
        "profile_memory": "verl.diagnostics.profile",
        "test_ray_connectivity": "verl.diagnostics.connectivity",
    },
    old_names=True,
)
