"""Tiny random models of every family, with large weights so that a parity test on them can fail.

A freshly initialized tiny model is nearly flat: its attention is uniform, so a dropped window, cap
or mask changes nothing that a tolerance would notice. Here weights are scaled up (logits deviate by
3 or more before any final cap, attention is sharp), attention caps are 1, the final cap is 3, and
windows are 8 tokens: use sequences of more than 32.
"""

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 128
WINDOW = 8
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
}
_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GEMMA_LIKE: dict[str, Any] = {
    **_LLAMA_LIKE,
    "head_dim": 8,
    "query_pre_attn_scalar": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Keys and values are read from a latent of 12 numbers and a rotary key of 4 per token.
_LATENT: dict[str, Any] = {
    **_LLAMA_LIKE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
_GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# Softmax scale and rotary angles both follow from `mscale`.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 24,  # like opt-350m: a projection between body and head
        "dropout": 0.0,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "scale_attn_by_inverse_layer_idx": True,  # so that the default 1/sqrt(D) would be wrong
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "qwen2": {**_LLAMA_LIKE},
    "qwen3": {**_LLAMA_LIKE, "head_dim": 12},
    "llama": {
        **_LLAMA_LIKE,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "mistral": {**_LLAMA_LIKE, "sliding_window": WINDOW},
    "gemma2": {**_GEMMA_LIKE, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0},
    "gemma3": {**_GEMMA_LIKE},
    "phi3": {**_LLAMA_LIKE},
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        **_LLAMA_LIKE,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    # Not in the list of supported families, but with unusual processing of logits.
    "cohere": {**_LLAMA_LIKE, "logit_scale": 0.7},
    "granite": {
        **_LLAMA_LIKE,
        "logits_scaling": 1.5,
        "attention_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.8,
    },
    "phi": {**_LLAMA_LIKE, "partial_rotary_factor": 0.5},
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    # Unlike MiniMax, all of its layers have softmax attention.
    "minimax_m2": {
        **_LLAMA_LIKE,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    # Multi-head latent attention.
    "deepseek_v2": {
        **_LATENT,
        **_GROUPED_EXPERTS,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0,
    },
    "deepseek_v3": {**_LATENT, **_GROUPED_EXPERTS, "rope_parameters": _YARN},
    "minicpm3": {**_LATENT, "dim_model_base": 24, "scale_emb": 2.0},
    "glm4_moe_lite": {**_LATENT, **_GROUPED_EXPERTS},
    # ALiBi biases. Six heads: the last two slopes are between the powers.
    "bloom": {"hidden_size": 36, "n_layer": 2, "n_head": 6},
    "mpt": {
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 256,
        "attn_config": {"clip_qkv": 4.0, "softmax_scale": 0.5},
    },
}
_MODEL_TYPES = {"gemma3": "gemma3_text"}
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite")
ALIBI_FAMILIES = ("bloom", "mpt")
MORE_FAMILIES = (
    *("cohere", "granite", "phi", "gpt_neox", "minimax_m2"),
    *LATENT_FAMILIES,
    *ALIBI_FAMILIES,
)
FAMILIES = tuple(family for family in _CONFIGS if family not in MORE_FAMILIES)
# The deterministic engine does not support latents and ALiBi biases.
DETERMINISTIC_FAMILIES = tuple(
    family for family in _CONFIGS if family not in LATENT_FAMILIES + ALIBI_FAMILIES
)


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **config_overrides: Any
) -> PreTrainedModel:
    """Return a tiny causal LM of `family`, in eval mode with eager attention.

    Equal arguments give equal weights. The weights are drawn in float64 before the cast, so models
    of different dtype differ only by rounding.
    """
    settings = {**_COMMON, **_CONFIGS[family], **config_overrides}
    config = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, attn_implementation="eager"
        )
        if any(name.endswith("experts") for name, _ in model.named_modules()):
            model.set_experts_implementation("eager")  # grouped products do not support float64
        make_fierce(model)
    model.to(dtype)  # pyright: ignore[reportArgumentType]
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character (printable ASCII and newline) and a chat
    template; 101 of the 128 ids are used."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    tokens = [*SPECIAL_TOKENS, *characters]
    backend = Tokenizer(
        WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="?")
    )
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )

    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny(folder: Path, family: str = "qwen2", **arguments: Any) -> Path:
    """Save a Hugging Face folder with a tiny model and the tiny tokenizer, for `load_causal_lm`."""
    tiny_model(family, **arguments).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make_fierce(model: PreTrainedModel) -> None:
    """Redraw every matrix at a gain well above 1 and perturb every vector, under the caller's
    seed."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)

    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim < 2:
                parameter.add_(0.3 * noise)
            elif id(parameter) in embeddings:
                parameter.copy_(noise)
            else:
                gain = 6.0 if parameter is head.weight else 1.5
                parameter.copy_(noise * gain / math.sqrt(min(parameter.shape[-2:])))
