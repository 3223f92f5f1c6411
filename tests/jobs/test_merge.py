"""Shards written by several ranks become a folder that transformers loads, with equal tensors."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.jobs import Setup
from tests.distributed.ranks import Ranks
from tests.engine.test_state import critic_engine, policy_engine
from tests.jobs import jobs
from tests.tiny_models import tiny_tokenizer
from verl.jobs.main_merge import main
from verl.jobs.merge import compare, export_adapters, merge
from verl.models.critic import CriticModel
from verl.utils.errors import CheckpointError

TRAINING = [
    *(
        "ray",
        "hydra",
        "omegaconf",
        "datasets",
        "pyarrow",
        "tensordict",
        "math_verify",
        "tensorboard",
        "wandb",
    ),
    *("peft", "accelerate", "triton"),
]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the weights that engines start from, into which adapters are merged."""
    folder = tmp_path_factory.mktemp("base")
    jobs.new_engine(Setup()).hf_model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Save from one process. Returns the folder and the state of that process."""
    folder = tmp_path_factory.mktemp("run") / "global_step_4" / "actor"
    return folder, jobs.train_and_save(Setup(), folder)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Save adapters from one process. Returns the folder and the state of that process."""
    folder = tmp_path_factory.mktemp("lora") / "global_step_4" / "actor"
    return folder, jobs.train_and_save(Setup(lora=True), folder)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same_parameters(found["parameters"], expected["parameters"])
    assert all(
        torch.equal(one, other)
        for one, other in zip(found["moments"], expected["moments"], strict=True)
    )


def assert_same_parameters(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"fsdp_size": 1},
        {"family": "qwen3_moe"},
        pytest.param({"lora": True}, marks=pytest.mark.slow),
    ],
    ids=["fsdp", "hsdp", "experts", "LoRA"],
)
def test_one_process_resumes_and_merges_shards_of_two_ranks(
    two_ranks: Ranks, base: Path, tmp_path: Path, settings
):
    setup = Setup(**settings)
    folder = tmp_path / "actor"
    saved = two_ranks.call(jobs.train_and_save, setup, folder)[0]
    sizes = [file.stat().st_size for file in (folder / "sharded").glob("*.distcp")]
    assert len(sizes) == 2
    if not setup.lora:
        assert saved["gathered"] == 0
        tensors = [*saved["parameters"].values(), *saved["moments"]]
        headers = 2500 * 2 * len(tensors)  # of each shard, which is small here
        assert sum(sizes) < sum(tensor.nbytes for tensor in tensors) + headers, (
            "replicas are written once"
        )
        assert max(sizes) < 0.7 * sum(sizes)
    assert_same(jobs.load(setup, folder), saved)

    merge(folder, tmp_path / "merged", base_model=str(base), max_file_bytes=20_000)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype="auto", output_loading_info=True
    )
    assert not any(report.values()), report
    assert_same_parameters(dict(model.named_parameters()), saved["parameters"])
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
        == tiny_tokenizer().chat_template
    )


def test_two_ranks_resume_a_checkpoint_of_one_process(two_ranks: Ranks, alone):
    for found in two_ranks.call(jobs.load, Setup(), alone[0]):
        assert_same(found, alone[1])


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        ("deepseek_v3", {}),
        ("bloom", {}),
    ],
)
def test_files_have_the_names_that_transformers_gives_them(tmp_path: Path, family: str, settings):
    """Check that stacked experts are saved one by one, and that a tied head is in no file."""
    engine = policy_engine(family=family, **settings)
    engine.save(tmp_path / "actor")
    engine.hf_model.save_pretrained(tmp_path / "expected")
    merge(tmp_path / "actor", tmp_path / "merged")
    ours, theirs = (
        load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected")
    )
    assert_same_parameters(ours, theirs)
    assert (tmp_path / "merged" / "config.json").read_text() == (
        tmp_path / "expected" / "config.json"
    ).read_text()


def test_a_critic_keeps_its_value_head(tmp_path: Path):
    engine = critic_engine()
    engine.save(tmp_path / "critic")
    merge(tmp_path / "critic", tmp_path / "merged")
    critic = CriticModel.from_pretrained(tmp_path / "merged")
    assert_same_parameters(
        dict(critic.named_parameters()), dict(engine.hf_model.named_parameters())
    )


