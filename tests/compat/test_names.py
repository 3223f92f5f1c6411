"""Partitions, files, trackers, tokenizers, timers and sections under verl 0.5's names."""

import dataclasses
import importlib
import importlib.util
import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from omegaconf import OmegaConf

from tests.agents.tokenizers import word_tokenizer
from verl.compat.paths import OLD_PROGRAMS
from verl.tracking import TrackerBackend, tracker_backends
from verl.trainer.main_ppo import run_ppo
from verl.utils.errors import CheckpointError, ConfigError, TrackerError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.base_config import BaseConfig  # pyright: ignore
    from verl.single_controller.base import decorator  # pyright: ignore
    from verl.trainer.config import AlgoConfig, FilterGroupsConfig  # pyright: ignore
    from verl.utils.checkpoint import checkpoint_manager  # pyright: ignore
    from verl.utils.config import omega_conf_to_dataclass  # pyright: ignore
    from verl.utils.debug import log_gpu_memory_usage, marked_timer  # pyright: ignore

    from verl.utils import fs, hdfs_io, hf_processor, hf_tokenizer, seqlen_balancing, tracking  # pyright: ignore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LENGTHS = [9, 1, 8, 2, 7, 3, 6, 4, 5, 5, 10, 12]


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_partitions_are_complete_and_balanced(k, equal_size):
    parts = seqlen_balancing.get_seqlen_balanced_partitions(LENGTHS, k, equal_size)
    assert len(parts) == k
    assert sorted(index for part in parts for index in part) == list(range(len(LENGTHS)))
    assert all(part == sorted(part) for part in parts)
    sums = [sum(LENGTHS[index] for index in part) for part in parts]
    assert max(sums) - min(sums) <= 3
    if equal_size:
        assert {len(part) for part in parts} == {len(LENGTHS) // k}
    greedy = seqlen_balancing.greedy_partition(LENGTHS, k, equal_size)
    assert sorted(index for part in greedy for index in part) == list(range(len(LENGTHS)))


def test_impossible_partitions_are_assertion_errors():
    with pytest.raises(AssertionError, match="at least as many"):
        seqlen_balancing.get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(AssertionError, match="divisible by 2"):
        seqlen_balancing.get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)


def test_partition_statistics():
    logged = seqlen_balancing.log_seqlen_unbalance([1, 2, 3, 8], [[0, 3], [1, 2]], "tokens")
    assert logged == {
        "tokens/min": 3,
        "tokens/max": 11,
        "tokens/minmax_diff": 8,
        "tokens/balanced_min": 5,
        "tokens/balanced_max": 9,
        "tokens/mean": 7.0,
    }
    assert seqlen_balancing.roundup_divisible(7, 4) == 8


def test_files(tmp_path: Path):
    assert fs.copy_to_local(str(tmp_path)) == str(tmp_path)
    for refused in (fs.copy_to_local, hdfs_io.exists, hdfs_io.makedirs):
        with pytest.raises(ConfigError, match="hdfs dfs -get"):
            refused("hdfs://host/folder")
    with pytest.raises(ConfigError, match="/dev/shm"):
        fs.copy_to_local("model", use_shm=True)
    hdfs_io.makedirs(str(tmp_path / "a/b"), exist_ok=True)
    (tmp_path / "a/b/file").write_text("text")
    hdfs_io.copy(str(tmp_path / "a"), str(tmp_path / "c"))
    assert hdfs_io.exists(str(tmp_path / "c/b/file"))
    assert not hdfs_io.exists(str(tmp_path / "d"))


