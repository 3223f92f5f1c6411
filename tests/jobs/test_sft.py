"""Supervised fine-tuning equals a plain loop written with transformers, however it is split and
resumed."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.launches import launch, run_module
from tests.shared_files import SHARED, needs_shared
from tests.trainer.runs import (
    metric_lines,
    moments,
    run_in_child,
    same_bits,
    weights,
    without_times,
    write_lines,
)
from tests.trainer.test_resume import die_at_call
from verl.config.load import config_from_dict, load_config
from verl.config.sft import SFTConfig, as_train_config
from verl.data.sft_dataset import SFTDataset
from verl.data.toy import TOY_MODEL, toy_files
from verl.engine.base import TrainEngine
from verl.jobs.main_sft import main
from verl.jobs.sft_trainer import SFTTrainer
from verl.utils.errors import ConfigError
from verl.utils.logging import logger

LEARNING_RATE = 1e-3
# Rows of different lengths; the packaged model does not know their answers.
ROWS = [
    {"question": f"{'What about ' * (n % 3)}{n} + {n * n} = ?", "answer": f"{n} is {'odd' * n}."}
    for n in range(9)
]
DIALOGUES = [
    {
        "messages": [
            {"role": "user", "content": f"{n} = ?"},
            {"role": "assistant", "content": "even" if n % 2 == 0 else "odd"},
            {"role": "user", "content": "Sure?" * (n + 1)},
            {"role": "assistant", "content": f"Yes, {n}"},
        ]
    }
    for n in range(9)
]
# Batches in file order: the plain loop reads the same ones.
COMMON = [
    "data.train_batch_size=3",
    "data.shuffle=False",
    f"optim.lr={LEARNING_RATE}",
    "optim.lr_scheduler=constant",
    "optim.warmup_steps_ratio=0",
    "optim.weight_decay=0.1",
    "trainer.max_steps=4",
    "trainer.device=cpu",
    'trainer.logger=["console","file"]',
]


def command_line(folder: Path, train: Path, *more: str, model: Path = TOY_MODEL) -> list[str]:
    where = [
        f"data.train_files={train}",
        f"model.partial_pretrain={model}",
        f"trainer.default_local_dir={folder}",
    ]
    given = {override.partition("=")[0] for override in more}
    return [*where, *(each for each in COMMON if each.partition("=")[0] not in given), *more]


def losses(folder: Path, key: str = "train/loss") -> list[float]:
    return [line[key] for line in metric_lines(folder) if key in line]


def assert_same(folder: Path, other: Path, *, rel: float) -> None:
    """Compare metrics of training and validation, except for timings."""
    for key in ("train/loss", "train/grad_norm", "train/lr", "train/num_tokens", "val/loss"):
        assert losses(folder, key) == pytest.approx(losses(other, key), rel=rel), key


def plain_loop(model_folder: Path, batches: list[list[tuple[list[int], list[int]]]]) -> list[float]:
    """Train on batches of (token ids, labels) with transformers and AdamW of torch.

    Rows are padded on the right. Returns the losses.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    found = []

    for rows in batches:
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
        real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row, _ in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in rows])
        count = int((labels[:, 1:] != -100).sum())
        logits = model(input_ids=ids, attention_mask=real).logits[:, :-1]
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())

    return found


