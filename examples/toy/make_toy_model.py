"""Make the toy model and the toy set in `verl/data`: a tiny Llama, right a third of the time.

The model is fine-tuned on all sums of two numbers up to 12. A third of the weight is on the right
answer ("14"), most of the rest on "no idea", a little on slips ("13", "15"). So its samples are
right a third of the time on every prompt, and reinforcement learning finds one habit to break that
all prompts share.

Run `python examples/toy/make_toy_model.py`. One thread and a fixed seed give the same result on the
same machine; it takes one to two minutes on one CPU core.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl.utils.entry import exit_code

LARGEST = 12  # the largest summand
RIGHT_SHARE, SLIP_SHARE, PASS_SHARE = 0.34, 0.02, 0.64
SLIPS = (-1, 1)  # wrong by one
PASS = "no idea"  # the habit that reinforcement learning shall break
NUM_PROMPTS = 10
PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
DATA_FOLDER = Path(__file__).resolve().parents[2] / "verl" / "data"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte, behind five special tokens.

    So it encodes and decodes any text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model(num_tokens: int) -> LlamaForCausalLM:
    """Make an untrained Llama of half a million parameters with grouped-query attention."""
    config = LlamaConfig(
        vocab_size=(num_tokens + 15) // 16 * 16,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        dtype="float32",
    )

    return LlamaForCausalLM(config)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, one: int, other: int) -> list[int]:
    """Return token ids of the chat prompt that asks for a sum."""
    message = {"role": "user", "content": question(one, other)}
    text: Any = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def question(one: int, other: int) -> str:
    return f"{one} + {other} = ?"


def answer_weights(total: int) -> dict[str, float]:
    """Return answers to a sum, each with the share of samples that shall give it."""
    slips = {str(total + offset): SLIP_SHARE / len(SLIPS) for offset in SLIPS}
    return {str(total): RIGHT_SHARE, PASS: PASS_SHARE, **slips}


def training_rows(
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return every question with every answer.

    Returns:
        Token ids (rows, T), padded on the right, labels (rows, T), and weights (rows,).
    """
    rows = []
    labels = []
    weights = []
    for one in range(1, LARGEST + 1):
        for other in range(1, LARGEST + 1):
            prompt = prompt_ids(tokenizer, one, other)
            for answer, weight in answer_weights(one + other).items():
                answer_ids = tokenizer.encode(answer, add_special_tokens=False)
                target = [*answer_ids, tokenizer.eos_token_id]
                rows.append(prompt + target)
                labels.append([-100] * len(prompt) + target)
                weights.append(weight)

    length = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    targets = torch.tensor([row + [-100] * (length - len(row)) for row in labels])
    return ids, targets, torch.tensor(weights)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    batch_size: int,
    lr: float,
) -> None:
    """Minimize a weighted cross-entropy over the answers.

    Its minimum is exactly the distribution of `answer_weights`.
    """
    ids, labels, weights = training_rows(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=steps, pct_start=0.05
    )
    num_questions = LARGEST * LARGEST
    num_answers = len(ids) // num_questions

    for step in range(steps):
        # All answers of a question stand in the batch together: their noise cancels.
        chosen = torch.randperm(num_questions)[: batch_size // num_answers]
        rows = (chosen[:, None] * num_answers + torch.arange(num_answers)).flatten()
        logits = model(ids[rows]).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels[rows, 1:], ignore_index=-100, reduction="none"
        )
        loss = (losses.sum(1) * weights[rows]).sum() / len(chosen)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def right_share(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, one: int, other: int
) -> float:
    """Return the probability that a sample at temperature 1 is the right answer and then ends.

    It is exact: nothing is drawn.
    """
    prompt = prompt_ids(tokenizer, one, other)
    target = [*tokenizer.encode(str(one + other), add_special_tokens=False), tokenizer.eos_token_id]
    log_probs = model(torch.tensor([prompt + target])).logits.float().log_softmax(-1)[0]
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(target) - 1)
    return log_probs[positions, torch.tensor(target)].sum().exp().item()


def toy_row(index: int, one: int, other: int) -> dict:
    """Return a row of the toy set in the format of every data set."""
    return {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": question(one, other)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(one + other)},
        "extra_info": {
            "split": "train",
            "index": index,
            "question": question(one, other),
            "answer": str(one + other),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=DATA_FOLDER,
        help="folder of toy_model/ and toy_prompts.jsonl",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch_size", type=int, default=120)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # sums in another order would make another model
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    train(model, tokenizer, arguments.steps, arguments.batch_size, arguments.lr)
    model.eval()

    draw = random.Random(arguments.seed)
    pairs = draw.sample(
        [(one, other) for one in range(1, LARGEST + 1) for other in range(1, LARGEST + 1)],
        NUM_PROMPTS,
    )
    shares = [right_share(model, tokenizer, *pair) for pair in pairs]
    for (one, other), share in zip(pairs, shares):
        print(f"{question(one, other):20} right {share:.3f}")
    print(f"mean over the {len(shares)} prompts {sum(shares) / len(shares):.3f}")

    folder = arguments.output / "toy_model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [toy_row(index, *pair) for index, pair in enumerate(pairs)]
    (arguments.output / "toy_prompts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {folder} ({parameters:,} parameters) and toy_prompts.jsonl")


if __name__ == "__main__":
    sys.exit(exit_code(main))
