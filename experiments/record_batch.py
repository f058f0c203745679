"""Dialogues of a recording as one batch: one padded KV cache for their whole life.

A turn's new tokens are padded on the left, so that every row ends in its last one; padding is masked for good. The
cache grows in place, and attention reads each KV head once for all query heads of its group: on a CPU both save
most of the time that long contexts take.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ATTENTION = "kvarena-grouped"
SLACK = 64  # tokens that a grown cache has room for


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of query [B, HQ, T, D] over key, value [B, HKV, S, D]; mask bool or additive [B, 1, T, S]. Returns
    [B, T, HQ, D]. transformers' attention interface. Raises ValueError without a mask."""
    if attention_mask is None:
        raise ValueError("attention_mask: expected one, found none: padding and the future would be read")
    batch, heads, new, dim = query.shape
    groups = key.shape[1]
    scale = options.get("scaling") or dim**-0.5
    rows = query.reshape(batch, groups, heads // groups * new, dim) * scale
    scores = torch.matmul(rows, key.transpose(2, 3)).view(batch, groups, heads // groups, new, -1)
    mask = attention_mask[:, :, None]
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    shares = torch.softmax(scores, -1).view(batch, groups, -1, scores.shape[-1])
    out = torch.matmul(shares, value).view(batch, heads, new, dim)
    return out.transpose(1, 2).contiguous(), None


@functools.cache
def _layer_class() -> Any:
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):
        """Keys and values in buffers with room to grow; `keys` and `values` are views of what is filled."""

        room: tuple[Tensor, Tensor] | None = None
        filled = 0

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            total = self.filled + key_states.shape[-2]
            if self.room is None or total > self.room[0].shape[-2]:
                self.room = (self._grown(key_states, total, 0), self._grown(value_states, total, 1))
            for buffer, new in zip(self.room, (key_states, value_states), strict=True):
                buffer[:, :, self.filled : total] = new
            self.filled = total
            self.keys, self.values = (buffer[:, :, :total] for buffer in self.room)
            return self.keys, self.values

        def _grown(self, new: Tensor, total: int, which: int) -> Tensor:
            buffer = new.new_empty(*new.shape[:2], total + SLACK, new.shape[3])
            if self.room is not None:
                buffer[:, :, : self.filled] = self.room[which][:, :, : self.filled]
            return buffer

        def keep(self, rows: Tensor) -> None:
            """Only these rows of the batch."""
            if self.room is not None:
                self.room = (self.room[0][rows], self.room[1][rows])
                self.keys, self.values = (buffer[:, :, : self.filled] for buffer in self.room)

    return GrowingLayer


class Batch:
    """Dialogues with one preamble, in one cache. Row order is that of the tails given."""

    def __init__(self, model: Any, head: list[int], size: int, seed: list[int], temperature: float) -> None:
        from transformers.cache_utils import DynamicCache
        from transformers.masking_utils import AttentionMaskInterface, eager_mask
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
        # Without this the model would be given no mask at all, padding and the future included.
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.temperature = temperature
        self.rng = np.random.default_rng(seed)
        self.cache: Any = DynamicCache()
        with torch.inference_mode():
            model(torch.tensor([head]), use_cache=True, cache=self.cache, logits_to_keep=1)
            layers: list[Any] = self.cache.layers
            for place, layer in enumerate(layers):
                grown = _layer_class()()
                grown.update(layer.keys.repeat(size, 1, 1, 1), layer.values.repeat(size, 1, 1, 1))
                layers[place] = grown
        self.mask = torch.ones(size, len(head), dtype=torch.long)
        self.lengths = np.full(size, len(head))

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on."""
        if len(rows) == len(self.lengths):
            return
        chosen = torch.tensor(list(rows), dtype=torch.long)
        self.mask, self.lengths = self.mask[chosen], self.lengths[list(rows)]
        with torch.inference_mode():
            for layer in self.cache.layers:
                layer.keep(chosen)

    def answer(self, tails: Sequence[Sequence[int]], limits: Sequence[int], end: int) -> list[list[int]]:
        """Replies to one turn, ids: up to the token `end`, or `limits` tokens. Their KV is in the cache afterwards."""
        width = max(map(len, tails))
        ids, real = np.zeros((2, len(tails), width), np.int64)
        for row, tail in enumerate(tails):
            ids[row, -len(tail) :], real[row, -len(tail) :] = tail, 1
        replies: list[list[int]] = [[] for _ in tails]
        logits = self._forward(ids, real)
        while True:
            chosen = self._sample(logits)
            still = [row for row, reply in enumerate(replies) if len(reply) < limits[row] and reply[-1:] != [end]]
            for row in still:
                replies[row].append(int(chosen[row]))
            if not still:
                return replies
            real = np.zeros((len(tails), 1), np.int64)
            real[still] = 1
            logits = self._forward(np.where(real, chosen[:, None], 0), real)

    def _forward(self, ids: NDArray[np.int64], real: NDArray[np.int64]) -> NDArray[np.float64]:
        """Logits behind each row's last token, float64 [B, vocabulary]."""
        positions = np.maximum(self.lengths[:, None] + np.cumsum(real, 1) - 1, 0)
        self.mask = torch.cat([self.mask, torch.from_numpy(real)], 1)
        self.lengths = self.lengths + real.sum(1)
        with torch.inference_mode():
            out = self.model(
                torch.from_numpy(ids),
                attention_mask=self.mask,
                position_ids=torch.from_numpy(positions),
                cache=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[:, -1].double().numpy()

    def _sample(self, logits: NDArray[np.float64]) -> NDArray[np.int64]:
        """Gumbel's way: the largest of logits / temperature + noise is a sample."""
        return np.argmax(logits / self.temperature + self.rng.gumbel(size=logits.shape), axis=1)
