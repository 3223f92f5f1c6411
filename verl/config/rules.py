"""Contradictions between keys. Each rule yields one message per contradiction: expectation, fact,
way out."""

from pathlib import Path
from typing import Any

from verl.config.agent_rules import RULES as AGENT_RULES
from verl.config.agent_rules import agent_doubts
from verl.config.algorithm_rules import RULES as ALGORITHM_RULES
from verl.config.algorithm_rules import algorithm_doubts
from verl.config.async_rules import RULES as ASYNC_RULES
from verl.config.async_rules import async_doubts
from verl.config.batch_rules import (
    batch_divides_into_mini_batches,
    mini_batches_divide_over_ranks,
    ranks_can_be_divided,
    sequences_fit,
)
from verl.config.checkpoint import CHECKPOINT_PARTS
from verl.config.choices import TRACKERS
from verl.config.keys import value_at
from verl.config.partners import partners_can_learn
from verl.config.placement import (
    inactive_sections,
    placement_doubts,
    roles_are_placed,
    trained_sections,
)
from verl.config.reward_rules import reward_doubts, reward_has_what_it_needs
from verl.config.rollout import RolloutConfig, SamplingValConfig
from verl.config.rule_table import Messages, Rows, Rule, table
from verl.config.toy_defaults import PACKAGED_TASKS
from verl.config.train import TrainConfig
from verl.config.unread import unread_keys
from verl.utils.registry import nearest_names

_MOST_BYTES_OF_A_NAME = 255  # of a file or folder, in the file systems that are in use


def training_data_is_named(config: TrainConfig) -> Messages:
    data = config.data
    only_validates = config.trainer.val_only and data.val_files
    if not data.train_files and data.dataset_name is None and not only_validates:
        yield (
            "No training data. Set data.train_files (Parquet, JSON lines) or data.dataset_name=toy."
        )


@table
def model_and_data_are_named(config: TrainConfig) -> Rows:
    name = config.data.dataset_name
    hint = ""
    is_known = name is None or name in PACKAGED_TASKS or Path(name).expanduser().exists()
    if not is_known:
        hint = (
            " A packaged task sets one, too: data.dataset_name is one of "
            f"{', '.join(PACKAGED_TASKS)}; got '{{data.dataset_name}}'."
        )
    yield (
        not config.actor_rollout_ref.model.path,  # also an empty text: $MODEL that is not set
        "actor_rollout_ref.model.path is not set. Give a folder or hub name of a Hugging Face "
        f"causal LM, or 'toy' for the packaged one.{hint}",
    )
    yield (
        bool(config.data.train_files) and config.data.dataset_name is not None,
        "data.train_files and data.dataset_name both name the training data, got "
        "{data.train_files} and '{data.dataset_name}'. Set one of them.",
    )


def own_classes_have_names(config: TrainConfig) -> Messages:
    for path_key, name_key in (
        ("data.custom_cls.path", "data.custom_cls.name"),
        ("critic.model.custom_cls.path", "critic.model.custom_cls.name"),
        ("data.sampler.class_path", "data.sampler.class_name"),
    ):
        path = value_at(config, path_key)
        name = value_at(config, name_key)
        if (path is None) != (name is None):
            yield f"{path_key} and {name_key} go together, got {path!r} and {name!r}. Set both."


def activations_are_checkpointed(config: TrainConfig) -> Messages:
    for section in ("actor_rollout_ref.model", "critic.model"):
        if section.startswith(inactive_sections(config)):
            continue
        model = value_at(config, section)
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            yield (
                f"{section}.enable_activation_offload keeps the inputs of checkpointed layers on "
                f"the host, but {section}.enable_gradient_checkpointing=False. Set that to True, "
                "or the former to False."
            )


