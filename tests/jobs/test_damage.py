"""A damaged checkpoint is not exported, and a file that cannot be read or written is reported in
one line with a way out."""

import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.jobs import Setup
from tests.engine.test_state import policy_engine
from tests.jobs import jobs
from tests.tiny_models import tiny_model
from verl.checkpoint.manifest import MANIFEST, write_manifest
from verl.checkpoint.sharded import SavedTensors
from verl.jobs.main_merge import main
from verl.jobs.merge import merge

SHARDS = "sharded/__0_0.distcp"
ADAPTERS = "lora_adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint with the full weights of one role and the adapters of another, and the
    base model of these adapters."""
    folder = tmp_path_factory.mktemp("run")
    policy_engine().save(folder / "global_step_4" / "actor")
    jobs.train_and_save(Setup(lora=True), folder / "global_step_4" / "lora")
    write_manifest(folder / "global_step_4", step=4)
    jobs.new_engine(Setup()).hf_model.save_pretrained(folder / "base")
    return folder


@pytest.fixture
def checkpoint(run: Path, tmp_path: Path) -> Path:
    """Copy the checkpoint for one test."""
    return Path(shutil.copytree(run / "global_step_4", tmp_path / "global_step_4"))


@pytest.fixture
def refused(run: Path, checkpoint: Path, capfd) -> Callable[..., str]:
    """Return the one line that a failed command on a role prints; no new file may be left."""

    def line(role: str, *options: str | Path, command: str = "merge") -> str:
        before = sorted(checkpoint.parent.iterdir())
        given = [
            command,
            "--backend",
            "fsdp",
            "--local_dir",
            checkpoint / role,
            "--base_model",
            run / "base",
            *options,
        ]
        if command == "merge":
            given += ["--target_dir", checkpoint.parent / "merged"]

        capfd.readouterr()
        assert main([str(part) for part in given]) == 1
        assert sorted(checkpoint.parent.iterdir()) == before
        output = capfd.readouterr().err.splitlines()[-1]  # after the progress bar of transformers
        assert output.startswith("CheckpointError: ")

        return output

    return line


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path, where: int) -> None:
    content = bytearray(file.read_bytes())
    content[where] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_prevents_merge_comparison_and_export(checkpoint: Path, refused):
    merge(checkpoint / "actor", checkpoint.parent / "sound")
    name = "model.model.embed_tokens.weight"
    weight = SavedTensors(checkpoint / "actor" / "sharded").read_whole([name])[name]
    shards = checkpoint / "actor" / SHARDS
    flip_a_bit(shards, shards.read_bytes().index(weight.numpy().tobytes()))
    flip_a_bit(checkpoint / "lora" / ADAPTERS, -1)
    message = (
        f"global_step_4 is damaged: actor/{SHARDS} has another checksum than when it was written."
    )
    assert message in refused("actor")
    assert message in refused("actor", "--test_hf_dir", checkpoint.parent / "sound", command="test")
    message = f"lora/{ADAPTERS} has another checksum"
    assert message in refused("lora")
    assert message in refused("lora", "--no-merge-adapters")


def test_other_roles_may_be_missing_and_the_folder_may_be_the_working_one(
    checkpoint: Path, monkeypatch, refused
):
    shutil.rmtree(checkpoint / "lora")
    monkeypatch.chdir(checkpoint / "actor")
    merge(Path("."), checkpoint.parent / "sound")
    truncate(checkpoint / "actor" / SHARDS)
    assert f"actor/{SHARDS} is truncated" in refused("actor")


@pytest.mark.parametrize(
    ("role", "file", "message"),
    [
        (
            "actor",
            "sharded/.metadata",
            r"sharded/\.metadata cannot be read \(UnpicklingError: .*\)\. .*copy it again",
        ),
        (
            "actor",
            SHARDS,
            r"While reading .*/actor/sharded: EOFError\. If it is damaged .*copy it again",
        ),
        (
            "actor",
            "huggingface/config.json",
            r"config\.json cannot be read \(JSONDecodeError: .*\)\. .*copy it again",
        ),
        ("lora", ADAPTERS, r"Expected the adapters .*\(SafetensorError: .*\)\. .*copy them again"),
        (
            "lora",
            "lora_adapter/adapter_config.json",
            r"Expected the adapters .*\(JSONDecodeError: .*copy them again",
        ),
    ],
)
def test_a_truncated_file_is_reported_without_a_manifest(
    checkpoint: Path, refused, role: str, file: str, message: str
):
    (checkpoint / MANIFEST).unlink()
    truncate(checkpoint / role / file)
    assert re.search(message, refused(role))


@pytest.mark.parametrize(
    ("role", "file", "content"),
    [
        ("actor", "huggingface/config.json", '{"architectures": ["pipeline"]}'),
        ("actor", "huggingface/config.json", '{"architectures": [3]}'),
        ("actor", "huggingface/config.json", "[]"),
        ("actor", "huggingface/config.json", "[" * 10**5),
        ("lora", "lora_adapter/adapter_config.json", "[]"),
        ("lora", "lora_adapter/adapter_config.json", '{"r": 0, "lora_alpha": 16}'),
        ("lora", "lora_adapter/adapter_config.json", '{"r": 2, "lora_alpha": "16"}'),
    ],
)
def test_malformed_json_is_reported_in_one_line(
    checkpoint: Path, refused, role: str, file: str, content: str
):
    (checkpoint / MANIFEST).unlink()
    (checkpoint / role / file).write_text(content)
    assert re.search(r"cannot be read.*[Cc]opy (it|them) again", refused(role))


def test_a_base_of_another_size_is_reported_before_anything_is_written(checkpoint: Path, refused):
    base = checkpoint.parent / "larger"
    tiny_model("qwen2", intermediate_size=64).save_pretrained(base)
    message = refused("lora", "--base_model", base)
    assert re.search(
        r"Expected 'model\.layers\.0\.mlp\.\w+\.weight' of shape \((48, 32|32, 48)\), ", message
    )
    assert re.search(
        rf"'{base}' has shape \((64, 32|32, 64)\)\. Set --base_model to the model that", message
    )


@pytest.mark.parametrize("role", ["actor", "lora"])
def test_a_target_that_cannot_be_written_is_reported(refused, role: str):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        message = refused(role, *(["--no-merge-adapters"] if role == "lora" else []))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(
        r"merged was not written \(.*File too large.*\)\. No file may grow beyond .*ulimit -f",
        message,
    )


def test_a_damaged_folder_to_compare_with_is_reported(checkpoint: Path, refused):
    merge(checkpoint / "actor", checkpoint.parent / "merged")
    truncate(file := checkpoint.parent / "merged" / "model.safetensors")
    message = refused("actor", "--test_hf_dir", file.parent, command="test")
    assert f"{file} cannot be read (SafetensorError: " in message
