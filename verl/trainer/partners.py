"""Training of several policies: each learns from the turns of its own role alone."""

from collections.abc import Iterator

import numpy as np

from verl.config.partners import partner_section
from verl.config.policies import PolicyConfig, partner_role
from verl.models.load import load_tokenizer
from verl.protocol import DataProto
from verl.single_controller import Colocated, GroupOf, WorkerGroup, start
from verl.trainer.ppo_trainer import GENERATED, PPOTrainer
from verl.trainer.scored import require_floats
from verl.utils.phases import phase
from verl.workers import ActorWorker, RolloutWorker, TrainedWorker
from verl.workers.teacher import check_same_vocabulary


class PartnersTrainer(PPOTrainer):
    """Trains a policy of its own for each role of `rollout.agent.policies` that has one.

    Such a partner has the actor's settings, and a model, a learning rate, an optimizer, a rollout
    engine and a checkpoint of its own, on the actor's ranks. Advantages compare the rows of one
    role, so a batch falls apart by role where policies are evaluated and updated.
    """

    trains_partners = True

    partners: dict[str, GroupOf[ActorWorker]]  # by role
    partner_rollouts: dict[str, GroupOf[RolloutWorker]]

    def start_rollout(self, **partners: Colocated) -> GroupOf[RolloutWorker]:
        """Start the partners, then the actor's rollout, whose episodes they play in."""
        self.partners = {}
        self.partner_rollouts = {}
        engines = dict(partners)
        for role, policy in self.config.actor_rollout_ref.rollout.agent.partners.items():
            self._start_partner(role, policy)
            engines[partner_role(role)] = Colocated(_rollout_name(role))

        return super().start_rollout(**engines)

    def _start_partner(self, role: str, policy: PolicyConfig) -> None:
        """Start the actor and the rollout of a role."""
        roles = self.config.actor_rollout_ref
        assert policy.path is not None, "the configuration was checked"
        check_same_vocabulary(
            self.tokenizer,
            load_tokenizer(policy.path, trust_remote_code=policy.trust_remote_code),
            student_path=roles.model.path,
            teacher_path=policy.path,
            needs=f"A trained policy of the role '{role}' needs a model",
            key=f"actor_rollout_ref.rollout.agent.policies.{role}.path",
        )

        name = partner_role(role)
        section = partner_section(roles, policy)
        self.partners[role] = self.start_role(
            name,
            ActorWorker,
            section,
            total_steps=self.total_steps,
            device=self.device,
            tokenizer=self.tokenizer,
        )
        self.partner_rollouts[role] = self.start_role(
            _rollout_name(role),
            RolloutWorker,
            section,
            device=self.device,
            tokenizer=self.tokenizer,
            actor=Colocated(name),
        )

    def renew_sizes(self) -> None:
        """See `RunOfRoles.renew_sizes`."""
        super().renew_sizes()
        roles = self.config.actor_rollout_ref
        for role, policy in roles.rollout.agent.partners.items():
            self.partners[role].set_config(partner_section(roles, policy))

    def begin_passes(self, batch: DataProto) -> None:
        """Begin no pass early: each policy has a share of the rows alone."""

    @phase(reads=GENERATED, writes="old_log_probs entropys")
    def evaluate_policies(self, batch: DataProto) -> DataProto:
        """Add the old log-probs of every row, by the policy that drew it, if anything reads them."""
        if not self.needs_old_log_probs():
            return batch
        rows: list[int] = []
        started = []
        for role, group, own in self.shares(batch):
            rows += own.tolist()
            started.append((role, start(group.compute_log_prob, batch.select_idxs(own))))

        parts = []
        for role, future in started:
            part = self.timed("old_log_prob", future.result)
            self._note(role, part.meta_info.pop("metrics", {}))
            parts.append(part)
        order = np.argsort(np.array(rows))
        return batch.union(DataProto.concat(parts).select_idxs(order))

    @phase(reads=GENERATED + " advantages returns")
    def update(self, batch: DataProto) -> None:
        """Update the actor and its partners, each by the rows of its roles.

        A policy without a row in the batch keeps its weights.
        """
        require_floats(batch, "advantages", "estimate_advantages")
        batch = self.correct_rollout(batch)
        for role, group, own in self.shares(batch):
            self._note(role, self.update_policy(group, batch.select_idxs(own), batch))
        if "actor/entropy" in self.metrics:
            self.entropy_controller.update(self.metrics["actor/entropy"])

    def sync_weights(self) -> None:
        """Hand the updated weights of every policy to its engine."""
        super().sync_weights()
        for rollout in self.partner_rollouts.values():
            rollout.take_weights()

    def shares(self, batch: DataProto) -> Iterator[tuple[str, GroupOf[ActorWorker], np.ndarray]]:
        """Give the role, the workers and the row numbers of each policy; the actor's role is ""."""
        drawn_by = np.array(
            [role if role in self.partners else "" for role in batch.non_tensor_batch["agent_role"]]
        )
        for role, group in {"": self.actor_wg, **self.partners}.items():
            rows = np.flatnonzero(drawn_by == role)
            if len(rows):
                yield role, group, rows

    def worker_groups(self) -> list[WorkerGroup]:
        """See `TrainingRun.worker_groups`."""
        others = [*self.partners.values(), *self.partner_rollouts.values()]
        return list(dict.fromkeys([*super().worker_groups(), *others]))

    def checkpointed_groups(self) -> dict[str, GroupOf[TrainedWorker]]:
        """See `PPOTrainer.checkpointed_groups`."""
        groups = super().checkpointed_groups()
        for role, group in self.partners.items():
            groups[partner_role(role)] = group
        return groups

    def _note(self, role: str, metrics: dict[str, float]) -> None:
        """Note the metrics of a policy; those of a partner begin with its name."""
        prefix = f"{partner_role(role)}/" if role else ""
        for name, value in metrics.items():
            self.metrics[prefix + name] = value


def _rollout_name(role: str) -> str:
    """Return the name of the workers that generate by a role's own policy."""
    return f"rollout_{role}"
