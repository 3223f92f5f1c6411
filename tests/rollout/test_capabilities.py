"""Capabilities that engine classes declare, and their use before an engine exists."""

import pytest

from tests.rollout.engines import PROMPTS, make_engine, run, talkative_model, tokens_of
from verl.config.rollout import RolloutConfig
from verl.rollout import Capabilities, EmbeddedEngine, HFEngine, check_engine, rollout_engines
from verl.rollout.base import plan_engine
from verl.rollout.memory import EngineLoad
from verl.utils.errors import ConfigError

LOAD = EngineLoad(
    prompts=4,
    samples=16,
    longest=65,
    longest_prompt=32,
    ranks=1,
    heads=2,
    hidden=8,
    intermediate=16,
    vocabulary=100,
    itemsize=2,
    token_bytes=32,
    on_cuda=False,
    room=None,
)


@pytest.fixture
def register():
    names = []

    def add(name, factory):
        names.append(name)
        rollout_engines.register(name)(factory)

    yield add
    for name in names:
        rollout_engines.remove(name)


def factory(**parts):
    return HFEngine(**parts)


@pytest.mark.parametrize(
    ("setting", "way_out"),
    [
        ({"deterministic": True}, "name={}. Set name=embedded, or deterministic=false"),
        (
            {"tensor_model_parallel_size": 2},
            "name={}. Set name=embedded, or name=sglang, or name=vllm, or tensor_model_parallel_",
        ),
        ({"server_urls": ["http://h"]}, "name={}. Set name=sglang, or name=vllm, or leave them"),
    ],
    ids=["deterministic", "tensor parallel", "servers"],
)
def test_an_engine_rejects_settings_that_it_does_not_declare(register, setting, way_out):
    register("undeclared", factory)
    if "server_urls" not in setting:
        check_engine(RolloutConfig(name="embedded", **setting))
    for name in ("hf", "undeclared"):
        check_engine(RolloutConfig(name=name))
        with pytest.raises(ConfigError, match=way_out.format(name)):
            check_engine(RolloutConfig(name=name, **setting))


def test_a_factory_can_declare_capabilities_and_is_named_as_an_alternative(register):
    def capable(**parts):
        return EmbeddedEngine(**parts)

    capable.capabilities = Capabilities(deterministic=True)
    register("capable", capable)
    check_engine(RolloutConfig(name="capable", deterministic=True))
    with pytest.raises(ConfigError, match="Set name=capable, or name=embedded, or determ"):
        check_engine(RolloutConfig(name="hf", deterministic=True))
    with pytest.raises(ConfigError, match="name=capable. Set name=embedded, or name=sglang, or n"):
        check_engine(RolloutConfig(name="capable", tensor_model_parallel_size=2))


def test_a_custom_class_is_registered_and_asked(register):
    class Picky(EmbeddedEngine):
        @classmethod
        def check(cls, config):
            super().check(config)
            if config.stop:
                raise ConfigError("no stop strings")

    register("picky", Picky)
    check_engine(RolloutConfig(name="picky", deterministic=True))
    with pytest.raises(ConfigError, match="no stop strings"):
        check_engine(RolloutConfig(name="picky", stop=["a"]))
    model = talkative_model("qwen2")
    assert tokens_of(run(make_engine(model, "picky"), PROMPTS)) == tokens_of(
        run(make_engine(model), PROMPTS)
    )


def test_each_engine_plans_its_own_memory(register):
    register("undeclared", factory)
    plans = {}
    for name in ("embedded", "hf", "undeclared"):
        plans[name] = plan_engine(RolloutConfig(name=name, max_num_seqs=8), LOAD)

    assert plans["undeclared"] == plans["embedded"]
    paged = plans["embedded"]
    assert (paged.page_tokens, paged.pages_a_sample, paged.pages) == (16, 4, 8 * 4 + 4)
    assert paged.working == 2 * 8192 * (3 * 16 + 5 * 8) + 8 * 100 * 4
    padded = plans["hf"]
    assert (padded.page_tokens, padded.pages_a_sample, padded.pages) == (65, 1, 8)
    assert padded.working == 8 * 2 * 32**2 * (2 * 2 + 4) + 8 * 100 * 4
