"""Rewards from services over HTTP: a sandbox that runs code, a model that judges.

Lost connections and the statuses 429, 500, 502, 503 and 504 are tried again with growing waits, or
after as long as Retry-After says. At most `max_concurrent` requests are under way, so that a slow
service slows the run and is not flooded.
"""

import json
import os
import re
import string
from collections.abc import Mapping
from typing import Any

import urllib3
from urllib3.util import parse_url

from verl.config.reward import JudgeConfig, RequestsConfig, SandboxFusionConfig
from verl.rewards.sandbox.runner import Run
from verl.utils.errors import ConfigError, RewardError

_RETRIED = (429, 500, 502, 503, 504)
_LONGEST_BACKOFF_S = 60.0
_CONNECT_TIMEOUT_S = 10.0
DEFAULT_PROMPT = """Question:
{question}

Reference answer:
{ground_truth}

Response to judge:
{response}

Rate the response from 0 (wrong) to 10 (fully correct). Explain briefly, then end with: Score: <number>"""


def _retries(requests: RequestsConfig) -> urllib3.Retry:
    class Retry(urllib3.Retry):
        """Retry-After is obeyed up to the time-out of a request; one that is no number of seconds
        or date is none."""

        def get_retry_after(self, response: Any) -> float | None:
            try:
                seconds = super().get_retry_after(response)
            except urllib3.exceptions.InvalidHeader:
                return None
            return None if seconds is None else min(seconds, requests.timeout_s)

    return Retry(
        total=requests.max_retries,
        status_forcelist=_RETRIED,
        backoff_factor=requests.backoff_s,
        backoff_max=_LONGEST_BACKOFF_S,
        # many wait for the same service: not all to come back at once
        backoff_jitter=requests.backoff_s,
        allowed_methods=None,
        raise_on_status=False,
    )


class JsonClient:
    """Posts JSON to one service, from as many threads as like; those beyond `max_concurrent` wait.

    Args:
        key: name of the configuration key that holds the address, for errors.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str,
        max_concurrent: int,
        requests: RequestsConfig,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parsed = parse_url(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{key} must be an address such as http://host:8080, got {url!r}.")
        self.url, self.key, self.requests = url.rstrip("/"), key, requests
        self._http = urllib3.PoolManager(
            maxsize=max_concurrent,
            block=True,  # a thread waits for a connection to come back
            timeout=urllib3.Timeout(
                connect=min(_CONNECT_TIMEOUT_S, requests.timeout_s), read=requests.timeout_s
            ),
            headers=dict(headers or {}),
        )

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that the service answers.

        Raises:
            RewardError: no answer after all retries, an error status, or something else than a JSON
                object.
        """
        try:
            answer = self._http.request(
                "POST", self.url + path, json=body, retries=_retries(self.requests)
            )
        except urllib3.exceptions.HTTPError as error:
            raise RewardError(f"{self.url + path} ({self.key}) gave no answer: {error}") from error
        text = answer.data.decode("utf-8", "replace")
        if answer.status != 200:
            raise RewardError(
                f"{self.url + path} ({self.key}) answered {answer.status}: {text[:300]!r}"
            )
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RewardError(
                f"{self.url + path} ({self.key}) did not answer a JSON object: {text[:300]!r}"
            )
        return value

    def check_reachable(self) -> None:
        """Any answer will do. ConfigError when there is none."""
        try:
            self._http.request("GET", self.url, retries=False)
        except urllib3.exceptions.HTTPError as error:
            raise ConfigError(
                f"{self.key}={self.url} cannot be reached: {error}. Start the service, or mend the "
                "address."
            ) from error


