"""Contradictions fail before weights are loaded, with a message that names keys and values."""

import ast
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import verl.config
from tests.config.conftest import BASE, Load
from verl.config import ActorConfig, TrainConfig, config_from_dict, load_config, validate
from verl.config.keys import keys_of
from verl.config.load import ROOTS
from verl.config.rule_table import KEY_IN_MESSAGE
from verl.config.validate import contradictions
from verl.utils.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            f"data.train_batch_size=10 {ACTOR}.ppo_mini_batch_size=4",
            "divisible.*10 and 4.*8 or 12.*size 5",
        ),
        (f"{ACTOR}.ppo_mini_batch_size=16", "must not exceed data.train_batch_size.*16 and 8"),
        ("critic.ppo_mini_batch_size=3", "divisible by critic.ppo_mini_batch_size, got 8 and 3"),
        ("data.train_batch_size=0", "data.train_batch_size must be above 0 with .*sync, got 0"),
        (f"{ROLLOUT}.max_model_len=1000", r"max_model_len must hold.*512 \+ 512.*got 1000.*1024"),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
            "must hold one whole sequence.*got 1000.*at least 1024",
        ),
        (
            "critic.forward_max_token_len_per_gpu=100",
            "critic.forward_max_token_len_per_gpu must hold",
        ),
        ("algorithm.adv_estimator=grpo", "grpo compares.*n of at least 2, got 1"),
        ("critic.enable=False", "gae needs a critic"),
        ("critic.rollout_n=5", "critic.rollout_n must equal .*5 and 1"),
        (
            f"algorithm.adv_estimator=grpo {ROLLOUT}.n=2 trainer.critic_warmup=3",
            "critic_warmup=3.*has none",
        ),
        (f"{ROLLOUT}.temperature=0", "samples that vary.*temperature=0"),
        (f"{ROLLOUT}.do_sample=False", "samples that vary.*do_sample=False"),
        (f"{ROLLOUT}.temperature=-1", "temperature must be at least 0"),
        (f"{ROLLOUT}.top_p=1.5", "top_p must be above 0 and at most 1, got 1.5"),
        (f"{ROLLOUT}.top_p=0", "top_p must be above 0"),
        (f"{ROLLOUT}.top_k=-2", "top_k must be at least -1"),
        (f"{ROLLOUT}.min_p=2", "min_p must be at least 0 and at most 1"),
        (f"{ROLLOUT}.val_kwargs.top_p=0", "val_kwargs.top_p must be above 0"),
        (
            f"{ROLLOUT}.gpu_memory_utilization=1.5",
            "gpu_memory_utilization must be above 0 and at most 1",
        ),
        (f"{ROLLOUT}.dtype=float8", "dtype: unknown value 'float8'"),
        (f"{ACTOR}.clip_ratio=-0.1", "clip_ratio must be at least 0"),
        (f"{ACTOR}.clip_ratio_low=1.2", "clip_ratio_low is a distance below.*1.2"),
        (f"{ACTOR}.clip_ratio_c=0.5", "clip_ratio_c must be above 1"),
        (f"{ACTOR}.policy_loss.clip_cov_lb=9", "clip_cov_lb must not exceed"),
        (f"{ACTOR}.kl_loss_type=k4", "kl_loss_type: unknown value 'k4'.*Nearest known"),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_penalty=full",
            "algorithm.kl_penalty=full needs.*low_var_kl",
        ),
        (
            f"{ACTOR}.loss_agg_mode=token_mean",
            "loss_agg_mode: unknown value 'token_mean'. Nearest known: token-mean",
        ),
        (f"{ACTOR}.kl_loss_coef=-1", "kl_loss_coef must be at least 0"),
        (
            f"{ACTOR}.ulysses_sequence_parallel_size=2",
            "actor.ulysses.* must divide the number of ranks, got 2 and 1.*to 1",
        ),
        (
            f"{ACTOR}.use_kl_loss=True {ACTOR}.ulysses_sequence_parallel_size=2",
            "actor.ulysses.* must divide",
        ),
        (
            f"{MODEL}.enable_activation_offload=True {MODEL}.enable_gradient_checkpointing=False",
            "inputs of checkpointed",
        ),
        (f"{ACTOR}.grad_clip=0", "grad_clip must be above 0"),
        (f"{ACTOR}.optim.lr=-1", "optim.lr must be at least 0"),
        (f"{ACTOR}.optim.lr=nan", "optim.lr must be at least 0"),
        (f"{ACTOR}.optim.betas=[0.9]", "betas must be two numbers"),
        ("critic.optim.betas=[0.9,1.0]", "critic.optim.betas must be two numbers"),
        (f"{ACTOR}.optim.warmup_style=linear", "warmup_style: unknown value 'linear'"),
        ("algorithm.kl_penalty=k9", "kl_penalty: unknown value"),
        ("algorithm.kl_ctrl.type=fixd", "kl_ctrl.type: unknown value 'fixd'. Nearest known: fixed"),
        ("algorithm.gamma=1.1", "gamma must be at least 0 and at most 1"),
        ("data.truncation=middel", "truncation: unknown value 'middel'. Nearest known: middle"),
        ("data.custom_cls.path=x.py", "custom_cls.path and data.custom_cls.name go together"),
        (
            "data.sampler.class_name=Mine",
            "sampler.class_path and data.sampler.class_name go together",
        ),
        ("data.dataset_name=toy", "both name the training data"),
        (
            "critic.model.custom_cls.path=x.py",
            "custom_cls.path and critic.model.custom_cls.name go together",
        ),
        ("reward_model.enable=True", "enable=True needs reward_model.model.path"),
        (
            "reward_model.enable=True reward_model.model.path=rm reward_model.judge.url=http://x "
            "reward_model.judge.model=m",
            "both give the score",
        ),
        ("reward_model.on_error=ignore", "on_error: unknown value 'ignore'"),
        ("reward_model.timeout_s=0", "timeout_s must be above 0"),
        (
            "custom_reward_function.path=no/such/reward.py",
            "custom_reward_function.path must be a Python file",
        ),
        (
            "trainer.max_actor_ckpt_to_keep=-1",
            r"must be above 0, got -1\. Or give null \(newest checkpoints kept; null: all\)\.",
        ),
        ("trainer.max_critic_ckpt_to_keep=-1", r"got -1\. Or give null \(.*; null: all\)"),
        ("trainer.resume_mode=always", "resume_mode: unknown value 'always'"),
        ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
        (
            "trainer.resume_from_path=some/folder",
            "is read with trainer.resume_mode=resume_path only",
        ),
        (
            "trainer.resume_mode=resume_path trainer.resume_from_path=no/such",
            "found none at 'no/such'",
        ),
        (
            f"{ACTOR}.checkpoint.save_contents=[model,optimiser]",
            f"^{ACTOR}.checkpoint.save_contents: unknown part 'optimiser'. Known: [a-z_, ]+\\.$",
        ),
        (
            f"{ACTOR}.checkpoint.load_contents=[model,optimiser]",
            f"^{ACTOR}.checkpoint.load_contents: unknown part 'optimiser'",
        ),
        ("trainer.total_epochs=null", "The run has no end"),
        ("trainer.logger=[console,wandbb]", "unknown 'wandbb'. Nearest known: wandb"),
        (
            "trainer.default_local_dir='s3://bucket/x'",
            "default_local_dir must be a local or a mounted folder",
        ),
        (
            "trainer.experiment_name=../other",
            "must not lead out of it by '..', got 'verl_examples' and '../other'",
        ),
        (f"trainer.experiment_name={'x' * 300}", "at most 255 bytes in it, got 300 in 'x{40} ...'"),
        (f"trainer.experiment_name='{'{x}' * 99}'", "at most 255 bytes in it, got 297 in '{x}"),
        (f"trainer.project_name={'é' * 128}", "at most 255 bytes in it, got 256 in 'é"),
        (f"trainer.default_local_dir=out/{'x' * 256}", "at most 255 bytes in it, got 256 in 'x"),
        ("trainer.experiment_name=''", "must not be empty, .* got 'verl_examples' and ''"),
        ("trainer.project_name=''", "must not be empty, .* got '' and"),
        ("trainer.nnodes=2", "nnodes=2 needs trainer.n_gpus_per_node"),
        (
            "trainer.n_gpus_per_node=1e9",
            "n_gpus_per_node must be above 0 and at most 1024, got 1000000000",
        ),
        (
            "trainer.n_gpus_per_node=1e30",
            r"expects a whole number or null, got 1\d+ \(int\). The largest is 922",
        ),
        (f"{ACTOR}.optim.lr=inf", "optim.lr must be at least 0 and finite, got inf"),
        (f"{ACTOR}.entropy_coeff=-inf", "entropy_coeff must be finite, got -inf"),
        (f'{ACTOR}.loss_extra=[{{"name":"a","coef":.nan}}]', "must be finite, got nan for 'a'"),
        ("algorithm.gdpo_reward_weights=[1.0,.nan]", r"weights must be a number, got \[1.0, nan\]"),
        ("trainer.val_only=-7", r"val_only expects True or False, got -7 \(int\)"),
        ("trainer.async_save=2", r"async_save expects True or False, got 2 \(int\)"),
        ("trainer.save_freq=0", "save_freq must be positive, or -1"),
        ("trainer.device=npu", "device: unknown value 'npu'"),
        (
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            "must divide the number of ranks, got 2 and 1. Set it to 1",
        ),
        (f"{ACTOR}.strategy=megatron", "no Megatron backend.*fsdp.*tensor_model_parallel_size"),
        ("critic.strategy=megatron", "critic.strategy=megatron: there is no Megatron backend"),
    ],
)
def test_contradictions_are_explained(build: Load, overrides: str, message: str):
    with pytest.raises(ConfigError, match=f"(?s){message}") as error:
        build(*overrides.split())
    assert "problems in the configuration" not in str(error.value), "one mistake, one message"


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.multi_turn.completion_callback=mine.Callback",
        "reward_model.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.hybrid_engine=False",
        "data.datagen.path=gen.py",
        "trainer.default_hdfs_dir=hdfs://x",
    ],
)
def test_unavailable_features_are_refused_with_an_alternative(build: Load, override: str):
    key = override.partition("=")[0]
    with pytest.raises(
        ConfigError, match=f"(?s){key}.*not available in this version.*Set {key}="
    ) as error:
        build(override)
    assert "problems in the configuration" not in str(error.value)


