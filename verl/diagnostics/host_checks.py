"""Check memory, limits, disks and NCCL variables: pure functions of a World."""

import difflib
import os
import re
from collections.abc import Mapping

from verl.diagnostics.findings import Finding, Findings, Verdict
from verl.diagnostics.world import Network, World
from verl.utils.units import GIB

SHM = 1 * GIB  # for NCCL's buffers between the GPUs of a host; Docker gives 64 MiB
OPEN_FILES = 8192  # Ray opens several for each worker and connection
FEWEST_OPEN_FILES = 1024
RAM = 8 * GIB  # available
LEAST_RAM = 2 * GIB
DISK = 50 * GIB
LEAST_DISK = 2 * GIB

# Variables that people set by hand. A name that is close to one of them, but not equal, is reported
# as a typing error; every other name is left to NCCL.
_OFTEN_SET = """
SOCKET_IFNAME SOCKET_FAMILY IB_DISABLE IB_HCA IB_GID_INDEX IB_TIMEOUT IB_RETRY_CNT
NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN P2P_DISABLE P2P_LEVEL SHM_DISABLE CROSS_NIC
DEBUG DEBUG_FILE DEBUG_SUBSYS BUFFSIZE ALGO PROTO
"""
_CLOSE = 0.88  # similarity of a typing error; names in NCCL's manual are at most 0.86 alike
# PyTorch's own, which it reads under another name by now.
_RENAMED = re.compile("NCCL_(ASYNC_ERROR_HANDLING|BLOCKING_WAIT|DESYNC_DEBUG|ENABLE_TIMING)")
# Switches, and the number that NCCL reads from their value: it ignores the text after it, and takes a
# word as 0.
_SWITCH = re.compile("NCCL_(.*_)?(DISABLE|ENABLE)")
_NUMBER = re.compile(r"\s*([+-]?(0[xX][0-9a-fA-F]+|\d+))")
_YES = ("yes", "y", "true", "t", "on")


def shared_memory(world: World) -> Findings:
    """Check the size of /dev/shm, which NCCL and Ray put buffers into."""
    size = world.host.shm
    if size is None:
        return

    evidence = f"{size / GIB:.1f} GiB"
    fix = "sudo mount -o remount,size=16G /dev/shm"
    if world.host.in_container:
        fix = "docker run --shm-size=16g ...  # or --ipc=host"

    num_gpus = len(world.probed.gpus)
    if size >= SHM:
        yield Finding("/dev/shm", "ok", evidence)
    elif num_gpus > 1:
        evidence += f": NCCL needs about {SHM / GIB:.0f} GiB there between {num_gpus} GPUs"
        yield Finding("/dev/shm", "broken", evidence, fix)
    else:
        evidence += ": too small for Ray and for several GPUs"
        yield Finding("/dev/shm", "warn", evidence, fix)


def open_files(world: World) -> Findings:
    """Check how many files a process may open."""
    soft = world.host.open_files
    hard = world.host.open_files_hard
    if soft >= OPEN_FILES:
        shown = "unlimited" if soft > 2**40 else str(soft)
        yield Finding("ulimit -n", "ok", shown)
        return

    wanted = 65536
    fix = f"ulimit -n {wanted}"
    if hard < wanted and world.host.in_container:
        fix = f"docker run --ulimit nofile={wanted}:{wanted} ..."
    elif hard < wanted:
        limits = "/etc/security/limits.conf"
        fix = f"echo '* - nofile {wanted}' | sudo tee -a {limits}  # then log in again"
    verdict = _verdict(soft < FEWEST_OPEN_FILES)
    evidence = f"{soft}: Ray and data workers open more files at once"
    yield Finding("ulimit -n", verdict, evidence, fix)


def _verdict(is_broken: bool) -> Verdict:
    return "broken" if is_broken else "warn"


