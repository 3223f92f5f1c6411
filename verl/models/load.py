"""Load tokenizers and models from a folder or the hub."""

import functools
import importlib
import inspect
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub
from jinja2 import TemplateError, TemplateSyntaxError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from verl.models.attention import IMPLEMENTATION, prepare
from verl.models.families import override, refuse_unpackable, zero_dropout, zero_module_dropout
from verl.models.load_errors import explained, need_files, need_hub
from verl.models.logprobs import head_of
from verl.models.probe import check_packed
from verl.models.role_folders import WEIGHT_FILES
from verl.models.vision import attention_settings, family_of, reads_pictures
from verl.utils.cache import cache_folder
from verl.utils.errors import ModelError
from verl.utils.logging import say_once
from verl.utils.registry import nearest_names

TOY = "toy"
_DATA = Path(__file__).parents[1] / "data"
_PACKAGED = {TOY: _DATA / "toy_model", "calculator": _DATA / "calculator" / "model"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.model",
)
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}


def resolve_path(path: str | Path) -> str:
    """Return a model path for transformers.

    `toy`, `calculator` and `shapes` are the packaged models, a local folder becomes absolute, and
    any other text is a hub id.
    Raises ModelError for a text that looks like a folder and is none.
    """
    text = str(path)
    if text == "shapes":
        # pillow, which it imports, is not a dependency of models of text
        made = importlib.import_module("verl.models.shapes_model")
        return str(made.shapes_folder(cache_folder()))
    if text in _PACKAGED:
        return str(_PACKAGED[text])
    folder = Path(text).expanduser()
    if folder.is_dir():
        return str(folder.resolve())

    looks_local = folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1
    if looks_local or folder.exists():
        found = "a file" if folder.exists() else "none"
        raise ModelError(
            f"Expected a model folder at '{text}', found {found}.{_models_near(folder)} Give a "
            "folder in Hugging Face format, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or 'toy'."
        )
    return text


def _models_near(folder: Path) -> str:
    """Return a sentence that names the models next to a missing folder; "" if there are none."""
    names = [file.parent.name for file in folder.parent.glob("*/config.json")]
    return f" Nearest in {folder.parent}: {nearest_names(folder.name, names)}." if names else ""


