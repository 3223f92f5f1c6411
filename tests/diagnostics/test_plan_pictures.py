"""Plans of models that read pictures: passes, prepared pictures and kept features."""

import json
from pathlib import Path

from transformers import Qwen2_5_VLConfig

from tests.diagnostics.configs import QWEN_7B, make_config
from tests.diagnostics.test_plan import phase_of
from verl.diagnostics.memory_plan import MemoryPlan, plan_memory
from verl.diagnostics.report import as_json, render
from verl.utils.units import GIB

ACTOR = "actor_rollout_ref.actor"
KEEPS = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
# The sizes of Qwen2.5-VL-3B.
QWEN_VL_3B = Qwen2_5_VLConfig(
    text_config={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
    },
    vision_config={"depth": 32, "hidden_size": 1280, "out_hidden_size": 2048},
    tie_word_embeddings=True,
)


def plan_of(folder: Path, *keys: str) -> MemoryPlan:
    size = f"{ACTOR}.ppo_max_token_len_per_gpu=8192"
    return plan_memory(make_config(folder, QWEN_VL_3B, size, *keys), 80)


def test_a_trained_tower_keeps_its_layers_in_an_update(tmp_path: Path):
    whole = plan_of(tmp_path, KEEPS)
    recomputed = plan_of(tmp_path)
    frozen = plan_of(tmp_path, KEEPS, f"{ACTOR}.freeze_vision_tower=True")

    update = phase_of(whole, "actor", "actor update")
    assert update.passes is not None
    # Half of the 8,192 tokens may be of prompts, and a token of a picture has four patches.
    assert update.passes.picture_tokens == 4096
    patches = 4 * 4096
    # Compiled, in bf16: at least six states of 1,280 and three of the MLP in each of 32 layers.
    least = 32 * 2 * (6 * 1280 + 3 * 3420) * patches
    assert least < update.device["vision tower"] < 2 * least

    tower = recomputed.roles["actor"].footprint.tower
    assert tower is not None
    assert 32 * 2 * 1280 * patches < tower.kept(4096) < 0.2 * update.device["vision tower"]
    assert "vision tower" not in phase_of(frozen, "actor", "actor update").device
    assert phase_of(frozen, "actor", "actor update").device_bytes < update.device_bytes


def test_pictures_of_a_prompt_count_once(tmp_path: Path):
    """Plan an update of 16 rows, which answer two prompts of 1,024 tokens."""
    few = plan_of(
        tmp_path,
        f"{ACTOR}.ppo_max_token_len_per_gpu=32768",
        f"{ACTOR}.ppo_mini_batch_size=2",
        "trainer.n_gpus_per_node=1",
    )
    passes = phase_of(few, "actor", "actor update").passes
    assert passes is not None
    assert (passes.tokens, passes.picture_tokens) == (32_768, 2048)

    # Ranks that share the tokens of a row compute all of its pictures each.
    apart = plan_of(tmp_path, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    passes = phase_of(apart, "actor", "actor update").passes
    assert passes is not None
    assert (passes.tokens, passes.picture_tokens) == (8192, 8192)


def test_passes_that_the_engine_chooses_leave_room_for_the_tower(tmp_path: Path):
    unset = (f"{ACTOR}.ppo_max_token_len_per_gpu=null", KEEPS)
    trained = phase_of(plan_of(tmp_path, *unset), "actor", "actor update").passes
    frozen = plan_of(tmp_path, *unset, f"{ACTOR}.freeze_vision_tower=True")
    of_frozen = phase_of(frozen, "actor", "actor update").passes
    assert trained is not None
    assert of_frozen is not None
    assert trained.tokens < of_frozen.tokens


def test_the_rollout_runs_the_tower(tmp_path: Path):
    rollout = "actor_rollout_ref.rollout.max_num_batched_tokens"
    one, four = (plan_of(tmp_path, f"{rollout}={size}").rollout for size in (8192, 32_768))
    # At least a layer's MLP for the four patches of each token.
    assert four.working - one.working > 24_576 * 4 * 2 * 2 * 3420


def test_hosts_hold_prepared_pictures_and_kept_features(tmp_path: Path):
    trained = plan_of(tmp_path)
    frozen = plan_of(tmp_path, f"{ACTOR}.freeze_vision_tower=True")
    # 256 prompts of 1,024 tokens; four patches a token, of 2 x 3 x 14 x 14 numbers in fp32. The
    # eight ranks of the host have them once more.
    prepared = 256 * 1024 * 4 * 1176 * 4
    assert trained.pictures.prepared == 8 * trained.pictures.prepared_a_rank == prepared
    assert phase_of(trained, "actor", "actor update").host == 2 * prepared
    assert phase_of(frozen, "actor", "actor update").host == 2 * prepared + 8 * 2 * GIB
    assert phase_of(frozen, "actor", "weights to the rollout").host == 8 * 2 * GIB

    text = render(frozen, [])
    assert "frozen: 32 layers, width 1280, MLP 3420; 4 patches a token" in text
    assert "at most 2.0 GiB of each actor process" in text
    assert json.loads(as_json(frozen, []))["pictures"]["prepared"] == prepared


def test_plans_of_text_have_no_pictures(tmp_path: Path):
    plan = plan_memory(make_config(tmp_path, QWEN_7B), 80)
    assert (plan.pictures.prepared, plan.pictures.kept) == (0, 0)
    assert "ictures" not in render(plan, [])
    for phase in plan.phases:
        assert phase.passes is None or phase.passes.picture_tokens == 0
