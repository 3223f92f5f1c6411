"""The actor: samples responses, tells log-probs, learns; one set of weights, one rollout engine
beside it."""

import time
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from verl.config import ActorRolloutRefConfig, log_prob_micro_batch, update_micro_batch
from verl.distributed.collectives import all_reduce_sum, gather_objects
from verl.distributed.mesh import init_rollout_mesh
from verl.engine.base import TrainEngine
from verl.engine.compile import compile_backend
from verl.engine.flops import FlopsModel, model_flops_utilization
from verl.engine.memory import told_as_out_of_memory
from verl.engine.microbatch import TokenBudget
from verl.models.divergence import Divergence
from verl.models.load import check_vocabulary, load_causal_lm, load_model_config
from verl.models.lora import adapters_off
from verl.models.packed import PackedCausalLM
from verl.protocol import DataProto
from verl.rollout import assemble, create_rollout_engine
from verl.rollout.embedded.tensor_parallel import check_tensor_parallel
from verl.rollout.types import Request, SamplingParams
from verl.single_controller import Dispatch, register, tell
from verl.utils.imports import import_user_code
from verl.weight_sync import DirectSender, ProofSchedule
from verl.workers.losses import DistillationTerm, PolicyObjective, mismatch_of_all
from verl.workers.reference import reference_columns
from verl.workers.trained import TrainedWorker, add_adapters, parameter_dtype
from verl.workers.updates import run_updates

_LESS_ROLLOUT = (
    "Lower actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs or "
    "max_num_batched_tokens, or keep the trainer's weights and moments on the host meanwhile: "
    "actor_rollout_ref.actor.fsdp_config.param_offload=True, optimizer_offload=True."
)


