"""Check at load that a packed model gives the numbers of transformers' unpacked computation."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.models.attention import PackingSlot, eager_attention, prepare
from verl.models.logprobs import head_of, token_log_probs
from verl.models.packed import PackedBatch, packed_hidden_states, padded_rows
from verl.models.vision import (
    example_picture,
    example_video,
    family_of,
    knows_videos,
    model_arguments,
    reads_pictures,
)
from verl.utils.errors import ModelError

# Largest relative error. In half precision, two correct kernels differ by some percent on single
# tokens (and a router may choose another expert), so the mean over tokens is compared; in full
# precision, every token is. A float64 model is compared with transformers' eager attention, which
# computes its softmax in float32, with an error of some 1e-7 per layer.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
_SHORT = 5
_LONG = 11
_LONGEST_WINDOW = 64  # the probe is longer than a window of up to this size


@torch.no_grad()
def check_packed(model: PreTrainedModel) -> None:
    """Raise ModelError, with family and difference, if packing changes the model's numbers.

    Two packed sequences must give the hidden states of transformers' eager attention, and, for a
    model with a head, our log-probs must match its logits. This takes three forward passes over
    some 16 tokens. The model keeps its mode, with packed attention.
    """
    if model.device.type == "meta":
        return  # it has no numbers
    slot = prepare(model)
    training = model.training
    model.eval()
    sequences = _sequences(model)
    device = next(model.parameters()).device
    batch = PackedBatch.from_sequences(sequences).to(device)
    slot.seen = []
    try:
        packed = packed_hidden_states(model, slot, batch)
        asked = [facts.window for facts in slot.seen]
    finally:
        slot.seen = None
    _check_layers(model, asked)
    if reads_pictures(model.config):
        _check_pictures(model, slot, sequences)

    padded = _padded(sequences, device)
    real = padded["attention_mask"].bool()
    logits = None
    with eager_attention(model):
        expected = model.base_model(**padded, use_cache=False).last_hidden_state[real]
        if model.get_output_embeddings() is not None:
            logits = model(**padded, use_cache=False).logits[real]

    fault = "its hidden states differ between packed and separate sequences"
    _compare(model, fault, packed, expected)
    if logits is not None:
        linear: Any = model.get_output_embeddings()
        ours, _ = token_log_probs(
            expected[batch.predict],
            linear.weight,
            batch.targets,
            bias=linear.bias,
            head=head_of(model),
        )
        log_probs = logits[batch.predict].to(ours.dtype).log_softmax(-1)
        theirs = log_probs.gather(1, batch.targets[:, None])
        fault = "its logits are not the linear head's with a known scale and soft cap"
        _compare(model, fault, ours[:, None], theirs)
    model.train(training)


def _without_token(sequence: list[int], token: int) -> list[int]:
    """Return a sequence with 0 in the places of a token."""
    return [0 if each == token else each for each in sequence]


def _check_pictures(model: PreTrainedModel, slot: PackingSlot, sequences: list[list[int]]) -> None:
    """Raise ModelError unless packed sequences with pictures have transformers' own states.

    A picture that two sequences share, and one of another, must not be mixed up.
    """
    body: Any = model.base_model
    token: int = model.config.image_token_id  # pyright: ignore[reportAttributeAccessIssue]
    one = example_picture(model, 0)
    other = example_picture(model, 1)
    short = _without_token(sequences[0], token)
    long = _without_token(sequences[1], token)
    pictures = [(one,), (other, one)]
    ids = [
        [*short[:2], *one.token_ids, *short[2:]],
        [*long[:3], *other.token_ids, *long[3:6], *one.token_ids, *long[6:]],
    ]
    if family_of(model.config).video_pixels is not None and knows_videos():
        video = example_video(model)
        pictures[0] = (one, video)
        ids[0] += [*video.token_ids, *short]

    lengths = list(map(len, ids))
    batch = PackedBatch.from_sequences(ids).with_pictures(pictures, lengths)
    packed = packed_hidden_states(model, slot, batch.to(model.device))
    kept = getattr(body, "rope_deltas", None)
    expected = []
    with eager_attention(model):
        for each, own in zip(ids, pictures):
            arguments = model_arguments(model, torch.tensor([each]), own)
            expected.append(body(**arguments, use_cache=False).last_hidden_state[0])
    if hasattr(body, "rope_deltas"):
        body.rope_deltas = kept  # a later call of transformers' own would read it

    fault = "its hidden states differ between packed and separate sequences with pictures"
    _compare(model, fault, packed, torch.cat(expected))


def _sequences(model: PreTrainedModel) -> list[list[int]]:
    """Draw a short sequence and a longer one, which outgrows a small sliding window.

    The longer one, which a leak would change, has most of the tokens.
    """
    config: Any = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    longest = _LONG
    if window is not None and _LONG <= window <= _LONGEST_WINDOW:
        longest = window + 4
    longest = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(config.vocab_size, (_SHORT + longest,), generator=generator).tolist()
    return [drawn[:_SHORT], drawn[_SHORT:]]


def _padded(sequences: list[list[int]], device: torch.device) -> dict[str, Tensor]:
    ids, mask = padded_rows(sequences)
    positions = torch.arange(ids.shape[1]) * mask
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: column.to(device) for name, column in padded.items()}


def _check_layers(model: PreTrainedModel, windows: list[int | None]) -> None:
    """Raise ModelError unless every layer used our attention, sliding layers with a window.

    The numbers of a short probe would not show that a large window is missing.
    """
    config: Any = model.config.get_text_config()
    layers = config.num_hidden_layers
    if len(windows) < layers:
        raise ModelError(
            f"The model family '{config.model_type}' cannot be run packed: {len(windows)} of its "
            f"{layers} layers use transformers' attention interface. Choose a family in which all "
            "layers do."
        )

    types = getattr(config, "layer_types", None)
    sliding = (types or []).count("sliding_attention")
    with_window = sum(window is not None for window in windows)

    if types is not None and sliding and with_window != sliding * len(windows) // layers:
        raise ModelError(
            f"The model family '{config.model_type}' cannot be run packed: its configuration has "
            f"{sliding} sliding-window layers, but {with_window} used a window in their attention."
        )


def _compare(model: PreTrainedModel, fault: str, ours: Tensor, theirs: Tensor) -> None:
    """Raise ModelError if the relative error of (tokens, features) is above the tolerance.

    Single numbers are compared on the scale of their common deviation.
    """
    if not bool(theirs.isfinite().all()):
        raise _not_finite(model)

    tolerance = _TOLERANCE.get(model.dtype, 1e-3)
    ours = ours.double()
    theirs = theirs.double()

    if theirs.shape[-1] > 1:
        scale = theirs.norm(dim=-1)
    else:
        scale = theirs.square().mean().sqrt()
    errors = (ours - theirs).norm(dim=-1) / scale.clamp(min=1e-6)
    error = errors.mean() if tolerance > 1e-2 else errors.max()
    if not bool(error <= tolerance):  # NaN fails too
        raise ModelError(
            f"The model family '{model.config.model_type}' cannot be run packed: {fault}. Relative "
            f"error {error:.1e} in {model.dtype}, tolerance {tolerance:.0e}. If the "
            "precision is at its limit, try float32; otherwise choose a supported family."
        )


def _not_finite(model: PreTrainedModel) -> ModelError:
    """Return the error for a model that computes NaN or infinity without packing, too."""
    broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if not broken:
        return ModelError(
            f"The model '{model.name_or_path}' computes numbers that are not finite in "
            f"{model.dtype}, though its weights are finite. Load it in float32."
        )
    return ModelError(
        f"The model '{model.name_or_path}' has NaN or infinity in {len(broken)} of its tensors, "
        f"the first is {broken[0]}. Its files are damaged, or its training diverged: download it "
        "again, or take an earlier checkpoint."
    )
