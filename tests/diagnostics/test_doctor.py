"""The doctor on broken systems, one fault at a time: verdict, evidence and one command."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from verl.diagnostics import doctor
from verl.diagnostics.doctor import check_env
from verl.diagnostics.findings import Finding
from verl.diagnostics.probing import Gpu, Probed, Torch
from verl.diagnostics.world import Host, Network, Package, World
from verl.utils.errors import MissingDependencyError
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

# fault: (changes, finding, verdict, text in its evidence, text in its fix)
BROKEN_WORLDS: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "old Python": ({"python": (3, 9)}, "Python", "broken", "3.9", "python=3.12"),
    "new Python": ({"python": (3, 15)}, "Python", "warn", "tested up to 3.13", "python=3.12"),
    "another verl first": (
        {"verl_copies": ("/home/me/verl", "/site/verl")},
        "verl",
        "broken",
        "/home/me/verl",
        "mv /home/me/verl",
    ),
    "another verl behind": (
        {"verl_copies": ("/site/verl", "/old/verl")},
        "verl",
        "warn",
        "/old/verl",
        "pip uninstall",
    ),
    "not installed": ({"requirements": None}, "verl", "warn", "not installed", "pip install -e ."),
    "conda's torch, pip's wheels": (
        {"conda_packages": {"pytorch": "2.5.1"}} | installed(vllm="0.20.0"),
        "conda and pip",
        "broken",
        "torch, vllm",
        "conda remove -y --force pytorch",
    ),
    "conda's torch alone has metadata": (
        {
            "packages": {
                name: Package(version=version, installer="conda" if name == "torch" else "pip")
                for name, version in (VERSIONS | {"vllm": "0.20.0"}).items()
            }
        },
        "conda and pip",
        "broken",
        "another: vllm",
        "conda remove -y --force pytorch",
    ),
    "torch has a missing symbol": (
        probed(
            torch=None,
            torch_error="ImportError: libtorch_cuda.so: undefined symbol: ncclGroupSimulateEnd",
        ),
        "torch import",
        "broken",
        "ncclGroupSimulateEnd",
        "--force-reinstall 'torch>=2.11'",
    ),
    "libraries of LD_LIBRARY_PATH": (
        probed(torch=None, torch_error="ImportError: undefined symbol: __nvJitLinkComplete_12_4")
        | environment(LD_LIBRARY_PATH="/usr/local/cuda-12.1/lib64"),
        "torch import",
        "broken",
        "nvJitLink",
        "unset LD_LIBRARY_PATH",
    ),
    "no torch": (
        probed(torch=None, torch_error="ModuleNotFoundError: No module named 'torch'")
        | installed(torch=None),
        "missing packages",
        "broken",
        "not installed: torch>=2.11",
        "pip install 'torch>=2.11'",
    ),
    "torch kills its process": (
        probed(torch=None, died_at=("torch_error", "exit status -11")),
        "probe",
        "broken",
        "exit status -11",
        "--force-reinstall",
    ),
    "NCCL hangs": (
        probed(died_at=("nccl_error", "not done within 240 s")),
        "probe",
        "broken",
        "240 s",
        "NCCL_P2P_DISABLE=1",
    ),
    "CPU build on a GPU box": (
        probed(torch=CPU_TORCH, gpus=()),
        "torch build",
        "broken",
        "CPU build",
        "whl/cu130",
    ),
    "CPU build, driver of CUDA 12": (
        probed(torch=CPU_TORCH, gpus=(), driver_cuda=(12, 4)),
        "torch build",
        "broken",
        "12.4",
        "whl/cu126",
    ),
    "driver too old": (
        probed(driver_cuda=(12, 8), gpus=()),
        "torch build",
        "broken",
        "serves CUDA 12.8 at most",
        "whl/cu126",
    ),
    "driver far too old": (
        probed(driver_cuda=(11, 4), gpus=()),
        "torch build",
        "broken",
        "11.4",
        "nvidia-driver-525",
    ),
    "no driver": (
        probed(driver_cuda=None, gpus=()),
        "driver",
        "broken",
        "4 NVIDIA card(s)",
        "apt install nvidia-driver",
    ),
    "container without GPUs": (
        probed(driver_cuda=None, gpus=()) | host(in_container=True),
        "driver",
        "broken",
        "container",
        "--gpus all",
    ),
    "CUDA does not start": (
        probed(cuda_error="RuntimeError: CUDA unknown error", gpus=()),
        "CUDA",
        "broken",
        "unknown error",
        "nvidia-smi",
    ),
    "hidden GPUs": (
        probed(cuda_error="RuntimeError: No CUDA GPUs are available", gpus=())
        | environment(CUDA_VISIBLE_DEVICES=""),
        "CUDA",
        "broken",
        "No CUDA GPUs",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "a card that the build does not know": (
        probed(gpus=(V100,)),
        "GPU 0",
        "broken",
        "no code for sm_70",
        "whl/cu126",
    ),
    "a card in use": (
        probed(gpus=(replace(V100, capability=(9, 0), free=GIB),)),
        "GPU 0",
        "warn",
        "1 free",
        "nvidia-smi",
    ),
    "cards apart": (
        probed(gpus=(*ALIKE[:3], replace(ALIKE[3], peers=(0, 1)))),
        "peer access",
        "warn",
        "between 2-3:",
        "topo -p2p",
    ),
    "cards of two kinds": (
        probed(gpus=(*ALIKE[:3], replace(ALIKE[3], name="A100"))),
        "GPUs alike",
        "warn",
        "3: A100",
        "CUDA_VISIBLE_DEVICES",
    ),
    "cuDNN does not load": (
        probed(cudnn_error="RuntimeError: cuDNN version incompatibility"),
        "cuDNN",
        "broken",
        "incompatib",
        "reinstall",
    ),
    "another cuDNN": (
        probed(cudnn_error="RuntimeError: cuDNN version incompatibility")
        | environment(LD_LIBRARY_PATH="/opt/cudnn/lib"),
        "cuDNN",
        "broken",
        "incompatib",
        "unset LD_LIBRARY_PATH",
    ),
    "NCCL fails": (
        probed(nccl_error="RuntimeError: NCCL Error 2"),
        "NCCL",
        "broken",
        "2.28.3: Runtime",
        "NCCL_DEBUG=INFO",
    ),
    "no varlen kernel": (
        probed(kernels={"varlen": "RuntimeError: needs sm80", "flash": None}),
        "attention",
        "broken",
        "runs: flash; does not: varlen",
        "reinstall",
    ),
    "old transformers": (
        installed(transformers="4.57.1"),
        "transformers",
        "broken",
        "4.57.1",
        "'transformers<6,>=5'",
    ),
    "too new transformers": (
        installed(transformers="6.0.0"),
        "transformers",
        "broken",
        "6.0.0",
        "'transformers<6,>=5'",
    ),
    "old numpy": (installed(numpy="1.26.4"), "numpy", "broken", "1.26.4", "pip install 'numpy>=2'"),
    "no transformers": (
        installed(transformers=None),
        "missing packages",
        "broken",
        "not installed: transformers",
        "pip install 'transformers<6,>=5'",
    ),
    "several packages missing, one of them needed by another": (
        {"absent_modules": ["yaml"]}
        | {
            "packages": {
                "torch": Package(version="2.11.0", requires=["sympy>=1.13", "mkl; extra == 'x'"]),
                "numpy": Package(version="2.1.0"),
            }
        },
        "missing packages",
        "broken",
        "not installed: transformers<6,>=5, sympy>=1.13 (torch), PyYAML",
        "pip install 'transformers<6,>=5' 'sympy>=1.13' PyYAML",
    ),
    "old vLLM": (
        installed(vllm="0.8.4"),
        "vllm",
        "warn",
        "0.8.4, tested with vllm>=0.20",
        "pip install 'vllm>=0.20'",
    ),
    "old SGLang": (
        installed(sglang="0.4.6"),
        "sglang",
        "warn",
        "0.4.6, tested with",
        "pip install 'sglang>=0.5'",
    ),
    "old Ray": (installed(ray="2.10.0"), "ray", "warn", "2.10.0", "'ray>=2.40'"),
    "flash-attn of another torch": (
        FLASH2,
        "import flash-attn",
        "broken",
        "2.8.0 compiled for",
        "uninstall -y flash-attn",
    ),
    "vLLM of another torch": (
        probed(imports={"vllm": "ImportError: vllm/_C.so: undefined symbol: _ZN5torch"})
        | installed(vllm="0.20.0"),
        "import vllm",
        "broken",
        "compiled for something else",
        "--no-deps vllm",
    ),
    "a segmentation fault": (
        probed(imports={"sgl-kernel": "killed by SIGSEGV"}) | installed(sgl_kernel="0.3"),
        "import sgl-kernel",
        "broken",
        "SIGSEGV",
        "--no-deps sgl-kernel",
    ),
    "a package without its own": (
        probed(imports={"vllm": "ModuleNotFoundError: No module named 'msgspec.json'"})
        | installed(vllm="0.20.0"),
        "import vllm",
        "broken",
        "does not import",
        "pip install msgspec",
    ),
    "a package without one that has another name": (
        probed(imports={"vllm": "ModuleNotFoundError: No module named 'zmq'"})
        | installed(vllm="0.20.0"),
        "import vllm",
        "broken",
        "does not import",
        "pip install pyzmq",
    ),
    "Docker's /dev/shm": (
        host(shm=64 * 2**20, in_container=True),
        "/dev/shm",
        "broken",
        "0.1 GiB",
        "--shm-size=16g",
    ),
    "small /dev/shm, one GPU": (
        host(shm=64 * 2**20) | probed(gpus=ALIKE[:1]),
        "/dev/shm",
        "warn",
        "0.1 GiB",
        "remount,size=16G",
    ),
    "few open files": (host(open_files=1024), "ulimit -n", "warn", "1024", "ulimit -n 65536"),
    "very few open files": (
        host(open_files=256, open_files_hard=4096),
        "ulimit -n",
        "broken",
        "256",
        "/etc/security/limits.conf",
    ),
    "few open files in a container": (
        host(open_files=1024, open_files_hard=4096, in_container=True),
        "ulimit -n",
        "warn",
        "1024",
        "--ulimit nofile=",
    ),
    "little RAM": (host(ram_available=5 * GIB), "RAM", "warn", "5.0 available", "ps aux"),
    "no RAM": (host(ram_available=GIB), "RAM", "broken", "1.0 available", "ps aux"),
    "no swap": (host(ram=200 * GIB), "swap", "warn", "none, with 200 GiB", "swapon"),
    "full disk": (
        host(disks=FULL_DISK),
        "disk, checkpoints",
        "broken",
        "1 GiB free in /home",
        "default_local_dir",
    ),
    "little room for models": (
        host(disks=FULL_DISK),
        "disk, models from the hub",
        "warn",
        "20 GiB",
        "HF_HOME",
    ),
    "an interface that is not there": (
        environment(NCCL_SOCKET_IFNAME="ens"),
        "NCCL_SOCKET_IFNAME",
        "broken",
        "eth0, ib0",
        "NCCL_SOCKET_IFNAME=eth0",
    ),
    "every interface forbidden": (
        environment(NCCL_SOCKET_IFNAME="^eth,ib,docker"),
        "NCCL_SOCKET_IFNAME",
        "broken",
        "names none",
        "IFNAME=eth0",
    ),
    "an exact name": (
        environment(NCCL_SOCKET_IFNAME="=eth"),
        "NCCL_SOCKET_IFNAME",
        "broken",
        "=eth names",
        "=eth0",
    ),
    "GPU Direct without RDMA": (
        environment(NCCL_NET_GDR_LEVEL="5") | NO_RDMA,
        "NCCL_NET_GDR_LEVEL",
        "warn",
        "no RDMA card",
        "unset",
    ),
    "GPU Direct, RDMA off": (
        environment(NCCL_NET_GDR_LEVEL="5", NCCL_IB_DISABLE="1"),
        "NCCL_NET_GDR_LEVEL",
        "warn",
        "NCCL_IB_DISABLE=1",
        "unset",
    ),
    "GPU Direct without its module": (
        environment(NCCL_NET_GDR_LEVEL="PHB") | NO_PEERMEM,
        "NCCL_NET_GDR_LEVEL",
        "warn",
        "nvidia-peermem",
        "unset",
    ),
    "a level of peer access that is off": (
        environment(NCCL_P2P_LEVEL="NVL", NCCL_P2P_DISABLE="1"),
        "NCCL_P2P_LEVEL",
        "warn",
        "NCCL_P2P_DISABLE=1",
        "unset",
    ),
    "what to log, and no log": (
        environment(NCCL_DEBUG_SUBSYS="NET"),
        "NCCL_DEBUG_SUBSYS",
        "warn",
        "NCCL_DEBUG is not set",
        "unset",
    ),
    "RDMA off": (
        environment(NCCL_IB_DISABLE="1"),
        "NCCL_IB_DISABLE",
        "warn",
        "mlx5_0",
        "unset NCCL_IB_DISABLE",
    ),
    "RDMA off by a word": (
        environment(NCCL_IB_DISABLE="yes"),
        "NCCL_IB_DISABLE",
        "warn",
        "=yes is read as 0",
        "export NCCL_IB_DISABLE=1",
    ),
    "another switch with a word": (
        environment(NCCL_NVLS_ENABLE="off"),
        "NCCL_NVLS_ENABLE",
        "warn",
        "expects 0 or 1",
        "export NCCL_NVLS_ENABLE=0",
    ),
    "RDMA off by another number": (
        environment(NCCL_IB_DISABLE="0x2"),
        "NCCL_IB_DISABLE",
        "warn",
        "=0x2 leaves the RDMA cards unused",
        "unset",
    ),
    "a typing error": (
        environment(NCCL_IB_DISABEL="1"),
        "NCCL_IB_DISABEL",
        "warn",
        "NCCL_IB_DISABLE perhaps",
        "unset",
    ),
    "PyTorch's own": (
        environment(NCCL_ASYNC_ERROR_HANDLING="1"),
        "NCCL_ASYNC_ERROR_HANDLING",
        "warn",
        "TORCH_NCCL_ASYNC",
        "unset",
    ),
    "NCCL on a CPU": (
        environment(NCCL_DEBUG="INFO") | probed(gpus=()),
        "NCCL variables",
        "warn",
        "no GPU, no effect",
        "unset NCCL_DEBUG",
    ),
}


def findings_of(changes: dict[str, Any]) -> list[Finding]:
    return list(check_env(replace(HEALTHY, **changes)).findings)


def test_healthy_system():
    report = check_env(HEALTHY)
    assert {finding.verdict for finding in report.findings} == {"ok"}
    assert report.exit_code == 0
    names = [finding.name for finding in report.findings]
    assert {
        "GPU 3",
        "peer access",
        "cuDNN",
        "NCCL",
        "attention",
        "several nodes",
        "swap",
        "ray",
    } <= set(names)

    assert "pytest" not in str(report), "users need no development package"
    assert repr(report) == str(report), "a table, also as the value of a notebook's cell"


@pytest.mark.parametrize("world", BROKEN_WORLDS)
def test_broken_system(world: str):
    changes, name, verdict, evidence, fix = BROKEN_WORLDS[world]
    found = [finding for finding in findings_of(changes) if finding.name == name]
    assert [finding.verdict for finding in found] == [verdict]
    assert evidence in found[0].evidence
    assert found[0].fix is not None
    assert fix in found[0].fix
    assert "\n" not in found[0].evidence + found[0].fix
    shlex.split(found[0].fix, comments=True)  # raises if a shell could not parse it


@pytest.mark.parametrize("world", BROKEN_WORLDS)
def test_one_fault_gives_one_finding(world: str):
    """Leave the other findings at ok, except those that depend on the same facts."""
    changes, name, *_ = BROKEN_WORLDS[world]
    others = {finding.name for finding in findings_of(changes) if finding.verdict != "ok"} - {name}
    follow = {
        "disk, checkpoints",
        "disk, models from the hub",
        "disk, temporary files",
        "NCCL_IB_DISABLE",
        "swap",
    }
    assert others <= follow


def test_root_causes_come_first():
    report = check_env(replace(HEALTHY, python=(3, 9), **FLASH2, **host(open_files=10)))
    assert [finding.name for finding in report.broken] == [
        "Python",
        "import flash-attn",
        "ulimit -n",
    ]
    assert "3 broken (Python, import flash-attn, ulimit -n)" in str(report)


@pytest.mark.parametrize(
    ("changes", "line", "why"),
    [
        (
            {},
            "NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=WARN NCCL_IB_DISABLE=0 NCCL_NET_GDR_LEVEL=PHB",
            "mlx5_0",
        ),
        (
            NO_RDMA,
            "NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=WARN NCCL_IB_DISABLE=1",
            "NCCL_NET_GDR_LEVEL has no effect",
        ),
        (
            NO_PEERMEM,
            "NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=WARN NCCL_IB_DISABLE=0",
            "sudo modprobe nvidia-peermem",
        ),
        (environment(NCCL_SOCKET_IFNAME="ib"), "NCCL_SOCKET_IFNAME=ib NCCL_DEBUG=WARN", "mlx5_0"),
        (
            environment(NCCL_IB_DISABLE="True"),
            "NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=WARN NCCL_IB_DISABLE=1",
            "mlx5_0",
        ),
    ],
    ids=["RDMA", "Ethernet", "no peermem", "as given", "as meant"],
)
def test_nccl_variables_for_several_nodes(changes, line, why):
    (found,) = (finding for finding in findings_of(changes) if finding.name == "several nodes")
    assert found.fix is not None
    assert found.fix.startswith(f"export {line}")
    assert why in found.evidence


def test_laptop():
    """Find nothing broken, and nothing about NCCL, without a GPU, a driver or a CUDA build."""
    laptop = replace(
        HEALTHY,
        num_nvidia_cards=0,
        driver_version=None,
        probed=Probed(torch=CPU_TORCH, imports={"numpy": None}),
        **host(shm=None, swap=8 * GIB, ram=16 * GIB),
    )
    report = check_env(laptop)

    assert {finding.verdict for finding in report.findings} == {"ok"}
    with_library = check_env(replace(laptop, probed=replace(laptop.probed, driver_cuda=(13, 0))))
    assert with_library.findings == report.findings, "a container image may include the library"
    assert not [
        finding
        for finding in report.findings
        if "NCCL" in finding.name or finding.name == "several nodes"
    ]


def no_ray() -> Any:
    raise MissingDependencyError("test_ray_connectivity() needs the package 'ray'.")


def test_command_gives_json_and_exit_status(monkeypatch, capsys):
    world = replace(HEALTHY, **FLASH2)
    monkeypatch.setattr(doctor, "read_world", lambda: world)
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["broken"] == 1
    (broken,) = (finding for finding in report["findings"] if finding["verdict"] == "broken")
    assert set(broken) == {"name", "verdict", "evidence", "fix"}
    monkeypatch.setattr(doctor, "read_world", lambda: HEALTHY)
    monkeypatch.setattr(doctor, "test_ray_connectivity", no_ray)
    assert doctor.main([]) == 0
    assert "Nothing is broken, 0 to look at." in capsys.readouterr().out
    assert doctor.main(["--ray"]) == 1
    assert "pip install 'ray>=2.40'" in capsys.readouterr().out