def memory(world: World) -> Findings:
    """Check the memory that is available, and swap."""
    host = world.host
    if host.ram is None or host.ram_available is None or host.swap is None:
        return  # psutil, which measures them, is reported as missing

    evidence = f"{host.ram / GIB:.0f} GiB, {host.ram_available / GIB:.1f} available"
    if host.ram_available < RAM:
        verdict = _verdict(host.ram_available < LEAST_RAM)
        evidence += ": loading a model may fail (Errno 12)"
        yield Finding("RAM", verdict, evidence, "ps aux --sort=-rss | head")
    else:
        yield Finding("RAM", "ok", evidence)

    on_gpus = sum(gpu.total for gpu in world.probed.gpus)
    if host.swap > 0:
        yield Finding("swap", "ok", f"{host.swap / GIB:.0f} GiB")
    elif host.ram < max(32 * GIB, on_gpus):
        evidence = (
            f"none, with {host.ram / GIB:.0f} GiB of RAM: off-load, or reading a large model, "
        )
        evidence += "may end in Errno 12"
        fix = "sudo fallocate -l 32G /swap && sudo chmod 600 /swap && "
        fix += "sudo mkswap /swap && sudo swapon /swap"
        yield Finding("swap", "warn", evidence, fix)
    else:
        evidence = f"none; {host.ram / GIB:.0f} GiB of RAM do without"
        yield Finding("swap", "ok", evidence)


def disks(world: World) -> Findings:
    """Check that a run can write into its folders, and their free space."""
    fixes = {
        "checkpoints": "verl train trainer.default_local_dir=/another/disk ...",
        "models from the hub": "export HF_HOME=/another/disk",
        "temporary files": "export TMPDIR=/another/disk",
    }
    roomy = []

    for use, (folder, free) in world.host.disks.items():
        if use in world.host.unwritable:
            # A run may name another folder for checkpoints, and read a shared folder of models.
            verdict = _verdict(use == "temporary files")
            evidence = f"no file can be written into {folder}"
            yield Finding(f"disk, {use}", verdict, evidence, fixes[use])
            continue

        evidence = f"{free / GIB:.0f} GiB free in {folder}"
        # Compiled kernels and spilled objects take less than a checkpoint.
        needed = DISK / 10 if use == "temporary files" else DISK
        if free >= needed:
            roomy.append(f"{use}: {evidence}")
            continue
        verdict = _verdict(free < LEAST_DISK)
        yield Finding(f"disk, {use}", verdict, evidence, fixes[use])

    if roomy:
        yield Finding("disk", "ok", "; ".join(roomy))

    named = world.environment.get("TMPDIR")
    used, _ = world.host.disks["temporary files"]
    is_usable = "temporary files" not in world.host.unwritable
    if named and is_usable and os.path.abspath(named) != used:
        evidence = f"no file can be written into {named}, so temporary files go to {used}"
        yield Finding("TMPDIR", "warn", evidence, f"mkdir -p {named}  # or unset TMPDIR")


def nccl_variables(world: World) -> Findings:
    """Check the variables that are set, and list those to set on several nodes."""
    given = {name: value for name, value in world.environment.items() if name.startswith("NCCL_")}
    if not world.probed.gpus:
        if given:
            evidence = f"no GPU, no effect: {', '.join(sorted(given))}"
            fix = f"unset {' '.join(sorted(given))}"
            yield Finding("NCCL variables", "warn", evidence, fix)
        return

    yield from _wrong_interface(given, world.network)
    idle = _without_effect(given, world.network)
    for name, reason in idle.items():
        yield Finding(name, "warn", f"={given[name]} has no effect: {reason}", f"unset {name}")

    meant = _switches_without_a_number(given)
    for name, value in meant.items():
        evidence = f"={given[name]} is read as 0, because NCCL expects 0 or 1"
        yield Finding(name, "warn", evidence, f"export {name}={value}")

    if _is_on(given, "NCCL_IB_DISABLE") and world.network.rdma_devices:
        cards = ", ".join(world.network.rdma_devices)
        evidence = f"={given['NCCL_IB_DISABLE']} leaves the RDMA cards unused: {cards}"
        yield Finding("NCCL_IB_DISABLE", "warn", evidence, "unset NCCL_IB_DISABLE")

    kept = {name: value for name, value in given.items() if name not in idle} | meant
    advised, reason = _for_several_nodes(world.network)
    line = " ".join(f"{name}={kept.get(name, value)}" for name, value in advised.items())
    evidence = (
        "set where the driver runs (Ray's workers get them), under torchrun on every node; "
        f"{reason}"
    )
    yield Finding("several nodes", "ok", evidence, f"export {line}")


