"""What do pictures cost? A GRPO step of a Qwen2.5-VL against the text model of the same shape.

    python bench/vision.py                # 3B shape, drawn weights; needs a GPU of 80 GB or more
    python bench/vision.py --tiny         # a tiny shape, to try the script on a CPU
    python bench/vision.py --freeze       # the vision tower is not trained
    python bench/vision.py --response-tokens 128
    python bench/vision.py --vllm         # the rollout of vLLM, too; it needs torchvision

Both models get 32 prompts of 1,024 + 64 tokens, and draw 8 samples of 1,024 tokens each. In the
prompts of the vision model the 1,024 tokens are one picture (64 x 64 patches). The text model gets
plain tokens. Pictures cost as much however long the responses are, so their share rises with
shorter ones.

Prints seconds of each phase of the last of `--steps` steps, the ratio of the step times, and how
many patches the trainer's and the rollout's vision towers computed, against the patches of one pass
over the pictures. Exit code 1 if the step takes more than 1.25 times that of text.

Each model has a process of its own: memory that one leaves behind would make the passes of the next
one smaller.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import run_python, run_side
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen2Config,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_vllm import Job

from verl.models.pictures import Picture
from verl.models.shapes_model import VISION, make_tokenizer
from verl.trainer import PPOTrainer
from verl.utils.phases import phase

GOAL = 1.25
NAMES = ("text", "vision")
LOGS = Path("outputs")
LIMIT_S = 600.0
VLLM_LIMIT_S = 300.0
VOCABULARY = 151_936
TEXT_3B: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
VISION_3B: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
TINY: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The sizes of a step."""

    prompts: int = 32
    samples: int = 8
    text_tokens: int = 64  # of a prompt, without its picture
    response_tokens: int = 1024
    token_rows: int = 32  # rows and columns of the picture's tokens

    @property
    def picture_tokens(self) -> int:
        """Return the tokens of a picture."""
        return self.token_rows**2

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of a prompt."""
        return self.picture_tokens + self.text_tokens


def make_models(folder: Path, names: Sequence[str], tiny: bool) -> dict[str, Path]:
    """Write models with drawn weights; return their folders."""
    text = TEXT_3B | (TINY | {"num_attention_heads": 4, "vocab_size": 512} if tiny else {})
    vision = dict(VISION_3B)
    sections = [4, 6, 6] if tiny else [16, 24, 24]
    if tiny:
        vision |= {"depth": 2, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 128}
        vision |= {"intermediate_size": 96, "patch_size": 4, "fullatt_block_indexes": [1]}

    tokenizer = make_tokenizer()
    start, image, video, end = tokenizer.convert_tokens_to_ids(list(VISION))
    rope = {"rope_type": "default", "rope_theta": 1e6}
    configs = {
        "text": Qwen2Config(**text, rope_parameters=rope),
        "vision": Qwen2_5_VLConfig(
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
            tie_word_embeddings=True,
            text_config={**text, "rope_parameters": {**rope, "mrope_section": sections}},
            vision_config=vision,
        ),
    }

    folders = {}
    for name in names:
        torch.manual_seed(0)
        config = configs[name]
        kind: Any = AutoModelForCausalLM if name == "text" else AutoModelForImageTextToText
        folders[name] = folder / name
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = kind.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
        if name == "vision":
            pixels = {"shortest_edge": 256, "longest_edge": 1024 * 1024}
            Qwen2VLImageProcessorPil(patch_size=vision["patch_size"], size=pixels).save_pretrained(
                folders[name]
            )
        del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # vLLM counts it as taken
    return folders


class Prompts:
    """Items as the trainer's own dataset makes them, of random tokens and pixels."""

    def __init__(self, work: Work, config: Any, image_token: int, has_pictures: bool) -> None:
        draw = torch.Generator().manual_seed(1)
        self.items: list[dict[str, Any]] = []
        count = work.picture_tokens
        for number in range(work.prompts):
            ids = torch.randint(40, 500, (work.prompt_tokens,), generator=draw).tolist()
            item: dict[str, Any] = {"raw_prompt": [], "index": number, "data_source": "bench"}
            if has_pictures:
                ids[8 : 8 + count] = [image_token] * count
                vision = config.vision_config
                width = 3 * vision.temporal_patch_size * vision.patch_size**2
                side = work.token_rows * vision.spatial_merge_size
                picture = Picture(
                    key=str(number),
                    token_ids=(image_token,) * count,
                    token_id=image_token,
                    inputs={
                        "pixel_values": torch.randn(side * side, width, generator=draw),
                        "image_grid_thw": torch.tensor([[1, side, side]]),
                    },
                    grid=(work.token_rows, work.token_rows),
                )
                item["prepared_pictures"] = (picture,)
            self.items.append({"raw_prompt_ids": ids, **item})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return self.items[item]


