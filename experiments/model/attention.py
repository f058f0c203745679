"""Our paged attention where the transformers library expects an attention function and a cache.

Two of its extension points are used. `AttentionInterface.register` names our attention function; a layer then calls it
with q [1, HQ, T, D] and whatever its cache returned for K and V. The cache is a list of `PagedLayer`: `update` writes
the step's K and V into the pool and returns the layer's whole pool, [P, S, HKV, D], as keys and values. The step (page
table, slots, offsets of the flat batch) reaches both through `StepHolder` and the model's keyword arguments.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from kvarena.experiments.engine.backends import Step
from kvarena.experiments.engine.paged_memory import KVShape
from kvarena.kernels.pool import KVPool
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin

ATTENTION_NAME = "kvarena_paged"


class StepHolder:
    """The step that the model's forward pass is in."""

    def __init__(self) -> None:
        self._step: Step | None = None

    def set(self, step: Step) -> None:
        self._step = step

    @property
    def step(self) -> Step:
        if self._step is None:
            raise ValueError("paged attention runs inside a step: call paged_forward, not the model itself")
        return self._step


class PagedLayer(CacheLayerMixin):
    """One layer of the pool as the library's cache layer."""

    def __init__(self, holder: StepHolder, key_cache: Tensor, value_cache: Tensor) -> None:
        super().__init__()
        self.holder = holder
        self.key_cache, self.value_cache = key_cache, value_cache
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pool is there before the model runs."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store k, v [1, HKV, T, D] through the step's slot mapping; returns the layer's pool [P, S, HKV, D]."""
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self.holder.step.store(k, v, self.key_cache, self.value_cache)
        return self.key_cache, self.value_cache

    def get_seq_length(self) -> int:
        """0: positions are given with every call, there is no one length."""
        return 0

    def get_max_length(self) -> int:
        """-1: the page table bounds a sequence, not the layer."""
        return -1

    get_max_cache_shape = get_max_length  # the name of transformers before 5.24

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Not asked for: an attention function without a mask function gets no mask."""
        return query_length, 0


class PagedCache(Cache):
    """A pool as the library's cache."""

    def __init__(self, pool: KVPool) -> None:
        self.holder = StepHolder()
        super().__init__(layers=[PagedLayer(self.holder, pool.key(i), pool.value(i)) for i in range(pool.num_layers)])


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_step: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the flat batch: query [1, HQ, T, D], key and value a layer's pool. Returns ([1, T, HQ, D], None)."""
    if paged_step is None:
        raise ValueError("paged attention runs inside a step: call paged_forward, not the model itself")
    if attention_mask is not None or dropout:
        raise ValueError(f"paged attention: expected no mask and no dropout, found a mask or dropout {dropout}")
    options = {"window": sliding_window, "softcap": softcap}
    given = {name: option for name, option in options.items() if option is not None}
    queries = query[0].transpose(0, 1).contiguous()
    return paged_step.attend(queries, key, value, scale=scaling, **given)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


def use_paged_attention(model: Any, pool: KVPool) -> PagedCache:
    """Set a model's attention to ours and wrap the pool as its cache. `model.set_attn_implementation` undoes it."""
    model.eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return PagedCache(pool)


def paged_forward(model: Any, cache: PagedCache, input_ids: Tensor, step: Step) -> Tensor:
    """One pass of the decoder over a flat batch, input_ids int64 [T]. Returns hidden states [T, hidden]."""
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ValueError(
            f"the model's attention is {model.config._attn_implementation!r}, expected {ATTENTION_NAME!r}: "
            "call use_paged_attention first"
        )
    cache.holder.set(step)
    result = model.base_model(
        input_ids=input_ids[None],
        position_ids=step.batch.positions[None],
        use_cache=True,
        paged_step=step,
        **{_cache_argument(model): cache},
    )
    return result.last_hidden_state[0]


def _cache_argument(model: Any) -> str:
    """transformers 5.24 renamed `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


def kv_shape(model: Any) -> KVShape:
    """KV layers, heads and head_dim of a model, or of this rank's part of it."""
    config = model.config
    layer = model.base_model.layers[0].self_attn
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(config.num_hidden_layers, layer.k_proj.out_features // head_dim, head_dim)