def test_cispo_may_be_without_a_lower_bound(build: Load):
    config = build(f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10", *GRPO)
    assert config.actor_rollout_ref.actor.clip_ratio_low == 10


def test_several_problems_give_one_error(load: Load):
    missing = "actor_rollout_ref.hybrid_engine=False"
    with pytest.raises(
        ConfigError, match="(?s)3 problems.*- .*hdfs.*- .*hybrid|3 problems.*hybrid.*hdfs"
    ):
        load("trainer.default_hdfs_dir=hdfs://x", missing, "trainer.test_freq=3")


def test_model_and_data_must_be_named():
    with pytest.raises(ConfigError, match="(?s)model.path is not set.*'toy'.*No training data"):
        load_config([])
    with pytest.raises(ConfigError, match="model.path has an empty path"):  # from an unset $MODEL
        load_config(["actor_rollout_ref.model.path=", "data.train_files=a"])


@pytest.mark.parametrize(
    ("root", "override", "message"),
    [
        ("sft_trainer", "optim.lr_scheduler=linear", "^optim.lr_scheduler: unknown value 'linear'"),
        ("sft_trainer", "optim.warmup_steps_ratio=2", "^optim.warmup_steps_ratio must be at least"),
        ("sft_trainer", "optim.warmup_style=linear", "^optim.warmup_style: unknown value"),
        (
            "sft_trainer",
            "engine.ulysses_sequence_parallel_size=2",
            "^engine.ulysses_sequence_parallel_size must divide",
        ),
        (
            "ppo_trainer",
            f"{ACTOR}.optim.lr_scheduler_type=linear",
            f"^{ACTOR}.optim.lr_scheduler_type: unknown",
        ),
    ],
)
def test_an_error_names_the_key_that_the_user_wrote(root: str, override: str, message: str):
    base = BASE if root == "ppo_trainer" else ("model.path=toy", "data.train_files=x.parquet")
    arguments = [*base, override]
    with pytest.raises(ConfigError, match=message):
        load_config(arguments, root=root)

    values = OmegaConf.to_container(OmegaConf.from_dotlist(arguments))
    with pytest.raises(ConfigError, match=message):
        config_from_dict(values, root=root)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("asked", ["trainer.val_only=True", "trainer.test_freq=5"])
def test_command_line_validation_needs_files(asked: str, load: Load, build: Load):
    with pytest.raises(
        ConfigError, match=f"{asked} asks for validation, but data.val_files is not set"
    ):
        load(asked)
    build(asked)


@pytest.mark.parametrize("key", ["train_files", "val_files"])
def test_an_empty_file_is_reported_with_the_configuration(build: Load, tmp_path: Path, key: str):
    file = tmp_path / "empty.parquet"
    file.touch()
    with pytest.raises(ConfigError, match=rf"data\.{key}: '.*empty\.parquet' is empty \(0 bytes\)"):
        build(f"data.{key}=[{file}]")
    with pytest.raises(ConfigError, match=r"is empty \(0 bytes\)"):
        load_config([f"data.{key}={file}", "model.path=toy"], root="sft_trainer")


def test_a_batch_of_zero_is_the_one_that_fully_asynchronous_training_requires(build: Load):
    script = ["data.train_batch_size=0", "data.gen_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=8"]
    mode = "trainer.mode=fully_async"
    assert build(*script, mode).data.train_batch_size == 8
    required = build(*script, mode, "async_training.require_batches=4")
    assert required.data.train_batch_size == 32

    with pytest.raises(ConfigError, match="above 0 with trainer.mode=sync, got 0"):
        build(*script)
    with pytest.raises(ConfigError, match="must be whole numbers, got 1 and None"):
        build(*script[:2], mode)


@pytest.mark.parametrize("section", [MODEL, "critic.model"])
def test_oversized_lora_rank_is_rejected(build: Load, section: str):
    with pytest.raises(ConfigError, match=r"lora_rank must be at least 0 and at most 65536"):
        build(f"{section}.lora_rank=999999999999")


def test_unused_sections_are_not_validated(build: Load):
    grpo = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")
    config = build(
        *grpo, "critic.ulysses_sequence_parallel_size=2", "critic.ppo_max_token_len_per_gpu=1"
    )
    assert not config.needs_critic
    build("actor_rollout_ref.ref.ulysses_sequence_parallel_size=2")
    with pytest.raises(ConfigError, match="ref.ulysses_sequence_parallel_size"):
        build("actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", f"{ACTOR}.use_kl_loss=True")


def test_group_sizes_divide_the_launched_ranks(build: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    ulysses = f"{ACTOR}.ulysses_sequence_parallel_size"
    # Two ranks share a micro-batch, so a budget of half a sequence each is enough.
    build(
        f"{ulysses}=2", f"{ACTOR}.fsdp_config.fsdp_size=2", f"{ACTOR}.ppo_max_token_len_per_gpu=512"
    )
    build(f"{ACTOR}.fsdp_config.fsdp_size=8")  # capped at the number of ranks
    with pytest.raises(
        ConfigError, match="(?s)got 3 and 4.*Set it to 2.*fsdp_size must divide.*got 3 and 4"
    ):
        build(f"{ulysses}=3", f"{ACTOR}.fsdp_config.fsdp_size=3")
    with pytest.raises(ConfigError, match="must hold one whole sequence.*got 511.*at least 512"):
        build(f"{ulysses}=2", f"{ACTOR}.ppo_max_token_len_per_gpu=511")


def test_mini_batches_divide_over_the_launched_ranks(build: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    odd = (f"{ROLLOUT}.n=3", "data.train_batch_size=6")
    mini = f"{ACTOR}.ppo_mini_batch_size"
    build(*odd, f"{mini}=2")
    build(f"{ROLLOUT}.n=3", "data.train_batch_size=3", f"{mini}=3")  # the whole batch is padded
    with pytest.raises(ConfigError, match="by the 2 ranks .* got 3 . 3 = 9. Set .*_size=2, or"):
        build(*odd, f"{mini}=3")
    with pytest.raises(ConfigError, match="critic.ppo_mini_batch_size .* got 1 . 1 = 1. Leave it"):
        build(
            "algorithm.adv_estimator=gae",
            f"{ROLLOUT}.n=1",
            "data.train_batch_size=3",
            f"{mini}=3",
            "critic.ppo_mini_batch_size=1",
        )


def test_row_micro_batches_need_no_token_budget(build: Load):
    rows = ("ppo_micro_batch_size_per_gpu=2", "ppo_max_token_len_per_gpu=100")
    with pytest.raises(ConfigError, match="rollout.log_prob_max_token_len_per_gpu must hold"):
        build(*(f"{ACTOR}.{row}" for row in rows))
    build(*(f"{ACTOR}.{row}" for row in rows), f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2")


def test_greedy_sampling_is_accepted_without_training(build: Load):
    build("trainer.val_only=True", "data.val_files=val.parquet", f"{ROLLOUT}.temperature=0")


def test_user_trackers_and_reward_files(build: Load, tmp_path: Path):
    build("trainer.logger=[mine]", f"{MODEL}.external_lib=my_trackers")
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
    )
    for path in (str(reward), f"file://{reward}"):
        assert build(f"custom_reward_function.path={path}").custom_reward_function.path == path


def test_resume_from_a_folder(build: Load, tmp_path: Path):
    config = build("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}")
    assert config.trainer.resume_from_path == str(tmp_path)


def test_a_missing_checkpoint_names_those_next_to_it(build: Load, tmp_path: Path):
    for step in (4, 10):
        (tmp_path / f"global_step_{step}").mkdir()
    asked = f"trainer.resume_from_path={tmp_path}/global_step_5"
    with pytest.raises(ConfigError, match=r"Found there: global_step_4, global_step_10\."):
        build("trainer.resume_mode=resume_path", asked)


@pytest.mark.parametrize("braces", ["{x}", "{trainer.mode}", "{", "{0}"])
def test_braces_in_the_names_of_files_stay_as_they_are(build: Load, tmp_path: Path, braces: str):
    (tmp_path / f"global_step_{braces}").mkdir()
    asked = f"trainer.resume_from_path={tmp_path}/none"
    with pytest.raises(ConfigError) as error:
        build("trainer.resume_mode=resume_path", asked)
    assert f"Found there: global_step_{braces}." in str(error.value)


def test_configuration_built_in_code_is_validated():
    config = TrainConfig()
    config.actor_rollout_ref.model.path = "toy"
    config.data.train_files = ["a"]
    validate(config)
    config.actor_rollout_ref.actor = ActorConfig(ppo_mini_batch_size=3)
    with pytest.raises(ConfigError, match="divisible"):
        validate(config)


def test_defaults_are_within_their_bounds(build: Load, log: pytest.LogCaptureFixture):
    assert build() == load_config(list(BASE))
    assert not log.records
    assert len(keys_of(TrainConfig)) > 270


def test_program_may_set_a_mapping_to_none():
    config = TrainConfig()
    config.data.dataset_name = "toy"
    before = contradictions(config)
    config.reward_model.rule_kwargs = None
    assert contradictions(config) == before


def test_messages_of_tables_name_keys_that_exist():
    known = {path for root in ROOTS.values() for path in keys_of(root.schema)}
    named = set[str]()
    for file in Path(verl.config.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and is_table(function):
                texts_of_rows = set[str]()
                for node in ast.walk(function):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        named |= {path for path, _ in KEY_IN_MESSAGE.findall(node.value)}
                    elif isinstance(node, ast.Dict):
                        texts_of_rows |= {ast.literal_eval(key) for key in node.keys if key}
                named -= texts_of_rows
    assert len(named) > 20
    assert named <= known


def is_table(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "table" for decorator in function.decorator_list)