@phase(reads="responses")
def reward(batch: Any, return_dict: bool = False) -> Any:
    """Score responses by their first token, so that groups differ."""
    responses = batch.batch["responses"]
    scores = torch.zeros(responses.shape)
    scores[:, -1] = (responses[:, 0] % 2).float()
    return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores


def make_trainer(folder: Path, name: str, work: Work, steps: int, freeze: bool) -> PPOTrainer:
    """Make the trainer of one of the models, with prompts for it."""
    arguments = {
        "data.train_files": "unused",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt_tokens,
        "data.max_response_length": work.response_tokens,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": str(folder),
        "actor_rollout_ref.rollout.n": work.samples,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "trainer.total_training_steps": steps,
        "trainer.logger": [],
        "actor_rollout_ref.actor.freeze_vision_tower": freeze and name == "vision",
    }
    tokenizer = make_tokenizer()
    image: Any = tokenizer.convert_tokens_to_ids(VISION[1])
    has_pictures = name == "vision"
    config = Qwen2_5_VLConfig.from_pretrained(folder) if has_pictures else None
    trainer = PPOTrainer(
        arguments,
        tokenizer=tokenizer,
        reward_fn=reward,
        train_dataset=Prompts(work, config, image, has_pictures),
    )
    trainer.init_workers()
    return trainer


