"""The matrix product that torch itself calls on a CPU, for kernels that are not torch's."""

import ctypes
from pathlib import Path

import torch


def sgemm_address() -> int | None:
    """Where Fortran's sgemm is in memory: MKL's, which takes as many threads as torch has been told
    to in the thread that calls it. None where torch was built without MKL, or keeps it to itself
    (on Windows)."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available() or not library.is_file():
        return None
    sgemm = getattr(ctypes.CDLL(str(library)), "sgemm_", None)
    return None if sgemm is None else ctypes.cast(sgemm, ctypes.c_void_p).value
