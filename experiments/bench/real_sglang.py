"""The real SGLang 0.5.22 beside ours, where it can be imported: its tree, allocators and row pool, driven by hand.

Two drives, both on the CPU and with one torch thread (waking a second one costs more than these small tensors: with
two, page 16 takes twice the CPU time), each without the scheduler itself:

    serve        as the engine calls it, from an int32 array to slots in the row: the array of ids by the shortest way
                 (its tokenizer manager goes through a list), SGLang's own functions for a request (match_kv_cache,
                 alloc_for_extend, checkpoint_kv_cache, release_kv_cache), the admission test's lock of its own, and
                 the tensors of a batch of one
    serve_lean   the least that decides alike: the key's array made beforehand, methods of the tree called directly
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvarena.experiments.bench.alloc_load import Prompt
from kvarena.experiments.bench.alloc_ops import DECODES, LEAF_TOKENS, Op, Timed, prompts

MAX_CONTEXT = 40_960
OP_TOKENS = 65_536  # its free list is copied at each release, so a small pool is the fast one; ours does not mind


class KVRow:
    """What SGLang's `ReqKvInfo` says of a request, as far as full attention reads it."""

    __slots__ = ("cache_inserted_len", "cache_protected_len", "kv_allocated_len", "kv_committed_len", "req_pool_idx")
    holds_mamba = False

    def __init__(self) -> None:
        self.req_pool_idx: int | None = None
        self.cache_protected_len = self.cache_inserted_len = self.kv_committed_len = self.kv_allocated_len = 0

    @property
    def holds_kv(self) -> bool:
        return self.req_pool_idx is not None

    @property
    def is_kv_released(self) -> bool:
        return self.kv_allocated_len == 0

    def swa_dead_lo(self, page_size: int) -> int:
        return self.cache_protected_len

    def get_evicted_seqlen(self, component: Any) -> int:
        return 0

    def mark_kv_released(self) -> None:
        self.kv_allocated_len = 0


class EngineRequest:
    """What SGLang's functions read of its `Req`, whose own constructor sets a hundred fields more."""

    session = session_id = extra_key = cache_salt = kv_rotation_base = finished_len = None
    skip_radix_cache_insert = is_retracted = is_chunked = False
    priority = 0

    def __init__(self, rid: str, token_ids: array[int]) -> None:
        self.rid = rid
        self.origin_input_ids = token_ids
        self.output_ids = array("q")
        self.kv = KVRow()
        self.lock: Any = None
        self.done = False
        self.prefix_len = self.extend_end = 0
        self.last_node: Any = None
        self.refresh_fill_ids()

    def refresh_fill_ids(self) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.done

    def owned_kv_len(self) -> int:
        return self.kv.kv_committed_len

    def _compute_max_prefix_len(self, input_len: int) -> int:
        return input_len - 1


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
        self.count = 0

    # as the engine calls it

    def serve(self, prompt: Prompt) -> int:
        """One request through its life; returns its hit in tokens."""
        request = self.enter(prompt)
        hit = request.prefix_len
        self.checkpoint(request)
        self.leave(request)
        return hit

    def enter(self, prompt: Prompt) -> EngineRequest:
        """A request from an int32 array, matched, locked, with slots for the rest of it."""
        self.count += 1
        request = EngineRequest(f"r{self.count}", array("q", prompt.astype("int64").tobytes()))
        self.match(request)
        tree = self.cache.tree
        tree.unlock(tree.lock(request.last_node))  # held during the admission test
        request.extend_end = len(prompt)
        request.lock = tree.lock(request.last_node)
        self.sglang.allocation.alloc_for_extend(self._batch(request))
        return request

    def match(self, request: EngineRequest) -> None:
        ids = request.full_untruncated_fill_ids
        self.sglang.common.match_kv_cache(request, self.cache.tree, ids, max_prefix_len=len(ids) - 1)
        request.kv.cache_protected_len = request.prefix_len

    def _batch(self, request: EngineRequest) -> SimpleNamespace:
        """A batch of this one request, with the tensors that `prepare_for_extend` makes before it allocates."""
        torch, end = self.sglang.torch, request.extend_end
        new = request.full_untruncated_fill_ids[:end][request.prefix_len :]
        return SimpleNamespace(
            reqs=[request],
            input_ids=torch.frombuffer(new, dtype=torch.int64),
            seq_lens=torch.tensor([end], dtype=torch.int64),
            seq_lens_cpu=torch.tensor([end], dtype=torch.int64),
            orig_seq_lens=torch.tensor([end], dtype=torch.int32),
            prefix_lens=[request.prefix_len],
            extend_lens=[len(new)],
            extend_num_tokens=len(new),
            device="cpu",
            tree_cache=self.cache.tree,
            req_to_token_pool=self.cache.rows,
            hisparse_coordinator=None,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
        )

    def checkpoint(self, request: EngineRequest) -> None:
        self.cache.slots.free_group_begin()
        self.sglang.common.checkpoint_kv_cache(request, self.cache.tree)
        self.cache.slots.free_group_end()

    def leave(self, request: EngineRequest) -> None:
        request.done = True
        self.cache.slots.free_group_begin()
        self.sglang.common.release_kv_cache(request, self.cache.tree, checkpoint=True)
        self.cache.slots.free_group_end()

    def drop(self, request: EngineRequest) -> None:
        """Its slots back, nothing published."""
        self.sglang.common.release_kv_cache(request, self.cache.tree, checkpoint=False)

    # the least that decides alike

    @staticmethod
    def lean_input(prompt: Prompt) -> array[int]:
        return array("q", prompt.astype("int64").tobytes())

    def admit_lean(self, token_ids: array[int]) -> Any:
        request = self.cache.pin(token_ids)
        self.cache.take(request, len(token_ids))
        return request

    def serve_lean(self, token_ids: array[int]) -> int:
        """One request through its life; returns its hit in tokens."""
        request = self.admit_lean(token_ids)
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


