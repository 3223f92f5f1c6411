"""The configuration tree of `verl serve`."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.gateway import GatewayConfig
from verl.config.generation import SHARED as SHARED
from verl.config.generation import ServedModelConfig
from verl.config.rollout import EngineConfig
from verl.config.rule_table import Messages
from verl.config.setting import as_in, setting
from verl.config.trainer import DeviceConfig
from verl.utils.addresses import is_loopback


@dataclass(kw_only=True, slots=True)
class ServeRolloutConfig(EngineConfig):
    seed: int = setting(0, "seed of the noise of requests without one", at_least=0)
    temperature: float = setting(1.0, "of requests that name none", at_least=0)
    top_k: int = setting(-1, "of requests that name none; -1: all tokens", at_least=-1)
    top_p: float = setting(1.0, "of requests that name none", above=0, at_most=1)
    min_p: float = setting(0.0, "of requests that name none", at_least=0, at_most=1)
    stop: Any = setting([], "texts that end a reply, of requests that name none", many=True)
    max_model_len: int | None = setting(
        None, "most tokens of prompt and reply; null: the model's, at most 8192", above=0
    )
    max_num_seqs: int = setting(256, "replies drawn at once", above=0)


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to listen on: this machine alone")
    port: int = setting(8000, "port to listen on; 0: a free one", at_least=0, at_most=65535)
    api_key_env: str | None = setting(
        None,
        "environment variable with the key that requests must have; null: a new key is made and "
        "printed",
    )
    model_name: str | None = setting(
        None, "name of the model for clients; null: model.path as it is written"
    )
    tool_format: str | None = setting(
        None, "how the model writes tool calls; null: recognized from its chat template"
    )
    on_unsupported: str = setting(
        "error",
        "a request for a feature that the engine lacks (response_format, penalties); error: "
        "it is refused; ignore: it is answered without",
        choices=("error", "ignore"),
    )
    timeout_s: float = as_in(GatewayConfig, "request_timeout_s")
    max_request_mib: float = as_in(GatewayConfig, "max_request_mib")


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    model: ServedModelConfig = field(default_factory=ServedModelConfig)
    rollout: ServeRolloutConfig = field(default_factory=ServeRolloutConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    trainer: DeviceConfig = field(default_factory=DeviceConfig)


def model_is_named(config: ServeConfig) -> Messages:
    if config.model.path is None:
        yield (
            "model.path is not set. Name a folder, a hub name of a Hugging Face causal LM, or "
            "'toy': verl serve toy."
        )


RULES = (model_is_named,)


def doubtful(config: ServeConfig) -> Messages:
    """Yield settings that work, but are rarely intended."""
    host = config.server.host
    if not is_loopback(host):
        yield (
            f"server.host={host}: other machines can reach this server, and keys and texts travel "
            "without encryption. Put it behind a proxy with TLS, or use an SSH tunnel to "
            "127.0.0.1."
        )
