"""Which implementation of the ops an executor runs: Triton kernels, vectorised torch, or torch's own attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from kvarena.allocators.adapter import Batch
from kvarena.kernels.page_table import PageTable
from torch import Tensor
from torch.nn import functional

BackendName = Literal["triton", "torch", "sdpa"]
BACKENDS: tuple[BackendName, ...] = ("triton", "torch", "sdpa")


@dataclass(frozen=True)
class Backend:
    """The ops of one implementation, with the kernels' signatures.

    slots_by  how the adapter computes slot mappings
    plan      step -> what the layers of that step share, passed to `extend` and `decode` as `plan`; None: nothing
    share     the same for `extend` alone, made at the first layer that asks, of (q, key_cache, value_cache, step,
              options); it may answer None
    """

    name: BackendName
    store_kv: Callable[..., None]
    extend: Callable[..., Any]
    decode: Callable[..., Any]
    copy_pages: Callable[..., None]
    gather_pages: Callable[..., Tensor]
    scatter_pages: Callable[..., None]
    slots_by: Literal["triton", "torch"] = "torch"
    plan: Callable[[Batch], Any] | None = None
    share: Callable[..., Any] | None = None


@dataclass
class Step:
    """One batch on its way through the layers of a model: `attend` is what every layer asks for.

    All requests of the batch decode (`all_decode`): one query each, padded requests included.
    """

    backend: Backend
    batch: Batch
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all_decode = self.batch.max_query_len == 1 and len(self.batch.positions) == len(self.batch.table.rows)
        self._shared: Any = None
        if self.backend.plan is not None:
            self.options = {**self.options, "plan": self.backend.plan(self.batch)}

    def store(self, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """Write the step's new K and V, [T, HKV, D]."""
        self.backend.store_kv(k, v, key_cache, value_cache, self.batch.slot_mapping)

    def attend(self, q: Tensor, key_cache: Tensor, value_cache: Tensor, **options: Any) -> Tensor:
        """Attention of the step's new tokens, q [T, HQ, D] -> [T, HQ, Dv]; options as the kernels take them."""
        options = {**self.options, **options}
        if self.all_decode:
            return self.backend.decode(q, key_cache, value_cache, self.batch.table, **options)
        if self.backend.share is not None:
            if self._shared is None:
                self._shared = self.backend.share(q, key_cache, value_cache, self.batch, options)
            options["plan"] = self._shared
        return self.backend.extend(q, key_cache, value_cache, self.batch.table, self.batch.query_start_loc, **options)


def load_backend(name: str) -> Backend:
    """The backend of a name. Raises ValueError for an unknown one."""
    if name == "triton":
        return _triton()
    if name == "torch":
        return _torch()
    if name == "sdpa":
        return _sdpa()
    raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, found {name!r}")


def _triton() -> Backend:
    from kvarena.kernels import copy, decode, extend, store

    return Backend(
        "triton",
        store.store_kv,
        extend.paged_extend,
        decode.paged_decode,
        copy.copy_pages,
        copy.gather_pages,
        copy.scatter_pages,
        slots_by="triton",
        share=_work_list,
    )


def _work_list(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Batch, options: Mapping[str, Any]
) -> object | None:
    """The Hopper kernel's list of tiles, once a step in place of once a layer; None where that kernel does not run."""
    from kvarena.kernels.extend import hopper_backend

    hopper = hopper_backend() if q.is_cuda else None
    if hopper is None or hopper.why_not(q, key_cache, value_cache, **_limits_of(options)) is not None:
        return None
    return hopper.plan_extend(batch.table, batch.query_start_loc, q.shape[0], q.shape[1], key_cache.shape[2])


def _limits_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options on which it depends whether the Hopper kernel takes a call."""
    names = ("scale", "window", "softcap", "alibi_slopes", "k_scale", "v_scale")
    return {name: options[name] for name in names if name in options}


def _torch() -> Backend:
    from kvarena.kernels import torch_backend as ops

    def plan(batch: Batch) -> Any:
        return ops.plan_gather(batch.table, batch.query_start_loc)

    return Backend(
        "torch",
        ops.store_kv,
        ops.paged_extend,
        ops.paged_decode,
        ops.copy_pages,
        ops.gather_pages,
        ops.scatter_pages,
        plan=plan,
    )


def _sdpa() -> Backend:
    from kvarena.kernels import torch_backend as ops

    return Backend(
        "sdpa",
        ops.store_kv,
        _sdpa_extend,
        _sdpa_decode,
        ops.copy_pages,
        ops.gather_pages,
        ops.scatter_pages,
        plan=_runs_of,
    )


@dataclass(frozen=True)
class _Run:
    """One request's tokens: slots first .. first + length of the pool, of which the last new ones are queries."""

    first: int
    length: int
    query_start: int
    query_end: int


def _runs_of(batch: Batch) -> list[_Run]:
    """Where each request's run lies. ValueError where a request's pages are not one run of consecutive ones."""
    runs = []
    starts = batch.query_start_loc.tolist()
    for request in range(batch.num_requests):
        slots = batch.table.slots(request)
        first = int(slots[0])
        if not torch.equal(slots, torch.arange(first, first + len(slots), device=slots.device)):
            raise ValueError(
                "backend sdpa reads no page table: it needs each request's pages to be one run (allocator kind "
                f"contiguous); request {request} of the batch has slots {slots.tolist()[:8]} ..."
            )
        runs.append(_Run(first, len(slots), starts[request], starts[request + 1]))
    return runs


def _sdpa_extend(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: PageTable,
    query_start_loc: Tensor,
    *,
    plan: list[_Run],
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention on each request's run, a view of the pool."""
    if softcap is not None:
        raise ValueError(f"backend sdpa has no softcap, found {softcap}")
    out = q.new_zeros(*q.shape[:2], value_cache.shape[3])
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    for run in plan:
        new = run.query_end - run.query_start
        k, v = (cache[run.first : run.first + run.length].transpose(0, 1) for cache in (keys, values))
        distance = torch.arange(run.length, device=q.device) - torch.arange(
            run.length - new, run.length, device=q.device
        ).unsqueeze(1)
        seen = distance <= 0 if window is None else (distance <= 0) & (distance > -window)
        queries = q[run.query_start : run.query_end].transpose(0, 1)
        each = functional.scaled_dot_product_attention(
            queries[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=True
        )
        out[run.query_start : run.query_end] = each[0].transpose(0, 1)
    return out


def _sdpa_decode(q: Tensor, key_cache: Tensor, value_cache: Tensor, table: PageTable, **options: Any) -> Tensor:
    return _sdpa_extend(q, key_cache, value_cache, table, table.rows, **options)
