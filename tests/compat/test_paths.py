"""Names of verl 0.5 in users' recipes: they exist with these parameters and name new paths.

Their behavior is tested with the packages that define them.
"""

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from tests.shared_files import SHARED, needs_shared
from verl.compat import OLD_PATHS
from verl.utils.errors import ConfigError
from verl.utils.imports import load_extern_type

_INDEXED = "token_level_rewards, response_mask, index, epsilon=1e-6"
_LOSS = "old_log_prob, log_prob, advantages, response_mask"

# Module -> names, functions and classes with their parameters in order. Defaults are as published;
# `...` matches any default. A line without parentheses is an attribute or a property.
PUBLISHED = {
    "verl.tools.base_tool": """
        BaseTool(config, tool_schema)
        BaseTool.get_openai_tool_schema(self)
        BaseTool.create(self, instance_id=None, **kwargs)
        BaseTool.execute(self, instance_id, parameters, **kwargs)
        BaseTool.calc_reward(self, instance_id, **kwargs)
        BaseTool.release(self, instance_id, **kwargs)
    """,
    "verl.tools.geo3k_tool": """
        Geo3kTool(config, tool_schema)
        Geo3kTool.get_openai_tool_schema(self)
        Geo3kTool.create(self, instance_id=None, ground_truth=None, **kwargs)
        Geo3kTool.execute(self, instance_id, parameters, **kwargs)
        Geo3kTool.calc_reward(self, instance_id, **kwargs)
        Geo3kTool.release(self, instance_id, **kwargs)
    """,
    "verl.workers.rollout.replica": """
        TokenOutput(*, token_ids, log_probs=None, routed_experts=None, stop_reason=None)
    """,
    "verl": "DataProto(batch=None, non_tensor_batch=..., meta_info=...)",
    "verl.protocol": """
        DataProtoConfig
        DataProtoConfig.auto_padding
        pad_dataproto_to_divisor(data, size_divisor)
        unpad_dataproto(data, pad_size)
        union_tensor_dict(tensor_dict1, tensor_dict2)
        union_numpy_dict(tensor_dict1, tensor_dict2)
        fold_batch_dim(data, new_batch_size)
        unfold_batch_dim(data, batch_dims=2)
        collate_fn(x)
        DataProtoItem(batch=None, non_tensor_batch=..., meta_info=...)
        DataProto(batch=None, non_tensor_batch=..., meta_info=...)
        DataProto.__len__(self)
        DataProto.__getitem__(self, item)
        DataProto.save_to_disk(self, filepath)
        DataProto.load_from_disk(filepath)
        DataProto.print_size(self, prefix="")
        DataProto.check_consistency(self)
        DataProto.from_single_dict(data, meta_info=None, auto_padding=False)
        DataProto.from_dict(tensors=None, non_tensors=None, meta_info=None, num_batch_dims=1, auto_padding=False)
        DataProto.to(self, device)
        DataProto.select(self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None, deepcopy=False)
        DataProto.select_idxs(self, idxs)
        DataProto.slice(self, start=None, end=None, step=None)
        DataProto.pop(self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None)
        DataProto.rename(self, old_keys=None, new_keys=None)
        DataProto.union(self, other)
        DataProto.make_iterator(self, mini_batch_size, epochs, seed=None, dataloader_kwargs=None)
        DataProto.is_padding_enabled(self)
        DataProto.padding(self, padding_size, padding_candidate="")
        DataProto.chunk(self, chunks)
        DataProto.split(self, split_size)
        DataProto.concat(data)
        DataProto.reorder(self, indices)
        DataProto.repeat(self, repeat_times=2, interleave=True)
        DataProto.unfold_column_chunks(self, n_split, split_keys=None)
        DataProto.sample_level_repeat(self, repeat_times)
        DataProtoFuture(collect_fn, futures, dispatch_fn=None)
        DataProtoFuture.concat(data)
        DataProtoFuture.chunk(self, chunks)
        DataProtoFuture.get(self)
    """,
    "verl.single_controller.base": """
        Worker()
        Worker.rank
        Worker.world_size
        Worker.get_master_addr_port(self)
        Worker.get_availale_master_addr_port(self)
        Worker.get_cuda_visible_devices(self)
        Worker.execute_with_func_generator(self, func, *args, **kwargs)
        Worker.execute_func_rank_zero(self, func, *args, **kwargs)
    """,
    "verl.single_controller.base.decorator": """
        Dispatch.RANK_ZERO
        Dispatch.ONE_TO_ALL
        Dispatch.ALL_TO_ALL
        Dispatch.DP_COMPUTE
        Dispatch.DP_COMPUTE_PROTO
        Dispatch.DP_COMPUTE_PROTO_WITH_FUNC
        Dispatch.DP_COMPUTE_METRIC
        Execute.ALL
        Execute.RANK_ZERO
        register(dispatch_mode="all_to_all", execute_mode="all", blocking=True, materialize_futures=True)
        register_dispatch_mode(dispatch_mode_name, dispatch_fn, collect_fn)
        update_dispatch_mode(dispatch_mode, dispatch_fn, collect_fn)
        get_predefined_dispatch_fn(dispatch_mode)
        MAGIC_ATTR
        _check_dispatch_mode(dispatch_mode)
        _check_execute_mode(execute_mode)
        _split_args_kwargs_data_proto(chunks, *args, **kwargs)
        _split_args_kwargs_data_proto_with_auto_padding(chunks, *args, **kwargs)
        _materialize_futures(*args, **kwargs)
    """,
    "verl.single_controller.ray": """
        RayResourcePool(process_on_nodes=None, use_gpu=True, name_prefix=None, max_colocate_count=10, detached=False)
        RayClassWithInitArgs(cls, *args, **kwargs)
        RayWorkerGroup(resource_pool, ray_cls_with_init)
        RayWorkerGroup.spawn(self, prefix_set)
        RayWorkerGroup.spawn_fused(self, prefix_set)
        create_colocated_worker_cls(class_dict)
    """,
    "verl.trainer.ppo.core_algos": f"""
        register_policy_loss(name)
        get_policy_loss_fn(name)
        register_adv_est(name_or_enum)
        get_adv_estimator_fn(name_or_enum)
        POLICY_LOSS_REGISTRY
        ADV_ESTIMATOR_REGISTRY
        AdvantageEstimator
        AdaptiveKLController(init_kl_coef, target_kl, horizon)
        AdaptiveKLController.update(self, current_kl, n_steps)
        FixedKLController(kl_coef)
        FixedKLController.update(self, current_kl, n_steps)
        get_kl_controller(kl_ctrl)
        compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, lam)
        compute_grpo_outcome_advantage({_INDEXED}, norm_adv_by_std_in_grpo=True, config=None)
        compute_grpo_passk_outcome_advantage({_INDEXED}, norm_adv_by_std_in_grpo=True, config=None, **kwargs)
        compute_reinforce_plus_plus_baseline_outcome_advantage({_INDEXED}, config=None, **kwargs)
        compute_rloo_outcome_advantage({_INDEXED}, config=None, **kwargs)
        compute_opo_outcome_advantage({_INDEXED}, config=None, **kwargs)
        compute_reinforce_plus_plus_outcome_advantage(token_level_rewards, response_mask, config=None, **kwargs)
        compute_remax_outcome_advantage(token_level_rewards, reward_baselines, response_mask, config=None, **kwargs)
        compute_gpg_outcome_advantage({_INDEXED}, f_norm=1.0, alpha=1.0, config=None, **kwargs)
        agg_loss(loss_mat, loss_mask, loss_agg_mode)
        kl_penalty(logprob, ref_logprob, kl_penalty)
        compute_policy_loss({_LOSS}, cliprange=None, cliprange_low=None, cliprange_high=None, clip_ratio_c=3.0, \
loss_agg_mode="token-mean")
        compute_policy_loss_gpg({_LOSS}, loss_agg_mode="token-mean", config=None)
        compute_policy_loss_clip_cov({_LOSS}, loss_agg_mode="token-mean", config=None)
        compute_policy_loss_kl_cov({_LOSS}, loss_agg_mode="token-mean", config=None)
        compute_entropy_loss(logits, response_mask, loss_agg_mode="token-mean")
        compute_value_loss(vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode="token-mean")
    """,
    "verl.trainer.ppo.ray_trainer": """
        RayPPOTrainer
        RayPPOTrainer.init_workers(self)
        RayPPOTrainer.fit(self)
    """,
    "verl.trainer": "PPOTrainer",
    "verl.data": "RLDataLoader",
    "verl.models.reward_model": """
        RewardModel.from_pretrained(path)
        RewardModel.forward(self, input_ids)
    """,
    "verl.models.critic": "CriticModel.forward(self, input_ids, attention_mask=None)",
    "verl.utils.reward_score": """
        default_compute_score(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, \
concurrent_semaphore=None, memory_limit_mb=None, **kwargs)
    """,
    "verl.workers.reward_manager": """
        register(name)
        get_reward_manager_cls(name)
        REWARD_MANAGER_REGISTRY
        NaiveRewardManager(tokenizer, num_examine, compute_score=None, reward_fn_key="data_source")
        NaiveRewardManager.__call__(self, data, return_dict=False)
        BatchRewardManager(tokenizer, num_examine, compute_score=None, reward_fn_key="data_source")
        BatchRewardManager.__call__(self, data, return_dict=False)
        DAPORewardManager(tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", max_resp_len=None, \
overlong_buffer_cfg=None)
        DAPORewardManager.__call__(self, data, return_dict=False)
        PrimeRewardManager(tokenizer, num_examine, compute_score=None, reward_fn_key="data_source")
        PrimeRewardManager.__call__(self, data, return_dict=False)
    """,
    "verl.utils.import_utils": "load_extern_type(file_path, type_name)",
    "verl.utils.model": """
        create_random_mask(input_ids, max_ratio_of_valid_token, max_ratio_of_left_padding, min_ratio_of_valid_token=0)
    """,
    "verl.utils.dataset.rl_dataset": """
        RLHFDataset(data_files, tokenizer, config, processor=None)
        RLHFDataset.__len__(self)
        RLHFDataset.__getitem__(self, item)
        collate_fn(data_list)
    """,
    "verl.utils.seqlen_balancing": """
        ceildiv(a, b)
        get_reverse_idx(idx_map)
        prepare_dynamic_batch(data, max_token_len)
        rearrange_micro_batches(batch, max_token_len, dp_group=None, num_batches_divided_by=None, \
same_micro_num_in_dp=True, min_num_micro_batch=None, use_dynamic_bsz_balance=True)
        restore_dynamic_batch(data, batch_idx_list)
    """,
}


