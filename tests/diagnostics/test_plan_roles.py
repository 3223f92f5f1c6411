"""Plans of every role: they match the engines of the workers, on the role's ranks."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config

from tests.diagnostics.configs import LLAMA_8B, QWEN_7B, make_config
from tests.diagnostics.live_bytes import taken_by
from tests.diagnostics.test_plan import phase_of
from tests.engine.batches import make_batch
from tests.tiny_models import save_tiny, tiny_model, tiny_tokenizer
from tests.tiny_reward_models import save_reward_model, tiny_classifier
from tests.tiny_vision_models import save_tiny_vision
from verl.config import FSDPConfig
from verl.diagnostics.memory_plan import MemoryPlan, plan_memory
from verl.diagnostics.report import render
from verl.distributed.mesh import close_process_group
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.packed import PackedRewardModel
from verl.models.vision import vision_towers
from verl.utils.errors import ConfigError, ModelError
from verl.utils.units import GIB
from verl.workers import (
    ActorWorker,
    CriticWorker,
    ReferenceWorker,
    RewardModelWorker,
    TeacherWorker,
)

PPO = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True")
SCORER = Qwen2Config(
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    num_labels=1,
    architectures=["Qwen2ForSequenceClassification"],  # pyright: ignore[reportCallIssue]
)


def scored_by(folder: Path, config=SCORER) -> tuple[str, str]:
    config.save_pretrained(folder)
    return "reward_model.enable=True", f"reward_model.model.path={folder}"


@pytest.fixture(autouse=True)
def process_group():
    yield
    close_process_group()


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_plan_matches_the_engines_of_the_workers(tmp_path: Path, adapted: bool):
    save_tiny(tmp_path / "actor", "llama")
    save_reward_model(tmp_path / "scorer", "qwen2")
    lora = ("actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=4") if adapted else ()
    config = make_config(
        tmp_path / "unused",
        QWEN_7B,
        *PPO,
        *lora,
        f"actor_rollout_ref.model.path={tmp_path / 'actor'}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=null",
        "reward_model.enable=True",
        f"reward_model.model.path={tmp_path / 'scorer'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=20",
        "data.max_response_length=20",
        "critic.model.fsdp_config.param_offload=True",
        # makes a single process shard, even on a CPU
        "critic.model.fsdp_config.compute_dtype=bfloat16",
    )

    device = torch.device("cpu")
    tokenizer = tiny_tokenizer()
    roles = config.actor_rollout_ref
    workers = {
        "actor": ActorWorker(roles, total_steps=5, device=device, tokenizer=tokenizer),
        "critic": CriticWorker(
            config.critic, max_length=40, total_steps=5, device=device, tokenizer=tokenizer
        ),
        "reference": ReferenceWorker(roles, device=device),
        "reward_model": RewardModelWorker(
            config.reward_model, input_tokenizer=tokenizer, device=device
        ),
    }

    planned = plan_memory(config).roles
    assert set(planned) == set(workers) - ({"reference"} if adapted else set())
    for name, role in planned.items():
        engine = workers[name].engine
        assert role.footprint.shape == engine.footprint.shape, name
        assert role.footprint.setup == engine.footprint.setup, name
        assert role.full_bytes == sum(weight.nbytes for weight in engine.module.parameters()), name


def test_peak_memory_of_scores_is_predicted():
    """Count gathered layers and their states in bf16 with FSDP2.

    There are no logits, and one row of a head for each response.
    """
    model = tiny_classifier(
        hidden_size=64, intermediate_size=256, num_hidden_layers=3, vocab_size=512
    )
    engine = TrainEngine(
        PackedRewardModel(model.requires_grad_(False)),
        EngineOptions(
            device=torch.device("cpu"),
            fsdp_config=FSDPConfig(compute_dtype="bfloat16"),
            share_prompts=False,
        ),
    )

    batch = make_batch([(120, 1)] * 4)
    there = [
        each.to_local() if isinstance(each, DTensor) else each
        for each in engine.module.parameters()
    ]
    taken = taken_by(lambda: engine.infer(batch, TokenBudget(max_tokens=4 * 121)), there)
    assert sum(engine.footprint.forward(4 * 121, 4).values()) == pytest.approx(taken, rel=0.1)
    assert engine.footprint.moments == engine.footprint.gradients == 0


def test_reward_model_memory(tmp_path: Path):
    config = make_config(tmp_path, QWEN_7B, *scored_by(tmp_path / "scorer"))
    plan = plan_memory(config, 80)
    scorer = plan.roles["reward_model"].footprint
    # a head for one score replaces the head over the vocabulary
    body = QWEN_7B.vocab_size * QWEN_7B.hidden_size
    policy = plan.roles["actor"].footprint.shape.numel
    assert scorer.shape.numel == policy - body + QWEN_7B.hidden_size
    # bf16 over 8 ranks
    assert scorer.parameters == pytest.approx(2 * scorer.shape.numel / 8, rel=0.001)
    assert (scorer.moments, scorer.gradients, scorer.shape.vocabulary) == (0, 0, 0)

    for phase in plan.phases:
        if (phase.role, phase.phase) != ("actor", "load"):
            assert phase.device.get("reward_model parameters", 0) >= scorer.parameters, phase

    assert phase_of(plan, "reward_model", "load").host == 2 * scorer.shape.numel
    scores = phase_of(plan, "reward_model", "scores")
    assert scores.passes is not None
    assert scores.passes.predictions == pytest.approx(scores.passes.tokens / 2048, abs=1)
    predicted = sum(scorer.forward(scores.passes.tokens, scores.passes.predictions).values())
    resident = sum(role.footprint.resident for role in plan.roles.values())
    assert scores.device_bytes == predicted + resident


def test_reward_model_passes_follow_its_own_keys(tmp_path: Path):
    scorer = scored_by(tmp_path / "scorer")

    def tokens(*overrides: str) -> int:
        passes = phase_of(
            plan_memory(make_config(tmp_path, QWEN_7B, *scorer, *overrides), 80),
            "reward_model",
            "scores",
        ).passes
        assert passes is not None
        return passes.tokens

    assert tokens("reward_model.micro_batch_size_per_gpu=3") == 3 * 2048
    assert (
        tokens("reward_model.micro_batch_size_per_gpu=3", "reward_model.max_length=512") == 3 * 512
    )
    assert tokens("reward_model.forward_max_token_len_per_gpu=10000") == 10_000

    off = "reward_model.model.fsdp_config.param_offload=True"
    plan = plan_memory(make_config(tmp_path, QWEN_7B, *scorer, off), 80)
    assert "reward_model parameters" not in phase_of(plan, "actor", "actor update").device
    assert "reward_model parameters" in phase_of(plan, "reward_model", "scores").device
    assert phase_of(plan, "actor", "actor update").host == pytest.approx(2 * 7.07e9, rel=0.1), (
        "in pinned pieces"
    )


def test_language_model_as_reward_model_is_an_error(tmp_path: Path):
    with pytest.raises(ModelError, match="a language model"):
        QWEN_7B.architectures = ["Qwen2ForCausalLM"]
        try:
            plan_memory(
                make_config(tmp_path, LLAMA_8B, *scored_by(tmp_path / "scorer", QWEN_7B)), 80
            )
        finally:
            QWEN_7B.architectures = None


def test_separate_placements_share_no_device(tmp_path: Path):
    """Place the actor on 6 ranks and the critic on 2: separate shards of sixths and halves."""
    placed = (*PPO, "trainer.placement.critic=[6,7]", "data.train_batch_size=240")
    together = plan_memory(make_config(tmp_path, QWEN_7B, *PPO, "data.train_batch_size=240"), 141)
    apart = plan_memory(make_config(tmp_path, QWEN_7B, *placed), 141)
    numel = apart.roles["actor"].footprint.shape.numel
    assert apart.roles["actor"].footprint.parameters == pytest.approx(4 * numel / 6, rel=0.001)
    assert apart.roles["reference"].footprint.parameters == pytest.approx(2 * numel / 6, rel=0.001)
    assert apart.roles["critic"].footprint.parameters == pytest.approx(4 * 7.07e9 / 2, rel=0.001)

    for phase in apart.phases:
        names = {
            part.split()[0] for part in phase.device if part.endswith(("parameters", "moments"))
        }
        assert names <= ({"critic"} if phase.role == "critic" else {"actor", "reference"}), phase

    assert "actor parameters" in phase_of(together, "critic", "critic update").device
    assert apart.batch.data_ranks == 6
    assert apart.rollout.samples == 240 // 6 * 8
    assert phase_of(apart, "actor", "load").host == 4 * numel
    assert phase_of(apart, "critic", "load").host == pytest.approx(4 * 7.07e9, rel=0.001)
    text = str(apart.placement.roles)
    assert "(6, 7)" in text


def test_host_memory_counts_the_processes_on_each_host(tmp_path: Path):
    """Use two hosts with four ranks each; the critic's two ranks are on the second one."""
    off = "critic.model.fsdp_config.optimizer_offload=True"
    four = ("trainer.n_gpus_per_node=4", "trainer.nnodes=2", "data.train_batch_size=240")
    plan = plan_memory(
        make_config(tmp_path, QWEN_7B, *PPO, *four, off, "trainer.placement.critic=[6,7]"), 141
    )
    assert phase_of(plan, "actor", "load").host == 4 * plan.roles["actor"].footprint.shape.numel
    assert (
        phase_of(plan, "actor", "actor update").host
        == 2 * plan.roles["critic"].footprint.on_host
        > 0
    )


