"""Declarations of the columns that parts use."""

import pytest

from verl.algorithms.advantages import advantage_estimators
from verl.columns import COLUMNS
from verl.compat.registries import AdvantageEstimator
from verl.rewards.manager import RewardManager
from verl.rewards.managers import reward_managers
from verl.utils.phases import declared_phase, declared_phases, may_overlap, phase


@phase(reads="values", writes="returns")
def declared(batch):
    return batch


class Declared:
    @phase(reads="values", writes="returns")
    def __call__(self, batch):
        return batch


class Replaced(Declared):
    def __call__(self, batch):
        return batch


def test_a_function_and_a_callable_object_are_declared_alike():
    expected = declared_phase(declared)
    assert expected is not None
    assert declared_phase(Declared()) == expected
    assert declared_phases(Declared, "__call__") == [expected]


@pytest.mark.parametrize("part", [Replaced(), len, lambda batch: batch])
def test_a_part_without_a_declaration_has_none(part):
    assert declared_phase(part) is None


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"reads": "values"}, {"reads": "values", "writes": "returns"}, True),
        ({"writes": "values"}, {"reads": "values"}, False),
        ({"reads": "values"}, {"writes": "values"}, False),
        ({"writes": "values"}, {"writes": "values"}, False),
        ({"chooses_rows": True}, {"reads": "values"}, False),
    ],
)
def test_phases_without_a_data_dependency_overlap(first: dict, second: dict, expected: bool):
    phases = [declared_phase(phase(**given)(lambda batch: batch)) for given in (first, second)]
    one, other = (each for each in phases if each is not None)
    assert may_overlap(one, other) is expected


@pytest.mark.parametrize("name", [*AdvantageEstimator, "optimal_token_baseline", "turn_rloo"])
def test_every_estimator_of_the_package_declares_columns_that_exist(name: str):
    found = declared_phase(advantage_estimators.get(name))
    assert found is not None
    assert found.reads <= COLUMNS.keys()
    assert found.leaves_batch_alone


@pytest.mark.parametrize("name", ["naive", "batch", "prime", "dapo"])
def test_every_manager_of_the_package_leaves_the_batch_unchanged(name: str):
    phases = declared_phases(reward_managers.get(name), *RewardManager.DECLARED)
    assert phases is not None
    assert all(each.leaves_batch_alone for each in phases)
