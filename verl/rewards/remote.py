"""Rewards from services over HTTP: a sandbox that runs code, a model that judges."""

import math
import os
import re
import string
from collections.abc import Mapping
from typing import Any

from verl.config.reward import JudgeConfig, RequestsConfig, SandboxFusionConfig
from verl.rewards.json_client import JsonClient, authorization, chat_advice
from verl.rewards.sandbox.runner import Run
from verl.utils.errors import ConfigError, RewardError

DEFAULT_PROMPT = """Question:
{question}

Reference answer:
{ground_truth}

Response to judge:
{response}

Rate the response from 0 (wrong) to 10 (fully correct). Explain briefly, then end with: Score: <number>"""

_JUDGE = "reward_model.judge"  # section of the configuration


class SandboxService:
    """A CodeRunner that uses a service: SandboxFusion's `POST run_code`, or a compatible one.

    It sends the program and its tests as one script, which prints a line for each test. A run that
    the service cannot start is an error of the service, not a failure of the program.
    """

    def __init__(
        self, config: SandboxFusionConfig, timeout_s: float, requests: RequestsConfig
    ) -> None:
        """Connect to the service. `timeout_s` limits the run of one program."""
        assert config.url is not None
        self.config = config
        self.timeout_s = timeout_s
        self.requests = requests
        self.max_concurrent = config.max_concurrent
        self.client = JsonClient(
            # Users write the address with and without the path.
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
        output = str(result.get("stdout") or "")
        error = str(result.get("stderr") or "")
        seconds = float(result.get("execution_time") or 0.0)

        if result.get("status") == "TimeLimitExceeded":
            status = "timeout"
        else:
            ended = stdin is not None or f"{token} end" in output
            status = "finished" if result.get("return_code") == 0 and ended else "failed"

        verdicts = re.findall(rf"^{token} (passed|failed)$", output, re.MULTILINE)
        passed = [verdict == "passed" for verdict in verdicts]
        return Run(status=status, passed=passed, output=output, error=error, seconds=seconds)


def _script(code: str, tests: list[str], token: str) -> str:
    """Make a script that runs the program and reports its tests, as this machine's sandbox does."""
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
    """A reward function that asks a model behind an OpenAI-style `chat/completions` for a score.

    It returns `score`, the parsed number divided by `score_scale`, and `judge_answer`, the text.

    Raises:
        ConfigError: the template, the pattern or the address is wrong, or the key is not in the
            environment.
    """

    def __init__(self, config: JudgeConfig, requests: RequestsConfig) -> None:
        assert config.url is not None
        self.config = config
        self.requests = requests
        self.max_concurrent = config.max_concurrent
        self._pattern = _compile(config.score_pattern)
        self._template = config.prompt or DEFAULT_PROMPT
        _check_template(self._template)

        self.client = JsonClient(
            config.url.rstrip("/").removesuffix("/chat/completions"),
            key="reward_model.judge.url",
            max_concurrent=config.max_concurrent,
            requests=requests,
            headers=authorization(_JUDGE, config.api_key_env),
            advice=chat_advice(_JUDGE, config.url, config.api_key_env),
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
            choice = answer["choices"][0]
            content = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise RewardError(
                f"The judge's answer has no choices[0].message.content: {str(answer)[:300]}"
            ) from None

        text = "" if content is None else str(content)
        found = self._pattern.findall(text)
        if not found:
            is_cut = choice.get("finish_reason") == "length"
            advice = (
                f"It was cut: raise reward_model.judge.max_tokens={self.config.max_tokens}"
                if is_cut
                else "Ask for that form in reward_model.judge.prompt, or set another pattern"
            )
            raise RewardError(
                "The judge must answer with a score in the form of "
                f"reward_model.judge.score_pattern ({self.config.score_pattern}), got "
                f"{text[-300:]!r}. {advice}"
            )

        return {"score": self._score(found[-1]), "judge_answer": text}

    def _score(self, number: str) -> float:
        """Return the judge's number divided by the scale.

        Raises:
            RewardError: it is no number, or outside of the scale. The scale of our own prompt
                begins at 0; with a user's prompt, scores down to minus `score_scale` are allowed.
        """
        highest = self.config.score_scale
        lowest = 0.0 if self.config.prompt is None else -highest
        try:
            value = float(number.replace(",", "."))
        except ValueError:
            value = math.nan
        if not lowest <= value <= highest:
            raise RewardError(
                f"The judge must give a score from {lowest:g} to {highest:g} "
                f"(reward_model.judge.score_scale), got {number[:40]!r}"
            )
        return value / highest


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"reward_model.judge.score_pattern is not a regular expression: {error}."
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
