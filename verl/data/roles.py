"""Find roles of messages that seem to be misspelt: many chat templates write any role."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.data.chat import USUAL_ROLES, Messages
from verl.utils.logging import logger
from verl.utils.registry import misspelled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names that other formats of conversations use.
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant"}


class RoleCheck:
    """Collects the doubtful roles of a file or of a call, to warn of each once.

    A role is doubtful if it is close to a usual one, or the name of one in another format. A role
    that the chat template names in quotes is one of its own, and not doubtful.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._warned_of: set[str] = set()
        self._template = str(tokenizer.chat_template or "")
        self._rows: dict[str, list[int]] = {}  # by role: the rows that have it
        self._first: dict[str, int] = {}  # by role: the message of the first of these rows

    def read(self, messages: Messages, row: int) -> None:
        """Note the doubtful roles of one row."""
        for number, message in enumerate(messages):
            role = message["role"]
            if role in self._warned_of or doubtful_role(role, self._template) is None:
                continue
            self._first.setdefault(role, number)
            rows = self._rows.setdefault(role, [])
            if rows[-1:] != [row]:
                rows.append(row)

    def warn(self, file: str, column: str) -> None:
        """Log a warning for each role that was noted in the rows of a file."""
        self.warn_at(lambda row: f"{file}, row {row}, column '{column}'", "rows of this file")

    def warn_at(self, place: Callable[[int], str], rows_are: str) -> None:
        """Log a warning for each role that was noted since the last call, once.

        Args:
            place: describes a row, as the warning begins.
            rows_are: name of several rows, such as "prompts".
        """
        for role, rows in self._rows.items():
            others = ""
            if len(rows) > 1:
                others = f" ({len(rows)} {rows_are} have it)"

            logger.warning(
                "%s: message %d has the role '%s'; did you mean '%s'?%s The chat template does not "
                "name it, so the model reads a role that it may not know. The usual roles are %s. "
                "Rename it, or set a template that names it.",
                place(rows[0]),
                self._first[role],
                role,
                usual_role(role),
                others,
                ", ".join(USUAL_ROLES),
            )

        self._warned_of |= self._rows.keys()
        self._rows.clear()
        self._first.clear()


def doubtful_role(role: str, template: str) -> str | None:
    """Return the usual role that a doubtful one seems to mean; None where it is not doubtful.

    Args:
        template: the chat template, whose roles in quotes are never doubtful.
    """
    if role in USUAL_ROLES or re.search(rf"(['\"]){re.escape(role)}\1", template):
        return None
    return usual_role(role)


def usual_role(role: str) -> str | None:
    """Return the usual role that `role` seems to mean; None where it is none of these."""
    name = role.strip().lower()
    if name in USUAL_ROLES:
        return name
    return _OTHER_NAMES.get(name) or misspelled(name, USUAL_ROLES)