def measure(trainer: PPOTrainer, name: str, steps: int) -> dict[str, float]:
    """Run steps of GRPO and return the seconds of the last one, by phase."""
    patches = {"trainer": 0, "rollout": 0}
    if name == "vision":
        count_patches(trainer, patches)

    seconds: dict[str, float] = {}
    (batch,) = trainer.train_loader  # later steps have its pictures in memory, too
    for number in range(steps):
        clear_features(trainer)
        patches.update(dict.fromkeys(patches, 0))
        trainer.timer.seconds.clear()
        begin = time.perf_counter()
        trainer.global_step = number + 1
        trainer.step(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = {"step": time.perf_counter() - begin}
    for phase_name, value in trainer.timer.seconds.items():
        seconds.setdefault(phase_name, value)
    for place, count in patches.items():
        seconds[f"patches of {place}"] = count
    return seconds


def clear_features(trainer: Any) -> None:
    """Let the step compute the features of a frozen tower, as with pictures that it sees first."""
    features = trainer.actor_wg.worker.features
    if features is not None:
        features.clear()


def count_patches(trainer: Any, patches: dict[str, int]) -> None:
    """Add up the patches that each vision tower computes in a forward pass."""
    towers = {
        "trainer": trainer.actor_wg.worker.engine.hf_model.base_model.visual,
        "rollout": trainer.rollout_wg.worker.engine.twin.module.base_model.visual,
    }
    for place, tower in towers.items():

        def count(module: Any, inputs: Any, output: Any, place: str = place) -> None:
            patches[place] += len(inputs[0])

        tower.register_forward_hook(count)


def measure_vllm(folder: Path, work: Work, tiny: bool) -> dict[str, float]:
    """Return the seconds of vLLM's rollouts of the vision model, in a process of its own."""
    config = Qwen2_5_VLConfig.from_pretrained(folder)
    vision: Any = config.vision_config
    job = Job(
        folder=str(folder),
        dtype="float32" if tiny else "bfloat16",
        prompts=work.prompts,
        samples=work.samples,
        text_tokens=work.text_tokens,
        picture_tokens=work.picture_tokens,
        picture_side=work.token_rows * vision.spatial_merge_size * vision.patch_size,
        picture_token=config.image_token_id,
        response_tokens=work.response_tokens,
    )
    found = run_side("vision_vllm.py", job, LOGS, "vision_vllm", limit_s=VLLM_LIMIT_S)
    if isinstance(found, str):
        raise SystemExit(f"vision.py: 'vllm' gave no result: {found}")
    print(found["versions"])
    return found["seconds"]


def measure_apart(folder: Path, name: str, arguments: Sequence[str]) -> dict[str, float]:
    """Run `measure` in a process of its own, with the arguments of this one."""
    result = folder.with_suffix(".json")
    command = [__file__, *arguments, "--only", name, "--folder", str(folder), "--json", str(result)]
    problem = run_python(command, LOGS / f"vision_{name}.log", limit_s=LIMIT_S)
    if problem:
        raise SystemExit(f"vision.py: '{name}' gave no result: {problem}")
    return json.loads(result.read_text(encoding="utf-8"))


def show(name: str, seconds: dict[str, float]) -> None:
    """Print a line of phases and their seconds."""
    shown = ", ".join(f"{phase_name} {value:.3g}" for phase_name, value in seconds.items())
    print(f"{name}: {shown}", flush=True)


def parse_arguments() -> argparse.Namespace:
    usual = Work().response_tokens
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for a CPU")
    parser.add_argument("--steps", type=int, default=3, help="the last one counts [3]")
    parser.add_argument("--response-tokens", type=int, default=usual, help=f"[{usual}]")
    parser.add_argument("--only", choices=NAMES, help="measure one model")
    parser.add_argument("--freeze", action="store_true", help="do not train the vision tower")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM's rollout, too")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process of its own
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)

    given = parser.parse_args()
    if given.vllm and given.only == "text" and given.json is None:
        parser.error("--vllm measures the vision model: leave out --only text.")
    given.work = Work(response_tokens=given.response_tokens)
    if given.tiny:
        given.work = Work(prompts=4, response_tokens=8, token_rows=4)
    return given


def measure_all(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the models, each in a process of its own, and print each result."""
    place = Path(tempfile.mkdtemp())
    names = NAMES if given.only is None else (given.only,)
    results = {}
    try:
        folders = make_models(place, names, given.tiny)
        if given.vllm:
            results["vllm"] = measure_vllm(folders["vision"], given.work, given.tiny)
            show("vllm", results["vllm"])
        for name in names:
            results[name] = measure_apart(folders[name], name, sys.argv[1:])
            show(name, results[name])
    finally:
        shutil.rmtree(place)
    return results


def main() -> int:
    given = parse_arguments()
    work: Work = given.work
    if given.json is not None:
        trainer = make_trainer(given.folder, given.only, work, given.steps, given.freeze)
        result = measure(trainer, given.only, given.steps)
        given.json.write_text(json.dumps(result), encoding="utf-8")
        return 0

    results = measure_all(given)
    print(f"patches of one pass over the pictures: {work.prompts * (2 * work.token_rows) ** 2}")
    if given.vllm and "vision" in results:
        ratio = results["vllm"]["new pictures"] / results["vision"]["gen"]
        print(f"vLLM's rollout of new pictures takes {ratio:.2f} times as long as ours")
    if not results.keys() >= {"text", "vision"}:
        return 0

    ratio = results["vision"]["step"] / results["text"]["step"]
    print(f"{work.response_tokens} response tokens, step time with pictures: {ratio:.2f} of text")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
