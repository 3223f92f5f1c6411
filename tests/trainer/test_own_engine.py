"""Custom rollout engines, registered from a file, train the toy task."""

from pathlib import Path

import pytest

from tests.trainer.runs import metric_lines, run
from verl.jobs.main_generation import main as main_generation
from verl.utils.logging import logger

# LocalEngine provides weights, sleep and checks; the rest generates one sample at a time.
VERBS = """
import numpy as np
import torch

from verl.rollout import Completion, rollout_engines
from verl.rollout.local import LocalEngine
from verl.rollout.sampling import row_keys, sample, sample_keys


class OneByOne(LocalEngine):
    def __init__(self, **parts):
        super().__init__(attention="eager", **parts)
        self.waiting = []

    @property
    def has_work(self):
        return bool(self.waiting)

    def submit(self, requests, params, *, seed, step):
        self.rule, self.params = self.check_call(requests, params), params
        for request in requests:
            keys = sample_keys(seed, step, np.array(request.sample_ids, np.int64))
            self.waiting += [(i, list(request.prompt_ids), k) for i, k in zip(request.sample_ids, keys)]

    def step(self):
        number, prompt, key = self.waiting.pop(0)
        tokens, log_probs = [], []
        while len(tokens) < self.params.max_new_tokens:
            with torch.inference_mode():
                logits = self.twin.module(torch.tensor([prompt + tokens])).logits[:, -1]
            noise = row_keys(np.array([key], np.uint64), np.array([len(tokens)], np.int64))
            token, log_prob = sample(logits, self.params, torch.from_numpy(noise))
            tokens.append(int(token)), log_probs.append(float(log_prob))
            if self.rule.ends(np.array(tokens[-1:]))[0]:
                return [Completion(sample_id=number, token_ids=tokens, log_probs=log_probs, finish_reason="stop")]
        return [Completion(sample_id=number, token_ids=tokens, log_probs=log_probs, finish_reason="length")]

    def abort(self, sample_ids=None):
        gone = [row for row in self.waiting if sample_ids is None or row[0] in sample_ids]
        self.waiting = [row for row in self.waiting if row not in gone]
        return [Completion(sample_id=n, token_ids=[], log_probs=[], finish_reason="abort") for n, *_ in gone]


rollout_engines.register("one_by_one")(OneByOne)
"""
# The interface of engines before there were verbs.
GENERATE = """
from verl.rollout import EmbeddedEngine, rollout_engines


class Whole:
    def __init__(self, **parts):
        self.engine = EmbeddedEngine(**parts)

    def generate(self, requests, params, *, seed, step):
        yield from self.engine.generate(requests, params, seed=seed, step=step)

    def __getattr__(self, name):
        if name in ("submit", "step", "abort", "has_work"):
            raise AttributeError(name)
        return getattr(self.engine, name)


rollout_engines.register("whole")(Whole)
"""
# One sample gets a token or a log-prob that no model could have drawn.
FAULTY = """
from verl.rollout import EmbeddedEngine, rollout_engines


class Faulty(EmbeddedEngine):
    def step(self):
        ended = super().step()
        for completion in ended:
            if completion.sample_id == 3:
                completion.FIELD[0] = VALUE
        return ended


rollout_engines.register("NAME")(Faulty)
"""


def rewards(folder: Path, *more: str) -> list[float]:
    assert run(folder, "trainer.max_steps=2", *more) == 0
    return [line["critic/score/mean"] for line in metric_lines(folder)]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> list[float]:
    return rewards(tmp_path_factory.mktemp("embedded"))


@pytest.mark.parametrize(
    ("name", "text"), [("one_by_one", VERBS), ("whole", GENERATE)], ids=["verbs", "generate"]
)
def test_it_draws_the_tokens_of_the_embedded_engine(embedded, tmp_path, name, text):
    file = tmp_path / "engine.py"
    file.write_text(text, encoding="utf-8")
    own = rewards(
        tmp_path / "run",
        f"actor_rollout_ref.model.external_lib={file}",
        f"actor_rollout_ref.rollout.name={name}",
    )
    assert own == pytest.approx(embedded)


def run_with(folder: Path, name: str, text: str, *more: str) -> int:
    """Run with the engine `name`, which the code `text` registers."""
    file = folder / "engine.py"
    file.write_text(text, encoding="utf-8")
    return run(
        folder / "run",
        f"actor_rollout_ref.model.external_lib={file}",
        f"actor_rollout_ref.rollout.name={name}",
        *more,
    )


def faulty_run(folder: Path, field: str, value: str, *more: str) -> int:
    """Run with an engine that sets the first token or log-prob of sample 3 to `value`."""
    text = FAULTY.replace("FIELD", field).replace("VALUE", value).replace("NAME", folder.name)
    return run_with(folder, folder.name, text, *more)


@pytest.mark.parametrize("value", ["100000", "-1", "1.5"])
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_token_id_that_the_model_lacks_is_an_error(tmp_path, capfd, mode, value):
    assert faulty_run(tmp_path, "token_ids", value, f"trainer.mode={mode}") == 1
    shown = capfd.readouterr().err
    assert f"sample 3 has {value}. Let the rollout engine" in shown
    assert "Traceback" not in shown


def test_a_log_prob_above_zero_is_an_error(tmp_path, capfd):
    assert faulty_run(tmp_path, "log_probs", "2.0") == 1
    assert "A log-prob is at most 0, but the engine returned 2" in capfd.readouterr().err


