"""Prompts that a program gives to `RLTrainer.rollout`, as a batch for the rollout."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from verl.config import TrainConfig
from verl.data.chat import apply_chat_template, as_messages
from verl.data.collate import collate
from verl.data.pictures import PictureReader
from verl.data.prompt_limit import cut_prompt
from verl.data.rl_dataset import check_prompt
from verl.data.roles import RoleCheck
from verl.models.pictures import pictures_of
from verl.protocol import DataProto
from verl.trainer import setup
from verl.utils.column_dicts import object_column
from verl.utils.errors import DataError


class AskedPrompts:
    """Encodes prompts as the data set does: same template, same limit, same checks."""

    def __init__(self, config: TrainConfig, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer

    def batch(self, prompts: Any) -> DataProto:
        """Return a batch of B prompts, none too long.

        Warns of roles that seem to be misspelt, as the data set does.

        Raises:
            DataError: no prompt is given, or one is not a prompt or too long.
        """
        if isinstance(prompts, DataProto) and len(prompts):
            return self._fitted_batch(prompts)

        rows = []
        roles = RoleCheck(self.tokenizer)
        for number, prompt in enumerate(listed("rollout", "prompts (texts or chats)", prompts)):
            try:
                row = self._encoded(prompt)
            except DataError as error:
                raise DataError(f"Prompt {number} {error}.") from error
            roles.read(row["raw_prompt"], number)
            row["raw_prompt_ids"] = self._fitted(
                number, row["raw_prompt_ids"], has_pictures=bool(row.get("prepared_pictures"))
            )
            row["index"] = number
            rows.append(row)

        roles.warn_at(lambda number: f"Prompt {number}", "prompts")
        return collate(rows)

    @cached_property
    def _pictures(self) -> PictureReader | None:
        return setup.picture_reader(self.config, self.tokenizer)

    def _encoded(self, prompt: Any) -> dict[str, Any]:
        """Return a prompt's columns: token ids, messages, and pictures if the model reads them."""
        check_prompt(prompt, reads_pictures=self._pictures is not None)
        if self._pictures is None:
            messages = as_messages(prompt)
            ids = apply_chat_template(self.tokenizer, messages)
            return {"raw_prompt_ids": ids, "raw_prompt": messages}
        ids, messages, pictures = self._pictures.encode(prompt, None, Path())
        return {"raw_prompt_ids": ids, "raw_prompt": messages, "prepared_pictures": pictures}

    def _fitted_batch(self, prompts: DataProto) -> DataProto:
        if "raw_prompt_ids" not in prompts.non_tensor_batch:
            raise DataError(
                "A batch for rollout needs the object column raw_prompt_ids (lists of token "
                f"ids), got {list(prompts.non_tensor_batch)}. Give the prompts as texts or chats."
            )

        if prompts.batch is not None and "responses" in prompts.batch:
            raise DataError(
                "A batch for rollout must have prompts without responses, got one of an earlier "
                'rollout. Give its chats: rollout(list(batch.non_tensor_batch["raw_prompt"])).'
            )

        batch = prompts.select()
        pictures = pictures_of(batch)
        fitted = []
        for number, ids in enumerate(batch.non_tensor_batch["raw_prompt_ids"]):
            fitted.append(self._fitted(number, ids, has_pictures=bool(pictures[number])))
        batch.non_tensor_batch["raw_prompt_ids"] = object_column(fitted)
        return batch

    def _fitted(self, number: int, ids: list[int], *, has_pictures: bool) -> list[int]:
        """Return the tokens of a prompt, cut where `data.truncation` allows it."""
        limit = self.config.data.max_prompt_length
        if len(ids) <= limit:
            return ids

        if self.config.data.truncation == "error" or has_pictures:
            way = "set data.truncation=left, right or middle to have it cut."
            if has_pictures:
                way = "make the pictures smaller: prompts with pictures are never cut."
            raise DataError(
                f"Prompt {number} has {len(ids)} tokens, data.max_prompt_length allows {limit}. "
                f"Raise it, or {way}"
            )
        return cut_prompt(ids, self.config.data, "Prompts of rollout()")


def listed(call: str, contents: str, given: Any) -> list[Any]:
    """Return the entries of a list or another iterable; raise DataError for one text or mapping."""
    entries = []
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping, DataProto)):
        entries = list(given)
    if not entries:
        raise DataError(f"{call} needs a list of {contents}, at least one, got {given!r:.80}.")
    return entries
