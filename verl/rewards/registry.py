"""The registries of reward rules and reward managers.

A rule is called as `rule(solution_str, ground_truth, extra_info, **options)` and returns a float,
or a dict with "score" whose other fields become columns of `reward_extra_info`.

    @reward_rules.register("my/dataset")        # exact name of a data source
    @reward_rules.register("my/dataset-v*")     # every data source that starts with "my/dataset-v"
    def score(solution_str, ground_truth, extra_info=None): ...
"""

from collections.abc import Callable
from typing import Any, TypeVar

from verl.utils.registry import Registry, RegistryDict, T

Rule = Callable[..., "float | dict[str, Any]"]
F = TypeVar("F")  # so that a decorated function keeps its type


class RuleRegistry(Registry[T]):
    """Entries by data source. An exact name wins over a prefix, a longer prefix over a shorter."""

    def register(self, name: str, *more: str) -> Callable[[F], F]:
        """Register the decorated rule under one or more names of data sources."""

        def add(entry: Any) -> Any:
            for source in (name, *more):
                super(RuleRegistry, self).register(source)(entry)
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the entry of a data source. Raises ConfigError, with the nearest, for none."""
        return super().get(self._entry_for(name) or name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._entry_for(name) is not None

    def _entry_for(self, data_source: str) -> str | None:
        if data_source in self._entries:
            return data_source
        patterns = [entry for entry in self if entry.endswith("*")]
        matching = [pattern for pattern in patterns if data_source.startswith(pattern[:-1])]
        return max(matching, key=len, default=None)


reward_rules: RuleRegistry[Rule] = RuleRegistry("data source")
# Extract the answer of a response, for majority votes: f(solution_str) -> str, or None if it has no
# answer.
answer_extractors: RuleRegistry[Callable[[str], str | None]] = RuleRegistry("data source")
reward_managers: Registry[Callable[..., Any]] = Registry("reward manager")

# The names of verl 0.5.
register_reward_manager = reward_managers.register
get_reward_manager_cls = reward_managers.get
REWARD_MANAGER_REGISTRY = RegistryDict(reward_managers, lambda kind: kind, reward_managers.get)
