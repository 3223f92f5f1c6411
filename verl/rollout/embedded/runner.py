"""Runs the engine's module: packed prefill, batched decode, logits of the rows that need them, the draw."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from verl.models.attention import Layout
from verl.models.logprobs import head_logits, head_of
from verl.rollout.embedded.attention import DecodeStep, LayerPages, LayerShape, Paging, PrefillStep, plan_chunks
from verl.rollout.sampling import row_keys, sample
from verl.rollout.types import SamplingParams

# Logits of so many (row, token) pairs are alive at once: 256 MiB in fp32.
CHUNK_LOGITS = 1 << 26


class ModelRunner:
    """A model with paged attention, and the pages of its layers.

    Everything that comes in is host memory (lists and numpy arrays), so that the scheduler never waits for the device;
    what `draw` gives back is host memory too, which is the one synchronisation of a step.
    """

    def __init__(self, module: PreTrainedModel, *, page_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.module = module
        self.page_size = page_size
        self.device = device
        self.dtype = dtype
        self.paging = Paging(module)
        self.head = head_of(module)
        self.num_pages = 0
        self._layers: list[nn.Module] = []
        self._shapes: list[LayerShape] = []

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers. Needs the model's weights the first time."""
        numbers = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in self._layer_shapes())
        return numbers * self.page_size * self.dtype.itemsize

    @torch.inference_mode()
    def allocate(self, num_pages: int) -> None:
        """Make a cache of `num_pages` pages; what an earlier one held is lost."""
        self.release()
        self._layer_shapes()
        for module, shape in zip(self._layers, self._shapes):
            # Zeros: a masked position has weight 0, and 0 times the NaN of fresh memory would be NaN.
            keys, values = (
                torch.zeros(num_pages, shape.heads, self.page_size, dim, dtype=self.dtype, device=self.device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            self.paging.layers[module] = LayerPages(keys, values)
        self.num_pages = num_pages

    def release(self) -> None:
        self.paging.release()
        self.num_pages = 0

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute S whole sequences and fill their pages; gives the last hidden state of each, (S, H)."""
        size = self.page_size
        lengths = [len(sequence) for sequence in sequences]
        positions = np.concatenate([np.arange(length) for length in lengths])
        ids = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
        owners = np.concatenate(
            [np.repeat(np.asarray(mine, np.int64), size)[:length] for mine, length in zip(pages, lengths)]
        )
        ends = np.cumsum([0, *lengths])
        step = PrefillStep(
            layout=Layout(tuple(lengths), self._to_device(ends.astype(np.int32))),
            pages=self._to_device(owners),
            offsets=self._to_device(positions % size),
        )
        return self._hidden(ids, positions, step).index_select(0, self._to_device(ends[1:] - 1))

    @torch.inference_mode()
    def decode(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], table: NDArray[np.int64]
    ) -> torch.Tensor:
        """One new token a row: token_ids (b,) stand at positions (b,); table (b, W) lists each row's pages in order.

        Writes the tokens' keys and values and gives the hidden states (b, H) that predict what comes next.
        """
        size = self.page_size
        number = positions // size
        step = DecodeStep(
            pages=self._to_device(table[np.arange(len(table)), number]),
            offsets=self._to_device(positions % size),
            positions=self._to_device(positions),
            longest=int(positions.max()) + 1,
            chunks=plan_chunks(self._to_device(table), (number + 1).tolist(), size),
            page_size=size,
        )
        return self._hidden(token_ids, positions, step)

    @torch.inference_mode()
    def draw(
        self, hidden: torch.Tensor, params: SamplingParams, keys: NDArray[np.uint64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens (b,) and their log-probs (b,) from hidden states (b, H), samples' keys (b,) and response positions."""
        noise_keys = None if params.temperature == 0 else self._to_device(row_keys(keys, positions))
        linear: Any = self.module.get_output_embeddings()
        rows = max(1, CHUNK_LOGITS // linear.weight.shape[0])
        tokens, log_probs = [], []
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = head_logits(hidden[part], linear.weight, linear.bias, self.head)
            drawn = sample(logits, params, None if noise_keys is None else noise_keys[part])
            tokens.append(drawn[0])
            log_probs.append(drawn[1])
        if len(tokens) == 1:
            return tokens[0].cpu().numpy(), log_probs[0].cpu().numpy()
        return torch.cat(tokens).cpu().numpy(), torch.cat(log_probs).cpu().numpy()

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy page a to page b for each pair (a, b); all are read before any is written."""
        source, target = (self._to_device(np.array(pages, np.int64)) for pages in zip(*pairs))
        for layer in self.paging.layers.values():
            for cache in layer:
                cache.index_copy_(0, target, cache.index_select(0, source))

    def _hidden(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], step: PrefillStep | DecodeStep
    ) -> torch.Tensor:
        with self.paging.computing(step):
            output = self.module.base_model(
                input_ids=self._to_device(ids)[None],
                position_ids=self._to_device(positions)[None],
                attention_mask=None,
                past_key_values=None,
                use_cache=False,
            )
        return output.last_hidden_state[0]

    def _layer_shapes(self) -> list[LayerShape]:
        """The shape of every layer's cache, read off a prefill of one token: configs name head sizes in many ways."""
        if not self._shapes:
            with self.paging.counting() as seen:
                self.prefill([[0]], [[0]])
            self._layers = list(seen)
            self._shapes = list(seen.values())
        return self._shapes

    def _to_device(self, array: NDArray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        # Pageable memory: the copy is done with the array when this returns, so the caller may reuse it.
        return tensor if self.device.type == "cpu" else tensor.to(self.device)
