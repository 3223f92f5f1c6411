"""The timeline of a step: the work of every process over time, as a Chrome trace."""

import json
from collections import defaultdict

import pytest

from tests.single_controller import workers
from tests.single_controller.launch import launch
from tests.trainer.runs import PPO, run
from verl.trainer.timeline import spans_of_processes
from verl.utils import timeline
from verl.utils.timeline import Recorded, Span, write_trace


def rows_of(path) -> dict[tuple[str, str], list[dict]]:
    """Return the spans of a trace, by the names of their process and row."""
    events = json.loads(path.read_text())["traceEvents"]
    processes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            spans[processes[event["pid"]], rows[event["pid"], event["tid"]]].append(event)
    return dict(spans)


def test_a_step_shows_phases_calls_and_the_work_of_the_workers(tmp_path, capfd):
    assert (
        run(
            tmp_path,
            *PPO,
            "trainer.max_steps=2",
            "trainer.profile_steps=[0,2,9]",
            "trainer.test_freq=-1",
        )
        == 0
    )
    assert [path.name for path in (tmp_path / "timeline").iterdir()] == ["global_step_2.json"]

    assert (
        "profile_steps=[0, 9] are no steps of a run of 2: they have no timeline."
        in capfd.readouterr().out
    )
    spans = rows_of(tmp_path / "timeline" / "global_step_2.json")
    ((process,),) = [{process for process, _ in spans}]
    assert process.startswith("driver, actor 0, rollout 0, critic 0 (pid ")
    phases = {event["name"]: event for event in spans[process, "phases"]}

    assert len(phases) == len(spans[process, "phases"]), "nothing of step 1"
    assert phases.keys() >= {
        "step",
        "gen",
        "reward",
        "values",
        "adv",
        "update_critic",
        "update_actor",
        "sync_weights",
    }

    for event in phases.values():
        end = phases["step"]["ts"] + phases["step"]["dur"]
        assert phases["step"]["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= end

    rollout = [event["name"] for event in spans[process, "rollout"]]
    assert rollout[0] == "generate_sequences"
    assert rollout[-1] == "take_weights"
    # The record of the run asks for digests after the step.
    update = [event for event in spans[process, "actor"] if event["name"] == "update_actor"][-1]
    assert phases["update_actor"]["ts"] <= update["ts"]
    assert update["dur"] > 0.8 * phases["update_actor"]["dur"]
    calls = spans[process, "calls"]

    assert [event["ph"] for event in calls] == ["b", "e"] * (len(calls) // 2)
    assert [event["id"] for event in calls] == [number // 2 for number in range(len(calls))]
    assert "critic.compute_values" in {event["name"] for event in calls}


def two_ranks(pool, path) -> None:
    groups = [pool.start("one", workers.Counter), pool.start("two", workers.Counter)]
    since = timeline.time.time_ns()
    for group in groups:
        group.tell("hello")
    groups[1].double(workers.rows(4))
    write_trace(path, spans_of_processes(groups, since))


def test_every_rank_has_rows_of_its_own(tmp_path):
    assert launch(two_ranks, tmp_path / "trace.json").error is None
    spans = rows_of(tmp_path / "trace.json")
    driver, other = sorted({process for process, _ in spans})
    assert driver.startswith("driver, one 0, two 0 (pid ")
    assert other.startswith("one 1, two 1 (pid ")

    for process in (driver, other):
        assert [event["name"] for event in spans[process, "one"]] == ["tell"]
        assert [event["name"] for event in spans[process, "two"]] == ["tell", "double"]

    called = spans[driver, "calls"]
    (double,) = [
        event["ts"] for event in called if event["name"] == "two.double" and event["ph"] == "b"
    ]
    ran = spans[other, "two"][1]
    # Separate clocks would differ by seconds; a busy machine records a span milliseconds late.
    assert double - 2e4 < ran["ts"] < max(event["ts"] for event in called) + 2e4, (
        "one clock for all"
    )


def test_processes_of_other_machines_are_aligned_by_their_wall_clocks(tmp_path):
    second = 10**9
    near = Recorded("here", 1, 1_000 * second, [Span("a", "row", 5 * second, 6 * second, False)])
    far = Recorded("there", 1, 995 * second, [Span("b", "row", 11 * second, 12 * second, True)])
    same = Recorded(
        "here", 2, 1_000 * second + 77, [Span("c", "row", 5 * second, 6 * second, False)]
    )
    write_trace(tmp_path / "trace.json", [("near", near), ("far", far), ("same", same)])
    spans = rows_of(tmp_path / "trace.json")
    assert [(event["ts"], event["dur"]) for event in spans["near", "row"]] == [(5e6, 1e6)]
    assert [event["ts"] for event in spans["far", "row"]] == [6e6, 7e6]
    assert [event["ts"] for event in spans["same", "row"]] == [5e6]


def test_only_the_latest_spans_are_kept():
    assert timeline._latest.maxlen == timeline._KEPT
    with timeline.span("mine", "row"):
        pass
    since = timeline.time.time_ns()
    assert all(span.name != "mine" for span in timeline.recorded_since(since).spans)
    with pytest.raises(KeyError), timeline.span("raised", "row"):
        raise KeyError
    assert [span.name for span in timeline.recorded_since(since).spans] == ["raised"]