@pytest.mark.parametrize("value", ["100000", "-1"])
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_agents_do_not_decode_a_token_id_that_the_model_lacks(tmp_path, capfd, mode, value):
    agents = (
        "actor_rollout_ref.rollout.agent.environment.name=number_guessing",
        *("data.max_prompt_length=128", "data.max_response_length=32"),
    )
    assert faulty_run(tmp_path, "token_ids", value, f"trainer.mode={mode}", *agents) == 1
    shown = capfd.readouterr().err
    assert f"sample 3 has {value}. Let the rollout engine" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("value", ["100000", "-1", "1.5"])
def test_texts_are_not_decoded_from_a_token_id_that_the_model_lacks(tmp_path, capfd, value):
    file = tmp_path / "engine.py"
    text = FAULTY.replace("FIELD", "token_ids").replace("VALUE", value)
    file.write_text(text.replace("NAME", tmp_path.name), encoding="utf-8")
    command = (
        *("model.path=toy", "data.path=toy", f"data.output_path={tmp_path / 'out.parquet'}"),
        *("data.max_response_length=8", f"model.external_lib={file}"),
        f"rollout.name={tmp_path.name}",
    )

    assert main_generation(list(command)) == 1
    shown = capfd.readouterr().err
    assert f"sample 3 has {value}. Let the rollout engine" in shown
    assert "Traceback" not in shown


def test_an_engine_without_verbs_is_an_error_that_names_them(tmp_path, capfd):
    text = (
        "from verl.rollout import rollout_engines\n"
        "rollout_engines.register('empty')(lambda **parts: object())\n"
    )
    assert run_with(tmp_path, "empty", text) == 1
    assert "lacks abort, has_work, step, submit" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("mode", "way_on"),
    [("auto", "Started again, the run"), ("disable", "trainer.resume_mode=auto")],
)
def test_an_engine_that_raises_is_named_with_the_checkpoint(
    tmp_path, capfd, monkeypatch, mode, way_on
):
    name = f"raises_{mode}"
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    text = (
        "from verl.rollout import EmbeddedEngine, rollout_engines\n"
        "class Raises(EmbeddedEngine):\n"
        "    def submit(self, requests, params, *, seed, step):\n"
        "        if step == 2:\n"
        "            raise KeyError('boom')\n"
        "        super().submit(requests, params, seed=seed, step=step)\n"
        f"rollout_engines.register('{name}')(Raises)\n"
    )
    options = ["trainer.save_freq=1", f"trainer.resume_mode={mode}"]
    assert run_with(tmp_path, name, text, *options) == 1
    file = tmp_path / "engine.py"
    shown = capfd.readouterr().err
    assert f"The rollout engine '{name}' ({file}) raised KeyError in line 5: 'boom'." in shown
    ended = "Stopped by RolloutError in step 2 of 2. Newest checkpoint in"
    assert f"{ended} {tmp_path / 'run'}: global_step_1. {way_on} goes on from there." in said
    assert "Traceback" not in shown


def test_an_assertion_of_an_engine_is_shown_with_its_place(tmp_path, capfd):
    """It may be in another file of the engine's package."""
    (tmp_path / "pages.py").write_text("def check(pages):\n    assert pages\n", encoding="utf-8")
    text = (
        "import runpy\n"
        "from verl.rollout import EmbeddedEngine, rollout_engines\n"
        "class Asserts(EmbeddedEngine):\n"
        "    def submit(self, requests, params, *, seed, step):\n"
        f"        runpy.run_path('{tmp_path / 'pages.py'}')['check']([])\n"
        "rollout_engines.register('asserts')(Asserts)\n"
    )
    assert run_with(tmp_path, "asserts", text) == 1
    place = f"raised AssertionError in line 2 of {tmp_path / 'pages.py'}: assert pages."
    assert place in capfd.readouterr().err


def test_an_engine_without_methods_for_weights_is_an_error_that_names_them(tmp_path, capfd):
    text = (
        "from verl.rollout import rollout_engines\n"
        "class Bare:\n"
        "    def generate(self, requests, params, *, seed, step): ...\n"
        "    def sleep(self): ...\n"
        "    def wake(self): ...\n"
        "rollout_engines.register('bare')(lambda **parts: Bare())\n"
    )
    assert run_with(tmp_path, "bare", text) == 1
    shown = capfd.readouterr().err
    assert "lacks statistics, weight_dtype, update_weights, weight_place, weight_finger" in shown
    assert "Traceback" not in shown


def test_the_error_of_a_run_is_shown_although_its_tracker_cannot_finish(tmp_path, capfd):
    file = tmp_path / "tracker.py"
    file.write_text(
        "from verl.tracking.backends import TrackerBackend, tracker_backends\n"
        "class Raises(TrackerBackend):\n"
        "    def log(self, metrics, step):\n"
        "        raise ValueError('first')\n"
        "    def finish(self):\n"
        "        raise ValueError('second')\n"
        f"tracker_backends.register('{tmp_path.name}')(Raises)\n",
        encoding="utf-8",
    )
    keys = (f"actor_rollout_ref.model.external_lib={file}", f"trainer.logger=[{tmp_path.name}]")
    assert run(tmp_path / "run", *keys) == 1
    shown = capfd.readouterr().err
    assert f"The tracker '{tmp_path.name}' ({file}) raised ValueError in line 4: first." in shown
