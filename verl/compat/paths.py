"""The table of verl 0.5's import paths, with the new path of each name.

There is no file for `import verl.trainer.ppo.ray_trainer`; the finder in `verl/__init__.py` then
looks in this table and returns a module. Names of that module are looked up here on first use, with
a DeprecationWarning that names the new path. If a module exists, but one of its names has moved to
another room, the module looks in the table in its own `__getattr__`.
"""

import importlib
import importlib.util
import warnings
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from verl.compat.absent import ABSENT, ABSENT_NAMES

_AGENTS = "verl.agents.loops"
_ALGORITHMS = "verl.compat.algorithms"
_CONFIGS = "verl.compat.configs"
_CORE = "verl.compat.signatures"
_DECORATOR = "verl.compat.decorator"
_FILES = "verl.compat.files"
_FORMATS = "verl.agents.formats.tool_parser"
_FUNCTIONAL = "verl.compat.functional"
_MANAGERS = "verl.rewards.managers"
_METRICS = "verl.compat.metrics"
_MICRO = "verl.engine.dynamic_batches"
_PARTITIONS = "verl.compat.partitions"
_REGISTRIES = "verl.compat.registries"
_REWARDS = "verl.compat.rewards"
_INTERACTIONS = "verl.agents.interactions"
_TENSORS = "verl.compat.tensors"
_TIMERS = "verl.compat.timers"
_TOKENIZERS = "verl.compat.tokenizers"
_TOOLS = "verl.agents.tools"
_TRAINER = "verl.compat.trainer"
_WORKERS = "verl.compat.workers"
_RAY = "verl.single_controller.ray"
_GROUPS = "verl.single_controller"

Entry = str | tuple[str, str]


def _same(module: str, names: str) -> dict[str, Entry]:
    """Return entries for names that are unchanged in a new module; `names` is split at blanks."""
    return dict.fromkeys(names.split(), module)


_ALGORITHM_SECTIONS = _same(_CONFIGS, "AlgoConfig FilterGroupsConfig KLControlConfig PFPPOConfig")
_TIMER_NAMES = _same(_TIMERS, "log_gpu_memory_usage marked_timer simple_timer")
_WORKER_CLASS = {"ClassWithInitArgs": (_RAY, "RayClassWithInitArgs")}

# {old module that `python -m` starts: new module}
OLD_PROGRAMS = {
    "verl.trainer.main_sft": "verl.jobs.main_sft",
    "verl.trainer.fsdp_sft_trainer": "verl.jobs.main_sft",
    "verl.trainer.sft_trainer": "verl.jobs.main_sft",
    "verl.trainer.main_generation": "verl.jobs.main_generation",
    "verl.trainer.main_eval": "verl.jobs.main_eval",
    "verl.model_merger": "verl.jobs.main_merge",
    "verl.experimental.fully_async_policy.fully_async_main": (
        "verl.trainer.schedules.main_fully_async"
    ),
    "verl.experimental.one_step_off_policy.main_ppo": "verl.trainer.schedules.main_one_step_off",
}

