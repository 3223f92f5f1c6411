"""GRPO and fine-tuning on prompts with pictures: rollout and trainer compute the same log-probs."""

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vision_folders import save_vision_folder, some_image
from verl.cli.reward_check import check_reward
from verl.data.rgb import open_picture, upright_rgb
from verl.data.shapes import rows, shapes_file
from verl.diagnostics.view.run_advice import advise_on
from verl.jobs.replay import replay
from verl.models.shapes_model import shapes_folder
from verl.models.vision import knows_videos
from verl.tracking.records import load_run
from verl.trainer import PPOTrainer, RLTrainer
from verl.trainer.capsule import write_capsule
from verl.utils.errors import ConfigError, DataError, RewardError


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def config(folder: Path, **keys: Any) -> dict[str, Any]:
    return {
        "data.dataset_name": "shapes",
        "data.train_max_samples": 8,
        "data.val_max_samples": 4,
        "data.train_batch_size": 4,
        "actor_rollout_ref.rollout.n": 4,
        "trainer.total_training_steps": 2,
        "trainer.test_freq": 2,
        "trainer.default_local_dir": str(folder),
        **keys,
    }


def test_the_packaged_model_is_made_without_a_progress_bar(tmp_path: Path, capfd) -> None:
    assert (shapes_folder(tmp_path) / "model.safetensors").is_file()
    output = capfd.readouterr()
    assert output.out + output.err == ""


def test_grpo_counts_the_vision_tower_and_agrees_with_the_rollout(
    few_shapes, tmp_path: Path
) -> None:
    trainer = PPOTrainer(config(tmp_path))
    trainer.init_workers()
    worker: Any = trainer.actor_wg.worker
    tower: Any = worker.engine.hf_model.base_model.visual
    patches: list[int] = []
    tower.register_forward_hook(lambda module, inputs, output: patches.append(len(inputs[0])))

    batch = next(iter(trainer.train_loader))
    of_one = len(batch.non_tensor_batch["prepared_pictures"][0][0].inputs["pixel_values"])
    generated = trainer.generate(batch)
    old = worker.compute_log_prob(generated).batch["old_log_probs"]
    # 16 rows of 4 prompts: each picture once
    assert sum(patches) == 4 * of_one

    mask = generated.batch["response_mask"].bool()
    difference = (old - generated.batch["rollout_log_probs"])[mask].abs().max()
    assert difference < 1e-4
    assert old[mask].std() > 0

    trainer.fit()
    assert all(bool(each.isfinite().all()) for each in worker.engine.hf_model.parameters())


SEES = """
import hashlib
import io

from PIL import Image


def compute_score(data_source, solution_str, ground_truth, extra_info):
    (png,) = extra_info["images"]
    image = Image.open(io.BytesIO(png))
    return {"score": float(image.width), "pixels": hashlib.sha1(image.tobytes()).hexdigest()}
"""


