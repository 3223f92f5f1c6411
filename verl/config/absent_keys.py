"""Keys that this version does not have, with the way out that an error names."""

_OWN_RANKS = (
    "the ranks of a rollout of its own are named among those of the run: "
    "trainer.placement.rollout=[2,3], for example."
)
_REWARD_RANKS = (
    "ranks of the reward model are named among those of the run: "
    "trainer.placement.reward_model=[2,3], for example."
)
_ENGINES = (
    "ranks that share no engine have one each, with samples of their own. "
    "actor_rollout_ref.rollout.tensor_model_parallel_size splits an engine."
)
_ONE_BACKEND = "leave it out: there is one backend, which shards with FSDP2 (strategy=fsdp)."
_NO_MEGATRON = (
    "there is no Megatron backend. FSDP2 shards the weights over engine.fsdp_size ranks, and "
    "engine.ulysses_sequence_parallel_size splits long rows."
)
_IN_PROCESSES = (
    "leave it out. reward_model.reward_manager=prime with "
    "+reward_model.reward_kwargs.num_processes=8 calls a function in as many processes."
)
_OWN_MANAGER = (
    "name the file or module of your manager in actor_rollout_ref.model.external_lib, decorate its "
    "class with @register('mine') of verl.workers.reward_manager, and set "
    "reward_model.reward_manager=mine."
)
_TIMELINE = "trainer.profile_steps=[2,5] writes the timelines of steps, and no profiler is started."
# Parts of names for features that this version does not have, and of names that later versions of
# verl use, with the way out.
_ABSENT = {
    "rollout.nnodes": _OWN_RANKS,
    "rollout.n_gpus_per_node": _OWN_RANKS,
    "rollout.total_rollout_steps": (
        "it counts prompts; the length of a run is trainer.total_training_steps, in steps of "
        "data.train_batch_size prompts."
    ),
    "rollout.test_freq": "the steps between two validations are trainer.test_freq.",
    "megatron": (
        "there is no Megatron backend. Shard with FSDP2 (strategy=fsdp) and split the rollout "
        "engine by actor_rollout_ref.rollout.tensor_model_parallel_size."
    ),
    "fsdp_config.model_dtype": (
        "the dtype of the parameters is actor_rollout_ref.model.dtype, of a critic "
        "critic.model.dtype: float32 or bfloat16."
    ),
    "tis_imp_ratio_cap": (
        "set algorithm.rollout_correction.rollout_is=token and "
        "algorithm.rollout_correction.rollout_is_threshold to the cap."
    ),
    "data.messages_key": "messages are in the column data.prompt_key.",
    "reward_model.enable_resource_pool": _REWARD_RANKS,
    "reward_model.nnodes": _REWARD_RANKS,
    "reward_model.n_gpus_per_node": _REWARD_RANKS,
    "rollout.data_parallel_size": _ENGINES,
    "rollout.expert_parallel_size": _ENGINES,
    "rollout.pipeline_model_parallel_size": _ENGINES,
    "engine.tensor_model_parallel_size": _NO_MEGATRON,
    "engine.pipeline_model_parallel_size": _NO_MEGATRON,
    "engine.virtual_pipeline_model_parallel_size": _NO_MEGATRON,
    "engine.context_parallel_size": _NO_MEGATRON,
    "engine.expert_": _NO_MEGATRON,
    "model_engine": _ONE_BACKEND,
    "veomni": _ONE_BACKEND,
    "torchtitan": _ONE_BACKEND,
    "optim.clip_grad": (
        "gradients are clipped by actor_rollout_ref.actor.grad_clip and critic.grad_clip."
    ),
    "optim.optimizer_impl": "leave it out: optim.optimizer is AdamW, AdamW8bit or Muon.",
    "optim.override_optimizer_config": (
        "arguments of the optimizer are keys: optim.betas, optim.eps, optim.weight_decay."
    ),
    "fsdp_config.dtype": (
        "the dtype of forward and backward passes is fsdp_config.compute_dtype: float32 or "
        "bfloat16."
    ),
    "fsdp_config.forward_only": "leave it out: actor and critic are trained, and no other role.",
    "fsdp_config.use_orig_params": "leave it out: FSDP2 always keeps the original parameters.",
    "fsdp_config.seed": "leave it out: trainer.seed is the seed of everything.",
    "fsdp_config.full_determinism": (
        "leave it out: draws follow trainer.seed, and PyTorch chooses the kernels of updates."
    ),
    "model.tokenizer_path": "the tokenizer is data.tokenizer.",
    "model.hf_config_path": (
        "config.json is read from the path of the model, and override_config replaces entries."
    ),
    "model.lora_adapter_path": (
        "training begins with new adapters. Merge yours into the weights before, by "
        "merge_and_unload of peft."
    ),
    "model.mtp.": "leave it out: heads that predict several tokens are not trained.",
    "model.tiled_mlp.": (
        "leave it out. enable_gradient_checkpointing and ulysses_sequence_parallel_size save the "
        "memory of long rows."
    ),
    "calculate_entropy": "leave it out: the metric actor/entropy is always computed.",
    "use_prefix_grouper": (
        "a prompt is computed once for its responses by actor_rollout_ref.actor.share_prompts."
    ),
    "reward_model.num_workers": _IN_PROCESSES,
    "reward.num_workers": _IN_PROCESSES,
    "reward_manager.source": _OWN_MANAGER,
    "reward_manager.module.": _OWN_MANAGER,
    "reward_model.reward_loop_": _OWN_MANAGER,
    "reward_model.use_reward_loop": (
        "leave it out: responses are scored while others are generated."
    ),
    "algorithm.rollout_is": (
        "set algorithm.rollout_correction.rollout_is=token or sequence, and "
        "algorithm.rollout_correction.rollout_is_threshold and rollout_is_mode."
    ),
    "reward_manager.name": "the reward manager is reward_model.reward_manager.",
    "reward_loop.": "leave it out: responses are scored while others are generated.",
    "transfer_queue.": "leave it out: ranks pass batches on by themselves.",
    **dict.fromkeys(
        ("rollout.skip.", "rollout.skip_rollout", "rollout.skip_dump", "rollout.skip_use_default"),
        "leave it out: `verl replay` executes a recorded step again.",
    ),
    "rollout.skip_tokenizer_init": "leave it out: engines take and give token ids.",
    "rollout.cudagraph_capture_sizes": (
        "leave it out: engines choose the sizes. actor_rollout_ref.rollout.enforce_eager=True "
        "captures no graph."
    ),
    "rollout.logprobs_mode": (
        "leave it out: log-probs are those of the distribution that tokens are drawn from "
        "(processed_logprobs)."
    ),
    "rollout.scheduling_policy": "leave it out: engines order their requests by themselves.",
    "rollout.over_sample_rate": (
        "leave it out: every response is waited for. trainer.mode=fully_async trains while long "
        "ones go on."
    ),
    "data_loader_seed": "the seed of everything is trainer.seed.",
    "trainer.remove_previous_ckpt_in_save": (
        "trainer.max_actor_ckpt_to_keep=1 keeps the newest checkpoint alone."
    ),
    "trainer.profile_interval": _TIMELINE,
    "profiler.": _TIMELINE,
    "global_profiler": _TIMELINE,
}
# Sections of training that other programs do not have, with the way out.
_PLAY_IN_TRAINING = (
    "this program draws one turn a prompt, without agent loops. Run `verl train` with "
    "trainer.val_only=True and these keys below actor_rollout_ref.rollout; give the file as "
    "data.val_files. trainer.validation_data_dir=FOLDER keeps the answers."
)
_OF_TRAINING = {
    "rollout.multi_turn": _PLAY_IN_TRAINING,
    "rollout.agent": _PLAY_IN_TRAINING,
}


def absent_key(path: str) -> str | None:
    """Return the way out for a key that this version does not support, or None."""
    for part, way in _ABSENT.items():
        if part in path:
            return way
    return None


def way_by_training(path: str, known: list[str]) -> str | None:
    """Return the way out for a key of a section that training has, and this program lacks."""
    for part, way in _OF_TRAINING.items():
        if part in path and not any(part in key for key in known):
            return way
    return None
