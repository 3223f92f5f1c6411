"""The adapter of SGLang against exchanges with SGLang 0.5.16, recorded on a CPU.

The model was a tiny Qwen2, and for pictures a tiny Qwen2.5-VL. A replayed call must be the
recorded one to the letter; its answer is the real server's.
"""

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from verl.models.pictures import Picture
from verl.rollout.servers.server import Draw
from verl.rollout.servers.sglang import SGLangServer
from verl.rollout.servers.weights import FolderSource
from verl.rollout.types import SamplingParams
from verl.utils.errors import RolloutError

RECORDED = json.loads(Path(__file__).with_name("sglang_0_5_16.json").read_text(encoding="utf-8"))
GREEDY = {"temperature": 0.0}
FREE = [1497, 1497, 1497, 1497]  # that this model draws greedily without stops


class Replayed(SGLangServer):
    """A server that answers recorded calls, each once and in their order."""

    def __init__(self, *paths):
        super().__init__("http://127.0.0.1:1")
        self.exchanges = [each for each in RECORDED if each["path"] in paths]

    def ask(self, method, path, body=None, *, timeout_s=0.0):
        each = self.exchanges.pop(0)
        assert (method, path, body) == (each["method"], each["path"], each["body"])
        return each["status"], each["answer"]


def draw(name, limit, stops=(), **params):
    return Draw(
        request_id=name,
        prompt_ids=(5, 6, 7, 8),
        params=SamplingParams(max_new_tokens=limit, **params),
        limit=limit,
        seed=1 << 40,
        stop_token_ids=stops,
    )


def test_facts_of_the_server_and_its_model():
    server = Replayed("/server_info", "/model_info")
    facts = server.facts()
    assert (facts.model, facts.version, facts.max_model_len) == ("/models/tiny", "0.5.16", 510)
    assert server.weight_version() == "v5"


def test_a_tokenizer_that_the_server_cannot_describe_is_not_compared():
    """The limit of this model's tokenizer is too large for the server's JSON: status 500."""
    assert Replayed("/tokenize").tokenize("3 + 4") is None


def test_draws_and_their_ends():
    server = Replayed("/generate")
    free = server.draw(draw("free", 4, ignore_eos=True, **GREEDY))
    assert (free.token_ids, free.finish_reason, free.versions) == (FREE, "length", {"v5"})
    assert len(free.log_probs) == 4

    # Where the model's own end of sequence ends a response, the server knows all stop tokens.
    stopped = server.draw(draw("stopped", 4, (1, FREE[2]), **GREEDY))
    assert (stopped.token_ids, stopped.finish_reason) == (FREE[:1], "stop")
    # With ignore_eos it knows none, and draws to the limit.
    assert len(server.exchanges[0]["answer"]["output_ids"]) == 4
    cut = server.draw(draw("cut", 4, (FREE[2],), ignore_eos=True, **GREEDY))
    assert (cut.token_ids, cut.finish_reason) == (FREE[:1], "stop")
    assert cut.log_probs == stopped.log_probs

    server.draw(draw("warm", 2, temperature=0.7, top_p=0.9, top_k=5))
    assert server.top_two((5, 6, 7), 1.0) == pytest.approx((-6.8146, -7.1159), abs=1e-4)
    long = server.draw(draw("long", 400, ignore_eos=True))
    assert long.finish_reason == "abort"
    assert 0 < len(long.token_ids) == len(long.log_probs) < 400


def test_draws_with_pictures_have_one_token_each():
    """The prompt has two tokens, 125 and 126, that the tokenizer does not know."""
    [body] = [each["body"] for each in RECORDED if "image_data" in (each["body"] or {})]
    pictures = []
    for url, size in zip(body["image_data"], (6, 2), strict=True):
        png = base64.b64decode(url.removeprefix("data:image/png;base64,"))
        picture = Picture(key=url, token_ids=(120,) * size, token_id=120, inputs={}, png=png)
        pictures.append(picture)

    first, second = (picture.token_ids for picture in pictures)
    asked = replace(
        draw("seen", 4, ignore_eos=True, **GREEDY),
        prompt_ids=(3, 121, *first, 122, 125, 126, 121, *second, 122, 4),
        pictures=tuple(pictures),
    )
    server = Replayed("/generate")
    server.exchanges = [each for each in RECORDED if each["body"] == body] * 2
    seen = server.draw(asked)
    assert seen.token_ids == [67, 121, 45, 121]
    assert len(seen.log_probs) == 4

    longer = replace(pictures[1], token_ids=(120,) * 4)
    ids = (*asked.prompt_ids[:-2], 120, 120, 122, 4)
    with pytest.raises(RolloutError, match="other tokens than the trainer: expected 18, got 16"):
        server.draw(replace(asked, prompt_ids=ids, pictures=(pictures[0], longer)))


def test_an_abort_names_the_request():
    server = Replayed("/abort_request")
    server.abort(["long"])
    assert not server.exchanges


def test_a_push_pauses_loads_flushes_and_goes_on():
    paths = ["/pause_generation", "/update_weights_from_disk", "/flush_cache"]
    server = Replayed(*paths, "/continue_generation", "/model_info")
    assert server.weight_version() == "v5"
    assert server.load(FolderSource(Path("/models/tiny")), "verl-1") == "verl-1"
    refusal = "400 to /update_weights_from_disk: .*Failed to get weights"
    with pytest.raises(RolloutError, match=refusal):
        server.load(FolderSource(Path("/models/absent")), "verl-2")
    assert server.weight_version() == "verl-1"
    assert not server.exchanges, "the server goes on after a push that it refused"
