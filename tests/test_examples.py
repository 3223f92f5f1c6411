"""The scripts under examples/: their commands are configurations that load, and runs that fit on
the stated hardware."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from transformers import Qwen2Config

from tests.agents.scripted import chat_tokenizer
from tests.data.scripts import load_script
from tests.readers import run_without_reader
from tests.tiny_models import tiny_model
from verl.config import load_config
from verl.diagnostics.hosts import CARDS
from verl.diagnostics.profile import profile_memory
from verl.rollout import check_engine_service
from verl.trainer.main_ppo import main
from verl.utils.errors import ConfigError

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").rglob("run_*.sh"))
TRAINING = [path for path in SCRIPTS if "verl.trainer.main_ppo" in path.read_text()]
ROOTS = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.jobs.main_sft": "sft_trainer",
    "verl.jobs.main_generation": "generation",
    "verl.jobs.main_eval": "evaluation",
}
# Qwen2.5 by the size in the name of a script: hidden, intermediate, layers, heads, key heads.
SHAPES = {
    "0_5b": (896, 4864, 24, 14, 2),
    "1_5b": (1536, 8960, 28, 12, 2),
    "3b": (2048, 11_008, 36, 16, 2),
    "7b": (3584, 18_944, 28, 28, 4),
}
MULTI_TURN = ROOT / "examples" / "sglang_multiturn"

# A user's script, unchanged except for the model and the folders.
USERS_SCRIPT = """
python3 -m verl.trainer.main_ppo --config-path="$CONFIG_PATH" --config-name='gsm8k_multiturn_grpo' \\
  algorithm.adv_estimator=grpo data.train_batch_size=256 data.max_prompt_length=1024 \\
  data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error' \\
  data.return_raw_chat=True actor_rollout_ref.model.path=$MODEL_PATH \\
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True \\
  actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
  actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \\
  actor_rollout_ref.model.enable_gradient_checkpointing=True \\
  actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
  actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.rollout.n=16 \\
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.ref.fsdp_config.param_offload=True \\
  algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger='["console","wandb"]' \\
  trainer.project_name='gsm8k_async_rl' trainer.experiment_name='qwen2.5-1.5b_gsm8k-multiturn' trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
  trainer.save_freq=-1 trainer.test_freq=20 data.train_files=$HOME/data/gsm8k/train.parquet \\
  data.val_files=$HOME/data/gsm8k/test.parquet \\
  actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/config/tool_config/gsm8k_tool_config.yaml" \\
  trainer.total_epochs=15 actor_rollout_ref.rollout.update_weights_bucket_megabytes=512
