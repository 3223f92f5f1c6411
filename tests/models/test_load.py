"""Loading from folders and the hub: settings, rejected models, and errors."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.shared_files import SHARED, needs_shared
from tests.tiny_models import FAMILIES, MORE_FAMILIES, save_tiny, tiny_model, tiny_tokenizer
from verl.models import probe
from verl.models.attention import IMPLEMENTATION, Facts, packed_attention
from verl.models.critic import CriticModel
from verl.models.load import check_vocabulary, load_causal_lm, load_tokenizer, resolve_path
from verl.models.logprobs import Head
from verl.models.packed import PackedBatch, PackedCausalLM
from verl.models.probe import check_packed
from verl.utils.errors import ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
def test_a_float64_model_passes_the_check(family: str) -> None:
    """Allow for transformers' softmax in float32: the difference exceeds float64 rounding."""
    check_packed(tiny_model(family, dtype=torch.float64))


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
def test_every_family_loads_and_passes_the_check(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    model = load_causal_lm(tmp_path, dtype="float32")
    assert model.config._attn_implementation == IMPLEMENTATION
    assert not model.training
    CriticModel.from_pretrained(tmp_path)
    # The state of a rank that receives its weights from another one: everything but the weights.
    empty = load_causal_lm(tmp_path, dtype="float32", weights=False)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert described(empty) == described(model)

    expected = dict(model.named_buffers())
    assert expected.keys() == dict(empty.named_buffers()).keys()
    for name, buffer in empty.named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)
    assert empty.generation_config.to_dict() == model.generation_config.to_dict()
    assert empty.config.to_dict() == model.config.to_dict()


def described(model: torch.nn.Module) -> dict[str, tuple]:
    return {
        name: (value.shape, value.dtype, value.requires_grad)
        for name, value in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_passes_the_check(name: str, folder: Path) -> None:
    model = load_causal_lm(folder, dtype=name)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, name)}


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_all_dropout_is_zeroed(family: str, tmp_path: Path) -> None:
    rates = {
        "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.2},
        "opt": {"dropout": 0.1, "attention_dropout": 0.3},
    }
    save_tiny(tmp_path, family, **rates[family])
    module = PackedCausalLM(load_causal_lm(tmp_path, dtype="float32")).train()
    batch = PackedBatch.from_sequences([[5, 6, 7, 8, 9], [10, 11, 12]])
    assert torch.equal(module(batch)["log_probs"], module(batch)["log_probs"])
    assert all(getattr(module.model.config, name) == 0 for name in rates[family])


def test_override_config_changes_keys_and_names_unknown_ones(folder: Path) -> None:
    changes = {"rope_parameters": {"rope_theta": 50.0}, "max_position_embeddings": 64}
    model = load_causal_lm(folder, dtype="float32", override_config=changes)
    assert model.config.rope_parameters["rope_theta"] == 50.0
    assert model.config.rope_parameters["rope_type"] == "default"
    assert model.config.max_position_embeddings == 64
    with pytest.raises(
        ModelError, match="the shapes of weights do not match its configuration and override_config"
    ):
        load_causal_lm(folder, dtype="float32", override_config={"hidden_size": 7})
    # in a second line of the error
    with pytest.raises(ModelError, match="hidden size .7. is not a multiple"):
        load_causal_lm("toy", dtype="float32", override_config={"hidden_size": 7})
    with pytest.raises(ModelError, match=r"override_config\.rope_thetas.*no such key"):
        load_causal_lm(folder, dtype="float32", override_config={"rope_thetas": 1})


def test_override_config_leaves_out_the_attention_of_transformers(folder: Path, caplog) -> None:
    load_causal_lm(folder, dtype="float32", override_config={"attn_implementation": "eager"})
    assert "attn_implementation=eager has no effect" in caplog.text


def test_override_config_takes_a_dropout_of_zero_that_the_family_lacks(folder: Path) -> None:
    off = {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0}
    load_causal_lm(folder, dtype="float32", override_config=off)
    with pytest.raises(ModelError, match=r"override_config\.embd_pdrop.*no such key"):
        load_causal_lm(folder, dtype="float32", override_config={"embd_pdrop": 0.1})


