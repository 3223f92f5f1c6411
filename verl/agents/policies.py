"""Frozen policies that play roles next to the actor: models on this device, or behind a server.

They write text. None of their tokens is learned from, so each has a tokenizer, a chat template and
sampling parameters of its own.
"""

import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from verl.agents.engine_client import EngineClient, EngineSteps, turn_id
from verl.agents.rendering import ChatTemplate
from verl.agents.tools.threads import run_in_thread
from verl.config.policies import SELF, PolicyConfig
from verl.config.reward import RequestsConfig
from verl.config.rollout import RolloutConfig, SpeculativeConfig
from verl.data.chat import Message
from verl.models.load import check_vocabulary, load_causal_lm, load_tokenizer
from verl.models.lora import plain_parameters
from verl.rewards.json_client import JsonClient, authorization, chat_advice
from verl.rollout import RolloutEngine, create_rollout_engine
from verl.rollout.sampling import sample_keys
from verl.rollout.types import Room, SamplingParams
from verl.utils.errors import ConfigError, RewardError, RolloutError
from verl.utils.logging import logger

_KEY = "actor_rollout_ref.rollout.agent.policies"
_IN_VALIDATION = -1  # in place of the step of the training


class FrozenPolicy(Protocol):
    """Plays a role in the episodes of one batch after the other."""

    async def reply(self, messages: Sequence[Message], *, step: int, row: int, turn: int) -> str:
        """Write the next turn of a conversation.

        Args:
            messages: of the conversation as this role sees it.
            step, row, turn: fix the noise, with the seed of the run and the role: see
                `Episode.step` and `Episode.own_row`, and the number of the turn in the episode.
        """
        ...

    async def serve(self, work: Awaitable[Any], *, steps: EngineSteps, num_episodes: int) -> Any:
        """Answer until `work` is done, which plays episodes. Return its result.

        Args:
            steps: the calls on the actor's engine.
            num_episodes: of the batch.
        """
        ...