def in_batches(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def toy_labels(messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Apply the toy template by hand: tokens after <|assistant|> up to <|end|> are learned."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TOY_MODEL)
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        header = tokenizer.encode(f"<|{message['role']}|>", add_special_tokens=False)
        body = tokenizer.encode(f"{message['content']}<|end|>", add_special_tokens=False)
        ids += header + body
        labels += [-100] * len(header) + (
            body if message["role"] == "assistant" else [-100] * len(body)
        )
    return ids, labels


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Run once without interruption, with every stateful feature, in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(command_line(folder, rows_file, *STATEFUL, f"data.val_files={rows_file}")) == 0
    logger.handlers.clear()  # otherwise it would keep the output stream of the fixture
    logger.propagate = True
    return folder


# Five steps, three batches an epoch, with a save in the middle of an epoch.
STATEFUL = [
    "data.shuffle=True",
    "optim.lr_scheduler=cosine",
    "optim.lr_warmup_steps=1",
    "trainer.max_steps=5",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "data.val_batch_size=5",
]


def test_losses_equal_those_of_a_plain_loop(tmp_path, rows_file):
    pairs = [[("user", row["question"]), ("assistant", row["answer"])] for row in ROWS]
    expected = plain_loop(
        TOY_MODEL,
        in_batches(
            [
                toy_labels([{"role": role, "content": text} for role, text in pair])
                for pair in pairs
            ],
            3,
        ),
    )
    assert main(command_line(tmp_path, rows_file, "trainer.max_steps=3")) == 0
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-4)
    assert expected[0] > 1, "too dull to fail"


def test_losses_of_dialogues_equal_those_of_a_plain_loop(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", DIALOGUES)
    first = write_lines(tmp_path / "val.jsonl", DIALOGUES[:3])
    validation = [
        f"data.val_files={first}",
        "trainer.val_before_train=True",
        "data.val_batch_size=2",
    ]
    expected = plain_loop(
        TOY_MODEL, in_batches([toy_labels(row["messages"]) for row in DIALOGUES], 3)
    )

    more = ["trainer.max_steps=3", "data.multiturn.enable=True", *validation]
    assert main(command_line(tmp_path, file, *more)) == 0
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-4)
    assert losses(tmp_path, "val/loss") == pytest.approx(expected[:1], abs=1e-4), (
        "before the first step"
    )


@needs_shared("models/stories260K")
@needs_shared("data/gsm8k/train.jsonl")
def test_a_pretrained_model_learns_gsm8k_answers_as_in_a_plain_loop(tmp_path):
    model = SHARED / "models" / "stories260K"
    batch = 4
    steps = 8
    lines = (SHARED / "data" / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted(
        (json.loads(line) for line in lines), key=lambda row: len(row["question"] + row["answer"])
    )
    rows, held_out = rows[: batch * steps], rows[batch * steps : batch * (steps + 4)]

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    examples = []
    for row in rows:
        prompt = tokenizer.encode(row["question"])
        answer = [
            *tokenizer.encode(row["answer"], add_special_tokens=False),
            tokenizer.eos_token_id,
        ]
        examples.append((prompt + answer, [-100] * len(prompt) + answer))

    expected = plain_loop(model, in_batches(examples, batch))
    file = write_lines(tmp_path / "gsm8k.jsonl", rows)
    validation = [
        f"data.val_files={write_lines(tmp_path / 'held_out.jsonl', held_out)}",
        f"trainer.test_freq={steps}",
    ]
    more = [
        f"data.train_batch_size={batch}",
        f"trainer.max_steps={steps}",
        "trainer.val_before_train=True",
    ]

    assert main(command_line(tmp_path, file, *more, *validation, model=model)) == 0
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-4)
    before, after = losses(tmp_path, "val/loss")
    assert after < before - 1, "of answers that it never saw"


def test_the_loss_falls_and_micro_batches_do_not_matter(tmp_path, rows_file, undisturbed, capfd):
    one_by_one = ["data.micro_batch_size_per_gpu=1", f"data.val_files={rows_file}"]
    assert main(command_line(tmp_path, rows_file, *STATEFUL, *one_by_one)) == 0
    assert_same(tmp_path, undisturbed, rel=1e-4)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 1
    validation = losses(tmp_path, "val/loss")
    assert len(validation) == 3
    assert validation[-1] < validation[0]
    assert "[Step 1/5] Loss: " in (out := capfd.readouterr().out)
    assert "tokens/s" in out


def test_a_killed_run_ends_with_the_same_bits(tmp_path, rows_file, undisturbed, capfd):
    command = command_line(tmp_path, rows_file, *STATEFUL, f"data.val_files={rows_file}")
    with pytest.MonkeyPatch.context() as patch:
        die_at_call(patch, TrainEngine, "step", 3)
        assert os.WIFSIGNALED(run_in_child(lambda: main(command)))
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2]
    capfd.readouterr()
    assert main(command) == 0
    assert "global_step_2: step 2 of 5" in capfd.readouterr().out
    assert without_times(metric_lines(tmp_path)) == without_times(metric_lines(undisturbed))
    assert same_bits(weights(tmp_path, 5), weights(undisturbed, 5))
    assert same_bits(moments(tmp_path, 5), moments(undisturbed, 5))