def test_newest_checkpoint(tmp_path: Path):
    find = checkpoint_manager.find_latest_ckpt_path
    assert find(None) is None
    assert find(str(tmp_path)) is None
    Path(checkpoint_manager.get_checkpoint_tracker_filename(str(tmp_path))).write_text("7")
    assert find(str(tmp_path)) is None, "the folder is gone"
    (tmp_path / "global_step_7").mkdir()
    assert find(str(tmp_path)) == str(tmp_path / "global_step_7")
    Path(checkpoint_manager.get_checkpoint_tracker_filename(str(tmp_path))).write_text("")
    with pytest.raises(CheckpointError, match=r"iteration\.txt must hold the step .*, got ''"):
        find(str(tmp_path))


def test_tracking_writes_logged_values(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = tracking.Tracking("project", "run", ["file"], {"seed": 1})
    tracker.log({"loss": 0.5}, step=3)
    tracker.log({"loss": 0.25}, step=4, backend=["wandb"])
    tracker.finish()
    (written,) = (tmp_path / "checkpoints/project/run").glob("*.jsonl")
    lines = written.read_text().splitlines()
    assert len(lines) == 1
    assert '"loss": 0.5' in lines[0]


def test_tracking_writes_also_where_another_tracker_fails(tmp_path: Path, monkeypatch):
    class Raises(TrackerBackend):
        def log(self, metrics, step):
            raise ValueError("no network")

    monkeypatch.chdir(tmp_path)
    tracker_backends.register("raises")(Raises)
    try:
        tracker = tracking.Tracking("project", "run", ["raises", "file"])
        with pytest.raises(TrackerError, match="no network"):
            tracker.log({"loss": 0.5}, step=3)
        tracker.finish()
    finally:
        tracker_backends.remove("raises")
    assert '"loss": 0.5' in (tmp_path / "checkpoints/project/run/metrics.jsonl").read_text()


def test_samples_use_the_tracker_of_the_run(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = tracking.Tracking("project", "run", ["file"])
    generations = tracking.ValidationGenerationsLogger()
    generations.log(["file"], [["1+1?", "2", 1.0], ["2+2?", "5", 0.0]], step=7)
    tracker.finish()
    written = tmp_path / "checkpoints/project/run/generations/7.jsonl"
    assert [json.loads(line) for line in written.read_text().splitlines()] == [
        {"step": 7, "input": "1+1?", "output": "2", "score": 1.0},
        {"step": 7, "input": "2+2?", "output": "5", "score": 0.0},
    ]
    message = r"must be \(input, output, score\), got 1 values"
    with pytest.raises(ValueError, match=message):
        generations.log(["file"], [["only a prompt"]], step=8)


def test_samples_open_a_tracker_without_a_run(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generations = tracking.ValidationGenerationsLogger("project", "other")
    generations.log("file", [("in", "out", 0.5)], 1)
    generations.log("file", [("in", "out", 0.5)], 2)
    generations.finish()
    folder = tmp_path / "checkpoints/project/other/generations"
    assert sorted(path.name for path in folder.iterdir()) == ["1.jsonl", "2.jsonl"]


def test_marks_of_traces_change_nothing():
    trace = importlib.import_module("verl.utils.rollout_trace")

    @trace.rollout_trace_op
    def twice(number: int) -> int:
        return 2 * number

    with trace.rollout_trace_attr(sample_index=1, step=2, rollout_n=0):
        assert twice(3) == 6
    with pytest.raises(ImportError, match="`verl view` shows"):
        from verl.utils.rollout_trace import RolloutTraceConfig  # noqa: F401  # pyright: ignore


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from verl.utils.reward_score.geo3k import compute_score", "default_compute_score"),
        (
            "from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop",
            "agent_name=tool_agent",
        ),
        (
            "from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState",
            "AgentLoopBase.*enum.Enum",
        ),
        (
            "from verl.experimental.agent_loop.utils import build_gpt_oss_tool_response_text",
            "multi_turn.format=gpt-oss",
        ),
        (
            "from verl.experimental.agent_loop.utils import resolve_config_path",
            "working directory",
        ),
        (
            "from verl.utils.chat_template import apply_chat_template",
            "tokenizer.apply_chat_template\\(",
        ),
        ("from verl.utils.tokenizer import normalize_token_ids", "return_dict=False"),
        (
            "from verl.experimental.agent_loop.tool_parser import HermesToolParser",
            "get_tool_parser\\('hermes'",
        ),
        ("from verl.protocol import all_gather_data_proto", "all_gather_object"),
        ("from verl.single_controller.base import ResourcePool", "a .*RayResourcePool"),
        ("from verl.trainer.main_ppo import TaskRunner", "run_ppo"),
        ("from verl.utils import ray_utils", "ray.put"),
        ("from verl.utils.ray_utils import parallel_put", "ray.put"),
    ],
)
def test_absent_names_point_to_another_way(line: str, message: str):
    with pytest.raises(ImportError, match=message):
        exec(line)


def test_the_system_prompt_of_a_template():
    from verl.utils.chat_template import initialize_system_prompt  # pyright: ignore

    template = (
        "<|im_start|>system\n{{ rules or 'Be brief.' }}<|im_end|>"
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = word_tokenizer(template=template)

    given = initialize_system_prompt(tokenizer)
    changed = initialize_system_prompt(tokenizer, rules="Be kind.")

    assert tokenizer.decode(given) == "<|im_start|>system\nBe brief.<|im_end|>"
    assert tokenizer.decode(changed) == "<|im_start|>system\nBe kind.<|im_end|>"


def test_run_ppo_takes_the_configuration_of_a_hydra_program(monkeypatch):
    calls = []

    class Trainer:
        def __init__(self, config):
            calls.append(config.data.train_batch_size)

        def init_workers(self):
            calls.append("init_workers")

        def fit(self):
            calls.append("fit")

    monkeypatch.setattr("verl.trainer.variants.trainer_class", lambda config: Trainer)
    given = {"data": {"dataset_name": "toy", "train_batch_size": 4}}
    run_ppo(OmegaConf.create(given))
    assert calls == [4, "init_workers", "fit"]


def test_an_old_program_has_a_file():
    """`python -m` makes it sys.argv[0], which Ray takes for a path."""
    for old, new in OLD_PROGRAMS.items():
        spec = importlib.util.find_spec(old)
        assert spec is not None
        assert spec.origin == importlib.util.find_spec(new).origin


def test_checkpoint_managers_name_the_replacement():
    with pytest.raises(ModuleNotFoundError, match="trainer.save_checkpoint"):
        importlib.import_module("verl.utils.checkpoint.fsdp_checkpoint_manager")
    with pytest.raises(ImportError, match="BaseCheckpointManager.*trainer.save_checkpoint"):
        from verl.utils.checkpoint.checkpoint_manager import (  # noqa: F401
            BaseCheckpointManager,  # pyright: ignore
        )


def test_tokenizer_pads_on_the_left():
    tokenizer = hf_tokenizer("toy")
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id is not None


def test_folder_without_a_processor_gives_none(tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    assert hf_processor(str(tmp_path)) is None
    assert "No processor for" in caplog.text


def test_seconds_add_up(caplog):
    timing = {"step": 1.0}
    with marked_timer("step", timing, color="red"):
        pass
    with marked_timer("gen", timing):
        pass
    assert timing["step"] >= 1.0
    assert 0 <= timing["gen"] < 60
    log_gpu_memory_usage("head", logger=logging.getLogger("test"), level=logging.INFO)


@dataclass
class Model(BaseConfig):
    hidden_size: int = 8
    act: str = "silu"

    _mutable_fields: ClassVar[set[str]] = {"act"}


def test_section_is_an_object_and_a_mapping():
    model = omega_conf_to_dataclass(OmegaConf.create({"hidden_size": 16}), Model)
    assert isinstance(model, Model)
    assert model["hidden_size"] == model.hidden_size == model.get("hidden_size") == 16
    assert model.get("nothing", 3) == 3
    assert "hidden_size" in model
    model.act = "gelu"
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.hidden_size = 3
    model.added = "later"  # pyright: ignore
    assert model["added"] == "later"
    assert "nothing" not in model
    with pytest.raises(AttributeError):
        _ = model["nothing"]
    with pytest.raises(ConfigError, match="no fields \\['hiden'\\]"):
        omega_conf_to_dataclass({"hiden": 1}, Model)

    named = OmegaConf.create({"_target_": f"{__name__}.Model", "hidden_size": 2})
    assert omega_conf_to_dataclass(named).hidden_size == 2
    assert omega_conf_to_dataclass(model) is model


def test_sections_within_a_section_are_objects_of_their_classes():
    given = {"gamma": 0.5, "kl_ctrl": {"kl_coef": 0.1}, "filter_groups": {"enable": True}}
    section = omega_conf_to_dataclass(OmegaConf.create(given), AlgoConfig)
    assert section.kl_ctrl.kl_coef == 0.1
    assert section.kl_ctrl.target_kl == 0.1
    assert section.filter_groups == FilterGroupsConfig(enable=True)
    assert section.pf_ppo is None
    with pytest.raises(ConfigError, match=r"KLControlConfig has no fields \['kl_coeff'\]"):
        omega_conf_to_dataclass({"kl_ctrl": {"kl_coeff": 0.1}}, AlgoConfig)


def test_algorithm_section():
    section = AlgoConfig(adv_estimator="grpo", filter_groups=FilterGroupsConfig(enable=True))
    assert section.get("gamma") == 1.0
    assert section["kl_ctrl"]["kl_coef"] == 0.001
    assert section.filter_groups.enable


@pytest.fixture
def dispatch_registry():
    registry = decorator.DISPATCH_MODE_FN_REGISTRY
    before = registry.copy()
    yield registry
    registry.clear()
    registry.update(before)


def test_dispatch_modes_are_a_dictionary(dispatch_registry):
    def dispatch_fn(worker_group, *args, **kwargs):
        return args, kwargs

    def collect_fn(worker_group, output):
        return output

    expected = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    decorator.register_dispatch_mode("TEST_MODE", dispatch_fn, collect_fn)
    decorator._check_dispatch_mode(decorator.Dispatch.TEST_MODE)
    decorator._check_dispatch_mode(expected)
    assert decorator.get_predefined_dispatch_fn(decorator.Dispatch.TEST_MODE) == expected
    assert dispatch_registry[decorator.Dispatch.TEST_MODE] == expected
    decorator.Dispatch.remove("TEST_MODE")
    assert not hasattr(decorator.Dispatch, "TEST_MODE")

    decorator.update_dispatch_mode(decorator.Dispatch.ONE_TO_ALL, dispatch_fn, collect_fn)
    changed = decorator.get_predefined_dispatch_fn(decorator.Dispatch.ONE_TO_ALL)
    assert changed == expected


def test_cleared_dispatch_mode_is_restored():
    from verl.single_controller.dispatch import find_dispatch_mode

    before = find_dispatch_mode("dp_compute_proto")
    saved = decorator.DISPATCH_MODE_FN_REGISTRY.copy()
    decorator.DISPATCH_MODE_FN_REGISTRY.clear()
    with pytest.raises(AssertionError, match="Expected a dispatch mode"):
        decorator._check_dispatch_mode("dp_compute_proto")
    decorator.DISPATCH_MODE_FN_REGISTRY.update(saved)
    assert find_dispatch_mode("dp_compute_proto") is before


def test_execute_modes():
    decorator._check_execute_mode(decorator.Execute.ALL)
    with pytest.raises(AssertionError, match="member of Execute"):
        decorator._check_execute_mode("all of them")
    named = decorator.get_predefined_execute_fn(decorator.Execute.RANK_ZERO)
    assert named == {"execute_fn_name": "execute_rank_zero"}
