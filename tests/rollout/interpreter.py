"""Triton kernels on the CPU: tests whose bodies run in a process of their own, in which Triton
interprets.

Triton decides when it is imported whether kernels are interpreted. In the process of the tests the
interpreter stays off, so that kernels can be compiled there. A module that imports this one is
skipped where there is no Triton.
"""

import functools
import importlib
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("could not import 'triton'", allow_module_level=True)


def interpreted(body: Callable[..., None]) -> Callable[..., None]:
    """A test whose body runs in the interpreting process. Its arguments are parameters that can be
    pickled."""
    if multiprocessing.parent_process() is not None:
        return body

    @functools.wraps(body)
    def test(**arguments: Any) -> None:
        _process().submit(_run, body.__module__, body.__name__, arguments).result()

    return test


@functools.cache
def _process() -> ProcessPoolExecutor:
    """One for all modules: it takes seconds to import torch. It ends with this process."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_interpreting)


def _run(module: str, name: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)  # the same numbers whatever ran before
    getattr(importlib.import_module(module), name)(**arguments)


def _start_interpreting() -> None:
    assert "triton" not in sys.modules, "too late"
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes int() of an array of one element for the bounds of a loop, which NumPy
        2.4 refuses."""
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
