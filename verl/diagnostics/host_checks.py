"""Checks of memory, limits, disks and of what NCCL is told: pure functions of a World."""

import difflib
from collections.abc import Iterator, Mapping

from verl.diagnostics.findings import Finding
from verl.diagnostics.world import Network, World
from verl.utils.units import GIB

SHM = 1 * GIB  # for NCCL's buffers between the GPUs of a host; Docker gives 64 MiB
OPEN_FILES, FEWEST_OPEN_FILES = 8192, 1024  # Ray opens several a worker and connection
RAM, LEAST_RAM = 8 * GIB, 2 * GIB  # available
DISK, LEAST_DISK = 50 * GIB, 2 * GIB

# As NCCL's manual has them, without NCCL_: only for telling typing errors.
_MANUAL = """
SOCKET_IFNAME SOCKET_FAMILY SOCKET_RETRY_CNT SOCKET_NTHREADS NSOCKS_PERTHREAD CROSS_NIC IB_HCA IB_TIMEOUT
IB_RETRY_CNT IB_GID_INDEX IB_ADDR_FAMILY IB_ADDR_RANGE IB_ROCE_VERSION_NUM IB_SL IB_TC IB_FIFO_TC
IB_RETURN_ASYNC_EVENTS IB_CUDA_SUPPORT IB_MERGE_VFS IB_MERGE_NICS IB_DISABLE IB_AR_THRESHOLD IB_QPS_PER_CONNECTION
IB_SPLIT_DATA_ON_QPS IB_PCI_RELAXED_ORDERING OOB_NET_ENABLE OOB_NET_IFNAME NET NET_PLUGIN NET_GDR_LEVEL NET_GDR_READ
NET_GDR_C2C NET_SHARED_BUFFERS NET_SHARED_COMMS NET_FORCE_FLUSH NET_DISABLE_INTRA NET_OPTIONAL_RECV_COMPLETION
TUNER_PLUGIN TUNER_CONFIG_PATH PROFILER_PLUGIN ENV_PLUGIN P2P_DISABLE P2P_LEVEL P2P_DIRECT_DISABLE
P2P_USE_CUDA_MEMCPY P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PXN_DISABLE PXN_C2C SHM_DISABLE SHM_USE_CUDA_MEMCPY
SHM_MEMCPY_MODE SHM_LOCALITY BUFFSIZE NTHREADS MAX_NCHANNELS MIN_NCHANNELS MAX_CTAS MIN_CTAS CHECKS_DISABLE
CHECK_POINTERS LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL DEBUG DEBUG_FILE DEBUG_SUBSYS
DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS COLLNET_ENABLE COLLNET_NODE_THRESHOLD CTA_POLICY NETDEVS_POLICY
TOPO_FILE TOPO_DUMP_FILE GRAPH_FILE GRAPH_DUMP_FILE SET_THREAD_NAME ALGO PROTO NVB_DISABLE COMM_BLOCKING
CGA_CLUSTER_SIZE COMM_ID HOSTID IGNORE_CPU_AFFINITY CONF_FILE GRAPH_REGISTER GRAPH_MIXING_SUPPORT LOCAL_REGISTER
LEGACY_CUDA_REGISTER SET_STACK_SIZE DMABUF_ENABLE WORK_FIFO_BYTES WORK_FIFO_DEPTH SET_CPU_STACK_SIZE NVLS_ENABLE
NVLS_CHUNKSIZE MNNVL_ENABLE MNNVL_UUID MNNVL_CLIQUE_ID RAS_ENABLE RAS_ADDR RAS_TIMEOUT_FACTOR CUMEM_ENABLE
CUMEM_HOST_ENABLE SINGLE_RING_THRESHOLD SINGLE_PROC_MEM_REG_ENABLE RUNTIME_CONNECT ABORT_TIMEOUT VERSION
"""
NCCL_VARIABLES = [f"NCCL_{name}" for name in _MANUAL.split()]
# PyTorch reads these under another name by now.
_RENAMED = (
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING",
)


