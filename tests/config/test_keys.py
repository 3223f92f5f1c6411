"""The tree of keys: it has the keys of verl 0.5, and the package is fast to import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared_files import SHARED, needs_shared
from verl.config import TrainConfig, config_from_dict
from verl.config.key_table import ROOTS, key_tables, page
from verl.config.keys import IGNORED_NAME, flatten, keys_of, nearest_keys, nest, value_at
from verl.utils.errors import ConfigError

KEYS = keys_of(TrainConfig)


def _verl_lines() -> list[tuple[str, str]]:
    lines = (SHARED / "verl05_keys.txt").read_text().splitlines()
    return [tuple(line.split(" = ", 1)) for line in lines if " = " in line]  # pyright: ignore[reportReturnType]


@needs_shared("verl05_keys.txt")
def test_every_verl_key_exists():
    paths = [path for path, _ in _verl_lines()]
    assert len(paths) > 250
    for path in paths:
        if path.endswith(IGNORED_NAME):
            continue
        flatten(nest({path: 0}), TrainConfig)  # raises on an unknown key


@needs_shared("verl05_keys.txt")
def test_keys_follow_the_same_keys_as_in_verl():
    for path, text in _verl_lines():
        followed = re.search(r"# \$\{(?:oc\.select:)?([\w.]+)[,}]", text)
        if followed is None or path.endswith(("_micro_batch_size", "_micro_batch_size_per_gpu")):
            continue
        source = (
            followed[1] if not followed[1].startswith(".") else KEYS[path].section + followed[1]
        )
        assert KEYS[path].followed == source, path


def test_target_lines_are_ignored():
    assert flatten({"critic": {"_target_": "some.Class", "grad_clip": 2}}, TrainConfig) == {
        "critic.grad_clip": 2
    }


def test_every_key_has_help_and_at_most_one_status():
    for key in KEYS.values():
        assert key.setting.help, key.path
        assert key.setting.no_effect is None or key.setting.planned is None, key.path
        assert key.followed is None or key.followed in KEYS, key.path
        assert (
            key.setting.choices is None or key.default is None or key.default in key.setting.choices
        ), key.path


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("data.trian_files", "data.train_files"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.lr", "critic.optim.lr"),
        ("actor_rolout_ref.rollout.temperature", "actor_rollout_ref.rollout.temperature"),
        ("ray_kwargs.ray_init.num_cpus", "ray_init.num_cpus"),
        ("reward.custom_reward_function.path", "custom_reward_function.path"),
    ],
)
def test_unknown_key_suggests_the_nearest(written: str, nearest: str):
    assert nearest in nearest_keys(written, list(KEYS)).split(", ")
    with pytest.raises(
        ConfigError, match=rf"Unknown key '{re.escape(written)}'.*{re.escape(nearest)}"
    ):
        flatten(nest({written: 1}), TrainConfig)


@pytest.mark.parametrize(
    ("written", "way"),
    [
        ("actor_rollout_ref.actor.megatron.param_offload", "FSDP2"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", r"actor_rollout_ref\.model\.dtype"),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap", "rollout_is_threshold"),
        ("reward_model.n_gpus_per_node", r"trainer\.placement\.reward_model"),
        ("actor_rollout_ref.rollout.data_parallel_size", "tensor_model_parallel_size"),
        ("trainer.remove_previous_ckpt_in_save", r"trainer\.max_actor_ckpt_to_keep=1"),
        ("global_profiler.steps", r"trainer\.profile_steps"),
        ("data.messages_key", r"data\.prompt_key"),
        ("actor_rollout_ref.actor.veomni.fsdp_size", r"one backend"),
        ("actor_rollout_ref.actor.optim.clip_grad", r"actor_rollout_ref\.actor\.grad_clip"),
        ("actor_rollout_ref.actor.fsdp_config.dtype", r"fsdp_config\.compute_dtype"),
        ("critic.model.fsdp_config.use_orig_params", "leave it out"),
        ("actor_rollout_ref.model.mtp.enable", "leave it out"),
        ("actor_rollout_ref.model.tokenizer_path", r"data\.tokenizer"),
        ("actor_rollout_ref.actor.use_prefix_grouper", r"share_prompts"),
        ("reward.reward_manager.name", r"reward_model\.reward_manager"),
        ("reward_manager.source", r"external_lib.*@register\('mine'\).*reward_manager=mine"),
        ("reward.reward_manager.module.path", r"actor_rollout_ref\.model\.external_lib"),
        ("reward_model.reward_loop_class_name", r"actor_rollout_ref\.model\.external_lib"),
        ("reward_model.use_reward_loop", "leave it out"),
        ("reward_model.num_workers", r"reward_manager=prime.*num_processes=8"),
        ("reward.num_workers", r"reward_manager=prime.*num_processes=8"),
        ("algorithm.rollout_is", r"rollout_correction\.rollout_is=token or sequence"),
        ("algorithm.rollout_is_level", r"rollout_correction\.rollout_is=token or sequence"),
        ("actor_rollout_ref.rollout.skip_rollout", "verl replay"),
        ("actor_rollout_ref.rollout.skip.enable", "verl replay"),
        ("actor_rollout_ref.rollout.skip_tokenizer_init", "leave it out: .* token ids"),
        ("actor_rollout_ref.rollout.cudagraph_capture_sizes", "enforce_eager=True"),
        ("actor_rollout_ref.rollout.logprobs_mode", r"\(processed_logprobs\)"),
        ("actor_rollout_ref.rollout.scheduling_policy", "by themselves"),
        ("actor_rollout_ref.rollout.over_sample_rate", r"trainer\.mode=fully_async"),
        ("actor_rollout_ref.actor.data_loader_seed", r"trainer\.seed"),
        ("transfer_queue.enable", "leave it out"),
    ],
)
def test_keys_of_missing_features_name_an_alternative(written: str, way: str):
    with pytest.raises(ConfigError, match=way) as raised:
        flatten(nest({written: 1}), TrainConfig)
    assert "Nearest" not in str(raised.value)


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_the_later_name_of_the_schedule_is_taken_by_every_role(role: str):
    given = {"data.dataset_name": "toy", f"{role}.optim.lr_scheduler_type": "cosine"}
    config = config_from_dict(nest(given))
    assert value_at(config, f"{role}.optim.warmup_style") == "cosine"
    assert f"another name of `{role}.optim.warmup_style`" in page()


def test_all_unknown_keys_are_reported_together():
    with pytest.raises(ConfigError, match="(?s)'data.a'.*'trainer.b.c'"):
        flatten({"data": {"a": 1}, "trainer": {"b": {"c": 1}}}, TrainConfig)


def test_section_cannot_be_set_to_a_value():
    with pytest.raises(ConfigError, match="'critic.model' is a section"):
        flatten({"critic": {"model": "gpt2"}}, TrainConfig)


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_key_tables_have_a_line_for_each_key(root: type):
    lines = [
        line
        for table in key_tables(root).values()
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    assert sorted(line.split("`")[1] for line in lines) == sorted(keys_of(root))
    statuses = (
        "implemented |",
        "| implemented; ",
        "| refused: ",
        "| no effect: ",
        "| another name of ",
    )

    assert all(sum(status in line for status in statuses) == 1 for line in lines)


@needs_shared("verl05_keys.txt")
def test_key_reference_lists_every_verl_key():
    named = set(re.findall(r"^\| `([^`]+)` \|", page(), re.MULTILINE))
    wanted = [path for path, _ in _verl_lines() if not path.endswith(IGNORED_NAME)]
    # engine_kwargs.vllm.swap_space: a mapping with entries of the engine.
    missing = [path for path in wanted if named.isdisjoint((path, path.rpartition(".")[0]))]
    assert missing == []


def test_key_reference_is_up_to_date():
    """Update with: python -m verl.config.key_table > docs/reference/keys.md"""
    assert (Path(__file__).parents[2] / "docs/reference/keys.md").read_text() == page()


def test_import_loads_neither_torch_nor_hydra():
    code = (
        "import sys, verl.config; print([name for name in ('torch', 'hydra', 'omegaconf') if name "
        "in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_load_config_does_not_import_torch():
    code = (
        "import sys; from verl.config import load_config; load_config(['data.dataset_name=toy']); "
    )
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")
