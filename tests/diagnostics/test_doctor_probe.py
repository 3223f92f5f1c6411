"""Reading the system: broken libraries in a temporary folder, and this machine."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verl.diagnostics import probing, world
from verl.diagnostics.probing import probe, understand
from verl.diagnostics.world import find_copies, read_host, read_network, read_packages

SOUND_TORCH = """
from types import SimpleNamespace
__version__ = "2.99"
version = SimpleNamespace(cuda=None)
cuda = SimpleNamespace()
print("a library that talks")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch):
    """Make a folder that Python searches first, like the current folder of `python -m`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text(SOUND_TORCH)
    return tmp_path


def test_packages_with_import_errors(folder: Path):
    (folder / "flash_attn.py").write_text(
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')"
    )
    (folder / "vllm.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (folder / "sglang.py").write_text("import sys; sys.exit('no CUDA toolkit')")
    (folder / "torchao.py").write_text("import a_part_that_is_missing")
    (folder / "apex.py").write_text("import torch; torch.imported = True")
    found = probe(["flash-attn", "vllm", "sglang", "torchao", "apex", "hydra-core"])

    assert found.torch is not None
    assert found.torch.version == "2.99"
    assert found.died_at is None
    assert found.imports == {
        "apex": None,  # works without its extension amp_C
        "flash-attn": "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c10",
        "sglang": "SystemExit: no CUDA toolkit",
        "torchao": "ModuleNotFoundError: No module named 'a_part_that_is_missing'",
        "vllm": "killed by SIGSEGV",
    }


def test_torch_with_an_import_error(folder: Path):
    (folder / "torch.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')"
    )
    found = probe(["numpy"])
    assert found.torch is None
    assert found.torch_error == "ImportError: libcudart.so.13: cannot open shared object file"
    assert found.imports == {}, "they need torch"


def test_torch_that_aborts(folder: Path):
    (folder / "torch.py").write_text("import os; os.abort()")
    assert probe([]).died_at == ("torch_error", "exit status -6")


def test_torch_that_hangs(folder: Path, monkeypatch):
    (folder / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(probing, "DEADLINE_S", 3.0)
    found = probe([])
    assert found.died_at == ("torch_error", "not done within 3 s")
    assert found.torch is None


def test_other_verl_package_does_not_stop_the_probe(folder: Path):
    (folder / "verl").mkdir()
    (folder / "verl" / "__init__.py").write_text("raise ImportError('the wrong one')")
    found = probe([])
    assert found.died_at is None
    assert found.torch is not None


def test_truncated_output_line_is_ignored():
    output = b'["begin", "gpus"]\n["gpus", [{"name": "H10'
    assert understand(output, "killed").died_at == ("gpus", "killed")


def test_copies_are_listed_in_path_order(tmp_path: Path):
    for name in ("b", "a"):
        (tmp_path / name / "verl").mkdir(parents=True)
        (tmp_path / name / "verl" / "__init__.py").touch()
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "c" / "verl").mkdir(parents=True)  # a folder without __init__.py
    found = find_copies([str(tmp_path / name) for name in ("b", "c", "link", "a", "none")])
    assert found == [str(tmp_path / name / "verl") for name in ("b", "a")]


def test_a_host_without_a_usable_folder_for_temporary_files(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    host = read_host()
    assert host.disks["temporary files"][0] == str(tmp_path / "full")
    assert list(host.unwritable) == ["temporary files"]


def test_folders_that_cannot_be_written_are_listed(monkeypatch):
    closed = tempfile.gettempdir()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != closed)
    assert list(read_host().unwritable) == ["temporary files"]


def test_this_host():
    host = read_host()
    assert 0 < host.ram_available <= host.ram
    assert 0 < host.open_files <= host.open_files_hard
    assert all(free > 0 for _, free in host.disks.values())
    assert read_packages()["torch"].version.startswith("2.")
    assert "lo" not in read_network().interfaces


@pytest.mark.slow
def test_check_env_does_not_import_torch():
    code = (
        "import sys; from verl.utils import check_env; report = check_env(); "
        "print(report.to_json()); print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split()[-1] == "False"
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    for name in ("Python", "torch import", "torch build", "torch", "transformers", "imports"):
        assert findings[name]["verdict"] == "ok", findings[name]


def test_files_that_a_container_has_read_do_not_lower_its_available_memory(monkeypatch, tmp_path):
    pytest.importorskip("psutil")
    monkeypatch.setattr(world, "_CGROUP", tmp_path)
    mib = 2**20
    (tmp_path / "memory.max").write_text(f"{64 * mib}\n")
    (tmp_path / "memory.current").write_text(f"{60 * mib}\n")
    assert (read_host().ram, read_host().ram_available) == (64 * mib, 4 * mib)

    lines = (f"anon {10 * mib}", f"inactive_file {30 * mib}", f"active_file {20 * mib}")
    (tmp_path / "memory.stat").write_text("\n".join(lines))
    assert read_host().ram_available == 54 * mib
