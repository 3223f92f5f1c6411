"""Turns with tools against the same tokens in one turn: the cost of the loop and of the waiting.

Every episode draws `--tokens` tokens, waits `--tool-ms` for a tool, reads its answer, and goes on,
`--turns` times; all of them run at once on one engine. The peer is the same engine drawing as many
tokens an episode in one turn.

    python bench/agents.py                                 # turns of 256 to 768 tokens; minutes
    python bench/agents.py --model toy --tokens 16 --spread 0
    python bench/agents.py --shape 1.5b --tokens 128       # random weights
    python bench/agents.py --profile                       # how long the GPU idles
    python bench/agents.py --shape 1.5b --engine vllm --set gpu_memory_utilization=0.5
    python bench/agents.py --model toy --tokens 16 --engine vllm --device cpu --server-python PYTHON

Without `--set server_urls=[...]` an engine of servers starts one, with `--server-python` or the
interpreter of this script. Such a server gets the weights of this process before it draws. The
seconds of a step of such an engine are seconds of waiting for the server.

`--profile` plays the turns once more and records each kernel of the GPU. `device_idle_share` is the
part of the time in which no kernel runs, without the moments in which every episode waits for its
tool. Recording slows the host down, so it is an upper bound.
"""

import argparse
import asyncio
import json
import math
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.utils.garbage import loading_packages
from verl.utils.openmp import limit_spinning

# As the entry points of the package do.
limit_spinning()
with loading_packages():
    import numpy as np
    import torch
    import yaml
    from rollout_models import SHAPES, random_model, write_config
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from verl.agents import AgentContext, EngineClient, EngineSteps, Episode
    from verl.agents.boundary import ChatBoundary
    from verl.agents.conversation import Conversation
    from verl.agents.formats import ToolCall
    from verl.agents.tools import ToolSet
    from verl.config.rollout import EngineKwargsConfig, RolloutConfig
    from verl.diagnostics.view.answers import covered
    from verl.models.load import load_causal_lm, load_tokenizer
    from verl.rollout import (
        Request,
        Room,
        SamplingParams,
        ServerEngine,
        create_rollout_engine,
        generate,
    )

