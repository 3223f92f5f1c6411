"""Checks of a server before a run begins: a real generation, the model, the tokenizer."""

import importlib.util
import json
import math
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version
from transformers import PreTrainedConfig

from verl.config.rollout import RolloutConfig
from verl.models.vision import family_of, reads_pictures
from verl.rollout.servers.in_process import check_in_process, import_vllm
from verl.rollout.servers.server import Draw, Drawn, Server, ServerFacts, ServerLostError
from verl.rollout.types import SamplingParams
from verl.utils.addresses import is_http
from verl.utils.errors import ConfigError, RolloutError

_SECTION = "actor_rollout_ref.rollout"
_TEXT = "The quick brown fox: 12 + 34 = 46.\n"
# With the temperature in the log-probs, gaps between them double at half the temperature.
_HALF = 0.5
# Prints whether a package is installed, without the many seconds that its import would take. A
# mere folder of that name on the search path has no origin.
_FINDS = """
import sys
from importlib.util import find_spec
spec = find_spec(sys.argv[1])
print("missing" if spec is None or spec.origin is None else "found")
"""
_FINDS_S = 60.0  # an interpreter on a cold network disk may take long


def check_settings(config: RolloutConfig) -> None:
    """Raise ConfigError for settings of servers that exclude each other or reach none."""
    if config.weight_transport == "broadcast":
        raise ConfigError(
            f"{_SECTION}.weight_transport=broadcast reaches no server. Leave it unset, or set disk."
        )
    if config.lora_weights == "adapter" and config.weight_transport not in (None, "disk"):
        raise ConfigError(
            f"{_SECTION}.lora_weights=adapter sends adapters in a folder, got {_SECTION}."
            f"weight_transport={config.weight_transport}. Leave the latter unset, or set "
            "lora_weights=merged."
        )

    for url in config.server_urls:
        if not is_http(url):
            raise ConfigError(
                f"{_SECTION}.server_urls must be addresses such as http://host:8000, got {url!r}."
            )

    if config.server_urls and config.server_python is not None:
        raise ConfigError(
            f"{_SECTION}.server_urls names servers that run, and {_SECTION}.server_python asks "
            "to start some. Set one of them."
        )
    if config.in_process:
        check_in_process(config)


def check_pictures(
    server_class: type[Server], config: RolloutConfig, model: PreTrainedConfig
) -> None:
    """Raise ConfigError for a model with pictures that servers would see otherwise."""
    if not reads_pictures(model):
        return
    if config.server_urls and server_class.keeps_features:
        raise ConfigError(
            f"{_SECTION}.name={config.name} takes pictures with servers that the run starts, got "
            f"{_SECTION}.server_urls={list(config.server_urls)}: after new weights, yours may go "
            "on with features of the old vision tower. Leave server_urls unset, and set "
            f"server_python to the interpreter of an environment with {server_class.title}; or set "
            "name=vllm or name=embedded."
        )
    if family_of(model).sees_itself:
        raise ConfigError(
            f"{_SECTION}.name={config.name} does not support the pictures of the family "
            f"'{model.model_type}', whose tokens a server places otherwise than the trainer. Set "
            "it to embedded."
        )


def check_service(server_class: type[Server], config: RolloutConfig) -> None:
    """Raise RolloutError or ConfigError if no server can be used, or none be started."""
    if config.in_process:
        import_vllm()
        return
    for url in config.server_urls:
        check_server(server_class(url), allow_untested=config.allow_untested_servers)
    if config.server_urls:
        return

    package = server_class.package
    if config.server_python is not None:
        _check_interpreter(server_class, config.server_python)
        return
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{_SECTION}.name={config.name} needs {server_class.title}, which is not "
            f"installed next to this package. Start a server and set "
            f"{_SECTION}.server_urls=[http://host:8000]: {how_to_start(server_class)}; or "
            f"set {_SECTION}.server_python to the interpreter of an environment that has it; or "
            f"set {_SECTION}.name={RolloutConfig().name}."
        )


