"""From configuration to the parts a trainer is made of."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from verl import agents
from verl.config import RolloutConfig, TrainConfig
from verl.config.algorithm_rules import steps_beyond_the_run
from verl.config.batch_rules import uneven_mini_batches
from verl.data import RLDataLoader, RLDataset
from verl.data.build import build_dataset, build_picture_reader, build_sampler
from verl.data.chat import apply_chat_template, as_messages
from verl.data.own_rows import PromptLimit
from verl.data.pictures import PictureReader
from verl.data.roles import RoleCheck
from verl.diagnostics.parts import load_user_code
from verl.models.load import load_model_config, load_tokenizer
from verl.protocol import DataProto
from verl.rewards.build import build_reward
from verl.rewards.manager import RewardManager
from verl.rewards.preflight import preflight
from verl.rewards.results import ground_truth_of
from verl.rewards.rules import require_rules, require_truths
from verl.rollout import (
    capabilities_of,
    check_engine,
    check_engine_model,
    check_engine_service,
)
from verl.rollout.stopping import StopRule
from verl.rollout.types import SamplingParams
from verl.trainer import given_parts
from verl.utils.devices import visible_device
from verl.utils.errors import ConfigError
from verl.utils.limits import make_writable
from verl.utils.logging import logger
from verl.utils.phases import phase
from verl.workers.trained import model_source


def prepare_for_generation(trainer: Any, config: TrainConfig) -> torch.device:
    """Prepare this process for a job that only generates; return the device.

    Args:
        trainer: the job's own section, with `num_threads` and `device`.
        config: the job's settings in a configuration of training.

    Raises ConfigError for settings that the rollout engine does not support.
    """
    if trainer.num_threads is not None:
        torch.set_num_threads(trainer.num_threads)
    device = visible_device(trainer.device)
    load_user_code(config)
    check_engine(config.actor_rollout_ref.rollout)
    check_engine_service(config.actor_rollout_ref.rollout)
    return device


def check_rollout_model(config: TrainConfig, device: torch.device) -> None:
    """Raise ConfigError for a model that the rollout engine does not support.

    Reads the model's config.json alone, and asks servers that the user started, so it fails before
    any weight is loaded.
    """
    roles = config.actor_rollout_ref
    model = load_model_config(**model_source(roles.model))
    check_engine_model(roles.rollout, model, on_cuda=device.type == "cuda")
    check_engine_service(roles.rollout)


def check_stops(config: TrainConfig, tokenizer: Any) -> None:
    """Raise ConfigError for stop tokens that the tokenizer lacks, and for an empty stop string."""
    StopRule(sampling_params(config.actor_rollout_ref.rollout), (), tokenizer)


def check_sample_folders(config: TrainConfig) -> None:
    """Raise ConfigError for a folder of samples that cannot be written."""
    for key in ("rollout_data_dir", "validation_data_dir"):
        folder = getattr(config.trainer, key)
        if folder is None:
            continue
        try:
            make_writable(Path(folder))
        except OSError as error:
            raise ConfigError(
                f"trainer.{key}='{folder}' cannot be written: {error.strerror}. Name a writable "
                "folder."
            ) from error


def actor_tokenizer(config: TrainConfig, given: Any = None) -> Any:
    """Return the tokenizer of a program, or else load the configured one.

    Raises ConfigError for a given object that is none.
    """
    if given is None:
        return build_tokenizer(config)
    given_parts.check_tokenizer(given)
    return given


def build_tokenizer(config: TrainConfig) -> Any:
    """Load the actor's tokenizer, which reads the prompts and decodes the responses."""
    model = config.actor_rollout_ref.model
    path = config.data.tokenizer or model.path
    assert path is not None, "the configuration was checked"
    return load_tokenizer(
        path,
        trust_remote_code=config.data.trust_remote_code or model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
        chat_template_kwargs=config.data.apply_chat_template_kwargs,
    )


def reward_input_tokenizer(config: TrainConfig, tokenizer: Any) -> Any:
    """Return the tokenizer that decodes the actor's tokens for the reward model: `tokenizer`,
    unless another is configured."""
    section = config.reward_model.model
    if section.input_tokenizer in (None, config.actor_rollout_ref.model.path):
        return tokenizer
    return load_tokenizer(section.input_tokenizer, trust_remote_code=section.trust_remote_code)


