"""`RayPPOTrainer` with the parameters of verl 0.5, as recipes call it."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from verl.compat.driver import (
    ActorRollout,
    PaddedPrompts,
    add_get,
    claiming,
    with_meta_info,
)
from verl.config.keywords import config_from_keywords
from verl.data import RLDataLoader
from verl.data.collate import columns_of
from verl.single_controller import Worker
from verl.single_controller.worker import undecorated
from verl.trainer import setup
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils.errors import ConfigError
from verl.workers import (
    ActorWorker,
    CriticWorker,
    ReferenceWorker,
    RewardModelWorker,
    RolloutWorker,
)

# Names of verl 0.5's roles: the role here, and the class that its worker must be or extend.
ROLES: dict[str, tuple[str, type[Worker]]] = {
    "ActorRollout": ("actor", ActorWorker),
    "ActorRolloutRef": ("actor", ActorWorker),
    "Actor": ("actor", ActorWorker),
    "Rollout": ("rollout", RolloutWorker),
    "Critic": ("critic", CriticWorker),
    "RefPolicy": ("reference", ReferenceWorker),
    "RewardModel": ("reward_model", RewardModelWorker),
}
# Attributes of verl 0.5's trainer that have another name here.
OLD_NAMES = {
    "global_steps": "global_step",
    "total_training_steps": "total_steps",
    "kl_ctrl_in_reward": "kl_controller",
}
# Methods, which a subclass may override under either name.
OLD_METHODS = {
    "_load_checkpoint": "load_checkpoint",
    "_save_checkpoint": "save_checkpoint",
    "_validate": "validate",
}


class RayPPOTrainer(PPOTrainer):
    """PPOTrainer with the parameters of verl 0.5, and its names of attributes and methods
    (`OLD_NAMES`, `OLD_METHODS`).

    A subclass may have a `fit` of verl 0.5: `train_dataloader` yields dicts with padded prompts,
    `actor_rollout_wg` generates, computes log-probs and updates, and hands weights over after each
    update. `config` has typed sections with `get`, which OmegaConf.to_container takes in `fit`;
    elsewhere, `verl.config.config_to_dict(config)` makes plain values of them.

    Args:
        config, tokenizer, reward_fn, val_reward_fn, train_dataset, val_dataset: see PPOTrainer.
        role_worker_mapping: worker class of each Role: a worker of this package or a subclass, with
            or without ray.remote. Roles that the algorithm does not need are not started.
        resource_pool_manager: one pool, with one process for each rank of the run.
        ray_worker_group_cls: ignored; the trainer's pool makes the groups.
        processor: any; models that read pictures take theirs from `model.path`.
        collate_fn: None or `verl.utils.dataset.rl_dataset.collate_fn`.
        train_sampler: the order of the training rows; replaces data.sampler and data.shuffle.
        device_name: trainer.device.
    """

    async_rollout_mode = False
    hybrid_engine = True
    # the roles that the run has
    use_critic = property(attrgetter("config.needs_critic"))
    use_reference_policy = property(attrgetter("config.needs_reference"))
    use_rm = property(attrgetter("config.reward_model.enable"))

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        role_worker_mapping: Mapping[Any, Any] | None = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        val_reward_fn: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        if collate_fn not in (None, columns_of):
            raise ConfigError(
                "RayPPOTrainer(collate_fn=...) has no meaning here. Return the same values from "
                "the dataset's __getitem__, which are collated for you: "
                "verl.trainer.PPOTrainer(config, tokenizer=..., reward_fn=..., train_dataset=...)."
            )

        self.worker_classes = _worker_classes(role_worker_mapping or {})
        super().__init__(
            _on_device(config, device_name),
            tokenizer=tokenizer,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
        )

        add_get(self.config)
        self.resource_pool_manager = resource_pool_manager
        if resource_pool_manager is not None:
            _check_pools(resource_pool_manager, self.pool.world_size)
        if train_sampler is not None:
            self.train_loader.order_by(train_sampler)
            self.total_steps = setup.count_steps(self.config, len(self.train_loader))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own_fit = vars(cls).get("fit")
        if own_fit is not None:
            cls.fit = claiming(own_fit)
        for old, new in OLD_METHODS.items():
            cls._join_names(old, new)

    @classmethod
    def _join_names(cls, old: str, new: str) -> None:
        """Give a method that is overridden under one name the other name, too.

        The inherited `fit` calls the new name, one of verl 0.5 the old name.
        """
        for owner in cls.__mro__[: cls.__mro__.index(RayPPOTrainer)]:
            defined = [vars(owner)[name] for name in (old, new) if name in vars(owner)]
            if len(defined) == 1:
                setattr(cls, old, defined[0])
                setattr(cls, new, defined[0])
            if defined:
                return

    def init_workers(self) -> None:
        """Start the roles, and offer their calls with the answers of verl 0.5."""
        super().init_workers()
        self._actor_rollout_wg = ActorRollout(self)
        if self.critic_wg is not None:
            vars(self.critic_wg)["update_critic"] = with_meta_info(self.critic_wg.update_critic)

    @property
    def actor_rollout_wg(self) -> ActorRollout:
        """The groups of actor and rollout as one, with the calls of verl 0.5."""
        return self._actor_rollout_wg

    @property
    def train_dataloader(self) -> PaddedPrompts:
        """The batches of `train_loader` as dicts with padded prompts."""
        return self._padded(self.train_loader)

    @property
    def val_dataloader(self) -> PaddedPrompts | None:
        """The batches of `val_loader` as dicts with padded prompts; None if there are none."""
        return None if self.val_loader is None else self._padded(self.val_loader)

    @property
    def ref_in_actor(self) -> bool:
        """Whether the reference is the actor without its adapters."""
        return self.config.actor_rollout_ref.model.lora_rank > 0

    def start_role(self, role: str, worker_class: type[Worker], *args: Any, **kwargs: Any) -> Any:
        """Start a role as TrainingRun does, with the class of `role_worker_mapping` if given."""
        chosen = self.worker_classes.get(role, worker_class)
        return super().start_role(role, chosen, *args, **kwargs)

    def _load_checkpoint(self) -> None:
        super().load_checkpoint()

    def _save_checkpoint(self) -> None:
        super().save_checkpoint()

    def _validate(self) -> dict[str, float]:
        return super().validate()

    def _balance_batch(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen"
    ) -> None:
        """Leave the batch as it is. Each call evens out the tokens of the ranks itself."""

    def _padded(self, loader: RLDataLoader) -> PaddedPrompts:
        width = self.config.data.max_prompt_length
        return PaddedPrompts(loader, width, self.tokenizer.pad_token_id)


def _alias(name: str) -> property:
    """Make a property that reads and sets the attribute `name`."""

    def read(trainer: RayPPOTrainer) -> Any:
        return getattr(trainer, name)

    def write(trainer: RayPPOTrainer, value: Any) -> None:
        setattr(trainer, name, value)

    return property(read, write)


for _old, _new in OLD_NAMES.items():
    setattr(RayPPOTrainer, _old, _alias(_new))


def _on_device(config: Any, device_name: str | None) -> Any:
    config = config_from_keywords(config, {})
    if device_name is None:
        return config
    given = config.trainer.device
    if given not in (None, "auto", device_name):
        raise ConfigError(
            f"device_name={device_name!r} contradicts trainer.device={given}. Leave one unset."
        )
    return config_from_keywords(config, {"trainer.device": device_name})


def _worker_classes(mapping: Mapping[Any, Any]) -> dict[str, type[Worker]]:
    """Return {role: worker class} of a mapping by verl 0.5's roles.

    Raises ConfigError for an unknown role, or a class that cannot serve it.
    """
    classes = {}
    for key, given in mapping.items():
        name = getattr(key, "name", str(key))
        if name not in ROLES:
            raise ConfigError(
                f"role_worker_mapping: the role '{name}' is not in this version. Roles are "
                f"{', '.join(ROLES)}."
            )
        role, base = ROLES[name]
        worker_class = undecorated(given)
        if worker_class is ActorWorker:
            # verl 0.5 has one class for actor, rollout and reference.
            worker_class = base
        if not (isinstance(worker_class, type) and issubclass(worker_class, base)):
            raise ConfigError(
                f"role_worker_mapping: the worker of {name} must be verl.workers.{base.__name__} "
                f"or a subclass, got {worker_class!r}. Override its methods, or a phase of "
                "verl.trainer.PPOTrainer."
            )
        if role == "actor" and hasattr(worker_class, "generate_sequences"):
            raise ConfigError(
                f"role_worker_mapping: {worker_class.__name__} generates, which the worker of an "
                "actor does not do here. Give that method to a subclass of "
                "verl.workers.RolloutWorker, as the role Rollout."
            )
        classes[role] = worker_class

    return classes


def _check_pools(manager: Any, num_ranks: int) -> None:
    used = set(manager.mapping.values())
    if len(used) > 1:
        raise ConfigError(
            f"resource_pool_manager gives the roles {len(used)} pools: {sorted(used)}. Give all "
            "roles one, and the ranks of each by trainer.placement."
        )
    wanted = sum(sum(counts) for counts in manager.resource_pool_spec.values())
    if wanted != num_ranks:
        raise ConfigError(
            f"resource_pool_manager has {wanted} processes, and the run {num_ranks} ranks. Set "
            f"trainer.nnodes and trainer.n_gpus_per_node to {wanted} in all."
        )
