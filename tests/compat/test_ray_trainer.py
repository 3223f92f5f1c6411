"""`RayPPOTrainer(...)` as called by recipes of verl 0.5."""

import warnings
from types import SimpleNamespace

import pytest
from torch.utils.data import SequentialSampler

from tests.trainer.runs import command_line
from verl.compat.ray_trainer import OLD_NAMES
from verl.config import load_config
from verl.trainer.setup import build_tokenizer
from verl.utils.errors import ConfigError

ray = pytest.importorskip("ray", reason="Role is part of the optional backend")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.trainer.ppo.ray_trainer import (  # pyright: ignore[reportMissingImports]
        RayPPOTrainer,
        ResourcePoolManager,
        Role,
    )
    from verl.utils.dataset.rl_dataset import collate_fn  # pyright: ignore[reportMissingImports]
    from verl.workers.fsdp_workers import (  # pyright: ignore[reportMissingImports]
        ActorRolloutRefWorker,
        CriticWorker,
    )


class OwnActor(ActorRolloutRefWorker):
    """A recipe's worker."""

    started = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        OwnActor.started += 1


class OwnGenerator(ActorRolloutRefWorker):
    """A recipe's worker with its own sampling of responses."""

    def generate_sequences(self, prompts):
        return prompts


def one_score(data, return_dict=False):
    scores = data.batch["responses"].float() * 0
    scores[:, 0] = 1.0
    return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores


def test_a_role_without_a_pool_is_named():
    mapping = {Role.ActorRollout: "global_pool", Role.Critic: "critics"}
    manager = ResourcePoolManager({"global_pool": [1]}, mapping)
    with pytest.raises(ConfigError, match=r"Role\.RefPolicy has no pool; .* Role\.ActorRollout, "):
        manager.get_resource_pool(Role.RefPolicy)
    with pytest.raises(ConfigError, match="names the pool 'critics' .* has global_pool"):
        manager.get_resource_pool(Role.Critic)
    with pytest.raises(ConfigError, match=r"not made yet\. Call create_resource_pool"):
        manager.get_resource_pool(Role.ActorRollout)


def test_recipe_trains(tmp_path):
    config = load_config(command_line(tmp_path, "trainer.max_steps=1"))
    manager = ResourcePoolManager(
        resource_pool_spec={"global_pool": [1]},
        mapping={Role.ActorRollout: "global_pool", Role.Critic: "global_pool"},
    )
    # one class for three roles, as in verl 0.5
    reference = ray.remote(ActorRolloutRefWorker)
    trainer = RayPPOTrainer(
        config=config,
        tokenizer=build_tokenizer(config),
        processor=None,
        role_worker_mapping={
            Role.ActorRollout: OwnActor,
            Role.Critic: CriticWorker,
            Role.RefPolicy: reference,
        },
        resource_pool_manager=manager,
        ray_worker_group_cls=None,
        reward_fn=one_score,
        val_reward_fn=one_score,
        collate_fn=collate_fn,
        train_sampler=SequentialSampler(range(10)),
        device_name="cpu",
    )

    assert isinstance(trainer.train_loader.sampler, SequentialSampler)
    trainer.init_workers()
    trainer.fit()
    assert OwnActor.started == 1
    assert trainer.metrics["critic/score/mean"] == 1.0
    assert trainer.total_steps == 1

    for old, new in OLD_NAMES.items():
        assert getattr(trainer, old) == getattr(trainer, new)
    trainer.global_steps += 1
    assert trainer.global_step == 2
    assert not trainer.use_reference_policy
    assert not trainer.use_rm


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({"collate_fn": list}, "__getitem__"),
        ({"role_worker_mapping": {"Judge": OwnActor}}, "'Judge' is not in this version"),
        ({"role_worker_mapping": {Role.ActorRollout: OwnGenerator}}, "verl.workers.RolloutWorker"),
        ({"role_worker_mapping": {Role.Critic: OwnActor}}, "verl.workers.CriticWorker"),
        ({"device_name": "cuda"}, "contradicts trainer.device=cpu"),
        (
            {
                "resource_pool_manager": SimpleNamespace(
                    resource_pool_spec={"a": [8, 8]}, mapping={Role.Critic: "a"}
                )
            },
            "16 processes, and the run 1 ranks",
        ),
        (
            {
                "resource_pool_manager": SimpleNamespace(
                    resource_pool_spec={"a": [1], "b": [1]},
                    mapping={Role.Critic: "a", Role.ActorRollout: "b"},
                )
            },
            "trainer.placement",
        ),
    ],
)
def test_unsupported_arguments_name_the_replacement(tmp_path, given, way):
    config = load_config(command_line(tmp_path, "trainer.device=cpu"))
    with pytest.raises(ConfigError, match=way):
        RayPPOTrainer(config, reward_fn=one_score, **given)


@pytest.mark.parametrize("name", ["_validate", "validate"])
def test_a_method_is_overridden_under_either_name(tmp_path, name):
    calls = []

    class Mixin:
        def _save_checkpoint(self):
            calls.append("mixin saves")
            super()._save_checkpoint()

    def validate(self):
        calls.append("validate")
        return {"own/score": 1.0}

    class Recipe(Mixin, RayPPOTrainer):
        def _load_checkpoint(self):
            calls.append("load")
            super()._load_checkpoint()

    setting = ("trainer.save_freq=1", "trainer.test_freq=1", "trainer.val_before_train=False")
    config = load_config(command_line(tmp_path, "trainer.device=cpu", *setting))
    trainer = type("Own", (Recipe,), {name: validate})(config, reward_fn=one_score)
    trainer.init_workers()
    trainer.fit()

    assert calls == ["load", *["validate", "mixin saves"] * trainer.total_steps]
    assert trainer._validate() == trainer.validate() == {"own/score": 1.0}
    assert (tmp_path / "global_step_1").is_dir()