def names_of(module: str) -> Iterator[tuple[str, inspect.Signature | None]]:
    """Yield dotted name and parameters (None: an attribute) of each published line of a module."""
    for line in filter(None, map(str.strip, PUBLISHED[module].splitlines())):
        name, _, parameters = line.partition("(")
        yield (
            name,
            inspect.signature(eval(f"lambda {parameters[:-1]}: None")) if parameters else None,
        )


ALL = [(module, name, signature) for module in PUBLISHED for name, signature in names_of(module)]


def look_up(module: str, name: str) -> Any:
    """Return the object at an old path; a moved name must warn once with its new path."""
    first, *members = name.split(".")
    if ".ray" in module and "ray_trainer" not in module:
        pytest.importorskip("ray", reason="the optional backend is not installed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = getattr(importlib.import_module(module), first)

    entry = OLD_PATHS.get(module, {}).get(first)
    expected = (
        []
        if entry is None
        else [f"{module}.{first} is now {entry if isinstance(entry, str) else entry[0]}."]
    )
    messages = [str(warning.message) for warning in caught if "is now" in str(warning.message)]
    assert [
        message.startswith(start) for message, start in zip(messages, expected, strict=True)
    ] == [True] * len(caught)

    assert all(
        warning.category is DeprecationWarning and warning.filename == __file__
        for warning in caught
    )
    for member in members:
        found = getattr(found, member)
    return found


@pytest.mark.parametrize(
    ("module", "name", "published"), ALL, ids=[f"{module}.{name}" for module, name, _ in ALL]
)
def test_name_accepts_the_published_parameters(module, name, published):
    found = look_up(module, name)
    if published is None:
        return
    ours = list(inspect.signature(found).parameters.values())
    theirs = list(published.parameters.values())
    takes_any = [parameter for parameter in ours if parameter.kind is parameter.VAR_KEYWORD]

    if theirs and theirs[-1].kind is inspect.Parameter.VAR_KEYWORD:
        theirs.pop()
        assert takes_any

    assert [parameter.name for parameter in ours[: len(theirs)]] == [
        parameter.name for parameter in theirs
    ]
    for parameter, wanted in zip(ours, theirs):
        assert parameter.kind is wanted.kind, parameter
        if wanted.default is not ...:
            assert parameter.default == wanted.default, parameter
            assert type(parameter.default) is type(wanted.default) or isinstance(
                parameter.default, Enum
            ), parameter

    for parameter in ours[len(theirs) :]:  # added parameters must have defaults
        assert parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ), parameter


