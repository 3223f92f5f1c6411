"""Every user error ends in one clear message and exit code 1, and never in a traceback of the
package."""

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import save_tiny, tiny_model, tiny_tokenizer
from tests.trainer.runs import (
    PPO,
    TOY,
    metric_lines,
    run,
    same_bits,
    step_lines,
    weights,
    write_lines,
)
from verl.data.toy import toy_files
from verl.models.load import resolve_path
from verl.tracking.backends import FileBackend
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils.entry import INTERRUPTED
from verl.utils.errors import RewardError
from verl.utils.logging import logger
from verl.utils.sigterm import TERMINATED


def toy_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(toy_files()[0]).read_text().splitlines()]


def on_files(path: Path) -> list[str]:
    """Return the toy run on a file of the user, with the toy model."""
    settings = [
        f"data.train_files={path}",
        "data.max_prompt_length=64",
        "actor_rollout_ref.model.path=toy",
        "algorithm.adv_estimator=grpo",
    ]
    return [*TOY[1:], *settings]


def message(capfd: pytest.CaptureFixture[str], status: int) -> str:
    """Return the error of a failed run: stderr holds nothing else."""
    err = capfd.readouterr().err
    assert status == 1
    kind, colon, text = err.partition(": ")
    assert colon
    assert kind.endswith("Error")
    assert "/verl/trainer/" not in err, "a traceback of ours"
    return text.strip()


def reward_file(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "reward.py"
    path.write_text(
        f"import math, time\n\ndef compute_score(data_source, solution_str, **_):\n    {body}\n"
    )
    return [f"custom_reward_function.path={path}"]


def folder_without_weights(folder: Path) -> Path:
    """Create a folder with the configuration and tokenizer of the toy model alone."""
    for file in Path(resolve_path("toy")).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_file_without_the_prompt_column(tmp_path, capfd):
    rows = [{name: value for name, value in row.items() if name != "prompt"} for row in toy_rows()]
    path = write_lines(tmp_path / "train.jsonl", rows)
    text = message(capfd, run(tmp_path, base=on_files(path)))
    assert str(path) in text
    assert "'prompt'" in text
    assert len(text.splitlines()) == 1


def test_an_empty_file(tmp_path, capfd):
    path = write_lines(tmp_path / "train.jsonl", [])
    text = message(capfd, run(tmp_path, base=on_files(path)))
    assert str(path) in text
    assert len(text.splitlines()) == 1


def test_a_missing_file(tmp_path, capfd):
    text = message(capfd, run(tmp_path, base=on_files(tmp_path / "train.parquet")))
    assert "train.parquet" in text
    assert len(text.splitlines()) == 1


def test_fewer_rows_than_a_batch(tmp_path, capfd):
    path = write_lines(tmp_path / "train.jsonl", toy_rows()[:3])
    assert "batch of 4 rows does not fit a dataset of 3" in message(
        capfd, run(tmp_path, base=on_files(path))
    )


def test_a_prompt_longer_than_allowed(tmp_path, capfd):
    rows = toy_rows()
    rows[7]["prompt"][0]["content"] *= 9
    path = write_lines(tmp_path / "train.jsonl", rows)
    text = message(capfd, run(tmp_path, base=on_files(path)))
    assert "row 7" in text
    assert "64" in text
    assert "data.truncation" in text or "data.filter_overlong_prompts" in text
    assert len(text.splitlines()) == 1


def test_a_sampler_that_calls_sys_exit(tmp_path, capfd):
    path = tmp_path / "order.py"
    path.write_text("""import sys

class Order:
    def __init__(self, data_source, data_config):
        pass

    def __len__(self):
        return 10

    def __iter__(self):
        yield from range(4)
        sys.exit(0)
""")
    named = [f"data.sampler.class_path={path}", "data.sampler.class_name=Order"]
    text = message(capfd, run(tmp_path, *named))
    assert f"sampler 'Order' ({path}) called sys.exit(0) in line 12. Raise an error" in text
    assert len(step_lines(tmp_path)) == 1


def test_a_data_source_without_a_rule(tmp_path, capfd):
    path = write_lines(
        tmp_path / "train.jsonl", [{**row, "data_source": "tey"} for row in toy_rows()]
    )
    # Reported before weights are loaded.
    model = f"actor_rollout_ref.model.path={folder_without_weights(tmp_path)}"
    text = message(capfd, run(tmp_path, model, base=on_files(path)))
    assert "No reward rule for data_source 'tey'. Nearest: toy" in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data_source": "tey"}, "No reward rule for data_source 'tey'"),
        ({"data_source": None}, "There is no data_source"),
        ({"reward_model": None}, "needs reward_model.ground_truth"),
        ({"reward_model": {"ground_truth": math.nan}}, "needs reward_model.ground_truth"),
    ],
)
def test_a_row_that_no_rule_scores_is_named_at_start(tmp_path, capfd, change, expected):
    """Find the row at start, whether or not it is among the sampled rows."""
    rows = toy_rows()
    rows[3] |= change
    path = write_lines(tmp_path / "train.jsonl", rows)
    model = f"actor_rollout_ref.model.path={folder_without_weights(tmp_path)}"
    text = message(capfd, run(tmp_path, model, base=on_files(path)))
    assert text.startswith(f"{path}, row 3: ")
    assert expected in text
    valid = [f"data.val_files={path}", "trainer.test_freq=1"]
    assert "row 3" in message(
        capfd, run(tmp_path, model, *valid, base=on_files(Path(toy_files()[0])))
    )