def test_two_ranks_learn_like_one_process(tmp_path, rows_file, undisturbed):
    """Split three rows a batch over two ranks: one of them gets a row that does not count."""
    command = command_line(
        tmp_path, rows_file, *STATEFUL, f"data.val_files={rows_file}", "trainer.num_threads=1"
    )
    done = launch(2, run_module, "verl.trainer.fsdp_sft_trainer", command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("Training completed") == 1
    assert_same(tmp_path, undisturbed, rel=2e-5)


def test_adapters_learn_and_resume(tmp_path, rows_file):
    lora = ["model.lora_rank=4", "optim.lr=1e-2", "trainer.save_freq=2", "trainer.logger=[file]"]
    assert main(command_line(tmp_path, rows_file, *lora)) == 0
    whole = losses(tmp_path)
    assert whole[-1] < whole[0] - 0.5
    actor = tmp_path / "global_step_4" / "actor"
    assert (actor / "lora_adapter" / "adapter_model.safetensors").is_file()
    resumed = [
        *lora,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'global_step_2'}",
    ]
    assert main(command_line(tmp_path, rows_file, *resumed)) == 0
    assert losses(tmp_path) == whole


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.response_key=solution"], "DataError: .*the column 'solution' is missing"),
        (
            ["data.max_length=20"],
            r"DataError: .*rows.jsonl, row 1: 33 tokens, data.max_length allows 20",
        ),
        (
            ["data.train_batch_size=10"],
            "DataError: A batch of 10 rows does not fit a dataset of 9",
        ),
        (
            [
                "data.response_key=solution",  # reported later
                "trainer.resume_mode=resume_path",
                "trainer.resume_from_path=.",
            ],
            "CheckpointError: trainer.resume_from_path must be a whole checkpoint, .*manifest.json",
        ),
        (["model.path=nowhere"], "model.path are two names of one setting"),
        (["optim.learning_rate=1"], "Unknown key 'optim.learning_rate'"),
    ],
)
def test_user_errors_are_reported_in_one_line(tmp_path, rows_file, capfd, overrides, message):
    assert main(command_line(tmp_path, rows_file, *overrides)) == 1
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert re.search(message, error), error


def configured(*overrides: str) -> SFTConfig:
    return load_config(
        ["data.train_files=rows.parquet", "model.path=toy", *overrides], root="sft_trainer"
    )


def test_epochs_of_fewer_rows_end_with_validation_and_checkpoint(tmp_path, rows_file, monkeypatch):
    keys = ["data.train_max_samples=6", "data.val_max_samples=2", "trainer.total_epochs=2"]
    monkeypatch.setenv("SAVE_FREQ", "2")
    keys += ["trainer.test_freq=after_each_epoch", "trainer.save_freq=${oc.env:SAVE_FREQ}"]
    keys += [f"data.val_files={rows_file}", "trainer.max_steps=null"]
    assert main(command_line(tmp_path, rows_file, *keys)) == 0

    lines = metric_lines(tmp_path)
    assert [line["step"] for line in lines if "val/loss" in line] == [2, 4]
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_2",
        "global_step_4",
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_limited_dataset_has_the_chosen_rows(rows_file, shuffle: bool):
    tokenizer: Any = AutoTokenizer.from_pretrained(TOY_MODEL)
    whole = SFTDataset([str(rows_file)], tokenizer, configured().data)
    few = SFTDataset([str(rows_file)], tokenizer, configured().data)
    few.keep_at_most(4, shuffle=shuffle, seed=3)
    by_name = {item["uid"]: item for item in (whole[row] for row in range(len(whole)))}
    names = [few[row]["uid"] for row in range(4)]
    assert [few[row] for row in range(4)] == [by_name[name] for name in names]
    assert len(few) == 4
    assert (names == [whole[row]["uid"] for row in range(4)]) == (not shuffle)