def test_kinds_of_objects():
    estimator = look_up("verl.trainer.ppo.core_algos", "AdvantageEstimator")
    assert issubclass(estimator, str)
    assert issubclass(estimator, Enum)
    assert estimator("grpo").name == "GRPO"
    assert isinstance(
        inspect.getattr_static(look_up("verl.single_controller.base", "Worker"), "rank"), property
    )
    assert look_up("verl", "DataProto") is look_up("verl.protocol", "DataProto")
    registry = look_up("verl.workers.reward_manager", "REWARD_MANAGER_REGISTRY")
    assert registry["dapo"] is look_up("verl.workers.reward_manager", "DAPORewardManager")
    assert {"naive", "batch", "prime"} <= set(registry)
    assert registry.get("nothing") is None


# ---- the published list itself, which a clone of the repository does not have --------------------

LIST = "verl05_names.txt"


def sections() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (SHARED / LIST).read_text().splitlines():
        if line.startswith("## "):
            heading = line.split()[1].removesuffix(".py").replace("/", ".")
            found[heading] = []
        elif found and not line.startswith("#"):
            found[heading].append(line)
    return found


def is_exempt(module: str) -> bool:
    """Skip agent loops: they run in the engine's process, without the workers of this section."""
    return module == "verl.experimental.agent_loop"


