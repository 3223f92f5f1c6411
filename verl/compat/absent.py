"""Modules and names of verl that this version lacks, each with the way out."""

_OWN_CHECKPOINTS = (
    "checkpoint managers are not in this version. Call trainer.save_checkpoint() and "
    "trainer.load_checkpoint(), or read the files with verl.checkpoint"
)

_NO_WORKERS = (
    "agent loops run in the process of the rollout engine. Set "
    "actor_rollout_ref.rollout.mode=async; verl.agents.AgentRunner plays episodes in a program"
)

_OWN_ENGINES = (
    "engines are chosen by actor_rollout_ref.rollout.name. Register one of your own in "
    "verl.rollout.rollout_engines, by the protocol verl.rollout.RolloutEngine"
)

_OWN_LOOPS = (
    "the built-in loops are chosen by their names, agent_name={}. For a loop of your own, derive "
    "from verl.agents.AgentLoopBase"
)

_OWN_TEMPLATES = (
    "tokenizers render messages. Call tokenizer.apply_chat_template(messages, return_dict=False), "
    "or in an agent loop await self.apply_chat_template(messages)"
)

_OWN_TOOL_TEXTS = (
    "the built-in loop renders answers of tools for gpt-oss: set agent_name=tool_agent and "
    "multi_turn.format=gpt-oss. In a loop of your own, render the call and its answer together by "
    "await self.apply_chat_template(messages)"
)

_OWN_DEALING = (
    "batches are dealt to the shares of a mesh by its name. Register the method with "
    "make_nd_compute_dataproto_dispatch_fn(mesh_name)"
)

_OWN_PICKLES = (
    "batches pickle the bytes of their own rows. Call pickle.dumps(data, protocol=5) and "
    "pickle.loads"
)

_OWN_RANKS = (
    "a worker has one rank, and its model knows the others. Read worker.rank and "
    "worker.world_size, or worker.data_rank and worker.data_size for its share of a batch"
)

_OWN_POOLS = "pools are those of Ray. Make a verl.single_controller.ray.RayResourcePool"

_OWN_ROLES = (
    "a trainer starts the roles that its configuration needs. Give RayPPOTrainer all of them; its "
    "use_critic, use_reference_policy and use_rm say which are used"
)

_MEGATRON = (
    "the Megatron backend is not in this version. Set strategy=fsdp; for large models, "
    "actor_rollout_ref.rollout.tensor_model_parallel_size"
)