@table
def algorithm_has_what_it_needs(config: TrainConfig) -> Rows:
    algorithm = config.algorithm
    roles = config.actor_rollout_ref
    trains_critic = config.needs_critic or config.trainer.val_only
    has_no_critic = config.critic.enable is False and not config.distillation.is_whole_loss
    replays = roles.actor.router_replay.mode == "R3"
    rollout = roles.rollout
    fact = "temperature=0" if rollout.temperature == 0 else "do_sample=False"

    return (
        (
            algorithm.adv_estimator == "gae" and has_no_critic,
            "algorithm.adv_estimator=gae needs a critic, got critic.enable=False. Leave "
            "critic.enable unset, or set algorithm.adv_estimator=grpo.",
        ),
        (
            config.needs_critic and config.critic.rollout_n != rollout.n,
            "critic.rollout_n must equal actor_rollout_ref.rollout.n, got {critic.rollout_n} and "
            "{actor_rollout_ref.rollout.n}. Leave critic.rollout_n unset.",
        ),
        (
            config.trainer.critic_warmup > 0 and not trains_critic,
            "{trainer.critic_warmup=} trains the critic alone at first, but this run has none. Set "
            "trainer.critic_warmup=0.",
        ),
        (
            replays != rollout.enable_rollout_routing_replay,
            "actor_rollout_ref.actor.router_replay.mode=R3 replays the experts that "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=true records, got mode="
            "{actor_rollout_ref.actor.router_replay.mode} and "
            "{actor_rollout_ref.rollout.enable_rollout_routing_replay}. Set both, or neither.",
        ),
        (
            algorithm.use_kl_in_reward and algorithm.kl_penalty == "full",
            "algorithm.kl_penalty=full needs both policies' whole distribution before the update. "
            "Set algorithm.kl_penalty=low_var_kl, which is unbiased as well, or add the exact KL "
            "to the loss: actor_rollout_ref.actor.use_kl_loss=True and kl_loss_type=full.",
        ),
        (
            is_greedy(rollout) and not config.trainer.val_only,
            f"Training needs samples that vary, got actor_rollout_ref.rollout.{fact} (greedy). Set "
            "actor_rollout_ref.rollout.temperature=1.0 and do_sample=True; for greedy validation "
            "use actor_rollout_ref.rollout.val_kwargs.",
        ),
    )


def losses_make_sense(config: TrainConfig) -> Messages:
    actor = config.actor_rollout_ref.actor
    prefix = "actor_rollout_ref.actor"
    # CISPO has no lower bound: its published settings write a distance of 10.
    has_lower_bound = actor.policy_loss.loss_mode != "cispo"
    for key in (f"{prefix}.clip_ratio_low", f"{prefix}.clip_ratio"):
        low = value_at(config, key)
        if low > 1 and has_lower_bound:
            yield (
                f"{key} is a distance below a ratio of 1 and cannot exceed 1, got {low}. "
                "0.2 is usual."
            )
            break

    if actor.policy_loss.clip_cov_lb > actor.policy_loss.clip_cov_ub:
        yield (
            f"{prefix}.policy_loss.clip_cov_lb must not exceed clip_cov_ub, got "
            f"{actor.policy_loss.clip_cov_lb} and {actor.policy_loss.clip_cov_ub}. Swap them."
        )

    for key in (f"{prefix}.optim.betas", "critic.optim.betas"):
        betas = value_at(config, key)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield f"{key} must be two numbers in [0, 1), got {betas}. [0.9,0.999] is usual."


def is_greedy(sampling: RolloutConfig | SamplingValConfig) -> bool:
    """Return whether every token is the most likely one."""
    return sampling.temperature == 0 or not sampling.do_sample


def adapters_can_be_trained(config: TrainConfig) -> Messages:
    for section, key in (
        ("actor_rollout_ref.model", "actor_rollout_ref.actor.optim.optimizer"),
        ("critic.model", "critic.optim.optimizer"),
    ):
        if section.startswith(inactive_sections(config)):
            continue
        model = value_at(config, section)
        forms = "must be a list of names, a regular expression, or"
        targets = model.target_modules
        if not _names_modules(targets):
            yield (
                f"{section}.target_modules {forms} all-linear, got {targets!r}. Set "
                f"{section}.target_modules=all-linear."
            )
        excluded = model.exclude_modules
        if excluded is not None and not _names_modules(excluded):
            yield (
                f"{section}.exclude_modules {forms} null, got {excluded!r}. Set "
                f"{section}.exclude_modules=null to exclude none."
            )

        if model.lora_rank > 0 and value_at(config, key) == "Muon":
            yield (
                f"{key}=Muon orthogonalises updates of whole weight matrices, which "
                f"{section}.lora_rank={model.lora_rank} leaves frozen. Set {key}=AdamW, or "
                f"{section}.lora_rank=0."
            )


def _names_modules(value: Any) -> bool:
    """Return whether a value is a text, or a list of at least one text."""
    entries = value if isinstance(value, list) else [value]
    return bool(entries) and all(isinstance(entry, str) for entry in entries)


