"""The models of a run: actor, rollout, critic, reference, reward model and teacher."""

from verl.config import TrainConfig
from verl.config.placement import rollout_is_apart
from verl.diagnostics.profile import watch
from verl.single_controller import Colocated, GroupOf
from verl.trainer import setup
from verl.trainer.algorithm import describe_algorithm, loglinear, rollout_reinforce
from verl.trainer.frozen_models import connect_frozen_models
from verl.trainer.run import TrainingRun
from verl.trainer.weights import ActorRolloutGroups, ColocatedLink, RemoteLink, WeightLink
from verl.utils.logging import logger
from verl.workers import (
    ActorWorker,
    CriticWorker,
    ReferenceWorker,
    RewardModelWorker,
    RolloutWorker,
    TeacherWorker,
    TrainedWorker,
)


class RunOfRoles(TrainingRun[TrainConfig]):
    """A training run with the models that its configuration asks for, as groups of workers."""

    actor_wg: GroupOf[ActorWorker]
    rollout_wg: GroupOf[RolloutWorker]
    critic_wg: GroupOf[CriticWorker] | None
    ref_policy_wg: GroupOf[ReferenceWorker] | GroupOf[ActorWorker] | None
    rm_wg: GroupOf[RewardModelWorker] | None
    teacher_wg: GroupOf[TeacherWorker] | None

    def init_workers(self) -> None:
        """Load the models that the configuration asks for, and connect them.

        Actor and rollout engine always; critic, reference, reward model and teacher if needed.
        """
        watch(self.config)  # for profile_memory()
        for line in describe_algorithm(self.config):
            logger.info("%s", line)

        self.start_tracker()
        with self.tracker.closed_after_error():
            self._start_roles()

    def _start_roles(self) -> None:
        """Do the work of `init_workers`, once the trackers run."""
        setup.check_sample_folders(self.config)

        self.actor_wg = self.start_role(
            "actor",
            ActorWorker,
            self.config.actor_rollout_ref,
            total_steps=self.total_steps,
            device=self.device,
            tokenizer=self.tokenizer,
        )
        self.rollout_wg = self.start_rollout()
        self.critic_wg = self._start_critic()
        self.ref_policy_wg = self._start_reference()
        self.rm_wg = self._start_reward_model()
        self.teacher_wg = self._start_teacher()

        connect_frozen_models(self.config, self.actor_wg, self.ref_policy_wg, self.teacher_wg)
        self._connect_with_rollout()
        self.weights = self.link_weights()

    def start_rollout(self, **partners: Colocated) -> GroupOf[RolloutWorker]:
        """Start the rollout: in the actor's processes, or on ranks of its own.

        Args:
            partners: see `RolloutWorker`.
        """
        is_apart = rollout_is_apart(self.config)
        return self.start_role(
            "rollout",
            RolloutWorker,
            self.config.actor_rollout_ref,
            device=self.device,
            tokenizer=self.tokenizer,
            actor=None if is_apart else Colocated("actor"),
            run=self.config,
            **partners,
        )

    def _start_critic(self) -> GroupOf[CriticWorker] | None:
        if not self.config.needs_critic:
            return None
        data = self.config.data
        return self.start_role(
            "critic",
            CriticWorker,
            self.config.critic,
            max_length=data.max_prompt_length + data.max_response_length,
            total_steps=self.total_steps,
            device=self.device,
            tokenizer=self.tokenizer,
            seed=self.config.trainer.seed,
        )

    def _start_reference(self) -> GroupOf[ReferenceWorker] | GroupOf[ActorWorker] | None:
        if not self.config.needs_reference:
            return None
        roles = self.config.actor_rollout_ref
        if roles.model.lora_rank > 0:
            return self.actor_wg  # its frozen weights, without the adapters
        return self.start_role("reference", ReferenceWorker, roles, device=self.device)

    def _start_reward_model(self) -> GroupOf[RewardModelWorker] | None:
        if not self.config.reward_model.enable:
            return None
        return self.start_role(
            "reward_model",
            RewardModelWorker,
            self.config.reward_model,
            input_tokenizer=setup.reward_input_tokenizer(self.config, self.tokenizer),
            device=self.device,
        )

    def _start_teacher(self) -> GroupOf[TeacherWorker] | None:
        if not self.config.distillation.enabled:
            return None
        return self.start_role(
            "teacher",
            TeacherWorker,
            self.config.distillation,
            self.config.actor_rollout_ref,
            tokenizer=self.tokenizer,
            device=self.device,
        )

    def _connect_with_rollout(self) -> None:
        """Have the actor correct and compare its updates for the policy that drew the tokens."""
        proximal = loglinear(self.config)
        if proximal is not None:
            self.actor_wg.use_loglinear_proximal(proximal)

        reinforce = rollout_reinforce(self.config)
        if reinforce is not None:
            self.actor_wg.use_rollout_reinforce(reinforce)

        if self.config.algorithm.rollout_correction.bypass_mode:
            self.actor_wg.compare_with_rollout()

    def close(self) -> None:
        """End the processes, servers and threads of this run, which then cannot go on.

        Its models are freed once nothing refers to the run. Under torchrun the other ranks end.
        """
        self.train_loader.close()
        try:
            if hasattr(self, "tracker") and not self.tracker.is_finished:
                self.tracker.finish()
        finally:
            self.pool.shutdown()

    def link_weights(self) -> WeightLink:
        """Connect the rollout with the actor, because it generates with the actor's weights."""
        if not rollout_is_apart(self.config):
            return ColocatedLink(self.rollout_wg)
        return RemoteLink(
            self.actor_wg,
            self.rollout_wg,
            self.config.actor_rollout_ref.rollout.weight_transport,
            self.checkpoints.root / "rollout_weights",
        )

    def renew_sizes(self) -> None:
        """Let the workers that train read sizes of updates and passes again, after a change."""
        self.actor_wg.set_config(self.config.actor_rollout_ref)
        if self.critic_wg is not None:
            self.critic_wg.set_config(self.config.critic)

    @property
    def actor_rollout_wg(self) -> "ActorRolloutGroups":
        """Both groups, under the name that verl 0.5 has for one group with both tasks."""
        return ActorRolloutGroups(self.actor_wg, self.rollout_wg)

    def checkpointed_groups(self) -> dict[str, GroupOf[TrainedWorker]]:
        groups: dict[str, GroupOf[TrainedWorker]] = {"actor": self.actor_wg}
        if self.critic_wg is not None:
            groups["critic"] = self.critic_wg
        return groups