@pytest.mark.slow
def test_merging_works_without_training_packages(
    tmp_path: Path, alone, adapters, base: Path, capsys
):
    """Merge whole weights and adapters in a process that cannot import the training packages."""
    code = f"""
        import sys

        sys.modules.update(dict.fromkeys({TRAINING}))  # None: as if they were not installed
        from verl.jobs.main_merge import main

        options = ["merge", "--backend", "fsdp", "--dtype", "bfloat16", "--local_dir"]
        assert main([*options, {str(alone[0])!r}, "--target_dir", "whole"]) == 0
        assert main([*options, {str(adapters[0])!r}, "--target_dir", "lora", "--base_model", {str(base)!r}]) == 0
    """
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for name, (_, saved) in (("whole", alone), ("lora", adapters)):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        halved = {key: tensor.bfloat16() for key, tensor in saved["parameters"].items()}
        assert_same_parameters(dict(model.named_parameters()), halved)


def test_adapters_alone(tmp_path: Path, adapters, alone, base: Path, capsys):
    options = [
        "merge",
        "--backend",
        "fsdp",
        "--no-merge-adapters",
        "--target_dir",
        str(tmp_path / "adapters"),
    ]
    assert main([*options, "--local_dir", str(adapters[0])]) == 0

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters"
    ).merge_and_unload()  # pyright: ignore
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(
            tensor.detach(), adapters[1]["parameters"][name], rtol=1e-5, atol=1e-5
        )

    assert main([*options, "--local_dir", str(alone[0])]) == 1
    assert "saved with lora_rank=0" in capsys.readouterr().err
    options = ["merge", "--backend", "fsdp", "--target_dir", str(tmp_path / "merged")]
    assert main([*options, "--local_dir", str(adapters[0])]) == 1
    assert "Set --base_model" in capsys.readouterr().err


def test_options_of_verl_05_are_accepted(tmp_path: Path, alone, capsys, caplog, monkeypatch):
    asked = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> str:
            asked.append((name, options))
            return f"https://hub/{name}"

        def upload_folder(self, **options: Any) -> None:
            asked.append(sorted(path.name for path in options["folder_path"].iterdir()))

    monkeypatch.setattr("verl.jobs.merge.HfApi", Hub)
    options = ["merge", "--backend", "fsdp", "--local_dir", str(alone[0])]
    options += ["--target_dir", str(tmp_path / "one"), "--tie-word-embedding", "--is-value-model"]
    options += ["--use_cpu_initialization", "--hf_model_path", "some/model"]
    with caplog.at_level("WARNING", logger="verl"):
        assert main([*options, "--hf_upload_path", "me/model", "--private"]) == 0
    assert "Uploaded: https://hub/me/model" in capsys.readouterr().out
    assert asked[0] == ("me/model", {"private": True, "exist_ok": True})
    assert "model.safetensors" in asked[1]
    assert len(caplog.messages) == 4
    assert all(" has no effect: " in message for message in caplog.messages)


def test_a_folder_that_the_hub_does_not_take_stays(tmp_path: Path, alone, capsys, monkeypatch):
    def refuse(hub: Any, name: str, **options: Any) -> None:
        raise OSError("401 Unauthorized.\nInvalid token")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    options = ["merge", "--local_dir", str(alone[0]), "--target_dir", str(tmp_path / "one")]
    assert main([*options, "--hf_upload_path", "me/model"]) == 1
    errors = capsys.readouterr().err
    assert "could not be uploaded to 'me/model': 401 Unauthorized. Log in" in errors
    assert (tmp_path / "one" / "model.safetensors").is_file()


def test_merging_into_the_checkpoint_itself_completes_its_folder(tmp_path: Path):
    engine = policy_engine()
    engine.save(tmp_path, tokenizer=tiny_tokenizer())
    target = tmp_path / "huggingface"
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(CheckpointError, match="is not empty"):
        # would change the contents that the manifest has checksums of
        merge(tmp_path, target, dtype=torch.bfloat16)
    merge(tmp_path, target)
    assert before.items() <= {file.name: file.read_bytes() for file in target.iterdir()}.items()
    assert compare(tmp_path, target) == 27
    with pytest.raises(CheckpointError, match="is not empty"):
        merge(tmp_path, target)
    with pytest.raises(CheckpointError, match="tokenizer.json is a file"):
        merge(tmp_path, target / "tokenizer.json")