def test_weight_transfer_gathers_two_buckets(tmp_path: Path):
    def gathered(*overrides: str) -> int:
        plan = plan_memory(make_config(tmp_path, QWEN_7B, *overrides), 141)
        return phase_of(plan, "actor", "weights to the rollout").device.get("gathered", 0)

    embedding = QWEN_7B.vocab_size * QWEN_7B.hidden_size
    assert gathered() == 2 * 2 * embedding, "in bf16, and larger than a bucket"
    assert (
        gathered("actor_rollout_ref.rollout.update_weights_bucket_megabytes=2048")
        == 2 * 2048 * 2**20
    )

    alone = ("trainer.n_gpus_per_node=1", "data.train_batch_size=64")
    assert gathered(*alone) == 0, "one rank holds every tensor whole"
    largest_of_a_layer = 3584 * 18_944
    assert gathered(*alone, "actor_rollout_ref.model.lora_rank=8") == 4 * largest_of_a_layer, (
        "sums are fp32"
    )


def test_checkpoint_memory(tmp_path: Path):
    """Count the weights of the rollout engine, and host copies only for async_save."""
    numel = plan_memory(make_config(tmp_path, LLAMA_8B), 80).roles["actor"].footprint.shape.numel

    def checkpoint(*overrides: str):
        config = make_config(tmp_path, LLAMA_8B, "trainer.save_freq=10", *overrides)
        return [phase for phase in plan_memory(config, 141).phases if phase.phase == "checkpoint"]

    (plain,) = checkpoint()
    assert plain.device["rollout weights"] == 2 * numel
    assert "one parameter" not in plain.device
    assert plain.host < 3 * GIB

    (copied,) = checkpoint("trainer.async_save=True")
    assert copied.host == pytest.approx((4 + 8) * numel, rel=0.001)
    (weights,) = checkpoint(
        "trainer.async_save=True", "actor_rollout_ref.actor.checkpoint.save_contents=[model]"
    )
    assert weights.host == pytest.approx(4 * numel, rel=0.001)

    (merged,) = checkpoint(
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    )
    assert merged.device["one parameter"] == 4 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    assert merged.host - plain.host == 2 * 5 * 10**9, "a file and its copy"

    actor, critic = checkpoint("trainer.async_save=True", "algorithm.adv_estimator=gae")
    assert critic.host == pytest.approx(actor.host * 2, rel=0.1), (
        "the actor's are still being written"
    )

    (adapters,) = checkpoint("trainer.async_save=True", "actor_rollout_ref.model.lora_rank=8")
    assert (
        adapters.host
        == 8
        * plan_memory(make_config(tmp_path, LLAMA_8B, "actor_rollout_ref.model.lora_rank=8"), 80)
        .roles["actor"]
        .footprint.moments
    )