# {old module: {name: new module}}, or {old module: {name: (new module, new name)}}
OLD_PATHS: dict[str, dict[str, Entry]] = {
    "verl.base_config": _same(_CONFIGS, "BaseConfig"),
    "verl.protocol": {
        "DataProtoFuture": "verl.single_controller.data_future",
        "list_of_dict_to_dict_of_list": _FUNCTIONAL,
    },
    "verl.trainer.config": _ALGORITHM_SECTIONS,
    "verl.trainer.config.algorithm": _ALGORITHM_SECTIONS,
    "verl.trainer.constants_ppo": {
        "PPO_RAY_RUNTIME_ENV": (_RAY, "RUNTIME_ENV"),
        "get_ppo_ray_runtime_env": (_RAY, "merged_runtime_env"),
    },
    "verl.trainer.ppo": {},
    "verl.trainer.ppo.core_algos": {
        "agg_loss": "verl.algorithms.masked",
        **_same(
            _CORE,
            "compute_entropy_loss compute_gae_advantage_return compute_gpg_outcome_advantage "
            "compute_grpo_outcome_advantage compute_grpo_passk_outcome_advantage "
            "compute_opo_outcome_advantage compute_policy_loss compute_policy_loss_clip_cov "
            "compute_policy_loss_gpg compute_policy_loss_gspo compute_policy_loss_kl_cov "
            "compute_reinforce_plus_plus_baseline_outcome_advantage "
            "compute_reinforce_plus_plus_outcome_advantage compute_remax_outcome_advantage "
            "compute_rewards compute_rloo_outcome_advantage compute_value_loss kl_penalty",
        ),
        **_same(
            _REGISTRIES,
            "register_policy_loss get_policy_loss_fn register_adv_est get_adv_estimator_fn "
            "AdvantageEstimator POLICY_LOSS_REGISTRY ADV_ESTIMATOR_REGISTRY",
        ),
        **_same(_ALGORITHMS, "compute_pf_ppo_reweight_data"),
        **_same("verl.algorithms.kl", "AdaptiveKLController FixedKLController get_kl_controller"),
    },
    "verl.trainer.ppo.metric_utils": _same(
        _METRICS,
        "bootstrap_metric calc_maj_val compute_data_metrics compute_throughout_metrics "
        "compute_timing_metrics process_validation_metrics reduce_metrics _compute_response_info",
    ),
    "verl.trainer.ppo.ray_trainer": {
        "RayPPOTrainer": "verl.compat.ray_trainer",
        **_same(_ALGORITHMS, "apply_kl_penalty compute_advantage compute_response_mask"),
        **_same(_TRAINER, "ResourcePoolManager Role WorkerType"),
        "AdvantageEstimator": _REGISTRIES,
    },
    "verl.trainer.ppo.utils": _same(_TRAINER, "Role WorkerType"),
    "verl.trainer.ppo.reward": _same(
        _REWARDS, "compute_reward get_custom_reward_fn load_reward_manager"
    ),
    "verl.experimental": {},
    "verl.experimental.fully_async_policy": {},
    "verl.experimental.one_step_off_policy": {},
    "verl.experimental.dataset": {},
    "verl.experimental.dataset.sampler": {
        "AbstractCurriculumSampler": ("verl.data.sampler", "CurriculumSampler"),
        "AbstractSampler": ("verl.data.sampler", "Sampler"),
    },
    "verl.experimental.agent_loop": _same(
        _AGENTS, "AgentLoopBase AgentLoopOutput AgentLoopMetrics register"
    ),
    "verl.experimental.agent_loop.agent_loop": {
        **_same(_AGENTS, "AgentLoopBase AgentLoopOutput AgentLoopMetrics TokenOutput register"),
        "AsyncLLMServerManager": (_AGENTS, "ServerManager"),
        "DictConfigWrap": ("verl.agents.loops.user_base", "TrainerConfig"),
    },
    "verl.experimental.agent_loop.single_turn_agent_loop": {},
    "verl.experimental.agent_loop.tool_agent_loop": {
        "AgentData": ("verl.agents.tools.agent_data", "AgentData")
    },
    "verl.experimental.agent_loop.utils": {},
    "verl.experimental.agent_loop.tool_parser": _same(_FORMATS, "FunctionCall ToolParser"),
    "verl.interactions": {},
    "verl.interactions.base": _same(_INTERACTIONS, "BaseInteraction"),
    "verl.interactions.gsm8k_interaction": _same(_INTERACTIONS, "Gsm8kInteraction"),
    "verl.interactions.utils": {},
    "verl.interactions.utils.interaction_registry": {
        "initialize_interactions_from_config": "verl.agents.interactions.registry",
        "get_interaction_class": "verl.agents.interactions.registry",
    },
    "verl.tools": {},
    "verl.tools.base_tool": {
        **_same(f"{_TOOLS}.base", "BaseTool"),
        **_same(f"{_TOOLS}.schemas", "OpenAIFunctionToolSchema ToolResponse"),
    },
    "verl.tools.schemas": _same(
        f"{_TOOLS}.schemas",
        "OpenAIFunctionCallSchema OpenAIFunctionParametersSchema OpenAIFunctionParsedSchema "
        "OpenAIFunctionPropertySchema OpenAIFunctionSchema OpenAIFunctionToolCall "
        "OpenAIFunctionToolSchema ToolResponse",
    ),
    "verl.tools.function_tool": _same(f"{_TOOLS}.functions", "function_tool"),
    "verl.tools.gsm8k_tool": _same(f"{_TOOLS}.builtin.answer_check", "Gsm8kTool"),
    "verl.tools.geo3k_tool": _same(f"{_TOOLS}.builtin.answer_check", "Geo3kTool"),
    "verl.tools.search_tool": _same(f"{_TOOLS}.builtin.search", "SearchTool"),
    "verl.tools.sandbox_fusion_tools": _same(f"{_TOOLS}.builtin.code", "SandboxFusionTool"),
    "verl.tools.mcp_base_tool": _same(f"{_TOOLS}.mcp", "MCPBaseTool"),
    "verl.tools.mcp_search_tool": _same(f"{_TOOLS}.mcp", "MCPSearchTool"),
    "verl.tools.utils": {},
    "verl.tools.utils.tool_registry": _same(
        f"{_TOOLS}.config_file", "ToolType get_tool_class initialize_tools_from_config"
    ),
    "verl.tools.utils.mcp_clients": {},
    "verl.tools.utils.mcp_clients.McpClientManager": _same(
        f"{_TOOLS}.mcp_clients", "ClientManager MCPClientManager"
    ),
    "verl.utils": {
        **_same(_TOKENIZERS, "hf_processor hf_tokenizer"),
        "omega_conf_to_dataclass": _CONFIGS,
    },
    "verl.utils.chat_template": {
        "initialize_system_prompt": ("verl.agents.loops.user_base", "system_prompt_of")
    },
    "verl.utils.checkpoint": {},
    "verl.utils.checkpoint.checkpoint_manager": _same(
        _FILES, "find_latest_ckpt_path get_checkpoint_tracker_filename"
    ),
    "verl.utils.config": _same(_CONFIGS, "omega_conf_to_dataclass"),
    "verl.utils.debug": _TIMER_NAMES,
    "verl.utils.debug.performance": _TIMER_NAMES,
    "verl.utils.device": _same(
        "verl.compat.devices", "get_device_id get_device_name is_cuda_available"
    ),
    "verl.utils.fs": _same(_FILES, "copy_to_local is_non_local"),
    "verl.utils.hdfs_io": _same(_FILES, "copy exists makedirs"),
    "verl.utils.import_utils": _same(
        "verl.compat.imports", "deprecated import_external_libs is_vllm_available load_extern_type"
    ),
    "verl.utils.metric": _same(_METRICS, "reduce_metrics"),
    "verl.utils.model": {
        "create_random_mask": "verl.utils.masks",
        "compute_position_id_with_mask": _TENSORS,
    },
    "verl.utils.dataset": {"RLHFDataset": "verl.data.rlhf_dataset"},
    "verl.utils.dataset.rl_dataset": {
        "RLHFDataset": "verl.data.rlhf_dataset",
        "collate_fn": ("verl.data.collate", "columns_of"),
    },
    "verl.utils.profiler": _TIMER_NAMES,
    "verl.utils.profiler.performance": _TIMER_NAMES,
    "verl.utils.py_functional": {
        **_same(
            _FUNCTIONAL,
            "DynamicEnum DynamicEnumMeta NestedNamespace append_to_dict convert_to_regular_types "
            "list_of_dict_to_dict_of_list rename_dict temp_env_var union_two_dict",
        ),
        "timeout_limit": "verl.compat.timeouts",
    },
    "verl.utils.reward_score": {
        "default_compute_score": "verl.compat.score",
        "_default_compute_score": ("verl.compat.score", "default_compute_score"),
    },
    "verl.utils.reward_score.gsm8k": {
        "compute_score": (_REWARDS, "gsm8k_score"),
        "extract_solution": (_REWARDS, "gsm8k_answer"),
    },
    "verl.utils.reward_score.math": {
        "compute_score": (_REWARDS, "math_score"),
        "is_equiv": (_REWARDS, "math_equal"),
        **_same(_REWARDS, "last_boxed_only_string remove_boxed"),
    },
    "verl.utils.reward_score.math_dapo": {"compute_score": (_REWARDS, "math_dapo_score")},
    "verl.utils.reward_score.search_r1_like_qa_em": {
        "compute_score": (_REWARDS, "search_score"),
        "compute_score_subem": (_REWARDS, "search_substring_score"),
        "extract_solution": (_REWARDS, "search_answer"),
    },
    "verl.utils.rollout_trace": _same("verl.compat.tracing", "rollout_trace_attr rollout_trace_op"),
    "verl.utils.seqlen_balancing": {
        **_same(
            _MICRO,
            "get_reverse_idx prepare_dynamic_batch rearrange_micro_batches restore_dynamic_batch",
        ),
        **_same(
            _PARTITIONS,
            "ceildiv get_seqlen_balanced_partitions greedy_partition karmarkar_karp "
            "log_seqlen_unbalance roundup_divisible",
        ),
    },
    "verl.utils.tokenizer": _same(_TOKENIZERS, "hf_processor hf_tokenizer set_pad_token_id"),
    "verl.utils.torch_functional": _same(
        _TENSORS,
        "clip_by_value entropy_from_logits get_constant_schedule_with_warmup "
        "get_cosine_schedule_with_warmup get_response_mask log_probs_from_logits_response "
        "logprobs_from_logits logprobs_from_logits_naive masked_mean masked_sum masked_var "
        "masked_whiten pad_2d_list_to_length pad_sequence_to_length postprocess_data "
        "remove_pad_token split_dict_tensor_into_batches tokenize_and_postprocess_data",
    ),
    "verl.utils.tracking": _same("verl.compat.tracking", "Tracking ValidationGenerationsLogger"),
    "verl.workers.fsdp_workers": {
        "ActorRolloutRefWorker": ("verl.workers", "ActorWorker"),
        "CriticWorker": "verl.workers",
        "RewardModelWorker": "verl.workers",
    },
    "verl.workers.rollout.replica": _same(_AGENTS, "TokenOutput"),
    "verl.workers.reward_manager": {
        "AbstractRewardManager": _REWARDS,
        **_same(
            _MANAGERS,
            "BatchRewardManager DAPORewardManager NaiveRewardManager PrimeRewardManager "
            "REWARD_MANAGER_REGISTRY",
        ),
        "get_reward_manager_cls": _REGISTRIES,
        "register": (_MANAGERS, "register_reward_manager"),
    },
    "verl.workers.reward_manager.registry": {
        "REWARD_MANAGER_REGISTRY": _MANAGERS,
        "get_reward_manager_cls": _REGISTRIES,
        "register": (_MANAGERS, "register_reward_manager"),
    },
    "verl.workers.reward_manager.abstract": _same(_REWARDS, "AbstractRewardManager"),
    "verl.workers.reward_manager.batch": _same(_MANAGERS, "BatchRewardManager"),
    "verl.workers.reward_manager.dapo": _same(_MANAGERS, "DAPORewardManager"),
    "verl.workers.reward_manager.naive": _same(_MANAGERS, "NaiveRewardManager"),
    "verl.workers.reward_manager.prime": _same(_MANAGERS, "PrimeRewardManager"),
    "verl.single_controller.base": _same(_GROUPS, "Worker WorkerGroup") | _WORKER_CLASS,
    "verl.single_controller.base.worker": _same(_GROUPS, "Worker"),
    "verl.single_controller.base.worker_group": _same(_GROUPS, "WorkerGroup") | _WORKER_CLASS,
    "verl.single_controller.base.decorator": {
        **_same(
            _GROUPS,
            "Dispatch Execute get_predefined_dispatch_fn make_nd_compute_dataproto_dispatch_fn "
            "register register_dispatch_mode update_dispatch_mode",
        ),
        **_same(
            _DECORATOR,
            "DISPATCH_MODE_FN_REGISTRY MAGIC_ATTR _check_dispatch_mode _check_execute_mode "
            "_materialize_futures _padding_size_key _split_args_kwargs_data_proto "
            "_split_args_kwargs_data_proto_with_auto_padding collect_all_to_all "
            "collect_dp_compute collect_dp_compute_data_proto dispatch_all_to_all "
            "dispatch_dp_compute dispatch_dp_compute_data_proto "
            "dispatch_dp_compute_data_proto_with_func dispatch_one_to_all "
            "get_predefined_execute_fn",
        ),
    },
    "verl.single_controller.ray": _same(_WORKERS, "create_colocated_worker_cls_fused"),
    "verl.single_controller.ray.base": {
        **_same(
            _RAY,
            "RayClassWithInitArgs RayResourcePool RayWorkerGroup SubRayResourcePool "
            "create_colocated_worker_cls merge_resource_pool split_resource_pool",
        ),
        **_same(
            _WORKERS,
            "FusedWorker create_colocated_worker_cls_fused create_colocated_worker_raw_cls",
        ),
    },
}