def test_a_script_of_later_versions_is_accepted(caplog):
    config = configured(
        *("engine=fsdp", "optim=fsdp", "model=hf_model"),
        *("engine.strategy=fsdp2", "engine.fsdp_size=-1", "engine.param_offload=True"),
        *("engine.ulysses_sequence_parallel_size=1", "engine.dtype=float32"),
        *("optim.lr=2e-5", "optim.clip_grad=0.5", "optim.lr_scheduler_type=constant"),
        *("data.messages_key=turns", "data.tools_key=apis", "data.pad_mode=no_padding"),
        "checkpoint.save_contents=[model,optimizer]",
        "model.tokenizer_path=toy",
        "data.num_workers=2",
    )
    assert (config.model.strategy, config.model.fsdp_config.param_offload) == ("fsdp2", True)
    assert config.model.fsdp_config.compute_dtype == "float32"
    assert (config.optim.lr, config.optim.clip_grad) == (2e-5, 0.5)
    turns = config.data.multiturn
    assert (turns.enable, turns.messages_key, turns.tools_key) == (True, "turns", "apis")
    assert config.trainer.checkpoint.load_contents == ["model", "optimizer"]
    assert config.data.tokenizer == "toy"
    assert config.data.num_workers == 2
    assert "data.num_workers" not in caplog.text

    pairs = configured("data.multiturn.messages_key=turns", "data.prompt_key=question")
    assert not pairs.data.multiturn.enable


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine=megatron", "one backend, .* FSDP2. Write engine=fsdp, or leave it out"),
        ("optim=veomni", "Write optim=fsdp"),
        ("optim=adam", "'optim' is a section with keys of its own"),
        ("engine.strategy=megatron", "no Megatron backend. .* moments.$"),
        ("engine.tensor_model_parallel_size=2", "no Megatron backend. .*engine.fsdp_size"),
        ("engine.forward_only=True", "fine-tuning updates its model"),
        ("optim.override_optimizer_config={eps:1}", "its arguments are keys: optim.betas"),
        ("trainer.test_freq=each_epoch", "a number of steps, after_each_epoch, or -1 for never"),
    ],
)
def test_what_later_versions_have_and_this_one_lacks_is_explained(override, message):
    with pytest.raises(ConfigError, match=message):
        configured(override)


def test_a_script_of_verl_0_5_is_accepted_unchanged(caplog):
    config = configured(
        "data.val_files=test.parquet",
        "data.prompt_key=extra_info",
        "data.response_key=extra_info",
        "data.prompt_dict_keys=['question']",
        "+data.response_dict_keys=['answer']",
        "data.micro_batch_size_per_gpu=4",
        "model.partial_pretrain=toy",
        "optim.lr=1e-4",
        "optim.warmup_steps_ratio=0.2",
        "optim.lr_scheduler=constant",
        "optim.clip_grad=0.5",
        "trainer.total_epochs=3",
        "trainer.project_name=sft",
        "trainer.default_hdfs_dir=null",
        "trainer.max_ckpt_to_keep=2",
        "model.lora_rank=32",
        "model.target_modules=all-linear",
        "model.strategy=fsdp2",
        "ulysses_sequence_parallel_size=2",
        "use_remove_padding=true",
        "trainer.n_gpus_per_node=2",
    )
    assert not caplog.records, "nothing is without effect"

    train = as_train_config(config)
    actor = train.actor_rollout_ref.actor
    assert (actor.optim.lr, actor.optim.lr_warmup_steps_ratio, actor.optim.warmup_style) == (
        1e-4,
        0.2,
        "constant",
    )
    assert (
        actor.grad_clip,
        actor.ppo_micro_batch_size_per_gpu,
        actor.ulysses_sequence_parallel_size,
    ) == (0.5, 4, 2)

    assert (train.trainer.max_actor_ckpt_to_keep, train.trainer.default_local_dir) == (
        2,
        "checkpoints/sft/test",
    )
    assert (train.actor_rollout_ref.model.path, train.actor_rollout_ref.model.lora_rank) == (
        "toy",
        32,
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=null"], "model.path .partial_pretrain. is not set"),
        (["trainer.test_freq=2"], "trainer.test_freq=2 asks for validation, but data.val_files"),
        (
            ["data.max_token_len_per_gpu=10"],
            "data.max_token_len_per_gpu must hold one whole row .data.max_length=1024",
        ),
        (["optim.betas=[1,2]"], "^optim.betas must be two numbers"),
        (["ulysses_sequence_parallel_size=2"], "^ulysses_sequence_parallel_size must divide"),
        (
            ["trainer.checkpoint.save_contents=[all]"],
            "trainer.checkpoint.save_contents: unknown part",
        ),
        (
            ["data.custom_cls.path=mine.py"],
            "data.custom_cls.path and data.custom_cls.name go together, got 'mine.py' and None",
        ),
        (
            ["trainer.default_hdfs_dir=hdfs://x"],
            "trainer.default_hdfs_dir=hdfs://x is not available in this version",
        ),
    ],
)
def test_contradictions_are_reported_under_the_key_names_of_this_job(overrides, message):
    with pytest.raises(ConfigError, match=message):
        configured(*overrides)


def test_toy_rows_are_learned_from_nested_columns(tmp_path):
    nested = [
        "data.prompt_key=extra_info",
        "data.prompt_dict_keys=[question]",
        "trainer.max_steps=1",
    ]
    answers = ["data.response_key=extra_info", "data.response_dict_keys=[answer]"]
    assert main(command_line(tmp_path, Path(toy_files()[0]), *nested, *answers)) == 0
    assert len(losses(tmp_path)) == 1


