"""Triton kernels on the CPU: the bodies of these tests run in a separate process, in which Triton
interprets.

Triton decides at import whether kernels are interpreted. In the process of the tests the
interpreter stays off, so that kernels can be compiled there. A module that imports this one is
skipped if Triton is missing.
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
    """Run the body of a test in the interpreting process. Its arguments must be picklable."""
    if multiprocessing.parent_process() is not None:
        return body

    @functools.wraps(body)
    def test(**arguments: Any) -> None:
        _process().submit(_run, body.__module__, body.__name__, arguments).result()

    return test


@functools.cache
def _process() -> ProcessPoolExecutor:
    """Start one process for all modules, because importing torch takes seconds."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_interpreting)


def _run(module: str, name: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)  # the same numbers after any earlier test
    getattr(importlib.import_module(module), name)(**arguments)


def _start_interpreting() -> None:
    assert "triton" not in sys.modules, "too late"
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Set an index: Triton 3.6 takes int() of a one-element array, which NumPy 2.4 rejects."""
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        """Convert eight bits by torch: Triton 3.6 loses the carry into the exponent, and NaN."""
        if source.name == "fp8e4nv" and target.name in ("fp16", "fp32"):
            given = torch.from_numpy(values).view(torch.float8_e4m3fn)
            return given.to(torch.float16 if target.name == "fp16" else torch.float32).numpy()
        if target.name != "fp8e4nv" or source.name != "fp32":
            return convert(values, source, target, rounding_mode)
        rounded = torch.from_numpy(values).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    interpreter._convert_float = converted
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load
    store = builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        """Convert a mask: Triton 3.9 gives integers for `&` of a mask and a scalar."""
        if not isinstance(mask, interpreter.TensorHandle):  # Triton 3.6 masks blocks by arrays
            return mask
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    builder.create_masked_load = lambda self, pointers, mask, *rest, **named: load(
        self, pointers, as_bool(mask), *rest, **named
    )
    builder.create_masked_store = lambda self, pointers, value, mask, *rest, **named: store(
        self, pointers, value, as_bool(mask), *rest, **named
    )
    _keep_patches(interpreter)


def _keep_patches(interpreter: Any) -> None:
    """Patch the language once for each function. Triton searches it anew at every call."""
    patch = interpreter._patch_lang

    @functools.cache
    def patch_once(function: Callable[..., Any]) -> Any:
        patch(function)
        return interpreter._LangPatchScope()  # without changes, so the kernel's end restores none

    interpreter._patch_lang = patch_once
