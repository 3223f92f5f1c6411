"""verl 0.5's names, for recipes that were written against it: where they live here, and small
adapters for those with another signature.

Nothing below imports this room. `paths` is the table; every other file adapts names of one area.
"""

from verl.compat.paths import OLD_PATHS, find_old_module, find_old_name, page

__all__ = ["OLD_PATHS", "find_old_module", "find_old_name", "page"]