def test_a_reward_that_is_not_a_number(tmp_path, capfd):
    text = message(capfd, run(tmp_path, *reward_file(tmp_path, "return math.nan")))
    assert "row 0" in text
    assert "nan, not a finite" in text


def test_a_reward_function_that_raises(tmp_path, capfd):
    text = message(capfd, run(tmp_path, *reward_file(tmp_path, "raise KeyError('no such answer')")))
    assert "KeyError: 'no such answer'" in text.splitlines()[0]
    assert 'reward.py", line 4' in text, "where in the user's file"


def test_settings_of_ray_for_one_rank_are_reported_as_without_effect(tmp_path, capfd):
    assert run(tmp_path, "ray_init.num_cpus=4", "ray_init.namespace=mine") == 0
    message = "ray_init.namespace, ray_init.num_cpus without effect: one rank needs no Ray."
    assert message in capfd.readouterr().out


def test_keys_beyond_the_end_are_named_where_epochs_over_the_data_give_it(tmp_path, capfd):
    by_epochs = [key for key in TOY if not key.startswith("trainer.max_steps")]
    keys = (*PPO, "trainer.total_epochs=1", "trainer.critic_warmup=2", "trainer.profile_steps=[3]")
    assert run(tmp_path, *keys, base=by_epochs) == 0
    said = capfd.readouterr().out
    assert said.count("critic_warmup=2 steps train the critic alone, and the run has 2") == 1
    assert said.count("profile_steps=[3] are no steps of a run of 2") == 1


def test_a_reward_function_with_a_missing_package(tmp_path, capfd):
    path = tmp_path / "reward.py"
    path.write_text("import math\nimport not_there.part\n", encoding="utf-8")
    expected = (
        f"'{path}', line 2: the package 'not_there' is not installed. Install it: pip install "
        "not_there"
    )
    assert message(capfd, run(tmp_path, f"custom_reward_function.path={path}")).startswith(expected)