def _check_interpreter(server_class: type[Server], python: str) -> None:
    """Raise ConfigError for an interpreter that cannot start a server."""
    package = server_class.package
    needed = (
        f"{_SECTION}.server_python must be a Python interpreter of an environment with "
        f"{server_class.title}"
    )
    if shutil.which(python) is None:
        raise ConfigError(f"{needed}, got {python!r}, which is no program.")

    try:
        ended = subprocess.run(
            [python, "-c", _FINDS, package],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_FINDS_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{needed}, got {python!r}, which does not run: {error}.") from error

    answer = ended.stdout.strip()
    if answer == "missing":
        raise ConfigError(
            f"{needed}, got {python!r}, which has no package '{package}'. Install it there: "
            f"{shlex.join([python, '-m', 'pip', 'install', package])}; or name another interpreter."
        )
    if answer != "found":
        lines = ended.stderr.strip().splitlines() or [f"it printed {answer[:80]!r}"]
        raise ConfigError(f"{needed}, got {python!r}, which runs no Python: {lines[-1]}.")


def how_to_start(server_class: type[Server], model: str = "MODEL", port: int = 8000) -> str:
    """Return the command that starts a server."""
    words = []
    for name, value in server_class.environment().items():
        words.append(f"{name}={value}")
    command = server_class.command("python", model, port)
    return shlex.join([*words, *command])


def check_server(
    server: Server,
    model: Any = None,
    tokenizer: Any = None,
    longest: int | None = None,
    *,
    allow_untested: bool = False,
) -> None:
    """Raise RolloutError or ConfigError for a server that cannot draw for this run.

    Args:
        server: asked for its model, and for a few tokens.
        model: the trainer's; None: the server's model is not compared.
        tokenizer: the trainer's.
        longest: most tokens of a prompt and its response.
        allow_untested: whether its version may be newer than those that were tested.
    """
    path = "MODEL" if model is None else str(model.name_or_path)
    port = urlsplit(server.url).port or 8000
    way = server.way_out or (
        f"Start one with `{how_to_start(type(server), path, port)}`, or correct "
        "actor_rollout_ref.rollout.server_urls and name."
    )

    try:
        facts = server.facts()
        _check_version(server, facts, allow_untested)
        if server.is_paused:  # it would not answer
            raise RolloutError(
                f"{server.name} is paused: a run that was killed while it pushed weights has left "
                f"it so, or another run is pushing. If none is, `curl -X POST {server.url}/resume` "
                "lets it go on."
            )
        drawn = server.draw(_two_tokens())
    except ServerLostError as error:
        raise RolloutError(f"{error}. {way}") from error
    except RolloutError as error:
        raise RolloutError(f"{error} {way}") from error

    _check_drawn(server, drawn, way)
    if longest is not None and facts.max_model_len is not None and facts.max_model_len < longest:
        raise ConfigError(
            f"{server.name} takes {facts.max_model_len} tokens of a prompt and its response, and "
            f"this run needs {longest}. Start it with a larger limit, or lower "
            "data.max_prompt_length or data.max_response_length."
        )

    if model is not None:
        _check_model(server, facts, path)
    if tokenizer is not None:
        _check_tokenizer(server, tokenizer)


def _two_tokens() -> Draw:
    """Return a short draw. A server refuses a name that another run draws under at this moment."""
    return Draw(
        request_id=f"verl-health-{secrets.token_hex(4)}",
        prompt_ids=(0, 1),
        params=SamplingParams(max_new_tokens=2, temperature=1.0),
        limit=2,
        seed=0,
        stop_token_ids=(),
    )


def check_log_probs(server: Server, config: RolloutConfig, prompt_ids: Sequence[int]) -> None:
    """Raise ConfigError if the server's log-probs are not those of the whole vocabulary, after the
    temperature, for the sampling settings of training."""
    if not config.do_sample:
        return
    is_filtered = config.top_p < 1 or config.top_k > 0 or config.min_p > 0
    if config.temperature == 1 and not (is_filtered and server.filters_log_probs):
        return

    first, second = server.top_two(prompt_ids, 1.0)
    cold_first, cold_second = server.top_two(prompt_ids, _HALF)
    ratio = math.nan
    if first > second:
        ratio = (cold_first - cold_second) / (first - second)
    has_temperature = ratio > 1.5
    if config.temperature != 1 and not has_temperature:
        raise ConfigError(
            f"{server.name} returns log-probs from before the temperature, and "
            f"actor_rollout_ref.rollout.temperature={config.temperature}: they cannot be "
            "converted. Start vLLM with --logprobs-mode processed_logprobs (SGLang without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB), or set temperature=1."
        )
    if is_filtered and server.filters_log_probs and has_temperature:
        raise ConfigError(
            f"{server.name} normalizes log-probs over the tokens that top_p, top_k and min_p keep; "
            "they cannot be converted to those of the whole vocabulary. Set "
            "actor_rollout_ref.rollout.top_p=1, top_k=-1 and min_p=0; or start vLLM with "
            "--logprobs-mode raw_logprobs and set temperature=1."
        )


def _check_version(server: Server, facts: ServerFacts, allow_untested: bool) -> None:
    oldest = server.oldest
    use = "the calls of this engine"
    if server.has_vision:
        oldest = server.oldest_with_pictures
        use = "its calls with pictures"
    try:
        release = Version(facts.version).release
    except InvalidVersion:
        return  # a build from source

    tested = f"pip install '{server.package}>={oldest},<{server.untested}'"
    if release < Version(oldest).release:
        raise ConfigError(
            f"{server.name} is version {facts.version}; {use} are tested with {oldest} and later. "
            f"Upgrade it in its own environment: {tested}."
        )
    if release >= Version(server.untested).release and not allow_untested:
        raise ConfigError(
            f"{server.name} is version {facts.version}; {use} are tested with versions before "
            f"{server.untested}. Install one of them in its own environment: {tested}. Or set "
            f"{_SECTION}.allow_untested_servers=True: weights and answers are checked all the same."
        )


def _check_drawn(server: Server, drawn: Drawn, way: str) -> None:
    """Raise RolloutError unless tokens came, each with a finite log-prob."""
    if not drawn.token_ids or len(drawn.token_ids) != len(drawn.log_probs):
        raise RolloutError(
            f"{server.name} was asked for 2 tokens with their log-probs and returned "
            f"{len(drawn.token_ids)} and {len(drawn.log_probs)}. {way}"
        )

    if not all(map(math.isfinite, drawn.log_probs)):
        raise RolloutError(
            f"{server.name} draws tokens with log-probs that are not finite: its weights are "
            f"broken. Restart it. {way}"
        )


def _check_model(server: Server, facts: ServerFacts, path: str) -> None:
    """Compare names, and of two local folders the configurations: a folder may have moved."""
    if facts.model == path or Path(facts.model).name == Path(path).name:
        return
    theirs = _config_of(facts.model)
    ours = _config_of(path)
    if theirs is not None and theirs == ours:
        return
    raise ConfigError(
        f"{server.name} runs the model '{facts.model}', and actor_rollout_ref.model.path is "
        f"'{path}'. Start it with that model, or correct server_urls."
    )


def _config_of(folder: str) -> dict[str, Any] | None:
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        values.pop(name, None)
    return values


def _check_tokenizer(server: Server, tokenizer: Any) -> None:
    theirs = server.tokenize(_TEXT)
    ours = tokenizer.encode(_TEXT, add_special_tokens=False)
    if theirs is not None and theirs != ours:
        raise ConfigError(
            f"{server.name} has another tokenizer: it reads {_TEXT!r} as {theirs[:12]}, and the "
            f"run's tokenizer as {ours[:12]}. Start it with the model's own tokenizer, or set "
            "data.tokenizer."
        )