def test_rewards_see_the_images_of_their_rows(few_shapes, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(SEES)
    own = {"custom_reward_function.path": str(path), "reward_model.images": True}
    keys = config(tmp_path, **own, **{"trainer.total_training_steps": 1})
    trainer = PPOTrainer(keys)
    trainer.init_workers()
    generated = trainer.generate(next(iter(trainer.train_loader)))
    result = trainer.reward_fn(generated, return_dict=True)

    expected = []
    for (address,) in generated.non_tensor_batch["images"]:
        encoded = base64.b64decode(address.partition(",")[2])
        image = upright_rgb(open_picture(encoded))
        expected.append(hashlib.sha1(image.tobytes()).hexdigest())
    assert result["reward_extra_info"]["pixels"] == expected
    assert len(set(expected)) == 4
    trainer.fit()  # before it, three rows are tried

    words = [f"{name}={value}" for name, value in keys.items()]
    report = check_reward(["actor_rollout_ref.model.path=shapes", *words], 2)
    assert report.probes
    assert not report.faults


def test_a_model_of_text_has_no_images_for_rewards(tmp_path: Path) -> None:
    keys = {"data.dataset_name": "toy", "actor_rollout_ref.model.path": "toy"}
    with pytest.raises(ConfigError, match="reward_model.images=True.*'toy' reads text alone"):
        PPOTrainer(config(tmp_path, **keys, **{"reward_model.images": True}))


def trainer_on_rows(folder: Path, family: str, content: str, **keys: Any) -> PPOTrainer:
    """Return a trainer of a tiny model on 8 rows, each with an image and a video of 3 or 4 frames."""
    save_vision_folder(folder, family)
    rows = []
    for number in range(8):
        frames = []
        for place in range(3 + number % 2):
            name = f"{number} {place}.png"
            some_image(10 * number + place, (16, 24)).save(folder / name)
            frames.append(name)
        row = {
            "data_source": "shapes",
            "prompt": [{"role": "user", "content": content}],
            "images": [frames[-1]],
            "videos": [{"video": frames, "fps": 4.0}] if "<video>" in content else [],
            "reward_model": {"style": "rule", "ground_truth": "1"},
        }
        rows.append(json.dumps(row) + "\n")
    file = folder / "rows.jsonl"
    file.write_text("".join(rows))
    changed = {
        "data.dataset_name": None,
        "data.train_files": str(file),
        "data.val_files": str(file),
        "data.max_prompt_length": 256,
        "data.max_response_length": 8,
        "actor_rollout_ref.model.path": str(folder),
        **keys,
    }
    trainer = PPOTrainer(config(folder / "out", **changed))
    trainer.init_workers()
    return trainer


@pytest.mark.skipif(not knows_videos(), reason="this transformers does not know videos")
def test_rollout_and_trainer_read_the_same_videos(tmp_path: Path) -> None:
    trainer = trainer_on_rows(tmp_path, "qwen2_5_vl", "<video>How many, and here <image>?")
    worker: Any = trainer.actor_wg.worker
    generated = trainer.generate(next(iter(trainer.train_loader)))
    old = worker.compute_log_prob(generated).batch["old_log_probs"]
    mask = generated.batch["response_mask"].bool()
    assert (old - generated.batch["rollout_log_probs"])[mask].abs().max() < 1e-3

    pictures = generated.non_tensor_batch["prepared_pictures"]
    without_time = generated.select()
    column = without_time.non_tensor_batch["prepared_pictures"] = pictures.copy()
    for row, own in enumerate(pictures):
        video, image = own
        assert video.times == ((0, 2),)
        column[row] = (replace(video, key=f"{video.key} still", times=((0, 0),)), image)
    other = worker.compute_log_prob(without_time).batch["old_log_probs"]
    assert (old - other)[mask].abs().max() > 1e-2
    trainer.fit()


def test_rollout_and_trainer_let_pictures_see_themselves(tmp_path: Path) -> None:
    frozen = {"actor_rollout_ref.actor.freeze_vision_tower": True}
    trainer = trainer_on_rows(tmp_path, "gemma3", "Here <image>\nHow many?", **frozen)
    worker: Any = trainer.actor_wg.worker
    generated = trainer.generate(next(iter(trainer.train_loader)))
    old = worker.compute_log_prob(generated).batch["old_log_probs"]
    mask = generated.batch["response_mask"].bool()
    assert (old - generated.batch["rollout_log_probs"])[mask].abs().max() < 1e-3

    causal = generated.select()
    column = causal.non_tensor_batch["prepared_pictures"].copy()
    for row, (picture,) in enumerate(column):
        column[row] = (replace(picture, sees_itself=False),)
    causal.non_tensor_batch["prepared_pictures"] = column
    other = worker.compute_log_prob(causal).batch["old_log_probs"]
    assert (old - other)[mask].abs().max() > 1e-2

    model = worker.engine.hf_model
    before = {name: each.detach().clone() for name, each in model.base_model.named_parameters()}
    trainer.fit()
    changed = set()
    for name, parameter in model.base_model.named_parameters():
        if not torch.equal(parameter, before[name]):
            changed.add(name.partition(".")[0])
    assert changed == {"multi_modal_projector", "language_model"}


def test_other_pictures_give_other_log_probs(few_shapes, tmp_path: Path) -> None:
    trainer = PPOTrainer(config(tmp_path))
    trainer.init_workers()
    worker: Any = trainer.actor_wg.worker
    generated = trainer.generate(next(iter(trainer.train_loader)))
    old = worker.compute_log_prob(generated).batch["old_log_probs"]
    swapped = generated.select()
    pictures = generated.non_tensor_batch["prepared_pictures"]
    swapped.non_tensor_batch["prepared_pictures"] = pictures[::-1].copy()
    other = worker.compute_log_prob(swapped).batch["old_log_probs"]
    mask = generated.batch["response_mask"].bool()
    assert (old - other)[mask].abs().max() > 1e-2


def test_the_answers_of_the_rows_are_counts() -> None:
    counts = {row["reward_model"]["ground_truth"] for row in rows("val")}
    assert counts == {"0", "1", "2", "3"}
    assert Path(shapes_file("val")).is_file()


def test_a_run_with_pictures_that_fails_does_not_advise_a_replay(
    few_shapes, tmp_path: Path, monkeypatch, caplog
) -> None:
    def failing(self: PPOTrainer, batch: Any) -> Any:
        raise RewardError("planted")

    monkeypatch.setattr(PPOTrainer, "score", failing)
    caplog.set_level("INFO", logger="verl")
    trainer = PPOTrainer(config(tmp_path, **{"trainer.val_before_train": False}))
    trainer.init_workers()
    with pytest.raises(RewardError, match="planted"):
        trainer.fit()

    assert "No capsule of step 1: A capsule does not hold pictures" in caplog.text
    assert "replay" not in caplog.text.replace("could not be replayed", "")
    assert not (tmp_path / "records" / "capsules").exists()
    run = load_run(tmp_path)
    (finding,) = [each for each in advise_on(run, is_live=False) if each["kind"] == "problem"]
    assert finding["text"] == "RewardError: planted"
    with pytest.raises(DataError, match="does not hold pictures, and the rows of step 1 have some"):
        write_capsule(tmp_path, 1, tmp_path / "capsule.zip")


def test_steps_without_pictures_of_a_model_that_reads_them_are_replayed(tmp_path: Path) -> None:
    save_vision_folder(tmp_path, "qwen2_5_vl")
    lines = []
    for number in range(8):
        row = {
            "data_source": "shapes",
            "prompt": [{"role": "user", "content": f"How many are {number}?"}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
        }
        lines.append(json.dumps(row) + "\n")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(lines))

    changed = {
        "data.dataset_name": None,
        "data.train_files": str(file),
        "data.val_files": None,
        "data.max_prompt_length": 64,
        "data.max_response_length": 8,
        "actor_rollout_ref.model.path": str(tmp_path),
        "trainer.save_freq": 1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
    }
    trainer = PPOTrainer(config(tmp_path / "run", **changed))
    trainer.init_workers()
    trainer.fit()
    write_capsule(tmp_path / "run", 2, tmp_path / "capsule.zip")
    assert "equal to the last bit" in str(replay(tmp_path / "capsule.zip"))


def test_rollout_of_a_program_reads_the_pictures_of_a_chat(few_shapes, tmp_path: Path) -> None:
    trainer = RLTrainer(config(tmp_path), max_new_tokens=4)
    prompts = []
    for seed in range(2):
        some_image(seed, (64, 64)).save(tmp_path / f"{seed}.png")
        parts = [
            {"type": "image", "image": str(tmp_path / f"{seed}.png")},
            {"type": "text", "text": "Which shape?"},
        ]
        prompts.append([{"role": "user", "content": parts}])

    batch = trainer.rollout([*prompts, "No picture."], greedy=True, as_batch=True)
    counts = [len(own) for own in batch.non_tensor_batch["prepared_pictures"]]
    assert counts == [1, 1, 0]
    # The trainer sees the same pictures as the rollout.
    old = trainer.ppo.actor_wg.compute_log_prob(batch).batch["old_log_probs"]
    mask = batch.batch["response_mask"].bool()
    assert (old - batch.batch["rollout_log_probs"])[mask].abs().max() < 1e-3

    trainer.config.data.max_prompt_length = 8
    trainer.config.data.truncation = "left"
    with pytest.raises(DataError, match="Prompt 0 has .* prompts with pictures are never cut"):
        trainer.rollout(prompts)
    with pytest.raises(DataError, match="Prompt 0 has .* prompts with pictures are never cut"):
        trainer.rollout(batch.select(batch_keys=[]))