def shared_memory(world: World) -> Iterator[Finding]:
    size = world.host.shm
    if size is None:
        return
    evidence = f"{size / GIB:.1f} GiB"
    fix = "sudo mount -o remount,size=16G /dev/shm"
    if world.host.in_container:
        fix = "docker run --shm-size=16g ...  # or --ipc=host"
    if size >= SHM:
        yield Finding("/dev/shm", "ok", evidence)
    elif len(world.probed.gpus) > 1:
        evidence += (
            f": NCCL needs about {SHM / GIB:.0f} GiB there between {len(world.probed.gpus)} GPUs"
        )
        yield Finding("/dev/shm", "broken", evidence, fix)
    else:
        yield Finding(
            "/dev/shm", "warn", f"{evidence}: too small for Ray and for several GPUs", fix
        )


def open_files(world: World) -> Iterator[Finding]:
    soft, hard = world.host.open_files, world.host.open_files_hard
    if soft >= OPEN_FILES:
        yield Finding("ulimit -n", "ok", "unlimited" if soft > 2**40 else str(soft))
        return
    wanted = 65536
    fix = f"ulimit -n {wanted}"
    if hard < wanted:
        fix = (
            f"echo '* - nofile {wanted}' | sudo tee -a /etc/security/limits.conf  # then log in "
            "again"
        )
        if world.host.in_container:
            fix = f"docker run --ulimit nofile={wanted}:{wanted} ..."
    verdict = "broken" if soft < FEWEST_OPEN_FILES else "warn"
    yield Finding(
        "ulimit -n", verdict, f"{soft}: Ray and data workers open more files at once", fix
    )


def memory(world: World) -> Iterator[Finding]:
    host = world.host
    if host.ram is None or host.ram_available is None or host.swap is None:
        return  # psutil, which measures them, is reported as missing
    evidence = f"{host.ram / GIB:.0f} GiB, {host.ram_available / GIB:.1f} available"
    if host.ram_available < RAM:
        verdict = "broken" if host.ram_available < LEAST_RAM else "warn"
        yield Finding(
            "RAM",
            verdict,
            f"{evidence}: loading a model may fail (Errno 12)",
            "ps aux --sort=-rss | head",
        )
    else:
        yield Finding("RAM", "ok", evidence)
    on_gpus = sum(gpu.total for gpu in world.probed.gpus)
    if host.swap > 0:
        yield Finding("swap", "ok", f"{host.swap / GIB:.0f} GiB")
    elif host.ram < max(32 * GIB, on_gpus):
        yield Finding(
            "swap",
            "warn",
            (
                f"none, with {host.ram / GIB:.0f} GiB of RAM: off-load, or reading a large model, "
                "may end in Errno 12"
            ),
            (
                "sudo fallocate -l 32G /swap && sudo chmod 600 /swap && sudo mkswap /swap && sudo "
                "swapon /swap"
            ),
        )
    else:
        yield Finding("swap", "ok", f"none; {host.ram / GIB:.0f} GiB of RAM do without")


def disks(world: World) -> Iterator[Finding]:
    ways = {
        "checkpoints": "verl train trainer.default_local_dir=/a/larger/disk ...",
        "models from the hub": "export HF_HOME=/a/larger/disk",
        "temporary files": "export TMPDIR=/a/larger/disk",
    }
    roomy = []
    for what, (folder, free) in world.host.disks.items():
        evidence = f"{free / GIB:.0f} GiB free in {folder}"
        # What is compiled and spilt takes less than a checkpoint.
        if free >= (DISK / 10 if what == "temporary files" else DISK):
            roomy.append(f"{what}: {evidence}")
            continue
        verdict = "broken" if free < LEAST_DISK else "warn"
        yield Finding(f"disk, {what}", verdict, evidence, ways[what])
    if roomy:
        yield Finding("disk", "ok", "; ".join(roomy))


