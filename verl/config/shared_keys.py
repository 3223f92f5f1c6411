"""Keys that a root shares with training.

They are declared once, read by the parts of training, and reported under the names of the root.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.keys import keys_of, owner_of, value_at
from verl.config.rule_table import Messages, Rule
from verl.config.train import TrainConfig


@dataclass(frozen=True)
class SharedKeys:
    """Where training has the keys of a root. `places`: beginnings of keys, here and there, of which
    the first that fits counts; a key that none fits has the same name there, if it is there at
    all."""

    places: tuple[tuple[str, str], ...] = ()

    def as_train_config(self, config: Any) -> TrainConfig:
        """Return the same values as a TrainConfig, for the parts that both use."""
        train = TrainConfig()
        known = keys_of(TrainConfig)
        train.algorithm.adv_estimator = "grpo"  # no critic
        for path in keys_of(type(config)):
            here, there = next((pair for pair in self.places if path.startswith(pair[0])), ("", ""))
            place = there + path.removeprefix(here)
            if place in known:
                setattr(*owner_of(train, place), value_at(config, path))
        return train

    def names_here(self, message: str) -> str:
        """Rewrite a message of a shared part with the names that its keys have here."""
        for here, there in self.places:
            message = message.replace(there, here)
        return message

    def rule_here(self, rule: Rule) -> Any:
        """Adapt a rule of training to this root."""

        def asked(config: Any) -> Messages:
            return map(self.names_here, rule(self.as_train_config(config)))

        return asked
