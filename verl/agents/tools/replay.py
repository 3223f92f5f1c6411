"""Record the results of all calls, and give them again without the tools.

A record is a file of JSON lines: the schemas of the tools, then one line for each call and one for
the end of each trajectory. Each line is written at once, so a run that dies loses no complete line.
A step that a resumed run makes again writes its calls again; the last line of a call counts.
"""

import base64
import copy
import io
import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from verl.agents.formats.base import ToolCall, ToolSchemas
from verl.agents.tools.results import ToolResult
from verl.utils.errors import DataError, describe_error
from verl.utils.logging import say_once
from verl.utils.whole_file import cut_unfinished_line

_VERSION = 1
# Modes of images that PNG keeps as they are.
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


class CallKey(NamedTuple):
    """Which call of a run: `row` counts trajectories of the batch, `call` the calls of the turn."""

    step: int
    row: int
    turn: int
    call: int

    def __str__(self) -> str:
        return f"step {self.step}, row {self.row}, turn {self.turn}, call {self.call}"


class Recorder:
    """Appends the calls of a run to a file. Threads may share it.

    Raises:
        DataError: the file cannot be written.
    """

    def __init__(self, path: str | Path, schemas: ToolSchemas) -> None:
        self._path = Path(path).expanduser()
        self._lock = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o644)
            cut_unfinished_line(self._path)
        except OSError as error:
            raise DataError(
                f"The record of tool calls '{path}' cannot be written: {error}. Name a file in a "
                "folder that this user may write to."
            ) from error
        self._write({"kind": "tools", "version": _VERSION, "schemas": list(schemas)})

    def add_call(
        self,
        key: CallKey,
        call: ToolCall,
        result: ToolResult,
        extra_fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one call.

        Args:
            extra_fields: of the episode's AgentData after the calls of the turn. Values that JSON
                lacks are left out, with a warning.

        Raises:
            DataError: the result holds an image that no file format keeps bit for bit.
        """
        values = dict(vars(result))
        values["images"] = [_pack_media(value, key) for value in result.images]
        values["videos"] = [_pack_media(value, key) for value in result.videos]
        line = {"kind": "call", **key._asdict(), **_question(call), "result": values}

        kept = {}
        for name, value in (extra_fields or {}).items():
            if _survives_json(value):
                kept[name] = value
            else:
                say_once(
                    f"The record of tool calls leaves out extra_fields['{name}'], a "
                    f"{type(value).__name__}, which JSON lacks: its replay does without it.",
                    logging.WARNING,
                )

        if kept:
            line["extra_fields"] = kept
        self._write(line)

    def add_end(self, step: int, row: int, rewards: Mapping[str, float], consequence: str) -> None:
        """Write the end of a trajectory."""
        line = {"kind": "end", "step": step, "row": row, "rewards": dict(rewards)}
        self._write({**line, "consequence": consequence})

    def close(self) -> None:
        """Bring the file to the disk and close it."""
        with self._lock:
            if self._file >= 0:
                os.fsync(self._file)
                os.close(self._file)
                self._file = -1

    def _write(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode("ascii")
        with self._lock:
            while data:  # a disk that is nearly full takes a part
                data = data[os.write(self._file, data) :]


class Recording:
    """The calls of a file, by key.

    Raises:
        DataError: no such file, or a line that is no record of calls.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self.schemas: list[dict[str, Any]] = []
        self._calls: dict[CallKey, dict[str, Any]] = {}
        self._ends: dict[tuple[int, int], dict[str, Any]] = {}
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise DataError(
                f"The record of tool calls '{path}' cannot be read: {error}. Name a file that a "
                "run has recorded."
            ) from error

        lines = data.split(b"\n")
        for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or unfinished
            self._read_line(number, line)
        if not self.schemas and not self._calls:
            raise DataError(f"'{path}' holds no record of tool calls.")

    def result(self, key: CallKey, call: ToolCall) -> ToolResult:
        """Return the recorded result of a call.

        Raises:
            DataError: there is none, or it belongs to a call with other arguments.
        """
        line = self._calls.get(key)
        asked = _question(call)
        if line is None:
            raise DataError(
                f"'{self._path}' has no call for {key}: {_describe(asked)}. The run that it "
                "records took another course; replay needs the same weights, data and seed."
            )
        recorded = {name: line.get(name) for name in asked}
        if _canonical(recorded) != _canonical(asked):
            raise DataError(
                f"'{self._path}', {key}: the recorded call is {_describe(recorded)}, this run "
                f"makes {_describe(asked)}. Replay needs the same weights, data and seed."
            )

        values = dict(line["result"])
        values["images"] = [_unpack_media(value) for value in values["images"]]
        values["videos"] = [_unpack_media(value) for value in values["videos"]]
        return ToolResult(**values)

    def extra_fields(self, key: CallKey) -> dict[str, Any]:
        """Return the `extra_fields` of the episode that were recorded with a call."""
        return copy.deepcopy(self._calls[key].get("extra_fields", {}))

    def end(self, step: int, row: int) -> tuple[dict[str, float], str]:
        """Return the rewards of a trajectory's tools, and the consequence of its failures.

        Raises:
            DataError: the recorded trajectory has no end.
        """
        line = self._ends.get((step, row))
        if line is None:
            raise DataError(
                f"'{self._path}' has no end of the trajectory of step {step}, row {row}. Record "
                "the run again."
            )
        return dict(line["rewards"]), line["consequence"]

    def _read_line(self, number: int, line: bytes) -> None:
        try:
            values = json.loads(line)
            kind = values["kind"]
            if kind == "tools":
                self.schemas = values["schemas"]
            elif kind == "call":
                key = CallKey(values["step"], values["row"], values["turn"], values["call"])
                self._calls[key] = values
            else:
                self._ends[values["step"], values["row"]] = values

        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"'{self._path}', line {number}, is no record of tool calls: "
                f"{describe_error(error)}. Record the run again."
            ) from error


