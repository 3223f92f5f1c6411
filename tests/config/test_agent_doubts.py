"""Settings of agents and environments that nothing reads are warned of."""

from pathlib import Path

import pytest

from tests.config.conftest import Load

AGENT = "actor_rollout_ref.rollout.agent"
FUNCTION = "custom_reward_function.path=reward.py"
WORLD = f"{AGENT}.environment.name=calculator"
GIVEN = f"{AGENT}.gives_reward=True"
LOOP = f"{AGENT}.default_agent_loop=mine"


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        ([FUNCTION], None),
        ([WORLD], None),
        ([FUNCTION, LOOP], None),
        ([FUNCTION, WORLD], WORLD),
        ([FUNCTION, GIVEN, LOOP], GIVEN),
    ],
)
def test_a_reward_function_that_is_never_called_is_warned_of(
    build: Load,
    log: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    source: str | None,
):
    (tmp_path / "reward.py").touch()
    monkeypatch.chdir(tmp_path)
    build(*overrides)
    warned = [record.message for record in log.records if "is never called" in record.message]
    assert len(warned) == (source is not None)
    assert all(f"{FUNCTION} is never called" in line and str(source) in line for line in warned)
