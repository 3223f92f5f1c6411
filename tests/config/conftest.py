"""A valid configuration, for tests that break one setting."""

from collections.abc import Callable

import pytest
from omegaconf import OmegaConf

from verl.config import TrainConfig, config_from_dict, load_config

BASE = (
    "actor_rollout_ref.model.path=some/model",
    "data.train_files=train.parquet",
    "data.train_batch_size=8",
)

Load = Callable[..., TrainConfig]


@pytest.fixture
def build() -> Load:
    """Build a configuration as `load` does, but skip the slow parser of the command line."""

    def build_on_base(*overrides: str) -> TrainConfig:
        return config_from_dict(OmegaConf.to_container(OmegaConf.from_dotlist([*BASE, *overrides])))  # pyright: ignore[reportArgumentType]

    return build_on_base


@pytest.fixture
def load() -> Load:
    """Load overrides on top of the smallest valid configuration."""

    def load_on_base(*overrides: str) -> TrainConfig:
        return load_config([*BASE, *overrides])

    return load_on_base


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Capture the records of the package's logger."""
    caplog.set_level("INFO", logger="verl")
    return caplog
