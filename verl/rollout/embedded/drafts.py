"""Draft the next tokens of samples from tokens that followed the same ones before."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from verl.config.rollout import SpeculativeConfig
from verl.rollout.embedded.samples import Group, IntArray
from verl.rollout.embedded.scheduler import Scheduler


@dataclass(slots=True)
class _Text:
    """How far a sample has been read."""

    last: list[int]  # the last tokens, as many as the longest match has
    count: int = 0  # response tokens that were read


@dataclass(slots=True)
class _Memory:
    """The tokens of a prompt and its samples that were read."""

    followers: dict[tuple[int, ...], int] = field(default_factory=dict)  # by the tokens before
    texts: dict[int, _Text] = field(default_factory=dict)  # by sample id
    ended: list[tuple[int, list[int]]] = field(default_factory=list)  # samples yet to be read


class NgramDrafts:
    """Guess next tokens by the last few: they continue as they did when they came up last.

    It looks in the prompt, in the sample itself and in the other samples of the prompt. This is
    prompt lookup decoding (Saxena 2023), also across the samples of a group. The noise of a draw
    does not depend on drafts, so a draft is right exactly if the draw without it gives it: drafts
    change the number of steps, never a token.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self._lengths = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        # Until the last sample of a group has left: agents have a group for each turn.
        self._memories: WeakKeyDictionary[Group, _Memory] = WeakKeyDictionary()

    def tokens_a_sample(self, rows: int) -> int:
        """Return the most tokens to draft for each of `rows` running samples, maybe 0."""
        if rows == 0:
            return 0
        spare = self.config.max_rows // rows - 1
        return max(0, min(self.config.num_speculative_tokens, spare))

    def keep(self, group: Group, sample_id: int, token_ids: list[int]) -> None:
        """Remember an ended sample for the others of its group."""
        self._memories.setdefault(group, _Memory()).ended.append((sample_id, token_ids))

    def propose(self, scheduler: Scheduler, slots: IntArray, most: int) -> list[list[int]]:
        """Return up to `most` drafted tokens for each of `slots`.

        A slot gets fewer where its limit is near: its last draw needs no draft.
        """
        for slot in slots.tolist():
            group = scheduler.group_of(slot)
            memory = self._memories.setdefault(group, _Memory())
            if not memory.texts:
                self._learn(memory, [], group.prompt)
            for sample_id, token_ids in memory.ended:
                self._read(memory, group, sample_id, token_ids)
            memory.ended.clear()
            drawn = scheduler.token_ids[slot, : scheduler.drawn[slot]]
            self._read(memory, group, scheduler.sample_id_of(slot), drawn)

        drafts = []
        left = scheduler.limits[slots] - scheduler.launched[slots] - 1
        for slot, count in zip(slots.tolist(), left.clip(max=most).tolist()):
            memory = self._memories[scheduler.group_of(slot)]
            text = memory.texts[scheduler.sample_id_of(slot)]
            # A sample that was pre-empted draws tokens again that were read already.
            is_current = text.count == scheduler.drawn[slot]
            drafts.append(self._continue(memory, text.last, count) if is_current else [])
        return drafts

    def _read(
        self,
        memory: _Memory,
        group: Group,
        sample_id: int,
        token_ids: Sequence[int] | IntArray,
    ) -> None:
        """Learn from the tokens (n,) of a sample that were not read yet."""
        text = memory.texts.get(sample_id)
        if text is None:
            first = list(group.prompt[-self.config.prompt_lookup_max :])
            text = memory.texts[sample_id] = _Text(first)
        new = token_ids[text.count :]
        text.count += len(new)
        text.last = self._learn(memory, text.last, [int(token) for token in new])

    def _learn(self, memory: _Memory, last: list[int], token_ids: Sequence[int]) -> list[int]:
        """Note the tokens that each of `token_ids` follows. Return the last tokens then."""
        last = list(last)
        for token in token_ids:
            for length in self._lengths:
                if len(last) >= length:
                    memory.followers[tuple(last[-length:])] = token
            last.append(token)
            del last[: -self.config.prompt_lookup_max]
        return last

    def _continue(self, memory: _Memory, last: list[int], most: int) -> list[int]:
        """Draft up to `most` tokens after `last`, each by the longest tokens that match."""
        last = list(last)
        draft: list[int] = []
        while len(draft) < most:
            token = self._follower(memory, last)
            if token is None:
                break
            draft.append(token)
            last.append(token)
        return draft

    def _follower(self, memory: _Memory, last: list[int]) -> int | None:
        """Return the token that followed the longest known end of `last`."""
        for length in self._lengths:
            token = memory.followers.get(tuple(last[-length:]))
            if token is not None:
                return token
        return None