def _survives_json(value: Any) -> bool:
    """Return whether JSON gives an equal value back."""
    try:
        back = json.loads(json.dumps(value))
        return back == value or repr(back) == repr(value)  # NaN equals nothing
    except (TypeError, ValueError, RecursionError):
        return False


def _question(call: ToolCall) -> dict[str, Any]:
    """Return the part of a call that its result belongs to."""
    question: dict[str, Any] = {"tool": call.name, "arguments": call.arguments}
    if call.arguments is None:
        question["raw"] = call.raw
    return json.loads(json.dumps(question, default=str))


def _canonical(question: Mapping[str, Any]) -> str:
    return json.dumps(question, sort_keys=True)


def _describe(question: Mapping[str, Any]) -> str:
    arguments = json.dumps(question["arguments"], sort_keys=True)
    return f"{question['tool']}({arguments[:300]})"


def _pack_media(value: Any, key: CallKey) -> Any:
    """Return an image or video as a value for JSON."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if getattr(value, "mode", None) in _PNG_MODES and hasattr(value, "save"):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return {"png": base64.b64encode(buffer.getvalue()).decode("ascii")}
    try:
        return {"json": json.loads(json.dumps(value))}
    except (TypeError, ValueError) as error:
        raise DataError(
            f"The result of {key} holds a {type(value).__name__}, which a record cannot keep bit "
            "for bit. Return images of PIL (8 bits a channel), bytes, paths or addresses."
        ) from error


def _unpack_media(value: dict[str, Any]) -> Any:
    """Undo `_pack_media`."""
    if "bytes" in value:
        return base64.b64decode(value["bytes"])
    if "png" in value:
        from PIL import Image  # a run without images does without it

        image = Image.open(io.BytesIO(base64.b64decode(value["png"])))
        image.load()
        return image
    return value["json"]
