"""Tools that run programs of the model: in the sandbox of this machine, or by a service."""

import re
import threading
from collections.abc import Callable
from typing import Any

from verl.agents.tools.base import BaseTool, Executed, ToolArgumentError
from verl.agents.tools.builtin.search import LIMITS, client_of
from verl.agents.tools.schemas import (
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_schema,
)
from verl.agents.tools.threads import run_in_thread
from verl.config.reward import RequestsConfig, SandboxConfig
from verl.rewards.sandbox.runner import LocalRunner
from verl.utils.deadline import time_left
from verl.utils.errors import RewardError

_BLOCK = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LONGEST_WAIT_S = 3600.0
# Runs a program in the sandbox. Its output is kept when it fails or is stopped, and a traceback
# begins with its own lines.
_WRAPPER = """
def run_program(code):
    import os, sys, traceback

    streams = sys.stdout, sys.stderr
    streams[0].reconfigure(line_buffering=True)
    status = 0
    try:
        exec(compile(code, "program.py", "exec"), globals())
    except SystemExit as error:
        status = error.code
        if isinstance(status, str):
            print(status, file=streams[1])
    except BaseException as error:
        traceback.print_exception(
            type(error), error, error.__traceback__.tb_next, file=streams[1]
        )
        status = 1
    for stream in streams:
        stream.flush()
    if status:
        os._exit(1)

globals().pop("run_program")({code!r})
"""


class _CodeTool(BaseTool):
    """A tool with the argument `code`."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        code = {
            "type": "string",
            "description": "A whole Python program. Only the text that it prints is returned.",
        }
        description = "Run a Python program and return the text that it prints."
        return self.tool_schema or function_schema("code_interpreter", description, {"code": code})

    def _code_of(self, parameters: dict[str, Any]) -> str:
        """Return the program, without the fence that models write around it.

        Raises:
            ToolArgumentError: there is none.
        """
        code = parameters.get("code")
        if not isinstance(code, str) or not code.strip():
            raise ToolArgumentError(f"'{self.name}' needs the argument 'code', a Python program")
        fenced = _BLOCK.search(code)
        return fenced.group(1) if fenced and code.lstrip().startswith("```") else code


class CodeInterpreterTool(_CodeTool):
    """Runs a Python program in the sandbox of this machine, each in a new process.

    Config:
        sandbox_isolation: as `reward_model.sandbox.isolation`; default auto.
        run_timeout_s: seconds of one program; default 10.
        memory_limit_mb: of one program; default 1024.
        max_concurrent: programs at once; default: one a core.
    """

    config_keys = ("sandbox_isolation", "run_timeout_s", "memory_limit_mb", "max_concurrent")

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self._runner = LocalRunner(
            SandboxConfig(
                isolation=config.get("sandbox_isolation", "auto"),
                timeout_s=float(config.get("run_timeout_s", 10)),
                memory_limit_mb=int(config.get("memory_limit_mb", 1024)),
                max_concurrent=config.get("max_concurrent"),
            )
        )
        self._slots = threading.Semaphore(self._runner.max_concurrent)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> Executed:
        """Return the program's output, and its errors where it failed."""
        return await run_in_thread(self._run, self._code_of(parameters))

    def _run(self, code: str) -> Executed:
        # Each caller of the runner has a process; they wait here for as many as there may be.
        if not self._slots.acquire(timeout=max(min(time_left(), _LONGEST_WAIT_S), 0.0)):
            raise TimeoutError("no sandbox was free in time")
        try:
            run = self._runner.run(_WRAPPER.format(code=code), [], stdin="")
        finally:
            self._slots.release()

        text = run.output
        if run.status == "timeout":
            text = _with_line(text, _stopped(self._runner.settings.timeout_s))
        elif run.status == "failed":
            text = _with_line(text, run.error)
        return ToolResponse(text=text), 0.0, {"status": run.status, "seconds": run.seconds}


class _Threads:
    """Runs functions in threads, by the calls of verl's pool: `await pool.execute.remote(...)`."""

    @property
    def execute(self) -> "_Threads":
        return self

    async def remote(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the function returns."""
        return await run_in_thread(function, *arguments)


class SandboxFusionTool(_CodeTool):
    """Has a SandboxFusion service run a program (`POST /run_code`).

    Config:
        sandbox_fusion_url: address of the service, with `/run_code` or without; required.
        default_timeout: seconds of one program; default 30.
        default_language: default python.
        memory_limit_mb: of one program; default 1024.
        num_workers, rate_limit: programs at once, at most; default 10 each.
        enable_global_rate_limit: whether `rate_limit` holds; default true.
        requests_per_s: programs that begin in a second, at most; default: no limit.
    """

    config_keys = (
        "sandbox_fusion_url",
        "default_timeout",
        "default_language",
        "memory_limit_mb",
        *LIMITS,
    )

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self.default_timeout = float(config.get("default_timeout", 30))
        self.default_language = config.get("default_language", "python")
        self.execution_pool = _Threads()
        self._memory_limit_mb = int(config.get("memory_limit_mb", 1024))

        self._client = client_of(
            self,
            "sandbox_fusion_url",
            example=(
                "http://127.0.0.1:8080/run_code. For the sandbox of this machine, use "
                "verl.agents.tools.builtin.code.CodeInterpreterTool."
            ),
            at_once=10,
            # The service answers late programs itself; this is for a service that hangs.
            requests=RequestsConfig(timeout_s=2 * self.default_timeout + 10),
            path="/run_code",
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> Executed:
        """Return the program's output and errors.

        Raises:
            RuntimeError: the service could not run it.
        """
        code = self._code_of(parameters)
        timeout_s = float(parameters.get("timeout", self.default_timeout))
        language = str(parameters.get("language", self.default_language))
        return await run_in_thread(self._run, code, min(timeout_s, self.default_timeout), language)

    def execute_code(
        self, instance_id: str, code: str, timeout: float = 30, language: str = "python"
    ) -> ToolResponse:
        """Run a program and return its output and errors, for subclasses in verl's form.

        They call `await self.execution_pool.execute.remote(self.execute_code, ...)`.
        """
        response, _, _ = self._run(code, min(float(timeout), self.default_timeout), language)
        return response

    def _run(self, code: str, timeout_s: float, language: str) -> Executed:
        request = {
            "code": code,
            "stdin": "",
            "language": language,
            "compile_timeout": timeout_s,
            "run_timeout": timeout_s,
            "memory_limit_MB": self._memory_limit_mb,
            "files": {},
            "fetch_files": [],
        }
        try:
            answer = self._client.post("/run_code", request)
        except RewardError as error:
            raise RuntimeError(f"the sandbox service failed: {error}") from error

        result = answer.get("run_result") or answer.get("compile_result")
        if answer.get("status") == "SandboxError" or not isinstance(result, dict):
            raise RuntimeError(f"the sandbox service could not run it: {str(answer)[:300]}")
        text = str(result.get("stdout") or "") + str(result.get("stderr") or "")
        if result.get("status") == "TimeLimitExceeded":
            text = _with_line(text, _stopped(timeout_s))
        return ToolResponse(text=text), 0.0, {"status": str(result.get("status", ""))}


def _stopped(timeout_s: float) -> str:
    return f"The program was stopped after {timeout_s:g} s."


def _with_line(text: str, line: str) -> str:
    """Return a text with a line added to it."""
    if text and not text.endswith("\n"):
        text += "\n"
    return text + line