def test_missing_weights_are_an_error_and_not_random(folder: Path) -> None:
    with pytest.raises(ModelError, match="would be random"):
        load_causal_lm(
            folder, dtype="float32", override_config={"num_hidden_layers": 3, "layer_types": None}
        )


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("tokenizer", "no tokenizer"),
        ("model.safetensors", "no weights"),
        ("config.json", "no configuration.*Copy the missing files there"),
    ],
)
def test_an_incomplete_folder_is_named(
    removed: str, message: str, folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for file in copy.glob(f"{removed}*"):
        file.unlink()
    with pytest.raises(ModelError, match=message):
        load_tokenizer(copy) if removed == "tokenizer" else load_causal_lm(copy, dtype="float32")


@pytest.mark.parametrize("saved", ["sharded/.metadata", "lora_adapter/adapter_config.json"])
@pytest.mark.parametrize(
    "given",
    ["", "global_step_10", "global_step_10/actor", "global_step_10/actor/huggingface"],
)
def test_a_folder_of_a_checkpoint_is_to_be_merged(saved: str, given: str, tmp_path: Path) -> None:
    roles = [tmp_path / f"global_step_{step}" / "actor" for step in (9, 10)]
    for role in roles:
        for name in (saved, "huggingface/config.json"):
            (role / name).parent.mkdir(parents=True, exist_ok=True)
            (role / name).touch()

    command = re.escape(f"verl merge --local_dir {roles[1]} --target_dir merged")
    with pytest.raises(ModelError, match=f"no tokenizer.*{command}"):
        load_tokenizer(tmp_path / given)

    (roles[1] / "huggingface" / "model.safetensors").touch()
    if given.endswith("actor"):
        with pytest.raises(ModelError, match="Give its folder '.*/actor/huggingface'"):
            load_tokenizer(tmp_path / given)


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_folder_of_adapters_is_to_be_merged(
    has_tokenizer: bool, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    if has_tokenizer:
        for file in folder.glob("tokenizer*"):
            shutil.copy(file, tmp_path)
    way_out = r"holds adapters \(LoRA\) and no model.*merge_and_unload.* merged$"
    with pytest.raises(ModelError, match=way_out):
        load_tokenizer(tmp_path)
        load_causal_lm(tmp_path, dtype="float32")


def test_a_folder_of_gguf_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").touch()
    with pytest.raises(ModelError, match="GGUF, a format for inference. Download the model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
    (copy / name).write_text(pointer)
    with pytest.raises(ModelError, match=rf"{name}' is a pointer of Git LFS.* lfs pull"):
        load_tokenizer(copy)
        load_causal_lm(copy, dtype="float32")


def test_a_wrong_type_in_the_configuration_is_named(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"hidden_size": "64"}))
    with pytest.raises(ModelError, match="'hidden_size'.*expected int, got str"):
        load_tokenizer(copy)


@pytest.mark.parametrize("path", ["/no/such/folder", "./none", "a/b/c"])
def test_a_missing_folder_is_named(path: str) -> None:
    for load in (load_tokenizer, lambda path: load_causal_lm(path, dtype="float32")):
        with pytest.raises(ModelError, match="found none"):
            load(path)


def test_the_models_next_to_a_missing_folder_are_named(tmp_path: Path) -> None:
    for name in ("Qwen2.5-1.5B", "Qwen3-4B", "notes"):
        (tmp_path / name).mkdir()
    for name in ("Qwen2.5-1.5B", "Qwen3-4B"):
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"none\. Nearest in {tmp_path}: Qwen2\.5-1\.5B, Q"):
        load_tokenizer(tmp_path / "Qwen2.5-15B")
    with pytest.raises(ModelError, match=r"found none\. Give"):
        load_tokenizer(tmp_path / "notes" / "Qwen3-4B")


def test_a_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="Cannot load the model"):
        load_causal_lm(copy, dtype="float32")


