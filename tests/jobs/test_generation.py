"""Responses to a file of prompts: the output, the state that a killed run leaves, and which runs
may resume it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.launches import launch, run_module
from tests.trainer.runs import run_in_child, write_lines
from verl.checkpoint.claim import Claim
from verl.jobs import finished_batches
from verl.jobs.generation import weights_fingerprint
from verl.jobs.main_eval import main as main_eval
from verl.jobs.main_generation import main
from verl.utils import whole_file

# Three batches: of four, four and two prompts.
COMMAND = [
    "data.path=toy",
    "model.path=toy",
    "data.batch_size=4",
    "data.n_samples=3",
    "data.max_response_length=8",
    "rollout.temperature=2",
    "rollout.deterministic=True",
    "trainer.num_threads=1",
]
BATCHES = 3


def command(output: Path, *overrides: str) -> list[str]:
    given = {override.partition("=")[0] for override in overrides}
    return [
        *(key for key in COMMAND if key.partition("=")[0] not in given),
        f"data.output_path={output}",
        *overrides,
    ]


def generate(output: Path, *overrides: str) -> int:
    return main(command(output, *overrides))


def rows(output: Path) -> list[dict[str, Any]]:
    return pq.read_table(output).to_pylist()


def responses(output: Path) -> list[list[str]]:
    return [row["responses"] for row in rows(output)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return the output of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "out.parquet"
    assert generate(output) == 0
    return output


def test_all_columns_and_the_responses_are_written(whole):
    written = rows(whole)
    assert len(written) == 10
    assert list(written[0]) == [
        "data_source",
        "prompt",
        "ability",
        "reward_model",
        "extra_info",
        "responses",
    ]

    assert written[3]["prompt"][0]["content"] == written[3]["extra_info"]["question"]
    assert {len(row["responses"]) for row in written} == {3}
    texts = [text for row in written for text in row["responses"]]
    assert len(set(texts)) > 5, "too dull to fail"
    assert not any("<" in text for text in texts), "special tokens stay out"
    assert [path.name for path in whole.parent.iterdir()] == ["out.parquet"]


def test_responses_do_not_depend_on_batches_or_the_engine(whole, tmp_path):
    assert generate(tmp_path / "other.parquet", "data.batch_size=10", "rollout.max_num_seqs=5") == 0
    assert responses(tmp_path / "other.parquet") == responses(whole)
    slow = ["rollout.name=hf", "rollout.deterministic=False"]
    assert generate(tmp_path / "hf.parquet", *slow) == 0
    same = np.mean(
        [
            mine == theirs
            for mine, theirs in zip(responses(tmp_path / "hf.parquet"), responses(whole))
        ]
    )
    assert same >= 0.9, "the last bit of a log-prob may tip one draw, not more"


def test_the_seed_and_the_temperature_are_used(whole, tmp_path):
    assert generate(tmp_path / "seed.parquet", "trainer.seed=1") == 0
    assert responses(tmp_path / "seed.parquet") != responses(whole)
    assert generate(tmp_path / "greedy.parquet", "rollout.temperature=0") == 0
    assert all(len(set(texts)) == 1 for texts in responses(tmp_path / "greedy.parquet"))


# ---- killed runs ---------------------------------------------------------------------------------


def die_before_call(number: int, owner: Any, name: str) -> Callable[[], None]:
    """Patch a function so that its `number`th call kills this process before doing anything."""

    def patch() -> None:
        original = getattr(owner, name)
        calls = 0

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    return patch


def die_writing_file(number: int) -> Callable[[], None]:
    """Kill this process when the `number`th file is written but not yet renamed.

    The first file is the identity, then come the batches, then the output. Each file is synced
    before it is renamed, and its folder afterwards.
    """
    return die_before_call(2 * number - 1, whole_file, "sync")


@pytest.mark.parametrize(
    ("patch", "batches_done"),
    [
        (die_writing_file(3), 1),
        (die_writing_file(2 + BATCHES), BATCHES),
        (die_before_call(1, finished_batches.shutil, "rmtree"), BATCHES),
    ],
    ids=["within a batch", "within the output", "before tidying up"],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(whole, tmp_path, patch, batches_done):
    output = tmp_path / "out.parquet"

    def killed() -> int:
        patch()
        return generate(output)

    assert os.WTERMSIG(run_in_child(killed)) == signal.SIGKILL
    assert len(list((tmp_path / "out.parquet.parts").glob("batch_*"))) == batches_done
    assert generate(output) == 0
    assert output.read_bytes() == whole.read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name != "verl_cache"] == [
        "out.parquet"
    ]


def test_only_missing_batches_are_generated(tmp_path, capsys):
    output = tmp_path / "out.parquet"

    def killed() -> int:
        die_writing_file(4)()
        return generate(output)

    run_in_child(killed)
    assert generate(output) == 0
    said = capsys.readouterr().out
    assert "Resumed: 2 of 3 batches are done." in said
    assert "2 of 2 prompts" in said
    assert generate(output) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_settings_that_the_engine_lacks_are_rejected_under_the_names_of_the_job(tmp_path, capsys):
    assert generate(tmp_path / "out.parquet", "rollout.name=hf") == 1
    output = capsys.readouterr().err
    assert "rollout.deterministic=true needs an engine" in output
    assert "got rollout.name=hf" in output
    assert "actor_rollout_ref" not in output


def test_another_configuration_cannot_resume(whole, tmp_path, capsys):
    output = tmp_path / "out.parquet"

    def killed() -> int:
        die_writing_file(3)()
        return generate(output)

    run_in_child(killed)
    assert generate(output, "rollout.top_p=0.5", "data.n_samples=2") == 1
    printed = capsys.readouterr().err
    assert "rollout.top_p was 1.0, now 0.5" in printed
    assert "data.n_samples was 3, now 2" in printed
    assert "temperature" not in printed
    assert generate(output, "rollout.max_num_seqs=7") == 0, (
        "what changes the speed alone is no other configuration"
    )
    assert output.read_bytes() == whole.read_bytes()
    assert generate(output, "rollout.top_p=0.5") == 1
    assert "is written already, with another configuration" in capsys.readouterr().err
    assert output.read_bytes() == whole.read_bytes()
    assert generate(output, "rollout.top_p=0.5", "trainer.resume_mode=disable") == 0
    assert responses(output) != responses(whole)


def test_the_second_of_two_concurrent_runs_is_rejected_and_removes_nothing(tmp_path, capfd):
    output = tmp_path / "out.parquet"
    parts = tmp_path / "out.parquet.parts"
    parts.mkdir()
    (parts / "batch_000000.parquet").touch()
    first = Claim(parts)
    assert first.take() is None
    for mode in ("auto", "disable"):
        status = run_in_child(lambda mode=mode: generate(output, f"trainer.resume_mode={mode}"))
        assert os.waitstatus_to_exitcode(status) == 1
        assert f"Another run (pid {os.getpid()} on" in capfd.readouterr().err
        assert (parts / "batch_000000.parquet").exists()
    first.give_back()


def test_a_file_of_another_owner_is_not_overwritten(tmp_path, capsys):
    output = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"precious": [1]}), output)
    assert generate(output) == 1
    assert "not by verl.trainer.main_generation" in capsys.readouterr().err
    assert rows(output) == [{"precious": 1}]


def test_a_folder_in_the_place_of_the_output_is_named_at_the_start(tmp_path, capsys):
    output = tmp_path / "out.parquet"
    output.mkdir()
    assert generate(output, "trainer.resume_mode=disable") == 1
    assert "data.output_path must name a file, got the folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_other_weights_at_the_same_path_are_another_model(tmp_path):
    weights = np.random.default_rng(0).integers(0, 255, 9 << 20, dtype=np.uint8)
    (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
    before = weights_fingerprint(str(tmp_path))
    assert weights_fingerprint(str(tmp_path)) == before
    weights[::97] += 1  # scattered changes, as from training
    (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
    assert weights_fingerprint(str(tmp_path)) != before


# ---- inputs --------------------------------------------------------------------------------------


def ask(question: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], **columns}


def test_columns_with_names_of_the_trainer_are_written_too(tmp_path, capsys):
    table = pa.Table.from_pylist([ask("1 + 1 = ?", uid="a"), ask("2 + 2 = ?", uid="b")])
    pq.write_table(table, tmp_path / "in.parquet")
    output = tmp_path / "out.parquet"
    assert generate(output, f"data.path={tmp_path / 'in.parquet'}") == 0
    assert [row["uid"] for row in rows(output)] == ["a", "b"]
    assert "left out" not in "".join(capsys.readouterr())


def test_columns_of_parquet_keep_their_types(tmp_path):
    table = pa.Table.from_pylist([ask("1 + 1 = ?"), ask("2 + 2 = ?")])
    table = table.append_column("id", pa.array([7, 8], pa.int16()))
    table = table.append_column("when", pa.array([0, 1], pa.timestamp("ms", "UTC")))
    pq.write_table(table, tmp_path / "in.parquet")
    assert (
        generate(
            tmp_path / "out.parquet",
            f"data.path={tmp_path / 'in.parquet'}",
            "data.response_key=said",
        )
        == 0
    )

    schema = pq.read_schema(tmp_path / "out.parquet")
    assert (schema.field("id").type, schema.field("when").type) == (
        pa.int16(),
        pa.timestamp("ms", "UTC"),
    )
    assert schema.field("said").type == pa.list_(pa.string())


def test_overlong_prompts_are_rejected_dropped_or_truncated(tmp_path, capsys):
    lines = [ask("1 + 1 = ?", id=0), ask("1 + " * 40 + "1 = ?", id=1), ask("2 + 2 = ?", id=2)]
    path = f"data.path={write_lines(tmp_path / 'in.jsonl', lines)}"
    limit = "data.max_prompt_length=40"
    assert generate(tmp_path / "out.parquet", path, limit) == 1
    assert "in.jsonl, row 1: the prompt has" in capsys.readouterr().err
    assert (
        generate(tmp_path / "dropped.parquet", path, limit, "data.filter_overlong_prompts=True")
        == 0
    )
    assert [row["id"] for row in rows(tmp_path / "dropped.parquet")] == [0, 2]
    assert "Kept 2 of 3 rows" in capsys.readouterr().out
    assert generate(tmp_path / "cut.parquet", path, limit, "data.truncation=left") == 0
    assert [row["id"] for row in rows(tmp_path / "cut.parquet")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        ([{"question": "1 + 1 = ?"}], "the column 'prompt' is missing"),
        ([ask("1 + 1 = ?", responses=["2"])], "there is a column 'responses' already"),
        ([ask("1 + 1 = ?", extra_info={})], "cannot be written as one Parquet file"),
        (
            [ask("1 + 1 = ?", truth=2), ask("2 + 2 = ?", truth="4")],
            "the column 'truth' cannot be written as Parquet",
        ),
        ([ask("1 + 1 = ?", id=2**70)], "the column 'id' cannot be written as Parquet"),
    ],
    ids=["empty", "no prompt", "taken", "empty dict", "two types", "large number"],
)
def test_missing_fields_of_a_file_are_reported_before_anything_is_generated(
    tmp_path, capsys, lines, message
):
    path = write_lines(tmp_path / "in.jsonl", lines)
    assert generate(tmp_path / "out.parquet", f"data.path={path}") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.parquet.parts").exists()


def test_a_missing_file_is_named_with_the_key_that_gives_it(tmp_path, capsys):
    assert generate(tmp_path / "out.parquet", f"data.path={tmp_path}/in.parquet") == 1
    error = capsys.readouterr().err
    assert "in.parquet' does not exist; no data file is" in error
    assert "Correct the path (data.path), or make the file" in error


def test_errors_of_shared_code_name_keys_as_this_job_spells_them(tmp_path, capsys):
    assert generate(tmp_path / "out.parquet", "rollout.name=embeded") == 1
    output = capsys.readouterr().err
    assert "(rollout.name)" in output
    assert "embedded" in output


# ---- ranks, and evaluation -----------------------------------------------------------------------


def test_two_torchrun_ranks_give_the_responses_of_one_process(whole, tmp_path):
    output = tmp_path / "out.parquet"
    asked = command(output, "data.batch_size=5", "trainer.nnodes=1", "trainer.n_gpus_per_node=2")
    done = launch(2, run_module, "verl.jobs.main_generation", asked)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert responses(output) == responses(whole)


def test_generated_responses_can_be_evaluated(whole, capsys):
    assert (
        main_eval([f"data.path={whole}", "data.prompt_key=prompt", "data.response_key=responses"])
        == 0
    )
    [mean] = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("toy") and "mean" in line
    ]

    right = [
        text.strip() == row["reward_model"]["ground_truth"]
        for row in rows(whole)
        for text in row["responses"]
    ]
    assert float(mean[2]) == pytest.approx(np.mean(right), abs=1e-4)
