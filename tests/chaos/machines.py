"""Two network namespaces as two machines: a torchrun of two nodes, or a Ray cluster of two.

Each has an address, a host name and temporary folders of its own, so that ranks reach each other by
the link between them alone. They share the folder of the run, as machines with a network disk do.
"""

import itertools
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.job import LIMIT_S, TRAINING, Job

LEFT_S = 30.0  # in which all processes must have ended after an error
_PORT = 29_411  # a namespace has all ports for itself
_RAY = 6379
# Of these clusters alone, whatever token the user has.
_RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
_numbers = itertools.count()
# Runs on a machine with its host name, its hosts file, and the folders that it must not see.
_ENTER = """
hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs none /dev/shm
mkdir -p /tmp/ray; mount -t tmpfs none /tmp/ray; mount -t tmpfs none "$3"
shift 3; exec "$@"
"""


class Machine:
    """One of two namespaces."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name = name
        self.address = address
        self.temporary = folder / name
        self.temporary.mkdir()

    def command(self, command: Sequence[str], hosts: Path, hidden: Path) -> list[str]:
        """Return the command that runs `command` on this machine."""
        own = ["sh", "-c", _ENTER, "sh", self.name, str(hosts), str(hidden), *command]
        return ["ip", "netns", "exec", self.name, "unshare", "--mount", "--uts", "--ipc", *own]

    def processes(self) -> list[psutil.Process]:
        """Return the processes that run on this machine."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        )
        found = []
        for pid in map(int, listed.stdout.split()):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


class TwoMachines:
    """Two machines and the link between them."""

    def __init__(self) -> None:
        number = next(_numbers)
        folder = self.folder = Path(tempfile.mkdtemp(prefix="verl-machines-"))
        names = [f"verl{os.getpid()}-{number}{letter}" for letter in "ab"]
        self.machines = [
            Machine(name, f"10.77.0.{last}", folder) for last, name in enumerate(names, 1)
        ]
        self._hosts = folder / "hosts"
        lines = [f"{machine.address} {machine.name}\n" for machine in self.machines]
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))

        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        here, there = names
        _ip("-n", here, *("link", "add", "link0", "type", "veth", "peer", "link0", "netns", there))
        for machine in self.machines:
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "link0")
            _ip("-n", machine.name, "link", "set", "link0", "up")

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a machine."""
        hidden = self.machines[1 - number].temporary
        return self.machines[number].command(command, self._hosts, hidden)

    def cut_link(self) -> None:
        """Lose every packet from now on, without a word to either side."""
        _ip("-n", self.machines[0].name, "link", "set", "link0", "down")

    def processes(self) -> list[psutil.Process]:
        """Return the processes of both machines."""
        return [process for machine in self.machines for process in machine.processes()]

    def remove(self) -> None:
        """Kill the processes of the machines, and remove them."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for machine in self.machines:
            _ip("netns", "del", machine.name)
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)


class TwoMachinesJob(Job):
    """A training on two machines, one rank on each. `end` notes processes that are left afterwards."""

    def __init__(self, backend: str, folder: Path, *keys: str, **environment: str) -> None:
        self.machines = TwoMachines()
        self.folder = folder
        self.undo = []
        self.lines = []
        self.left = []
        self.readers = []
        keys = (*TRAINING, f"trainer.default_local_dir={folder}", *keys)
        try:
            if backend == "ray":
                self._start_ray(keys, environment)
            else:
                self._start_torchrun(keys, environment)
        except BaseException:
            self.machines.remove()
            raise

    def _start_torchrun(self, keys: Sequence[str], environment: dict[str, str]) -> None:
        address = self.machines.machines[0].address
        processes = []
        for number in range(2):
            launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
            launcher += [f"--node_rank={number}", f"--master_addr={address}"]
            launcher += [f"--master_port={_PORT}", "-m", "verl.trainer.main_ppo", *keys]
            command = self.machines.command(number, [sys.executable, *launcher])
            processes.append(self.start(command, self._environment(number, environment)))
        self.process, self.other = processes

    def _start_ray(self, keys: Sequence[str], environment: dict[str, str]) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        head = self.machines.machines[0].address
        options = ["--num-cpus=1", "--num-gpus=0", "--disable-usage-stats"]
        options += ["--object-store-memory=100000000"]
        for number, machine in enumerate(self.machines.machines):
            where = ["--head", f"--port={_RAY}", "--include-dashboard=false"]
            if number:
                where = [f"--address={head}:{_RAY}"]
            own = [ray, "start", *where, f"--node-ip-address={machine.address}", *options]
            subprocess.run(
                self.machines.command(number, own),
                env={**os.environ, **self._environment(number, environment)},
                check=True,
                capture_output=True,
                timeout=LIMIT_S,
            )
        more = [f"ray_init.address={head}:{_RAY}"]
        more += ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *keys, *more]
        self.process = self.start(
            self.machines.command(0, command), self._environment(0, environment)
        )

    def _environment(self, number: int, more: dict[str, str]) -> dict[str, str]:
        temporary = self.machines.machines[number].temporary
        return {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", **_RAY_TOKEN, **more}

    def end(self) -> int:
        """Wait for the end of both machines' processes, and note those that stay."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -999
        gives_up_at = time.monotonic() + LEFT_S
        while self._of_the_run() and time.monotonic() < gives_up_at:
            time.sleep(0.2)
        self.left = [" ".join(process.cmdline())[:80] for process in self._of_the_run()]
        self.clean_up()
        return code

    def _of_the_run(self) -> list[psutil.Process]:
        """Return the processes that a run must not leave: all but those of the Ray cluster."""
        found = []
        for process in self.machines.processes():
            with suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if "main_ppo" in words or "ray::RankProcess" in words:
                    found.append(process)
        return found

    def clean_up(self) -> None:
        """Remove the machines with all of their processes."""
        self.machines.remove()
        super().clean_up()

    def cut_link(self) -> None:
        """Cut the link between the machines."""
        self.machines.cut_link()


def are_allowed() -> bool:
    """Return whether this process may make network namespaces."""
    name = f"verl{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
