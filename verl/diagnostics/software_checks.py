"""Check Python, torch, packages and GPUs: pure functions of a World."""

import re
from collections.abc import Sequence

from verl.diagnostics.findings import Finding, Findings
from verl.diagnostics.probing import SUSPECTS, Gpu, Torch
from verl.diagnostics.requirements import (
    CONDA_TORCH,
    Needed,
    install_command,
    missing_packages,
    read_requirement,
)
from verl.diagnostics.world import World, canonical
from verl.utils.imports import distribution_of
from verl.utils.units import GIB

# Versions that verl is tested with.
OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 13)
# A build for a major version of CUDA runs on every driver of that version. Oldest CUDA first: (its
# major version, the driver that it needs, PyTorch's index of wheels).
BUILDS = ((12, "525", "cu126"), (13, "580", "cu130"))
# Packages with a finding of their own; all others share one.
NAMED = ("torch", "transformers", "ray", "vllm", "sglang", "flash-attn-4", "torchao")
# Packages with wheels that are compiled against one build of torch.
_BUILT_ON_TORCH = (
    "torchvision",
    "torchaudio",
    "vllm",
    "flash-attn",
    "xformers",
    "sgl-kernel",
    "sglang-kernel",
)
_ABI = re.compile(
    r"undefined symbol|GLIBCXX_|GLIBC_|cannot open shared object file|size changed, may indicate|"
    r"compiled using NumPy 1|module compiled against|killed by SIG|symbol not found",
    re.IGNORECASE,
)
_REINSTALL = "pip install --force-reinstall 'torch>=2.11'"


def python_version(world: World) -> Findings:
    """Check the version of Python."""
    found = _dotted(world.python)
    fix = "conda create -n verl python=3.12"
    if world.python < OLDEST_PYTHON:
        evidence = f"{found}; {_dotted(OLDEST_PYTHON)} is the oldest that works"
        yield Finding("Python", "broken", evidence, fix)
    elif world.python > NEWEST_PYTHON:
        evidence = f"{found}; tested up to {_dotted(NEWEST_PYTHON)}"
        yield Finding("Python", "warn", evidence, fix)
    else:
        yield Finding("Python", "ok", found)


def other_verl(world: World) -> Findings:
    """Check which package `verl` Python finds, and whether it is installed."""
    others = [path for path in world.verl_copies if path != world.here]

    if world.verl_copies and world.verl_copies[0] != world.here:
        yield Finding(
            "verl",
            "broken",
            f"`python -m verl...` takes {others[0]} from this folder, this is {world.here}",
            f"mv {others[0]} {others[0]}_other  # or start runs from another folder",
        )
    elif others:
        yield Finding(
            "verl",
            "warn",
            f"another one, hidden by this one: {', '.join(others)}",
            "pip uninstall -y verl && pip install .",
        )
    elif world.requirements is None:
        yield Finding(
            "verl",
            "warn",
            f"used from {world.here}, not installed: versions of packages are not checked",
            "pip install -e .",
        )
    else:
        yield Finding("verl", "ok", world.here)


def missing(world: World) -> Findings:
    """List all packages that are missing, with one command that installs them."""
    found = missing_packages(world)
    if not found:
        return

    names = []
    for package in found.values():
        needed_by = "" if package.needed_by is None else f" ({package.needed_by})"
        names.append(f"{package.wanted}{needed_by}")
    evidence = f"not installed: {', '.join(names)}"
    yield Finding("missing packages", "broken", evidence, install_command(found))


def torch_import(world: World) -> Findings:
    """Check whether torch can be imported."""
    probed = world.probed
    if "torch" in missing_packages(world):
        return  # `missing` has the command
    if probed.torch_error is None:
        if probed.torch is not None:
            yield Finding("torch import", "ok", f"torch {probed.torch.version}")
        return

    fix = _REINSTALL
    libraries = world.environment.get("LD_LIBRARY_PATH", "")
    if re.search(r"cuda|nvidia|cudnn|nccl", libraries):
        fix = "unset LD_LIBRARY_PATH  # its libraries come before those that torch brings"
    yield Finding("torch import", "broken", probed.torch_error, fix)


def probe_ended(world: World) -> Findings:
    """Report the step that ended the probing process."""
    if world.probed.died_at is None:
        return

    step, how = world.probed.died_at
    fixes = {
        "torch_error": _REINSTALL,
        "nccl_error": "NCCL_DEBUG=INFO NCCL_P2P_DISABLE=1 verl doctor  # does peer access hang?",
    }
    fix = fixes.get(step, "nvidia-smi  # if it hangs too: restart the driver or the machine")
    evidence = f"the step '{step}' ended it: {how}; later steps were not tried"
    yield Finding("probe", "broken", evidence, fix)


