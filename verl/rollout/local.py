"""The common base of the engines that compute in the trainer's own process."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.rollout.base import Completions, EngineClass, RolloutEngine, generate
from verl.rollout.stopping import StopRule
from verl.rollout.twin import ModelTwin, engine_dtype
from verl.rollout.types import Request, SamplingParams
from verl.utils.errors import EngineAsleepError, RolloutError
from verl.weight_sync.base import NamedTensors
from verl.weight_sync.fingerprint import Fingerprint


class LocalEngine(EngineClass):
    """Weights, sleep, and the checks of configuration, model and requests."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: Any,
        config: RolloutConfig,
        device: torch.device,
        attention: str,
        cuts: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self.check(config)
        self.check_model(config, model.config, on_cuda=device.type == "cuda")
        self.keep_model(model, tokenizer, config)
        self.device = device
        dtype = engine_dtype(config.dtype, model, device)
        self.twin = ModelTwin(
            model,
            attention=attention,
            dtype=dtype,
            device=device,
            cuts=cuts,
            quantization=config.quantization,
        )
        self._asleep = False
        self._statistics: dict[str, float] = {}
        self._hand_over: dict[str, float] = {}

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> Completions:
        """Sample every request; see `verl.rollout.base.generate`."""
        return generate(cast(RolloutEngine, self), requests, params, seed=seed, step=step)

    def update_weights(self, named_tensors: NamedTensors) -> None:
        """Take new weights; see `RolloutEngine.update_weights`.

        On CPU, tensors that are the trainer's own parameters become aliases again, without a copy.
        """
        if self._asleep:
            raise EngineAsleepError(
                "The rollout engine is asleep; call wake() before update_weights()."
            )
        start = time.perf_counter()
        self.twin.update(named_tensors)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.twin.copied_bytes:
            seconds = time.perf_counter() - start
            per_s = self.twin.copied_bytes / seconds / 1e9
            self._hand_over = {"update_weights_s": seconds, "update_weights_gb_per_s": per_s}

    @property
    def weight_dtype(self) -> torch.dtype:
        """Implement `WeightTaker.weight_dtype`."""
        return self.twin.dtype

    def weight_place(self, name: str) -> Tensor | None:
        """Implement `WeightTaker.weight_place`."""
        return self.twin.place(name)

    def weight_fingerprints(self) -> dict[str, Fingerprint]:
        """Implement `WeightTaker.weight_fingerprints`."""
        return self.twin.fingerprints()

    def sleep(self) -> None:
        """Free device memory. On CUDA this frees the weights, too.

        On CPU the weights stay, or are the trainer's own.
        """
        self._asleep = True
        if self.device.type == "cuda":
            self.twin.release()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate the weights again. After a sleep on CUDA, `update_weights` has to fill them."""
        self.twin.restore()
        self._asleep = False

    def forget_prefixes(self) -> None:
        """Implement `RolloutEngine.forget_prefixes`: nothing to do without a cache of prefixes."""

    def statistics(self) -> dict[str, float]:
        """Return the counters of the last `generate`, which the engine's class lists.

        Adds those of the last `update_weights` that copied: update_weights_s (with gathering) and
        update_weights_gb_per_s.
        """
        return {**self._statistics, **self._hand_over}

    def _require_ready(self) -> None:
        if self._asleep:
            raise EngineAsleepError("The rollout engine is asleep; call wake() before generate().")
        if not self.twin.ready:
            raise RolloutError(
                "The engine's weights are incomplete; call update_weights() before generate()."
            )

    def check_call(self, requests: Sequence[Request], params: SamplingParams) -> StopRule:
        """Check the engine and requests. Return the rule that ends their responses."""
        self._require_ready()
        return super().check_call(requests, params)


def not_finite(sample_id: int) -> RolloutError:
    """Return the error for a draw from logits that contain NaN or infinity."""
    return RolloutError(
        f"The model gave logits that are not finite for sample {sample_id}. The weights have "
        "probably diverged: lower the learning rate or resume from an earlier checkpoint."
    )