"""  # noqa: E501


def name_of(script: Path) -> str:
    return str(script.relative_to(ROOT / "examples"))


def python3(folder: Path, body: str) -> str:
    """Return a PATH on which the scripts' python3 runs `body`."""
    (folder / "python3").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "python3").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def typed(script: str | Path, *arguments: str, **variables: object) -> list[tuple[str, list[str]]]:
    """Return (module, argv) of every `python3 -m` that bash reaches, in a file or in text."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "typed"
        environment = {
            "PATH": python3(Path(folder), f"""printf '%s\\0' "$@" "" >> {written}"""),
            "HOME": folder,
        }
        environment |= {name: str(value) for name, value in variables.items()}
        command = (
            ["bash", str(script)] if isinstance(script, Path) else ["bash", "-c", script, "bash"]
        )
        subprocess.run([*command, *arguments], env=environment, check=True)
        lines = [line.split("\0") for line in written.read_text().split("\0\0")[:-1]]
    assert all(line[0] == "-m" for line in lines)
    return [(line[1], line[2:]) for line in lines]


def model_folder(tmp_path: Path, size: str) -> Path:
    """Create a folder with the config.json of a Qwen2.5 and nothing else."""
    hidden, intermediate, layers, heads, key_heads = SHAPES[size]
    config = Qwen2Config(
        vocab_size=152_064 if size == "7b" else 151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=size != "7b",
    )
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def size_of(script: Path) -> str:
    return script.name.split("-")[1].split("_gsm8k")[0]


@pytest.mark.parametrize("script", TRAINING, ids=name_of)
def test_a_training_script_fits_the_gpus_that_it_names(tmp_path: Path, script: Path):
    about = " ".join(script.read_text().splitlines()[1:3])
    gpus, gib = re.findall(r"Needs (one|\d+) GPUs? of (\d+) GiB", about)[0]
    card = re.findall(r"--device-gib (\S+?)[;\s]", about)[0]
    [(_, argv)] = typed(script, MODEL_PATH=model_folder(tmp_path, size_of(script)))
    profile = profile_memory(load_config(argv, only_to_plan=True), device_gib=card)
    assert profile.fits
    assert profile.plan.placement.ranks == (1 if gpus == "one" else int(gpus))
    assert int(CARDS[card]) == int(gib)


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_a_script_loads_without_a_warning_and_accepts_further_keys(script: Path, caplog):
    caplog.set_level(logging.WARNING, logger="verl")
    assert os.access(script, os.X_OK)
    assert all(line.startswith("# ") for line in script.read_text().splitlines()[1:3])
    first, *others = typed(
        script, "trainer.seed=17", DATA_DIR="some/data", MODEL_PATH="a/model", OUTPUT="o.parquet"
    )
    module, argv = first
    assert load_config(argv, root=ROOTS[module], only_to_plan=True).trainer.seed == 17
    assert any(argument.endswith("model.path=a/model") for argument in argv)
    assert any("=some/data/" in argument for argument in argv)
    for module, argv in others:
        assert load_config(argv, root=ROOTS[module]).data.path == ["o.parquet"]
    if MULTI_TURN not in script.parents:
        assert caplog.messages == []


def test_the_algorithms_match_the_folders():
    found = {}
    for script in TRAINING:
        [(_, argv)] = typed(script)
        config = load_config(argv, only_to_plan=True)
        asked = (
            config.algorithm.adv_estimator,
            config.algorithm.filter_groups.enable,
            config.needs_critic,
        )
        found.setdefault(script.parent.name, set()).add(asked)

    assert found == {
        "grpo_trainer": {("grpo", False, False)},
        "ppo_trainer": {("gae", False, True)},
        "rloo_trainer": {("rloo", False, False)},
        "remax_trainer": {("remax", False, False)},
        "reinforce_plus_plus_trainer": {("reinforce_plus_plus", False, False)},
        "dapo_trainer": {("grpo", True, False)},
        "sglang_multiturn": {("grpo", False, False)},
    }


@pytest.mark.slow
def test_a_script_trains(tmp_path: Path):
    """Run two real steps of the packaged model, started like a user starts them."""
    prompts = ROOT / "verl" / "data" / "toy_prompts.jsonl"
    script = ROOT / "examples" / "grpo_trainer" / "run_qwen2_5-0_5b_gsm8k.sh"
    overrides = (
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.train_batch_size=4",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.device=cpu",
        "trainer.max_steps=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )

    path = python3(tmp_path, f'exec {shlex.quote(sys.executable)} "$@"')
    done = subprocess.run(
        [script, *overrides],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "MODEL_PATH": "toy"},
        capture_output=True,
        text=True,
        timeout=250,
    )

    assert done.returncode == 0, done.stderr
    assert "Training completed in" in done.stdout
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[-1] == 2


def users_argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    model = model_folder(tmp_path, "1_5b")
    [(_, argv)] = typed(
        USERS_SCRIPT, CONFIG_PATH=MULTI_TURN / "config", PROJECT_DIR=MULTI_TURN, MODEL_PATH=model
    )
    return argv


def test_the_script_of_several_turns_is_planned(tmp_path, monkeypatch, capfd):
    argv = users_argv(tmp_path, monkeypatch)
    assert main([*argv, "--dry-run", "--device-gib", "H100"]) == 0
    output, errors = capfd.readouterr()
    remarks, plan = output.split("Model: ")
    assert "Batch: 256 prompts x 16 samples = 4096 rows of at most 2048 tokens" in plan
    assert "It fits" in plan
    assert remarks == ""
    assert "Cache: in the memory of servers" in plan
    assert errors == ""


def test_the_script_of_several_turns_says_how_to_start_its_missing_engine(tmp_path, monkeypatch):
    config = load_config(users_argv(tmp_path, monkeypatch))
    with pytest.raises(ConfigError, match=r"name=sglang needs SGLang.*sglang.launch_server"):
        check_engine_service(config.actor_rollout_ref.rollout)


def gsm8k_rows(folder: Path) -> Path:
    """Write rows of gsm8k_multiturn_w_tool.py for questions of this test."""
    raw = folder / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        lines = [
            json.dumps({"question": f"What is {n} times 72?", "answer": f"{n} * 72\n#### 72"})
            for n in (1, 1, 1, 1)
        ]
        (raw / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    script = ROOT / "examples" / "data_preprocess" / "gsm8k_multiturn_w_tool.py"
    out = folder / "data"
    subprocess.run(
        [sys.executable, script, "--local_dataset_path", raw, "--local_save_dir", out],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return out


def chat_model(folder: Path) -> Path:
    """Save a tiny model with a tokenizer and a chat template with tools."""
    tokenizer = chat_tokenizer()
    model = tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=8192)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


SMALL = [
    "actor_rollout_ref.rollout.name=scripted",
    f"actor_rollout_ref.model.external_lib={ROOT / 'tests' / 'agents' / 'scripted_engine.py'}",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=2",
    "data.max_prompt_length=3000",
    "data.max_response_length=2000",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "trainer.total_epochs=1",
    "trainer.logger=[file]",
]


@pytest.mark.parametrize("kind", ["a tool", "a simulated user"])
def test_the_script_of_several_turns_trains(tmp_path, monkeypatch, kind):
    """Train with the engine of a user's file, which calls the tool; only sizes and paths differ."""
    data = gsm8k_rows(tmp_path)
    model = chat_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    [(_, argv)] = typed(
        USERS_SCRIPT, CONFIG_PATH=MULTI_TURN / "config", PROJECT_DIR=MULTI_TURN, MODEL_PATH=model
    )
    more = [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
    ]
    if kind == "a simulated user":
        argv = [word for word in argv if "tool_config_path" not in word]
        config = MULTI_TURN / "config" / "interaction_config" / "gsm8k_interaction_config.yaml"
        more.append(f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={config}")
    assert main([*argv, *SMALL, *more]) == 0

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["step"] > 0]
    assert len(steps) == 2
    samples = (tmp_path / "samples" / "1.jsonl").read_text()
    if kind == "a tool":
        assert steps[0]["tools/calc_gsm8k_reward/ok"] == 8
        assert steps[0]["critic/score/mean"] == 1.0
        assert "Current parsed answer=" in samples
    else:
        assert steps[0]["num_turns/max"] == 4
        assert steps[0]["agent_loop/ended_by/user"] == 4
        assert "Your response is incorrect!" in samples