def _checkpoints_next_to(folder: str | None) -> str:
    """Return a sentence that names the checkpoints in the parent of a folder; "" without any."""
    if folder is None:
        return ""
    found = [path.name for path in Path(folder).expanduser().parent.glob("global_step_*")]
    if not found:
        return ""
    found.sort(key=lambda name: (len(name), name))
    return f" Found there: {', '.join(found)}."


@table
def run_has_an_end_and_a_start(config: TrainConfig) -> Rows:
    trainer = config.trainer
    folder = trainer.resume_from_path
    by_path = trainer.resume_mode == "resume_path"

    return (
        (
            trainer.total_training_steps is None and trainer.total_epochs is None,
            "The run has no end. Set trainer.total_training_steps (max_steps) or "
            "trainer.total_epochs.",
        ),
        (
            by_path and folder is None,
            "trainer.resume_mode=resume_path needs trainer.resume_from_path, which is not set. Set "
            "it to a global_step_N folder, or trainer.resume_mode=auto.",
        ),
        (
            folder is not None and not by_path,
            "trainer.resume_from_path='{trainer.resume_from_path}' is read with "
            "trainer.resume_mode=resume_path only, got '{trainer.resume_mode}'. Set "
            "trainer.resume_mode=resume_path.",
        ),
        (
            folder is not None and by_path and not Path(folder).is_dir(),
            "trainer.resume_from_path must be a global_step_N folder, found none at "
            "'{trainer.resume_from_path}'.{others}",
            {"others": _checkpoints_next_to(folder)},
        ),
        (
            "://" in trainer.default_local_dir,
            "trainer.default_local_dir must be a local or a mounted folder, got "
            "'{trainer.default_local_dir}'.",
        ),
        (
            not (trainer.project_name.strip() and trainer.experiment_name.strip()),
            "trainer.project_name and experiment_name name the run and its folder, so they must "
            "not be empty, as an unset variable of the shell leaves them; got "
            "'{trainer.project_name}' and '{trainer.experiment_name}'. Give names, or leave the "
            "keys out.",
        ),
        (
            ".." in Path(trainer.project_name, trainer.experiment_name).parts,
            "trainer.project_name and experiment_name name the run and its folder, so they must "
            "not lead out of it by '..', got '{trainer.project_name}' and "
            "'{trainer.experiment_name}'. Set trainer.default_local_dir for another folder.",
        ),
        (trainer.save_freq == 0, "trainer.save_freq must be positive, or -1 for never, got 0."),
        (trainer.test_freq == 0, "trainer.test_freq must be positive, or -1 for never, got 0."),
    )


def folder_has_short_names(config: TrainConfig) -> Messages:
    names = Path(config.trainer.default_local_dir).parts
    longest = max(names, key=_num_bytes, default="")
    if _num_bytes(longest) > _MOST_BYTES_OF_A_NAME:
        yield (
            "trainer.default_local_dir, which follows trainer.project_name and experiment_name, must "
            f"have names of at most {_MOST_BYTES_OF_A_NAME} bytes in it, got {_num_bytes(longest)} "
            f"in '{longest[:40]} ...'. Shorten the name."
        )


def _num_bytes(name: str) -> int:
    return len(name.encode(errors="surrogatepass"))


@table
def validation_has_data(config: TrainConfig) -> Rows:
    # a data set may bring its validation split
    has_data = bool(config.data.val_files) or config.data.dataset_name is not None
    is_periodic = config.trainer.test_freq not in (-1, 0)

    return (
        (
            config.trainer.val_only and not has_data,
            "{trainer.val_only=} asks for validation, but data.val_files is not set. Set "
            "data.val_files.",
        ),
        (
            is_periodic and not has_data,
            "{trainer.test_freq=} asks for validation, but data.val_files is not set. Set "
            "data.val_files.",
        ),
    )


def checkpoint_parts_are_known(config: TrainConfig) -> Messages:
    known = ", ".join(CHECKPOINT_PARTS)
    for section in ("actor_rollout_ref.actor.checkpoint", "critic.checkpoint"):
        saved = value_at(config, f"{section}.save_contents")
        loaded = value_at(config, f"{section}.load_contents")
        for part in saved:
            if part not in CHECKPOINT_PARTS:
                yield f"{section}.save_contents: unknown part '{part}'. Known: {known}."

        for part in loaded:
            # Left unset, the parts to load are those saved: one typing error, one message.
            if part not in CHECKPOINT_PARTS and part not in saved:
                yield f"{section}.load_contents: unknown part '{part}'. Known: {known}."