def listed_definitions(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, parameters) of functions, classes and methods in the list.

    Their lines have the forms `def f(...)`, `class C (...)` and `. method(...)`.
    """
    owner = ""
    waiting = []

    for line in lines:
        if match := re.match(r"\s*class (\w+)", line):
            owner = match[1]
            yield owner, ""
            yield from ((f"{owner}.{member}", "") for member in waiting)
            waiting = []
        elif match := re.match(r"\s*def (\w+)\((.*?)\)( ->.*)?$", line):
            yield match[1], match[2]
        elif match := re.match(r"\s*\. +(@\w+)?\s*(\w+)\((.*?)\)( ->.*)?$", line):
            if match[1] == "@property":  # precedes its class
                waiting.append(match[2])
            else:
                parameters = re.sub(r"^cls, ", "", match[3])
                yield (
                    (owner, re.sub("^self, ", "", parameters))
                    if match[2] == "__init__"
                    else (f"{owner}.{match[2]}", parameters)
                )


def arguments(parameters: str) -> list[tuple[str, Any]]:
    """Return names and defaults (`...` without one) of an annotated parameter list."""
    (function,) = ast.parse(f"def f({parameters}): ...").body
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args]
    defaults = [ast.literal_eval(default) for default in function.args.defaults]
    further = [*function.args.kwonlyargs, *filter(None, [function.args.kwarg])]
    return [
        *zip(names, [...] * (len(names) - len(defaults)) + defaults),
        *((argument.arg, ...) for argument in further),
    ]


def as_arguments(signature: inspect.Signature) -> list[tuple[str, Any]]:
    return [
        (p.name, ... if p.default is p.empty else p.default) for p in signature.parameters.values()
    ]


@needs_shared(LIST)
@pytest.mark.parametrize("module", ["verl.protocol", "verl.trainer.ppo.core_algos", "verl.tools"])
def test_every_listed_definition_is_checked(module):
    listed = {heading: lines for heading, lines in sections().items() if heading.startswith(module)}
    assert listed
    for heading, lines in listed.items():
        if is_exempt(heading):
            continue
        walked = dict(names_of(heading))
        for name, parameters in listed_definitions(lines):
            assert name in walked, name
            signature = walked[name]
            if parameters:
                assert signature is not None, name
                assert as_arguments(signature) == arguments(parameters), name


@needs_shared(LIST)
def test_every_listed_path_is_checked():
    lines = [line for heading in ("verl.utils", "rewards") for line in sections()[heading]]
    found = filter(
        None,
        (re.match(r"\s*([\w.]+\.)(\w+) ?\((.*?)(?:, \.\.\.)?\)( ->.*)?$", line) for line in lines),
    )
    paths = [(match[1].strip("."), match[2], match[3]) for match in found]
    assert len(paths) == 8
    for module, name, parameters in paths:
        module = module if module.startswith("verl.") else f"verl.utils.{module}"
        signature = dict(names_of(module))[name]
        assert signature is not None
        assert as_arguments(signature)[: len(arguments(parameters))] == arguments(parameters), name


@needs_shared(LIST)
def test_every_name_in_listed_prose_is_checked():
    """Find each word that looks like a name, in sections of prose, in the table."""
    table = " ".join([*PUBLISHED, *PUBLISHED.values()])
    known = set(re.findall(r"\w+", table))
    prose = sections()

    for heading in ("verl.single_controller.base", "rewards", "verl.utils"):
        words = set(
            re.findall(
                r"\b(?:[A-Za-z]\w*_\w+|[A-Z]\w*[a-z]\w*[A-Z]\w*|[A-Z]{3,})\b",
                "\n".join(prose[heading]),
            )
        )
        assert len(words) > 10
        assert words <= known | NOT_NAMES, words - known

    tools = {"verl.tools.base_tool", "verl.tools.geo3k_tool"}
    assert {heading for heading in prose if not is_exempt(heading)} - tools == {
        "verl.protocol",
        "verl.single_controller.base",
        "verl.trainer.ppo.core_algos",
        "rewards",
        "verl.utils",
    }


# Words for functions of users, and types.
NOT_NAMES = {
    "compute_score",
    "worker_group",
    "default_factory",
    "TensorDict",
    "dispatch_fn",
    "collect_fn",
}


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("old", OLD_PATHS)
def test_old_names_are_the_new_objects_and_warn(old):
    module = importlib.import_module(old)
    for name, entry in OLD_PATHS[old].items():
        new_module, new_name = entry if isinstance(entry, tuple) else (entry, name)
        with pytest.warns(DeprecationWarning, match=new_module):
            found = getattr(module, name)
        assert found is getattr(importlib.import_module(new_module), new_name)


def test_an_answer_of_generate_can_be_made_as_in_later_versions():
    make = look_up("verl.workers.rollout.replica", "TokenOutput")
    answer = make(token_ids=[3, 4], log_probs=[-1.0, -2.0], stop_reason="stop")
    assert answer == answer.token_ids == [3, 4]
    assert (answer.log_probs, answer.stop_reason) == ([-1.0, -2.0], "stop")
    assert make(token_ids=[3]).log_probs is None


def test_removed_name_is_an_error():
    import verl.trainer.ppo.core_algos as core_algos  # pyright: ignore[reportMissingImports]

    import verl.protocol

    with pytest.raises(AttributeError, match="old path of verl 0.5"):
        _ = core_algos.compute_everything
    with pytest.raises(AttributeError, match="'verl.protocol' has no attribute 'DataBatch'"):
        _ = verl.protocol.DataBatch


def test_a_misspelt_name_of_an_old_module_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"has no 'Gsm8kTol'. Nearest names in it: Gsm8kTool"):
        load_extern_type("verl.tools.gsm8k_tool", "Gsm8kTol")


def test_unknown_module_is_an_error():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.no_such_room")