class NoReward:
    """Scores every response 0, for a run that learns from a teacher alone."""

    @phase(reads="responses")
    def __call__(self, batch: DataProto, return_dict: bool = False) -> Any:
        """Return zeros (B, R)."""
        scores = torch.zeros(batch.batch["responses"].shape)
        if return_dict:
            return {"reward_tensor": scores, "reward_extra_info": {}}
        return scores


def training_reward(config: TrainConfig, tokenizer: Any, given: Any = None) -> Any:
    """Return the reward of the training responses: that of a program, or the configured one.

    Raises ConfigError for one that cannot be called.
    """
    if given is not None:
        given_parts.check_reward(given, "reward_fn")
        return given
    if config.distillation.is_whole_loss:
        return NoReward()
    return _configured_reward(config, tokenizer, num_examine=0)


def validation_reward(config: TrainConfig, tokenizer: Any, given: Any = None) -> Any:
    """Return the reward of the validation responses, as `training_reward`."""
    if given is not None:
        given_parts.check_reward(given, "val_reward_fn")
        return given
    return _configured_reward(config, tokenizer, num_examine=1)


def _configured_reward(config: TrainConfig, tokenizer: Any, *, num_examine: int) -> Any:
    reward = build_reward(config, tokenizer, num_examine=num_examine)
    name = config.reward_model.reward_manager
    given_parts.check_reward(reward, f"reward_model.reward_manager={name}")
    return reward


def picture_reader(config: TrainConfig, tokenizer: Any) -> PictureReader | None:
    """Build the reader of the prompts' images; None for a model that reads text alone."""
    roles = config.actor_rollout_ref
    for_rewards = config.reward_model.images
    reader = build_picture_reader(
        roles.model,
        tokenizer,
        for_servers=capabilities_of(roles.rollout.name).external,
        keeps_images=for_rewards,
    )
    if reader is None and for_rewards:
        raise ConfigError(
            "reward_model.images=True gives rewards the images of a row, but the model "
            f"'{roles.model.path}' reads text alone. Leave it out."
        )
    return reader


def build_loaders(
    config: TrainConfig, tokenizer: Any, train_dataset: Any = None, val_dataset: Any = None
) -> tuple[RLDataLoader, RLDataLoader | None]:
    """Build the loaders of training batches, reshuffled every epoch, and of validation batches.

    Checks the rows for agents, see `check_agents`, and the prompt lengths of data sets that are not
    read from files, see `PromptLimit`. The second is None where there is no validation set.
    """
    data = config.data
    pictures = picture_reader(config, tokenizer)
    names = {
        "train": "data.custom_cls" if train_dataset is None else "train_dataset",
        "val": "data.custom_cls" if val_dataset is None else "val_dataset",
    }
    train_dataset, val_dataset = _datasets(config, tokenizer, pictures, train_dataset, val_dataset)
    given_parts.check_dataset(train_dataset, names["train"])
    given_parts.check_dataset(val_dataset, names["val"])
    check_agents(config, tokenizer, train_dataset, val_dataset, pictures=pictures)

    encode = _encoder(tokenizer)
    limits = {}
    for split, name in names.items():
        if name == "data.custom_cls":
            name = f"{name} of data.{split}_files"
        limits[split] = PromptLimit(name, data, encode, reads_pictures=pictures is not None)

    is_shared = val_dataset is train_dataset
    train_dataset = limits["train"].keep(train_dataset)
    if is_shared:
        val_dataset = train_dataset
    elif val_dataset is not None:
        val_dataset = limits["val"].keep(val_dataset)

    train_loader = _training_loader(config, train_dataset, encode, limits["train"])
    if val_dataset is None:
        _require_no_validation(config)
        return train_loader, None
    return train_loader, _validation_loader(config, val_dataset, encode, limits["val"])


