"""Records of runs that were never trained: written by the writer itself, in milliseconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.tracking.records import RecordWriter, json_column, samples_table, token_lists

HOSTILE = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script>&amp;\'"'


def write_record(
    folder: Path,
    *,
    steps: int = 2,
    num_rows: int = 8,
    texts: Sequence[str] = ("a short answer",),
    messages: list[dict[str, Any]] | None = None,
) -> RecordWriter:
    """Write a record of `steps` steps with `num_rows` samples each, in groups of four."""
    writer = RecordWriter(folder, keep_steps=20, max_bytes=1 << 30)
    facts = {
        "config": {"trainer": {"default_local_dir": str(folder)}},
        "kind": "Other",
        "total_steps": steps,
        "started": 0.0,
        "device": "cpu",
        "ranks": 1,
    }
    writer.start(facts, 0)
    for step in range(1, steps + 1):
        table = toy_table(num_rows, texts, messages)
        writer.add_samples(step, table)
        metrics = {"critic/score/mean": step / steps, "timing_s/step": 0.5}
        writer.add_line({"step": step, "time": float(step), "metrics": metrics})
    writer.add_line({"event": "end", "step": steps, "time": 9.0})
    return writer


def toy_table(
    num_rows: int, texts: Sequence[str], messages: list[dict[str, Any]] | None = None
) -> pa.Table:
    """Make a table of samples of two to six tokens; the first group has one score for all."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 7, num_rows)
    total = int(lengths.sum())
    scores = (np.arange(num_rows) % 4).astype(float)
    scores[:4] = 1.0
    fields: dict[str, list[Any]] = {"data_source": ["toy"] * num_rows}
    if messages is not None:
        fields["agent_info"] = [{"messages": messages}] * num_rows
    log_probs = -generator.random(total).astype(np.float32)
    columns = {
        "uid": pa.array([f"1-{row // 4}" for row in range(num_rows)]),
        "score": pa.array(scores),
        "prompt": pa.array([f"prompt {row // 4} {texts[0]}" for row in range(num_rows)]),
        "response": pa.array([texts[row % len(texts)] for row in range(num_rows)]),
        "reward_parts": json_column({"right": [1.0] * num_rows}, num_rows),
        "fields": json_column(fields, num_rows),
        "prompt_ids": token_lists(np.ones(3 * num_rows, np.int32), np.full(num_rows, 3)),
        "response_ids": token_lists(np.arange(total, dtype=np.int32) % 5, lengths),
        "response_mask": token_lists(np.ones(total, np.int8), lengths),
        "rollout_log_probs": token_lists(log_probs, lengths),
        "old_log_probs": token_lists(log_probs * np.float32(1.1), lengths),
        "advantages": token_lists(np.linspace(-1, 1, total, dtype=np.float32), lengths),
    }
    lanes = [{"name": "driver (pid 1)", "spans": [["gen", "rollout", 0, 200_000]]}]
    pieces = {token: texts[-1] if token == 3 else f"t{token} " for token in range(5)}
    return samples_table(columns, lanes=lanes, pieces=pieces)