def test_a_reward_function_that_sleeps(tmp_path, capfd):
    slow = reward_file(tmp_path, "time.sleep(600)")
    text = message(capfd, run(tmp_path, *slow, "reward_model.timeout_s=0.2"))
    assert "no answer within 0.2 s" in text
    assert "reward_model.timeout_s" in text


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        (
            "lone",
            "rewards",
            "must return a pair (advantages, returns), both floats of shape (16, 8) (rows, "
            "response tokens), got torch.float32 Tensor of shape (16, 8).",
        ),
        (
            "flat",
            "(rewards.sum(-1), rewards)",
            "got a tuple of 2: torch.float32 Tensor of shape (16,), torch.float32 Tensor of shape "
            "(16, 8).",
        ),
        ("nothing", "None", "got NoneType."),
        (
            "divides",
            "(rewards / 0, rewards)",
            "gave NaN or infinity for finite rewards in 16 of 16 rows",
        ),
        (
            "raises",
            "rewards.nonsense",
            "raised AttributeError in line 6: 'Tensor' object has no attribute 'nonsense'",
        ),
    ],
)
def test_an_invalid_custom_estimator_is_named(tmp_path, capfd, name, answer, expected):
    path = tmp_path / "mine.py"
    path.write_text(f"""from verl.algorithms.advantages import advantage_estimators

@advantage_estimators.register("test_{name}")
def estimator(inputs):
    rewards = inputs.token_level_rewards
    return {answer}
""")
    own = [f"algorithm.adv_estimator=test_{name}", f"actor_rollout_ref.model.external_lib={path}"]
    text = message(capfd, run(tmp_path, *own))
    assert text.startswith(f"The advantage estimator 'test_{name}' ({path}) ")
    assert expected in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        (
            "raises",
            "inputs.nonsense",
            "raised AttributeError in line 5: 'PolicyLossInputs' object has no",
        ),
        (
            "vector",
            "PolicyLossOutput(loss=terms, means={})",
            "a scalar tensor as loss, got torch.float32 Tensor of shape (",
        ),
        (
            "bare",
            "terms.sum()",
            "must return a PolicyLossOutput with a scalar tensor as loss, got torch.float32 Tensor "
            "of shape ().",
        ),
        ("number", "PolicyLossOutput(loss=1.0, means={})", "got float."),
        ("words", "'a loss'", "a scalar tensor as loss, got str."),
        (
            "detached",
            "PolicyLossOutput(loss=terms.detach().sum(), means={})",
            "got one without a gradient",
        ),
    ],
)
def test_an_invalid_custom_policy_loss_is_named(tmp_path, capfd, name, answer, expected):
    path, own = own_policy_loss(tmp_path, name, answer)
    text = message(capfd, run(tmp_path, *own))
    assert text.startswith(f"The policy loss 'test_{name}' ({path}) ")
    assert expected in text
    assert len(text.splitlines()) == 1


def test_a_custom_policy_loss_that_is_not_finite_is_named(tmp_path, capfd):
    path, own = own_policy_loss(
        tmp_path, "divides", "PolicyLossOutput(loss=terms.sum() * math.nan, means={})"
    )
    assert run(tmp_path, *own) == 0
    warning = (
        f"The policy loss 'test_divides' ({path}) gave nan for finite log-probs and advantages."
    )
    assert capfd.readouterr().out.count(warning) == 1


def own_policy_loss(tmp_path: Path, name: str, answer: str) -> tuple[Path, list[str]]:
    path = tmp_path / "mine.py"
    path.write_text(f"""import math; from verl.algorithms.policy_losses import PolicyLossOutput, policy_losses
@policy_losses.register("test_{name}")
def loss(inputs, **_):
    terms = inputs.log_probs * inputs.weights
    return {answer}
""")
    mode = f"actor_rollout_ref.actor.policy_loss.loss_mode=test_{name}"
    return path, [mode, f"actor_rollout_ref.model.external_lib={path}"]


def test_a_failing_reward_may_count_as_zero(tmp_path):
    fails = reward_file(tmp_path, "raise KeyError('no such answer')")
    assert run(tmp_path, *fails, "reward_model.on_error=zero") == 0
    for line in step_lines(tmp_path):
        assert line["reward/num_errors"] == 16
        assert line["critic/score/mean"] == 0


