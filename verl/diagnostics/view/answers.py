"""Answer the questions of the page about recorded runs, as values for JSON.

A question is a path: "runs", "curves/0" (number of the run), "samples/0/7" (step 7), "sample/0/7/3"
(row 3), "lanes/0/7", "plan/0", "advice/0".
"""

import functools
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.config.load import config_from_dict
from verl.diagnostics.view.run_advice import advise_on
from verl.tracking.records import Run, StepSamples
from verl.utils.errors import DataError, VerlError

Answer = dict[str, Any]  # values for JSON
Ragged = tuple[np.ndarray, np.ndarray]  # offsets and values of a list column

_EXCERPT = 160  # characters of a prompt or response in the table
_WAITING_ROWS = ("phases", "calls")  # the driver waits in them
_LIVE_S = 600.0  # a run without an end and without a line for longer is shown as stopped


class Answers:
    """Answers about some runs. Safe to use from several threads.

    Args:
        runs: recorded runs, in the order of their numbers.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self._lock = threading.Lock()
        self._plan = functools.cache(_plan)
        self._read = functools.lru_cache(maxsize=4)(_read_file)

    def answer(self, question: str) -> Any:
        """Return the answer to a question. Raises DataError for one that makes no sense."""
        name, *parts = question.split("/")
        kinds = {
            "runs": (self.overview, 0),
            "curves": (self.curves, 1),
            "samples": (self.samples, 2),
            "sample": (self.sample, 3),
            "lanes": (self.lanes, 2),
            "plan": (self.plan, 1),
            "advice": (self.advice, 1),
        }

        if name not in kinds or len(parts) != kinds[name][1]:
            raise DataError(f"Expected one of {', '.join(kinds)}, got the question {question!r}.")
        if not all(part.isdecimal() for part in parts):
            raise DataError(f"Expected numbers in the question, got {question!r}.")
        answer, _ = kinds[name]
        with self._lock:
            return answer(*map(int, parts))

    def overview(self) -> list[Answer]:
        """Describe all runs."""
        rows = []
        for number, run in enumerate(self.runs):
            run.refresh()
            facts = run.facts
            rows.append(
                {
                    "id": number,
                    "name": run.name,
                    "folder": str(run.folder),
                    "state": _state(run),
                    "steps": max(run.steps, default=0),
                    "total_steps": facts.get("total_steps"),
                    "kept": run.kept_steps,
                    "started": facts.get("started"),
                    "device": facts.get("device", ""),
                    "ranks": facts.get("ranks", 1),
                    "versions": facts.get("versions", {}),
                    "events": run.events[-50:],
                    "damage": run.damage[:20],
                }
            )
        return rows

    def curves(self, number: int) -> Answer:
        """Return every metric of a run by step; null where a step has none."""
        run = self._run(number)
        run.refresh()
        steps = sorted(run.steps)
        metrics: dict[str, list[Any]] = {}
        for place, step in enumerate(steps):
            for name, value in run.steps[step].metrics.items():
                curve = metrics.setdefault(name, [None] * len(steps))
                curve[place] = value
        return {"steps": steps, "metrics": metrics}

    def samples(self, number: int, step: int) -> Answer:
        """Return the table of a step's samples by column."""
        samples = self._samples(number, step)
        table = samples.table
        if not len(samples):
            return {"rows": 0, "columns": {}, "widest": 0}
        mask = _offsets_and_values(table, "response_mask")
        lengths = np.diff(mask[0])
        prompt_offsets, _ = _offsets_and_values(table, "prompt_ids")
        scores = table["score"].to_numpy()
        uids = table["uid"].to_pylist()

        groups, group_of = np.unique(np.array(uids, dtype=str), return_inverse=True)
        lowest = np.full(len(groups), np.inf)
        highest = np.full(len(groups), -np.inf)
        np.minimum.at(lowest, group_of, scores)
        np.maximum.at(highest, group_of, scores)
        is_flat = (lowest == highest)[group_of]

        widest = int(lengths.max())
        data = self.runs[number].config.get("data", {})
        width = data.get("max_response_length") or widest
        columns: Answer = {
            "group": uids,
            "score": _rounded(scores),
            "length": lengths.tolist(),
            "prompt_length": np.diff(prompt_offsets).tolist(),
            "flat": is_flat.tolist(),
            "clipped": (lengths >= width).tolist(),
            "prompt": _excerpts(table["prompt"]),
            "response": _excerpts(table["response"]),
        }
        if "advantages" in table.column_names:
            columns["advantage"] = _rounded(_mean_advantages(table, mask))
        if {"rollout_log_probs", "old_log_probs"} <= set(table.column_names):
            columns["mismatch"] = _rounded(_largest_gap(table, mask))
        return {"rows": len(samples), "columns": columns, "widest": widest}

    def sample(self, number: int, step: int, row: int) -> Answer:
        """Return one trajectory with all its token values."""
        samples = self._samples(number, step)
        if row >= len(samples):
            raise DataError(f"Step {step} has {len(samples)} samples, got row {row}.")
        sample = samples[row]
        ids = sample.tokens["response_ids"].tolist()
        tokens = {}
        for name, values in sample.tokens.items():
            if name != "response_ids":
                tokens[name] = _finite(values)

        def pieces(token_ids: Sequence[int]) -> list[str]:
            return [samples.pieces.get(token, "") for token in token_ids]

        fields = dict(sample.fields)
        messages = _messages(fields)
        uids = samples.table["uid"].to_pylist()
        members = [other for other, uid in enumerate(uids) if uid == sample.uid]
        return {
            "row": row,
            "group": sample.uid,
            "members": members,
            "score": sample.score,
            "prompt": sample.prompt,
            "response": sample.response,
            "prompt_pieces": pieces(sample.prompt_ids.tolist()),
            "pieces": pieces(ids),
            "ids": ids,
            "tokens": tokens,
            "messages": messages,
            "fields": fields,
        }

    def lanes(self, number: int, step: int) -> Answer:
        """Return the spans of all processes in a step, and each one's share of idle time."""
        lanes = self._samples(number, step).lanes
        line = self.runs[number].steps.get(step)
        end_s = line.metrics.get("timing_s/step", 0.0) if line is not None else 0.0
        for lane in lanes:
            own: list[tuple[float, float]] = []
            for _, row, start, end in lane["spans"]:
                if row not in _WAITING_ROWS:
                    own.append((start, end))
            lane["busy_s"] = covered(own, end_s)
        return {"end_s": end_s, "lanes": lanes}

    def plan(self, number: int) -> Answer:
        """Return the memory plan of the configuration next to the measured peaks."""
        return self._plan(self._run(number))

    def advice(self, number: int) -> list[Answer]:
        """Return the findings about a run, the most important first."""
        run = self._run(number)
        run.refresh()
        return advise_on(run, is_live=_state(run) == "training")

    def _run(self, number: int) -> Run:
        if number >= len(self.runs):
            raise DataError(f"There are {len(self.runs)} runs, got number {number}.")
        return self.runs[number]

    def _samples(self, number: int, step: int) -> StepSamples:
        path = self._run(number).samples_file(step)
        return self._read(path, path.stat().st_mtime_ns)


