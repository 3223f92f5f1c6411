"""Plans of fine-tuning: they match the worker's engine, and advise keys of `verl sft`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.diagnostics.configs import LLAMA_8B
from tests.diagnostics.test_plan import phase_of
from tests.diagnostics.test_plan_pictures import QWEN_VL_3B
from tests.tiny_models import save_tiny, tiny_tokenizer
from verl.config import config_from_dict
from verl.config.sft import SFTConfig, as_train_config
from verl.diagnostics import plan as command
from verl.diagnostics.profile import profile_memory
from verl.diagnostics.sft_plan import plan_fine_tuning
from verl.jobs import main_sft
from verl.workers.sft import SFTWorker


def sft_config(folder: Path, *keys: str) -> SFTConfig:
    line = ["data.train_files=train.parquet", f"model.path={folder}", *keys]
    values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(line))
    return config_from_dict(values, root="sft_trainer")


def test_plan_matches_the_engine_of_the_worker(tmp_path: Path):
    save_tiny(tmp_path, "llama")
    config = sft_config(tmp_path, "trainer.device=cpu", "model.lora_rank=4", "data.max_length=64")
    worker = SFTWorker(
        as_train_config(config).actor_rollout_ref,
        max_length=64,
        total_steps=5,
        device=torch.device("cpu"),
        tokenizer=tiny_tokenizer(),
    )
    plan = plan_fine_tuning(config)
    role = plan.roles["actor"]
    assert role.footprint.shape == worker.engine.footprint.shape
    assert role.footprint.setup == worker.engine.footprint.setup
    assert [phase.phase for phase in plan.phases] == ["load", "update"]


def test_phases_follow_the_keys(tmp_path: Path):
    QWEN_VL_3B.save_pretrained(tmp_path)
    plan = plan_fine_tuning(
        sft_config(
            tmp_path,
            "data.val_files=val.parquet",
            "trainer.test_freq=5",
            "trainer.save_freq=after_each_epoch",
            "trainer.n_gpus_per_node=8",
            "data.max_token_len_per_gpu=4096",
            "model.freeze_vision_tower=True",
        ),
        "H100",
    )
    assert [phase.phase for phase in plan.phases] == ["load", "update", "validation", "checkpoint"]
    passes = phase_of(plan, "actor", "update").passes
    assert passes is not None
    # The data alone know which tokens are learnt, and which are of pictures.
    assert (passes.tokens, passes.predictions, passes.picture_tokens) == (4096, 4096, 4096)
    assert plan.pictures.prepared > 0
    assert plan.pictures.kept == 0


def test_advice_for_fine_tuning_makes_it_fit(tmp_path: Path):
    LLAMA_8B.save_pretrained(tmp_path)
    keys = ("trainer.n_gpus_per_node=8", "data.micro_batch_size_per_gpu=4")
    keys += ("model.enable_gradient_checkpointing=False",)
    profile = profile_memory(sft_config(tmp_path, *keys), device_gib=40)
    assert profile.fits is False
    assert profile.advice
    for advice in profile.advice:
        again = dict(pair.split("=") for pair in (*keys, *advice.changes))
        config = sft_config(tmp_path, *(f"{key}={value}" for key, value in again.items()))
        assert plan_fine_tuning(config, 40).fits


def test_dry_run_of_fine_tuning_prints_the_plan(capsys: pytest.CaptureFixture[str]):
    keys = ["data.train_files=train.parquet", "model.path=toy", "trainer.device=cpu"]
    assert main_sft.main(["--dry-run", *keys]) == 0
    printed = capsys.readouterr().out
    assert "256 rows of at most 1024 tokens" in printed
    assert "actor  update" in printed
    assert "Cache" not in printed

    assert main_sft.main(["--dry-run", *keys, "modle.path=toy"]) == 1
    assert "model" in capsys.readouterr().err

    assert command.main(["--sft", "--run", "folder", *keys]) == 1
    assert "Leave one of them out" in capsys.readouterr().err
