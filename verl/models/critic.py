"""The critic: the body of a language model and one linear map from hidden states to values."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.utils.errors import ModelError

VALUE_HEAD_FILE = "value_head.safetensors"
_HEAD_PREFIX = "value_head."
_BODY_PREFIX = "body."


class CriticModel(nn.Module):
    """`body` (a transformers base model) and `value_head` (any module from (..., H) to (..., 1); replace it freely)."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        parameter = next(body.parameters())
        self.value_head = new_value_head(body.config).to(parameter.device, parameter.dtype)

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel) -> "CriticModel":
        """The body of `model` (shared, not copied) under a new value head."""
        body = model.base_model
        assert isinstance(body, PreTrainedModel)
        return cls(body)

    @property
    def config(self) -> Any:
        """The body's configuration."""
        return self.body.config

    def save_pretrained(self, folder: str | Path, *, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the body as a Hugging Face folder and the value head beside it, as `load_critic` reads them.

        `state_dict` is that of this module, where the caller holds the weights elsewhere (gathered from shards).
        """
        state = self.state_dict() if state_dict is None else state_dict
        body = {
            name.removeprefix(_BODY_PREFIX): value for name, value in state.items() if name.startswith(_BODY_PREFIX)
        }
        head = {
            name.removeprefix(_HEAD_PREFIX): value for name, value in state.items() if name.startswith(_HEAD_PREFIX)
        }
        self.body.save_pretrained(folder, state_dict=body)
        save_file({name: value.contiguous() for name, value in head.items()}, Path(folder) / VALUE_HEAD_FILE)

    def load_value_head(self, folder: str | Path) -> bool:
        """Read the value head of a saved critic; False where the folder has none (a causal LM)."""
        file = Path(folder) / VALUE_HEAD_FILE
        if not file.is_file():
            return False
        saved = load_file(file)
        present = {name: tuple(value.shape) for name, value in saved.items()}
        expected = {name: tuple(value.shape) for name, value in self.value_head.state_dict().items()}
        if present != expected:
            raise ModelError(
                f"Expected a value head {expected} in {file}, found {present}. It was saved with another head: put "
                "that head in place (critic.value_head = ...) and call load_value_head again, or remove the file."
            )
        self.value_head.load_state_dict(saved)
        return True


def new_value_head(config: Any) -> nn.Linear:
    """A linear map H -> 1 without bias, drawn from N(0, (0.01 / sqrt(H))^2).

    Hidden states of unit size then give values around 0.01: near 0, where returns of a fresh run are centred, and not
    exactly 0, which would stop the gradient into the body at the first step. The draw has its own seed, so that all
    ranks start alike whatever they have drawn before.
    """
    hidden_size = config.get_text_config().hidden_size
    # OPT-350m and its like hand over states of another size than they compute with.
    width = getattr(config, "word_embed_proj_dim", None) or hidden_size
    head = nn.Linear(width, 1, bias=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.weight.copy_(torch.randn(1, width, generator=generator) * (0.01 / width**0.5))
    return head