def test_the_tool_matches_the_rows():
    tools = yaml.safe_load(
        (MULTI_TURN / "config" / "tool_config" / "gsm8k_tool_config.yaml").read_text()
    )["tools"]
    script = (ROOT / "examples" / "data_preprocess" / "gsm8k_multiturn_w_tool.py").read_text()
    assert f'TOOL = "{tools[0]["tool_schema"]["function"]["name"]}"' in script


@pytest.mark.parametrize("name", ["gsm8k_multiturn_grpo", "gsm8k_multiturn_grpo_w_interaction"])
def test_a_configuration_of_several_turns_loads_by_its_name(name: str, caplog):
    argv = [
        f"--config-path={MULTI_TURN / 'config'}",
        f"--config-name={name}",
        "actor_rollout_ref.model.path=a/model",
        "data.train_files=train.parquet",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
    ]
    config = load_config(argv, only_to_plan=True)
    assert config.actor_rollout_ref.rollout.multi_turn.enable
    assert config.data.return_raw_chat
    assert "No training data" not in caplog.text


def test_the_interaction_matches_the_rows():
    config = MULTI_TURN / "config" / "interaction_config" / "gsm8k_interaction_config.yaml"
    (entry,) = yaml.safe_load(config.read_text())["interaction"]
    scripts = ROOT / "examples" / "data_preprocess"
    for script in ("gsm8k_multiturn_w_tool.py", "gsm8k_multiturn_w_interaction.py"):
        assert f'INTERACTION = "{entry["name"]}"' in (scripts / script).read_text()


@pytest.mark.parametrize(
    "path", sorted((MULTI_TURN / "config" / "tool_config").iterdir()), ids=lambda path: path.name
)
def test_a_tool_configuration_has_the_keys_of_its_format(path: Path):
    content = yaml.safe_load(path.read_text())  # JSON is also YAML
    if path.suffix == ".json":
        assert all(
            "url" in server or "command" in server for server in content["mcpServers"].values()
        )
        return
    for tool in content["tools"]:
        assert tool["class_name"].startswith("verl.tools.")
        if tool["config"]["type"] == "mcp":
            servers = ROOT / tool["mcp"]["mcp_servers_config_path"]
            assert servers.is_file()
            continue
        function = tool["tool_schema"]["function"]
        assert set(function["parameters"]["required"]) == set(function["parameters"]["properties"])


def test_the_report_of_the_stories_averages_tenths_of_short_runs_too():
    tenths = load_script("stories/report.py").tenths
    assert tenths([float(step) for step in range(20)]) == [2 * part + 0.5 for part in range(10)]
    assert tenths([1.0, 2.0]) == [1.0] * 5 + [2.0] * 5


def test_the_report_of_the_stories_names_the_steps_of_its_means(tmp_path, capsys):
    report = load_script("stories/report.py")
    step = {"actor/kl_loss": 0.0, "timing_s/step": 1.0, "val-core/stories/reward/mean@4": 0.5}
    lines = [step | {"critic/score/mean": float(number)} for number in range(6)]
    folder = tmp_path / "seed_1"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    report.print_curves([folder])
    printed = capsys.readouterr().out
    assert "| first 3 steps | last 3 steps |" in printed
    assert "| 1 | 1.000 | 4.000 |" in printed
    assert report.window_of([100, 60]) == 10
    assert report.window_of([1]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        *("stories/prepare.py", "stories/report.py"),
        *("toy/make_calculator.py", "toy/make_toy_model.py"),
    ],
)
def test_a_reader_that_has_exited_ends_a_script_silently(script):
    command = [sys.executable, str(ROOT / "examples" / script), "--help"]
    done = run_without_reader(command, {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (141, "")