def test_dropped_samples_count_nowhere(tmp_path):
    """Raise for samples of two characters, and give 1 to the others.

    If the dropped samples counted as 0, the others would get an advantage above it.
    """
    some = reward_file(tmp_path, "return 1 if len(solution_str) != 2 else {}['odd']")
    assert run(tmp_path, *some, "reward_model.on_error=drop", "actor_rollout_ref.rollout.n=8") == 0
    for line in step_lines(tmp_path):
        assert 0 < line["reward/num_errors"] < 32
        assert line["critic/score/min"] == line["critic/score/max"] == 1
        highest = line["critic/advantages/max"]
        assert highest < 1e-3 or highest == pytest.approx(1, abs=1e-3), (
            "0, or the plain reward of one left alone"
        )


def test_samples_with_dropped_rewards_count_in_no_validation(tmp_path):
    """Raise for short answers, and give 1 to the others.

    Dropped rewards are neither in the scores nor among the samples.
    """
    body = "return {'score': 1, 'pred': solution_str} if len(solution_str) != 2 else {}['odd']"
    sampled = [
        f"actor_rollout_ref.rollout.val_kwargs.{name}"
        for name in ("n=4", "do_sample=True", "temperature=1.0")
    ]
    folder = tmp_path / "validation"
    asked = [
        "trainer.val_only=True",
        "trainer.val_before_train=True",
        f"trainer.validation_data_dir={folder}",
    ]

    assert (
        run(tmp_path, *reward_file(tmp_path, body), "reward_model.on_error=drop", *sampled, *asked)
        == 0
    )
    rows = [json.loads(line) for line in (folder / "0.jsonl").read_text().splitlines()]
    assert 0 < len(rows) < 40
    assert all(row["score"] == 1 and len(row["pred"]) != 2 for row in rows)
    (line,) = metric_lines(tmp_path)

    scores = {value for name, value in line.items() if name.startswith("val-") and "/mean@" in name}
    assert scores == {1.0}


@pytest.mark.parametrize("key", ["rollout_data_dir", "validation_data_dir"])
def test_a_file_in_the_place_of_a_folder_of_samples_is_named_at_the_start(tmp_path, capfd, key):
    path = tmp_path / "samples"
    path.write_text("")
    text = message(capfd, run(tmp_path, f"trainer.{key}={path}"))
    reason = f"cannot be written: '{path}' is a file"
    assert text == f"trainer.{key}='{path}' {reason}. Name a writable folder."


@pytest.mark.parametrize("odd", [-1, 1_000_000])
def test_stop_tokens_that_the_tokenizer_lacks_are_named_at_the_start(tmp_path, capfd, odd):
    text = message(capfd, run(tmp_path, f"actor_rollout_ref.rollout.stop_token_ids=[{odd}]"))
    assert text.startswith("stop_token_ids must be ids of the tokenizer, from 0 to ")
    assert not list(tmp_path.iterdir()), "before anything is written"


def test_a_tracker_does_not_hide_the_error_of_a_validation(tmp_path, capfd, monkeypatch):
    def fails(self):
        raise RewardError("the first error")

    def fails_later(self):
        raise ValueError("the second error")

    monkeypatch.setattr(PPOTrainer, "validate", fails)
    monkeypatch.setattr(FileBackend, "finish", fails_later)
    assert run(tmp_path, "trainer.val_only=True") == 1
    captured = capfd.readouterr()
    assert captured.err.startswith("RewardError: the first error")
    assert "A tracker may have lost its latest records" in captured.out


@pytest.mark.parametrize(
    ("settings", "phase"),
    [([], "this step"), (["trainer.val_before_train=True"], "the validation")],
)
def test_samples_that_are_all_dropped(tmp_path, capfd, settings, phase):
    fails = reward_file(tmp_path, "raise KeyError('no such answer')")
    text = message(capfd, run(tmp_path, *fails, "reward_model.on_error=drop", *settings))
    assert f"All samples of {phase} were dropped" in text


