"""Load and call libraries: `python -m verl.diagnostics.probe '{"NAME": ["MODULE", ...], ...}'`.

The doctor runs it in a process of its own, since any of these steps may kill or hang it. Each line
of the output is a JSON pair [name, fact]; ["begin", name] announces a step. The fact of an attempt
is null, or its error.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_IMPORT_S = 60  # for one package, while all others load
_LONGEST = 500  # characters of an error


def main(packages: dict[str, Sequence[str]]) -> None:
    """Report one fact after the other. Output of the libraries goes to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")

    def report(name: str, find: Callable[[], Any]) -> Any:
        print(json.dumps(["begin", name]), file=output, flush=True)
        found = find()
        print(json.dumps([name, found]), file=output, flush=True)
        return found

    report("driver_cuda", driver_cuda)
    error = report("torch_error", lambda: attempt(lambda: importlib.import_module("torch")))
    if error is not None:
        return
    import torch

    report("torch", lambda: torch_build(torch))
    report("imports", lambda: import_each(packages))
    if torch.version.cuda is None:
        return
    if report("cuda_error", lambda: attempt(torch.cuda.init)) is not None:
        return

    report("gpus", lambda: gpus(torch))
    report("cudnn_error", lambda: attempt(lambda: _convolve(torch)))
    report("nccl_error", lambda: attempt(lambda: _reduce(torch)))
    report("nccl", nccl_version)
    report("kernels", lambda: attention_kernels(torch))


def attempt(action: Callable[[], object]) -> str | None:
    """Return None if the action works, else its error."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - broken libraries raise anything, SystemExit too
        return _described(error)
    return None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[-_LONGEST:]


def driver_cuda() -> list[int] | None:
    """Return (major, minor) of the newest CUDA that the driver serves; None: no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return [version.value // 1000, version.value % 1000 // 10]


def torch_build(torch: ModuleType) -> dict[str, Any]:
    """Return how torch was compiled."""
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "archs": torch.cuda.get_arch_list() if torch.version.cuda else [],
    }


def import_each(packages: dict[str, Sequence[str]]) -> dict[str, str | None]:
    """Import each package in a process of its own, all at once, with torch already loaded."""
    children = {}
    for name, modules in packages.items():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(_IMPORT_S)
            os.write(write, (_import_all(modules) or "").encode())
            os._exit(0)
        os.close(write)
        children[name] = child, read
    return {name: _ended(child, read) for name, (child, read) in children.items()}


def _import_all(modules: Sequence[str]) -> str | None:
    """Import modules; skip parts that this version of a package does not have."""
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001 - broken libraries raise anything, SystemExit too
            is_absent = isinstance(error, ModuleNotFoundError) and error.name == module
            if not is_absent or module == modules[0]:
                return _described(error)
    return None


def _ended(child: int, read: int) -> str | None:
    with os.fdopen(read) as pipe:
        error = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        ended_by = signal.Signals(os.WTERMSIG(status)).name
        return (
            f"not done within {_IMPORT_S} s" if ended_by == "SIGALRM" else f"killed by {ended_by}"
        )
    return error or None


def gpus(torch: ModuleType) -> list[dict[str, Any]]:
    """Describe the visible devices; a device reads the memory of its `peers` directly."""
    count = torch.cuda.device_count()
    found = []
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        peers = [
            i for i in range(count) if i != number and torch.cuda.can_device_access_peer(number, i)
        ]
        found.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "free": free,
                "total": total,
                "peers": peers,
            }
        )

    return found


def _convolve(torch: ModuleType) -> None:
    """Call cuDNN, which loads its parts at the first call."""
    torch.backends.cudnn.version()
    image = torch.ones(1, 8, 16, 16, device="cuda", dtype=torch.float16)
    torch.nn.functional.conv2d(
        image, torch.ones(8, 8, 3, 3, device="cuda", dtype=torch.float16)
    ).sum().item()


def nccl_version() -> list[Any] | None:
    """Return the version of NCCL; None: torch is built without it."""
    try:
        from torch.cuda import nccl

        return list(nccl.version())
    except (ImportError, AttributeError):
        return None


def _reduce(torch: ModuleType) -> None:
    """Sum over all visible GPUs, from this process alone."""
    from torch.cuda import nccl

    count = torch.cuda.device_count()
    parts = [
        torch.full((1024,), float(number + 1), device=f"cuda:{number}") for number in range(count)
    ]
    nccl.all_reduce(parts)
    found = [part[0].item() for part in parts]
    expected = [count * (count + 1) / 2] * count
    if found != expected:
        raise RuntimeError(f"a sum over {count} GPU(s) gave {found}, expected {expected}")


def attention_kernels(torch: ModuleType) -> dict[str, str | None]:
    """Call each of PyTorch's attention kernels on a few tokens; return their errors by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    q = torch.ones(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, 128], device="cuda", dtype=torch.int32)

    def dense(backend: Any) -> None:
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().item()

    def packed() -> None:
        rows = q[0].transpose(0, 1).contiguous()
        varlen_attn(rows, rows, rows, offsets, offsets, 128, 128, window_size=(-1, 0))
        torch.cuda.synchronize()

    return {
        "varlen": attempt(packed),
        "flash": attempt(lambda: dense(SDPBackend.FLASH_ATTENTION)),
        "cudnn": attempt(lambda: dense(SDPBackend.CUDNN_ATTENTION)),
        "efficient": attempt(lambda: dense(SDPBackend.EFFICIENT_ATTENTION)),
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