def load_tokenizer(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. It pads on the left, with a pad token (logged if chosen here).

    Args:
        path: path of the model, see `resolve_path`.
        trust_remote_code: whether code in the folder may run.
        custom_chat_template: a Jinja template, or the path of a file with one.
        chat_template_kwargs: variables that every rendering of the template gets, unless it is
            given others, such as `enable_thinking`.

    Raises:
        ModelError: it cannot be loaded; the message has the fix.
    """
    source = resolve_path(path)
    need_files(source, _TOKENIZER_FILES, "tokenizer", "tokenizer.json and tokenizer_config.json")
    need_hub(source, "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, padding_side="left"
        )
    except (OSError, ValueError, ImportError, KeyError, hub.StrictDataclassError) as error:
        raise explained(source, "tokenizer", error) from error
    _ensure_pad_token(tokenizer, source)
    if custom_chat_template is not None:
        tokenizer.chat_template = _template_text(custom_chat_template)
        _require_jinja(tokenizer)
    if chat_template_kwargs:
        tokenizer.chat_template = _with_defaults(tokenizer.chat_template, chat_template_kwargs)
    return tokenizer


def load_causal_lm(
    path: str | Path,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    max_length: int | None = None,
    check: bool = True,
    weights: bool = True,
) -> PreTrainedModel:
    """Load a causal LM in eval mode, with dropout zeroed and attention packed.

    Args:
        path: path of the model, see `resolve_path`.
        dtype: dtype of the parameters.
        device: device of the parameters.
        trust_remote_code: whether code in the folder may run.
        override_config: keys of the configuration to change before loading.
        max_length: the longest sequence, for families with positions that depend on it.
        check: whether to compare packed with separate sequences, see `check_packed`.
        weights: if False, parameters are on the meta device, without values, and get the first
            rank's values when the module is sharded.

    Raises:
        ModelError: it cannot be loaded or run packed; the message has the fix.
    """
    config = load_model_config(
        path, trust_remote_code=trust_remote_code, override_config=override_config
    )
    model = load_transformer(
        AutoModelForCausalLM,
        path,
        config,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        max_length=max_length,
        weights=weights,
    )
    head_of(model)
    if check:
        check_packed(model)
    return model


def causal_lm_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that loads a language model, with or without pictures."""
    if not reads_pictures(config):
        return AutoModelForCausalLM
    family_of(config)
    return AutoModelForImageTextToText


def load_model_config(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> PreTrainedConfig:
    """Load a configuration as `load_causal_lm` does."""
    source = resolve_path(path)
    need_files(source, ("config.json",), "configuration", "config.json")
    need_hub(source, "configuration")
    return _load_config(source, trust_remote_code, override_config or {})


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the tokenizer has ids without an embedding in the model."""
    rows: int = model.get_input_embeddings().weight.shape[0]  # pyright: ignore
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise ModelError(
            f"The model embeds {rows} tokens, but its tokenizer has ids up to {largest}. Use the "
            "tokenizer that belongs to the model, or resize the model's embeddings and save it "
            "first."
        )


def load_transformer(
    auto_class: Any,
    path: str | Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    trust_remote_code: bool,
    max_length: int | None,
    weights: bool,
) -> PreTrainedModel:
    """Load a folder by `auto_class` of transformers, as `load_causal_lm` does, without a check.

    `config` is that of `load_model_config`.
    """
    source = resolve_path(path)
    need_files(source, WEIGHT_FILES, "weights", "model.safetensors")
    refuse_unpackable(config, max_length)
    kind = {
        "dtype": torch_dtype(dtype),
        "trust_remote_code": trust_remote_code,
        "attn_implementation": attention_settings(config, IMPLEMENTATION),
    }
    chosen = causal_lm_class(config) if auto_class is AutoModelForCausalLM else auto_class

    model: Any
    missing: list[str] = []
    try:
        with quiet_transformers():
            if weights:
                model, info = chosen.from_pretrained(
                    source, config=config, output_loading_info=True, **kind
                )
                missing = sorted(info["missing_keys"])
            else:
                model = _without_weights(chosen, source, config, kind)
    except (OSError, ValueError, ImportError, RuntimeError, KeyError, SafetensorError) as error:
        if IMPLEMENTATION in str(error):
            raise ModelError(
                f"The model family '{config.model_type}' cannot be run packed: it does not use "
                "transformers' attention interface. Choose a family that does (Llama, Qwen, "
                "Mistral, Gemma, Phi, GPT-2, OPT and similar families)."
            ) from error
        raise explained(source, f"model of family '{config.model_type}'", error) from error

    if missing:
        raise ModelError(
            f"The weights in '{source}' lack {len(missing)} tensors of family "
            f"'{config.model_type}', first {missing[:3]}; they would be random. Give the folder of "
            "a complete model, or undo override_config."
        )

    zero_module_dropout(model)
    if weights:
        model.to(device)
    prepare(model)
    return model.eval()


def _without_weights(
    auto_class: Any, source: str, config: PreTrainedConfig, kind: dict[str, Any]
) -> PreTrainedModel:
    """Make a model with parameters on the meta device.

    Buffers are computed, because checkpoints do not have all of them.
    """
    from accelerate import init_empty_weights  # not at the top: it takes a second to import

    with init_empty_weights(include_buffers=False):
        model = auto_class.from_config(config, **kind)
    model.tie_weights()  # `init_empty_weights` has untied them
    if model.can_generate():
        with suppress(OSError):  # without the file, the model has the values of its configuration
            model.generation_config = GenerationConfig.from_pretrained(source)
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars and the table of unexpected tensors while loading or saving.

    A critic's folder may have a language-model head. Missing tensors are an error elsewhere.
    """
    verbosity = hf_logging.get_verbosity()
    bar = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bar:
            hf_logging.enable_progress_bar()


def _load_config(source: str, trust_remote_code: bool, changes: dict[str, Any]) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        if changes:
            override(config, changes)
            # Build it again, so that derived values follow; null derives a value again
            # (layer_types).
            config = type(config).from_dict(config.to_dict())
    except (OSError, ValueError, KeyError, TypeError, hub.StrictDataclassError) as error:
        if isinstance(error, ModelError):
            raise
        raise explained(source, "configuration", error) from error
    zero_dropout(config)
    return config


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a name in the configuration. Raises ModelError for an unknown name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"Unknown dtype '{dtype}'. Known: {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def _ensure_pad_token(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    if tokenizer.pad_token_id is not None:
        return
    chosen = tokenizer.eos_token or tokenizer.unk_token
    if chosen is None:
        raise ModelError(
            f"The tokenizer in '{source}' has no pad, end-of-sequence or unknown token. Set one in "
            "its tokenizer_config.json."
        )
    tokenizer.pad_token = chosen
    say_once(
        f"The tokenizer in '{source}' has no pad token; padding with '{chosen}' (the model never "
        "sees padding)."
    )


def _template_text(template: str) -> str:
    """Return a template: the text itself if it has Jinja braces, else the contents of that file."""
    if "{" in template:
        return template
    file = Path(template).expanduser()
    # Path.is_file raises for a text that is too long for a name.
    if not os.path.isfile(file):
        raise ModelError(
            "custom_chat_template is neither a Jinja template (no braces in it) nor a file: "
            f"'{template}'. Give the path of a file, or the template itself."
        )
    return file.read_text(encoding="utf-8")


def _require_jinja(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the chat template cannot be compiled, before a row of data is read."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ModelError(
            "data.custom_chat_template must be a Jinja template, but its line "
            f"{error.lineno} cannot be compiled: {error.message} Correct the template."
        ) from error
    except (TemplateError, TypeError):
        # It compiles, and refuses this message. Rows of the data may have others.
        return


def _with_defaults(template: Any, variables: Mapping[str, Any]) -> str:
    """Return a template that sets variables which a rendering does not give.

    They are part of the text, so that data, agents and a copy of the tokenizer render alike.
    """
    if not isinstance(template, str):
        raise ModelError(
            "data.apply_chat_template_kwargs needs a tokenizer with one chat template, got "
            f"{type(template).__name__}. Set data.custom_chat_template to one."
        )
    defaults = []
    for name, value in variables.items():
        if not name.isidentifier():
            raise ModelError(
                f"data.apply_chat_template_kwargs: '{name}' is no name of a variable. Correct it."
            )
        if name in _of_rendering():
            raise ModelError(
                f"data.apply_chat_template_kwargs: '{name}' is set by the trainer, and no variable "
                "of the template. Leave it out."
            )
        literal = _jinja_literal(value, name)
        # The plus sign keeps a line break behind it, which transformers would take out.
        defaults.append(
            f"{{% if {name} is not defined %}}{{% set {name} = {literal} %}}{{% endif +%}}"
        )
    return "".join(defaults) + template


@functools.cache
def _of_rendering() -> frozenset[str]:
    """Return the names of what the caller of a template decides, such as add_generation_prompt."""
    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def _jinja_literal(value: Any, name: str) -> str:
    """Return how Jinja writes a value. Raises ModelError for one that has no literal."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_jinja_literal(each, name) for each in value) + "]"
    if isinstance(value, Mapping):
        pairs = [
            f"{_jinja_literal(key, name)}: {_jinja_literal(each, name)}"
            for key, each in value.items()
        ]
        return "{" + ", ".join(pairs) + "}"

    is_plain = value is None or type(value) in (str, bool, int, float)
    if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
        raise ModelError(
            f"data.apply_chat_template_kwargs: '{name}' must be text, a finite number, true, false "
            f"or null, or lists and mappings of these, got {value!r} of type "
            f"{type(value).__name__}. Write it as text."
        )
    return repr(value)
