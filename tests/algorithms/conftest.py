"""Shapes in signatures are checked while tests run, and only then."""

import importlib

from jaxtyping import install_import_hook

from tests.algorithms import typecheck

with install_import_hook("verl.algorithms", f"{typecheck.__name__}.checked"):
    importlib.import_module("verl.algorithms.padded")
