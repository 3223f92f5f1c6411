"""A program on two ranks generates, scores and trains like one process."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launches import launch

PROGRAM = """
import json, sys
from verl.trainer import RLTrainer
from verl.utils.errors import WorkerError

trainer = RLTrainer(sys.argv[1], **json.loads(sys.argv[3]))
asked = ["3 + 11 = ?", "2 + 5 = ?", "6 + 6 = ?"]
result = {"one": trainer.rollout(asked[:1], greedy=True), "before": trainer.rollout(asked, n=2)}
result["scores"] = trainer.compute_reward(["14", "no idea", "7"], asked).tolist()
result["metrics"] = trainer.train(micro_batch_size=2, gradient_accumulation_steps=int(sys.argv[4]))
result["mini"] = trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size
try:
    result["critic"] = type(trainer.critic.model).__name__
except WorkerError as error:
    result["critic"] = str(error)
json.dump(result, open(sys.argv[2], "w"))
"""
YAML = """
backend: local
max_new_tokens: 8
lr: 1e-4
critic_config: {{lr: 1e-3}}
rollout_config: {{n: 4, deterministic: true, temperature: 2}}
algorithm: {{adv_estimator: gae}}
data: {{dataset_name: toy, train_batch_size: 4}}
reward_model: {{enable: true, model: {{path: {rm}}}}}
actor_rollout_ref.actor.use_kl_loss: false
trainer: {{val_before_train: false, max_steps: 1, test_freq: -1, num_threads: 1, default_local_dir: {folder}}}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, reward_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "run.yaml").write_text(YAML.format(rm=reward_folder, folder=folder))
    (folder / "program.py").write_text(PROGRAM)
    return folder


def run_program(arguments: list[str]) -> None:
    """Run `python program.py arguments` in this folder."""
    sys.argv = ["program.py", *arguments]
    runpy.run_path("program.py")


@pytest.fixture(scope="module")
def alone(program: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(program)
        patch.setattr("sys.argv", sys.argv)
        run_program(["run.yaml", "alone.json", "{}", "4"])
    return json.loads((program / "alone.json").read_text())


APART = {
    "actor_placement": [0],
    "critic_placement": [1],
    "reward_model_placement": [1],
    "enable_hybrid_engine": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(("keywords", "steps", "place"), [({}, 2, "[0, 1]"), (APART, 4, "[1]")])
def test_two_ranks_generate_score_and_train_like_one_process(
    alone, program, tmp_path, keywords, steps, place
):
    arguments = ["run.yaml", str(tmp_path / "result.json"), json.dumps(keywords), str(steps)]
    done = launch(2, run_program, arguments, folder=program)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert alone["critic"] == "CriticModel"
    assert f"its weights lie on the ranks {place}" in result["critic"]
    assert result["mini"] == alone["mini"] == 2
    assert (result["one"], result["before"]) == (alone["one"], alone["before"])
    assert result["scores"] == pytest.approx(alone["scores"], rel=1e-5)
    for name in ("critic/score/mean", "actor/grad_norm", "critic/grad_norm", "actor/entropy"):
        assert result["metrics"][name] == pytest.approx(alone["metrics"][name], rel=2e-5), name