TOOL = """
import asyncio


async def wait(seconds: float) -> str:
    \"\"\"Wait.

    Args:
        seconds: how long.
    \"\"\"
    await asyncio.sleep(seconds)
    return "done"
"""
REPLY = {"role": "assistant", "content": "."}
TOOL_TEXT = "done"  # the answer of TOOL
# Chat templates of models without one.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Counted:
    """An engine, with the seconds that it worked."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.seconds = 0.0
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, *requests: Any, **settings: Any) -> None:
        with self._counting():
            self._engine.submit(*requests, **settings)

    def step(self) -> Any:
        self.steps += 1
        with self._counting():
            return self._engine.step()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


class Waits:
    """How long tools took beyond their own time, and how long all episodes waited for them."""

    def __init__(self) -> None:
        self.overheads: list[float] = []
        self.all_waiting_s = 0.0
        self._drawing = 0
        self._since: float | None = None  # no episode draws; None: one does

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Count an episode as one that draws."""
        self._drawing += 1
        if self._since is not None:
            self.all_waiting_s += time.perf_counter() - self._since
            self._since = None
        try:
            yield
        finally:
            self._drawing -= 1
            if self._drawing == 0:
                self._since = time.perf_counter()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a packaged name, a folder or a hub name")
    parser.add_argument(
        "--shape", choices=SHAPES, help="random weights instead [cpu: tiny; cuda: 1.5b]"
    )
    parser.add_argument("--engine", default="embedded", help="name of the rollout engine")
    parser.add_argument("--server-python", help="interpreter that has the engine's package")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="more keys of the rollout"
    )
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a turn")
    parser.add_argument(
        "--spread", type=float, default=0.5, help="turns are longer or shorter by up to this share"
    )
    parser.add_argument("--tool-ms", type=float, default=50.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; the best counts")
    parser.add_argument("--profile", action="store_true", help="how long a GPU idles")
    arguments = parser.parse_args()
    if arguments.model is None and arguments.shape is None:
        arguments.shape = "tiny" if arguments.device == "cpu" else "1.5b"
    return arguments


def lengths(row: int, arguments: argparse.Namespace) -> list[int]:
    """Return the tokens of each turn of an episode."""
    most = round(arguments.spread * arguments.tokens)
    around = np.random.default_rng(row).integers(-most, most, arguments.turns, endpoint=True)
    return (arguments.tokens + around).tolist()


async def play(
    context: AgentContext, episode: Episode, arguments: argparse.Namespace, waits: Waits
) -> int:
    """Play one episode. Return the tokens that the model drew."""
    assert context.tools is not None
    session = await context.tools.open(episode.name, row=episode.row)
    conversation = context.conversation(episode)
    drawn = 0
    for turn, tokens in enumerate(lengths(episode.row, arguments)):
        with waits.drawing():
            drawn += await _draw(context, conversation, tokens)
        if turn + 1 == arguments.turns:
            break
        seconds = arguments.tool_ms / 1000
        call = ToolCall(name="wait", arguments={"seconds": seconds})
        started = time.perf_counter()
        (result,) = await session.call([call], turn=turn)
        waits.overheads.append(time.perf_counter() - started - seconds)
        new = [_answer(result.text)]
        assert conversation.extend(REPLY, new, "tool"), "the response has no room for a turn"
    await session.finish()
    return drawn


async def _draw(context: AgentContext, conversation: Conversation, tokens: int) -> int:
    drawn = await context.client.generate(
        prompt_ids=conversation.ids, row=conversation.row, turn=conversation.turns, limit=tokens
    )
    conversation.add_drawn(drawn)
    return len(drawn.token_ids)


def many_turns(
    context: AgentContext, engine: Any, episodes: list[Episode], arguments: argparse.Namespace
) -> dict[str, float]:
    """Play all episodes with tools. Return seconds and rates."""
    counted: Any = Counted(engine)
    params = SamplingParams(max_new_tokens=longest_turn(arguments), ignore_eos=True)
    steps = EngineSteps(counted, params, seed=0, step=0)
    client = EngineClient(steps, max_model_len=context.config.max_model_len or 0)
    context.client = client
    engine.forget_prefixes()
    engine.reserve(Room(sequences=len(episodes), tokens=context.config.max_model_len or 0))
    waits = Waits()

    async def all_of() -> list[int]:
        return await asyncio.gather(*(play(context, each, arguments, waits) for each in episodes))

    started = time.perf_counter()
    cpu_started = time.process_time()
    drawn = asyncio.run(client.serve(all_of()))
    seconds = time.perf_counter() - started
    num_turns = arguments.turns * len(episodes)
    outside_s = seconds - counted.seconds
    return {
        "seconds": seconds,
        # of the process: on a shared machine seconds say little
        "cpu_s": time.process_time() - cpu_started,
        "tokens_per_s": sum(drawn) / seconds,
        # of the host: a device works on while the host is elsewhere
        "host_outside_engine_ms_a_turn": 1000 * outside_s / num_turns,
        "engine_s": counted.seconds,
        "all_waiting_s": waits.all_waiting_s,
        "tool_overhead_ms": 1000 * sum(waits.overheads) / len(waits.overheads),
        "prefill_tokens": client.counters.get("prefill_tokens", 0.0),
        "cached_tokens": client.counters.get("cached_tokens", 0.0),
    }


def device_idle(play_turns: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Play the turns once more with every kernel recorded. Return how long the device idles."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        played = play_turns()
        torch.cuda.synchronize()
    spans = []
    for event in recorded.profiler.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0:
            spans.append((event.start_ns(), event.end_ns()))

    busy_s = covered(spans, math.inf) / 1e9
    free_s = played["seconds"] - played["all_waiting_s"]
    return {
        "profiled_s": played["seconds"],
        "device_busy_s": busy_s,
        "device_idle_share": 1 - busy_s / free_s,
    }


def longest_turn(arguments: argparse.Namespace) -> int:
    """Return the most tokens of a turn."""
    return arguments.tokens + round(arguments.spread * arguments.tokens)


def one_turn(engine: Any, episodes: list[Episode], arguments: argparse.Namespace) -> dict:
    """Draw as many tokens an episode in one turn. Return seconds and rates."""
    most = arguments.turns * longest_turn(arguments)
    params = SamplingParams(max_new_tokens=most, ignore_eos=True)
    engine.forget_prefixes()
    requests = []
    for episode in episodes:
        ids = tuple(episode.prompt_ids)
        limits = (sum(lengths(episode.row, arguments)),)
        requests.append(Request(prompt_ids=ids, sample_ids=(episode.row,), limits=limits))
    started = time.perf_counter()
    cpu_started = time.process_time()
    drawn = 0
    for each in generate(engine, requests, params, seed=0, step=0):
        drawn += len(each.token_ids)
    seconds = time.perf_counter() - started
    cpu_s = time.process_time() - cpu_started
    return {"seconds": seconds, "cpu_s": cpu_s, "tokens_per_s": drawn / seconds}


def make_config(arguments: argparse.Namespace, prompt: int, response: int) -> RolloutConfig:
    """Configure the rollout for so many tokens of prompt and response."""
    keys: dict[str, Any] = {"max_num_seqs": arguments.episodes}
    for setting in arguments.set:
        key, value = setting.split("=", 1)
        keys[key] = yaml.safe_load(value)
    # A folder of a random model has no weights.
    flags = {} if arguments.shape is None else {"load_format": "dummy"}
    return RolloutConfig(
        name=arguments.engine,
        server_python=arguments.server_python,
        engine_kwargs=EngineKwargsConfig(vllm=flags, sglang=flags),
        prompt_length=prompt,
        response_length=response,
        max_model_len=prompt + response,
        **keys,
    )


def make_model(
    arguments: argparse.Namespace, device: torch.device, longest: int, tokenizer: Any, folder: Path
) -> Any:
    """Load or make the model. A random one leaves files for a server in `folder`."""
    if arguments.shape is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model: Any = load_causal_lm(arguments.model, dtype=dtype, max_length=longest)
        return model.to(device)
    write_config(folder, arguments.shape, device.type)
    tokenizer.save_pretrained(folder)
    return random_model(str(folder), device.type)


def make_engine(config: RolloutConfig, model: Any, tokenizer: Any, device: torch.device) -> Any:
    """Make the engine, with the model's weights."""
    engine: Any = create_rollout_engine(config, model=model, tokenizer=tokenizer, device=device)
    if isinstance(engine, ServerEngine):
        engine.sources.tensors_again = model.named_parameters
    engine.update_weights(model.named_parameters())
    return engine


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure(parse_arguments(), Path(folder))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure and print; temporary files go to `folder`."""
    tokenizer = load_tokenizer(arguments.model or "toy")
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    boundary = ChatBoundary(tokenizer)
    messages = [{"role": "user", "content": "Begin."}]
    prompt_ids = boundary.prompt(messages)
    new = [_answer(TOOL_TEXT)]
    added = len(boundary.extension(messages, REPLY, new, drawn=[prompt_ids[-1]]))
    response = arguments.turns * (longest_turn(arguments) + added + 4)
    longest = len(prompt_ids) + response
    config = make_config(arguments, len(prompt_ids), response)

    device = torch.device(arguments.device)
    model = make_model(arguments, device, longest, tokenizer, folder / "model")
    engine = make_engine(config, model, tokenizer, device)
    episodes = []
    for row in range(arguments.episodes):
        episodes.append(Episode(row=row, messages=messages, prompt_ids=prompt_ids, fields={}))

    path = folder / "tools.py"
    path.write_text(textwrap.dedent(TOOL))
    tools = ToolSet.from_config(function_tool_path=str(path), timeout_s=30.0)
    context = AgentContext(config=config, tokenizer=tokenizer, boundary=boundary, tools=tools)
    turns = []
    plain = []
    for _ in range(arguments.repeat):  # by turns, since the speed of a shared machine drifts
        turns.append(many_turns(context, engine, episodes, arguments))
        plain.append(one_turn(engine, episodes, arguments))
    report = compared(turns, plain)
    if arguments.profile:
        report |= device_idle(lambda: many_turns(context, engine, episodes, arguments))
    tools.close()
    print(json.dumps(report, indent=2))


def compared(turns: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, Any]:
    """Return the best run of each kind, and their ratios."""
    best_turns = max(turns, key=lambda run: run["tokens_per_s"])
    best_plain = max(plain, key=lambda run: run["tokens_per_s"])
    return {
        "turns": best_turns,
        "one_turn": best_plain,
        "ratio": best_turns["tokens_per_s"] / best_plain["tokens_per_s"],
        "cpu_ratio": min(run["cpu_s"] for run in plain) / min(run["cpu_s"] for run in turns),
    }


def _answer(text: str) -> dict[str, Any]:
    """Return the message of a tool."""
    return {"role": "user", "content": text}


if __name__ == "__main__":
    main()