OWN_DATASETS = """
import torch

from verl.data import SFTDataset


class Halves(SFTDataset):
    def __init__(self, data_files, tokenizer, config, split="train"):
        super().__init__(data_files, tokenizer, config, split=split)
        assert split == "train" or data_files[0].endswith("validation.jsonl")


class Copied:
    def __init__(self, data_files, tokenizer, config):
        self.rows = SFTDataset(data_files, tokenizer, config)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        row = self.rows[item]
        keys = ("raw_prompt_ids", "response_ids", "learnt")
        return {key: torch.tensor(row[key]) for key in keys}


class Masked(Copied):
    def __getitem__(self, item):
        ids = super().__getitem__(item)["raw_prompt_ids"]
        return {"input_ids": ids, "attention_mask": ids > -1, "loss_mask": ids > 3}


class Uneven(Copied):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        return {**row, "learnt": row["learnt"][1:]}
"""


@pytest.fixture
def own_datasets(tmp_path: Path) -> Path:
    file = tmp_path / "own_datasets.py"
    file.write_text(OWN_DATASETS)
    return file


@pytest.mark.parametrize("name", ["Halves", "Copied"])
def test_a_dataset_class_of_the_user_is_trained_on(tmp_path, rows_file, own_datasets, name):
    validation = write_lines(tmp_path / "validation.jsonl", ROWS[:2])
    more = [f"data.val_files={validation}", "trainer.test_freq=2", "trainer.save_freq=-1"]
    own = [f"data.custom_cls.path={own_datasets}", f"data.custom_cls.name={name}"]
    assert main(command_line(tmp_path / "packaged", rows_file, *more)) == 0
    assert main(command_line(tmp_path / "own", rows_file, *more, *own)) == 0
    for metric in ("train/loss", "val/loss"):
        assert losses(tmp_path / "own", metric) == losses(tmp_path / "packaged", metric) != []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Masked", "needs raw_prompt_ids.*response_ids.*learnt.*got keys.*loss_mask is not read"),
        ("Uneven", "response_ids and learnt must be of equal length"),
        ("Halfs", "has no 'Halfs'. Nearest names in it: Halves"),
    ],
)
def test_an_unsuitable_dataset_class_is_one_error(
    tmp_path, rows_file, own_datasets, capsys, name, message
):
    own = [f"data.custom_cls.path={own_datasets}", f"data.custom_cls.name={name}"]
    assert main(command_line(tmp_path, rows_file, *own)) == 1
    assert re.search(rf"^(Config|Data)Error: .*{message}", capsys.readouterr().err, re.M)


def test_a_program_can_pass_rows_as_objects(tmp_path, rows_file, capfd, monkeypatch):
    assert (
        main(
            command_line(
                tmp_path / "files", rows_file, "trainer.max_steps=2", "trainer.save_freq=-1"
            )
        )
        == 0
    )
    trainer = {
        "default_local_dir": str(tmp_path / "objects"),
        "max_steps": 2,
        "logger": ["file"],
        "device": "cpu",
    }

    config = config_from_dict(
        {
            "model": {"path": "toy"},
            "data": {"train_batch_size": 3, "shuffle": False},
            "optim": {
                "lr": LEARNING_RATE,
                "lr_scheduler": "constant",
                "warmup_steps_ratio": 0,
                "weight_decay": 0.1,
            },
            "trainer": {**trainer, "test_freq": 1},
        },
        root="sft_trainer",
    )
    rows = SFTDataset(str(rows_file), AutoTokenizer.from_pretrained(TOY_MODEL), config.data)

    for missing, given in (
        ("data.train_files is not set", {}),
        ("data.val_files", {"train_dataset": rows}),
    ):
        with pytest.raises(ConfigError, match=f"{missing}.* A program may also pass train_dataset"):
            SFTTrainer(config, **given)

    monkeypatch.setattr(logger, "handlers", [])  # as in a program that has run no command
    capfd.readouterr()
    run = SFTTrainer(config, train_dataset=rows, val_dataset=rows)
    run.init_workers()
    run.fit()
    assert "I Look at the run: " in capfd.readouterr().out, "a program shows the log, too"
    assert losses(tmp_path / "objects") == losses(tmp_path / "files")
    assert len(losses(tmp_path / "objects", "val/loss")) == 2