def _datasets(
    config: TrainConfig,
    tokenizer: Any,
    pictures: PictureReader | None,
    train_dataset: Any,
    val_dataset: Any,
) -> tuple[Any, Any]:
    """Return the data sets of training and validation: those of a program, or the configured ones.

    A run that only validates may have no training data, and has the validation set twice then.
    """
    data = config.data
    has_rows = data.train_files or data.dataset_name or not config.trainer.val_only
    if train_dataset is None and has_rows:
        train_dataset = build_dataset(config, tokenizer, split="train", pictures=pictures)
    if val_dataset is None:
        val_dataset = build_dataset(config, tokenizer, split="val", pictures=pictures)

    if train_dataset is None:
        train_dataset = val_dataset
    assert train_dataset is not None, "the configuration was checked"
    return train_dataset, val_dataset


def _training_loader(
    config: TrainConfig, dataset: Any, encode: Callable[[Any], list[int]], limit: PromptLimit
) -> RLDataLoader:
    data = config.data
    batch_size = data.train_batch_size
    num_workers = data.dataloader_num_workers
    if config.trainer.val_only:  # no batch is drawn
        batch_size = min(batch_size, len(dataset))
        num_workers = 0

    return RLDataLoader(
        dataset,
        batch_size,
        shuffle=data.shuffle,
        seed=data.seed,
        drop_last=True,
        sampler=build_sampler(data, dataset),
        encode=encode,
        prompt_key=data.prompt_key,
        num_workers=num_workers,
        limit=limit,
    )


def _validation_loader(
    config: TrainConfig, dataset: Any, encode: Callable[[Any], list[int]], limit: PromptLimit
) -> RLDataLoader:
    data = config.data
    return RLDataLoader(
        dataset,
        min(data.val_batch_size or len(dataset), len(dataset)),
        shuffle=data.validation_shuffle,
        seed=data.seed,
        drop_last=False,
        encode=encode,
        prompt_key=data.prompt_key,
        limit=limit,
    )


def _require_no_validation(config: TrainConfig) -> None:
    """Raise ConfigError where a run without validation data is asked to validate."""
    trainer = config.trainer
    if trainer.val_only or trainer.test_freq > 0:
        raise ConfigError(
            f"trainer.val_only={trainer.val_only} and trainer.test_freq={trainer.test_freq} ask "
            f"for validation, but data.dataset_name={config.data.dataset_name} has no validation "
            "split. Set data.val_files, or give a val_dataset."
        )


def _encoder(tokenizer: Any) -> Callable[[Any], list[int]]:
    """Return a function that encodes a prompt of a user's data set.

    Files were checked when they were read.
    """
    roles = RoleCheck(tokenizer)

    def encode(prompt: Any) -> list[int]:
        messages = as_messages(prompt)
        roles.read(messages, 0)
        roles.warn_at(lambda row: "A prompt of the data set", "prompts")
        return apply_chat_template(tokenizer, messages)

    return encode


def check_rows(dataset: RLDataset, manager: RewardManager) -> None:
    """Raise RewardError for the first row that no rule scores, for a manager that goes by rules."""
    require_rules(dataset.column(manager.reward_fn_key))
    if manager.on_error != "stop":
        return

    sources = dataset.column(manager.reward_fn_key)
    truths = dataset.column("reward_model")
    require_truths(
        (place, source, ground_truth_of(truth))
        for (place, source), (_, truth) in zip(sources, truths)
    )


def check_reward(
    config: TrainConfig,
    reward_fn: Any,
    train_loader: RLDataLoader,
    val_loader: RLDataLoader | None = None,
) -> None:
    """Check that every row has a rule, where rules score, and try the reward on a few rows.

    Runs before a weight is loaded, so a reward model is not tried, nor is the score of agent loops.
    """
    if config.actor_rollout_ref.rollout.scores_itself:
        return
    if not config.reward_model.enable and not isinstance(reward_fn, NoReward):
        if isinstance(reward_fn, RewardManager) and reward_fn.by_rule:
            for loader in (train_loader, val_loader):
                if loader is not None and isinstance(loader.dataset, RLDataset):
                    check_rows(loader.dataset, reward_fn)
        preflight(config, train_loader.dataset, reward_fn)


