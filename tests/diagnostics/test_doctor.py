"""The doctor on broken systems, one fault at a time: verdict, evidence and one command."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from tests.diagnostics.broken_worlds import BROKEN_WORLDS
from tests.diagnostics.worlds import (
    CPU_TORCH,
    FLASH2,
    HEALTHY,
    NO_PEERMEM,
    NO_RDMA,
    environment,
    host,
)
from verl.diagnostics import doctor
from verl.diagnostics.doctor import check_env
from verl.diagnostics.findings import Finding
from verl.diagnostics.probing import Probed
from verl.utils.errors import ConfigError, MissingDependencyError
from verl.utils.units import GIB


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


@pytest.mark.parametrize("error", [ConfigError, ConnectionError])
def test_a_cluster_that_does_not_answer_is_a_finding_among_the_others(monkeypatch, capsys, error):
    def refuse() -> Any:
        raise error("Ray cannot be started or joined")

    monkeypatch.setattr(doctor, "read_world", lambda: HEALTHY)
    monkeypatch.setattr(doctor, "test_ray_connectivity", refuse)
    assert doctor.main(["--ray", "--json"]) == 1
    *others, last = json.loads(capsys.readouterr().out)["findings"]
    assert len(others) == len(check_env(HEALTHY).findings)
    assert (last["verdict"], last["evidence"]) == ("broken", "Ray cannot be started or joined")
