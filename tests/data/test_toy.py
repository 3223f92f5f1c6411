"""The packaged toy model is small, a third of its answers are correct, and they are short."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.data.scripts import load_script
from verl.config import DataConfig
from verl.data import RLDataset
from verl.data.toy import TOY_MODEL, toy_files


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TOY_MODEL, dtype=torch.float32).eval()


def test_ten_prompts_in_the_usual_format(tokenizer):
    dataset = RLDataset(toy_files(), tokenizer, DataConfig(max_prompt_length=64))
    items = [dataset[i] for i in range(len(dataset))]
    assert len({item["extra_info"]["question"] for item in items}) == 10
    for item in items:
        one, other = item["extra_info"]["question"].removesuffix(" = ?").split(" + ")
        assert item["reward_model"] == {"style": "rule", "ground_truth": str(int(one) + int(other))}
        assert item["data_source"] == "toy"


def test_packaged_files_are_small():
    assert (
        sum(path.stat().st_size for path in [*TOY_MODEL.iterdir(), *map(Path, toy_files())]) < 4e6
    )


@torch.no_grad()
def probability(model, prompt: list[int], answer: list[int]) -> float:
    """Return the probability of exactly this answer at temperature 1."""
    log_probs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return (
        log_probs[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None]).sum().exp().item()
    )


def test_a_third_of_the_samples_is_correct_for_every_prompt(tokenizer, model):
    dataset = RLDataset(toy_files(), tokenizer, DataConfig(max_prompt_length=64))
    shares = []
    for number in range(len(dataset)):
        item = dataset[number]
        answer = tokenizer(item["reward_model"]["ground_truth"])["input_ids"] + [
            tokenizer.eos_token_id
        ]
        shares.append(probability(model, item["raw_prompt_ids"], answer))
    assert all(0.28 <= share <= 0.40 for share in shares), shares


@torch.no_grad()
def test_samples_are_short_and_end(tokenizer, model):
    item = RLDataset(toy_files(), tokenizer, DataConfig(max_prompt_length=64))[0]
    prompts = torch.tensor([item["raw_prompt_ids"]]).repeat(200, 1)
    torch.manual_seed(0)
    mask = torch.ones_like(prompts)
    out = model.generate(prompts, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=12)
    answers = out[:, prompts.shape[1] :]
    ended = (answers == tokenizer.eos_token_id).any(1)
    assert ended.float().mean() > 0.98
    texts = [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]
    assert 0.2 < sum(text == item["reward_model"]["ground_truth"] for text in texts) / 200 < 0.5


def test_tokenizer_round_trips_any_text(tokenizer):
    text = "Zwölf + 3 = 15?\n\t你好 🙂  \\boxed{7}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (
        max(tokenizer.get_vocab().values())
        < json.loads((TOY_MODEL / "config.json").read_text())["vocab_size"]
    )


def test_script_reproduces_the_packaged_tokenizer_and_rows(tokenizer):
    script = load_script("toy/make_toy_model.py")
    made = script.make_tokenizer()
    assert made.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert made.chat_template == tokenizer.chat_template
    assert (made.eos_token, made.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    row = json.loads(Path(toy_files()[0]).read_text().splitlines()[3])
    one, other = map(int, row["extra_info"]["question"].removesuffix(" = ?").split(" + "))
    assert script.toy_row(3, one, other) == row
    assert sum(script.answer_weights(7).values()) == pytest.approx(1)
