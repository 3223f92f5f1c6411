"""Check shapes in signatures while tests run, as in tests/algorithms."""

import importlib

from jaxtyping import install_import_hook

from tests.algorithms import typecheck

with install_import_hook("verl.compat.signatures", f"{typecheck.__name__}.checked"):
    importlib.import_module("verl.compat.signatures")
