"""Find the matrix product that torch calls on a CPU, for kernels outside of torch."""

import ctypes
from pathlib import Path

import torch


def sgemm_address() -> int | None:
    """Return the address of Fortran's sgemm of MKL.

    It uses the number of threads that torch is set to in the calling thread. None where torch was
    built without MKL, or does not export it (on Windows).
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available() or not library.is_file():
        return None
    sgemm = getattr(ctypes.CDLL(str(library)), "sgemm_", None)
    return None if sgemm is None else ctypes.cast(sgemm, ctypes.c_void_p).value
