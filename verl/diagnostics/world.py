"""Read the facts that the doctor judges as plain data, without importing the libraries."""

import glob
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import verl
from verl.diagnostics.probing import Probed, probe

try:
    import psutil
except ImportError:  # the doctor must run on a machine that lacks it
    psutil = None

HERE = str(Path(verl.__file__).parent)
# Modules that every command but the doctor needs: packages that verl requires, and those that
# configuration and chat templates get from others.
CORE_MODULES = (
    "torch",
    "transformers",
    "tensordict",
    "hydra",
    "omegaconf",
    "yaml",
    "jinja2",
    "datasets",
    "pyarrow",
    "numpy",
    "safetensors",
    "math_verify",
    "jaxtyping",
    "peft",
    "accelerate",
    "packaging",
    "psutil",
    "pydantic",
    "urllib3",
)
_CGROUP = Path("/sys/fs/cgroup")  # of this container
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class of graphics cards and 3D controllers


@dataclass(frozen=True, kw_only=True)
class Package:
    version: str
    installer: str = "pip"
    requires: Sequence[str] = ()  # as its metadata says


@dataclass(frozen=True, kw_only=True)
class Host:
    """Sizes in bytes; those of memory are None where psutil is missing."""

    in_container: bool
    ram: int | None  # that this container may use
    ram_available: int | None
    swap: int | None
    shm: int | None  # None: there is no /dev/shm
    open_files: int  # soft limit
    open_files_hard: int
    disks: Mapping[str, tuple[str, int]]  # use -> (folder, free)
    unwritable: Collection[str] = ()  # uses whose folder takes no file of this user


@dataclass(frozen=True, kw_only=True)
class Network:
    interfaces: Sequence[str]  # that are up, the loopback aside
    default_interface: str | None  # of the default route
    rdma_devices: Sequence[str]  # InfiniBand and RoCE cards
    has_peermem: bool  # RDMA cards can reach GPU memory


@dataclass(frozen=True, kw_only=True)
class World:
    """One machine, as seen from one Python."""

    python: tuple[int, int]
    here: str  # the folder of this package
    # every package `verl` that `python -m` would look at from this folder, in that order
    verl_copies: Sequence[str]
    # as the installed metadata of verl says; None: verl is not installed
    requirements: Sequence[str] | None
    packages: Mapping[str, Package]  # by canonical name
    absent_modules: Sequence[str] = ()  # of CORE_MODULES, those that no import finds
    conda_packages: Mapping[str, str] = field(default_factory=dict)
    num_nvidia_cards: int = 0  # whether or not a driver serves them
    driver_version: str | None = None  # of the kernel module
    probed: Probed
    host: Host
    network: Network
    environment: Mapping[str, str] = field(default_factory=dict)


def read_world() -> World:
    """Read this machine. Takes as long as importing torch and calling each GPU once."""
    packages = read_packages()
    return World(
        python=sys.version_info[:2],
        here=HERE,
        verl_copies=find_copies([os.getcwd(), *sys.path]),
        requirements=_requirements(),
        packages=packages,
        absent_modules=[name for name in CORE_MODULES if not _is_found(name)],
        conda_packages=_conda_packages(sys.prefix),
        num_nvidia_cards=_count_cards(),
        driver_version=_driver_version(),
        probed=probe(packages),
        host=read_host(),
        network=read_network(),
        environment=dict(os.environ),
    )


def canonical(name: str) -> str:
    """Return a package's name in the form that pip compares."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_packages() -> dict[str, Package]:
    """Return the installed packages. Of two with one name, Python imports the first."""
    found: dict[str, Package] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and canonical(name) not in found:
            installer = (distribution.read_text("INSTALLER") or "pip").strip()
            found[canonical(name)] = Package(
                version=distribution.version,
                installer=installer,
                requires=tuple(distribution.requires or ()),
            )
    return found


def _is_found(module: str) -> bool:
    """Whether an import would find the module; nothing is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # refused by a finder, or set to None in sys.modules
        return False


def find_copies(folders: Sequence[str]) -> list[str]:
    """Return the packages `verl` in these folders, each once."""
    found = [os.path.realpath(os.path.join(folder, "verl")) for folder in folders]
    return list(
        dict.fromkeys(path for path in found if os.path.exists(os.path.join(path, "__init__.py")))
    )