def is_old_name(path: str, name: str) -> bool:
    """Return whether verl 0.5 has the name at `path`, as far as the tables say."""
    return name in OLD_PATHS.get(path, {}) or _way_out(path, name) is not None


def find_old_name(path: str, name: str) -> Any:
    """Return the object of `name` at the old `path`, for the `__getattr__` of a module.

    Raises ImportError, with an alternative, for a name that this version does not have.
    """
    way = _way_out(path, name)
    if way is not None:  # "from module import name" hides the message of an AttributeError
        raise ImportError(f"No '{name}' in '{path}': {way}.", name=path)
    module, new_name = home_of(path, name)
    warnings.warn(f"{path}.{name} is now {module}.{new_name}", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(module), new_name)


def _way_out(path: str, name: str) -> str | None:
    """Return the alternative to a name or a submodule that this version does not have."""
    return ABSENT_NAMES.get(path, {}).get(name) or ABSENT.get(f"{path}.{name}")


def home_of(path: str, name: str) -> tuple[str, str]:
    """Return (new module, new name) of an old name."""
    entry = OLD_PATHS[path][name]
    return entry if isinstance(entry, tuple) else (entry, name)


class _OldModule(ModuleType):
    """A module that looks its names up in the table.

    A name that is set here is set in its new module. Otherwise unittest.mock.patch would have no
    effect. Deleting it brings back the value from before, because patches undo themselves so.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["_replaced"] = {}

    def __getattr__(self, name: str) -> Any:
        if is_old_name(self.__name__, name):
            return find_old_name(self.__name__, name)
        known = ", ".join(sorted(OLD_PATHS[self.__name__])) or "only submodules"
        raise AttributeError(
            f"'{self.__name__}' is an old path of verl 0.5; of its names this version has: {known}."
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OLD_PATHS[self.__name__]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in OLD_PATHS[self.__name__]:
            super().__setattr__(name, value)
            return
        module, new_name = home_of(self.__name__, name)
        home = importlib.import_module(module)
        self._replaced.setdefault(name, getattr(home, new_name))
        setattr(home, new_name, value)

    def __delattr__(self, name: str) -> None:
        if name not in OLD_PATHS[self.__name__]:
            super().__delattr__(name)
            return
        module, new_name = home_of(self.__name__, name)
        home = importlib.import_module(module)
        if name in self._replaced:
            setattr(home, new_name, self._replaced.pop(name))
        else:
            delattr(home, new_name)


class _ProgramLoader:
    """Run a program that has moved, for `python -m old.name`."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def get_code(self, fullname: str) -> CodeType:
        lines = (
            "import sys",
            f"from {OLD_PROGRAMS[fullname]} import *",
            f"from {OLD_PROGRAMS[fullname]} import main",
            "from verl.utils.entry import exit_code",
            "if __name__ == '__main__':",
            "    sys.exit(exit_code(main))",
        )
        return compile("\n".join(lines), fullname, "exec")

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), vars(module))  # the text of `get_code` only


