"""Serve a model to clients of OpenAI's API, until Ctrl-C."""

import asyncio
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import replace
from typing import Any

from verl.agents.boundary import ChatBoundary
from verl.agents.formats import CallFormat, recognise_format, tool_format
from verl.agents.gateway.served import ServedBackend, ServedEngine
from verl.agents.gateway.server import GatewayServer, check_address
from verl.agents.gateway.wording import Wording
from verl.config.rollout import RolloutConfig
from verl.config.serve import SHARED, ServeConfig
from verl.config.train import TrainConfig
from verl.models.load import load_model_config
from verl.rollout import RolloutEngine, Room, generate
from verl.rollout.types import Request, SamplingParams
from verl.trainer import setup
from verl.utils.devices import describe_device
from verl.utils.errors import ConfigError
from verl.utils.logging import logger
from verl.workers import RolloutWorker
from verl.workers.trained import model_source

# Without rollout.max_model_len. Tables and pages of the engine grow with it.
MOST_TOKENS = 8192


def serve(config: ServeConfig) -> None:
    """Load the model and serve it until SIGINT.

    Raises ConfigError and ModelError for a model that cannot be served, before it listens.
    """
    asyncio.run(_serve_until_interrupted(config))


def build_server(config: ServeConfig, backend: ServedBackend) -> GatewayServer:
    """Make the server of a backend. It does not listen yet."""
    return GatewayServer(
        backend,
        host=config.server.host,
        port=config.server.port,
        max_request_mib=config.server.max_request_mib,
        timeout_s=config.server.timeout_s,
    )


def build_backend(config: ServeConfig) -> ServedBackend:
    """Load tokenizer and model, and make the engine and its backend."""
    train = SHARED.as_train_config(config)
    rollout = train.actor_rollout_ref.rollout
    device = setup.prepare_for_generation(config.trainer, train)
    rollout.max_model_len = _most_tokens(train)
    tokenizer = setup.build_tokenizer(train)
    call_format = _tool_format(config, tokenizer)
    api_key = _api_key(config.server.api_key_env)
    logger.info("Device: %s", describe_device(device))
    worker = RolloutWorker(
        train.actor_rollout_ref, device=device, tokenizer=tokenizer, loads_weights=True
    )
    engine = worker.engine
    # Requests come one by one; with all tables at hand, none makes the others start again.
    engine.reserve(Room(sequences=rollout.max_num_seqs, tokens=rollout.max_model_len))

    warm_up(engine, tokenizer)

    boundary = ChatBoundary(tokenizer)
    return ServedBackend(
        ServedEngine(engine, seed=rollout.seed),
        Wording(tokenizer, boundary, call_format),
        params=_default_params(rollout),
        max_model_len=rollout.max_model_len,
        api_key=api_key,
        model=config.server.model_name or str(config.model.path),
        is_lenient=config.server.on_unsupported == "ignore",
    )


def warm_up(engine: RolloutEngine, tokenizer: Any) -> None:
    """Draw a token, so that kernels are compiled and memory is allocated before clients come."""
    token = next(iter(tokenizer.get_vocab().values()))
    request = Request(prompt_ids=(token,), sample_ids=(0,))
    for _ in generate(engine, [request], SamplingParams(max_new_tokens=2), seed=0, step=0):
        engine.forget_prefixes()


def _api_key(variable: str | None) -> str:
    """Return the key in an environment variable, or make one."""
    if variable is None:
        return f"sk-{secrets.token_urlsafe(24)}"
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"server.api_key_env={variable}: the environment variable '{variable}' is not set. "
            "Export it with a text that is hard to guess, or leave the key unset for a new one."
        )
    return key


def _most_tokens(train: TrainConfig) -> int:
    """Return the most tokens of a prompt and its reply."""
    asked = train.actor_rollout_ref.rollout.max_model_len
    if asked is not None:
        return asked
    model = load_model_config(**model_source(train.actor_rollout_ref.model))
    positions = getattr(model.get_text_config(), "max_position_embeddings", None)
    return min(positions or MOST_TOKENS, MOST_TOKENS)


def _tool_format(config: ServeConfig, tokenizer: Any) -> CallFormat | None:
    """Return the format of tool calls; None where the template shows no known one."""
    name = config.server.tool_format
    if name is None:
        name = recognise_format(tokenizer.chat_template)
    if name is None:
        logger.info(
            "The chat template shows no known format of tool calls, so requests with tools are "
            "refused. server.tool_format names one."
        )
        return None

    try:
        return tool_format(name, tokenizer)
    except ConfigError as error:
        message = str(error).replace("rollout.multi_turn.format", "server.tool_format")
        raise ConfigError(message) from error


def _default_params(rollout: RolloutConfig) -> SamplingParams:
    """Return the sampling parameters of requests that name none."""
    params = setup.sampling_params(rollout)
    most = rollout.max_model_len or MOST_TOKENS
    return replace(params, max_new_tokens=most, top_k=rollout.top_k or -1)


async def _serve_until_interrupted(config: ServeConfig) -> None:
    check_address(config.server.host, config.server.port)  # loading a model may take minutes
    stopped = asyncio.Event()
    backend = build_backend(config)
    async with build_server(config, backend) as server:
        _announce(server.url, backend, has_new_key=config.server.api_key_env is None)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            # A second Ctrl-C does not wait for running requests.
            loop.remove_signal_handler(signal.SIGINT)
            stopped.set()

        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            await server.run_until(stopped)
        finally:
            with suppress(RuntimeError):  # the loop is closing
                loop.remove_signal_handler(signal.SIGINT)

    counts = backend.engine.counts
    logger.info(
        "Stopped. Answered %d requests with %d tokens; %d were given up by their clients.",
        counts["requests"],
        counts["generated_tokens"],
        counts["aborted"],
    )


def _announce(url: str, backend: ServedBackend, *, has_new_key: bool) -> None:
    """Print the address and, if it was made for this run, the key."""
    key = backend.api_key if has_new_key else "KEY"
    body = f'{{"model": "{backend.model}", "messages": [{{"role": "user", "content": "Hi"}}]}}'
    print(
        f"Serving {backend.model} at {url}/v1, up to {backend.max_model_len} tokens a "
        "conversation. Ctrl-C ends it."
    )
    if has_new_key:
        print(f"API key, made for this run: {key}")
    print(
        f"Try: curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' -d '{body}'",
        flush=True,
    )
