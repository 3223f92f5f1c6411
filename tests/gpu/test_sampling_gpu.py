"""The compiled draw at the size of a real vocabulary, against fp64 and against
`verl.rollout.sampling.sample`."""

from typing import Any

import numpy as np
import pytest
import torch

from verl.rollout.sampling import noise_integers, row_keys, sample, sample_keys
from verl.rollout.types import SamplingParams

pytestmark = pytest.mark.gpu

VOCABULARY = 151_936
ROWS = 48


def make_logits(
    dtype: torch.dtype, *, rows: int = ROWS, vocabulary: int = VOCABULARY
) -> torch.Tensor:
    """Return logits in thirds: nearly flat, like a language model's, and sharp; a view with a
    larger stride."""
    generator = torch.Generator("cuda").manual_seed(0)
    spread = torch.tensor([0.5, 2.5, 6.0], device="cuda").repeat_interleave((rows + 2) // 3)[
        :rows, None
    ]
    wide = torch.randn(rows, vocabulary + 64, device="cuda", generator=generator) * spread
    return wide.to(dtype)[:, :vocabulary]


class Draw:
    """State for `rows` samples at separate positions, and the draw on it."""

    def __init__(self, rows: int, vocabulary: int, params: SamplingParams) -> None:
        from verl.rollout.embedded.kernels.sampling import DrawState, Workspace

        self.params = params
        self.keys = sample_keys(5, 9, np.arange(rows))
        self.positions = np.arange(rows) * 37
        slots = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
        keys = torch.empty(rows, dtype=torch.int64)
        drawn = torch.empty(rows, dtype=torch.int32)
        keys[slots] = torch.from_numpy(self.keys.view(np.int64))
        drawn[slots] = torch.from_numpy(self.positions.astype(np.int32))
        self.state = DrawState(
            slots=slots.int().cuda(),
            keys=keys.cuda(),
            drawn=drawn.cuda(),
            settings=settings_of(params),
            tokens=torch.full((rows,), -1, device="cuda"),
            log_probs=torch.full((rows,), 7.0, device="cuda"),
        )
        self.workspace = Workspace(rows, vocabulary, torch.device("cuda"))

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from verl.rollout.embedded.kernels.sampling import draw

        params = self.params
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        draw(logits, self.state, self.workspace, filtered=filtered, greedy=params.temperature == 0)
        return self.state.tokens, self.state.log_probs

    @property
    def noise_keys(self) -> torch.Tensor:
        return torch.from_numpy(row_keys(self.keys, self.positions)).cuda()


def settings_of(params: SamplingParams) -> torch.Tensor:
    return torch.tensor(
        [params.temperature, params.top_p, params.min_p, float(params.top_k)], device="cuda"
    )


def params_of(**settings: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"temperature": 0},
        {"top_k": 1},
        {"top_k": 50},
        {"top_p": 0.95},
        {"top_p": 0.3},
        {"min_p": 0.05},
        {"top_k": 1000, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    ],
)
def test_the_draw_is_the_best_score_among_the_tokens_kept(dtype, settings):
    params = params_of(**settings)
    logits = make_logits(dtype)
    one = Draw(ROWS, VOCABULARY, params)
    tokens, log_probs = one(logits)
    scaled = logits.double() / (params.temperature or 1.0)
    exact_log_probs = scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), exact_log_probs, rtol=1e-6, atol=1e-5)

    if params.temperature == 0:
        assert torch.equal(tokens, logits.float().cpu().argmax(-1).cuda())
        return

    if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
        weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
        kept = (logits.float() >= one.workspace.rows[:, 2:]) & (weights >= params.min_p)
        check_threshold(logits.float(), weights, one.workspace.rows[:, 2:], params)
        scaled = scaled.masked_fill(~kept, -torch.inf)

    uniform = (noise_integers(one.noise_keys, VOCABULARY).float() + 0.5).double() * 2.0**-31
    scores = scaled - (-(-uniform).log1p()).clamp(max=22.0).log()
    lost = scores.amax(-1) - scores.gather(1, tokens[:, None])[:, 0]
    assert (lost <= 2e-6 * (1 + scaled.amax(-1).abs())).all()
    expected, _ = sample(logits, params, one.noise_keys)
    # fp32 sums in another order move the boundary of top-p
    assert (tokens == expected).float().mean() > 0.95


