"""Pictures of a conversation: their tensors, their tokens, and the positions of these tokens.

A video is a picture of several frames.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from verl.utils.errors import DataError

if TYPE_CHECKING:  # merging checkpoints needs no tensordict
    from verl.protocol import DataProto


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture or a video as the model's processor prepared it. Rows and roles share one object.

    `token_ids` replace the placeholder in a prompt. The model reads features of the picture at
    those that equal `token_id`, the others are plain tokens around them.
    """

    key: str  # digest of the content and of the processor's settings
    token_ids: tuple[int, ...]
    token_id: int
    inputs: Mapping[str, Tensor]  # arguments of the model's `get_image_features`
    # Rows and columns of the tokens of a frame, where positions have three parts (Qwen-VL); else
    # None. A picture is one frame.
    grid: tuple[int, int] | None = None
    # For each run of tokens, the first parts of the positions of its frames. Plain tokens may stand
    # between the runs.
    times: tuple[tuple[int, ...], ...] = ((0,),)
    seconds: float | None = None  # from one frame of a video to the next; None: a picture
    sees_itself: bool = False  # its tokens see one another, also the later ones (Gemma 3)
    png: bytes | None = None  # the picture itself, for engines that prepare it themselves

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that get features."""
        return self.token_ids.count(self.token_id)


Pictures = tuple[Picture, ...]


def pictures_of(batch: "DataProto") -> list[Pictures]:
    """Return the pictures of each of B rows."""
    column = batch.non_tensor_batch.get("prepared_pictures")
    if column is None:
        return [()] * len(batch)
    return [tuple(own or ()) for own in column]


def packed_pictures(pictures: Iterable[Picture]) -> dict[str, dict[str, Any]]:
    """Return the fields of every picture once, by its key, in values that a checkpoint may hold."""
    packed = {}
    for picture in pictures:
        values = {field.name: getattr(picture, field.name) for field in fields(picture)}
        packed[picture.key] = values | {"inputs": dict(picture.inputs)}
    return packed


def unpacked_pictures(packed: Mapping[str, Mapping[str, Any]]) -> dict[str, Picture]:
    """Undo `packed_pictures`."""
    return {key: Picture(**values) for key, values in packed.items()}


class Frames(NamedTuple):
    """Frames of a video, before they are prepared: RGB images of PIL, all of one size."""

    images: Sequence[Any]
    times: Sequence[float]  # seconds from the beginning of the video to each
    fps: float  # of these frames, on average
    min_pixels: int | None = None  # None: as the model's processor is configured
    max_pixels: int | None = None


class Placed(NamedTuple):
    """Features in N packed tokens: token `tokens[i]` gets row `rows[i]` of all features."""

    pictures: Pictures  # each once; their features are joined in this order
    tokens: Tensor  # (K,) int64
    rows: Tensor  # (K,) int64


def _are_of(ids: Tensor, pictures: Sequence[Picture]) -> Tensor:
    """Return which ids (k,) are tokens that get features of any of these pictures, (k,) bool."""
    tokens = {picture.token_id for picture in pictures}
    known = torch.tensor(sorted(tokens), dtype=ids.dtype, device=ids.device)
    return torch.isin(ids, known)


def picture_tokens(ids: Tensor, pictures: Sequence[Picture], name: str) -> Tensor:
    """Return the places (k,) of the tokens in a prompt's ids (P,) that get features.

    Raises DataError, which begins with `name`, if their number is not that of the features.
    """
    expected: list[int] = []
    for picture in pictures:
        expected += [picture.token_id] * picture.num_tokens
    if not pictures:
        return torch.empty(0, dtype=torch.int64)
    places = _are_of(ids, pictures).nonzero().squeeze(1)
    if ids[places].tolist() != expected:
        tokens = sorted({picture.token_id for picture in pictures})
        raise DataError(
            f"{name}: the prompt has {len(places)} picture tokens (id {str(tokens)[1:-1]}), its "
            f"pictures have {len(expected)} features. A prompt must not be cut or encoded again "
            "after its pictures were read."
        )
    return places


def ids_with_placeholders(ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Return a prompt's ids with one token for each picture, as before they were expanded.

    Raises DataError if a picture's tokens are not in the prompt.
    """
    shorter: list[int] = []
    rest = list(ids)
    for number, picture in enumerate(pictures):
        own = list(picture.token_ids)
        last = len(rest) - len(own)
        places = (at for at in range(last + 1) if rest[at : at + len(own)] == own)
        place = next(places, None)
        if place is None:
            raise DataError(
                f"The {len(own)} tokens of picture {number} are not in the prompt behind those of "
                "the pictures before it. A prompt must not be cut or encoded again after its "
                "pictures were read."
            )

        shorter += [*rest[:place], picture.token_id]
        rest = rest[place + len(own) :]
    return shorter + rest


