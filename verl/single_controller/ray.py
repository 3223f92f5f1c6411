"""Backend `ray`: start or join Ray; with the pools and groups of its processes.

It needs `pip install ray`.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.runtime_env import RuntimeEnv

from verl.single_controller.ray_control import (
    LATE,
    end_agents_with_driver,
    init_patiently,
    keep_clients_in_forks,
    note_own,
    on_loopback,
    refusal,
    remove_session_at_exit,
    starts_its_own,
)
from verl.single_controller.ray_groups import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.single_controller.ray_pools import (
    RayResourcePool,
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from verl.single_controller.ray_ranks import forwarded
from verl.single_controller.ray_upload import EXCLUDES, refused_upload
from verl.utils.errors import ConfigError
from verl.utils.lazy import lazy_names
from verl.utils.logging import logger
from verl.utils.registry import nearest_names
from verl.utils.sigterm import sigterm_kept
from verl.utils.yaml_text import explain_yaml

_ADDRESS_S = 10.0
RUNTIME_ENV: dict[str, Any] = {
    "excludes": EXCLUDES,
    "env_vars": {"TOKENIZERS_PARALLELISM": "false"},
}


def merged_runtime_env(given: Mapping[str, Any] | str | None = None) -> dict[str, Any]:
    """Extend `RUNTIME_ENV` and the `forwarded` variables by those of a user.

    `given` is a mapping or the path of a YAML file. Excludes are joined and variables merged; all
    other entries are the user's. Raises ConfigError for entries of the wrong type, for those that
    Ray does not know and would leave out, and for a missing folder.
    """
    where = f"ray_init.runtime_env={given}" if isinstance(given, str) else "ray_init.runtime_env"
    content = _read_yaml(given) if isinstance(given, str) else given
    if not isinstance(content, Mapping | None):
        raise ConfigError(
            f"{where} must hold a mapping, got {content!r} ({type(content).__name__}). "
            "Example: {env_vars: {NAME: text}}."
        )

    rest = dict(content or {})
    _check_entries(where, rest)
    excludes = rest.pop("excludes", None) or []
    variables = rest.pop("env_vars", None) or {}

    if isinstance(excludes, str) or not isinstance(excludes, Sequence):
        raise ConfigError(
            f"{where}: excludes must be a list of patterns, such as [data/], got {excludes!r}."
        )

    are_texts = isinstance(variables, Mapping)
    are_texts = are_texts and all(isinstance(value, str) for value in variables.values())
    if not are_texts:
        raise ConfigError(
            f"{where}: env_vars must map names to texts, such as {{NAME: '7'}}, got {variables!r}."
        )

    return {
        **rest,
        "excludes": [*RUNTIME_ENV["excludes"], *excludes],
        "env_vars": {**RUNTIME_ENV["env_vars"], **forwarded(), **variables},
    }


def _check_entries(where: str, entries: Mapping[str, Any]) -> None:
    """Raise ConfigError for an entry that Ray does not know, or a `working_dir` that is missing."""
    known = sorted(RuntimeEnv.known_fields)
    unknown = [name for name in entries if name not in known]
    if unknown and "RAY_RUNTIME_ENV_PLUGINS" not in os.environ:  # which have entries of their own
        raise ConfigError(
            f"{where}: Ray knows no entry '{unknown[0]}'. Nearest known: "
            f"{nearest_names(str(unknown[0]), known)}."
        )

    folder = entries.get("working_dir")
    if isinstance(folder, str) and "://" not in folder and not Path(folder).exists():
        raise ConfigError(
            f"{where}: working_dir must be a folder of this machine, which Ray copies to its "
            f"workers, or the address of an archive, got '{folder}', which does not exist."
        )


def _read_yaml(path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"ray_init.runtime_env: {explain_yaml(error, path)}") from error
    except OSError as error:
        raise ConfigError(f"ray_init.runtime_env={path} cannot be read: {error}") from error


def _check_address(address: str | None) -> None:
    """Raise ConfigError for a HOST:PORT that does not answer.

    Ray's own client would try for more than five minutes.
    """
    where = (address or "").removeprefix("ray://")
    if not re.search(r":\d+$", where):
        return  # auto, local
    error = refusal(where, _ADDRESS_S)
    if error is not None:
        raise ConfigError(
            f"No Ray cluster answers at ray_init.address={address}: {error}. Start one there with "
            "`ray start --head`, or leave the address unset to let the run start its own."
        ) from error


def connect(*, runtime_env: Mapping[str, Any] | str | None = None, **ray_init: Any) -> None:
    """Initialize Ray with the arguments of `ray.init`, unless it is initialized, also by Client.

    Raises ConfigError if no cluster answers at `address`, if `num_cpus` is given for an existing
    cluster, if Ray rejects another argument, if the path of its folder is too long, if a process of
    it writes nothing there (a full disk), or if it refuses to upload the folders of `runtime_env`
    (with their largest files). Any other error is Ray's own.
    """
    keep_clients_in_forks()
    if ray.is_initialized():
        logger.info("Ray is initialized already and used as it is.")
        return

    _check_address(ray_init.get("address"))
    # A submitted job may have a runtime_env of its own. By default Ray refuses entries that both of
    # them set.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    runtime_env = merged_runtime_env(runtime_env)
    own = starts_its_own(ray_init.get("address"))
    if own:
        ray_init = {"include_dashboard": False, **ray_init, "address": "local"}

    try:
        with sigterm_kept(), on_loopback() if own else nullcontext():
            init_patiently(runtime_env=runtime_env, **ray_init)
        note_own(own)
        if own:
            end_agents_with_driver()
            remove_session_at_exit()
    except Exception as error:
        ray.shutdown()  # or the next attempt would find it initialized
        explained = _explain_failure(error, ray_init, runtime_env)
        if explained is None:
            raise
        raise explained from error


def _explain_failure(
    error: Exception, ray_init: Mapping[str, Any], runtime_env: Mapping[str, Any]
) -> ConfigError | None:
    """Return the error to raise if `ray.init` failed; None keeps Ray's own."""
    if isinstance(error, ValueError) and "num_cpus" in ray_init and "num_cpus" in str(error):
        return ConfigError(
            f"ray_init.num_cpus={ray_init['num_cpus']} is for a Ray that is started here, but "
            "there is one already, which has its own number. Leave it unset, or set "
            "ray_init.address=local to let the run start its own."
        )
    if "AF_UNIX path length" in str(error):
        return ConfigError(
            f"Ray's folder has too long a path for its sockets: {error}. Set RAY_TMPDIR=/tmp."
        )

    missing = re.search(r"Timed out waiting for file (\S+)", str(error))
    if missing is not None:
        return _explain_missing_file(Path(missing.group(1)))

    if LATE in str(error):
        return ConfigError(
            "Ray was started twice, and was not ready within 30 s each time: the machine has a "
            f"load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores. Start the run when it is "
            "less busy, or start Ray first with `ray start --head` and set ray_init.address=auto."
        )

    refused = refused_upload(error, runtime_env)
    if refused is not None:
        return refused

    if isinstance(error, (ValueError, TypeError, ConnectionError)):
        address = ray_init.get("address") or os.environ.get("RAY_ADDRESS")
        reason = " ".join(str(error).split())
        return ConfigError(
            f"Ray cannot be started or joined, with ray_init.address={address}: "
            f"{reason.removesuffix('.')}. An address is HOST:6379, ray://HOST:10001, auto (a "
            "cluster that runs on this machine), or local to let the run start its own."
        )
    return None


def _explain_missing_file(file: Path) -> ConfigError:
    """Return the error of a process of Ray that wrote nothing, for which a full disk is usual."""
    folder = next(parent for parent in file.parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    return ConfigError(
        f"A process of Ray did not start: it has not written {file}. The disk there has "
        f"{free / 2**20:.1f} MiB free. Free some, or set RAY_TMPDIR to a folder of another disk; "
        f"the logs in {file.parent / 'logs'} have any other reason."
    )


# `verl.single_controller.ray.base`, verl 0.5's path, is then looked up in the table of old paths.
__path__: list[str] = []

__getattr__ = lazy_names(__name__, {}, old_names=True)

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "SubRayResourcePool",
    "connect",
    "create_colocated_worker_cls",
    "merge_resource_pool",
    "merged_runtime_env",
    "split_resource_pool",
]
