"""The packaged toy model on vLLM, and how its responses end."""

import json
from dataclasses import replace

import numpy as np
import torch
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.workers.batches import CPU
from verl.config import config_from_dict
from verl.models.load import load_tokenizer
from verl.models.shapes_model import make_model, make_tokenizer
from verl.rollout import create_rollout_engine, generate
from verl.rollout.types import Request, SamplingParams
from verl.trainer import RLTrainer
from verl.workers import ActorWorker, RolloutWorker


def train(folder, **keys):
    """Train the toy for ten steps on vLLM; return the metrics of the steps."""
    trainer = RLTrainer(
        {
            "data.dataset_name": "toy",
            "data.train_batch_size": 4,
            "actor_rollout_ref.model.path": "toy",
            "actor_rollout_ref.rollout.name": "vllm",
            "actor_rollout_ref.rollout.fingerprint_interval": 1,
            "trainer.default_local_dir": str(folder),
            "trainer.logger": ["file"],
            "trainer.max_steps": 10,
            **keys,
        }
    )
    trainer.train()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [step for step in steps if "training/rollout_kl" in step]


def save_shapes(folder):
    """Save a model of the task `shapes` with sizes that servers take.

    SGLang's Qwen2.5-VL takes patches of 14 pixels alone. The least head of its kernels has a size
    of 64, and that of vLLM on a CPU 32.
    """
    tokenizer = make_tokenizer()
    config = make_model(tokenizer, seed=0).config
    text = config.text_config
    text.hidden_size = 128
    text.num_attention_heads = 2
    text.num_key_value_heads = 1
    text.rope_parameters["mrope_section"] = [8, 12, 12]
    vision = config.vision_config
    vision.hidden_size = 128
    vision.num_heads = 2
    vision.out_hidden_size = 128
    vision.patch_size = 14
    vision.window_size = 56

    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
    Qwen2VLImageProcessorPil(patch_size=14, size=size).save_pretrained(folder)
    return folder


def check_learning(steps):
    """Ten steps learn, and each draws by the trainer's own weights."""
    assert len(steps) == 10
    assert max(abs(step["training/rollout_kl"]) for step in steps) < 1e-6
    rewards = [step["critic/rewards/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5


def engines(**keys):
    """Return the embedded engine, and one of vLLM with the weights of the same actor."""
    settings = config_from_dict(
        {
            "data": {"dataset_name": "toy", "train_batch_size": 4},
            "actor_rollout_ref": {"model": {"path": "toy"}},
        }
    )
    tokenizer = load_tokenizer("toy")
    actor = ActorWorker(settings.actor_rollout_ref, total_steps=1, device=CPU, tokenizer=tokenizer)
    rollout = settings.actor_rollout_ref.rollout
    parts = {"model": actor.engine.hf_model, "tokenizer": tokenizer, "device": CPU}
    embedded = create_rollout_engine(rollout, **parts)
    on_vllm = replace(rollout, name="vllm", **keys)
    section = replace(settings.actor_rollout_ref, rollout=on_vllm)
    worker = RolloutWorker(section, device=CPU, tokenizer=tokenizer, actor=actor)
    worker.take_weights()
    return embedded, worker.engine


def check_ends(ours, theirs):
    """Both engines end responses alike: stop tokens and stop strings are kept, and limits count."""
    tokenizer = ours.tokenizer
    prompt = tuple(tokenizer.encode("3 + 11 = ?"))
    request = Request(prompt_ids=prompt, sample_ids=(0,))

    def greedy(engine, **stops):
        params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True, **stops)
        [completion] = generate(engine, [request], params, seed=0, step=0)
        return completion

    free = greedy(ours)
    word = tokenizer.decode(free.token_ids[1:3])
    for stops in ({}, {"stop_token_ids": (free.token_ids[2],)}, {"stop": (word,)}):
        expected = greedy(ours, **stops)
        drawn = greedy(theirs, **stops)
        assert drawn.token_ids == expected.token_ids, stops
        assert drawn.finish_reason == expected.finish_reason
        np.testing.assert_allclose(drawn.log_probs, expected.log_probs, atol=1e-4)
