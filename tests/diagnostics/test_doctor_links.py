"""Links between Ray nodes: measured between two nodes on this machine, and judged."""

import re

import pytest

pytest.importorskip("ray", reason="the optional backend is not installed")
import ray
from ray.cluster_utils import Cluster

import verl.utils
from verl.diagnostics.connectivity import judge
from verl.single_controller.ray_links import Link
from verl.utils.errors import ConfigError

GOOD = [
    Link(f"n{i} (10.0.0.{i}, aa)", f"n{j} (10.0.0.{j}, bb)", 0.001, 1e9)
    for i in range(3)
    for j in range(3)
    if i != j
]


@pytest.mark.slow
def test_two_nodes():
    store = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=store)
    try:
        cluster.add_node(**store)
        found = verl.utils.test_ray_connectivity(
            megabytes=8, rounds=5, address=cluster.address, log_to_driver=False
        )
        assert not ray.is_initialized(), "as before the call"
    finally:
        cluster.shutdown()

    one, other = found.links
    assert (one.source, one.target) == (other.target, other.source)
    assert one.source != one.target

    for link in found.links:
        assert link.error is None
        assert 1e-5 < link.latency_s < 5
        assert 1e5 < link.bytes_per_s < 1e11

    assert str(found).count("GB/s") >= 2


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"megabytes": 0}, "(megabytes=...) must be a whole number, at least 1, got 0"),
        ({"megabytes": 1.5}, "got 1.5"),
        ({"rounds": "20"}, "(rounds=...) must be a whole number, at least 1, got '20'"),
        ({"deadline_s": -1}, "(deadline_s=...) must be a number of seconds above 0, got -1"),
        ({"deadline_s": "60"}, "got '60'"),
        (
            {"megabyte": 8},
            "'megabyte', which is no argument of it or of ray.init. Nearest known: m",
        ),
        ({"adress": "auto"}, "Nearest known: address"),
        ({"address": 6379}, "must be a text such as HOST:6379, ray://HOST:10001"),
    ],
)
def test_wrong_arguments_are_errors_and_no_verdict_on_nodes(argument, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        verl.utils.test_ray_connectivity(**argument)
    assert not ray.is_initialized()


def test_good_links_give_one_finding():
    (finding,) = judge(GOOD)
    assert finding.verdict == "ok"
    assert finding.evidence == "3 node(s): at most 1.00 ms, at least 1.00 GB/s"


@pytest.mark.parametrize(
    ("link", "verdict", "evidence", "fix"),
    [
        (
            Link("a", "b", error="no answer within 60 s"),
            "broken",
            "a -> b: no answer",
            "ray status",
        ),
        (
            Link("a", "b (10.0.0.9, cc)", 0.05, 1e9),
            "warn",
            "50.0 ms there and back",
            "ping -c 5 10.0.0.9",
        ),
        (
            Link("a", "b", 0.001, 2e8),
            "warn",
            "0.20 GB/s, the median link has 1.00",
            "--node-ip-address",
        ),
        (Link("a", "b", 0.001, 1e8), "warn", "0.10 GB/s", "--node-ip-address"),
    ],
    ids=["no answer", "late", "unlike the others", "slow"],
)
def test_bad_link(link: Link, verdict: str, evidence: str, fix: str):
    (finding,) = judge([*GOOD, link])
    assert finding.verdict == verdict
    assert evidence in finding.evidence
    assert finding.fix is not None
    assert fix in finding.fix


def test_all_links_dead():
    assert [finding.verdict for finding in judge([Link("a", "b", error="dead")])] == ["broken"]
