"""`verl.utils.test_ray_connectivity`: judge latency and bandwidth between all nodes of Ray."""

import importlib
import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from verl.diagnostics.findings import Finding
from verl.utils.errors import ConfigError
from verl.utils.imports import require
from verl.utils.registry import nearest_names

if TYPE_CHECKING:
    from verl.single_controller.ray_links import Link

SLOW_LATENCY_S = 0.01
SLOW_BYTES_PER_S = 0.125e9  # 1 Gbit/s
_UNLIKE = 4  # times slower than the median link


@dataclass(frozen=True, kw_only=True)
class Connectivity:
    """The measured links and a verdict on each; `print` it."""

    links: "Sequence[Link]"
    findings: Sequence[Finding]

    @property
    def ok(self) -> bool:
        return all(finding.verdict == "ok" for finding in self.findings)

    def __str__(self) -> str:
        lines = []
        for link in self.links:
            latency = f"{link.latency_s * 1e3:.2f} ms there and back"
            speed = f"{link.bytes_per_s / 1e9:.2f} GB/s"
            lines.append(f"{link.source} -> {link.target}: {link.error or f'{latency}, {speed}'}")

        for finding in self.findings:
            lines.append(f"{finding.verdict}: {finding.evidence}")
            if finding.fix:
                lines.append(f"$ {finding.fix}")
        return "\n".join(lines)


def test_ray_connectivity(
    *,
    megabytes: int = 64,  # noqa: PT028 - no test of pytest's
    rounds: int = 20,  # noqa: PT028
    deadline_s: float = 60.0,  # noqa: PT028
    **ray_init: Any,
) -> Connectivity:
    """Measure every pair of nodes both ways, by Ray's calls and objects; `print` the result.

    Args:
        megabytes: size of the object to transfer.
        rounds: number of empty calls; the median counts.
        deadline_s: seconds that one pair may take.
        ray_init: arguments of `ray.init`, as `address="auto"`; an initialised Ray is used as it is.
            Without an address it is the cluster that runs here or that RAY_ADDRESS names, else one
            of this machine for as long as this takes.

    Raises:
        ConfigError: an argument has another type or size, or neither this call nor `ray.init` has
            it, or no cluster answers.
        MissingDependencyError: Ray is not installed.
    """
    _check_whole("megabytes", megabytes)
    _check_whole("rounds", rounds)
    _check_seconds("deadline_s", deadline_s)
    ray = require("ray", "test_ray_connectivity()", "pip install 'ray>=2.40'")
    _check_ray_arguments(ray_init, ray.init)

    ray_links = importlib.import_module("verl.single_controller.ray_links")
    links = ray_links.measure_links(megabytes * 10**6, rounds, deadline_s, **ray_init)
    return Connectivity(links=links, findings=judge(links))


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"test_ray_connectivity({name}=...) must be a whole number, at least 1, got {value!r}."
        )


def _check_seconds(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigError(
            f"test_ray_connectivity({name}=...) must be a number of seconds above 0, got {value!r}."
        )


def _check_ray_arguments(given: Mapping[str, Any], init: Callable[..., Any]) -> None:
    """Raise ConfigError for a keyword that neither this call nor `ray.init` has.

    Names with a leading underscore are settings of Ray that its signature does not list.
    """
    known = ["megabytes", "rounds", "deadline_s", *inspect.signature(init).parameters]
    known.append("allow_multiple")  # of Ray Client, which takes it from `kwargs`

    for name in given:
        is_hidden = name.startswith("_")
        if name not in known and not is_hidden:
            raise ConfigError(
                f"test_ray_connectivity() got '{name}', which is no argument of it or of ray.init. "
                f"Nearest known: {nearest_names(name, known)}."
            )

    address = given.get("address")
    if address is not None and not isinstance(address, str):
        raise ConfigError(
            "test_ray_connectivity(address=...) must be a text such as HOST:6379, "
            f"ray://HOST:10001, auto or local, got {address!r}."
        )


def judge(links: "Sequence[Link]") -> list[Finding]:
    """Return one finding for each bad link, or one for all if none is bad."""
    measured = [link for link in links if link.error is None]
    usual = statistics.median(link.bytes_per_s for link in measured) if measured else 0.0
    findings = []

    for link in links:
        way = f"{link.source} -> {link.target}"
        if link.error is not None:
            fix = (
                "ray status  # is the node alive, and are ports 10002-19999 open between the nodes"
            )
            findings.append(Finding("Ray link", "broken", f"{way}: {link.error}", fix))
        elif link.latency_s > SLOW_LATENCY_S:
            evidence = (
                f"{way}: {link.latency_s * 1e3:.1f} ms there and back; within a cluster it is "
                "about 1 ms"
            )
            findings.append(
                Finding("Ray link", "warn", evidence, f"ping -c 5 {_address(link.target)}")
            )
        elif link.bytes_per_s < max(SLOW_BYTES_PER_S, usual / _UNLIKE):
            evidence = (
                f"{way}: {link.bytes_per_s / 1e9:.2f} GB/s, the median link has {usual / 1e9:.2f}"
            )
            fix = (
                "ray start --node-ip-address=<address of the fast interface> --address=<head>:6379 "
                " # on that node"
            )
            findings.append(Finding("Ray link", "warn", evidence, fix))

    if not findings:
        slowest = min(link.bytes_per_s for link in links)
        longest = max(link.latency_s for link in links)
        num_nodes = len({link.source for link in links})
        evidence = (
            f"{num_nodes} node(s): at most {longest * 1e3:.2f} ms, at least {slowest / 1e9:.2f} "
            "GB/s"
        )
        findings.append(Finding("Ray links", "ok", evidence))

    return findings


def _address(node: str) -> str:
    return node.partition("(")[2].partition(",")[0]


test_ray_connectivity.__test__ = False  # pytest takes the name for one of its own