def test_a_reward_file_with_a_syntax_error(tmp_path, capfd):
    text = message(capfd, run(tmp_path, *reward_file(tmp_path, "return len(solution_str")))
    assert "reward.py', line 4, is not Python" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.max_stepz=3", "trainer.max_steps"),
        (
            "actor_rollout_ref.actor.loss_extra=[{name: sft, coef: 1}]",
            "extra loss term 'sft'. Nearest known: ",
        ),
        (
            "algorithm.adv_estimator=gprp",
            "Unknown advantage estimator (algorithm.adv_estimator) 'gprp'. Nearest",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanila", "Nearest known: vanilla"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=GSPO", "Nearest known: gspo."),
        ("reward_model.reward_manager=naiv", "Nearest known: naive"),
        ("actor_rollout_ref.rollout.name=embeded", "Nearest known: embedded"),
        (
            "actor_rollout_ref.actor.loss_extra=[{name: nothing}]",
            "Unknown extra loss term 'nothing'",
        ),
        ("trainer.logger=consol", "Nearest known: console"),
        (
            "actor_rollout_ref.model.path=./no_such_folder",
            "Expected a model folder at './no_such_folder', found none",
        ),
        (
            "actor_rollout_ref.model.external_lib=no_such_module",
            "model.external_lib: cannot import 'no_such_module'",
        ),
        ("custom_reward_function.path=no_such_file.py", "found none at 'no_such_file.py'"),
    ],
)
def test_an_unknown_name(tmp_path, capfd, override, expected):
    text = message(capfd, run(tmp_path, override))
    assert expected in text
    assert len(text.splitlines()) == 1


def test_a_model_folder_without_tokenizer(tmp_path, capfd):
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    capfd.readouterr()  # the progress bar of writing
    text = message(capfd, run(tmp_path, f"actor_rollout_ref.model.path={tmp_path / 'model'}"))
    assert "tokenizer" in text
    assert str(tmp_path / "model") in text
    assert len(text.splitlines()) == 1


def test_a_model_folder_without_weights(tmp_path, capfd):
    model = tiny_model("qwen2")
    model.config.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    text = message(capfd, run(tmp_path, f"actor_rollout_ref.model.path={tmp_path / 'model'}"))
    assert "weights" in text
    assert len(text.splitlines()) == 1


def test_a_tokenizer_with_more_tokens_than_the_model_embeds(tmp_path, capfd):
    tiny_model("qwen2", vocab_size=64).save_pretrained(tmp_path / "model")
    capfd.readouterr()  # the progress bar of writing
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    text = message(capfd, run(tmp_path, f"actor_rollout_ref.model.path={tmp_path / 'model'}"))
    assert "The model embeds 64 tokens" in text


def test_a_model_that_the_engine_does_not_support_is_rejected_before_weights(tmp_path, capfd):
    save_tiny(tmp_path / "model", "deepseek_v3")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    keys = [
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        "actor_rollout_ref.rollout.deterministic=True",
    ]
    assert run(tmp_path / "run", *keys) == 1
    assert "does not support multi-head latent attention (MLA)" in capfd.readouterr().err