def test_tensor_parallel_ranks_split_pages_and_weights(tmp_path: Path):
    plans = {
        parts: plan_memory(
            make_config(
                tmp_path, QWEN_7B, f"actor_rollout_ref.rollout.tensor_model_parallel_size={parts}"
            ),
            80,
        ).rollout
        for parts in (1, 2, 4)
    }
    whole = 2 * QWEN_7B.vocab_size * QWEN_7B.hidden_size  # embeddings and head

    layers = plans[1].weights // 2 - whole
    for parts, rollout in plans.items():
        assert rollout.page_bytes == 28 * 2 * (4 // parts) * 128 * 16 * 2
        assert rollout.weights == pytest.approx(2 * (whole + layers / parts), rel=0.001)
        assert rollout.samples == 256 * parts

    with pytest.raises(ConfigError, match="Set it to 4"):
        plan_memory(
            make_config(
                tmp_path, QWEN_7B, "actor_rollout_ref.rollout.tensor_model_parallel_size=8"
            ),
            80,
        )


def test_plan_rejects_unsupported_settings_and_models(tmp_path: Path):
    engine = "actor_rollout_ref.rollout.name"
    shared = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    with pytest.raises(ConfigError, match="name=hf. Set name=embedded"):
        plan_memory(make_config(tmp_path, QWEN_7B, f"{engine}=hf", shared), 80)

    latent = tiny_model("deepseek_v3").config
    with pytest.raises(ConfigError, match="On CUDA .*MLA.*'deepseek_v3'. Set it to hf"):
        plan_memory(make_config(tmp_path, latent), 80)
    plan_memory(make_config(tmp_path, latent, f"{engine}=hf"), 80)


def test_tied_embeddings_count_once(tmp_path: Path):
    tied = Qwen2Config(**{**QWEN_7B.to_dict(), "tie_word_embeddings": True})
    one, two = (
        plan_memory(make_config(tmp_path / name, model), 80)
        for name, model in (("tied", tied), ("untied", QWEN_7B))
    )
    embedding = QWEN_7B.vocab_size * QWEN_7B.hidden_size
    assert (
        two.roles["actor"].footprint.shape.numel - one.roles["actor"].footprint.shape.numel
        == embedding
    )
    assert two.rollout.weights - one.rollout.weights == 2 * embedding
    assert (
        two.roles["actor"].footprint.moments - one.roles["actor"].footprint.moments == embedding + 4
    )  # the 4 bytes are its step count


def test_critic_with_its_own_settings(tmp_path: Path):
    """Give the critic its own model, optimizer, mini-batch and passes."""
    LLAMA_8B.save_pretrained(tmp_path / "critic")
    own = (
        f"critic.model.path={tmp_path / 'critic'}",
        "critic.optim.optimizer=Muon",
        "critic.ppo_mini_batch_size=16",
        "critic.ppo_max_token_len_per_gpu=65536",
    )
    plan = plan_memory(make_config(tmp_path, QWEN_7B, *PPO, *own), 141)

    critic = plan.roles["critic"].footprint
    assert critic.shape.family == "llama"
    assert critic.setup.optimizer == "Muon"
    assert critic.moments < 2 * critic.parameters
    update, values = (
        phase_of(plan, "critic", phase).passes for phase in ("critic update", "values")
    )
    assert update is not None

    assert values is not None
    assert update.tokens == 16 * 8 // 8 * 2048, "limited by the mini-batch"
    assert values.tokens == 65_536


def test_offloaded_reference_is_loaded_for_its_pass(tmp_path: Path):
    off = "actor_rollout_ref.ref.fsdp_config.param_offload=True"
    plan = plan_memory(make_config(tmp_path, QWEN_7B, *PPO, off), 80)
    holding = {
        (phase.role, phase.phase) for phase in plan.phases if "reference parameters" in phase.device
    }
    assert holding == {("reference", "load"), ("reference", "reference log-probs")}
    assert (
        phase_of(plan, "actor", "rollout").host == 8 * plan.roles["reference"].footprint.on_host > 0
    )

    assert phase_of(plan, "critic", "load").host == plan.roles["critic"].full_bytes, (
        "it is loaded later"
    )
    own_class = ("critic.model.custom_cls.path=critic.py", "critic.model.custom_cls.name=Critic")
    plan = plan_memory(make_config(tmp_path, QWEN_7B, *PPO, *own_class), 80)
    assert phase_of(plan, "critic", "load").host == 8 * plan.roles["critic"].full_bytes, (
        "every process reads it"
    )


def test_hf_generate_has_no_pages(tmp_path: Path):
    config = make_config(
        tmp_path,
        QWEN_7B,
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.max_num_seqs=8",
    )
    rollout = plan_memory(config, 80).rollout
    assert rollout.page_memory == 8 * 2048 * 28 * 2 * 4 * 128 * 2
    assert rollout.working > 8 * 28 * 1024**2 * 8, "eager attention of all prompts at once"
    assert rollout.at_once == 8


def test_old_log_probs_with_rollout_correction(tmp_path: Path):
    def phases(*overrides: str) -> set[str]:
        return {
            phase.phase
            for phase in plan_memory(make_config(tmp_path, QWEN_7B, *overrides), 80).phases
        }

    correction = "algorithm.rollout_correction"
    assert "old log-probs" in phases(f"{correction}.rollout_is=token")
    assert "old log-probs" not in phases(
        f"{correction}.bypass_mode=True", "actor_rollout_ref.actor.ppo_epochs=2"
    )


def test_teacher_passes_and_its_head_on_the_actor(tmp_path: Path):
    """Plan a 7B student and an 8B teacher with exact divergence, on shared and separate ranks."""
    LLAMA_8B.save_pretrained(tmp_path / "teacher")
    distilling = [
        "distillation.enabled=True",
        f"distillation.teacher_models.teacher_model.model_path={tmp_path / 'teacher'}",
        "distillation.distillation_loss.loss_mode=reverse_kl",
        "data.train_batch_size=240",
    ]
    plain = plan_memory(make_config(tmp_path / "plain", QWEN_7B, distilling[-1]), 141)
    shared = plan_memory(make_config(tmp_path / "shared", QWEN_7B, *distilling), 141)
    apart = plan_memory(
        make_config(tmp_path / "apart", QWEN_7B, *distilling, "trainer.placement.teacher=[6,7]"),
        141,
    )

    numel = shared.roles["teacher"].footprint.shape.numel
    assert numel == pytest.approx(8.03e9, rel=0.001)
    assert shared.roles["teacher"].footprint.parameters == pytest.approx(2 * numel / 8, rel=0.001)
    assert apart.roles["teacher"].footprint.parameters == pytest.approx(2 * numel / 2, rel=0.001)
    assert shared.roles["teacher"].footprint.moments == 0

    head = 2 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    for plan in (shared, apart):
        update = phase_of(plan, "actor", "actor update")
        assert update.device["head of the teacher"] == head
        assert update.device["divergence from the teacher"] > 2 * 4096 * update.passes.predictions
        assert "head of the teacher" in phase_of(plan, "actor", "rollout").device
    passes = phase_of(apart, "teacher", "teacher log-probs")
    assert "head of the teacher" not in passes.device
    assert "actor parameters" not in passes.device
    assert "actor parameters" in phase_of(shared, "teacher", "teacher log-probs").device
    assert "head of the teacher" not in phase_of(plain, "actor", "actor update").device

    sampled = [*distilling, "distillation.distillation_loss.loss_mode=k3"]
    estimated = plan_memory(make_config(tmp_path / "sampled", QWEN_7B, *sampled), 141)
    assert "head of the teacher" not in phase_of(estimated, "actor", "actor update").device


def test_planned_teacher_matches_the_worker(tmp_path: Path):
    save_tiny(tmp_path / "actor", "llama")
    save_tiny(tmp_path / "teacher", "qwen2", hidden_size=48)
    config = make_config(
        tmp_path / "unused",
        QWEN_7B,
        f"actor_rollout_ref.model.path={tmp_path / 'actor'}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=null",
        "data.train_batch_size=4",
        "distillation.enabled=True",
        f"distillation.teacher_models.teacher_model.model_path={tmp_path / 'teacher'}",
    )

    worker = TeacherWorker(
        config.distillation,
        config.actor_rollout_ref,
        tokenizer=tiny_tokenizer(),
        device=torch.device("cpu"),
    )
    planned = plan_memory(config).roles["teacher"]
    assert planned.footprint.shape == worker.engine.footprint.shape

    assert planned.footprint.setup == worker.engine.footprint.setup


def plans_of_a_duel(folder: Path, others: str, *keys: str) -> tuple[MemoryPlan, MemoryPlan]:
    """Plan a trained 7B player in an environment, alone and with `others`, of which one is 8B."""
    LLAMA_8B.save_pretrained(folder / "other")
    agent = "actor_rollout_ref.rollout.agent"
    keys = (f"{agent}.environment.name=duel.py:Duel", *keys)
    policies = f"{agent}.policies={{player: {{trained: true}}, {others}}}"
    alone = plan_memory(make_config(folder / "alone", QWEN_7B, *keys), 141)
    return alone, plan_memory(make_config(folder / "both", QWEN_7B, *keys, policies), 141)


def test_frozen_policies_take_room_on_the_host_and_while_agents_play(tmp_path: Path):
    """Plan a 7B actor against an 8B opponent and a copy of itself."""
    opponents = f"opponent: {{path: '{tmp_path / 'other'}'}}, old: {{path: self, update_freq: 2}}"
    alone, three = plans_of_a_duel(tmp_path, opponents, "trainer.n_gpus_per_node=1")

    numbers = round(8.03e9) + alone.roles["actor"].footprint.shape.numel
    rollout = phase_of(three, "actor", "rollout")
    assert rollout.device["other policies"] == pytest.approx(2 * numbers, rel=0.001)
    assert three.rollout.page_memory < alone.rollout.page_memory
    for phase in ("rollout", "actor update"):
        added = phase_of(three, "actor", phase).host - phase_of(alone, "actor", phase).host
        assert added == pytest.approx(2 * numbers, rel=0.001)
    assert "other policies" not in phase_of(three, "actor", "actor update").device


def test_a_second_trained_policy_has_parameters_moments_and_an_update(tmp_path: Path):
    partner = f"other: {{trained: true, path: '{tmp_path / 'other'}'}}"
    alone, both = plans_of_a_duel(tmp_path, partner, "actor_rollout_ref.actor.use_kl_loss=False")

    partner = both.roles["policy_other"].footprint
    assert partner.shape.numel == pytest.approx(8.03e9, rel=0.001)
    own = phase_of(both, "policy_other", "actor update")
    assert own.device["policy_other moments"] == partner.moments > 0
    assert "actor moments" in own.device
    assert phase_of(both, "actor", "actor update").device["policy_other parameters"] > 0
    assert phase_of(both, "actor", "rollout").device["other policies"] == pytest.approx(
        2 * 8.03e9, rel=0.001
    )
    assert "other policies" not in phase_of(alone, "actor", "rollout").device


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_plan_trains_no_tower_that_is_frozen(tmp_path: Path, adapted: bool):
    # Layers of this family's tower and of its language model have the same names.
    save_tiny_vision(tmp_path / "actor", "gemma3")
    adapters = ["actor_rollout_ref.model.lora_rank=4"]
    adapters.append("actor_rollout_ref.model.target_modules=[q_proj]")
    config = make_config(
        tmp_path / "unused",
        QWEN_7B,
        *(adapters if adapted else ()),
        f"actor_rollout_ref.model.path={tmp_path / 'actor'}",
        "actor_rollout_ref.actor.freeze_vision_tower=True",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=null",
        "data.train_batch_size=4",
    )
    plan = plan_memory(config)
    worker = ActorWorker(
        config.actor_rollout_ref,
        total_steps=5,
        device=torch.device("cpu"),
        tokenizer=tiny_tokenizer(),
    )

    assert plan.roles["actor"].footprint.shape == worker.engine.footprint.shape
    (tower,) = vision_towers(worker.engine.hf_model)
    assert not any(weight.requires_grad for weight in tower.parameters())
    state = "frozen: " if adapted else "frozen, with a trained connector: "
    assert state in render(plan, [])
