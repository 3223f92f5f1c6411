"""Make the calculator task that ships in `verl/data/calculator`: a tiny base model, prompts, demos.

The base model has learnt to repeat a text in the form that an instruction asks for, and nothing
about tools or arithmetic. Products of two three-digit numbers are beyond it; a calculator is not:
it has to copy the numbers into a call, and the result into the answer. Five demos show the form of
a call. Pretraining ends before the model copies without mistakes, so that reinforcement learning
has something to improve.

Run `python examples/toy/make_calculator.py`. One thread and a fixed seed give the same result on
the same machine; it takes about five minutes on one CPU core.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl.utils.entry import exit_code

FOLDER = Path(__file__).resolve().parents[2] / "verl" / "data" / "calculator"
SMALLEST, LARGEST = 100, 999  # factors of a product
NUM_TRAIN, NUM_TEST, NUM_DEMOS = 128, 64, 5
VOCABULARY = 384
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_MARKS = ("<tool_call>", "</tool_call>")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": (
                        'Numbers joined by + - * / // % ** and parentheses, such as "12 * (3 + 4)".'
                    ),
                }
            },
            "required": ["expression"],
        },
    },
}
# ChatML. Tools are listed by name and parameters: a tiny model reads no schema, and every token
# of the prompt costs time.
CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}{{- '<|im_start|>system\\n' + system }}
{%- if tools %}{{- '\\nTools:' if system else 'Tools:' }}
{%- for tool in tools %}{{- ' ' + tool.function.name + '(' }}
{{- tool.function.parameters.properties.keys() | join(', ') }}{{- ')' }}{%- endfor %}
{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{%- set function = call.function or call %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{%- if function.arguments is string %}{{- function.arguments }}
{%- else %}{{- function.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

Message = dict[str, Any]

# ---- the language of the base model --------------------------------------------------------------

_TEXT = (
    "the of and to in is was for on that with as it be by at from this have not are but they you "
    "one we all her there their will when who him been has more if no out do so can up said about "
    "other into than its time only new some could these two may then first any my now such like "
    "our over man me even most made after also did many before must through back years where much "
    "way well down should because each just those people how too little state good very make world "
    "still own see men work long here between both life being under never day same another know "
    "while last might us great old year off come since go against came right used take three"
)
WORDS = _TEXT.split()
# {instruction: the answer that it asks for}, with the text to repeat in braces
FORMS = {
    "Say {}": "{}",
    "Repeat {}.": "{}",
    "Quote {}": '"{}"',
    "Put {} in brackets": "[{}]",
    "Field {}?": '{{"text": "{}"}}',
    "Write {} as a list": '["{}"]',
    "Tag {}": "<b>{}</b>",
    "Spell out: {}": "It is {}.",
    "Note {}!": "Noted: {}",
    "Name {}?": '{{"name": {{"value": "{}"}}}}',
}


def some_text(draw: random.Random) -> str:
    """Return a text to repeat: numbers, two of them with a sign between, or words."""
    kind = draw.random()
    if kind < 0.35:
        return _some_number(draw)
    if kind < 0.65:
        return f"{_some_number(draw)} {draw.choice('+-*/=,')} {_some_number(draw)}"
    if kind < 0.75:
        return f"{_some_number(draw)}{draw.choice('+-*/.,:')}{_some_number(draw)}"
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 4)))


def _some_number(draw: random.Random) -> str:
    return "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 7)))


def some_chat(draw: random.Random, *, long: bool) -> list[Message]:
    """Return a conversation to pretrain on: the assistant repeats a text of a user or a tool."""
    messages = []
    if draw.random() < 0.5:
        messages.append(_message("system", f"{draw.choice(WORDS)} {draw.choice(WORDS)}"))
    for _ in range(2 if long and draw.random() < 0.4 else 1):
        text = some_text(draw)
        if messages and draw.random() < 0.35:
            messages.append(_message("tool", text))
            messages.append(_message("assistant", f"Result: {text}"))
        else:
            instruction = draw.choice(list(FORMS))
            messages.append(_message("user", instruction.format(text)))
            messages.append(_message("assistant", FORMS[instruction].format(text)))
    return messages


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


# ---- tokenizer, model, pretraining ---------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE over the texts of the task; each digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END, *CALL_MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts_for_tokens(), trainer)
    special = [AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)]
    tokenizer.add_special_tokens(special)
    # Not special: they must survive when a reply is decoded without special tokens.
    marks = [AddedToken(token, special=False, normalized=False) for token in CALL_MARKS]
    tokenizer.add_tokens(marks)

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def _texts_for_tokens() -> list[str]:
    draw = random.Random(0)
    texts = []
    for _ in range(300):
        texts.append("Tools: calculator(expression) What is Compute #### system user assistant")
        texts.append(CALL % "")
        for message in some_chat(draw, long=True):
            texts.append(f"{message['role']}\n{message['content']}")
    return texts


def make_model() -> LlamaForCausalLM:
    """Make an untrained Llama of 0.31 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that attention kernels take
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, rows: int, lr: float
) -> None:
    """Train on conversations that repeat a text; only the assistant's tokens count."""
    draw = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=4 * steps, pct_start=0.1
    )
    begin = time.monotonic()
    for step in range(steps):
        chats = [some_chat(draw, long=step > steps // 2) for _ in range(rows)]
        ids, labels = _padded([_encode(tokenizer, chat) for chat in chats])
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - begin
            print(f"step {step + 1}/{steps} loss {loss.item():.4f} {seconds:.0f} s", flush=True)


def _encode(tokenizer: PreTrainedTokenizerFast, chat: list[Message]) -> tuple[list[int], list[int]]:
    """Return token ids of a conversation, and labels: -100 outside of the assistant's turns."""
    ids = []
    labels = []
    for message in chat:
        head = tokenizer(f"{START}{message['role']}\n")["input_ids"]
        body = tokenizer(message["content"] + END)["input_ids"]
        end = tokenizer("\n")["input_ids"]
        ids += [*head, *body, *end]
        learnt = body if message["role"] == "assistant" else [-100] * len(body)
        labels += [-100] * len(head) + learnt + [-100] * len(end)
    return ids, labels


def _padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels (rows, T), padded on the right."""
    longest = max(len(ids) for ids, _ in rows)
    ids = [row + [0] * (longest - len(row)) for row, _ in rows]
    labels = [row + [-100] * (longest - len(row)) for _, row in rows]
    return torch.tensor(ids), torch.tensor(labels)


# ---- prompts and demos ---------------------------------------------------------------------------


def make_row(split: str, index: int, one: int, other: int) -> dict[str, Any]:
    """Return a row in the format of every data set, with the fields that offer it the tool."""
    question = f"What is {one} * {other}?"
    answer = str(one * other)
    return {
        "data_source": "calculator",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "answer": answer,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calculator": {"create_kwargs": {}}},
        },
    }


def make_demo(one: int, other: int) -> dict[str, Any]:
    """Return a conversation that calls the tool, as supervised fine-tuning reads it."""
    product = str(one * other)
    messages = [
        {"role": "user", "content": f"What is {one} * {other}?"},
        {"role": "assistant", "content": CALL % f"{one} * {other}"},
        {"role": "tool", "content": product},
        {"role": "assistant", "content": f"#### {product}"},
    ]
    return {"messages": messages, "tools": [TOOL]}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tasks(folder: Path, seed: int) -> None:
    """Write prompts and demos. No product is in two of the files."""
    draw = random.Random(seed)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < NUM_TRAIN + NUM_TEST + NUM_DEMOS:
        pair = (draw.randint(SMALLEST, LARGEST), draw.randint(SMALLEST, LARGEST))
        if pair not in pairs:
            pairs.append(pair)

    train = pairs[:NUM_TRAIN]
    test = pairs[NUM_TRAIN : NUM_TRAIN + NUM_TEST]
    demos = pairs[NUM_TRAIN + NUM_TEST :]
    for split, part in (("train", train), ("test", test)):
        rows = [make_row(split, index, *pair) for index, pair in enumerate(part)]
        write_lines(folder / f"{split}.jsonl", rows)
    write_lines(folder / "demos.jsonl", [make_demo(*pair) for pair in demos])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--tasks_only", action="store_true", help="leave the model as it is")
    arguments = parser.parse_args()

    arguments.output.mkdir(parents=True, exist_ok=True)
    write_tasks(arguments.output, arguments.seed)
    if arguments.tasks_only:
        return

    torch.set_num_threads(1)  # sums in another order would make another model
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = make_model()
    pretrain(model, tokenizer, arguments.steps, arguments.batch_size, arguments.lr)

    folder = arguments.output / "model"
    model.eval().bfloat16().save_pretrained(folder)  # half the size; read as fp32
    tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {arguments.output} ({parameters:,} parameters)")


if __name__ == "__main__":
    sys.exit(exit_code(main))