def num_in_prompt(prompt: Tensor, pictures: Sequence[Picture]) -> int:
    """Return how many of a row's pictures stand in its prompt; tools returned the others."""
    if not pictures:
        return 0
    found = int(_are_of(prompt, pictures).sum())
    number = 0
    tokens = 0
    while tokens < found and number < len(pictures):
        tokens += pictures[number].num_tokens
        number += 1
    return number


def row_picture_tokens(
    ids: Tensor, prompt_length: int, pictures: Sequence[Picture], name: str
) -> Tensor:
    """Return the places (k,) of the tokens in a row's ids that get features.

    Those of pictures from tools stand behind the prompt. A model's own draw of the picture token
    ends its episode, so all of them come before it.

    Raises DataError, which begins with `name`, if their number is not that of the features.
    """
    number = num_in_prompt(ids[:prompt_length], pictures)
    places = picture_tokens(ids[:prompt_length], pictures[:number], name)
    later = pictures[number:]
    if not later:
        return places

    expected = sum(picture.num_tokens for picture in later)
    behind = _are_of(ids[prompt_length:], later).nonzero().squeeze(1) + prompt_length
    if len(behind) < expected:
        raise DataError(
            f"{name}: behind the prompt stand {len(behind)} picture tokens (id "
            f"{later[0].token_id}), the pictures there have {expected} features. A row "
            "must not be cut or encoded again after its pictures were read."
        )
    return torch.cat([places, behind[:expected]])


def three_part_positions(
    length: int, places: Tensor, pictures: Sequence[Picture]
) -> tuple[Tensor, int]:
    """Return the positions (3, length) of a sequence with picture tokens at `places`.

    Text advances all parts by 1 for each token. A frame of a picture or video, with r rows and c
    columns of tokens, has the parts (start + time, start + row, start + column), and text goes on
    behind the largest part: the rule of Qwen2-VL (arXiv:2409.12191, section 2.1).

    The second value is the distance of position and place for all text after the last picture.
    """
    steps = torch.ones(length, dtype=torch.int64)
    begin = 0
    offsets = []  # within each picture, (3, tokens)
    for picture in pictures:
        assert picture.grid is not None
        rows, columns = picture.grid
        for times in picture.times:
            frames = len(times)
            own = places[begin : begin + frames * rows * columns]
            begin += len(own)
            # The last token of a run advances text by all that the run takes.
            steps[own] = 0
            steps[own[-1]] = max(times[-1] + 1, rows, columns)
            time = torch.tensor(times).repeat_interleave(rows * columns)
            row = torch.arange(rows).repeat_interleave(columns).repeat(frames)
            column = torch.arange(columns).repeat(frames * rows)
            offsets.append(torch.stack([time, row, column]))

    ends = steps.cumsum(0)
    positions = (ends - steps).expand(3, -1).clone()
    if offsets:
        positions[:, places] += torch.cat(offsets, dim=1)
    shift = int(ends[-1]) - length if length else 0
    return positions, shift


def tokens_ahead(length: int, places: Tensor, pictures: Sequence[Picture]) -> Tensor:
    """Return how many later tokens (length,) each token of a sequence sees.

    A picture token at one of `places` sees the rest of its picture up to the next plain token. No
    other token sees a later one.
    """
    ahead = torch.zeros(length, dtype=torch.int64)
    begin = 0
    for picture in pictures:
        own = places[begin : begin + picture.num_tokens]
        begin += picture.num_tokens
        ends_run = torch.ones(len(own), dtype=torch.bool)
        ends_run[:-1] = own.diff() > 1
        run = ends_run.cumsum(0) - ends_run.long()
        ahead[own] = own[ends_run][run] - own
    return ahead


def place_pictures(
    starts: Sequence[int], places: Sequence[Tensor], pictures: Sequence[Sequence[Picture]]
) -> Placed | None:
    """Join the picture tokens of packed sequences; None without any.

    Args:
        starts: the first packed token of each sequence.
        places: the picture tokens within each, of all of its pictures.
        pictures: the pictures of each, in the order of their tokens.
    """
    first_row: dict[str, int] = {}
    once: list[Picture] = []
    tokens: list[Tensor] = []
    rows: list[Tensor] = []
    total = 0

    for start, own_places, own in zip(starts, places, pictures):
        tokens.append(own_places + start)
        for picture in own:
            if picture.key not in first_row:
                first_row[picture.key] = total
                once.append(picture)
                total += picture.num_tokens
            row = first_row[picture.key]
            rows.append(torch.arange(row, row + picture.num_tokens))

    if not once:
        return None
    return Placed(tuple(once), torch.cat(tokens), torch.cat(rows))
