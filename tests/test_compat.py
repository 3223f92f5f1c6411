"""Old import paths of verl 0.5."""

import importlib

import pytest

from verl.compat import OLD_PATHS


@pytest.mark.parametrize("old", OLD_PATHS)
def test_every_old_name_is_the_new_object_and_says_so(old):
    module = importlib.import_module(old)
    for name, entry in OLD_PATHS[old].items():
        new_module, new_name = entry if isinstance(entry, tuple) else (entry, name)
        with pytest.warns(DeprecationWarning, match=new_module):
            found = getattr(module, name)
        assert found is getattr(importlib.import_module(new_module), new_name)


def test_a_recipe_can_subclass_the_trainer_at_its_old_path():
    with pytest.warns(DeprecationWarning, match="ppo_trainer"):
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    assert {"init_workers", "fit"} <= set(dir(RayPPOTrainer))


def test_a_name_that_is_gone_is_told():
    import verl.trainer.ppo.core_algos as core_algos

    with pytest.raises(AttributeError, match="old path of verl 0.5"):
        _ = core_algos.compute_everything


def test_an_unknown_module_is_still_unknown():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.no_such_room")