def test_an_index_appears_after_the_files_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy_engine().save(tmp_path, tokenizer=tiny_tokenizer())
    moved = []
    replace = os.replace

    def note(source: Path, target: Path) -> None:
        moved.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr("verl.jobs.merge.os.replace", note)
    merge(tmp_path, tmp_path / "huggingface", max_file_bytes=20_000)
    assert len(moved) > 2
    assert moved[-1] == "model.safetensors.index.json"
    assert compare(tmp_path, tmp_path / "huggingface") == 27


def test_an_empty_target_is_filled_and_not_replaced(tmp_path: Path, alone, adapters):
    """It may be the mount point of a volume, a link, or the working directory."""
    for name, fill in (("merged", merge), ("adapters", export_adapters)):
        folder = tmp_path / name
        folder.mkdir()
        before = folder.stat().st_ino
        link = tmp_path / f"link-{name}"
        link.symlink_to(folder)

        fill({"merged": alone, "adapters": adapters}[name][0], link)
        assert folder.stat().st_ino == before
        assert link.is_symlink()
        assert (folder / "tokenizer.json").is_file()
        assert not list(folder.glob(".*"))

    assert compare(alone[0], tmp_path / "merged") == 27


def test_two_different_folders_are_distinguished(tmp_path: Path, alone, capsys):
    merge(alone[0], tmp_path / "merged")
    options = [
        "test",
        "--backend",
        "fsdp",
        "--local_dir",
        str(alone[0]),
        "--test_hf_dir",
        str(tmp_path / "merged"),
    ]

    assert main(options) == 0
    assert "All 27 tensors" in capsys.readouterr().out
    file = tmp_path / "merged" / "model.safetensors"
    tensors = load_file(file)
    norm = tensors["model.norm.weight"]
    save_file({**tensors, "model.norm.weight": norm.double()}, file)  # of the same values
    assert main(options) == 1
    assert "1 differ, first 'model.norm.weight'" in capsys.readouterr().err

    norm[0] += 1e-3
    tensors["model.added"] = tensors.pop("lm_head.weight")
    save_file(tensors, file)
    assert main(options) == 1

    output = capsys.readouterr().err
    for part in (
        "1 differ, first 'model.norm.weight'",
        "1 are missing there, first 'lm_head.weight'",
        "'model.added'",
    ):
        assert part in output


def test_a_failed_merge_leaves_nothing(tmp_path: Path):
    policy_engine().save(tmp_path / "actor")
    shards = tmp_path / "actor" / "sharded" / "__0_0.distcp"
    os.truncate(shards, shards.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="While reading"):
        merge(tmp_path / "actor", tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("", r"got .*\. Set --local_dir .*/global_step_4/actor\."),
        ("global_step_4", r"got .*global_step_4\. Set --local_dir .*/global_step_4/actor\."),
        (
            "global_step_4/actor/huggingface",
            r"huggingface\. Set --local_dir .*/global_step_4/actor\.",
        ),
        ("global_step_9/actor", "there is no folder .*global_step_9/actor"),
    ],
)
def test_a_wrong_folder_is_reported_with_the_right_one(
    tmp_path: Path, alone, capsys, folder: str, message: str
):
    options = ["merge", "--backend", "fsdp", "--target_dir", str(tmp_path / "merged")]
    assert main([*options, "--local_dir", str(alone[0].parents[1] / folder)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(lines[0])
    assert not (tmp_path / "merged").exists()


def test_a_folder_that_is_no_checkpoint_is_reported(tmp_path: Path, alone, base: Path, capsys):
    for folder, message in (
        (base, "already has complete weights"),
        (tmp_path, "with nothing in it"),
    ):
        with pytest.raises(CheckpointError, match=message):
            merge(folder, tmp_path / "merged")
    where = ["--local_dir", str(alone[0]), "--target_dir", str(tmp_path / "merged")]
    assert main(["merge", "--backend", "megatron", *where]) == 1
    assert "ConfigError: Expected --backend fsdp, got megatron" in capsys.readouterr().err


def test_options_without_the_command_name_it(capsys):
    with pytest.raises(SystemExit):
        main(["--backend", "fsdp", "--local_dir", "a", "--target_dir", "b"])
    assert "python -m verl.model_merger merge --backend ..." in capsys.readouterr().err
