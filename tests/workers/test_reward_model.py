"""The reward model as a worker: the actor's text in its own tokens, and where the scores are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shared_files import SHARED, needs_shared
from tests.tiny_models import tiny_tokenizer
from tests.tiny_reward_models import other_tokenizer, save_reward_model
from verl.config import RewardModelConfig, TrainConfig
from verl.config.keys import keys_of
from verl.data.chat import encode_conversations
from verl.models.load import load_tokenizer
from verl.models.reward_model import RewardModel
from verl.protocol import DataProto
from verl.utils.errors import DataError, OutOfMemoryError, RewardError
from verl.workers import RewardModelWorker
from verl.workers.reward_inputs import compute_reward

CPU = torch.device("cpu")
P = 80
R = 24
ASKED = ("What is 1 + 1?", "Say a", "Name three rivers of Asia")
SAID = ("2.", "aaaa", "Ob, Lena, Amur")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(
        tmp_path_factory.mktemp("rm") / "other", "llama", tokenizer=other_tokenizer()
    )


@pytest.fixture(scope="module")
def same_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("rm") / "same", "llama")


def chats(asked: tuple[str, ...] = ASKED) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in asked]


def trajectories(tokenizer: Any = None, said: tuple[str, ...] = SAID) -> DataProto:
    """Return responses of the actor, in its tokens, each ended by eos."""
    tokenizer = tokenizer or tiny_tokenizer()
    asked = encode_conversations(tokenizer, chats())
    ids = torch.full((len(said), P + R), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)

    for row, (prompt, text) in enumerate(zip(asked, said)):
        answer = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        real = slice(P - len(prompt), P + len(answer))
        ids[row, real], mask[row, real] = torch.tensor(prompt + answer), 1

    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "prompts": ids[:, :P],
        "responses": ids[:, P:],
    }
    names = np.array([f"1-{row}" for row in range(len(said))], dtype=object)
    raw = np.array([*chats(), None], dtype=object)[:-1]

    return DataProto.from_dict(tensors=tensors, non_tensors={"raw_prompt": raw, "uid": names})


def worker(
    folder: Path, *, tokenizer: Any = None, input_tokenizer: str | None = "actor", **keys: Any
) -> Any:
    config = RewardModelConfig(enable=True, **keys)
    config.model.path = str(folder)
    config.model.input_tokenizer = input_tokenizer
    return RewardModelWorker(config, input_tokenizer=tokenizer or tiny_tokenizer(), device=CPU)


def scores_of(role: Any, batch: DataProto) -> torch.Tensor:
    """Return the scores (B,).

    Checks that each is on the last token of its response, and that all other values are 0.
    """
    column = role.compute_rm_score(batch).batch["rm_scores"]
    assert column.shape == batch.batch["responses"].shape
    assert column.dtype == torch.float32
    last = batch.batch["attention_mask"][:, P:].sum(-1) - 1
    picked = column[torch.arange(len(batch)), last]
    assert torch.equal(column.abs().sum(-1), picked.abs())
    return picked


def expected_scores(folder: Path, said: tuple[str, ...] = SAID) -> torch.Tensor:
    """Score by transformers' template and classifier alone, one text at a time."""
    tokenizer = load_tokenizer(folder)
    model = RewardModel.from_pretrained(folder)
    scores = []
    for chat, text in zip(chats(), said):
        messages = [*chat, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        scores.append(model(torch.tensor([ids])).rewards)
    return torch.cat(scores).detach()


def test_the_actors_text_uses_the_reward_models_own_template(folder: Path) -> None:
    found = scores_of(worker(folder), trajectories())
    expected = expected_scores(folder)
    assert expected.std() > 0.5, "too flat to tell a difference"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_without_an_input_tokenizer_equal_tokens_are_passed_on(same_folder: Path) -> None:
    batch = trajectories()
    model = RewardModel.from_pretrained(same_folder)
    with torch.no_grad():
        expected = model(batch.batch["input_ids"], batch.batch["attention_mask"]).rewards
    found = scores_of(worker(same_folder, input_tokenizer=None), batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    # the template ends a turn differently from the actor
    again = scores_of(worker(same_folder), batch)
    assert (again - expected).abs().max() > 1e-2


def test_without_an_input_tokenizer_other_tokens_are_decoded(folder: Path) -> None:
    found = scores_of(worker(folder, input_tokenizer=None), trajectories())
    torch.testing.assert_close(found, expected_scores(folder), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "keys",
    [{"micro_batch_size_per_gpu": 1}, {"forward_max_token_len_per_gpu": 70}],
    ids=["rows", "tokens"],
)
def test_micro_batches_change_nothing(folder: Path, keys: dict[str, Any]) -> None:
    role = worker(folder, **keys)
    calls = []
    role.engine.module.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(
        scores_of(role, trajectories()), expected_scores(folder), atol=1e-5, rtol=0
    )
    assert len(calls) == (3 if "micro_batch_size_per_gpu" in keys else 2)


def test_out_of_memory_names_the_key_of_the_rows(folder: Path) -> None:
    role = worker(folder, use_dynamic_bsz=False, micro_batch_size_per_gpu=3)
    shortage = torch.OutOfMemoryError("CUDA out of memory.")

    def run_out(*_: Any) -> None:
        raise shortage

    role.engine.module.register_forward_pre_hook(run_out)
    role.engine.sizes.guard.can_restart = False  # as on several ranks
    with pytest.raises(OutOfMemoryError, match="Lower (.*) to 1, ") as caught:
        role.compute_rm_score(trajectories())
    assert list(caught.value.lowered) == ["reward_model.micro_batch_size_per_gpu"]
    assert caught.value.lowered.keys() <= keys_of(TrainConfig).keys()


def test_an_overlong_input_is_an_error_unless_it_may_be_truncated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "verl.workers.reward_inputs.say_once", lambda text, level: said.append(text)
    )
    with pytest.raises(
        RewardError, match=r"row 2 \(uid 1-2\) has \d+ tokens.*takes 40; 1 of 3.*truncation=left"
    ):
        worker(folder, max_length=40).compute_rm_score(trajectories())
    cut = scores_of(worker(folder, max_length=40, truncation="left"), trajectories())
    expected = expected_scores(folder)
    torch.testing.assert_close(cut[:2], expected[:2], atol=1e-5, rtol=0)
    assert (cut[2] - expected[2]).abs() > 1e-2
    assert said == [
        "Inputs of more than 40 tokens are cut for the reward model, as "
        "reward_model.truncation=left asks."
    ]


def test_the_models_own_positions_are_a_limit(folder: Path) -> None:
    model = RewardModel.from_pretrained(folder)
    with pytest.raises(RewardError, match=r"response 1 has \d+ tokens .* takes 256; 1 of 2"):
        compute_reward(model, ["short", "long" * 80])


def test_an_empty_response_and_a_score_that_is_not_finite_are_named(folder: Path) -> None:
    batch = trajectories()
    batch.batch["attention_mask"][1, P:] = 0
    role = worker(folder)
    with pytest.raises(RewardError, match=r"row 1 \(uid 1-1\) has no token"):
        role.compute_rm_score(batch)
    odd = other_tokenizer().convert_tokens_to_ids("3")
    with torch.no_grad():
        role.engine.hf_model.get_input_embeddings().weight[odd] = torch.nan
    with pytest.raises(RewardError, match=r"row 2 \(uid 1-2\), which ends '.*3.*', the score nan"):
        role.compute_rm_score(trajectories(said=(*SAID[:2], "123")))


def test_a_batch_without_messages_reports_the_missing_setting(folder: Path) -> None:
    batch = trajectories()
    del batch.non_tensor_batch["raw_prompt"]
    with pytest.raises(DataError, match=r"raw_prompt.*\['uid'\].*input_tokenizer=null"):
        worker(folder).compute_rm_score(batch)


@needs_shared("models/qwen2-tokenizer")
@needs_shared("models/minimind-tokenizer")
def test_one_published_tokenizer_is_translated_into_another(tmp_path: Path) -> None:
    source, target = (
        load_tokenizer(SHARED / "models" / f"{name}-tokenizer") for name in ("qwen2", "minimind")
    )
    said = ("Zwei — 二.", "a\n\n  b", "Ob, Lena, Amur")
    folder = save_reward_model(tmp_path, tokenizer=target, vocab_size=len(target))
    found = scores_of(worker(folder, tokenizer=source), trajectories(source, said))
    torch.testing.assert_close(found, expected_scores(folder, said), atol=1e-4, rtol=1e-5)


# ---------------------------------------------------------------- compute_reward


def test_texts_with_prompts_are_scored_like_the_actors(folder: Path) -> None:
    model = RewardModel.from_pretrained(folder)
    expected = expected_scores(folder)
    for prompts in (list(ASKED), chats()):
        found = compute_reward(model, list(SAID), prompts=prompts)
        assert found.shape == (3,)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    ids = [torch.tensor(model.tokenizer(text)["input_ids"]) for text in SAID]
    torch.testing.assert_close(
        compute_reward(model, ids, prompts=list(ASKED)), expected, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no system') }}"])
def test_a_missing_or_refusing_template_names_the_reward_models_own_file(
    folder: Path, caplog: pytest.LogCaptureFixture, template: str | None
) -> None:
    """No key of the configuration sets the template of a reward model."""
    model = RewardModel.from_pretrained(folder)
    model.tokenizer.chat_template = template
    with caplog.at_level("INFO", logger="verl"):
        try:
            compute_reward(model, list(SAID), prompts=list(ASKED))
            said = caplog.text
        except DataError as error:
            said = str(error)
    assert "et `chat_template` in the reward model's tokenizer_config.json" in said
    assert "data.custom_chat_template" not in said


def test_ids_are_scored_unchanged_and_padding_does_not_count(folder: Path) -> None:
    model = RewardModel.from_pretrained(folder)
    rows = [[7, 9, 11], [30, 31], [50]]
    expected = model.score(rows)
    assert torch.equal(compute_reward(model, [torch.tensor(row) for row in rows]), expected)
    padded = torch.tensor([[7, 9, 11], [0, 30, 31], [50, 0, 0]])
    assert torch.equal(compute_reward(model, padded), expected)
    assert torch.equal(compute_reward(model, padded.numpy()), expected)
    assert torch.equal(compute_reward(model, [np.array(row) for row in rows]), expected)
    assert torch.equal(compute_reward(model, [list(np.array(row)) for row in rows]), expected)
    after = compute_reward(model, [[11], [31]], prompts=[[7, 9], [30]])
    torch.testing.assert_close(after, expected[:2], atol=1e-5, rtol=0)


def test_texts_alone_are_turns_of_the_assistant(folder: Path) -> None:
    model = RewardModel.from_pretrained(folder)
    ids = model.tokenizer("[assistant] Yes<eos>")["input_ids"]
    torch.testing.assert_close(
        compute_reward(model, ["Yes"]), model.score([ids]), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    ("responses", "prompts", "error", "message"),
    [
        ("one text", None, DataError, "needs a list of responses"),
        ([], None, DataError, "needs a list of responses"),
        (None, None, DataError, "needs a list of responses .* got None"),
        (torch.tensor([1, 2]), None, DataError, r"needs a list.*got \(2,\)"),
        (["a", ""], None, RewardError, "Response 1 is empty"),
        (["a", None], None, RewardError, "Response 1 is missing"),
        (["a", chats()[0]], None, RewardError, "Response 1 must be a text or token ids.*role"),
        ([[5], []], None, RewardError, "Response 1 is empty"),
        (torch.tensor([[5, 6], [0, 0]]), None, RewardError, "Response 1 is empty"),
        (torch.tensor([[0.5, 0.5]]), None, RewardError, "Response 0 must be a text or token ids"),
        (torch.tensor([[True, True]]), None, RewardError, "token ids .T,., got .True, True"),
        (
            [[5], [6, 151_643]],
            None,
            RewardError,
            "Response 1 has the token ids 6 to 151643.*has 101.*another tokenizer",
        ),
        (["a", "b"], ["q"], DataError, "one for each of 2 responses, got 1"),
        (["a"], [[5, 6]], DataError, "Prompt 0 is given in token ids and response 0 as a text"),
        ([[5], [6]], [None, torch.tensor([7, 8])], RewardError, "Prompt 0 is missing"),
        ([[5], [6]], [chats()[0], [7, 8]], RewardError, "Prompt 0 must be a text or token ids"),
        ([[5], [6]], torch.tensor([7, 8]), RewardError, "Prompt 0 must be a text or token ids"),
        (["a"], [{"role": "user"}], DataError, "got the messages of one. Give a list of chats"),
    ],
)
def test_inputs_that_cannot_be_scored_are_named(
    folder: Path, responses: Any, prompts: Any, error: type[Exception], message: str
) -> None:
    model = RewardModel.from_pretrained(folder, check=False)
    with pytest.raises(error, match=message):
        compute_reward(model, responses, prompts)