def test_several_launched_ranks(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = message(capfd, run(tmp_path))
    assert "WORLD_SIZE=2" in text
    assert "torchrun" in text


def test_a_missing_gpu(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "trainer.device=cuda needs a GPU" in message(capfd, run(tmp_path, "trainer.device=cuda"))


def test_a_data_set_without_validation_split(tmp_path, capfd):
    path = write_lines(tmp_path / "train.jsonl", toy_rows())
    base = [*on_files(path)[1:], "data.train_batch_size=4", f"data.dataset_name={path}"]
    base = [override for override in base if not override.startswith("data.train_files")]
    text = message(capfd, run(tmp_path, "trainer.test_freq=1", base=base))
    assert "has no validation split" in text


def test_updates_that_are_never_finite_stop_the_run_and_keep_the_weights(tmp_path, capfd):
    library = tmp_path / "broken_term.py"
    library.write_text(
        "from verl.algorithms.policy_losses import extra_losses\n\n\n"
        "@extra_losses.register('broken')\n"
        "def broken(inputs, columns):\n"
        "    return (inputs.log_probs * float('nan')).sum()\n"
    )
    broken = [
        f"actor_rollout_ref.model.external_lib={library}",
        "actor_rollout_ref.actor.loss_extra=[{name: broken}]",
    ]

    limit = ["trainer.max_nonfinite_steps=2", "trainer.max_steps=5", "trainer.save_freq=1"]
    text = message(capfd, run(tmp_path, *broken, *limit))
    assert "2 steps in a row had a non-finite loss or gradient" in text
    (line,) = step_lines(tmp_path)
    assert line["actor/skipped_updates"] == 1
    assert run(tmp_path / "still", "actor_rollout_ref.actor.optim.lr=0", "trainer.save_freq=1") == 0
    assert same_bits(weights(tmp_path, 1), weights(tmp_path / "still", 1))


def test_a_row_is_named_with_its_file(tmp_path, capfd):
    rows = toy_rows()
    rows[7]["prompt"] = 7
    path = write_lines(tmp_path / "train.jsonl", rows)
    text = message(capfd, run(tmp_path, base=on_files(path)))
    assert text.startswith(f"{path}, row 7, column 'prompt': must be a list of messages")


def test_a_folder_that_cannot_be_written_is_reported_before_a_model_is_loaded(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    settings = [
        f"trainer.default_local_dir={tmp_path / 'file'}",
        "trainer.save_freq=1",
        "trainer.logger=[console]",
    ]
    text = message(
        capfd,
        run(
            tmp_path, *settings, f"actor_rollout_ref.model.path={folder_without_weights(tmp_path)}"
        ),
    )
    assert "trainer.default_local_dir" in text
    assert len(text.splitlines()) == 1


def test_a_file_that_cannot_be_written_is_reported_in_one_line(tmp_path, capfd):
    text = message(capfd, run(tmp_path, "trainer.rollout_data_dir=/proc/nowhere"))
    assert "/proc/nowhere" in text
    assert len(text.splitlines()) == 1


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Handle SIGINT again: shells start background jobs, such as tests, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ENDS = {"SIGINT": (INTERRUPTED, "Interrupted.\n"), "SIGTERM": (TERMINATED, "Ended by SIGTERM.\n")}


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("name", ENDS)
def test_ctrl_c_and_sigterm_end_a_start_in_one_line(tmp_path, capfd, monkeypatch, name):
    (tmp_path / f"told_by_{name}.py").write_text(
        f"import os, signal\nos.kill(os.getpid(), signal.{name})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    code = run(tmp_path, f"actor_rollout_ref.model.external_lib=told_by_{name}")
    assert (code, capfd.readouterr().err) == ENDS[name]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("name", ENDS)
def test_ctrl_c_and_sigterm_end_a_run_in_one_line(tmp_path, capfd, monkeypatch, name):
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    # Its process is a child of the run's. Only one call sends the signal: a signal of a later call
    # would reach the tests after the run has ended.
    first = tmp_path / "first"
    reward = reward_file(
        tmp_path,
        f"import os, pathlib, signal\n"
        f"    try:\n"
        f"        pathlib.Path({str(first)!r}).touch(exist_ok=False)\n"
        f"    except FileExistsError:\n"
        f"        return time.sleep(5)\n"
        f"    os.kill(os.getppid(), signal.{name})\n"
        f"    time.sleep(5)",
    )
    assert run(tmp_path, "trainer.save_freq=1", "trainer.max_steps=1") == 0
    again = ["trainer.save_freq=1", "reward_model.preflight=False", *reward]
    before = signal.getsignal(
        signal.SIGTERM
    )  # the handler of Ray, if a test of this process has started it

    code = run(tmp_path, *again)
    assert (code, capfd.readouterr().err) == ENDS[name]
    assert signal.getsignal(signal.SIGTERM) is before
    assert said[-1:] == [
        f"Interrupted in step 2 of 2. Newest checkpoint in {tmp_path}: global_step_1. Started "
        "again, the run goes on from there."
    ]
