"""The packaged calculator task: rows, demos, and a base model that was not trained on it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.scripts import load_script
from verl.config import DataConfig
from verl.config.sft import SFTDataConfig, SFTMultiTurnConfig
from verl.data import RLDataset
from verl.data.sft_dataset import SFTDataset
from verl.data.toy import CALCULATOR, CALCULATOR_MODEL, calculator_demos, packaged_files
from verl.models.load import resolve_path
from verl.rewards.rules import default_compute_score


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CALCULATOR_MODEL)


def lines(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_rows_offer_the_tool_and_the_sets_are_disjoint(tokenizer):
    questions = []
    for split, count in (("train", 128), ("val", 64)):
        files = packaged_files(CALCULATOR, split)
        dataset = RLDataset(files, tokenizer, DataConfig(max_prompt_length=64), split=split)
        assert len(dataset) == count
        for number in range(count):
            item = dataset[number]
            one, other = item["extra_info"]["question"].removeprefix("What is ")[:-1].split(" * ")
            assert item["reward_model"]["ground_truth"] == str(int(one) * int(other))
            assert item["agent_name"] == "tool_agent"
            assert item["extra_info"]["need_tools_kwargs"] is True
            assert list(item["extra_info"]["tools_kwargs"]) == ["calculator"]
            questions.append(item["extra_info"]["question"])

    questions += [demo["messages"][0]["content"] for demo in lines(calculator_demos())]
    assert len(set(questions)) == len(questions) == 128 + 64 + 5


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("#### 408", 1.0),
        ("12 * 34 is 408.", 1.0),
        ("#### 408 and not 409", 1.0),
        ("#### 1 #### 408", 1.0),
        ("#### -408", 0.0),
        ("408 #### 409", 0.0),
        ("408 ####", 0.0),
        ("", 0.0),
    ],
)
def test_rule_reads_the_marked_or_last_number(response, score):
    assert default_compute_score("calculator", response, "408") == score


def test_demos_train_each_turn_with_the_tool_in_the_prompt(tokenizer):
    config = SFTDataConfig(max_length=128, multiturn=SFTMultiTurnConfig(enable=True))
    dataset = SFTDataset(calculator_demos(), tokenizer, config)
    assert len(dataset) == 5

    for number, demo in enumerate(lines(calculator_demos())):
        item = dataset[number]
        prompt = tokenizer.decode(item["raw_prompt_ids"])
        assert prompt.startswith("<|im_start|>system\nTools: calculator(expression)<|im_end|>\n")

        learnt_ids = [
            token for token, is_learnt in zip(item["response_ids"], item["learnt"]) if is_learnt
        ]
        learnt = tokenizer.decode(learnt_ids)
        call, answer = learnt.split("<|im_end|>")[:2]
        body = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        question = demo["messages"][0]["content"]
        assert body["name"] == "calculator"
        assert question == f"What is {body['arguments']['expression']}?"
        assert answer.strip() == f"#### {demo['messages'][2]['content']}"


def test_template_writes_tool_calls_like_the_demos(tokenizer):
    demo = lines(calculator_demos())[0]
    call = json.loads(demo["messages"][1]["content"].removeprefix("<tool_call>\n")[:-13])
    structured = [dict(message) for message in demo["messages"]]
    structured[1] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }
    texts = []
    for messages in (demo["messages"], structured):
        text = tokenizer.apply_chat_template(messages, tools=demo["tools"], tokenize=False)
        texts.append(text)
    assert texts[0] == texts[1]


def test_tokenizer_round_trips_text_and_splits_digits(tokenizer):
    text = "Zwölf + 3 = 15?\n\t你好 🙂  \\boxed{7} <tool_call>{}</tool_call>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    shown = tokenizer.decode(
        tokenizer("<tool_call>x<|im_end|>")["input_ids"], skip_special_tokens=True
    )
    assert shown == "<tool_call>x"


@torch.no_grad()
def test_base_model_repeats_text_without_tool_calls(tokenizer):
    path = resolve_path("calculator")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    script = load_script("toy/make_calculator.py")
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6

    tools = lines(calculator_demos())[0]["tools"]
    answers = {}
    for question in ("Repeat 847.", "Quote 5210", "What is 186 * 236?"):
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools if "What" in question else None,
            add_generation_prompt=True,
            tokenize=False,
        )
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )
        answers[question] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    assert answers["Repeat 847."] == "847"
    assert answers["Quote 5210"] == '"5210"'
    assert script.CALL_MARKS[0] not in answers["What is 186 * 236?"]
    assert default_compute_score("calculator", answers["What is 186 * 236?"], str(186 * 236)) == 0


def test_packaged_files_are_small_and_reproducible(tmp_path):
    folder = CALCULATOR_MODEL.parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1e6
    script = load_script("toy/make_calculator.py")
    script.write_tasks(tmp_path, seed=1)
    for name in ("train.jsonl", "test.jsonl", "demos.jsonl"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()
