"""The OpenAI-compatible server that agents talk to in training."""

from dataclasses import dataclass

from verl.config.setting import setting


@dataclass(kw_only=True, slots=True)
class GatewayConfig:
    path: str | None = setting(
        None, "Python file with an agent that talks to the gateway", is_path=True
    )
    name: str = setting(
        "run", "its function run(base_url, api_key, row) -> reward, or None; plain or async"
    )
    command: str | None = setting(
        None,
        "program that is the agent, instead of path: started with OPENAI_BASE_URL, OPENAI_API_KEY, "
        "VERL_ROW and VERL_RESULT",
    )
    host: str = setting("127.0.0.1", "address that the gateway binds: this machine alone")
    port: int = setting(0, "its port; 0: a free one", at_least=0, at_most=65535)
    timeout_s: float = setting(1800.0, "longest episode", above=0)
    idle_s: float = setting(600.0, "an episode without a request for so long is dropped", above=0)
    request_timeout_s: float = setting(600.0, "longest time for one reply", above=0)
    max_request_mib: float = setting(16.0, "largest request", above=0)
    on_mismatch: str = setting(
        "error",
        "a request for other sampling parameters than the rollout's, or for a feature that the "
        "engine lacks (response_format); error: it is refused; ignore: it is answered without",
        choices=("error", "ignore"),
    )
