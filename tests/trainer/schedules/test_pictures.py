"""Prompts with pictures in the asynchronous schedules, on one device."""

from pathlib import Path

import pytest
import torch

from tests.trainer.runs import run, run_until_killed, same_bits, step_lines, weights, without_times
from verl.models.pictures import Picture
from verl.protocol import DataProto
from verl.trainer.schedules.packing import packed, unpacked
from verl.utils.column_dicts import object_column

pytestmark = pytest.mark.usefixtures("few_shapes")

STEPS = 3
SHAPES = [
    "data.dataset_name=shapes",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "trainer.val_before_train=False",
    f"trainer.max_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
]
ASYNC = "trainer.mode=fully_async"


def train(folder: Path, *more: str) -> int:
    return run(folder, *more, base=SHAPES)


def test_staleness_zero_has_the_bits_of_the_synchronous_run(tmp_path):
    assert train(tmp_path / "sync") == 0
    assert train(tmp_path / "async", ASYNC, "async_training.staleness_threshold=0") == 0
    sync = without_times(step_lines(tmp_path / "sync"))
    assert len(sync) == STEPS
    assert max(line["actor/grad_norm"] for line in sync) > 0, "something is learned"
    assert without_times(step_lines(tmp_path / "async"), "fully_async/") == sync
    ours = weights(tmp_path / "async", STEPS)
    assert same_bits(ours, weights(tmp_path / "sync", STEPS))


# Not all samples run at once, so that some are frozen with tokens.
UNEVEN = [
    "actor_rollout_ref.rollout.temperature=1.5",
    "actor_rollout_ref.rollout.max_num_seqs=24",
    "data.max_response_length=16",
]


@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(tmp_path, mode):
    """Responses and batches that were generated ahead keep their pictures."""
    command = [*UNEVEN, f"trainer.mode={mode}", "trainer.save_freq=1"]
    assert train(tmp_path / "whole", *command) == 0

    run_until_killed(2, lambda: train(tmp_path / "killed", *command))
    assert train(tmp_path / "killed", *command) == 0
    whole = step_lines(tmp_path / "whole")
    assert without_times(step_lines(tmp_path / "killed")) == without_times(whole)
    if mode == "fully_async":
        frozen = sum(line["fully_async/partial/total_partial_num"] for line in whole)
        assert frozen > 0, "responses behind pictures go on with other weights"
    ours = weights(tmp_path / "killed", STEPS)
    assert same_bits(ours, weights(tmp_path / "whole", STEPS))


def test_pictures_are_packed_once_each():
    one, other = (
        Picture(
            key=key,
            token_ids=(1, 2),
            token_id=2,
            inputs={"pixel_values": torch.full((2, 3), float(len(key)))},
            grid=(1, 1),
        )
        for key in ("a", "bb")
    )
    rows = object_column([(one,), (), (other, one)])
    values = packed(DataProto.from_dict(non_tensors={"prepared_pictures": rows}))
    assert list(values["pictures"]) == ["a", "bb"]

    again = unpacked(values)
    assert again is not None
    (first,), nothing, (second, shared) = again.non_tensor_batch["prepared_pictures"]
    assert nothing == ()
    assert first is shared
    assert (first.key, first.token_ids, first.grid) == ("a", (1, 2), (1, 1))
    assert torch.equal(second.inputs["pixel_values"], other.inputs["pixel_values"])


def test_frozen_responses_go_on_behind_their_pictures(tmp_path):
    """Weights that stay as they are: the trainer's log-probs are those of every part."""
    still = ["actor_rollout_ref.actor.optim.lr=0", "algorithm.rollout_correction.rollout_is=token"]
    assert train(tmp_path, *UNEVEN, ASYNC, *still) == 0
    lines = step_lines(tmp_path)
    assert sum(line["fully_async/partial/total_partial_num"] for line in lines) > 0
    assert max(line["training/rollout_probs_diff_max"] for line in lines) < 1e-4
