"""Tiny engines behind gateways."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from openai import AsyncOpenAI

from tests.rollout.engines import make_engine
from tests.tiny_models import tiny_model, tiny_tokenizer
from verl.agents.boundary import ChatBoundary
from verl.agents.engine_client import EngineClient, EngineSteps
from verl.agents.formats import tool_format
from verl.agents.gateway.recorder import SessionRecorder
from verl.agents.gateway.served import ServedBackend, ServedEngine
from verl.agents.gateway.server import GatewayServer
from verl.agents.gateway.sessions import SessionBackend
from verl.agents.gateway.wording import Wording
from verl.rollout import SamplingParams
from verl.utils.errors import BoundaryError

END = 4  # <|im_end|>
LENGTH = 256
KEY = "sk-of-the-test"


class BrokenBoundary(ChatBoundary):
    """A boundary of a template that allows no exact continuation."""

    def extension(self, *arguments: Any, **options: Any) -> list[int]:
        raise BoundaryError("no exact extension")


def model_that_says(dialogue: Sequence[Mapping[str, str]], steps: int = 220) -> Any:
    """Train a tiny model that repeats one dialogue."""
    model = tiny_model("qwen2", max_position_embeddings=LENGTH)
    tokenizer = tiny_tokenizer()
    text = tokenizer.apply_chat_template(list(dialogue), tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for _ in range(steps):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loss.item() < 0.02:
                break
    return model.eval()


def wording_of(with_tools: bool = True) -> Wording:
    tokenizer = tiny_tokenizer()
    call_format = tool_format("hermes", tokenizer) if with_tools else None
    return Wording(tokenizer, ChatBoundary(tokenizer), call_format)


@asynccontextmanager
async def served(
    model: Any, *, with_tools: bool = True, engine: Any = None, **options: Any
) -> AsyncIterator[tuple[GatewayServer, AsyncOpenAI]]:
    """Start a server of one model, and yield a client."""
    engine = engine or make_engine(model, max_model_len=LENGTH)
    backend = ServedBackend(
        ServedEngine(engine),
        wording_of(with_tools),
        params=SamplingParams(max_new_tokens=LENGTH, stop_token_ids=(END,)),
        max_model_len=LENGTH,
        api_key=KEY,
        model="tiny",
    )
    async with GatewayServer(backend, **options) as server:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        async with client:
            yield server, client


@dataclass
class Training:
    """A gateway of a training run."""

    server: GatewayServer
    recorder: SessionRecorder
    client: EngineClient
    agents: list[AsyncOpenAI] = field(default_factory=list)

    def agent(self, session: str, row: int = 0, **options: Any) -> AsyncOpenAI:
        """Open a session and return an unmodified client of it."""
        key = self.recorder.open(session, row=row)
        url = self.server.session_url(session)
        self.agents.append(AsyncOpenAI(base_url=url, api_key=key, max_retries=0, **options))
        return self.agents[-1]


def client_of(engine: Any, seed: int = 0, **params: Any) -> EngineClient:
    settings = SamplingParams(**{"max_new_tokens": 96, "stop_token_ids": (END,), **params})
    return EngineClient(EngineSteps(engine, settings, seed, 0), max_model_len=LENGTH)


def recorder_of(**options: Any) -> SessionRecorder:
    sizes = {"max_prompt_tokens": 64, "max_response_tokens": 192, **options}
    return SessionRecorder(wording_of(), **sizes)


@asynccontextmanager
async def training(
    client: EngineClient, recorder: SessionRecorder, on_mismatch: str = "error", **options: Any
) -> AsyncIterator[Training]:
    backend = SessionBackend(client, recorder, on_mismatch=on_mismatch)
    async with GatewayServer(backend, **options) as server:
        run = Training(server, recorder, client)
        yield run
        for agent in run.agents:
            await agent.close()
