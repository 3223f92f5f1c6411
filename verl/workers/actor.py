"""The actor role: computes log-probs, learns, and gives its weights to the rollout."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.config import (
    ActorRolloutRefConfig,
    log_prob_micro_batch,
    update_micro_batch,
)
from verl.distributed.collectives import all_reduce_sum, max_of
from verl.engine.base import TrainEngine
from verl.engine.flops import FlopsModel, model_flops_utilization
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.attention import prepare
from verl.models.divergence import Divergence
from verl.models.lora import adapters_off
from verl.models.packed import PackedCausalLM
from verl.models.routing import route_dtype, watch_routers
from verl.models.vision import keep_features
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.utils.devices import memory_metrics
from verl.weight_sync import Endpoint, FingerprintLog, Meeting, Offer, ProofSchedule, Route
from verl.workers.mismatch import mismatch_of_all
from verl.workers.policy_objective import PolicyObjective
from verl.workers.policy_terms import DistillationTerm, LoglinearProximal, RolloutReinforce
from verl.workers.reference import reference_columns
from verl.workers.trained import TrainedWorker
from verl.workers.updates import run_updates


class ActorWorker(TrainedWorker):
    """Train a causal LM with a policy loss.

    Args:
        config: the `actor_rollout_ref` section.
        total_steps: training steps of the run, for the learning-rate schedule.
        device: where the model is trained.
        tokenizer: saved with the weights.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        *,
        total_steps: int,
        device: torch.device,
        tokenizer: Any,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.checkpoint = config.actor.checkpoint
        actor = config.actor
        rollout = config.rollout

        model = self.load_policy(config, device, max_length=rollout.longest_sequence)
        if actor.router_replay.mode != "disabled":
            watch_routers(model, prepare(model))
        self.objective = PolicyObjective(actor)
        self.divergences: tuple[Divergence, ...] = ()
        self.engine = TrainEngine(
            PackedCausalLM(model, attention_kernel=config.model.attention_kernel),
            EngineOptions.of(actor, device, policy=config),
            total_steps=total_steps,
        )
        self.features = keep_features(self.engine.hf_model)
        self.flops = FlopsModel.from_model(model)
        self.proofs = ProofSchedule(rollout.fingerprint_interval)
        self._offers: list[Offer] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto, sum_pi_squared: bool = False) -> DataProto:
        """Compute `old_log_probs` and `entropys` (B, R) of the current weights.

        Adds `sum_pi_squared` (B, R) if asked for, and `routed_experts` (B, R, C) in mode R2 of
        `actor.router_replay`.
        """
        budget = TokenBudget(
            *log_prob_micro_batch(self.config.rollout),
            key="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
            phase="the pass for old log-probs",
        )
        replay = self.config.actor.router_replay.mode
        answer = self.engine.infer(
            batch,
            budget,
            ["routed_experts"] if replay == "R3" else [],
            routed_experts=route_dtype(self.engine.hf_model) if replay == "R2" else None,
            temperature=self.config.rollout.temperature,
            entropy=True,
            sum_pi_squared=sum_pi_squared,
        )

        columns = {"old_log_probs": answer["log_probs"], "entropys": answer["entropy"]}
        if sum_pi_squared:
            columns["sum_pi_squared"] = answer["sum_pi_squared"]
        if replay == "R2":
            columns["routed_experts"] = answer["routed_experts"]
        metrics: dict[str, float] = {}

        if "rollout_log_probs" in batch.batch.keys():
            mask = batch.batch["response_mask"]
            metrics = mismatch_of_all(
                batch.batch["rollout_log_probs"], answer["log_probs"], mask, self.engine.mesh.data
            )

        return DataProto.from_dict(tensors=columns, meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Compute `reference_columns` by the frozen weights, which are the reference with LoRA."""
        assert self.config.model.lora_rank > 0, "without adapters the first policy is gone"
        with adapters_off(self.engine.hf_model):
            return reference_columns(self.engine, batch, self.config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add_divergence(self, asked: Divergence) -> None:
        """Compute a divergence from a frozen model in every update, for the loss to read."""
        head = asked.head.to(self.engine.device)
        self.divergences = (*self.divergences, replace(asked, head=head))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def distill(self, term: DistillationTerm) -> None:
        """Add a divergence from a teacher to the loss."""
        self.objective.distillation = term

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_loglinear_proximal(self, proximal: LoglinearProximal) -> None:
        """Interpolate the old log-probs in the update, by the age of each token."""
        self.objective.proximal = proximal

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compare_with_rollout(self) -> None:
        """Compare updates with the rollout, where no pass does that before them."""
        self.objective.seen.compares_first = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_rollout_reinforce(self, loss: RolloutReinforce) -> None:
        """Replace the policy loss by the policy gradient weighted against the rollout."""
        self.objective.reinforce = loss

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(
        self,
        batch: DataProto,
        entropy_coeff: float | None = None,
        mini_batch_rows: int | None = None,
    ) -> dict[str, float]:
        """Run forward, backward and step for every mini-batch of every epoch.

        Mini-batches are made of whole prompts, in their order; with `shuffle` of single rows in a
        drawn order.

        Args:
            entropy_coeff: None: the configuration's.
            mini_batch_rows: rows of a mini-batch on all ranks, where samples have several rows;
                None: ppo_mini_batch_size * rollout.n.
        """
        actor = self.config.actor
        self.objective.entropy_coeff = actor.entropy_coeff
        if entropy_coeff is not None:
            self.objective.entropy_coeff = entropy_coeff

        if mini_batch_rows is None and actor.ppo_mini_batch_size is not None:
            mini_batch_rows = actor.ppo_mini_batch_size * self.config.rollout.n

        started = time.perf_counter()
        metrics = run_updates(
            self.engine,
            batch,
            self.objective,
            name="actor",
            mini_batch_rows=mini_batch_rows,
            epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            loss_agg_mode=actor.loss_agg_mode,
            budget=TokenBudget(
                *update_micro_batch(actor),
                key="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
                phase="the actor's update",
            ),
            temperature=self.config.rollout.temperature,
            entropy=True,
            divergences=self.divergences,
        )
        if self.features is not None:
            self.features.begin_round()

        metrics |= self._utilization(batch, started)
        metrics |= self.peak_memory()
        return {**metrics, **self.objective.take_mismatch(self.engine.mesh.data)}

    def _utilization(self, batch: DataProto, started: float) -> dict[str, float]:
        """Return the model FLOPs utilization of an update, where the device's peak is known.

        Every rank must call it at the end of the update.

        Args:
            started: `time.perf_counter` at its beginning.
        """
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        flops = torch.tensor(self.config.actor.ppo_epochs * self.flops.train(lengths))
        # The average rank's; those along the sequence axis share the work on their rows.
        total = all_reduce_sum(flops, self.engine.mesh.data).item()
        average = total / self.engine.mesh.world.size

        seconds = time.perf_counter() - started
        share = model_flops_utilization(average, seconds, self.engine.device)
        return {} if share is None else {"perf/mfu/actor": share}

    def peak_memory(self) -> dict[str, float]:
        """Return the largest peak of all ranks since the last update, see `memory_metrics`."""
        return memory_metrics(self.engine.device, partial(max_of, axis=self.engine.mesh.world))

    # ---------------------------------------------------------------- weights

    def named_weights(
        self,
        dtype: torch.dtype,
        log: FingerprintLog | None = None,
        place: Callable[[str], torch.Tensor | None] = lambda name: None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Give (name, whole tensor) of every weight; see `TrainEngine.parameters_for_rollout`."""
        megabytes = self.config.rollout.update_weights_bucket_megabytes
        return self.engine.parameters_for_rollout(
            dtype=dtype, bucket_bytes=megabytes << 20, log=log, place=place
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_endpoint(self) -> Endpoint:
        """Return the place where the weights are trained."""
        return Endpoint.here(self.engine.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offer_weights(
        self, routes: Sequence[Route], dtype: torch.dtype, folder: Path
    ) -> list[Meeting]:
        """Open this rank's ends of `routes` to rollouts on ranks of their own.

        Returns the meetings where the receivers find this rank; `accept_receivers` waits for them.
        """
        rank = self.engine.mesh.world.rank
        megabytes = self.config.rollout.update_weights_bucket_megabytes
        routes_of_sender = Counter(route.sender for route in routes)
        self._rounds = max(routes_of_sender.values())
        self._receivers_dtype = dtype
        self._offers = []
        for route in routes:
            if route.sender == rank:
                offer = Offer(
                    route,
                    device=self.engine.device,
                    bucket_bytes=megabytes << 20,
                    dtype=dtype,
                    folder=folder,
                )
                self._offers.append(offer)

        return [offer.meeting for offer in self._offers]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def accept_receivers(self) -> None:
        """Wait for the receivers of every route of this rank."""
        self._senders = [offer.accept() for offer in self._offers]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self) -> None:
        """Send the weights to rollouts on ranks of their own, which `receive_weights` meanwhile.

        Every rank gathers; a rank without a route of its own reads the gathered weights and drops
        them.
        """
        is_proved = self.proofs.next() is not None
        for number in range(self._rounds):
            log = FingerprintLog() if is_proved else None
            named_tensors = self.named_weights(self._receivers_dtype, log)
            if number < len(self._senders):
                self._senders[number].send(named_tensors, log)
                continue
            for _ in named_tensors:
                pass