def build_and_driver(world: World) -> Findings:
    """Check that this build of torch can use the GPUs with this driver."""
    probed = world.probed
    build = probed.torch
    if build is None:
        return

    driver = probed.driver_cuda
    # A library of the driver alone may come with a container's image.
    if not (world.num_nvidia_cards or world.driver_version or probed.gpus):
        kind = "CPU build" if build.cuda is None else f"CUDA {build.cuda} build"
        yield Finding("torch build", "ok", f"{kind}, no NVIDIA card: runs on the CPU")
    elif driver is None:
        cards = f"{world.num_nvidia_cards} NVIDIA card(s), no libcuda.so.1"
        fix = "sudo apt install nvidia-driver-580 && sudo reboot"
        if world.host.in_container:
            run = "docker run --gpus all --ipc=host ..."
            fix = f"{run}  # with nvidia-container-toolkit on the host"
        evidence = f"{cards}: there is no driver, or this container does not get it"
        yield Finding("driver", "broken", evidence, fix)
    elif build.cuda is None:
        evidence = f"{build.version} is a CPU build; the driver serves CUDA {_dotted(driver)}"
        yield Finding("torch build", "broken", evidence, _install_for(driver[0]))
    elif int(build.cuda.split(".")[0]) > driver[0]:
        serves = f"the driver {world.driver_version or ''} serves CUDA {_dotted(driver)} at most"
        evidence = f"built with CUDA {build.cuda}, {serves}"
        yield Finding("torch build", "broken", evidence, _install_for(driver[0]))
    elif probed.cuda_error is not None:
        fix = "nvidia-smi  # must list the cards; else restart the driver or the container"
        if world.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            fix = "unset CUDA_VISIBLE_DEVICES  # it hides all cards"
        yield Finding("CUDA", "broken", probed.cuda_error, fix)
    else:
        serves = f"driver {world.driver_version or ''} serves {_dotted(driver)}"
        yield Finding("torch build", "ok", f"CUDA {build.cuda}, {serves}")


def _install_for(driver_major: int) -> str:
    """Return the command for the newest build that the driver serves, or for a newer driver."""
    served = [index for major, _, index in BUILDS if major <= driver_major]
    if not served:
        return f"sudo apt install nvidia-driver-{BUILDS[0][1]} && sudo reboot"
    return _install_from(served[-1])


def _install_from(index: str) -> str:
    wheels = f"https://download.pytorch.org/whl/{index}"
    return f"{_REINSTALL} --index-url {wheels}"


def gpus(world: World) -> Findings:
    """Check each GPU, and the links between them."""
    build = world.probed.torch
    found = world.probed.gpus
    for number, gpu in enumerate(found):
        evidence = f"{gpu.name}, {gpu.total / GIB:.0f} GiB, {gpu.free / GIB:.0f} free"
        if build is not None and build.archs and not _serves(build, gpu):
            needs = f"sm_{gpu.capability[0]}{gpu.capability[1]}"
            evidence += f"; this torch has no code for {needs}, only {', '.join(build.archs)}"
            fix = _install_from("cu126" if gpu.capability[0] < 8 else "cu130")
            yield Finding(f"GPU {number}", "broken", evidence, fix)
        elif gpu.free < 0.9 * gpu.total:
            evidence += ": another process is on it"
            yield Finding(f"GPU {number}", "warn", evidence, "nvidia-smi")
        else:
            yield Finding(f"GPU {number}", "ok", evidence)

    if len(found) > 1:
        yield from _peers(found)
    if len({gpu.name for gpu in found}) > 1:
        names = ", ".join(f"{number}: {gpu.name}" for number, gpu in enumerate(found))
        fix = "export CUDA_VISIBLE_DEVICES=0  # those of one kind"
        yield Finding("GPUs alike", "warn", names, fix)


def _peers(found: Sequence[Gpu]) -> Findings:
    """Check that all GPUs read each other's memory."""
    apart = []
    for number, gpu in enumerate(found):
        for other in range(number + 1, len(found)):
            if other not in gpu.peers or number not in found[other].peers:
                apart.append(f"{number}-{other}")

    if apart:
        evidence = (
            f"no direct access between {', '.join(apart)}: sums over them go through host memory"
        )
        fix = "nvidia-smi topo -p2p r  # ACS or IOMMU in the BIOS forbid it"
        yield Finding("peer access", "warn", evidence, fix)
    else:
        yield Finding("peer access", "ok", f"all {len(found)} GPUs reach each other")


def _serves(build: Torch, gpu: Gpu) -> bool:
    """Whether this build of torch has code for a GPU.

    Machine code runs on the same major version from its minor version on, PTX on everything newer.
    """
    major, minor = gpu.capability
    for arch in build.archs:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")  # sm_90a
        built_for = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and built_for[0] == major and built_for[1] <= minor:
            return True
        if kind == "compute" and built_for <= (major, minor):
            return True
    return False


def cuda_libraries(world: World) -> Findings:
    """Check cuDNN and NCCL by one call each."""
    probed = world.probed
    if not probed.gpus:
        return

    if probed.cudnn_error is not None:
        fix = _REINSTALL
        if re.search("cudnn|cuda", world.environment.get("LD_LIBRARY_PATH", "")):
            fix = "unset LD_LIBRARY_PATH  # another cuDNN comes before the one that torch brings"
        yield Finding("cuDNN", "broken", probed.cudnn_error, fix)
    else:
        yield Finding("cuDNN", "ok", "a convolution ran")

    version = _dotted(probed.nccl) if probed.nccl else "unknown version"
    if probed.nccl_error is not None:
        fix = "NCCL_DEBUG=INFO verl doctor"
        yield Finding("NCCL", "broken", f"{version}: {probed.nccl_error}", fix)
    elif probed.nccl is not None:
        yield Finding("NCCL", "ok", f"{version}, summed over {len(probed.gpus)} GPU(s)")


