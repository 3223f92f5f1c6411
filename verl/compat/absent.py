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

# Names of old modules that this version does not have, with an alternative for each.
ABSENT_NAMES = {
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
        "ToolAgentLoop": _OWN_LOOPS.format("tool_agent")
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
    *("geo3k", "math_batch", "math_dapo", "math_verify", "prime_code", "prime_math"),
    *("sandbox_fusion", "search_r1_like_qa_em"),
)

# Modules that this version does not have, with an alternative for each.
ABSENT = {
    **{f"verl.utils.reward_score.{name}": _RULES for name in _RULE_MODULES},
    "verl.workers.megatron_workers": (
        "the Megatron backend is not in this version. Set strategy=fsdp; for large models, "
        "actor_rollout_ref.rollout.tensor_model_parallel_size"
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