def check_agents(
    config: TrainConfig,
    tokenizer: Any,
    train_dataset: Any,
    val_dataset: Any = None,
    *,
    pictures: PictureReader | None = None,
) -> None:
    """Check that every row can be played by an agent loop, and that all that is configured is used.

    Makes the tools once, so that a wrong file or class fails before a weight is loaded. Drops rows
    whose prompts are too long with their tools, under `data.filter_overlong_prompts`.
    """
    rollout = config.actor_rollout_ref.rollout
    datasets = [] if train_dataset is None else [train_dataset]
    if val_dataset is not None and val_dataset is not train_dataset:
        datasets.append(val_dataset)
    if not rollout.uses_agents:
        for dataset in datasets:
            _warn_of_unused_agents(dataset)
        return

    readable = [dataset for dataset in datasets if isinstance(dataset, RLDataset)]

    def column(name: str) -> Iterator[tuple[str, Any]]:
        for dataset in readable:
            yield from dataset.column(name)

    runner = agents.AgentRunner(rollout, tokenizer, pictures=pictures)
    prompt_key = config.data.prompt_key
    try:
        if config.data.filter_overlong_prompts:
            for dataset in readable:
                dataset.drop_overlong(runner.prompts_too_long(dataset.column, prompt_key))
        if readable:
            runner.check_rows(column, prompt_key)
        for dataset in readable:
            is_trained_on = dataset is train_dataset and not config.trainer.val_only
            if is_trained_on:
                _check_mini_batches(config, runner, dataset)
            runner.check_pictures(dataset.column, dataset.have_pictures())
    finally:
        runner.close()


def _check_mini_batches(
    config: TrainConfig, runner: "agents.AgentRunner", dataset: RLDataset
) -> None:
    """Raise ConfigError for mini-batches that the ranks do not divide.

    Where episodes may have several rows, each step chooses the rows of its mini-batches.
    """
    uneven = list(uneven_mini_batches(config))
    if uneven and runner.play_single_rows(dataset.column):
        raise ConfigError("\n".join(uneven))


def _warn_of_unused_agents(dataset: Any) -> None:
    if not isinstance(dataset, RLDataset) or "agent_name" not in dataset.columns:
        return
    for place, name in dataset.column("agent_name"):
        if name is not None:
            logger.warning(
                "%s: agent_name is '%s', but no agent loop is configured: the row gets one turn "
                "without tools. Set actor_rollout_ref.rollout.mode=async or "
                "multi_turn.tool_config_path.",
                place,
                name,
            )
            return


def count_steps(config: TrainConfig, steps_an_epoch: int, named: Callable[[str], str] = str) -> int:
    """Return the training steps of the run: those configured, or all epochs over the data.

    Log keys that count on steps after the end of the run, where only the data gives that end.

    Args:
        config: of the run.
        steps_an_epoch: batches of the loader.
        named: changes a message to the names of keys that the user has.
    """
    trainer = config.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps

    assert trainer.total_epochs is not None, "the configuration was checked"
    steps = steps_an_epoch * trainer.total_epochs
    for doubt in steps_beyond_the_run(config, steps):
        logger.warning("%s", named(doubt))
    return steps


def checkpoints_to_keep(config: TrainConfig) -> int | None:
    """Return the larger limit of actor and critic: a checkpoint without one of its parts cannot
    resume."""
    actor_limit = config.trainer.max_actor_ckpt_to_keep
    critic_limit = config.trainer.max_critic_ckpt_to_keep
    if not config.needs_critic:
        return actor_limit
    if actor_limit is None or critic_limit is None:
        return None
    return max(actor_limit, critic_limit)


def sampling_params(rollout: RolloutConfig) -> SamplingParams:
    """Return the sampling parameters of training."""
    return _params(rollout, rollout, rollout.min_p)


def validation_params(rollout: RolloutConfig) -> SamplingParams:
    """Return the sampling parameters of validation (`rollout.val_kwargs`)."""
    return _params(rollout, rollout.val_kwargs, 0.0)


def _params(rollout: RolloutConfig, draw: Any, min_p: float) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=rollout.response_length,
        temperature=draw.temperature if draw.do_sample else 0.0,
        top_k=draw.top_k,
        top_p=draw.top_p,
        min_p=min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
    )
