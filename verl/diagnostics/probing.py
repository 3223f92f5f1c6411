"""Run `verl.diagnostics.probe`, a process that may die or hang, and read its facts."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 240.0
# Packages with compiled parts that must match torch, Python or NumPy, whose module has their name.
_NAMED_ALIKE = """
numpy pyarrow safetensors tensordict transformers triton ray sglang sgl-kernel torchvision
torchaudio torchao numba bitsandbytes causal-conv1d
"""
# All such packages, with the modules to import. Parts after the first are skipped if a version does
# not have them.
SUSPECTS: dict[str, tuple[str, ...]] = {
    **{name: (name.replace("-", "_"),) for name in _NAMED_ALIKE.split()},
    "vllm": ("vllm", "vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C"),
    "sglang-kernel": ("sgl_kernel",),
    "flash-attn": ("flash_attn", "flash_attn_2_cuda"),
    "flash-attn-4": ("flash_attn.cute",),
    "flashinfer-python": ("flashinfer",),
    "xformers": ("xformers.ops",),
    "apex": ("apex", "amp_C"),
    "transformer-engine": ("transformer_engine.pytorch",),
    "mamba-ssm": ("selective_scan_cuda",),
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A visible GPU. Sizes are in bytes; `peers` numbers the GPUs that it reads directly."""

    name: str
    capability: Sequence[int]
    total: int
    free: int
    peers: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Torch:
    version: str
    cuda: str | None = None  # that it is built with; None: a CPU build
    archs: Sequence[str] = ()  # sm_80, ..., compute_90


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Facts of the probe. An error is None if the step works, or was skipped after a failure."""

    # newest that the driver serves; None: no driver's library
    driver_cuda: Sequence[int] | None = None
    torch_error: str | None = None
    torch: Torch | None = None
    imports: Mapping[str, str | None] = field(default_factory=dict)  # package -> error
    cuda_error: str | None = None
    gpus: Sequence[Gpu] = ()
    cudnn_error: str | None = None
    nccl: Sequence[int] | None = None
    nccl_error: str | None = None
    kernels: Mapping[str, str | None] = field(default_factory=dict)  # attention kernel -> error
    died_at: tuple[str, str] | None = None  # the step that ended the process or was late, and how


def probe(installed: Iterable[str]) -> Probed:
    """Load and call the installed packages (canonical names) in a process of their own."""
    packages = {name: SUSPECTS[name] for name in sorted(set(SUSPECTS) & set(installed))}
    # By its path, since another verl may come first; as `-c`, so that the folder of the script is
    # not on the path.
    run = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    probe = Path(__file__).with_name("probe.py")
    command = [sys.executable, "-c", run, str(probe), json.dumps(packages)]

    try:
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as late:
        return understand(late.stdout or b"", f"not done within {DEADLINE_S:g} s")

    if done.returncode == 0:
        return understand(done.stdout, None)
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    last_words = lines[-1:] or [""]
    return understand(done.stdout, f"exit status {done.returncode} {last_words[0]}".strip())


def understand(output: bytes, ended: str | None) -> Probed:
    """Read the output of the probe.

    Args:
        output: its lines.
        ended: how the process ended; None: well.
    """
    facts: dict[str, Any] = {}
    step = "its start"
    for line in output.decode(errors="replace").splitlines():
        if not line.endswith("]"):  # killed while it wrote
            break
        name, fact = json.loads(line)
        if name == "begin":
            step = fact
        else:
            facts[name] = fact

    if facts.get("torch") is not None:
        facts["torch"] = Torch(**facts["torch"])
    facts["gpus"] = [Gpu(**gpu) for gpu in facts.get("gpus", ())]
    died_at = None if ended is None else (step, ended)
    return Probed(**facts, died_at=died_at)
