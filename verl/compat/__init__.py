"""The names of verl 0.5, for recipes that use them: their new paths, and adapters of signatures.

No other room imports this one. `paths` is the table; every other file adapts names of one area.
"""

from verl.compat.paths import OLD_PATHS, find_old_module, find_old_name, is_old_name, page

__all__ = ["OLD_PATHS", "find_old_module", "find_old_name", "is_old_name", "page"]
