"""The files of a working directory that Ray receives, and the error when they are too large."""

import json
import os
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the optional backend is not installed")
import ray
from ray._private.runtime_env import packaging

from verl.single_controller.ray import connect, merged_runtime_env
from verl.single_controller.ray_upload import EXCLUDES, refused_upload, uploaded_files
from verl.utils.devices import ALLOCATOR_SETTINGS
from verl.utils.errors import ConfigError

MIB = 2**20
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a folder with one file of each excluded kind, and one that is not excluded."""
    sizes = {
        "data/train.parquet": 3 * MIB,
        "run.py": 10,
        "src/deep/big.npy": 2 * MIB,
        "src/deep/kept.txt": 7,
        "checkpoints/global_step_1/x": MIB,
        "src/model.safetensors": MIB,
        ".git/objects": MIB,
        "notes.tmp": MIB,
        "src/deep/scratch.log": MIB,
        "src/mine.dat": MIB,
    }

    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(os.urandom(size))

    (tmp_path / ".gitignore").write_text("*.tmp\n")
    (tmp_path / "src/deep/.rayignore").write_text("*.log\n")
    return tmp_path


def test_the_files_are_the_ones_that_ray_packs(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
):
    excludes = [*EXCLUDES, "mine.dat"]
    package = tmp_path_factory.mktemp("package") / "sent.zip"
    packaging.create_package(str(folder), package, include_gitignore=True, excludes=excludes)
    with zipfile.ZipFile(package) as sent:
        packed = {name for name in sent.namelist() if not name.endswith("/")}
    files = uploaded_files(folder, excludes)
    assert {name for _, name in files} == packed
    assert files[:2] == [(3 * MIB, "data/train.parquet"), (2 * MIB, "src/deep/big.npy")]
    assert "src/mine.dat" not in packed
    assert "src/deep/kept.txt" in packed


@pytest.mark.slow
def test_a_rejected_upload_names_the_largest_files_and_excludes(folder: Path, monkeypatch):
    monkeypatch.setattr(packaging, "GCS_STORAGE_MAX_SIZE", 4 * MIB)
    with pytest.raises(ConfigError) as raised:
        connect(address="local", num_cpus=1, runtime_env={"working_dir": str(folder)}, **QUIET)
    assert not ray.is_initialized()
    text = str(raised.value)
    assert text.startswith(f"Ray refused to upload runtime_env's {folder}: ")
    assert "Package size (6.00MiB) exceeds the maximum size of 4.00MiB" in text
    assert text.index("3.0 MiB  data/train.parquet") < text.index("2.0 MiB  src/deep/big.npy")
    assert "global_step_1" not in text
    assert "runtime_env's `excludes`" in text


@pytest.mark.parametrize(
    "words", ["Request Entity Too Large", "Received message larger than max (600 vs. 512)"]
)
def test_other_wordings_of_too_large(folder: Path, words: str):
    assert "train.parquet" in str(
        refused_upload(RuntimeError(words), merged_runtime_env({"py_modules": [folder]}))
    )


def test_another_error_is_not_about_an_upload(folder: Path):
    assert refused_upload(RuntimeError("No nodes"), {"working_dir": str(folder)}) is None
    assert refused_upload(RuntimeError("Request Entity Too Large"), {}) is None


@pytest.mark.slow
def test_values_that_ray_rejects_are_reported_in_one_sentence(monkeypatch):
    """Test here: with the cluster of another test, any address would join that cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"ray_init.address=nonsense: Invalid address format.*An address is HOST:6379",
    ):
        connect(address="nonsense")
    with pytest.raises(ConfigError, match="py_modules must be a List"):
        connect(address="local", num_cpus=1, runtime_env={"py_modules": 7}, **QUIET)
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_job_with_excludes_and_variables_of_its_own_can_be_joined(monkeypatch):
    """Start a driver like `ray job submit --runtime-env-json`: with the variables, and with all of
    it as JSON."""
    of_job = {"excludes": ["data/"], "env_vars": {"NCCL_DEBUG": "INFO", "OF_JOB": "1"}}
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv(ALLOCATOR_SETTINGS, raising=False)  # a trainer in this process has set it
    monkeypatch.setenv(
        "RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": of_job, "metadata": {}})
    )
    monkeypatch.setenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    monkeypatch.delenv("RAY_OVERRIDE_JOB_RUNTIME_ENV")  # so that it is undone afterwards
    try:
        connect(address="local", num_cpus=1, **QUIET)
        variables = ray.get_runtime_context().runtime_env["env_vars"]
    finally:
        ray.shutdown()
    assert variables == {"NCCL_DEBUG": "INFO", "OF_JOB": "1", "TOKENIZERS_PARALLELISM": "false"}


def test_a_folder_with_a_path_too_long_for_sockets_is_reported_with_the_way_out(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 20)))
    with pytest.raises(
        ConfigError, match=r"Ray's folder has too long a path.* cannot exceed.*Set RAY_TMPDIR=/tmp"
    ):
        connect(address="local", num_cpus=1, **QUIET)
    assert not ray.is_initialized()


def test_a_ray_that_cannot_write_its_files_is_reported_with_the_free_space(
    tmp_path: Path, monkeypatch
):
    file = tmp_path / "session" / "gcs_server_port"

    def fail(**_: object) -> None:
        raise RuntimeError(f"Timed out waiting for file {file}")

    monkeypatch.setattr("verl.single_controller.ray.init_patiently", fail)
    with pytest.raises(
        ConfigError, match=rf"not written {file}\. The disk there has .* MiB free\. Free some, or"
    ):
        connect(address="local", num_cpus=1, **QUIET)
