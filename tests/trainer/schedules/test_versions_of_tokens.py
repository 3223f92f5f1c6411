"""Every token of an episode is learned from with the log-probs of the weights that drew it."""

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launches import launch
from tests.trainer.runs import command_line, step_lines
from tests.trainer.schedules.test_agents import APART, BASE, PROMPTS, SAMPLES, STEPS
from verl.protocol import DataProto
from verl.trainer.main_ppo import main
from verl.workers import ActorWorker

ROUNDING = 2e-4  # of a log-prob: generation and update compute it by different kernels
LR = 1e-3  # moves the weights so far that no turn has the log-probs of another version
FILE = "log_probs_of_versions.json"


class LogProbsOfVersions:
    """Compares the log-probs of each batch with those of all weights that the run has had.

    Writes one row for each step, turn and age of tokens. Its `distances` are the largest ones
    between the log-probs of the rollout and those of each version; `old_distance` is that between
    the old log-probs and those of the last version, which the update starts from; `uids` are the
    prompts of the step, one for each episode.
    """

    def __init__(self, folder: Path, mode: str) -> None:
        self.file = folder / FILE
        self.mode = mode
        self.versions: list[list[torch.Tensor]] = []
        self.rows: list[dict[str, Any]] = []

    def look(self, worker: ActorWorker, batch: DataProto) -> None:
        """Compare the batch of an update that has not begun."""
        parameters = list(worker.engine.hf_model.parameters())
        self.versions.append([each.detach().clone() for each in parameters])
        step = len(self.versions)
        rollout = batch.batch["rollout_log_probs"]

        of_versions = []
        for version in self.versions:
            with torch.no_grad():
                for parameter, weight in zip(parameters, version, strict=True):
                    parameter.copy_(weight)
            of_versions.append(worker.compute_log_prob(batch).batch["old_log_probs"])
        from_old = (of_versions[-1] - batch.batch["old_log_probs"]).abs()

        uids = batch.non_tensor_batch["uid"].tolist()
        turns = batch.batch["turn_of_token"]
        ages = self.ages(batch, step)
        own = batch.batch["response_mask"].bool()
        for turn, age in torch.stack([turns[own], ages[own]], -1).unique(dim=0).tolist():
            tokens = own & (turns == turn) & (ages == age)
            distances = [(each - rollout)[tokens].abs().max().item() for each in of_versions]
            row = {"step": step, "turn": turn, "age": age, "uids": uids, "distances": distances}
            row["old_distance"] = from_old[tokens].max().item()
            self.rows.append(row)
        self.file.write_text(json.dumps(self.rows), encoding="utf-8")

    def ages(self, batch: DataProto, step: int) -> torch.Tensor:
        """Return the ages of all tokens (B, R): by the books, or as the schedule has them."""
        if self.mode == "fully_async":
            return batch.batch["token_age"]
        age = 1 if self.mode == "one_step_off" and step > 1 else 0
        return torch.full_like(batch.batch["turn_of_token"], age)


def watched(folder: Path, mode: str, command: list[str]) -> int:
    """Run the main job, with a look at each batch before its update."""
    folder.mkdir(exist_ok=True)
    update = ActorWorker.update_actor
    versions = LogProbsOfVersions(folder, mode)

    @functools.wraps(update)
    def looking(
        self: ActorWorker,
        batch: DataProto,
        entropy_coeff: float | None = None,
        mini_batch_rows: int | None = None,
    ) -> dict[str, float]:
        versions.look(self, batch)
        return update(self, batch, entropy_coeff, mini_batch_rows)

    ActorWorker.update_actor = looking
    try:
        return main(command)
    finally:
        ActorWorker.update_actor = update


# In the other modes the first step is that of sync.
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("sync", marks=pytest.mark.slow),
        pytest.param("one_step_off", marks=pytest.mark.slow),
        "fully_async",
    ],
)
@pytest.mark.parametrize(
    "keys", [[], pytest.param([APART], marks=pytest.mark.slow)], ids=["together", "apart"]
)
def test_each_turn_has_the_log_probs_of_the_version_that_drew_it(tmp_path, mode, keys):
    """Also where an episode spans an update. The old log-probs are those before the update."""
    command = command_line(
        tmp_path,
        *BASE,
        f"trainer.mode={mode}",
        f"actor_rollout_ref.actor.optim.lr={LR}",
        "algorithm.rollout_correction.preset=decoupled_token_is",
        *keys,
    )
    if keys:
        done = launch(2, watched, tmp_path, mode, command)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    else:
        assert watched(tmp_path, mode, command) == 0

    rows = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1)), "one update a step"
    learned = Counter()
    for uids in {row["step"]: row["uids"] for row in rows}.values():
        learned.update(uids)
    assert len(learned) == STEPS * PROMPTS
    assert set(learned.values()) == {SAMPLES}, "every episode is learned from once"

    assert {row["age"] for row in rows} == ({0} if mode == "sync" else {0, 1})
    for row in rows:
        assert row["old_distance"] <= ROUNDING, row
        drew = row["step"] - 1 - row["age"]
        for version, distance in enumerate(row["distances"]):
            assert (distance <= ROUNDING) == (version == drew), (row, version)

    assert {line["actor/lr"] for line in step_lines(tmp_path)} == {LR}