# Names of old modules that this version does not have, with an alternative for each.
ABSENT_NAMES = {
    "verl.protocol": {
        "all_gather_data_proto": (
            "a call on a group joins the answers of its ranks. Within a worker, call "
            "torch.distributed.all_gather_object(pieces, data), and DataProto.concat(pieces)"
        ),
        **dict.fromkeys(
            (
                *("serialize_single_tensor", "deserialize_single_tensor"),
                *("serialize_tensordict", "deserialize_tensordict"),
            ),
            _OWN_PICKLES,
        ),
    },
    "verl.single_controller.base": {
        "ResourcePool": _OWN_POOLS,
        "DistRankInfo": _OWN_RANKS,
        "DistGlobalInfo": _OWN_RANKS,
    },
    "verl.single_controller.base.worker": dict.fromkeys(
        ("DistRankInfo", "DistGlobalInfo"), _OWN_RANKS
    ),
    "verl.single_controller.base.worker_group": {"ResourcePool": _OWN_POOLS},
    "verl.single_controller.base.decorator": dict.fromkeys(
        (
            *("dispatch_nd_compute", "dispatch_nd_compute_dataproto"),
            *("collect_nd_compute", "collect_nd_compute_dataproto"),
            "make_nd_compute_dispatch_fn",
        ),
        _OWN_DEALING,
    ),
    "verl.single_controller.ray.base": {
        "func_generator": (
            "a group has the registered methods of its worker. Call group.method(...), or "
            "group.execute_all('method', ...) for any other"
        ),
        "get_random_string": "Python has one. Call secrets.token_hex()",
        "sort_placement_group_by_node_ip": (
            "a pool reserves its room itself. Make a RayResourcePool([processes of each node])"
        ),
    },
    "verl.trainer.main_ppo": {
        "TaskRunner": (
            "the trainer runs in the process that is started. Call run_ppo(config), or for parts "
            "of your own RayPPOTrainer(config, ...).init_workers() and fit()"
        ),
        "create_rl_dataset": (
            "the trainer builds the datasets of data.train_files and data.val_files. Leave them "
            "out, or make verl.utils.dataset.RLHFDataset(data_files, tokenizer, config.data)"
        ),
        "create_rl_sampler": (
            "the trainer draws rows as data.sampler, data.shuffle and data.seed say. Leave "
            "train_sampler out, or make a verl.data.sampler.SeededSampler(len(dataset), "
            "shuffle=..., seed=...)"
        ),
    },
    "verl.trainer.ppo.utils": dict.fromkeys(
        ("need_critic", "need_reference_policy", "need_reward_model"), _OWN_ROLES
    ),
    "verl.utils.checkpoint.checkpoint_manager": {"BaseCheckpointManager": _OWN_CHECKPOINTS},
    "verl.experimental.agent_loop": dict.fromkeys(
        ("AgentLoopManager", "AgentLoopWorker"), _NO_WORKERS
    ),
    "verl.experimental.agent_loop.agent_loop": dict.fromkeys(
        ("AgentLoopManager", "AgentLoopWorker", "get_trajectory_info"), _NO_WORKERS
    ),
    "verl.experimental.agent_loop.single_turn_agent_loop": {
        "SingleTurnAgentLoop": _OWN_LOOPS.format("single_turn_agent")
    },
    "verl.experimental.agent_loop.tool_agent_loop": {
        "ToolAgentLoop": _OWN_LOOPS.format("tool_agent"),
        "AgentState": (
            "the built-in loop with tools has no states to step through. Derive a loop of your own "
            "from verl.agents.AgentLoopBase, with states of your own in an enum.Enum"
        ),
    },
    "verl.experimental.agent_loop.utils": {
        **dict.fromkeys(
            (
                "add_generation_prompt_for_gpt_oss",
                "build_gpt_oss_tool_response_text",
                "format_gpt_oss_tool_response_manually",
            ),
            _OWN_TOOL_TEXTS,
        ),
        "resolve_config_path": (
            "paths in the configuration are relative to the working directory of the program. Open the "
            "path as it is"
        ),
    },
    "verl.experimental.agent_loop.tool_parser": {
        "HermesToolParser": (
            "parsers are chosen by their names. Call ToolParser.get_tool_parser('hermes', "
            "tokenizer)"
        )
    },
    "verl.workers.rollout.replica": dict.fromkeys(
        ("RolloutReplica", "RolloutReplicaRegistry", "get_rollout_replica_class"), _OWN_ENGINES
    ),
    "verl.utils.chat_template": {
        "apply_chat_template": _OWN_TEMPLATES,
        "extract_system_prompt_and_generation": (
            "initialize_system_prompt(tokenizer) of this module returns the ids before the first "
            "message. For those of the generation prompt, render messages with and without "
            "add_generation_prompt, and take what the first adds"
        ),
    },
    "verl.utils.tokenizer": {"normalize_token_ids": _OWN_TEMPLATES},
    "verl.utils.rollout_trace": {
        "RolloutTraceConfig": (
            "episodes are recorded with every step (trainer.record), and `verl view` shows their "
            "turns. Leave the set-up of tracing out"
        )
    },
}

_RULES = (
    "rules are chosen by the data source. Call verl.utils.reward_score.default_compute_score("
    "data_source, solution_str, ground_truth)"
)
_RULE_MODULES = (
    *("geo3k", "math_batch", "math_verify", "prime_code", "prime_math", "sandbox_fusion"),
)

# Modules that this version does not have, with an alternative for each.
ABSENT = {
    **{f"verl.utils.reward_score.{name}": _RULES for name in _RULE_MODULES},
    "verl.workers.megatron_workers": _MEGATRON,
    "verl.single_controller.base.megatron": _MEGATRON,
    "verl.single_controller.ray.megatron": _MEGATRON,
    "verl.utils.ray_utils": (
        "the pool gives each process its GPU and its variables. Leave the helpers out, and call "
        "ray.put for objects of your own"
    ),
    "verl.utils.checkpoint.fsdp_checkpoint_manager": _OWN_CHECKPOINTS,
    "verl.utils.checkpoint.megatron_checkpoint_manager": _OWN_CHECKPOINTS,
    "verl.workers.sharding_manager": (
        "weights go to the rollout by themselves (verl.weight_sync). Call trainer.sync_weights()"
    ),
    "verl.third_party": (
        "patched engines are not in this version. Use actor_rollout_ref.rollout.name=embedded"
    ),
}
