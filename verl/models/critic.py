"""The critic: the body of a language model and one linear map from hidden states to values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl.models.alibi import set_attention
from verl.models.load import load_model_config, load_transformer, resolve_path
from verl.models.probe import check_packed
from verl.utils.errors import ModelError
from verl.utils.logging import logger

VALUE_HEAD_FILE = "value_head.safetensors"
_HEAD_PREFIX = "value_head."
_BODY_PREFIX = "body."


class CriticModel(nn.Module):
    """`body` (a transformers base model) and `value_head` (any module from (..., H) to (..., 1)).

    Replace the head on an instance, or in the `__init__` of a subclass. All other parameters that a
    subclass trains must be in `value_head` too, because only the body and the head are saved. To
    bound values, end the head in a sigmoid or tanh. A LayerNorm over the single output would make
    it constant, because it subtracts the mean.

    Training computes packed, from `body` and `value_head`. If a subclass overrides `forward`, the
    trainer pads its rows and calls it, which costs the padding.
    """

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        parameter = next(body.parameters())
        head = new_value_head(body.config).to(parameter.device, parameter.dtype)
        self.value_head: nn.Module = head

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str = "float32",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        override_config: dict[str, Any] | None = None,
        max_length: int | None = None,
        check: bool = True,
        weights: bool = True,
    ) -> "CriticModel":
        """Load a critic from a saved critic, a classifier with one label, or a causal LM.

        The value head of a classifier is its `score`: a reward model, or a critic that verl 0.5
        wrote. That of a causal LM is new. The critic is in eval mode and can be called on padded
        rows. The arguments are those of `load_causal_lm`. Raises ModelError with the fix.
        """
        config = load_model_config(
            path, trust_remote_code=trust_remote_code, override_config=override_config
        )
        saved = Path(resolve_path(path)) / VALUE_HEAD_FILE
        auto_class = AutoModel
        if not saved.is_file():
            auto_class = _class_with_head(config)
        model = load_transformer(
            auto_class,
            path,
            config,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            max_length=max_length,
            weights=weights,
        )
        body = model if auto_class is AutoModel else model.base_model
        assert isinstance(body, PreTrainedModel)
        if check:
            check_packed(body)

        critic = cls(body)
        if auto_class is not AutoModel:
            critic._take_score(model, path)
        elif saved.is_file() and "bias" in load_file(saved):
            critic._add_bias()
        critic.value_head.to(body.device, body.dtype)
        known = (_BODY_PREFIX, _HEAD_PREFIX)
        strays = [name for name in critic.state_dict() if not name.startswith(known)]

        if strays:
            raise ModelError(
                f"{cls.__name__} has weights outside of body and value_head, first {strays[:3]}, "
                "which checkpoints do not save. Make them parts of value_head."
            )

        if weights:
            critic.load_value_head(resolve_path(path))
        critic.use_own_attention()
        return critic.eval()

    def _take_score(self, classifier: PreTrainedModel, path: str | Path) -> None:
        """Make the score of a classifier the value head, where this class has no other head."""
        score = getattr(classifier, "score", None)
        if isinstance(score, nn.Linear) and type(self.value_head) is nn.Linear:
            self.value_head = score
            return
        logger.warning(
            "The critic does not use the score of '%s', a %s: its value head is new.",
            path,
            type(classifier).__name__,
        )

    def _add_bias(self) -> None:
        """Give the linear head a bias, as that of a saved critic has one."""
        head = self.value_head
        if type(head) is nn.Linear and head.bias is None:
            self.value_head = nn.Linear(head.in_features, head.out_features)

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel) -> "CriticModel":
        """Make a critic of the body of `model` (shared, not copied) and a new value head."""
        body = model.base_model
        assert isinstance(body, PreTrainedModel)
        return cls(body)

    @property
    def config(self) -> Any:
        """Return the body's configuration."""
        return self.body.config

    @property
    def computes_padded(self) -> bool:
        """Return whether a subclass overrides `forward`."""
        return type(self).forward is not CriticModel.forward

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Compute values (B, T), in fp32 at least, of ids and mask (B, T).

        The mask is 1 at real tokens; None means that all are real. Column t has the expected return
        after token t. Values at padding are undefined.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = self.body(
            input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False
        )
        values = self.value_head(output.last_hidden_state).squeeze(-1)
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def use_own_attention(self) -> None:
        """Switch the body to transformers' own attention, which padded rows need.

        This is sdpa, or eager if sdpa would ignore a soft cap or sinks. `PackedValueModel` switches
        to packed attention.
        """
        cap = getattr(self.config.get_text_config(), "attn_logit_softcapping", None)
        is_capped = cap is not None
        wanted = "sdpa" if self.body._supports_sdpa and not is_capped else "eager"
        if self.body.config._attn_implementation != wanted:
            set_attention(self.body, wanted)

    def save_pretrained(
        self, folder: str | Path, *, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Write the body as a Hugging Face folder, with the value head in a file of its own.

        `from_pretrained` reads both.

        Args:
            state_dict: that of this module, if the caller has gathered the weights from shards.
        """
        state = self.state_dict() if state_dict is None else state_dict
        body: dict[str, Tensor] = {}
        head: dict[str, Tensor] = {}
        for name, value in state.items():
            if name.startswith(_BODY_PREFIX):
                body[name.removeprefix(_BODY_PREFIX)] = value
            elif name.startswith(_HEAD_PREFIX):
                head[name.removeprefix(_HEAD_PREFIX)] = value.contiguous()

        self.body.save_pretrained(folder, state_dict=body)
        save_file(head, Path(folder) / VALUE_HEAD_FILE)

    def load_value_head(self, folder: str | Path) -> bool:
        """Read the value head of a saved critic; return False if the folder has none (a causal LM).

        Raises ModelError if the saved head has other tensors than this one.
        """
        file = Path(folder) / VALUE_HEAD_FILE
        if not file.is_file():
            return False

        saved = load_file(file)
        fault = other_head(file, saved, self.value_head.state_dict())
        if fault is not None:
            raise ModelError(
                f"{fault} load it by the class that has it (critic.model.custom_cls); or set that "
                "head (critic.value_head = ...) and call load_value_head again; or remove the file."
            )

        self.value_head.load_state_dict(saved)
        return True


def other_head(file: Path, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """Say that a saved value head has other tensors than one's own; None if it has the same."""
    found = {name: tuple(value.shape) for name, value in saved.items()}
    expected = {name: tuple(value.shape) for name, value in own.items()}
    if found == expected:
        return None
    return (
        f"Expected a value head {expected} in {file}, found {found}. It was saved with another "
        "head:"
    )


def _class_with_head(config: Any) -> Any:
    """Return the class of transformers that loads a checkpoint with its score of one number.

    For other checkpoints, that is the class that loads the body alone.
    """
    if config.num_labels == 1:
        for name in getattr(config, "architectures", None) or []:
            if name.endswith("ForSequenceClassification"):
                return AutoModelForSequenceClassification
            if name.endswith("ForTokenClassification"):
                return AutoModelForTokenClassification
    return AutoModel


def new_value_head(config: Any) -> nn.Linear:
    """Draw a linear map H -> 1 without bias from N(0, (0.01 / sqrt(H))^2).

    Hidden states of unit size then give values around 0.01. That is near 0, around which returns of
    a new run are centered, but not exactly 0, which would stop the gradient into the body in the
    first step. The draw has its own seed, so that all ranks start equal.
    """
    hidden_size = config.get_text_config().hidden_size
    # OPT-350m and similar models return states of another size than they compute with.
    width = getattr(config, "word_embed_proj_dim", None) or hidden_size
    head = nn.Linear(width, 1, bias=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.weight.copy_(torch.randn(1, width, generator=generator) * (0.01 / width**0.5))
    return head
