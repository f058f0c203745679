"""The real SGLang 0.5.22 beside ours, where it can be imported: its tree, allocators and row pool, driven by hand.

What a scheduler calls for a request, without the scheduler: match, lock, evict and allocate, write the row,
checkpoint behind the prefill, checkpoint and free at the end. These are calls of its public methods, on the CPU,
with one torch thread: waking a second one costs more than these small tensors.

A scheduler does more for a request (its own objects, the admission test with a lock of its own), so this is the least
that SGLang's cache costs, and recorded figures that include such work are slower.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

MAX_CONTEXT = 40_960


class RealSGLang:
    """Admit, commit and release of one request at a time, in SGLang's own objects.

    Raises ImportError when the package, or the Rust core that a server uses, is not there.
    """

    version: str

    def __init__(self, num_tokens: int, page_size: int) -> None:
        import sglang
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        torch.set_num_threads(1)
        self.version = sglang.__version__
        self.page_size = page_size
        self.rows = ReqToTokenPool(16, MAX_CONTEXT, "cpu", False)
        pool = SimpleNamespace(size=num_tokens)
        if page_size == 1:
            self.slots: Any = TokenToKVPoolAllocator(num_tokens, torch.float16, "cpu", pool, False)
        else:
            self.slots = PagedTokenToKVPoolAllocator(num_tokens, page_size, torch.float16, "cpu", pool, False)
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="rust",
        )
        self.tree = UnifiedRadixCache(parameters)

    def serve(self, token_ids: array[int]) -> int:
        """One request through its life; returns its hit in tokens."""
        request = self._admit(token_ids)
        self.slots.free_group_begin()
        self.tree.checkpoint_into_tree(request, up_to=len(token_ids))
        self.slots.free_group_end()
        self._finish(request, len(token_ids))
        return request.hit

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages."""
        return self.slots.available_size() // self.page_size, self.tree.evictable_size() // self.page_size

    def _admit(self, token_ids: array[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(token_ids, limit=len(token_ids) - 1)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        node, hit = found.last_device_node, found.device_prefix_len
        request = _request(token_ids, hit, self.tree.lock(node))
        (row,) = self.rows.alloc([request])
        request.kv.req_pool_idx, request.kv.holds_kv = row, True
        prefix = self.tree.path_device_indices(node)[:hit]
        out = self._allocate(hit, len(token_ids), prefix)
        self.rows.write((row, slice(0, hit)), prefix)
        self.rows.write((row, slice(hit, len(token_ids))), out)
        return request

    def _allocate(self, start: int, end: int, prefix: Any) -> Any:
        import torch
        from sglang.srt.mem_cache import allocation

        if self.page_size == 1:
            return allocation.alloc_token_slots(self.tree, end - start)
        last = prefix[-1:] if start else torch.tensor([-1])
        starts, ends = torch.tensor([start]), torch.tensor([end])
        return allocation.alloc_paged_token_slots_extend(self.tree, starts, starts, ends, ends, last, end - start)

    def _finish(self, request: Any, length: int) -> None:
        self.slots.free_group_begin()
        self.tree.checkpoint_into_tree(request, up_to=length)
        self.tree.free_kv_row(request.kv, [(request.kv.cache_protected_len, length)])
        self.tree.unlock(request.lock)
        self.rows.free(request)
        self.slots.free_group_end()


def importable() -> str | None:
    """None when the real package is there; else why it is not."""
    try:
        RealSGLang(64, 1)
    except (ImportError, RuntimeError, OSError) as error:  # a missing or mismatched dependency of it
        return f"sglang cannot be imported ({error}); its recorded figures stand in"
    return None


def _request(token_ids: array[int], hit: int, lock: Any) -> Any:
    kv = SimpleNamespace(
        req_pool_idx=None,
        holds_kv=False,
        cache_protected_len=hit,
        cache_inserted_len=0,
        get_evicted_seqlen=lambda component: 0,
        swa_dead_lo=lambda page_size: 0,
    )
    return SimpleNamespace(
        kv=kv,
        hit=hit,
        lock=lock,
        full_untruncated_fill_ids=token_ids,
        origin_input_ids=token_ids,
        finished=lambda: False,
        priority=0,
        session_id=None,
        kv_rotation_base=None,
        extra_key=None,
        cache_salt=None,
        last_node=None,
        is_chunked=0,
    )