def _read_file(path: Path, changed_ns: int) -> StepSamples:
    """Read a file of samples; another attempt at the step has another `changed_ns`."""
    return StepSamples(path)


def _state(run: Run) -> str:
    """Return "training", "finished", "failed", or "stopped" for a process that was killed."""
    last_event = run.events[-1]["event"] if run.events else ""
    if last_event == "end":
        return "finished"
    if last_event == "failed":
        return "failed"
    times = [line.time for line in run.steps.values()]
    newest = max(times, default=run.facts["started"])
    return "training" if time.time() - newest < _LIVE_S else "stopped"


def _plan(run: Run) -> Answer:
    """Plan the memory of a run's configuration; takes seconds, because torch loads."""
    from verl.diagnostics.profile import profile_memory

    measured = {}
    for name in ("perf/max_memory_allocated_gb", "rollout/memory_gib", "timing_s/step"):
        values = run.find_metric(name)
        if values and max(values.values()) > 0:  # a CPU has no device memory of its own
            measured[name] = max(values.values())

    text = ""
    problem = ""
    if run.facts.get("kind") != "TrainConfig":
        problem = "verl plan describes runs of verl train."
    else:
        try:
            text = str(profile_memory(config_from_dict(run.config)))
        except VerlError as error:
            problem = str(error)
    return {"text": text, "problem": problem, "measured": measured}


def _messages(fields: dict[str, Any]) -> list[Any]:
    """Take the conversation out of a row's fields: that of the agent loop, else the prompt's."""
    info = fields.get("agent_info")
    if isinstance(info, dict) and isinstance(info.get("messages"), list):
        return info["messages"]
    raw = fields.pop("raw_prompt", None)
    return raw if isinstance(raw, list) else []


def _excerpts(column: pa.ChunkedArray) -> list[str]:
    return [text[:_EXCERPT] for text in column.to_pylist()]


def _rounded(values: np.ndarray) -> list[float | None]:
    return _finite(np.round(np.asarray(values, dtype=float), 6))


def _finite(values: np.ndarray) -> list[float | None]:
    if values.dtype.kind != "f":
        return values.tolist()
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _offsets_and_values(table: pa.Table, name: str) -> Ragged:
    column = table[name].combine_chunks()
    return column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False)


def _mean_advantages(table: pa.Table, mask: Ragged) -> np.ndarray:
    """Average the advantages of each row over its tokens with mask 1."""
    offsets, counted = mask
    _, values = _offsets_and_values(table, "advantages")
    total = _of_rows(np.add, np.where(counted > 0, values, 0.0), offsets)
    count = _of_rows(np.add, (counted > 0).astype(float), offsets)
    return total / np.maximum(count, 1.0)


def _largest_gap(table: pa.Table, mask: Ragged) -> np.ndarray:
    """Return the largest |log p_rollout - log p_trainer| of each row."""
    offsets, counted = mask
    _, rollout = _offsets_and_values(table, "rollout_log_probs")
    _, trainer = _offsets_and_values(table, "old_log_probs")
    gap = np.where(counted > 0, np.abs(rollout - trainer), 0.0)
    return _of_rows(np.maximum, gap, offsets)


def _of_rows(reduce: np.ufunc, values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Reduce the values between two `offsets` each, which are at least 0 for a maximum; 0: none."""
    ended = np.append(values, 0.0)
    starts = np.minimum(offsets[:-1], len(values))
    reduced = reduce.reduceat(ended, starts)
    return np.where(offsets[1:] > offsets[:-1], reduced, 0.0)


def covered(spans: Sequence[tuple[float, float]], end_s: float) -> float:
    """Return the seconds between 0 and `end_s` that at least one span covers."""
    covered = 0.0
    reached = 0.0
    for start, end in sorted(spans):
        begins_at = max(start, reached)
        ends_at = min(end, end_s)
        if ends_at > begins_at:
            covered += ends_at - begins_at
            reached = ends_at
    return covered
