"""Pictures on servers, against a fake that speaks both dialects and reads them itself."""

import base64
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rollout.servers.fake import FakeServer
from tests.rollout.servers.fake_vllm import modules
from tests.tiny_vision_models import IMAGE, tiny_vision_model
from tests.vision_folders import save_vision_folder, some_image
from tests.workers.batches import CPU, config
from verl.config.rollout import RolloutConfig
from verl.data.build import build_picture_reader
from verl.models.load import load_tokenizer
from verl.models.pictures import ids_with_placeholders
from verl.models.vision import model_arguments
from verl.protocol import DataProto
from verl.rollout import check_engine_model
from verl.rollout.servers.sglang import SGLangServer
from verl.rollout.types import SamplingParams
from verl.utils.errors import ConfigError, DataError, RolloutError
from verl.workers import ActorWorker, RolloutWorker

R = 8
IMAGES = [some_image(0), some_image(1, (16, 32)), some_image(2)]


class FakeVisionServer(FakeServer):
    """A server that prepares the pictures of a request. That of vLLM keeps their features."""

    def __init__(self, folder, dialect="vllm", version=None):
        self.read = []  # numbers of pictures of the draws
        self.has_stale_features = False
        self.tokenizer_of_model = load_tokenizer(str(folder))
        self.reader = None
        super().__init__(
            lambda: tiny_vision_model("qwen2_5_vl"), dialect, version, name=str(folder)
        )
        self.tokenizer = self.tokenizer_of_model
        self.never_drawn = [IMAGE]  # transformers would look for its features

    def _vllm_routes(self):
        return {**super()._vllm_routes(), "/reset_encoder_cache": self._reset_features}

    def _reset_features(self, body):
        self.has_stale_features = False
        return 200, ""

    def _take(self, weights, answer):
        self.has_stale_features = True
        if self.dialect == "sglang":  # it knows the names of files alone
            assert not any(name.startswith("model.visual.") for name in weights)
        return super()._take({_name(name): tensor for name, tensor in weights.items()}, answer)

    def _vllm_generate(self, body):
        parts = body.get("content_parts") or []
        if parts and self.has_stale_features:
            return 500, {"error": "EngineCore encountered an issue."}
        if parts and "old version" in self.faults:
            parts = []
        assert all(part["type"] == "image_url" for part in parts)
        ids = self._read(body["token_ids"], [part["url"] for part in parts])
        status, answer = super()._vllm_generate({**body, "token_ids": ids})
        if body.get("return_token_ids") and "old version" not in self.faults:
            answer["prompt_token_ids"] = ids
        return status, answer

    def _sglang_generate(self, body):
        ids = self._read(body["input_ids"], body.get("image_data") or [])
        return super()._sglang_generate({**body, "input_ids": ids})

    def _read(self, ids, urls):
        """Prepare the pictures of a request for `_logits`, and return its expanded tokens."""
        prefix = "data:image/png;base64,"
        pictures = []
        for url in urls:
            assert url.startswith(prefix)
            png = base64.b64decode(url.removeprefix(prefix))
            pictures.append(self.reader.prepare(png))
        self.read.append(len(pictures))
        self._of_thread.pictures = tuple(pictures)
        return self.reader.expand(ids, pictures) if urls else ids

    def _logits(self, model, ids):
        arguments = model_arguments(model, torch.tensor([ids]), self._of_thread.pictures)
        return model(**arguments).logits[0, -1]


