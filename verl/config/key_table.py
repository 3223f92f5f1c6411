"""The table of all keys as Markdown: `python -m verl.config.key_table > docs/config_keys.md`."""

from verl.config.evaluation import EvaluationConfig
from verl.config.generation import GenerationConfig
from verl.config.keys import Key, keys_of
from verl.config.train import TrainConfig


def key_table(root: type = TrainConfig) -> str:
    """One line for each key: name, default, what it does, and whether this version honours it."""
    lines = ["| key | default | meaning | |", "|---|---|---|---|"]
    for key in keys_of(root).values():
        cells = (f"`{key.path}`", f"`{_default(key)}`", key.setting.help, _status(key))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(key: Key) -> str:
    if key.followed is not None:
        return f"as {key.followed}"
    if key.interpolation is not None:
        return key.interpolation
    return "null" if key.default is None else str(key.default)


def _status(key: Key) -> str:
    setting = key.setting
    if setting.alias_of is not None:
        return f"another name of `{setting.alias_of}`"
    if setting.planned is not None:
        return f"not available in this version: {setting.planned}"
    return f"no effect: {setting.no_effect}" if setting.no_effect is not None else ""


if __name__ == "__main__":
    print(key_table(), end="")
    for module, root in (("main_generation", GenerationConfig), ("main_eval", EvaluationConfig)):
        print(f"\n## verl.trainer.{module}\n\n{key_table(root)}", end="")