def _for_several_nodes(network: Network) -> tuple[dict[str, str], str]:
    """Return the variables to set with their values, and a remark on RDMA."""
    advised = {"NCCL_SOCKET_IFNAME": network.default_interface or "eth0", "NCCL_DEBUG": "WARN"}
    if not network.rdma_devices:
        advised["NCCL_IB_DISABLE"] = "1"
        return advised, "no RDMA card, so NCCL_NET_GDR_LEVEL has no effect"

    advised["NCCL_IB_DISABLE"] = "0"
    if not network.has_peermem:
        return advised, (
            "NCCL_NET_GDR_LEVEL has no effect without the module nvidia-peermem (sudo modprobe "
            "nvidia-peermem)"
        )

    advised["NCCL_NET_GDR_LEVEL"] = "PHB"
    return advised, f"RDMA through {', '.join(network.rdma_devices)}"


def _wrong_interface(given: Mapping[str, str], network: Network) -> Findings:
    """Find a NCCL_SOCKET_IFNAME that leaves no interface.

    "a,b" means interfaces that begin with a or b, "=a" exactly a, "^a" all others.
    """
    asked = given.get("NCCL_SOCKET_IFNAME", "")
    names = asked.lstrip("^=").split(",")

    def is_named(interface: str) -> bool:
        if "=" in asked[:2]:
            return interface in names
        return interface.startswith(tuple(filter(None, names)))

    excludes = asked.startswith("^")
    left = [interface for interface in network.interfaces if is_named(interface) != excludes]
    if asked and not left:
        up = ", ".join(network.interfaces) or "none"
        evidence = f"={asked} names none of the interfaces that are up: {up}"
        fix = f"export NCCL_SOCKET_IFNAME={network.default_interface or 'eth0'}"
        yield Finding("NCCL_SOCKET_IFNAME", "broken", evidence, fix)


def _switches_without_a_number(given: Mapping[str, str]) -> dict[str, str]:
    """Return the meant value, "0" or "1", of each switch that has a word as value."""
    meant = {}
    for name, value in sorted(given.items()):
        if _SWITCH.fullmatch(name) and value and not _NUMBER.match(value):
            meant[name] = "1" if value.lower() in _YES else "0"
    return meant


def _is_on(given: Mapping[str, str], name: str) -> bool:
    """Return whether NCCL reads a switch as other than 0."""
    number = _NUMBER.match(given.get(name, ""))
    return number is not None and number[1].strip("+-0xX") != ""


def _without_effect(given: Mapping[str, str], network: Network) -> dict[str, str]:
    """Return the reason for each variable that has no effect."""
    no_rdma = _is_on(given, "NCCL_IB_DISABLE") or not network.rdma_devices
    because = "NCCL_IB_DISABLE=1" if network.rdma_devices else "there is no RDMA card"
    is_quiet = "NCCL_DEBUG" not in given

    idle = {}
    for name in sorted(given):
        if _RENAMED.fullmatch(name):
            idle[name] = f"PyTorch reads TORCH_{name}"
        elif (near := _meant(name)) is not None:
            idle[name] = f"NCCL does not know it, {near} perhaps"
        elif no_rdma and re.match("NCCL_(NET_GDR|IB)_(?!DISABLE$)", name):
            idle[name] = because
        elif name == "NCCL_NET_GDR_LEVEL" and not network.has_peermem:
            idle[name] = "the module nvidia-peermem is not loaded"
        elif name == "NCCL_P2P_LEVEL" and _is_on(given, "NCCL_P2P_DISABLE"):
            idle[name] = "NCCL_P2P_DISABLE=1"
        elif name in ("NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS") and is_quiet:
            idle[name] = "NCCL_DEBUG is not set"
    return idle


def _meant(name: str) -> str | None:
    """Return the variable that `name` misspells; None where it misspells none."""
    suffix = name.removeprefix("NCCL_")
    near = difflib.get_close_matches(suffix, _OFTEN_SET.split(), n=1, cutoff=_CLOSE)
    return f"NCCL_{near[0]}" if near and near[0] != suffix else None
