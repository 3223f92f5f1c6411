"""A configuration that is right, for tests that break one thing in it."""

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
    """As `load`, without the command line's grammar, which takes half of the time."""

    def build_on_base(*overrides: str) -> TrainConfig:
        return config_from_dict(OmegaConf.to_container(OmegaConf.from_dotlist([*BASE, *overrides])))  # pyright: ignore[reportArgumentType]

    return build_on_base


@pytest.fixture
def load() -> Load:
    """`load("a.b=c", ...)` on top of the least that a run needs."""

    def load_on_base(*overrides: str) -> TrainConfig:
        return load_config([*BASE, *overrides])

    return load_on_base


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Records of the package's logger."""
    caplog.set_level("INFO", logger="verl")
    return caplog
