"""Secrets of the configuration are not printed, logged or handed to trackers."""

import logging
import pickle

import pytest
import yaml

from tests.trainer.runs import TOY
from verl.config import load_config
from verl.config.keys import keys_of
from verl.config.load import ROOTS, config_to_dict, config_to_show
from verl.tracking import TrackerBackend, tracker_backends
from verl.trainer.main_ppo import main
from verl.utils import secrets
from verl.utils.errors import ConfigError
from verl.utils.logging import logger
from verl.utils.secrets import masked, masked_values

JUDGE = "reward_model.judge.url"
URL = "http://judge:pa55w0rd@host:8000/v1"


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(secrets, "_environment", {})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"got {URL}.", "got http://***@host:8000/v1."),
        ("'ray://:pw@h:10001', http://a/b", "'ray://***@h:10001', http://a/b"),
        ("https://token@host/x?y=1", "https://***@host/x?y=1"),
        ("http://user:p@ss@host/", "http://***@host/"),
        ("http://user:p#a/s?s@host/", "http://***@host/"),
        ("http://h/v1?api_key=abc&n=1&access_token=d", "http://h/v1?api_key=***&n=1&access_token=***"),
        ("http://host:8000/a@b and me@home", "http://host:8000/a@b and me@home"),
        ('{"a": "http://host", "b": "c@d"}', '{"a": "http://host", "b": "c@d"}'),
        ("s3://bucket/model@main", "s3://bucket/model@main"),
    ],
)  # fmt: skip
def test_user_and_password_of_an_address_are_masked(text, shown):
    assert masked(text) == shown


def test_errors_and_log_lines_have_no_secrets(caplog):
    error = ConfigError(f"{JUDGE}={URL} cannot be reached.")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert "pa55w0rd" not in str(each)
        assert "***@host:8000" in str(each)
    with caplog.at_level(logging.WARNING, logger="verl"):
        logger.warning("%s=%s has no effect", JUDGE, URL)
    assert caplog.messages == [f"{JUDGE}=http://***@host:8000/v1 has no effect"]


def test_a_contradiction_is_reported_without_the_password(capfd):
    assert main([*TOY, f"{JUDGE}={URL}"]) == 1
    output = capfd.readouterr()
    assert "http://***@host:8000/v1" in output.err
    assert "pa55w0rd" not in output.err + output.out


def test_the_shown_configuration_keeps_references_to_the_environment(monkeypatch, capfd):
    monkeypatch.setenv("VERL_TEST_SECRET", "hunter2hunter2")
    monkeypatch.setenv("VERL_TEST_FOLDER", "/home/of/somebody")
    asked = [
        *("--cfg", "job", f"{JUDGE}={URL}", "reward_model.judge.model=${oc.env:VERL_TEST_SECRET}"),
        "trainer.default_local_dir=${oc.env:VERL_TEST_FOLDER}/x",
        'reward_model.judge.prompt="Key: ${oc.env:VERL_TEST_SECRET}"',
        "+ray_init.runtime_env={env_vars:{WANDB_API_KEY: abcdef,TOKENIZERS: x}}",
    ]
    with pytest.raises(SystemExit):
        load_config([*TOY, *asked])

    out, err = capfd.readouterr()
    assert "hunter2" not in out + err
    assert "Secrets are shown as ***" in err
    shown = yaml.safe_load(out)
    judge = shown["reward_model"]["judge"]
    assert judge["url"] == "http://***@host:8000/v1"
    assert judge["model"] == "${oc.env:VERL_TEST_SECRET}"
    assert judge["prompt"] == "Key: ${oc.env:VERL_TEST_SECRET}"

    assert shown["trainer"]["default_local_dir"] == "${oc.env:VERL_TEST_FOLDER}/x"
    assert shown["ray_init"]["runtime_env"]["env_vars"] == {
        "WANDB_API_KEY": "***",
        "TOKENIZERS": "x",
    }


def test_values_of_the_environment_are_used_but_not_printed(monkeypatch, caplog):
    monkeypatch.setenv("VERL_TEST_SECRET", "hunter2hunter2")
    config = load_config([*TOY, "trainer.project_name=${oc.env:VERL_TEST_SECRET}"])
    assert config.trainer.project_name == "hunter2hunter2"
    assert config_to_show(config)["trainer"]["project_name"] == "${oc.env:VERL_TEST_SECRET}"
    assert str(ConfigError("no hunter2hunter2")) == "no ${oc.env:VERL_TEST_SECRET}"


def test_trackers_get_no_secrets(tmp_path, monkeypatch):
    seen = []

    class Spy(TrackerBackend):
        def __init__(self, settings):
            super().__init__(settings)
            seen.append(settings.config)

        def log(self, metrics, step):
            pass

    monkeypatch.setitem(tracker_backends._entries, "file", Spy)
    monkeypatch.setenv("VERL_TEST_SECRET", "hunter2hunter2")
    url = "trainer.project_name=http://user:${oc.env:VERL_TEST_SECRET}@localhost:1"
    place = f"trainer.default_local_dir={tmp_path}"
    assert main([*TOY, url, place, "trainer.logger=[file]", "trainer.max_steps=1"]) == 0
    (config,) = seen
    assert config["trainer"]["project_name"] == "http://***@localhost:1"
    assert "hunter2" not in repr(config)


@pytest.mark.parametrize("root", ROOTS)
def test_no_key_of_the_configuration_is_mistaken_for_a_secret(root):
    defaults = config_to_dict(ROOTS[root].schema())
    assert masked_values(defaults) == defaults
    texts = [key.path for key in keys_of(ROOTS[root].schema).values() if key.type is not bool]
    names = {path.rpartition(".")[2]: "text" for path in texts}
    assert masked_values(names) == names
