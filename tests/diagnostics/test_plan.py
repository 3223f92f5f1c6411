"""Plans of user runs: plausible for known models, fast, without weights, and with valid advice."""

import copy
import json
import time
from pathlib import Path

import psutil
import pytest
import yaml
from transformers import PreTrainedConfig

import verl.utils
from tests.diagnostics.configs import LLAMA_8B, LLAMA_70B, QWEN_7B, make_config
from tests.tiny_models import save_tiny
from verl.config import config_from_dict
from verl.config.keys import owner_of
from verl.diagnostics import plan as command
from verl.diagnostics.memory_plan import MemoryPlan, PhasePlan, plan_memory
from verl.diagnostics.model_shapes import ModelShapes
from verl.diagnostics.profile import _REPORTED_AS, profile_memory, watch
from verl.utils.errors import ConfigError, ModelError
from verl.utils.peaks import Peak, phase_peaks
from verl.utils.units import GIB

OFFLOADED = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"
LORA = "actor_rollout_ref.model.lora_rank=32"
ONE = ("trainer.n_gpus_per_node=1", "data.train_batch_size=64")
TWO_UPDATES = "actor_rollout_ref.actor.ppo_epochs=2"
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"


def phase_of(plan: MemoryPlan, role: str, phase: str) -> PhasePlan:
    return next(each for each in plan.phases if (each.role, each.phase) == (role, phase))


def update_gib(plan: MemoryPlan) -> float:
    return phase_of(plan, "actor", "actor update").device_bytes / GIB


@pytest.mark.parametrize(
    ("model", "device_gib", "fits"),
    [
        (QWEN_7B, "H100", True),
        (QWEN_7B, 48, True),
        (LLAMA_8B, "H100", True),
        (LLAMA_8B, 48, True),
        (LLAMA_70B, "H100", False),
        (LLAMA_70B, 48, False),
    ],
    ids=["7B, 80", "7B, 48", "8B, 80", "8B, 48", "70B, 80", "70B, 48"],
)
def test_eight_cards(tmp_path: Path, model: PreTrainedConfig, device_gib, fits: bool):
    start = time.process_time()
    profile = profile_memory(
        make_config(tmp_path, model, "trainer.save_freq=10"), device_gib=device_gib
    )
    plan = profile.plan
    assert time.process_time() - start < 30
    assert not list(tmp_path.glob("*.safetensors"))
    assert profile.fits is fits

    numel = plan.roles["actor"].footprint.shape.numel
    update = phase_of(plan, "actor", "actor update")
    for part, num_bytes in (("actor parameters", 4), ("actor moments", 8), ("gradients", 4)):
        assert update.device[part] == pytest.approx(num_bytes * numel / 8, rel=0.001)
    load = phase_of(plan, "actor", "load")
    assert load.host == 4 * numel, "one process reads the whole model"
    assert phase_of(plan, "actor", "rollout").device["rollout weights"] == 2 * numel
    text = str(profile)

    assert ("It fits" in text) == fits
    assert "256 prompts x 8 samples = 2048 rows of at most 2048 tokens" in text
    assert [line for line in text.splitlines() if line.startswith("actor") and "checkpoint" in line]