def _requirements() -> list[str] | None:
    try:
        return importlib.metadata.requires("verl") or []
    except importlib.metadata.PackageNotFoundError:
        return None


def _conda_packages(prefix: str) -> dict[str, str]:
    """Read the packages of a conda environment, with files name-version-build.json."""
    packages = {}
    for path in glob.glob(f"{glob.escape(prefix)}/conda-meta/*-*-*.json"):
        name, version, _ = Path(path).stem.rsplit("-", 2)
        packages[name] = version
    return packages


def _count_cards() -> int:
    """Count cards on the bus, or, where a container or WSL hides that, in /dev."""
    devices = Path("/sys/bus/pci/devices").glob("*")
    on_bus = [_text(device / "class") for device in devices if _text(device / "vendor") == _NVIDIA]
    in_dev = glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg")
    return max(sum(kind.startswith(_DISPLAY) for kind in on_bus), len(in_dev))


def _driver_version() -> str | None:
    found = re.search(
        r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", _text(Path("/proc/driver/nvidia/version"))
    )
    return found and found.group(1)


def read_host() -> Host:
    ram, available, swap = _read_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    without_limit = 2**63 - 1
    cache = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    temporary = _temporary_folder()
    folders = {
        "checkpoints": os.getcwd(),
        "models from the hub": cache,
        "temporary files": temporary or os.environ.get("TMPDIR") or "/tmp",
    }

    unwritable = {use for use, folder in folders.items() if not _is_writable(folder)}
    if temporary is None:
        unwritable.add("temporary files")

    return Host(
        in_container=any(os.path.exists(path) for path in ("/.dockerenv", "/run/.containerenv"))
        or "KUBERNETES_SERVICE_HOST" in os.environ,
        ram=ram,
        ram_available=available,
        swap=swap,
        shm=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        open_files=without_limit if soft == resource.RLIM_INFINITY else soft,
        open_files_hard=without_limit if hard == resource.RLIM_INFINITY else hard,
        disks={use: (folder, _free(folder)) for use, folder in folders.items()},
        unwritable=unwritable,
    )


def _read_memory() -> tuple[int | None, int | None, int | None]:
    """Return the RAM that this container may use, the available part of it, and swap."""
    if psutil is None:
        return None, None, None
    memory = psutil.virtual_memory()
    ram = memory.total
    available = memory.available

    limit = _text(_CGROUP / "memory.max")
    if limit.isdigit() and int(limit) < ram:
        ram = int(limit)
        available = min(available, ram - _held_by_container())
    return ram, available, psutil.swap_memory().total


def _held_by_container() -> int:
    """Return the bytes that this container uses, without cached files, which the kernel frees."""
    used = int(_text(_CGROUP / "memory.current") or 0)
    for line in _text(_CGROUP / "memory.stat").splitlines():
        name, _, num_bytes = line.partition(" ")
        if name in ("active_file", "inactive_file"):
            used -= int(num_bytes)
    return max(used, 0)


def _temporary_folder() -> str | None:
    """Return the folder for temporary files; None where none of the usual ones takes a file."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # every one is full, out of inodes or not writable
        return None


def _free(folder: str) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _is_writable(folder: str) -> bool:
    """Return whether this user may write into a folder, or make it where it is missing."""
    return os.access(_existing(folder), os.W_OK | os.X_OK)


def _existing(folder: str) -> Path:
    """Return a folder, or the first existing one above it."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return path


def read_network() -> Network:
    if psutil is None:
        up = [name for _, name in socket.if_nameindex()]
    else:
        up = [name for name, state in psutil.net_if_stats().items() if state.isup]

    up = [name for name in up if name != "lo"]
    routes = [line.split() for line in _text(Path("/proc/net/route")).splitlines()[1:]]
    default = next(
        (route[0] for route in routes if len(route) > 1 and route[1] == "00000000"), None
    )
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    peermem = any(
        os.path.isdir(f"/sys/module/{name}") for name in ("nvidia_peermem", "nv_peer_mem")
    )
    return Network(interfaces=up, default_interface=default, rdma_devices=rdma, has_peermem=peermem)


def _text(path: Path) -> str:
    """Read a file of the kernel; "" if it is missing or not readable for this user."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
