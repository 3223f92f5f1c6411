"""Copy a Llama with small attention heads into one with heads of 32, which computes the same.

vLLM on a CPU has no kernel for heads of less than 32. The new dimensions are zeros. A frequency of
the rotary embedding depends on its dimension's place in the head alone, as a share of it: places
are kept. Scores are divided by the root of the head's size: heads four times as large get queries
twice as large, which changes no bit of the scores.

Run `python bench/widen_heads.py FROM TO`.
"""

import argparse
import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

WIDE = 32


def widen_heads(model: LlamaForCausalLM, wide: int = WIDE) -> LlamaForCausalLM:
    """Return a model with heads of size `wide` that computes the same logits.

    Raises SystemExit unless heads become 1, 4 or 16 times as large.
    """
    config: Any = copy.deepcopy(model.config)
    small = config.head_dim
    ratio, rest = divmod(wide, small)
    if rest or ratio not in (1, 4, 16):
        raise SystemExit(
            f"widen_heads.py: heads become 1, 4 or 16 times as large, got {small} and {wide}."
        )
    config.head_dim = wide
    half = torch.arange(small // 2) * ratio
    places = torch.cat([half, half + wide // 2])

    def widen(rows: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        heads = rows.unflatten(0, (-1, small))
        out = heads.new_zeros(heads.shape[0], wide, *heads.shape[2:])
        out[:, places] = heads * factor
        return out.flatten(0, 1)

    weights = model.state_dict()
    for name, weight in weights.items():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            weights[name] = widen(weight, ratio**0.5 if "q_proj" in name else 1.0)
        elif name.endswith("o_proj.weight"):
            weights[name] = widen(weight.t()).t()
    other = LlamaForCausalLM(config)
    other.load_state_dict(weights)
    return other


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="folder of the model")
    parser.add_argument("target", help="folder to write to")
    given = parser.parse_args()

    model: Any = AutoModelForCausalLM.from_pretrained(given.source)
    widen_heads(model).save_pretrained(given.target)
    AutoTokenizer.from_pretrained(given.source).save_pretrained(given.target)


if __name__ == "__main__":
    main()