@pytest.mark.parametrize(
    ("model", "overrides", "device_gib"),
    [
        (LLAMA_70B, (), "H100"),
        pytest.param(LLAMA_70B, ("algorithm.adv_estimator=gae",), 48, marks=pytest.mark.slow),
        (QWEN_7B, (*ONE, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536"), "H200"),
        (
            QWEN_7B,
            (*ONE, LORA, "actor_rollout_ref.model.enable_gradient_checkpointing=False", TOKENS),
            80,
        ),
        (QWEN_7B, ("actor_rollout_ref.rollout.num_pages=200000",), 80),
        (
            QWEN_7B,
            ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1000000", TWO_UPDATES),
            48,
        ),
        (
            QWEN_7B,
            (
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=256",
                "actor_rollout_ref.actor.use_kl_loss=True",
            ),
            48,
        ),
        (QWEN_7B, ("actor_rollout_ref.rollout.name=hf",), 80),
    ],
    ids=[
        "70B",
        "70B, critic",
        "passes too large",
        "not checkpointed",
        "too many pages",
        "log-probs",
        "rows of the reference",
        "hf",
    ],
)
def test_advice_makes_it_fit(
    tmp_path: Path, model: PreTrainedConfig, overrides: tuple[str, ...], device_gib
):
    profile = profile_memory(make_config(tmp_path, model, *overrides), device_gib=device_gib)
    assert not profile.fits
    assert profile.advice
    shapes = ModelShapes()
    for advice in profile.advice:
        changed = make_config(tmp_path, model, *overrides, *advice.changes)
        again = plan_memory(changed, device_gib, shapes)
        assert again.fits, advice.changes
        assert again.worst.device_bytes == advice.plan.worst.device_bytes
        assert " ".join(advice.changes) in str(profile)


def test_advice_names_several_keys_and_the_gpus_of_the_same_host_first(tmp_path: Path):
    one_gpu = (
        "trainer.n_gpus_per_node=1",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
    )
    profile = profile_memory(make_config(tmp_path, QWEN_7B, *one_gpu), device_gib=80)
    assert not profile.fits

    keys = [tuple(change.split("=")[0] for change in each.changes) for each in profile.advice]
    assert keys[0] == ("trainer.n_gpus_per_node",)
    assert len(set(keys)) == len(keys) > 1


def test_plan_reports_that_no_change_helps(tmp_path: Path):
    profile = profile_memory(make_config(tmp_path, LLAMA_70B, *ONE), device_gib=10)
    assert (profile.fits, profile.advice) == (False, [])
    assert "No three changes of keys make it fit" in str(profile)


def test_plan_shows_the_effect_of_memory_settings(tmp_path: Path):
    config = make_config(tmp_path, QWEN_7B, *ONE, TOKENS)
    shapes = ModelShapes()

    def plan(*overrides: str) -> MemoryPlan:
        changed = copy.deepcopy(config)
        for key, _, value in (override.partition("=") for override in overrides):
            setattr(*owner_of(changed, key), yaml.safe_load(value))
        return plan_memory(changed, 139.8, shapes)

    full = plan()
    assert update_gib(plan(LORA)) < 0.5 * update_gib(full)

    offloaded = plan(OFFLOADED)
    moments = full.roles["actor"].footprint.moments
    for phase, less in (("rollout", moments), ("old log-probs", moments), ("actor update", 0)):
        if phase == "old log-probs":
            mini = ("actor_rollout_ref.actor.ppo_mini_batch_size=32",)
            one, other = (
                phase_of(plan(*mini, *more), "actor", phase) for more in ((), (OFFLOADED,))
            )
        else:
            one, other = (phase_of(each, "actor", phase) for each in (full, offloaded))
        if phase == "rollout":  # pages fill a share of the free memory
            assert other.device["pages"] > one.device["pages"]
            assert "actor moments" not in other.device
        else:
            assert one.device_bytes - other.device_bytes == less
    assert 0 <= offloaded.roles["actor"].footprint.on_host - moments < 2**28

    for switch in (
        "actor_rollout_ref.actor.optim.optimizer=AdamW8bit",
        "actor_rollout_ref.actor.optim.optimizer=Muon",
        "actor_rollout_ref.actor.fsdp_config.offload_policy=True",
        "actor_rollout_ref.model.enable_activation_offload=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "trainer.n_gpus_per_node=2",
    ):
        assert update_gib(plan(switch)) < update_gib(full), switch
    for switch in (
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "actor_rollout_ref.actor.use_kl_loss=True",
    ):
        assert update_gib(plan(switch)) > update_gib(full), switch


def test_hybrid_sharding_and_sequence_parallelism(tmp_path: Path):
    hybrid = plan_memory(
        make_config(tmp_path, QWEN_7B, "actor_rollout_ref.actor.fsdp_config.fsdp_size=4"), 80
    )
    footprint = hybrid.roles["actor"].footprint
    # 4 bytes, 4 ranks
    assert footprint.parameters == pytest.approx(footprint.shape.numel, rel=0.001)
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"
    shared = plan_memory(
        make_config(tmp_path, QWEN_7B, ulysses, "data.max_response_length=31744"), 80
    )

    assert shared.batch.data_ranks == 2
    passes = phase_of(shared, "actor", "actor update").passes
    assert passes is not None
    assert passes.tokens >= 32_768 // 4

    padded = make_config(
        tmp_path, QWEN_7B, "data.train_batch_size=3", "actor_rollout_ref.rollout.n=3"
    )
    assert plan_memory(padded, 80).batch.rows_a_rank == 2  # nine rows on eight ranks


def test_planned_cache_matches_the_engine(tmp_path: Path):
    plan = plan_memory(
        make_config(tmp_path, QWEN_7B, "actor_rollout_ref.rollout.num_pages=1280"), 80
    )
    rollout = plan.rollout
    assert rollout.page_bytes == 28 * 2 * 4 * 128 * 16 * 2
    assert (rollout.pages_a_sample, rollout.at_once, rollout.samples) == (128, 10, 256)
    half, most = (
        plan_memory(
            make_config(
                tmp_path, QWEN_7B, f"actor_rollout_ref.rollout.gpu_memory_utilization={share}"
            ),
            48,
        )
        for share in (0.25, 0.5)
    )

    assert half.rollout.pages == pytest.approx(most.rollout.pages / 2, rel=0.01)


def test_small_model_on_a_cpu(tmp_path: Path):
    save_tiny(tmp_path, "llama")
    config = config_from_dict(
        {
            "data": {"train_files": "x.parquet", "train_batch_size": 4},
            "actor_rollout_ref": {"model": {"path": str(tmp_path)}},
            "trainer": {"device": "cpu"},
        }
    )

    profile = profile_memory(config)
    assert profile.fits is None
    assert set(profile.plan.roles) == {"actor", "critic"}
    assert profile.plan.rollout.weights == 0, "the engine uses the trainer's weights"
    values = phase_of(profile.plan, "critic", "values")
    assert values.host == values.device_bytes > 0
    text = str(profile)
    assert "Device: at most" in text
    assert "Data: not read, so files may be missing." in text
    assert "without the processes themselves and the data set" in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), False),
        (("actor_rollout_ref.actor.ppo_epochs=2",), True),
        (("algorithm.use_kl_in_reward=True",), True),
        (("actor_rollout_ref.actor.ppo_mini_batch_size=64",), True),
    ],
)
def test_old_log_probs_are_planned_when_computed(tmp_path: Path, overrides, expected):
    config = make_config(tmp_path, QWEN_7B, *overrides)
    assert config.needs_old_log_probs is expected
    phases = {phase.phase for phase in plan_memory(config, 80).phases}
    assert ("old log-probs" in phases) is expected