def hub_answer(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the hub answer like for a gated or missing repository.

    transformers wraps that answer in an OSError.
    """

    def refuse(*_: object, **__: object) -> None:
        request = httpx.Request("GET", "https://huggingface.co")
        raise OSError("wrapped") from kind("refused", response=httpx.Response(403, request=request))

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)


def test_errors_on_gated_and_missing_repositories_describe_the_solution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub_answer(GatedRepoError, monkeypatch)
    with pytest.raises(ModelError, match=r"gated.*hf auth login"):
        load_causal_lm("org/gated", dtype="float32")
    hub_answer(RepositoryNotFoundError, monkeypatch)
    with pytest.raises(ModelError, match=r"no such repository.*hf auth login"):
        load_causal_lm("org/none", dtype="float32")


def test_the_error_on_an_unreachable_hub_describes_the_solution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("wrapped") from ConnectionError("no route")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ModelError, match=r"hf download org/some"):
        load_causal_lm("org/some", dtype="float32")


def test_the_toy_model_is_the_packaged_folder() -> None:
    assert resolve_path("toy").replace("\\", "/").endswith("verl/data/toy_model")


def config_folder(folder: Path, family: str, **settings: object) -> Path:
    """Save a folder of a family that must be rejected before its weights are read."""
    AutoConfig.for_model(family, **settings).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"never read")
    return folder


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("falcon", {"alibi": True}, "ALiBi biases twice"),
        ("mamba", {}, "recurrent"),
        ("falcon_mamba", {}, "recurrent"),
        ("jamba", {}, "recurrent"),
        ("rwkv", {}, "recurrent"),
        ("deepseek_v32", {}, "indexer"),
        ("qwen3_next", {}, "linear_attention"),
        ("minimax", {}, "linear_attention"),
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
    ],
)
def test_families_that_cannot_be_packed_are_rejected_by_name(
    family: str, settings: dict, reason: str, tmp_path: Path
) -> None:
    config_folder(tmp_path, family, **settings)
    with pytest.raises(
        ModelError, match=f"'{family}' cannot be trained on packed sequences.*{reason}"
    ):
        load_causal_lm(tmp_path, dtype="float32")


def test_long_rope_is_allowed_up_to_its_original_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    save_tiny(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    load_causal_lm(tmp_path, dtype="float32", max_length=64)
    for length in (65, None):
        with pytest.raises(ModelError, match="longrope.*at most 64 tokens"):
            load_causal_lm(tmp_path, dtype="float32", max_length=length)


def test_families_outside_the_attention_interface_fail_the_check(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gpt_neo",
        vocab_size=64,
        bos_token_id=0,
        eos_token_id=1,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
    )

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="gpt_neo"):
        load_causal_lm(tmp_path, dtype="float32")


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "dropped", [{"window": None}, {"cap": None}, {"sinks": None}, {"scale": 0.3}]
)
def test_the_check_notices_wrong_attention(
    family: str, dropped: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    has = {
        "mistral": {"window", "scale"},
        "gemma2": {"window", "cap", "scale"},
        "gpt_oss": {"window", "sinks", "scale"},
    }
    if not has[family] & dropped.keys():
        check_packed(model)
        return
    read = packed_attention.__globals__["layer_facts"]

    def forgets(*arguments: object) -> Facts:
        return read(*arguments)._replace(**dropped)

    monkeypatch.setitem(packed_attention.__globals__, "layer_facts", forgets)
    with pytest.raises(ModelError, match=f"'{model.config.model_type}' cannot be run packed"):
        check_packed(model)


def test_the_check_notices_a_wrong_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "head_of", lambda _: Head(0.7))
    with pytest.raises(ModelError, match=r"'gemma2' cannot be run packed: its logits"):
        check_packed(tiny_model("gemma2"))


def test_the_check_notices_weights_that_are_not_finite() -> None:
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="in 1 of its tensors, the first is model.norm.weight"):
        check_packed(model)


def test_the_check_notices_finite_weights_with_results_beyond_the_dtype() -> None:
    model = tiny_model("qwen2").half()
    with torch.no_grad():
        model.model.norm.weight.fill_(60000.0)
    with pytest.raises(ModelError, match="not finite in torch.float16, though its weights are"):
        check_packed(model)


def test_the_check_does_not_change_the_model() -> None:
    model = tiny_model("qwen2").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_packed(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tokenizers_pad_on_the_left_and_get_a_pad_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.padding_side == "left"
    assert loaded.pad_token == "<eos>"


def test_a_chat_template_comes_from_a_string_or_a_file(folder: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}!{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    for given in (template, str(file)):
        tokenizer = load_tokenizer(folder, custom_chat_template=given)
        assert (
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
            == "hi!"
        )
    for text in (str(tmp_path / "none.jinja"), "You are a helpful assistant. " * 20):
        with pytest.raises(ModelError, match="neither"):
            load_tokenizer(folder, custom_chat_template=text)


def test_a_chat_template_that_cannot_be_compiled_is_an_error_at_load(folder: Path) -> None:
    """Name the line of a template; one that compiles may refuse any message."""
    template = "{% for message in messages %}\n{{ message['content'] }}{% endfo %}"
    message = "custom_chat_template must be a Jinja template, but its line 2 .*unknown tag 'endfo'"
    with pytest.raises(ModelError, match=message):
        load_tokenizer(folder, custom_chat_template=template)
    load_tokenizer(folder, custom_chat_template="{{ raise_exception('no user') }}")


def test_variables_of_the_chat_template_hold_unless_a_rendering_gives_others(folder: Path) -> None:
    """`data.apply_chat_template_kwargs` changes nothing else of the text."""
    template = (
        "\n{% macro mark() %}{{ 'no ' if not thinking else '' }}think{% endmacro %}"
        "{% for message in messages %}{{ message.content }} {{ mark() }} {{ names }}{% endfor %}"
    )
    variables = {"thinking": False, "names": ["a", 'b"']}
    tokenizer = load_tokenizer(
        folder, custom_chat_template=template, chat_template_kwargs=variables
    )
    plain = load_tokenizer(folder, custom_chat_template=template)

    def text(renders: Any, **given: Any) -> Any:
        messages = [{"role": "user", "content": "hi"}]
        return renders.apply_chat_template(messages, tokenize=False, **given)

    assert text(tokenizer) == text(plain, **variables) == "\nhi no think ['a', 'b\"']"
    assert text(tokenizer, thinking=True) == "\nhi think ['a', 'b\"']"
    for name, fault in (("no-name", "no name of a variable"), ("tokenize", "set by the trainer")):
        with pytest.raises(ModelError, match=f"'{name}' is {fault}"):
            load_tokenizer(folder, custom_chat_template="{}", chat_template_kwargs={name: True})


@pytest.mark.parametrize(
    "value",
    [True, None, -3, 1e-7, 1e300, 'it\'s "{% x %}" }} \n é', [1, [None]], {"a": {"b": ("c", 2)}}],
)
def test_a_variable_of_the_chat_template_keeps_its_value(folder: Path, value: Any) -> None:
    tokenizer = load_tokenizer(
        folder,
        custom_chat_template="{{ own | tojson }} {{ own is none }} {{ own == given }}",
        chat_template_kwargs={"own": value},
    )
    given = json.loads(json.dumps(value))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, given=given)
    assert text == f"{json.dumps(value, ensure_ascii=False)} {value is None} True"


@pytest.mark.parametrize("value", [math.inf, math.nan, {1, 2}, Path("a"), b"a", {"a": [object()]}])
def test_a_variable_without_a_literal_is_refused_by_name(folder: Path, value: Any) -> None:
    with pytest.raises(ModelError, match="apply_chat_template_kwargs: 'own' must be text"):
        load_tokenizer(folder, custom_chat_template="{}", chat_template_kwargs={"own": value})


def test_a_vocabulary_smaller_than_the_tokenizer_is_an_error() -> None:
    check_vocabulary(tiny_model("qwen2"), tiny_tokenizer())
    with pytest.raises(ModelError, match="embeds 64 tokens"):
        check_vocabulary(tiny_model("qwen2", vocab_size=64), tiny_tokenizer())


@needs_shared("models/stories260K")
def test_a_real_pretrained_model_loads() -> None:
    found = SHARED / "models" / "stories260K"
    if not (found / "config.json").exists():
        pytest.skip(
            f"{found.name} is not in Hugging Face format: "
            f"{sorted(file.name for file in found.iterdir())}"
        )
    model = load_causal_lm(found, dtype="float32")
    assert model.config.vocab_size == json.loads((found / "config.json").read_text())["vocab_size"]


@needs_shared("models/qwen2-tokenizer")
def test_a_real_tokenizer_loads() -> None:
    tokenizer = load_tokenizer(SHARED / "models" / "qwen2-tokenizer")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.pad_token_id is not None
    assert tokenizer.decode(tokenizer.encode("a + b")) == "a + b"
