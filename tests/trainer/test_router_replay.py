"""Runs of a mixture of experts whose passes route tokens to the same experts."""

from pathlib import Path

from tests.models.test_routing import make_model
from tests.tiny_models import tiny_tokenizer
from tests.trainer.runs import run, step_lines

REPLAY = "actor_rollout_ref.actor.router_replay.mode"
RECORD = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
COMMON = [
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "data.max_response_length=24",
    "trainer.max_steps=1",
]


def save_model(folder: Path) -> str:
    make_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


def test_replay_brings_training_near_to_the_rollout(tmp_path):
    path = save_model(tmp_path / "model")
    modes = {"disabled": [], "R2": [f"{REPLAY}=R2"], "R3": [f"{REPLAY}=R3", f"{RECORD}=true"]}
    off = {}
    for mode, keys in modes.items():
        assert run(tmp_path / mode, path, *COMMON, *keys) == 0
        (line,) = step_lines(tmp_path / mode)
        assert line["actor/skipped_updates"] == 0
        off[mode] = line["training/rollout_probs_diff_mean"]
    assert off["R2"] == off["disabled"]  # R2 records in the pass for old log-probs
    assert off["R3"] < 0.75 * off["disabled"]


def test_recording_and_replay_go_together(tmp_path, capsys):
    assert run(tmp_path, f"{REPLAY}=R3") != 0
    assert "Set both, or neither" in capsys.readouterr().err


def test_replay_without_a_pass_that_records_is_warned_of(tmp_path, capsys):
    path = save_model(tmp_path / "model")
    whole_batch = [path, *COMMON, f"{REPLAY}=R2", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    assert run(tmp_path / "one", *whole_batch) == 0
    assert f"{REPLAY}=R2 has no effect" in "".join(capsys.readouterr())

    assert run(tmp_path / "two", path, *COMMON, f"{REPLAY}=R2") == 0
    assert "has no effect" not in "".join(capsys.readouterr())