def loggers_are_known(config: TrainConfig) -> Messages:
    if config.actor_rollout_ref.model.external_lib is not None:
        return  # the user's module may register more
    for name in config.trainer.logger:
        if name not in TRACKERS:
            near = nearest_names(str(name), list(TRACKERS))
            yield (
                f"trainer.logger: unknown '{name}'. Nearest known: {near}. All: "
                f"{', '.join(TRACKERS)}."
            )


def data_files_are_not_empty(config: Any) -> Messages:
    """Report files without a byte here: rows are read after torch and the tokenizer have loaded."""
    for key in ("train_files", "val_files"):
        for file in getattr(config.data, key) or ():
            path = Path(file).expanduser()
            if path.is_file() and path.stat().st_size == 0:
                yield (
                    f"data.{key}: '{file}' is empty (0 bytes). Write it again, or remove it from "
                    "the list."
                )


RULES: tuple[Rule, ...] = (
    model_and_data_are_named,
    own_classes_have_names,
    data_files_are_not_empty,
    batch_divides_into_mini_batches,
    mini_batches_divide_over_ranks,
    sequences_fit,
    roles_are_placed,
    ranks_can_be_divided,
    activations_are_checkpointed,
    algorithm_has_what_it_needs,
    losses_make_sense,
    adapters_can_be_trained,
    run_has_an_end_and_a_start,
    folder_has_short_names,
    checkpoint_parts_are_known,
    loggers_are_known,
    reward_has_what_it_needs,
    *ALGORITHM_RULES,
    *AGENT_RULES,
    partners_can_learn,
    *ASYNC_RULES,
)
# Values that a command line must name, and a program may give as objects.
RULES_OF_FILES: tuple[Rule, ...] = (training_data_is_named, validation_has_data)


def doubtful(config: TrainConfig) -> Messages:
    """Yield combinations that run, but are rarely intended."""
    for doubts in (
        algorithm_doubts,
        placement_doubts,
        reward_doubts,
        agent_doubts,
        async_doubts,
        _rarely_intended,
        unread_keys,
        incomplete_checkpoints,
    ):
        yield from doubts(config)


@table
def _rarely_intended(config: TrainConfig) -> Rows:
    actor = config.actor_rollout_ref.actor
    algorithm = config.algorithm
    validation = config.actor_rollout_ref.rollout.val_kwargs
    yield (
        actor.use_kl_loss and algorithm.use_kl_in_reward,
        "KL to the reference counts twice: actor.use_kl_loss and algorithm.use_kl_in_reward are "
        "both on.",
    )
    yield (
        actor.use_kl_loss and actor.kl_loss_coef == 0,
        "actor_rollout_ref.actor.kl_loss_coef=0: the reference is computed, but KL does not enter "
        "the loss.",
    )
    yield (
        algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0,
        "algorithm.kl_ctrl.kl_coef=0: the reference is computed, but KL does not enter the reward.",
    )
    yield (
        validation.temperature > 0 and not validation.do_sample,
        "{actor_rollout_ref.rollout.val_kwargs.temperature=} has no effect without "
        "val_kwargs.do_sample=True: validation is greedy.",
    )
    yield (
        validation.n > 1 and is_greedy(validation),
        "Greedy validation gives {actor_rollout_ref.rollout.val_kwargs.n} equal responses a "
        "prompt; set val_kwargs.do_sample=True to vary.",
    )

    for section in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model"):
        fsdp = value_at(config, f"{section}.fsdp_config")
        yield (
            fsdp.offload_policy and (fsdp.param_offload or fsdp.optimizer_offload),
            f"{section}.fsdp_config: offload_policy=True keeps parameters and moments on the host "
            "always, so param_offload and optimizer_offload have no effect.",
        )


def incomplete_checkpoints(config: TrainConfig) -> Messages:
    """Yield checkpoints that a run cannot resume from to the same bits."""
    for section in trained_sections(config):
        key = f"{section}.checkpoint.load_contents"
        loaded = value_at(config, key)
        missing = [part for part in ("optimizer", "extra") if part not in loaded]
        if missing and config.trainer.resume_mode != "disable":
            yield (
                f"{key} leaves out {' and '.join(missing)}: a resumed "
                "run begins with a new optimizer or schedule there, and its weights are not those "
                "of a run without a break."
            )
