"""Multi-head latent attention and ALiBi biases on CUDA: training with the kernels for packed
sequences, rollouts with the hf engine, and rejection by the embedded one."""

import pytest
import torch

from tests.models.rows import RESPONSE_LENGTH, eager_log_probs, padded_rows
from tests.rollout.engines import PROMPTS, make_engine, run, talkative_model, transformers_greedy
from tests.tiny_models import ALIBI_FAMILIES, LATENT_FAMILIES, tiny_model
from verl.models import attention
from verl.models.packed import PackedBatch, PackedCausalLM
from verl.utils.errors import ConfigError

pytestmark = pytest.mark.gpu

# A head size that the kernels support: multiples of 8, values narrower than keys.
KERNEL_SIZES = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def batch() -> PackedBatch:
    return PackedBatch.from_rows(*padded_rows(), RESPONSE_LENGTH).to("cuda")


@pytest.mark.parametrize("family", [*LATENT_FAMILIES, *ALIBI_FAMILIES])
def test_packed_log_probs_equal_eager_ones(family):
    module = PackedCausalLM(tiny_model(family).cuda())
    with torch.no_grad():
        ours = module(batch())["log_probs"].cpu()
    torch.testing.assert_close(ours, eager_log_probs(family)[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["minicpm3", "deepseek_v3"])
def test_bf16_uses_the_kernel_and_is_near_fp32(family, monkeypatch):
    calls = []
    kernel = attention._varlen_attention

    def counted(*arguments):
        calls.append(arguments[2].shape[-1])
        return kernel(*arguments)

    monkeypatch.setattr(attention, "_varlen_attention", counted)
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = tiny_model(family, dtype=torch.bfloat16, **KERNEL_SIZES).to(dtype).cuda()
        module = PackedCausalLM(model)
        out = module(batch())["log_probs"]
        out.mean().backward()
        gradient = model.get_submodule("model.layers.0.self_attn.kv_b_proj").weight.grad
        assert gradient is not None
        assert gradient.isfinite().all()
        results[dtype] = out.detach().float()
    assert calls == [24, 24], "two layers in bf16, values as wide as keys"
    errors = (results[torch.bfloat16] - results[torch.float32]).abs()
    assert errors.median() < 0.5


@pytest.mark.parametrize("family", [*LATENT_FAMILIES, *ALIBI_FAMILIES])
def test_rollouts_use_the_hf_engine(family):
    model = talkative_model(family).cuda()
    with pytest.raises(ConfigError, match=f"On CUDA .*'{family}'. Set it to hf"):
        make_engine(model, device="cuda")
    engine = make_engine(model, "hf", device="cuda", dtype="float32")
    greedy = run(engine, PROMPTS, temperature=0, max_new_tokens=20)
    for completion, prompt in zip(greedy, PROMPTS, strict=True):
        assert completion.token_ids == transformers_greedy(model, prompt, 20)
