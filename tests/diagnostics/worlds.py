"""A healthy system, and changes of it."""

from dataclasses import replace
from typing import Any

from verl.diagnostics.probing import Gpu, Probed, Torch
from verl.diagnostics.world import Host, Network, Package, World
from verl.utils.units import GIB

REQUIREMENTS = (
    "torch>=2.11",
    "transformers<6,>=5",
    "numpy>=2",
    'vllm>=0.20; extra == "vllm"',
    'sglang>=0.5; extra == "sglang"',
    'ray>=2.40; extra == "ray"',
    'ray>=2.40; extra == "dev"',
    'pytest>=9; extra == "dev"',
)
VERSIONS = {"torch": "2.11.0+cu130", "transformers": "5.17.0", "numpy": "2.1.0", "ray": "2.50.0"}
ALIKE = tuple(
    Gpu(
        name="H100",
        capability=(9, 0),
        total=80 * GIB,
        free=79 * GIB,
        peers=[p for p in range(4) if p != number],
    )
    for number in range(4)
)
HEALTHY = World(
    python=(3, 12),
    here="/site/verl",
    verl_copies=("/site/verl",),
    requirements=REQUIREMENTS,
    packages={name: Package(version=version) for name, version in VERSIONS.items()},
    num_nvidia_cards=4,
    driver_version="580.65",
    probed=Probed(
        driver_cuda=(13, 0),
        torch=Torch(
            version="2.11.0+cu130", cuda="13.0", archs=("sm_80", "sm_90", "sm_100", "compute_120")
        ),
        imports={"numpy": None, "ray": None, "transformers": None},
        gpus=ALIKE,
        nccl=(2, 28, 3),
        kernels={"varlen": None, "flash": None, "cudnn": None, "efficient": None},
    ),
    host=Host(
        in_container=False,
        ram=1000 * GIB,
        ram_available=900 * GIB,
        swap=0,
        shm=500 * GIB,
        open_files=1_048_576,
        open_files_hard=1_048_576,
        disks=dict.fromkeys(
            ("checkpoints", "models from the hub", "temporary files"), ("/data", 900 * GIB)
        ),
    ),
    network=Network(
        interfaces=("eth0", "ib0", "docker0"),
        default_interface="eth0",
        rdma_devices=("mlx5_0",),
        has_peermem=True,
    ),
)


def installed(**changes: str | None) -> dict[str, Any]:
    """Return `packages` with other versions; None means not installed."""
    packages = {
        **VERSIONS,
        **{name.replace("_", "-"): version for name, version in changes.items()},
    }
    return {
        "packages": {
            name: Package(version=version)
            for name, version in packages.items()
            if version is not None
        }
    }


def probed(**changes: Any) -> dict[str, Any]:
    return {"probed": replace(HEALTHY.probed, **changes)}


def host(**changes: Any) -> dict[str, Any]:
    return {"host": replace(HEALTHY.host, **changes)}


def environment(**changes: str) -> dict[str, Any]:
    return {"environment": changes}


SYMBOL = (
    "ImportError: /site/flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocation"
)
CPU_TORCH = Torch(version="2.13.0+cpu")
FLASH2 = probed(imports={"flash-attn": SYMBOL}) | installed(flash_attn="2.8.0")
FULL_DISK = {
    "checkpoints": ("/home", GIB),
    "models from the hub": ("/home", 20 * GIB),
    "temporary files": ("/", 9 * GIB),
}
V100 = Gpu(name="V100", capability=(7, 0), total=32 * GIB, free=31 * GIB)
NO_PEERMEM = {"network": replace(HEALTHY.network, has_peermem=False)}
NO_RDMA = {"network": replace(HEALTHY.network, rdma_devices=(), has_peermem=False)}