class EnginePolicy:
    """A frozen model in an engine of its own, which is stepped next to the actor's.

    Between batches the weights are in the host's memory, and the device's is free.

    Args:
        role: that it plays.
        model: on the host. Its weights are those of every batch.
        tokenizer: of the model.
        config: section `rollout` of an embedded engine.
        params: of all turns.
        device: of the engine.
        sleeps: whether the engine gives its memory back after each batch.
    """

    def __init__(
        self,
        role: str,
        model: PreTrainedModel,
        tokenizer: Any,
        config: RolloutConfig,
        params: SamplingParams,
        *,
        device: torch.device,
        sleeps: bool,
    ) -> None:
        self.role = role
        self.model = model
        self.tokenizer = tokenizer
        self.params = params
        self.longest = config.longest_sequence
        self._template = ChatTemplate(tokenizer)
        self._seed = _seed_of(role, config.seed)
        self._sleeps = sleeps
        self._client: EngineClient | None = None
        self.engine: RolloutEngine = create_rollout_engine(
            config, model=model, tokenizer=tokenizer, device=device
        )
        if sleeps:
            self.engine.sleep()

    async def reply(self, messages: Sequence[Message], *, step: int, row: int, turn: int) -> str:
        """See `FrozenPolicy.reply`."""
        assert self._client is not None, "serve comes first"
        prompt_ids = self._template.encode(self._template.render(messages))
        title = f"The role '{self.role}' in sample {row}"
        room = self._client.room_after(prompt_ids, title)
        drawn = await self._client.generate(prompt_ids=prompt_ids, row=row, turn=turn, limit=room)
        return self.tokenizer.decode(drawn.token_ids, skip_special_tokens=True)

    async def serve(self, work: Awaitable[Any], *, steps: EngineSteps, num_episodes: int) -> Any:
        """See `FrozenPolicy.serve`."""
        if self._sleeps:
            self.engine.wake()
        try:
            self.engine.update_weights(plain_parameters(self.model))
            own = EngineSteps(self.engine, self.params, self._seed, steps.step)
            self._client = _client_of_batch(own, num_episodes, self.longest)
            return await self._client.serve(work)
        finally:
            if self._sleeps:
                self.engine.sleep()

    @torch.no_grad()
    def take(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the weights of another model of this class, for all batches from the next on."""
        own = dict(plain_parameters(self.model))
        for name, tensor in named_tensors:
            own.pop(name).copy_(tensor)
        assert not own, f"weights without a new value: {sorted(own)[:3]}"


class PartnerPolicy:
    """A policy that is trained next to the actor: it draws the turns of one role.

    Args:
        role: that it plays.
        engine: with current weights while `serve` runs.
    """

    def __init__(self, role: str, engine: RolloutEngine) -> None:
        self.role = role
        self.engine = engine
        self.client: EngineClient | None = None

    async def serve(
        self,
        work: Awaitable[Any],
        *,
        steps: EngineSteps,
        num_episodes: int,
        max_model_len: int,
    ) -> Any:
        """Draw turns until `work` is done, with the sampling parameters of the actor."""
        own = EngineSteps(self.engine, steps.params, _seed_of(self.role, steps.seed), steps.step)
        self.client = _client_of_batch(own, num_episodes, max_model_len)
        return await self.client.serve(work)


class ServedPolicy:
    """A model behind an OpenAI-compatible server.

    The seed of each turn is sent along, but only the server can say whether it draws the same
    tokens for it again.
    """

    def __init__(self, role: str, config: PolicyConfig, seed: int) -> None:
        assert config.url is not None, "the configuration was checked"
        self.role = role
        self.config = config
        self._seed = _seed_of(role, seed)
        self._client = JsonClient(
            config.url.rstrip("/").removesuffix("/chat/completions"),
            key=f"{_KEY}.{role}.url",
            max_concurrent=config.max_concurrent,
            requests=RequestsConfig(timeout_s=config.timeout_s),
            headers=authorization(f"{_KEY}.{role}", config.api_key_env),
            advice=chat_advice(f"{_KEY}.{role}", config.url, config.api_key_env),
        )

    async def reply(self, messages: Sequence[Message], *, step: int, row: int, turn: int) -> str:
        """See `FrozenPolicy.reply`."""
        key = sample_keys(self._seed, step, np.array([turn_id(row, turn)]))
        config = self.config
        body: dict[str, Any] = {
            "model": config.model,
            "messages": list(messages),
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": config.max_new_tokens,
            "seed": int(key[0]) >> 33,  # fits the 32-bit numbers of all servers
        }
        if config.top_k > 0:
            body["top_k"] = config.top_k  # not OpenAI's, but vLLM and SGLang read it

        try:
            answer = await run_in_thread(self._client.post, "/chat/completions", body)
        except RewardError as error:
            raise RolloutError(f"The role '{self.role}' got no turn: {error}") from error
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise RolloutError(
                f"{_KEY}.{self.role}.url answered without choices[0].message.content: "
                f"{str(answer)[:300]}"
            ) from None

    async def serve(self, work: Awaitable[Any], *, steps: EngineSteps, num_episodes: int) -> Any:
        """See `FrozenPolicy.serve`."""
        return await work


def make_policies(
    config: RolloutConfig,
    *,
    own_model: Callable[[], PreTrainedModel],
    own_tokenizer: Any,
    device: torch.device,
    sleeps: bool,
) -> dict[str, FrozenPolicy]:
    """Make the frozen policies of a run, by role.

    Args:
        config: section `rollout`.
        own_model: loads the model of the actor on the host, for roles that copies of it play.
        own_tokenizer: the actor's.
        device: of engines.
        sleeps: whether engines give their memory back after each batch.
    """
    policies: dict[str, FrozenPolicy] = {}
    for role, asked in config.agent.policies.items():
        if asked.trained:
            continue
        if asked.path is None:
            policies[role] = ServedPolicy(role, asked, config.seed)
            continue

        if asked.path == SELF:
            model, tokenizer = own_model(), own_tokenizer
        else:
            model, tokenizer = _loaded(asked, config, device)

        policies[role] = EnginePolicy(
            role,
            model,
            tokenizer,
            _engine_config(config),
            _sampling(asked),
            device=device,
            sleeps=sleeps,
        )
    return policies


class Copies:
    """Renews the copies of the actor, every `update_freq` steps of the training."""

    def __init__(self, config: RolloutConfig, policies: Mapping[str, FrozenPolicy]) -> None:
        self._freqs: dict[str, int] = {}
        self._policies: dict[str, EnginePolicy] = {}
        self._renewed_at: dict[str, int] = {}
        for role, asked in config.agent.policies.items():
            if asked.path == SELF:
                policy = policies[role]
                assert isinstance(policy, EnginePolicy)
                assert asked.update_freq is not None, "the configuration was checked"
                self._policies[role] = policy
                self._freqs[role] = asked.update_freq

    def renew(self, engine: Any, step: int | None) -> list[str]:
        """Renew the copies that are due. Return their roles.

        The first batch of a run copies in any case, and so does every training step that follows
        a multiple of `update_freq`. Logs where a run resumes between two of these, because its
        checkpoint has no copy.

        Args:
            engine: of the actor, with its current weights.
            step: of the training; None for validation.
        """
        renewed = []
        for role, policy in self._policies.items():
            is_due = step is not None and (step - 1) % self._freqs[role] == 0
            if role not in self._renewed_at or (is_due and self._renewed_at[role] != step):
                policy.take(engine.twin.named_weights())
                renewed.append(role)
                self._renewed_at[role] = _IN_VALIDATION
            if step is not None and self._renewed_at[role] == _IN_VALIDATION:
                self._renewed_at[role] = step
                if not is_due:
                    self._warn_of_newer_copy(role, step)
        return renewed

    def _warn_of_newer_copy(self, role: str, step: int) -> None:
        freq = self._freqs[role]
        logger.warning(
            "Role '%s' is played by a copy of the actor after step %d, where this run resumes. An "
            "uninterrupted run would play it by the copy after step %d (%s.%s.update_freq=%d), "
            "which a checkpoint does not hold. To keep that opponent, resume from a step that is a "
            "multiple of update_freq (trainer.resume_mode=resume_path).",
            role,
            step - 1,
            (step - 1) // freq * freq,
            _KEY,
            role,
            freq,
        )


def check_roles(policies: Mapping[str, PolicyConfig], roles: Sequence[str], where: str) -> None:
    """Raise ConfigError where a role of a loop or environment has no policy.

    Args:
        policies: as configured, by role.
        roles: of the loop or environment; empty: it has one role, which the actor plays.
        where: the loop or environment, for the message.
    """
    missing = [role for role in roles if role not in policies]
    if missing:
        raise ConfigError(
            f"{where} has the roles {', '.join(roles)}, but {_KEY} names "
            f"{', '.join(policies) or 'none'}. Missing: {', '.join(missing)}. Set "
            f"{_KEY}.{missing[0]}.trained=true (the actor plays it), .path (a frozen model) or "
            ".url (a server)."
        )


def _loaded(
    asked: PolicyConfig, config: RolloutConfig, device: torch.device
) -> tuple[PreTrainedModel, Any]:
    assert asked.path is not None
    tokenizer = load_tokenizer(asked.path, trust_remote_code=asked.trust_remote_code)
    model = load_causal_lm(
        asked.path,
        dtype=host_dtype(config, device),
        trust_remote_code=asked.trust_remote_code,
        max_length=config.longest_sequence,
    )
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def host_dtype(
    config: RolloutConfig, device: torch.device, on_cpu: str | None = None
) -> torch.dtype | str:
    """Return the dtype of a frozen model: that of the engine which computes with it.

    Args:
        on_cpu: of an engine on a CPU whose dtype `config` leaves open; None: float32.
    """
    if config.dtype is not None:
        return config.dtype
    if device.type == "cuda":
        return torch.bfloat16
    return on_cpu or torch.float32


def _client_of_batch(steps: EngineSteps, num_episodes: int, max_model_len: int) -> EngineClient:
    """Return the client of an engine for one batch, with room for all its episodes."""
    steps.engine.forget_prefixes()  # a resumed run starts without them
    steps.engine.reserve(Room(sequences=num_episodes, tokens=max_model_len))
    return EngineClient(steps, max_model_len=max_model_len)


def _engine_config(config: RolloutConfig) -> RolloutConfig:
    """Return the settings of an embedded engine on one device."""
    return replace(
        config,
        name="embedded",
        server_urls=[],
        server_python=None,
        quantization=None,
        kv_cache_dtype="auto",
        tensor_model_parallel_size=1,
        lora_weights=None,
        enable_rollout_routing_replay=False,
        speculative=SpeculativeConfig(),
    )


def _sampling(asked: PolicyConfig) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
    )


def _seed_of(role: str, seed: int) -> int:
    """Return a seed of the role's own: equal models in two roles must not draw alike."""
    return zlib.crc32(f"{role}-{seed}".encode())