def attention(world: World) -> Findings:
    """Report the attention kernels that run here."""
    kernels = world.probed.kernels
    if not kernels:
        if world.probed.torch is not None and not world.probed.gpus:
            yield Finding("attention", "ok", "on a CPU: PyTorch's scaled_dot_product_attention")
        return

    runs = []
    fails = []
    for name, error in kernels.items():
        if error is None:
            runs.append(name)
        else:
            fails.append(f"{name} ({error.splitlines()[0][:80]})")

    evidence = f"runs: {', '.join(runs) or 'none'}"
    if fails:
        evidence += f"; does not: {', '.join(fails)}"
    if world.probed.imports.get("flash-attn-4", "absent") is None:
        evidence += "; flash-attn-4 is there"

    if kernels.get("varlen") is not None:
        fix = f"{_REINSTALL}  # training needs varlen; the card must be Ampere or newer"
        yield Finding("attention", "broken", evidence, fix)
    else:
        yield Finding("attention", "ok", evidence)


def versions(world: World) -> Findings:
    """Compare installed packages with the requirements in verl's metadata."""
    asked: dict[str, Needed] = {}
    for text in world.requirements or ():
        needed = read_requirement(text)
        if needed is not None and needed.extra != "dev":
            asked.setdefault(needed.name, needed)

    reported = missing_packages(world)
    plain = []
    absent = []
    for name, needed in asked.items():
        package = world.packages.get(name)
        wanted = needed.wanted
        if name in reported:
            continue
        if package is None:
            if needed.extra is not None:
                absent.append(wanted)
        elif not needed.accepts(package.version):
            verdict = "broken" if needed.extra is None else "warn"
            yield Finding(
                name, verdict, f"{package.version}, tested with {wanted}", f"pip install '{wanted}'"
            )
        elif name in NAMED:
            checked = wanted if needed.specifier is not None else f"{wanted}, not checked"
            yield Finding(name, "ok", f"{package.version} ({checked})")
        else:
            plain.append(name)

    if plain and "packaging" in reported:
        evidence = f"ranges not checked without the package 'packaging': {', '.join(plain)}"
        yield Finding("packages", "ok", evidence)
    elif plain:
        yield Finding("packages", "ok", f"within their ranges: {', '.join(plain)}")
    if "flash-attn" in world.packages:
        version = world.packages["flash-attn"].version
        evidence = f"{version}; not needed, PyTorch's own kernels are used"
        yield Finding("flash-attn", "ok", evidence)
    if absent:
        yield Finding("optional", "ok", f"not installed: {', '.join(absent)}")


def binary_interfaces(world: World) -> Findings:
    """Report packages that fail to import.

    They were compiled for another torch, CUDA or NumPy, or miss a package that they need.
    """
    failed = {name: error for name, error in world.probed.imports.items() if error is not None}
    reported = missing_packages(world)
    for name, error in failed.items():
        package = world.packages.get(name)
        version = "" if package is None else package.version
        absent = re.search(r"No module named '([\w.]+)'", error)
        if absent and canonical(distribution_of(absent.group(1))) in reported:
            continue

        if name == "flash-attn":
            fix = "pip uninstall -y flash-attn  # not needed, and transformers stumbles over it"
        elif absent and absent.group(1).split(".")[0] != SUSPECTS[name][0].split(".")[0]:
            fix = f"pip install {distribution_of(absent.group(1))}"
        else:
            fix = f"pip install --force-reinstall --no-cache-dir --no-deps {name}"

        fault = "compiled for something else" if _ABI.search(error) else "does not import"
        evidence = f"{version} {fault}: {error.splitlines()[-1]}".strip()
        yield Finding(f"import {name}", "broken", evidence, fix)

    if world.probed.imports and not failed:
        yield Finding("imports", "ok", f"all load: {', '.join(world.probed.imports)}")


def conda_and_pip(world: World) -> Findings:
    """Report a torch from conda together with wheels from pip that expect another one."""
    of_conda = next((name for name in CONDA_TORCH if name in world.conda_packages), None)
    installed = world.packages.get("torch")
    if of_conda is None and (installed is None or installed.installer != "conda"):
        return

    wheels = []
    for name in ("torch", *_BUILT_ON_TORCH):
        if name in world.packages and world.packages[name].installer != "conda":
            wheels.append(name)
    if wheels:
        version = world.conda_packages.get(of_conda or "", "")
        evidence = f"torch {version} from conda, and wheels from pip that bring or expect another: "
        evidence += ", ".join(wheels)
        remove = f"conda remove -y --force {of_conda or 'pytorch'}"
        fix = f"{remove} && {_REINSTALL}"
        yield Finding("conda and pip", "broken", evidence, fix)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
