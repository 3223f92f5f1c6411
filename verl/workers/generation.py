"""A model that generates and is not trained."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from verl.config import ActorRolloutRefConfig
from verl.distributed.mesh import init_mesh, init_rollout_mesh
from verl.engine.memory import told_as_out_of_memory
from verl.models.load import check_vocabulary, load_causal_lm, load_model_config
from verl.protocol import DataProto
from verl.rollout import create_rollout_engine
from verl.rollout.embedded.tensor_parallel import check_tensor_parallel
from verl.rollout.types import Request, SamplingParams
from verl.single_controller import Dispatch, Worker, register
from verl.utils.errors import RolloutError
from verl.utils.imports import import_user_code

_WAY_OUT = (
    "Lower rollout.gpu_memory_utilization, max_num_seqs or max_num_batched_tokens, or split the "
    "model over more GPUs: rollout.tensor_model_parallel_size."
)


class GenerationWorker(Worker):
    """Texts for prompts, by any rollout engine, over weights that are loaded once.

    Args:
        config: the `actor_rollout_ref` section, of which `model` and `rollout` are read.
        tokenizer: for stop strings and for the texts.
    """

    def __init__(
        self, config: ActorRolloutRefConfig, *, device: torch.device, tokenizer: Any
    ) -> None:
        self.tokenizer = tokenizer
        model_config, rollout = config.model, config.rollout
        assert model_config.path is not None, "the configuration was checked"
        import_user_code(model_config.external_lib)
        source: dict[str, Any] = {
            "path": model_config.path,
            "trust_remote_code": model_config.trust_remote_code,
            "override_config": model_config.override_config,
        }
        mesh = init_mesh(device, shard=False)
        self.device = mesh.device
        self.rollout_mesh = init_rollout_mesh(mesh, rollout.tensor_model_parallel_size)
        if self.rollout_mesh.tensor.size > 1:
            check_tensor_parallel(load_model_config(**source), self.rollout_mesh.tensor.size)
        with self._told_as_out_of_memory("loading"):
            model = load_causal_lm(
                **source,
                dtype=rollout.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32),
                max_length=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
            )
            check_vocabulary(model, tokenizer)
            self.engine = create_rollout_engine(
                rollout,
                model=model,
                tokenizer=tokenizer,
                device=self.device,
                ranks=self.rollout_mesh.tensor,
            )

    @property
    def rollout_rank(self) -> int:
        """See `Worker.rollout_rank`."""
        return self.rollout_mesh.data.rank

    @register(dispatch_mode=Dispatch.ROLLOUT_COMPUTE_PROTO)
    def generate_texts(
        self, prompts: DataProto, *, n: int, params: SamplingParams, seed: int
    ) -> DataProto:
        """n texts for each of B prompts: object columns `responses` (lists of n texts without
        special tokens), and of all n together `num_tokens` and `num_cut` (responses that the limit
        ended).

        Reads the object columns `raw_prompt_ids` and `prompt_row`, the number of the prompt among
        all: the noise depends on that and on the seed, not on batches and ranks.
        """
        rows = [int(row) for row in prompts.non_tensor_batch["prompt_row"]]
        requests = [
            Request(prompt_ids=tuple(ids), sample_ids=tuple(range(row * n, (row + 1) * n)))
            for row, ids in zip(rows, prompts.non_tensor_batch["raw_prompt_ids"])
        ]
        self.engine.forget_prefixes()  # as in a resumed run, which starts without
        with self._told_as_out_of_memory("generation"):
            done = {
                each.sample_id: each
                for each in self.engine.generate(requests, params, seed=seed, step=0)
            }
        wanted = [number for request in requests for number in request.sample_ids]
        if done.keys() != set(wanted):
            raise RolloutError(
                f"Expected {len(wanted)} samples from the engine, got {len(done)}, or others."
            )
        ids = [done[number].token_ids for number in wanted]
        is_cut = [done[number].finish_reason == "length" for number in wanted]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        of_prompts = [slice(start, start + n) for start in range(0, len(wanted), n)]
        return DataProto.from_dict(
            non_tensors={
                "responses": [texts[samples] for samples in of_prompts],
                "num_tokens": [sum(map(len, ids[samples])) for samples in of_prompts],
                "num_cut": [sum(is_cut[samples]) for samples in of_prompts],
            }
        )

    def _told_as_out_of_memory(self, phase: str) -> AbstractContextManager[None]:
        rank = "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}"
        return told_as_out_of_memory(phase, self.device, _WAY_OUT, rank=rank)
