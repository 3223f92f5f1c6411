"""Settings, models and folders that a run cannot use end in one clear message and exit code 1."""

import pytest

from tests.tiny_models import save_tiny, tiny_model, tiny_tokenizer
from tests.trainer.bad_inputs import folder_without_weights, message
from tests.trainer.runs import PPO, TOY, run


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
