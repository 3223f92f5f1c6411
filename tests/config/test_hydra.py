"""Equality with Hydra and OmegaConf, where the package composes without them."""

import re
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.config.conftest import Load
from verl.config import build
from verl.config import compose as composition
from verl.config.build import SchemaNode, fill, resolve, typed_tree
from verl.config.command_line import parse_command_line
from verl.config.keys import keys_of
from verl.config.load import ROOTS
from verl.utils.errors import ConfigError


def test_schema_is_built_when_hydra_asks_for_it():
    schema = ROOTS["serve"].schema
    node = SchemaNode("serve", schema)
    assert "node" not in vars(node)
    assert node.node is typed_tree(schema)

    for root, about in ROOTS.items():
        stored = ConfigStore.instance().load(f"{root}.yaml")
        assert OmegaConf.get_type(stored.node) is about.schema


OVERRIDE = st.tuples(
    st.sampled_from(["", "+", "++", "--"]),
    st.sampled_from(["a", "a.b", "a.b.c", "data.x", "9"]),
    st.sampled_from(
        [
            *("1", "-3", "1e-6", "inf", "0x10", "1_000", "true", "null", "", "text", "two words"),
            *("'a,b'", '"it\'s"', "a\\,b", "/tmp/a-b.c", "a=b", "[a,'b,c',null]", "[]", "{}"),
            *("{b:1,y:{z:[1,2]}}", "${a}", "${data.x}/c", "int(3)", "str(4)", "???", "[[1],2]"),
        ]
    ),
).map(lambda parts: "{}{}={}".format(*parts))


@settings(max_examples=12)
@example(arguments=["a={b:1,y:2}", "+a={b:3}", "a.c=4", "data='x,y'"])
@example(arguments=["a=[1,2]", "++a=[3]", "b=${a}", "b=5"])
@given(arguments=st.lists(OVERRIDE, max_size=4))
def test_overrides_alone_give_what_hydra_composes(arguments: list[str]):
    command = parse_command_line(arguments)
    values = composition.compose_overrides(command.overrides)
    if values is not None:
        assert repr(values) == repr(composition.compose_by_hydra(command, "ppo_trainer"))


@pytest.mark.parametrize(
    "override", ["a=1,2", "~a", "a@b=1", "hydra.run.dir=x", "a=${hydra:b}", "a=[1"]
)
def test_overrides_that_need_hydra_are_left_to_it(override: str):
    overrides = parse_command_line([override]).overrides
    assert composition.compose_overrides(overrides) is None


_ODD_VALUES = [
    *(None, True, False, 0, 1, -3, 2.5, 1e3, float("inf"), 10**30, b"x", Path("a/b")),
    *("", "x", "7", "1_5", "true", "null", "???", "a\\b", "$x"),
    *([], ["a"], [1, 2.5], [None], [[1]], ["???"]),
    *({}, {"a": {"b": [1, None]}}, {"a": "???"}),
    *({"p": {"trained": True}}, {"p": {"bad": 1}}, [{"name": "sft"}], [{"name": "s", "coef": 1}]),
]


@st.composite
def _values_of_keys(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    root = draw(st.sampled_from([*ROOTS]))
    keys = keys_of(ROOTS[root].schema)
    main_keys = [path for path, key in keys.items() if key.main is None]
    paths = draw(st.lists(st.sampled_from(main_keys), max_size=3))
    return root, {path: draw(st.sampled_from(_ODD_VALUES)) for path in paths}


@settings(max_examples=40)
@example(drawn=("ppo_trainer", {}))
@example(drawn=("sft_trainer", {"trainer.checkpoint.save_contents": ["model"]}))
@example(drawn=("ppo_trainer", {"trainer.project_name": 7, "trainer.seed": 3}))
@example(drawn=("ppo_trainer", {"data.tokenizer": "???"}))
@given(drawn=_values_of_keys())
def test_values_without_interpolations_become_what_omegaconf_resolves(drawn: tuple[str, dict]):
    root, values = drawn
    results = []
    for build_by in (fill, resolve):
        try:
            results.append(repr(build_by(values, ROOTS[root].schema, {})))
        except ConfigError as error:
            results.append(str(error))
    assert results[0] == results[1]


def test_the_time_of_hydra_is_resolved_with_and_without_a_file(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for resolver in ("now", "hydra", "python_version"):  # that an earlier composition has left
        OmegaConf.clear_resolver(resolver)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("defaults: [ppo_trainer]")
    name = "trainer.experiment_name=tea_${now:%Y}"

    bare = load(name).trainer.experiment_name

    assert re.fullmatch(r"tea_\d{4}", bare)
    assert load("run.yaml", name).trainer.experiment_name == bare


def test_plain_values_need_no_tree_of_the_whole_schema(load: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "typed_tree", None)
    monkeypatch.setattr(build, "_pickled_tree", None)
    assert load("trainer.seed=3").actor_rollout_ref.rollout.seed == 3


def test_a_plain_command_line_searches_no_files(load: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(composition, "compose_by_hydra", None)
    assert load("data.val_files=[a,'b']", "trainer.seed=3").trainer.seed == 3


def test_hydra_writes_no_files(
    load: Load, log: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    load("hydra.run.dir=somewhere")
    assert list(tmp_path.iterdir()) == []
    assert "hydra.run.dir has no effect" in log.text
