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


def test_users_managers_may_derive_from_the_base_of_later_versions():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from verl.workers.reward_manager import (  # pyright: ignore[reportMissingImports]
            AbstractRewardManager,
        )

    @register("derived")
    class Derived(AbstractRewardManager):
        def __init__(self, tokenizer, num_examine, compute_score=None, **options):
            self.tokenizer = tokenizer

        def __call__(self, data, return_dict=False):
            return data

    assert get_reward_manager_cls("derived")(tokenizer="t", num_examine=0)(3) == 3
    with pytest.raises(TypeError, match="abstract"):
        AbstractRewardManager()
