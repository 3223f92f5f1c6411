"""Keys of LoRA and optimizers: their forms and their contradictions."""

import pytest

from tests.config.conftest import Load
from verl.utils.errors import ConfigError

MODEL = "actor_rollout_ref.model"
OPTIM = "actor_rollout_ref.actor.optim"


def test_target_modules_are_a_list_or_a_string(build: Load):
    model = build(
        f"{MODEL}.lora_rank=32", f'{MODEL}.target_modules=["q_proj","v_proj"]'
    ).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (
        32,
        16,
        ["q_proj", "v_proj"],
    )
    assert build(f"{MODEL}.lora_rank=8").actor_rollout_ref.model.target_modules == "all-linear"
    assert (
        build(f"{MODEL}.target_modules='.*_proj'").actor_rollout_ref.model.target_modules
        == ".*_proj"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=7"],
            "target_modules must be a list of names.*got 7",
        ),
        (
            [f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[]"],
            r"target_modules must be a list of names.*got \[\]",
        ),
        (
            [f"{MODEL}.lora_rank=8", f"{MODEL}.exclude_modules=[]"],
            r"exclude_modules must be .* or null, got \[\]\. Set .*exclude_modules=null",
        ),
        ([f"{MODEL}.lora_rank=-1"], "lora_rank must be at least 0"),
        ([f"{MODEL}.lora_alpha=0"], "lora_alpha must be above 0"),
        (
            [f"{MODEL}.lora_rank=8", f"{OPTIM}.optimizer=Muon"],
            r"Muon orthogonalises.*Set .*optim\.optimizer=AdamW",
        ),
        ([f"{OPTIM}.optimizer=AdamW4bit"], "unknown value 'AdamW4bit'. Nearest known: AdamW8bit"),
    ],
)
def test_contradictions_name_the_way_out(build: Load, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        build(*overrides)


def test_unused_critic_settings_are_accepted(build: Load):
    build(
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "critic.model.lora_rank=8",
        "critic.optim.optimizer=Muon",
        "critic.enable=False",
    )


def test_lora_weights_without_a_rank_give_one_warning(build: Load, log: pytest.LogCaptureFixture):
    build("actor_rollout_ref.rollout.lora_weights=merged")
    assert [record.message for record in log.records if "has no effect" in record.message] == [
        f"actor_rollout_ref.rollout.lora_weights=merged has no effect: it is read with "
        f"{MODEL}.lora_rank > 0 only."
    ]


def test_lora_keys_without_a_rank_give_one_warning(build: Load, log: pytest.LogCaptureFixture):
    build(f"{MODEL}.lora_alpha=64")
    assert [record.message for record in log.records if "has no effect" in record.message] == [
        f"{MODEL}.lora_alpha=64 has no effect: it is read with {MODEL}.lora_rank > 0 only."
    ]