class SandboxService:
    """A CodeRunner that has a service run programs: SandboxFusion's `POST run_code`, or one that
    speaks like it.

    The program and its tests go as one script that prints a line for each test. A run that the
    service could not even start is its fault and an error, not the program's.
    """

    def __init__(
        self, config: SandboxFusionConfig, timeout_s: float, requests: RequestsConfig
    ) -> None:
        """`timeout_s`: the longest run of one program."""
        assert config.url is not None
        self.config, self.timeout_s, self.requests = config, timeout_s, requests
        self.max_concurrent = config.max_concurrent
        self.client = JsonClient(
            # users write the address with and without the path
            config.url.rstrip("/").removesuffix("/run_code"),
            key="reward_model.sandbox_fusion.url",
            max_concurrent=config.max_concurrent,
            requests=requests,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SandboxService, (self.config, self.timeout_s, self.requests)

    def run(self, code: str, tests: list[str], *, stdin: str | None = None) -> Run:
        token = os.urandom(8).hex()
        script = code if stdin is not None else _script(code, tests, token)
        answer = self.client.post(
            "/run_code",
            {
                "code": script,
                "stdin": stdin or "",
                "language": "python",
                "compile_timeout": self.timeout_s,
                "run_timeout": self.timeout_s,
                "memory_limit_MB": self.config.memory_limit_mb,
                "files": {},
                "fetch_files": [],
            },
        )
        result = answer.get("run_result")
        if answer.get("status") == "SandboxError" or not isinstance(result, dict):
            raise RewardError(f"The sandbox service could not run a program: {str(answer)[:300]}")
        output, error = str(result.get("stdout") or ""), str(result.get("stderr") or "")
        seconds = float(result.get("execution_time") or 0.0)
        if result.get("status") == "TimeLimitExceeded":
            status = "timeout"
        else:
            ended = stdin is not None or f"{token} end" in output
            status = "finished" if result.get("return_code") == 0 and ended else "failed"
        passed = [
            verdict == "passed"
            for verdict in re.findall(rf"^{token} (passed|failed)$", output, re.MULTILINE)
        ]
        return Run(status=status, passed=passed, output=output, error=error, seconds=seconds)


def _script(code: str, tests: list[str], token: str) -> str:
    """One script that runs the program and reports on its tests, as the sandbox of this machine
    does."""
    return (
        "import sys, types\n"
        "module = sys.modules['solution'] = types.ModuleType('solution')\n"
        f"exec(compile({code!r}, 'program.py', 'exec'), module.__dict__)\n"
        f"for test in {tests!r}:\n"
        "    try:\n"
        "        exec(compile(test, 'test.py', 'exec'), module.__dict__)\n"
        f"        print('\\n{token} passed', flush=True)\n"
        "    except BaseException:\n"
        f"        print('\\n{token} failed', flush=True)\n"
        f"print('\\n{token} end', flush=True)\n"
    )


class Judge:
    """A reward function: a model behind an OpenAI-style `chat/completions` reads the response and
    gives the score.

    The fields `score` and `judge_answer` of what it returns are the parsed number over
    `score_scale`, and the text.

    Raises:
        ConfigError: the template, the pattern or the address is wrong, or the key is not in the
            environment.
    """

    def __init__(self, config: JudgeConfig, requests: RequestsConfig) -> None:
        assert config.url is not None
        self.config, self.requests = config, requests
        self.max_concurrent = config.max_concurrent
        self._pattern = _compile(config.score_pattern)
        self._template = config.prompt or DEFAULT_PROMPT
        _check_template(self._template)
        headers = {}
        if config.api_key_env is not None:
            if config.api_key_env not in os.environ:
                raise ConfigError(
                    f"reward_model.judge.api_key_env={config.api_key_env}: no such environment "
                    "variable. Export the key, or unset api_key_env for a service without one."
                )
            headers["Authorization"] = f"Bearer {os.environ[config.api_key_env]}"
        self.client = JsonClient(
            config.url.rstrip("/").removesuffix("/chat/completions"),
            key="reward_model.judge.url",
            max_concurrent=config.max_concurrent,
            requests=requests,
            headers=headers,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Judge, (self.config, self.requests)

    def __call__(
        self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> dict[str, Any]:
        question = extra_info.get("question", "") if isinstance(extra_info, Mapping) else ""
        prompt = self._template.format(
            question=question, ground_truth=ground_truth, response=solution_str
        )
        answer = self.client.post(
            "/chat/completions",
            {
                "model": self.config.model,
                "messages": [{"role": "user", "content": prompt}],
                "temperature": self.config.temperature,
                "max_tokens": self.config.max_tokens,
            },
        )
        try:
            text = str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise RewardError(
                f"The judge's answer has no choices[0].message.content: {str(answer)[:300]}"
            ) from None
        found = self._pattern.findall(text)
        if not found:
            raise RewardError(
                f"The judge gave no score (reward_model.judge.score_pattern) in: {text[-300:]!r}"
            )
        return {"score": float(found[-1]) / self.config.score_scale, "judge_answer": text}


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"reward_model.judge.score_pattern is no regular expression: {error}."
        ) from error
    if compiled.groups != 1:
        raise ConfigError(
            "reward_model.judge.score_pattern must have one group, around the number, got "
            f"{compiled.groups} in {pattern!r}."
        )
    return compiled


def _check_template(template: str) -> None:
    known = {"question", "ground_truth", "response"}
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(
            f"reward_model.judge.prompt: {error}. Write {{{{ and }}}} for braces of its own."
        ) from error
    if not names <= known or "response" not in names:
        raise ConfigError(
            f"reward_model.judge.prompt may hold {{question}}, {{ground_truth}} and {{response}}, "
            f"the last always, got {sorted(names)}. Write {{{{ and }}}} for braces of its own."
        )
