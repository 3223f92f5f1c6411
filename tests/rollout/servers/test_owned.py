"""The process that keeps a server ends all of its processes."""

import os
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import psutil
import pytest
import torch

from verl.config.rollout import RolloutConfig
from verl.rollout.servers.owned import _KEEPER, OwnedServers, engine_options
from verl.rollout.servers.server import ServerLostError
from verl.rollout.servers.sglang import SGLangServer
from verl.rollout.servers.vllm import VLLMServer
from verl.utils.errors import RolloutError
from verl.weight_sync.sglang_loader import LOADER
from verl.weight_sync.vllm_worker import EXTENSION

# A server with a worker of its own.
SERVER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(worker.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("ends", ["server", "keeper's owner"])
def test_no_worker_outlives_its_server(ends: str):
    command = [sys.executable, "-c", _KEEPER, sys.executable, "-c", SERVER]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    worker = psutil.Process(int(keeper.stdout.readline()))

    if ends == "server":
        os.kill(worker.ppid(), signal.SIGKILL)
    else:
        keeper.stdin.close()
    keeper.wait(timeout=60)
    gone, _ = psutil.wait_procs([worker], timeout=60)
    keeper.stdout.close()
    assert gone


@pytest.mark.parametrize("name", ["enable_deterministic_inference", "skip_server_warmup"])
def test_a_user_can_take_flags_of_sglang_back(name):
    flag = "--" + name.replace("_", "-")
    assert flag in SGLangServer.command("python", "M", 8000)
    assert flag not in SGLangServer.command("python", "M", 8000, **{name: False})


def test_a_server_of_sglang_has_room_for_the_last_tokens():
    """Its scheduler ends a response two tokens before the end of the context."""
    command = SGLangServer.command("python", "M", 8000, max_model_len=768)
    assert command[command.index("--context-length") + 1] == "770"


def test_lists_and_mappings_become_words_and_json():
    flags = {"cuda_graph_bs_decode": [1, 8], "json_model_override_args": {"vocab_size": 9}}
    command = SGLangServer.command("python", "M", 8000, **flags)
    first = command.index("--cuda-graph-bs-decode")
    assert command[first + 1 : first + 3] == ["1", "8"]
    assert command[command.index("--json-model-override-args") + 1] == '{"vocab_size": 9}'


@pytest.mark.parametrize(
    ("server_class", "flags"),
    [
        (VLLMServer, f"--worker-extension-cls {EXTENSION}"),
        (SGLangServer, f"--custom-weight-loader {LOADER}"),
    ],
)
def test_servers_of_the_run_take_weights_from_memory(server_class, flags):
    assert flags in " ".join(server_class.command("python", "M", 8000, takes_memory=True))
    assert flags not in " ".join(server_class.command("python", "M", 8000, takes_memory=False))


@pytest.mark.parametrize(
    ("server_class", "flag"), [(VLLMServer, "seed"), (SGLangServer, "random-seed")]
)
def test_servers_draw_by_different_noise_where_samples_have_no_seeds(server_class, flag):
    config = RolloutConfig(seed=5, seed_samples=False)
    commands = []
    for number in range(2):
        options = engine_options(config, torch.float32, number)
        commands.append(" ".join(server_class.command("python", "M", 8000, **options)))
    assert f"--{flag} 5" in commands[0]
    assert f"--{flag} 6" in commands[1]
    assert "--enable-deterministic-inference" not in commands[0]
    assert "seed" not in engine_options(RolloutConfig(seed=5), torch.float32, 0)


@pytest.mark.parametrize(
    ("server_class", "flag"),
    [(VLLMServer, "max-num-batched-tokens"), (SGLangServer, "max-prefill-tokens")],
)
@pytest.mark.parametrize(("samples", "tokens"), [(8, 512), (1024, 1024)])
def test_a_prefill_takes_the_configured_tokens_and_one_of_each_sample(
    server_class, flag, samples, tokens
):
    config = RolloutConfig(max_num_batched_tokens=512, max_num_seqs=samples)
    options = engine_options(config, torch.float32, 0)
    assert f"--{flag} {tokens}" in " ".join(server_class.command("python", "M", 8000, **options))


@pytest.mark.parametrize("fails", [False, True])
def test_logs_are_removed_unless_a_server_failed(tmp_path, monkeypatch, fails: bool):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "print('no memory'); raise SystemExit(3)" if fails else "import time; time.sleep(60)"

    class Plain(VLLMServer):
        @classmethod
        def command(cls, *_, **options):
            return [sys.executable, "-c", program]

        def facts(self):
            if fails:
                raise ServerLostError("not there")
            return SimpleNamespace()

    def start():
        model = SimpleNamespace(name_or_path="m")
        return OwnedServers(Plain, RolloutConfig(name="vllm"), model, torch.float32)

    if fails:
        with pytest.raises(RolloutError, match=r"ended with status 3[\s\S]*\nno memory"):
            start()
        (log,) = tmp_path.glob("verl-*/*.log")
        assert log.read_text() == "no memory\n"
    else:
        servers = start()
        (keeper,) = servers._processes.values()
        assert os.getpgid(keeper.pid) != os.getpgid(0)  # Ctrl-C is not for it
        assert [*tmp_path.glob("verl-*/*.log")]
        servers.close()
        assert not [*tmp_path.iterdir()]