def _name(saved):
    """Return a parameter's name in the module; files have older names."""
    if saved.startswith("visual."):
        return f"model.{saved}"
    return re.sub(r"^model\.(?!visual|language_model)", "model.language_model.", saved)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_vision_folder(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture(params=["vllm", "sglang", "in process"])
def vision(folder, request, monkeypatch):
    """Return settings, a reader, a server that the run started, and an actor.

    In process, the server is the one behind a fake `AsyncLLM`.
    """
    settings = config(folder)
    section = settings.actor_rollout_ref
    in_process = request.param == "in process"
    name = "vllm" if in_process else request.param
    section.rollout.name = name
    section.rollout.in_process = in_process
    section.rollout.server_timeout_s = 3.0
    section.rollout.fingerprint_interval = 1
    section.rollout.prompt_length = 120
    section.rollout.response_length = R
    tokenizer = load_tokenizer(str(folder))
    reader = build_picture_reader(section.model, tokenizer, for_servers=True)
    server = FakeVisionServer(folder, name)
    server.reader = build_picture_reader(section.model, tokenizer)
    server.max_model_len = 130  # SGLang leaves two places unused

    class Started:
        urls = (server.url,)

        def __init__(self, *arguments, **keywords):
            pass

    monkeypatch.setattr("verl.rollout.servers.engine.OwnedServers", Started)
    if in_process:
        for name, module in modules(lambda: server).items():
            monkeypatch.setitem(sys.modules, name, module)
    actor = ActorWorker(section, total_steps=1, device=CPU, tokenizer=tokenizer)
    yield settings, reader, server, actor
    server.end()


def prompts(reader):
    """Return prompts with two pictures, with one, and with none."""
    asked = [
        ("<image> and <image>: how many?", IMAGES[:2]),
        ("<image>", IMAGES[2:]),
        ("3 + 4", []),
    ]
    ids, pictures = [], []
    for text, images in asked:
        row, _, own = reader.encode([{"role": "user", "content": text}], images, Path())
        ids.append(row)
        pictures.append(own)
    return DataProto.from_dict(
        tensors={},
        non_tensors={
            "raw_prompt_ids": np.array([*ids, None], dtype=object)[:-1],
            "prompt_row": np.arange(len(ids)).astype(object),
            "prepared_pictures": np.array([*pictures, None], dtype=object)[:-1],
            "uid": np.array([str(number) for number in range(len(ids))], dtype=object),
        },
    )


def rollout_of(vision):
    settings, reader, _, actor = vision
    return RolloutWorker(
        settings.actor_rollout_ref, device=CPU, tokenizer=reader.tokenizer, actor=actor
    )


def draw(rollout, batch, step=0):
    params = SamplingParams(max_new_tokens=R)
    drawn = rollout.generate_sequences(batch, n=2, params=params, seed=0, step=step)
    rows = [picture for picture in batch.non_tensor_batch["prepared_pictures"] for _ in range(2)]
    column = np.array([*rows, None], dtype=object)[:-1]
    drawn.non_tensor_batch["prepared_pictures"] = column
    return drawn


def test_pictures_reach_the_server_and_log_probs_are_the_trainers(vision):
    _, reader, server, actor = vision
    rollout = rollout_of(vision)
    batch = prompts(reader)
    for step in range(2):
        rollout.take_weights()
        server.read.clear()
        drawn = draw(rollout, batch, step)
        assert sorted(server.read) == [0, 0, 1, 1, 2, 2]
        metrics = actor.compute_log_prob(drawn).meta_info["metrics"]
        assert abs(metrics["training/rollout_kl"]) < 1e-5
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        with torch.no_grad():  # the vision tower, too
            for parameter in actor.engine.module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)


def test_a_server_that_reads_other_tokens_is_refused_by_name(vision):
    _, reader, server, _ = vision
    rollout = rollout_of(vision)
    rollout.take_weights()
    prepare = server.reader.prepare
    server.reader.prepare = lambda png: prepare(some_image(3, (8, 24)))
    with pytest.raises(RolloutError, match="reads a prompt with pictures as other tokens.*got"):
        draw(rollout, prompts(reader))


@pytest.mark.parametrize("vision", ["vllm"], indirect=True)
def test_a_server_that_takes_no_pictures_is_refused_by_name(vision):
    _, reader, server, _ = vision
    rollout = rollout_of(vision)
    rollout.take_weights()
    server.faults.add("old version")
    with pytest.raises(RolloutError, match=r"got none.*vLLM 0\.32 or later.*name=embedded"):
        draw(rollout, prompts(reader))


@pytest.mark.parametrize(
    ("vision", "version", "oldest"),
    [("vllm", "0.31.2", "0.32"), ("sglang", "0.5.15", "0.5.16")],
    indirect=["vision"],
)
def test_a_model_that_reads_pictures_needs_a_newer_server(vision, version, oldest):
    vision[2].version = version
    message = rf"version {version}; its calls with pictures are tested with {oldest} and later"
    with pytest.raises(ConfigError, match=message):
        rollout_of(vision)


@pytest.mark.parametrize("vision", ["vllm"], indirect=True)
def test_a_prompt_gets_one_token_a_picture_again(vision):
    _, reader, _, _ = vision
    [ids, *_] = prompts(reader).non_tensor_batch["raw_prompt_ids"]
    [pictures, *_] = prompts(reader).non_tensor_batch["prepared_pictures"]
    short = ids_with_placeholders(ids, pictures)
    assert short.count(pictures[0].token_id) == 2
    assert reader.expand(short, pictures) == ids
    with pytest.raises(DataError, match="tokens of picture 1 are not in the prompt"):
        ids_with_placeholders(ids, (pictures[0], replace(pictures[1], token_ids=(5,) * 40)))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_servers_refuse_families_that_write_text_around_a_picture(name):
    rollout = RolloutConfig(name=name)
    with pytest.raises(ConfigError, match="does not support the pictures of the family 'gemma3'"):
        check_engine_model(rollout, tiny_vision_model("gemma3").config, on_cuda=False)


def test_sglang_draws_by_no_features_of_an_old_vision_tower():
    """No call drops them: servers of the run keep none, and others are refused."""
    assert SGLangServer.environment()["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    model = tiny_vision_model("qwen2_5_vl").config
    rollout = RolloutConfig(name="sglang")
    check_engine_model(rollout, model, on_cuda=False)
    rollout.server_urls = ["http://127.0.0.1:1"]
    with pytest.raises(ConfigError, match="features of the old vision tower.*set server_python"):
        check_engine_model(rollout, model, on_cuda=False)
