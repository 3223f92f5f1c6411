"""The samples of requests, as the scheduler knows them."""

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from verl.models.pictures import Pictures, picture_tokens, three_part_positions
from verl.rollout.checks import response_limits
from verl.rollout.sampling import sample_keys
from verl.rollout.types import Completion, Request, RouteArray, SamplingParams

# of slots, rows, positions, pages or token ids
IntArray: TypeAlias = NDArray[np.int64]
# of each of several sequences: its token ids, or its pages
IdLists: TypeAlias = Sequence[Sequence[int]]
Answer: TypeAlias = tuple[IntArray, NDArray[np.float32]]  # tokens (b,) and their log-probs (b,)


@dataclass(eq=False)
class Group:
    """A prompt, with the pages and state that its samples share until the last has started."""

    prompt: tuple[int, ...]
    unstarted: int  # samples that have not been admitted yet
    pictures: Pictures = ()
    text_begins: int = 0  # the place behind the last picture token
    shift: int = 0  # of the positions from there on against the places
    pages: list[int] | None = None  # of the prompt, once computed
    hidden: torch.Tensor | None = None  # (H,), predicts the first response token

    @functools.cached_property
    def names(self) -> IntArray:
        """Return the ids by which pages are found, (P,): a picture's content names its tokens."""
        return np.array(self.prompt, np.int64)

    @classmethod
    def of(cls, request: Request) -> "Group":
        """Return the group of a request; its samples are to be added."""
        prompt = tuple(request.prompt_ids)
        group = cls(prompt=prompt, unstarted=0, pictures=request.pictures)
        if not request.pictures:
            return group

        places = picture_tokens(torch.tensor(prompt), request.pictures, "a request")
        names = group.names
        begin = 0
        for picture in request.pictures:
            own = places[begin : begin + picture.num_tokens].numpy()
            begin += picture.num_tokens
            digest = hashlib.blake2b(picture.key.encode(), digest_size=8).digest()
            # No token has a negative id.
            names[own] = -1 - (int.from_bytes(digest, "big") >> 1)
        group.text_begins = int(places[-1]) + 1
        if request.pictures[0].grid is not None:
            _, group.shift = three_part_positions(len(prompt), places, request.pictures)
        return group


@dataclass(eq=False, slots=True)
class Sample:
    """One unfinished response. While it runs, its tokens are in the scheduler's arrays."""

    sample_id: int
    group: Group
    limit: int  # most tokens it may draw
    key: np.uint64
    token_ids: list[int] = field(default_factory=list)  # drawn before it was pre-empted
    log_probs: list[float] = field(default_factory=list)
    begun: int = 0  # first tokens, which an earlier request drew; they are never drawn again
    routes: RouteArray | None = None  # of these tokens, if they are recorded
    has_old_keys: bool = False  # in its pages, which no other sample may find


@dataclass(eq=False, slots=True)
class Prefill:
    """A sequence to compute: the prompt of `group`, or also the tokens of a pre-empted sample.

    The keys of its first `cached` tokens are in its pages already.
    """

    token_ids: list[int]
    names: IntArray  # see `Group.names`
    pages: list[int]
    cached: int
    group: Group
    is_prompt: bool
    has_old_keys: bool = False
    hidden: torch.Tensor | None = None  # (H,) of the last token, once computed


@dataclass(slots=True)
class Admission:
    """The samples that start to run.

    A slot draws its first token from the hidden state of its group, or of `resumed[slot]`.

    `tokens` are to be computed. They can be `rows` more rows of a step, in addition to one for
    each sample, while `are_rows`.
    """

    slots: list[int] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    resumed: dict[int, Prefill] = field(default_factory=dict)
    tokens: int = 0
    rows: int = 0
    are_rows: bool = True

    def add(self, prefill: Prefill, *, is_row: bool) -> None:
        """Add the prefill of one more sample; `is_row`: it can start within a step."""
        uncached = len(prefill.token_ids) - prefill.cached
        self.prefills.append(prefill)
        self.tokens += uncached
        self.rows += uncached - 1
        self.are_rows = self.are_rows and is_row

    def fits_step(self, step_rows: int) -> bool:
        """Return whether some samples start, as rows of a step that has `step_rows` for them."""
        has_room = step_rows > 0 and self.rows <= step_rows
        return has_room and self.are_rows and bool(self.slots)


def samples_of(
    requests: Sequence[Request], params: SamplingParams, seed: int, step: int, max_model_len: int
) -> list[Sample]:
    """Return the samples of requests, in the order in which they are to start."""
    keys = iter(_keys(requests, seed, step))
    groups = []
    for request in requests:
        group = Group.of(request)
        limits = response_limits(request, params, max_model_len)
        begun = request.continuations or (None,) * len(limits)
        samples = []
        for sample_id, limit, continued in zip(request.sample_ids, limits, begun):
            sample = Sample(sample_id=sample_id, group=group, limit=limit, key=next(keys))
            if continued is not None and continued.token_ids:
                sample.token_ids = list(continued.token_ids)
                sample.log_probs = list(continued.log_probs)
                sample.begun = len(sample.token_ids)
            else:
                group.unstarted += 1
            samples.append(sample)
        groups.append(samples)

    # Longest first: otherwise the last to start could run longest, alone, on an idle device.
    groups.sort(key=lambda samples: -max((sample.limit for sample in samples), default=0))
    return list(itertools.chain.from_iterable(groups))


def _keys(requests: Sequence[Request], seed: int, step: int) -> np.ndarray:
    """Return the noise key of every sample, in the order of the requests."""
    steps: list[int] = []
    numbers: list[int] = []
    for request in requests:
        if request.continuations is None:
            steps += [step] * len(request.sample_ids)
            numbers += request.sample_ids
        else:
            steps += [each.step for each in request.continuations]
            numbers += [each.number for each in request.continuations]

    return sample_keys(seed, np.array(steps, np.int64), np.array(numbers, np.int64))


def completion_of(sample: Sample, reason: str) -> Completion:
    """Return the tokens that a sample has drawn so far."""
    return Completion(
        sample_id=sample.sample_id,
        token_ids=sample.token_ids,
        log_probs=sample.log_probs,
        finish_reason=reason,
        routed_experts=sample.routes,
    )