class ActorRolloutWorker(TrainedWorker):
    """Trains and generates with the same weights.

    Args:
        config: the `actor_rollout_ref` section.
        total_steps: training steps of the run, for the learning-rate schedule.
        tokenizer: for stop strings and the padding token.
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
        model_config, actor = config.model, config.actor
        assert model_config.path is not None
        import_user_code(model_config.external_lib)
        source: dict[str, Any] = {
            "path": model_config.path,
            "trust_remote_code": model_config.trust_remote_code,
            "override_config": model_config.override_config,
        }
        tensor_parallel_size = config.rollout.tensor_model_parallel_size
        if tensor_parallel_size > 1:
            check_tensor_parallel(load_model_config(**source), tensor_parallel_size)
        model = load_causal_lm(
            **source,
            dtype=parameter_dtype(model_config, device),
            max_length=config.rollout.max_model_len
            or config.rollout.prompt_length + config.rollout.response_length,
            weights=self.reads_weights,
        )
        check_vocabulary(model, tokenizer)
        add_adapters(model, model_config, "actor_rollout_ref.model")
        self.objective = PolicyObjective(actor)
        self.divergences: tuple[Divergence, ...] = ()
        self.engine = TrainEngine(
            PackedCausalLM(model, attention_kernel=model_config.attention_kernel),
            optim=actor.optim,
            fsdp=actor.fsdp_config,
            grad_clip=actor.grad_clip,
            device=device,
            total_steps=total_steps,
            gradient_checkpointing=model_config.enable_gradient_checkpointing,
            checkpointing_share=model_config.gradient_checkpointing_share,
            sequence_parallel_size=actor.ulysses_sequence_parallel_size,
            activation_offload=model_config.enable_activation_offload,
            compile_backend=compile_backend(
                actor.use_torch_compile, device, model.config.model_type
            ),
            fused_kernels=model_config.use_fused_kernels,
            share_prompts=actor.share_prompts,
        )
        self.flops = FlopsModel.from_model(model)
        self.rollout_mesh = init_rollout_mesh(self.engine.mesh, tensor_parallel_size)
        self.rollout = create_rollout_engine(
            config.rollout,
            model=model,
            tokenizer=tokenizer,
            device=self.engine.device,
            ranks=self.rollout_mesh.tensor,
        )
        self.weight_sender = DirectSender(
            self.rollout, world=self.engine.mesh.world, sharing=self.rollout_mesh.tensor
        )
        self.proofs = ProofSchedule(config.rollout.fingerprint_interval)
        self.rollout_is_asleep = False
        self.rollout_has_weights = False

    @property
    def rollout_rank(self) -> int:
        """See `Worker.rollout_rank`."""
        return self.rollout_mesh.data.rank

    @register(dispatch_mode=Dispatch.ROLLOUT_COMPUTE_PROTO)
    def generate_sequences(
        self, prompts: DataProto, *, n: int, params: SamplingParams, seed: int, step: int
    ) -> DataProto:
        """n responses to each of B prompts: the columns of phase "generate", B * n rows, samples of
        a prompt together.

        Reads the object columns `raw_prompt_ids` and `prompt_row`, the number of the prompt in the
        whole batch: sample ids, and with them the noise, do not depend on how the batch is dealt to
        the ranks.

        Tells (sample id, token ids) of every response when it is finished.
        """
        prompt_ids = [
            tuple(int(token) for token in ids) for ids in prompts.non_tensor_batch["raw_prompt_ids"]
        ]
        rows = [int(row) for row in prompts.non_tensor_batch["prompt_row"]]
        requests = [
            Request(prompt_ids=ids, sample_ids=tuple(range(row * n, (row + 1) * n)))
            for row, ids in zip(rows, prompt_ids)
        ]
        place = {
            row * n + sample: number * n + sample
            for number, row in enumerate(rows)
            for sample in range(n)
        }
        if not self.rollout_has_weights:
            self.sync_weights()
        self.rollout.forget_prefixes()
        with self._told_as_out_of_memory("generation"):
            completions = []
            for completion in self.rollout.generate(requests, params, seed=seed, step=step):
                completions.append(completion)
                if self.rollout_mesh.tensor.rank == 0:  # of the ranks that share an engine
                    tell((completion.sample_id, completion.token_ids))
        if self.config.rollout.free_cache_engine:
            self.rollout.sleep()
            self.rollout_is_asleep, self.rollout_has_weights = True, False
        columns = assemble(
            [ids for ids in prompt_ids for _ in range(n)],
            [
                replace(completion, sample_id=place[completion.sample_id])
                for completion in completions
            ],
            prompt_length=self.config.rollout.prompt_length,
            response_length=self.config.rollout.response_length,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        # What a clock says goes to perf/: all other metrics are the same in every run of one seed.
        metrics = {
            f"perf/rollout_{name}" if name.endswith("_s") else f"rollout/{name}": value
            for name, value in self._statistics_of_all().items()
        }
        return DataProto.from_dict(tensors=columns, meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto, sum_pi_squared: bool = False) -> DataProto:
        """Compute `old_log_probs` and `entropys` (B, R) of the current weights, and
        `sum_pi_squared` (B, R) if asked for."""
        budget = TokenBudget(
            *log_prob_micro_batch(self.config.rollout),
            key="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
            phase="the pass for old log-probs",
        )
        answer = self.engine.infer(
            batch,
            budget,
            temperature=self.config.rollout.temperature,
            entropy=True,
            sum_pi_squared=sum_pi_squared,
        )
        columns = {"old_log_probs": answer["log_probs"], "entropys": answer["entropy"]}
        if sum_pi_squared:
            columns["sum_pi_squared"] = answer["sum_pi_squared"]
        metrics: dict[str, float] = {}
        if "rollout_log_probs" in batch.batch.keys():
            mask = batch.batch["response_mask"]
            metrics = mismatch_of_all(
                batch.batch["rollout_log_probs"], answer["log_probs"], mask, self.engine.mesh.data
            )
        return DataProto.from_dict(tensors=columns, meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`reference_columns` of the frozen weights, which are the reference with LoRA."""
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

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(
        self, batch: DataProto, entropy_coeff: float | None = None
    ) -> dict[str, float]:
        """Every mini-batch of every epoch: forward, backward, step. `entropy_coeff` None: the
        configuration's.

        Mini-batches are made of whole prompts, in their order; with `shuffle` of single rows in a
        drawn order.
        """
        actor = self.config.actor
        self.objective.entropy_coeff = (
            actor.entropy_coeff if entropy_coeff is None else entropy_coeff
        )
        started = time.perf_counter()
        metrics = run_updates(
            self.engine,
            batch,
            self.objective,
            name="actor",
            mini_batch_rows=actor.ppo_mini_batch_size
            and actor.ppo_mini_batch_size * self.config.rollout.n,
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
        flops = actor.ppo_epochs * self.flops.train(batch.batch["attention_mask"].sum(-1).tolist())
        # Of the average rank; those along the sequence axis share the work on their rows.
        flops = (
            all_reduce_sum(torch.tensor(flops), self.engine.mesh.data).item()
            / self.engine.mesh.world.size
        )
        share = model_flops_utilization(flops, time.perf_counter() - started, self.engine.device)
        if share is not None:
            metrics["perf/mfu/actor"] = share
        return {**metrics, **self.objective.take_mismatch(self.engine.mesh.data)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self) -> None:
        """Hand the trainer's weights to the rollout engine."""
        with self._told_as_out_of_memory("the hand-over of weights to the rollout"):
            if self.rollout_is_asleep:
                self.rollout.wake()
                self.rollout_is_asleep = False
            log = self.proofs.next()
            named_tensors = self.engine.parameters_for_rollout(
                dtype=self.rollout.weight_dtype,
                bucket_bytes=self.config.rollout.update_weights_bucket_megabytes << 20,
                log=log,
                place=self.rollout.weight_place,
            )
            self.weight_sender.send(named_tensors, log)
            self.rollout_has_weights = True

    def _statistics_of_all(self) -> dict[str, float]:
        """The rollout's numbers over all engines: what was counted is added up, what was measured
        is the largest."""
        statistics = gather_objects(self.rollout.statistics(), self.rollout_mesh.data)
        counted = ("_tokens", "_steps", "_pages", "preemptions", "_per_s")
        return {
            name: (sum if name.endswith(counted) else max)(each[name] for each in statistics)
            for name in statistics[0]
        }

    def _told_as_out_of_memory(self, phase: str) -> AbstractContextManager[None]:
        return told_as_out_of_memory(
            phase, self.engine.device, _LESS_ROLLOUT, rank=self.engine.guard.rank
        )