class _OldModuleLoader:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _OldModule(spec.name)
        module.__path__ = []  # submodules are looked up in the table as well
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up on use."""

    def get_resource_reader(self, fullname: str) -> None:
        """Raise TypeError, which makes Hydra treat `pkg://verl.trainer.config` as empty."""
        raise TypeError(f"{fullname} is an old path without files.")


def find_old_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module of the table; None for a module that verl 0.5 does not have.

    Raises ModuleNotFoundError, with an alternative, for a module that this version does not have.
    """
    for absent, way in ABSENT.items():
        if name == absent or name.startswith(f"{absent}."):
            raise ModuleNotFoundError(f"No module named '{name}': {way}.", name=name)
    if name in OLD_PROGRAMS:
        moved = importlib.util.find_spec(OLD_PROGRAMS[name])
        assert moved is not None
        # `python -m` makes the origin sys.argv[0], which Ray takes for a path
        return importlib.util.spec_from_loader(name, _ProgramLoader(), origin=moved.origin)  # pyright: ignore[reportArgumentType]
    if name not in OLD_PATHS:
        return None
    return importlib.util.spec_from_loader(name, _OldModuleLoader(), is_package=True)  # pyright: ignore[reportArgumentType]


def page() -> str:
    """Return the table as Markdown."""
    lines = [
        "# Import paths of verl 0.5",
        "",
        "Generated: `python -m verl.compat > docs/reference/import_paths.md` writes this page anew.",
        "",
        (
            "The old path works, with a `DeprecationWarning` that names the new one. Paths that "
            "are the same are left out."
        ),
        "",
        "| old | new |",
        "|---|---|",
    ]
    for old, names in OLD_PATHS.items():
        for name in names:
            module, new_name = home_of(old, name)
            lines.append(f"| `{old}.{name}` | `{module}.{new_name}` |")

    lines += ["", "Programs, which `python -m` starts under both names:", ""]
    lines += ["| old | new |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in OLD_PROGRAMS.items()]

    lines += ["", "Not in this version:", "", "| old | way |", "|---|---|"]
    for name, way in ABSENT.items():
        lines.append(f"| `{name}` | {way} |")
    for module, names in ABSENT_NAMES.items():
        for name, way in names.items():
            lines.append(f"| `{module}.{name}` | {way} |")
    return "\n".join(lines) + "\n"
