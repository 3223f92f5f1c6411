"""The registry of reward managers, as used by recipes of verl 0.5."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.workers.reward_manager.registry import (  # pyright: ignore[reportMissingImports]
        REWARD_MANAGER_REGISTRY,
        get_reward_manager_cls,
        register,
    )


@pytest.fixture(autouse=True)
def only_two():
    before = REWARD_MANAGER_REGISTRY.copy()
    REWARD_MANAGER_REGISTRY.clear()
    REWARD_MANAGER_REGISTRY.update({"one": "First", "two": "Second"})
    yield
    REWARD_MANAGER_REGISTRY.clear()
    REWARD_MANAGER_REGISTRY.update(before)
    assert dict(REWARD_MANAGER_REGISTRY) == before


def test_names_are_case_sensitive():
    assert get_reward_manager_cls("one") == "First"
    assert REWARD_MANAGER_REGISTRY == {"one": "First", "two": "Second"}
    for unknown in ("ONE", "three"):
        with pytest.raises(ValueError, match=f"Unknown reward manager: {unknown}"):
            get_reward_manager_cls(unknown)
    REWARD_MANAGER_REGISTRY.clear()
    with pytest.raises(ValueError, match="Unknown reward manager: one"):
        get_reward_manager_cls("one")


def test_class_is_registered_once():
    @register("own")
    class Own:
        pass

    assert get_reward_manager_cls("own") is Own
    assert register("own")(Own) is Own
    with pytest.raises(ValueError, match="has already been registered"):
        register("own")(dict)