def version() -> str | None:
    """Of the real package; None where it cannot be imported."""
    return RealSGLang(64, 1).version if importable() is None else None


def real_ops() -> list[Op]:
    """The operations of `alloc_ops.token_ops` that a scheduler can ask of the real package, under the same names."""
    ops = []
    for size in (1, 16):

        def add(name: str, make: Callable[..., Timed], *arguments: int, size: int = size) -> None:
            ops.append(Op(name, "token", size, lambda: make(size, *arguments)))

        add("take 1 page", _take_one)
        add("match 4,096 over 32 nodes", _match, 4096, 32)
        add("match 32,768 over 256 nodes", _match, 32_768, 256)
        add("insert 4,096 new tokens", _insert, 4096)
        add("admit 4,096 uncached tokens", _admit, 4096)
        add("finish 4,096 + 256 tokens", _finish, 4096, 256)
        add("decode step of 256", _decode_step)
        add("evict 4,096 tokens of 1,000 leaves", _evict, 1000, 4096)
    ops.append(Op("evict 4,096 tokens of 20,000 leaves", "token", 1, lambda: _evict(1, 20_000, 4096)))
    return ops


def lean_ops() -> list[Op]:
    """Those of which the least that decides alike is less than what the engine calls."""
    ops = []
    for size in (1, 16):

        def add(name: str, make: Callable[..., Timed], *arguments: int, size: int = size) -> None:
            ops.append(Op(name, "token", size, lambda: make(size, *arguments)))

        add("match 4,096 over 32 nodes", _match_lean, 4096, 32)
        add("match 32,768 over 256 nodes", _match_lean, 32_768, 256)
        add("admit 4,096 uncached tokens", _admit_lean, 4096)
    return ops


def _take_one(size: int, times: int = 100) -> Timed:
    real = RealSGLang(OP_TOKENS, size)

    def work(_: None) -> None:
        for _number in range(times):
            real.cache.slots.alloc(size)

    return Timed(real.cache.slots.clear, work, times)


def _in_pieces(size: int, tokens: int, nodes: int) -> tuple[RealSGLang, Prompt]:
    """A prompt that came in `nodes` pieces, each cached behind the last."""
    real, whole = RealSGLang(OP_TOKENS, size), prompts(tokens)()
    for end in range(tokens // nodes, tokens + 1, tokens // nodes):
        real.serve_lean(real.lean_input(whole[:end]))
    return real, whole


def _match(size: int, tokens: int, nodes: int) -> Timed:
    """The match of a waiting request, and the ids of its pages."""
    real, whole = _in_pieces(size, tokens, nodes)
    request = EngineRequest("r", real.lean_input(whole))

    def work(_: None) -> None:
        real.match(request)
        real.cache.tree.prefix_device_indices(request)

    return Timed(lambda: None, work)


def _match_lean(size: int, tokens: int, nodes: int) -> Timed:
    real, whole = _in_pieces(size, tokens, nodes)
    key = real.sglang.RadixKey(real.lean_input(whole))
    return Timed(lambda: real.sglang.MatchPrefixParams(key=key), real.cache.tree.match_prefix)


def _insert(size: int, length: int) -> Timed:
    """The checkpoint of a prompt of which the tree has nothing."""
    real, fresh, live = RealSGLang(OP_TOKENS, size), prompts(length), list[Any]()

    def before() -> Any:
        while live:
            real.leave(live.pop())
        real.cache.reset()
        live.append(real.enter(fresh()))
        return live[0]

    return Timed(before, real.checkpoint)


def _admit(size: int, length: int) -> Timed:
    real, fresh, live = RealSGLang(OP_TOKENS, size), prompts(length), list[Any]()

    def before() -> Prompt:
        while live:
            real.drop(live.pop())
        return fresh()

    return Timed(before, lambda tokens: live.append(real.enter(tokens)))


def _admit_lean(size: int, length: int) -> Timed:
    real, fresh, live = RealSGLang(OP_TOKENS, size), prompts(length), list[Any]()

    def before() -> array[int]:
        while live:
            real.cache.retract(live.pop(), 0)
        return real.lean_input(fresh())

    return Timed(before, lambda tokens: live.append(real.admit_lean(tokens)))


def _finish(size: int, prompt: int, generated: int) -> Timed:
    """The end of a request with its prompt published and replies in its row."""
    real, fresh = RealSGLang(OP_TOKENS, size), prompts(prompt)

    def before() -> Any:
        real.cache.reset()
        request = real.cache.pin(real.lean_input(fresh()))
        real.cache.take(request, prompt)
        real.cache.checkpoint(request)
        request.full_untruncated_fill_ids.extend(range(generated))
        real.cache.take(request, prompt + generated)
        return request

    return Timed(before, real.cache.finish)


def _decode_step(size: int) -> Timed:
    """What a scheduler calls before a decode step of 256 requests: the test of the room, then slots for all of them."""
    real = RealSGLang(2 * OP_TOKENS, size, max_requests=DECODES, max_context=4096)
    cache, tensor = real.cache, real.sglang.torch.tensor
    requests = [real.admit_lean(array("q", [number] * (100 + number))) for number in range(DECODES)]
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
    real, fresh = RealSGLang(num_leaves * LEAF_TOKENS + OP_TOKENS // 16, size), prompts(LEAF_TOKENS)

    def before() -> Any:
        while real.room()[1] * size < num_leaves * LEAF_TOKENS:
            real.serve_lean(real.lean_input(fresh()))
        return real.sglang.EvictParams(num_tokens=tokens)

    return Timed(before, real.cache.tree.evict)
