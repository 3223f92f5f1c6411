"""The page of all keys as Markdown: `python -m verl.config.key_table > docs/reference/keys.md`."""

import sys
from collections import Counter

from verl.config import load
from verl.config.keys import Key, keys_of
from verl.utils.entry import exit_code

ROOTS = {root.module: root.schema for root in load.ROOTS.values()}
_INTRODUCTION = """\
# Configuration keys

Generated: `python -m verl.config.key_table > docs/reference/keys.md` writes this page anew.

The last column says how a changed key is treated:

- *implemented*: it has the effect that the third column describes.
- *another name of* a key: either may be written.
- *no effect*: accepted, and one line of the log says why it changes nothing.
- *refused*: an error before a weight is loaded, unless it has its default. Leave it there, or
  remove it.

Defaults of the form *as `key`* follow that key until they are set. A key that is not here is an
error that names the nearest ones. The values of one run: add `--cfg job` to its command.
"""


def page() -> str:
    """Return the whole page: the keys of every entry point, by section."""
    parts = [_INTRODUCTION]
    for module, root in ROOTS.items():
        counts = Counter(
            _status(key).partition(":")[0].partition(" of ")[0] for key in keys_of(root).values()
        )
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        parts.append(f"\n## {module}\n\n{sum(counts.values())} keys: {summary}.\n")
        for name, table in key_tables(root).items():
            parts.append(f"\n### {module.rpartition('.')[2]}: {name}\n\n{table}")
    return "".join(parts)


def key_tables(root: type) -> dict[str, str]:
    """Return a Markdown table for each section, with one line for each key.

    Its columns are name, default, meaning and status.
    """
    tables: dict[str, str] = {}
    for key in keys_of(root).values():
        section = _section(key)
        tables.setdefault(section, "| key | default | meaning | status |\n|---|---|---|---|\n")
        tables[section] += _line(key)
    return tables


def _section(key: Key) -> str:
    """Return the first word of a key's section, or two below `actor_rollout_ref`."""
    words = key.section.split(".")
    return ".".join(words[:2] if words[0] == "actor_rollout_ref" else words[:1]) or "top level"


def _line(key: Key) -> str:
    choices = key.setting.choices
    meaning = key.setting.help + (f" ({', '.join(choices)})" if choices else "")
    cells = (f"`{key.path}`", _default(key), meaning, _status(key))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(key: Key) -> str:
    if key.followed is not None:
        return f"as `{key.followed}`"
    if key.interpolation is not None:
        return f"`{key.interpolation}`"
    return "`null`" if key.default is None else f"`{key.default}`"


def _status(key: Key) -> str:
    setting = key.setting
    if key.main is not None:
        return f"another name of `{key.main}`"
    if setting.planned is not None:
        return f"refused: {setting.planned}"
    if setting.no_effect is not None:
        return f"no effect: {setting.no_effect}"
    return "implemented"


if __name__ == "__main__":
    sys.exit(exit_code(lambda: print(page(), end="")))