def nccl_variables(world: World) -> Iterator[Finding]:
    """J6: what NCCL was told, and what to tell it on several nodes."""
    given = {name: value for name, value in world.environment.items() if name.startswith("NCCL_")}
    if not world.probed.gpus:
        if given:
            yield Finding(
                "NCCL variables",
                "warn",
                f"no GPU, no effect: {', '.join(sorted(given))}",
                _unset(given),
            )
        return
    yield from _wrong_interface(given, world.network)
    idle = _without_effect(given, world.network)
    for name, reason in idle.items():
        yield Finding(name, "warn", f"={given[name]} has no effect: {reason}", f"unset {name}")
    if given.get("NCCL_IB_DISABLE") == "1" and world.network.rdma_devices:
        evidence = f"=1 leaves the RDMA cards unused: {', '.join(world.network.rdma_devices)}"
        yield Finding("NCCL_IB_DISABLE", "warn", evidence, "unset NCCL_IB_DISABLE")
    kept = {name: value for name, value in given.items() if name not in idle}
    advised, why = _for_several_nodes(world.network)
    line = " ".join(f"{name}={kept.get(name, value)}" for name, value in advised.items())
    yield Finding(
        "several nodes",
        "ok",
        f"set where the driver runs (Ray's workers get them), under torchrun on every node; {why}",
        f"export {line}",
    )


def _for_several_nodes(network: Network) -> tuple[dict[str, str], str]:
    advised = {"NCCL_SOCKET_IFNAME": network.default_interface or "eth0", "NCCL_DEBUG": "WARN"}
    if not network.rdma_devices:
        return advised | {
            "NCCL_IB_DISABLE": "1"
        }, "no RDMA card, so NCCL_NET_GDR_LEVEL has no effect"
    advised["NCCL_IB_DISABLE"] = "0"
    if not network.has_peermem:
        return (
            advised,
            (
                "NCCL_NET_GDR_LEVEL has no effect without the module nvidia-peermem (sudo modprobe "
                "nvidia-peermem)"
            ),
        )
    return advised | {
        "NCCL_NET_GDR_LEVEL": "PHB"
    }, f"RDMA through {', '.join(network.rdma_devices)}"


def _wrong_interface(given: Mapping[str, str], network: Network) -> Iterator[Finding]:
    """^a,b: none that begin so; =a: exactly; a,b: those that begin so."""
    asked = given.get("NCCL_SOCKET_IFNAME", "")
    names = asked.lstrip("^=").split(",")

    def is_named(interface: str) -> bool:
        exact = "=" in asked[:2]
        return any(
            interface == name if exact else interface.startswith(name) for name in names if name
        )

    left = [
        interface
        for interface in network.interfaces
        if is_named(interface) is not asked.startswith("^")
    ]
    if asked and not left:
        evidence = (
            f"={asked} names none of the interfaces that are up: "
            f"{', '.join(network.interfaces) or 'none'}"
        )
        fix = f"export NCCL_SOCKET_IFNAME={network.default_interface or 'eth0'}"
        yield Finding("NCCL_SOCKET_IFNAME", "broken", evidence, fix)


def _without_effect(given: Mapping[str, str], network: Network) -> dict[str, str]:
    """Name -> why."""
    no_rdma = given.get("NCCL_IB_DISABLE") == "1" or not network.rdma_devices
    because = "NCCL_IB_DISABLE=1" if network.rdma_devices else "there is no RDMA card"
    idle = {}
    for name in sorted(given):
        if name in _RENAMED:
            idle[name] = f"PyTorch reads TORCH_{name}"
        elif name not in NCCL_VARIABLES and (near := _meant(name)):
            idle[name] = f"NCCL does not know it, {near} perhaps"
        elif no_rdma and (
            name.startswith(("NCCL_NET_GDR_", "NCCL_IB_")) and name != "NCCL_IB_DISABLE"
        ):
            idle[name] = because
        elif name == "NCCL_NET_GDR_LEVEL" and not network.has_peermem:
            idle[name] = "the module nvidia-peermem is not loaded"
        elif name == "NCCL_P2P_LEVEL" and given.get("NCCL_P2P_DISABLE") == "1":
            idle[name] = "NCCL_P2P_DISABLE=1"
        elif name in ("NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS") and "NCCL_DEBUG" not in given:
            idle[name] = "NCCL_DEBUG is not set"
    return idle


def _meant(name: str) -> str | None:
    """The variable of which this may be a typing error; undocumented ones are left alone."""
    return next(iter(difflib.get_close_matches(name, NCCL_VARIABLES, n=1, cutoff=0.85)), None)


def _unset(names: Mapping[str, str]) -> str:
    return f"unset {' '.join(sorted(names))}"