def test_a_part_that_is_not_registered_has_no_plan(tmp_path: Path, capsys):
    config = make_config(tmp_path, QWEN_7B, "algorithm.adv_estimator=grop")
    with pytest.raises(ConfigError, match=r"algorithm.adv_estimator\) 'grop'. Nearest known: grpo"):
        profile_memory(config)
    keys = ["data.dataset_name=toy", "actor_rollout_ref.rollout.name=embeded"]
    assert command.main(keys) == 1
    assert "'embeded'. Nearest known: embedded" in capsys.readouterr().err


def test_unknown_family_gives_a_bound_by_analogy(tmp_path: Path):
    save_tiny(tmp_path, "gpt2")
    config = config_from_dict(
        {
            "data": {
                "train_files": "x.parquet",
                "train_batch_size": 4,
                "max_prompt_length": 20,
                "max_response_length": 20,
            },
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {"model": {"path": str(tmp_path)}, "rollout": {"n": 2}},
        }
    )
    assert "a bound by analogy with Llama's layer" in str(profile_memory(config, device_gib=80))


def test_plan_of_a_running_trainer_shows_its_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("verl.diagnostics.profile._running", [])
    with pytest.raises(ConfigError, match="and none is running"):
        profile_memory()
    config = make_config(tmp_path, QWEN_7B)
    watch(config)
    predicted = phase_of(plan_memory(config, 80), "actor", "actor update").device_bytes
    monkeypatch.setattr(
        phase_peaks, "phases", {"the actor's update": Peak(predicted // 2, predicted // 2, 5)}
    )
    row = next(
        line for line in str(profile_memory(device_gib=80)).splitlines() if "actor update" in line
    )
    assert f"{predicted / GIB:.1f}  " in row
    assert "+0%" in row


def test_on_a_cpu_the_growth_of_the_process_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A plan counts no libraries: memory that the process had before it loaded a model is left
    out."""
    monkeypatch.setattr("verl.diagnostics.profile._running", [])
    config = make_config(tmp_path, QWEN_7B, "trainer.device=cpu")
    watch(config)
    before = psutil.Process().memory_info().rss
    predicted = phase_of(plan_memory(config), "actor", "actor update").host
    assert predicted > 2 * GIB
    peaks = {
        "the actor's update": Peak(host=before + predicted),
        "generation": Peak(host=before + GIB),
    }
    monkeypatch.setattr(phase_peaks, "phases", peaks)

    shown = str(profile_memory())
    row = next(line for line in shown.splitlines() if "actor update" in line)
    assert "+0%" in row or "-0%" in row
    assert "Measured: growth of this process since its models began to load" in shown


def test_measured_phases_have_the_names_of_the_engines():
    """Check that the workers use these names; a misspelled one would never be measured."""
    room = Path(command.__file__).parents[1]
    source = "".join(
        path.read_text()
        for folder in ("workers", "engine")
        for path in (room / folder).glob("*.py")
    )
    for name in set(_REPORTED_AS.values()):
        assert f'"{name}"' in source, name


def test_plan_is_available_in_verl_utils_and_as_a_command(tmp_path: Path, capsys):
    assert verl.utils.profile_memory is profile_memory
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        verl.utils.nothing  # noqa: B018
    QWEN_7B.save_pretrained(tmp_path)
    words = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
        "data.train_files=x.parquet",
        "data.train_batch_size=64",
        "trainer.n_gpus_per_node=8",
        "trainer.device=cuda",
    ]

    model = f"actor_rollout_ref.model.path={tmp_path}"
    assert command.main(["--device-gib", "H100", *words, model]) == 0
    assert "It fits" in capsys.readouterr().out
    assert command.main(["--device-gib", "12", "--json", *words, model]) == 2
    report = json.loads(capsys.readouterr().out)
    assert not report["fits"]
    assert report["device_size"] == 12 * GIB
    assert (
        report["device"]
        == max(phase["device"] for phase in report["phases"])
        == max(sum(phase["parts"].values()) for phase in report["phases"])
    )

    assert report["ranks"] == {"actor": [*range(8)], "rollout": [*range(8)]}
    assert report["advice"][0]["device"] <= 12 * GIB
    assert command.main(["--device-gib", "12", *words, model, *report["advice"][0]["changes"]]) == 0
    assert command.main(["--device-gib", "H1000", *words, model]) == 1
    assert "Nearest known: H100" in capsys.readouterr().err
    asked = {
        "actor_rollout_ref.model.path": str(tmp_path),
        "algorithm.adv_estimator": "grpo",
        "rollout_config": {"n": 8},
    }

    assert "It does NOT fit" in str(profile_memory(asked, device_gib=12))
    with pytest.raises(ModelError):
        profile_memory(
            make_config(tmp_path, QWEN_7B, "actor_rollout_ref.model.path=./nowhere"), device_gib=80
        )


@pytest.mark.parametrize("sleeps", [True, False])
def test_vllm_in_process_takes_its_share_of_the_device(tmp_path: Path, sleeps: bool):
    rollout = "actor_rollout_ref.rollout"
    config = make_config(
        tmp_path,
        QWEN_7B,
        *ONE,
        f"{rollout}.name=vllm",
        f"{rollout}.in_process=True",
        f"{rollout}.gpu_memory_utilization=0.25",
        f"{rollout}.free_cache_engine={sleeps}",
    )
    plan = plan_memory(config, 140)
    share = int(0.25 * 140 * GIB)
    weights = plan.rollout.weights
    assert 14 < weights / GIB < 15
    assert plan.rollout.weights + plan.rollout.working == share

    generation = phase_of(plan, "actor", "rollout").device
    assert generation["rollout weights"] + generation["rest of the engine's share"] == share
    update = phase_of(plan, "actor", "actor update").device
    assert update.get("rollout, awake", 0) == (0 if sleeps else share)
    hand_over = phase_of(plan, "actor", "weights to the rollout").device
    rest = hand_over.get("rest of the engine's share", 0)
    assert hand_over["rollout weights"] + rest == (weights if sleeps else share)
    assert "pages" not in hand_over


@pytest.mark.parametrize("device_gib", [-5, "0", "nan", "inf"])
def test_a_device_has_a_size(tmp_path: Path, device_gib: float | str):
    with pytest.raises(ConfigError, match="must be a size above 0"):
        plan_memory(make_config(tmp_path, QWEN_7B, *ONE), device_gib)
