"""The real SGLang 0.5.22 beside ours, where it can be imported: its tree, allocators and row pool, driven by hand.

What a scheduler calls for a request, without the scheduler: match, lock, evict and allocate, write the row,
checkpoint behind the prefill, checkpoint and free at the end. These are calls of its public methods, on the CPU,
with one torch thread: waking a second one costs more than these small tensors.

A scheduler does more for a request (its own objects, the admission test with a lock of its own), so this is the least
that SGLang's cache costs, and recorded figures that include such work are slower.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvarena.experiments.bench.alloc_ops import DECODES, LEAF_TOKENS, Op, Timed, prompts

MAX_CONTEXT = 40_960
OP_TOKENS = 65_536  # its free list is copied at each release, so a small pool is the fast one; ours does not mind


class RealSGLang:
    """Admit, commit and release of one request at a time, in SGLang's own objects.

    Raises ImportError when the package, or the Rust core that a server uses, is not there.
    """

    def __init__(self, num_tokens: int, page_size: int, max_requests: int = 16, max_context: int = MAX_CONTEXT) -> None:
        from kvarena.experiments.upstream import sglang_driver
        from kvarena.experiments.upstream.compare import find

        sglang = sglang_driver.load(find("sglang", None))
        self.version: str = sglang.version
        self.sglang = sglang
        self.cache = sglang_driver.SGLangCache(
            sglang, num_tokens, page_size, max_requests=max_requests, max_context=max_context
        )
        if "Rust" not in self.cache.core:
            raise ImportError(f"the tree core is {self.cache.core}, not the compiled one of a server")

    def admit(self, token_ids: array[int]) -> Any:
        """Match, lock, slots for the rest."""
        request = self.cache.pin(token_ids)
        self.cache.take(request, len(token_ids))
        return request

    def serve(self, token_ids: array[int]) -> int:
        """One request through its life; returns its hit in tokens."""
        request = self.admit(token_ids)
        self.cache.checkpoint(request)
        self.cache.finish(request)
        hit: int = request.hit
        return hit

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages."""
        return self.cache.room()


def importable() -> str | None:
    """None when the real package is there; else why it is not."""
    try:
        RealSGLang(64, 1)
    except (ImportError, RuntimeError, OSError) as error:  # a missing or mismatched dependency of it
        return f"sglang cannot be imported ({error}); its recorded figures stand in"
    return None


def real_ops() -> list[Op]:
    """The operations of `alloc_ops.token_ops` that a scheduler can ask of the real package, under the same names."""
    ops = []
    for size in (1, 16):

        def add(name: str, make: Callable[..., Timed], *arguments: int, size: int = size) -> None:
            ops.append(Op(name, "token", size, lambda: make(size, *arguments)))

        add("take 1 page", _take_one)
        add("match 4,096 over 32 nodes", _match, 4096, 32)
        add("match 32,768 over 256 nodes", _match, 32_768, 256)
        add("admit 4,096 uncached tokens", _admit, 4096)
        add("finish 4,096 + 256 tokens", _finish, 4096, 256)
        add("decode step of 256", _decode_step)
        add("evict 4,096 tokens of 1,000 leaves", _evict, 1000, 4096)
    return ops


def _fresh(length: int) -> Callable[[], array[int]]:
    source = prompts(length)
    return lambda: array("q", source().token_ids)


def _take_one(size: int, times: int = 100) -> Timed:
    real = RealSGLang(OP_TOKENS, size)

    def work(_: None) -> None:
        for _number in range(times):
            real.cache.slots.alloc(size)

    return Timed(real.cache.slots.clear, work, times)


def _match(size: int, tokens: int, nodes: int) -> Timed:
    """A prompt that came in `nodes` pieces, each cached behind the last."""
    real, whole = RealSGLang(OP_TOKENS, size), _fresh(tokens)()
    for end in range(tokens // nodes, tokens + 1, tokens // nodes):
        real.serve(whole[:end])
    key = real.sglang.RadixKey(whole)
    return Timed(lambda: real.sglang.MatchPrefixParams(key=key), real.cache.tree.match_prefix)


def _admit(size: int, length: int) -> Timed:
    real, fresh, live = RealSGLang(OP_TOKENS, size), _fresh(length), list[Any]()

    def before() -> array[int]:
        while live:
            real.cache.retract(live.pop(), 0)
        return fresh()

    return Timed(before, lambda tokens: live.append(real.admit(tokens)))


def _finish(size: int, prompt: int, generated: int) -> Timed:
    real, fresh = RealSGLang(OP_TOKENS, size), _fresh(prompt)

    def before() -> Any:
        real.cache.reset()
        request = real.admit(fresh())
        real.cache.checkpoint(request)
        request.full_untruncated_fill_ids.extend(range(generated))
        real.cache.take(request, prompt + generated)
        return request

    return Timed(before, real.cache.finish)


def _decode_step(size: int) -> Timed:
    """What a scheduler calls before a decode step of 256 requests: the test of the room, then slots for all of them."""
    real = RealSGLang(2 * OP_TOKENS, size, max_requests=DECODES, max_context=4096)
    cache, tensor = real.cache, real.sglang.torch.tensor
    requests = [real.admit(array("q", [number] * (100 + number))) for number in range(DECODES)]
    for request in requests:
        request.kv.kv_committed_len = request.length
    rows, lens = tensor([each.kv.req_pool_idx for each in requests]), tensor([each.length for each in requests])
    batch = SimpleNamespace(
        reqs=requests,
        device="cpu",
        tree_cache=cache.tree,
        token_to_kv_pool_allocator=cache.slots,
        req_to_token_pool=cache.rows,
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        seq_lens=lens,
        seq_lens_cpu=lens,
        maybe_evict_swa=lambda: None,
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )

    def work(_: None) -> None:
        pages = sum(1 for each in requests if each.kv.kv_committed_len % size == 0)
        cache.slots.check_decode_capacity(num_tokens=pages * size, tree_cache=cache.tree)
        real.sglang.allocation.alloc_for_decode(batch, 1)
        lens.add_(1)

    return Timed(lambda: None, work)


def _evict(size: int, num_leaves: int, tokens: int) -> Timed:
    real, fresh = RealSGLang(num_leaves * LEAF_TOKENS + OP_TOKENS // 16, size), _fresh(LEAF_TOKENS)

    def before() -> Any:
        while real.room()[1] * size < num_leaves * LEAF_TOKENS:
            real.serve(fresh())
        return real.sglang.EvictParams(num_tokens=tokens)

    return Timed(before, real.cache.tree.evict)
