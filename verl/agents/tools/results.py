"""Results of calls, how a run deals with failed ones, and their counts."""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from verl.utils.errors import ConfigError

# Failures of a tool. A call that the model got wrong is answered, whatever the policy.
FAILURES = ("error", "timeout", "crashed")
# policy -> consequence of a failure for its trajectory
CONSEQUENCES = {"text": "continue", "mask": "mask", "drop": "drop"}
_UNKNOWN = "unknown_tool"  # one name for all that a model makes up


@dataclass
class ToolResult:
    """The answer to one call.

    Attributes:
        text: for the model, at most `max_tool_response_length` characters and the mark of a cut.
        outcome: "ok", "error", "timeout", "crashed", "malformed", "unknown", "over_cap"; or
            "dropped", for a failure under the policy "drop".
        reward: step reward, or None.
        seconds: from the call to its answer, with retries.
        failure: "error", "timeout" or "crashed" where the tool failed, else None.
        consequence: "continue", "mask" (train on no token of the turn that made the call) or
            "drop" (drop the trajectory).
    """

    text: str
    outcome: str
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    failure: str | None = None
    consequence: str = "continue"


def consequence_of(policy: str) -> str:
    """Return the consequence of a failure under a policy.

    Raises:
        ConfigError: no such policy.
    """
    if policy not in CONSEQUENCES:
        raise ConfigError(
            f"The policy for failed tool calls must be one of {', '.join(CONSEQUENCES)}, got "
            f"{policy!r}."
        )
    return CONSEQUENCES[policy]


def heavier(one: str, other: str) -> str:
    """Return the heavier of two consequences."""
    order = list(CONSEQUENCES.values())
    return max(one, other, key=order.index)


class ToolCounts:
    """Counts and durations of calls, by tool and outcome. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()
        self._longest_s: dict[str, float] = {}
        self._noted: Counter[tuple[str, str]] = Counter()

    def add_call(self, tool: str | None, outcome: str, seconds: float) -> None:
        """Count a call; `tool` is None for a name that no tool has."""
        name = tool or _UNKNOWN
        with self._lock:
            self._events[name, outcome] += 1
            self._calls[name] += 1
            self._seconds[name] += seconds
            self._longest_s[name] = max(self._longest_s.get(name, 0.0), seconds)

    def add(self, tool: str, event: str) -> None:
        """Count something that is no call, such as "retried" or "release_timeout"."""
        with self._lock:
            self._events[tool, event] += 1

    def note(self, tool: str, event: str) -> int:
        """Return how often this has been noted in the whole run, for a limit on log lines."""
        with self._lock:
            self._noted[tool, event] += 1
            return self._noted[tool, event]

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        """Return `tools/TOOL/OUTCOME` and `tools/TOOL/seconds/{mean,max}`.

        Args:
            reset: begin anew, for metrics of one step.
        """
        with self._lock:
            values: dict[str, float] = {}
            for (tool, event), count in sorted(self._events.items()):
                values[f"tools/{tool}/{event}"] = float(count)
            for tool, calls in sorted(self._calls.items()):
                values[f"tools/{tool}/seconds/mean"] = self._seconds[tool] / calls
                values[f"tools/{tool}/seconds/max"] = self._longest_s[tool]
            if reset:
                for counter in (self._events, self._seconds, self._calls, self._longest_s):
                    counter.clear()
        return values