def check_threshold(
    logits: torch.Tensor, weights: torch.Tensor, threshold: torch.Tensor, params: SamplingParams
) -> None:
    """Check that the kept tokens suffice, and without the lightest do not, for the narrower of
    top-k and top-p."""
    at_least = logits >= threshold
    above = logits > logits.masked_fill(~at_least, torch.inf).amin(-1, keepdim=True)
    if params.top_k > 0:
        assert (above.sum(-1) < params.top_k).all()
        if params.top_p == 1:
            assert (at_least.sum(-1) >= params.top_k).all()
    if params.top_p < 1:
        total = (
            weights.topk(params.top_k, -1).values.sum(-1) if params.top_k > 0 else weights.sum(-1)
        )
        # A sum in fp32 just below the threshold keeps one more token, with less than a thousandth
        # of the weight.
        assert ((weights * above).sum(-1) < params.top_p * total * (1 + 2e-4)).all()
        assert ((weights * at_least).sum(-1) >= params.top_p * total * (1 - 1e-5)).all()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 50, "top_p": 0.95}])
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(settings):
    logits = make_logits(torch.bfloat16, rows=600)
    tokens, log_probs = Draw(600, VOCABULARY, params_of(**settings))(logits)
    alone_tokens, alone_log_probs = Draw(1, VOCABULARY, params_of(**settings))(logits[:1])
    assert torch.equal(tokens[:1], alone_tokens)
    assert torch.equal(log_probs[:1], alone_log_probs)


@pytest.mark.parametrize("vocabulary", [17, 512, 8192, 50_257])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 10}])
def test_any_vocabulary(vocabulary, settings):
    params = params_of(**settings)
    logits = make_logits(torch.bfloat16, rows=300, vocabulary=vocabulary).contiguous()
    one = Draw(300, vocabulary, params)
    tokens, log_probs = one(logits)
    expected, expected_log_probs = sample(logits, params, one.noise_keys)
    assert (tokens == expected).float().mean() > 0.99
    same = tokens == expected
    torch.testing.assert_close(log_probs[same], expected_log_probs[same], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}]
)
def test_bad_logits_give_a_log_prob_that_is_not_finite(settings):
    logits = make_logits(torch.bfloat16, rows=6)
    logits[0, VOCABULARY - 1] = torch.nan
    logits[1, 0] = torch.inf
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4, : VOCABULARY // 2] = -torch.inf  # masked tokens are no error
    tokens, log_probs = Draw(6, VOCABULARY, params_of(**settings))(logits)
    assert log_probs.isfinite().tolist() == [False, False, False, False, True, True]
    assert (tokens >= 0).all()
    assert (tokens < VOCABULARY).all()
    assert tokens[4] >= VOCABULARY // 2


@pytest.mark.parametrize("settings", [{}, {"top_k": 50}])
def test_one_captured_graph_serves_every_setting_and_position(settings):
    logits = make_logits(torch.bfloat16)
    one = Draw(ROWS, VOCABULARY, params_of(**settings))
    one(logits)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one(logits)

    assert torch.cuda.memory_allocated() - before < 4096, (
        "a graph keeps the state of the random generator, no more"
    )
    for position, temperature in enumerate((0.7, 1.3)):
        params = params_of(**{**settings, "temperature": temperature})
        other = Draw(ROWS, VOCABULARY, params)
        other.state.drawn.add_(position)
        one.state.settings.copy_(settings_of(params))
        one.state.drawn.copy_(other.state.drawn)
        graph.replay()
        tokens, log_probs = other(logits)
        assert torch.equal(one.state.tokens, tokens)
        assert torch.equal(one.state.log_probs, log_probs)
