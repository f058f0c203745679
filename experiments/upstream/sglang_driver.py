"""SGLang's own tree, slot allocators and row pool behind the neutral operations, without its scheduler.

From an installed package, or from the Python files and the compiled tree core of an unpacked wheel. Written against
SGLang 0.5.22; another version either answers the same calls or the comparison ends with what it raised.
"""

from __future__ import annotations

import dataclasses
import importlib
from array import array
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvarena.experiments.scenarios import RETRACT_DECODE_STEPS
from kvarena.experiments.upstream.compare import Setting, Upstream
from kvarena.experiments.upstream.stubs import Finder, install, names_of, version_of

REAL = (
    "sglang.srt.mem_cache",
    "sglang.srt.environ",
    "sglang.srt.rust_extensions",
    "sglang.srt.session.streaming_session",
    "sglang.srt.utils.common",
    "sglang.kernels.ops.memory.allocator",
    "sglang.kernels.ops.memory.common",
)
ALSO_REAL = ("sglang.srt.utils",)  # but not what lies below
ABSENT = (
    *("msgspec", "orjson", "psutil", "pybase64", "starlette", "sgl_kernel", "zmq"),
    *("fastapi", "aiohttp", "requests", "PIL", "torchvision"),
)
NAMES = {
    "sglang.srt.mem_cache.allocator.paged": ("PagedTokenToKVPoolAllocator",),
    "sglang.srt.mem_cache.allocator.token": ("TokenToKVPoolAllocator",),
    "sglang.srt.mem_cache.base_prefix_cache": ("EvictParams", "MatchPrefixParams"),
    "sglang.srt.mem_cache.cache_init_params": ("CacheInitParams",),
    "sglang.srt.mem_cache.memory_pool": ("ReqToTokenPool",),
    "sglang.srt.mem_cache.radix_cache": ("RadixKey",),
    "sglang.srt.mem_cache.unified_cache.components": ("ComponentType",),
    "sglang.srt.mem_cache.unified_radix_cache": ("UnifiedRadixCache",),
}


def load(root: Path | None) -> SimpleNamespace:
    """SGLang's classes by name, its allocation functions, and its `version`.

    root  folder of an unpacked wheel; None: the installed package. Raises ImportError where there is none.
    """
    import torch

    if root is not None:
        if not (root / "sglang" / "srt" / "mem_cache").is_dir():
            raise ImportError(f"{root} holds no sglang/srt/mem_cache")
        platform = SimpleNamespace(
            capabilities=SimpleNamespace(supports_triton=False),
            is_pin_memory_available=lambda device=None: False,
            is_cuda=lambda: False,
        )
        given: dict[str, dict[str, Any]] = {
            "sglang.srt.platforms": {"current_platform": platform},
            "sglang.srt.runtime_context": {
                "attention_backends": lambda: ("torch_native", "torch_native"),
                "get_spec": lambda: SimpleNamespace(speculative_algorithm=None),
                "get_serving": lambda: SimpleNamespace(strip_thinking_cache=False),
            },
        }
        install(Finder(root, "sglang", _is_real, given, ABSENT))
    torch.set_num_threads(1)  # waking a second one costs more than these small tensors
    found = names_of(NAMES) | {"torch": torch}
    found["allocation"] = importlib.import_module("sglang.srt.mem_cache.allocation")
    found["common"] = importlib.import_module("sglang.srt.mem_cache.common")
    return SimpleNamespace(**found, version=version_of("sglang", root))


def _is_real(name: str) -> bool:
    return name in ALSO_REAL or any(name == parent or name.startswith(f"{parent}.") for parent in REAL)


class SGLangCache:
    """What a scheduler calls for a request, in SGLang's own objects, on the CPU; rows for `max_requests`.

    A request's room is tested before anything is evicted: a server's scheduler sees to that.
    """

    def __init__(
        self,
        sglang: SimpleNamespace,
        num_tokens: int,
        page_size: int,
        *,
        max_requests: int = 16,
        max_context: int = 40_960,
        need_sort: bool = False,
        enabled: bool = True,
    ) -> None:
        self.sglang, self.page_size = sglang, page_size
        self.rows = sglang.ReqToTokenPool(max_requests, max_context, "cpu", False)
        pool, dtype = SimpleNamespace(size=num_tokens), sglang.torch.float16
        if page_size == 1:
            self.slots = sglang.TokenToKVPoolAllocator(num_tokens, dtype, "cpu", pool, need_sort)
        else:
            self.slots = sglang.PagedTokenToKVPoolAllocator(num_tokens, page_size, dtype, "cpu", pool, need_sort)
        known = {field.name for field in dataclasses.fields(sglang.CacheInitParams)}
        core = {"tree_core_backend": "rust"} if "tree_core_backend" in known else {}  # older ones have one core
        parameters = sglang.CacheInitParams(
            disable=not enabled,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots,
            page_size=page_size,
            tree_components=(sglang.ComponentType.FULL,),
            **core,
        )
        self.tree = sglang.UnifiedRadixCache(parameters)
        self.core = type(self.tree.tree_core).__name__  # the Python one where the compiled one cannot be loaded

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages."""
        return self.slots.available_size() // self.page_size, self.tree.evictable_size() // self.page_size

    def pin(self, token_ids: array[int], namespace: tuple[str | None, str | None] = (None, None)) -> Any:
        """A request with its longest cached prefix locked, never its last token; `hit` says how long that is."""
        extra_key, salt = namespace
        key = self.sglang.RadixKey(token_ids, extra_key, limit=len(token_ids) - 1, cache_salt=salt)
        found = self.tree.match_prefix(self.sglang.MatchPrefixParams(key=key))
        node = found.last_device_node
        hit = found.device_prefix_len if not self.tree.disable else 0
        return _request(token_ids, hit, node, self.tree.lock(node), namespace)

    def unpin(self, request: Any) -> None:
        self.tree.unlock(request.lock)

    def take(self, request: Any, end: int) -> None:
        """Slots up to position `end`, those of the hit first."""
        start = request.length
        if request.kv.req_pool_idx is None:
            (row,) = self.rows.alloc([request])
            request.kv.req_pool_idx, request.kv.holds_kv = row, True
            if start:
                self.rows.write((row, slice(0, start)), self.tree.path_device_indices(request.node)[:start])
        row = request.kv.req_pool_idx
        self.rows.write((row, slice(start, end)), self._allocate(row, start, end))
        request.length = end
        request.kv.kv_allocated_len = end

    def _allocate(self, row: int, start: int, end: int) -> Any:
        tensor, allocation = self.sglang.torch.tensor, self.sglang.allocation
        if self.page_size == 1:
            return allocation.alloc_token_slots(self.tree, end - start)
        last = self.rows.req_to_token[row, start - 1 : start].long() if start else tensor([-1])
        starts, ends = tensor([start]), tensor([end])
        return allocation.alloc_paged_token_slots_extend(self.tree, starts, starts, ends, ends, last, end - start)

    def can_decode(self, requests: list[Any]) -> bool:
        """A scheduler's test before a decode step, which makes room as far as it can."""
        needed = sum(each.length % self.page_size == 0 for each in requests) * self.page_size
        return bool(self.slots.check_decode_capacity(num_tokens=needed, tree_cache=self.tree))

    def decode(self, requests: list[Any]) -> None:
        """A slot for one more token of each, in one call."""
        tensor, allocation = self.sglang.torch.tensor, self.sglang.allocation
        if self.page_size == 1:
            out = allocation.alloc_token_slots(self.tree, len(requests))
        else:
            last = [int(self.rows.req_to_token[each.kv.req_pool_idx, each.length - 1]) for each in requests]
            ends = tensor([each.length + 1 for each in requests])
            out = allocation.alloc_paged_token_slots_decode(self.tree, ends, ends, tensor(last))
        for each, slot in zip(requests, out.tolist(), strict=True):
            self.rows.write((each.kv.req_pool_idx, slice(each.length, each.length + 1)), tensor([slot]))
            each.length += 1
            each.kv.kv_allocated_len = each.length

    def checkpoint(self, request: Any, grouped: bool = True) -> None:
        """Publish what is computed; in a free group, as behind a prefill, or without, as between chunks."""
        if grouped:
            self.slots.free_group_begin()
        self.tree.checkpoint_into_tree(request, up_to=request.length)
        if grouped:
            self.slots.free_group_end()

    def finish(self, request: Any) -> None:
        self.slots.free_group_begin()
        request.done = True
        self.tree.checkpoint_into_tree(request, up_to=request.length)
        self._give_back(request)
        self.slots.free_group_end()

    def retract(self, request: Any, num_others: int) -> None:
        """Throw a request back, and make the room for the others that a retraction makes."""
        self._give_back(request)
        self.slots.evict_to_free_tokens(self.tree, RETRACT_DECODE_STEPS * num_others)

    def _give_back(self, request: Any) -> None:
        self.tree.free_kv_row(request.kv, [(request.kv.cache_protected_len, request.length)])
        self.tree.unlock(request.lock)
        self.rows.free(request)

    def reset(self) -> None:
        """As a server's flush."""
        self.tree.reset()
        self.rows.clear()
        self.slots.clear()


def _request(token_ids: array[int], hit: int, node: Any, lock: Any, namespace: tuple[str | None, str | None]) -> Any:
    kv = SimpleNamespace(
        req_pool_idx=None,
        holds_kv=False,
        kv_allocated_len=0,
        cache_protected_len=hit,
        cache_inserted_len=0,
        get_evicted_seqlen=lambda component: 0,
        swa_dead_lo=lambda page_size: 0,
    )
    request = SimpleNamespace(
        kv=kv,
        hit=hit,
        length=hit,
        node=node,
        lock=lock,
        done=False,
        full_untruncated_fill_ids=token_ids,
        origin_input_ids=token_ids[:],
        priority=0,
        session_id=None,
        kv_rotation_base=None,
        extra_key=namespace[0],
        cache_salt=namespace[1],
        last_node=None,
        is_chunked=0,
    )
    request.finished = lambda: request.done
    return request


class RealSGLang:
    """Answers neutral operations as `ScenarioRunner` does, out of SGLang's own objects.

    Page id = slot id // page size, page 0 is padding. Evicted pages are those that tree eviction freed, in its order.
    Beside the neutral ones it knows `step`: one token for each of `ids` in one call, all or nothing.
    """

    def __init__(self, sglang: SimpleNamespace, header: dict[str, Any]) -> None:
        self.page_size: int = header["page_size"]
        num_tokens = header["num_slots"] // self.page_size * self.page_size
        self.strict = header.get("admission") == "sglang"
        self.cache = SGLangCache(
            sglang,
            num_tokens,
            self.page_size,
            max_requests=64,
            max_context=header.get("max_model_len", num_tokens) + 4,
            need_sort=header.get("need_sort", False),
            enabled=header.get("enable_prefix_cache", True),
        )
        self.live: dict[str, Any] = {}
        self.images: dict[str, int] = {}
        self.evicted: list[int] = []
        self._watch_evictions()

    def _watch_evictions(self) -> None:
        """Note the pages that are freed while the tree evicts; of nested calls the outermost."""
        inside = {"evict": 0, "free": 0}

        def watched(owner: Any, name: str, kind: str) -> None:
            call = getattr(owner, name)

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if kind == "free" and inside["evict"] and not inside["free"]:
                    self.evicted += (args[0][:: self.page_size] // self.page_size).tolist()
                inside[kind] += 1
                try:
                    return call(*args, **kwargs)
                finally:
                    inside[kind] -= 1

            setattr(owner, name, wrapped)

        for name in ("evict", "evict_for_alloc"):
            watched(self.cache.tree, name, "evict")
        for name in ("free", "free_segment"):
            watched(self.cache.slots, name, "free")

    def decide(self, op: dict[str, Any]) -> dict[str, Any]:
        """Carry out one op; returns its decision-log line without `i`."""
        self.evicted.clear()
        verb = op["op"]
        if verb == "reset":
            line: dict[str, Any] = self._reset()
        elif verb == "arrive":
            line = self._arrive(op)
        elif verb == "step":
            line = self._step(op)
        elif op["id"] not in self.live:
            line = {"ok": False, "skipped": True, "hit": 0}
        else:
            line = getattr(self, f"_{verb}")(op, self.live[op["id"]])
        line["free"], line["evictable"] = self.cache.room()
        return line | {"evicted": list(self.evicted)}

    def pages(self, request: Any) -> list[int]:
        row = self.cache.rows.req_to_token[request.kv.req_pool_idx, : request.length : self.page_size]
        pages: list[int] = (row // self.page_size).tolist()
        return pages

    def _fits(self, request: Any, total: int) -> bool:
        free, evictable = self.cache.room()
        new, size = total - request.hit, self.page_size
        if self.strict:
            return new + size < (free + evictable) * size
        return -(-new // size) <= free + evictable

    def _arrive(self, op: dict[str, Any]) -> dict[str, Any]:
        tokens = array("q", self._with_images(op))
        key = op.get("key", {})
        lora, salt = key.get("lora"), key.get("salt")
        request = self.cache.pin(tokens, (None if lora is None else "|".join(lora), salt))
        total = len(tokens)
        if not self._fits(request, total):
            self.cache.unpin(request)
            return {"ok": False, "hit": 0, "pages": []}
        if op["id"] in self.live:
            raise ValueError(f"arrive: request {op['id']!r} is already live")
        step = total if op.get("chunk") is None else max(op["chunk"] // self.page_size, 1) * self.page_size
        while request.length < total:
            self.cache.take(request, min(request.length + step, total))
            self.cache.checkpoint(request, grouped=request.length == total)
        self.live[op["id"]] = request
        return {"ok": True, "hit": request.hit, "pages": self.pages(request)}

    def _with_images(self, op: dict[str, Any]) -> list[int]:
        """Image positions get ids of their content above all tokens: one where it begins, another for the rest."""
        tokens = list(op["tokens"])
        for offset, length, content in op.get("key", {}).get("mm", ()):
            first = (1 << 40) + 2 * self.images.setdefault(content, len(self.images))
            tokens[offset : offset + length] = [first, *[first + 1] * (length - 1)]
        return tokens

    def _decode(self, op: dict[str, Any], request: Any) -> dict[str, Any]:
        line = self._step({"ids": [op["id"]], "tokens": [op["token"]]})
        return line | {"new_pages": line["new_pages"][0] if line["ok"] else []}

    def _step(self, op: dict[str, Any]) -> dict[str, Any]:
        requests = [self.live[name] for name in op["ids"]]
        if not self.cache.can_decode(requests):
            return {"ok": False, "hit": 0, "new_pages": []}
        before = [len(self.pages(request)) for request in requests]
        for request, token in zip(requests, op["tokens"], strict=True):
            request.full_untruncated_fill_ids.append(token)
        self.cache.decode(requests)
        new = [self.pages(request)[count:] for request, count in zip(requests, before, strict=True)]
        return {"ok": True, "hit": 0, "new_pages": new}

    def _finish(self, op: dict[str, Any], request: Any) -> dict[str, Any]:
        self.cache.finish(self.live.pop(op["id"]))
        return {"ok": True, "hit": 0}

    def _preempt(self, op: dict[str, Any], request: Any) -> dict[str, Any]:
        del self.live[op["id"]]
        self.cache.retract(request, len(self.live))
        return {"ok": True, "hit": 0}

    def _reset(self) -> dict[str, Any]:
        if self.live:
            return {"ok": False, "hit": 0}
        self.cache.reset()
        return {"ok": True, "hit": 0}


def upstream(root: Path | None) -> Upstream:
    """SGLang, ready to be compared with our token design. ImportError: it, or its compiled core, is not there."""
    sglang = load(root)
    detail = ""
    with suppress(TypeError, AttributeError):  # another version's calls; the comparison says which
        detail = RealSGLang(sglang, _header(1, 8)).cache.core
    return Upstream("sglang", sglang.version, settings(), lambda header: RealSGLang(sglang, header), "token", detail)


def settings() -> list[Setting]:
    """Page sizes, both admission rules, free lists in order of freeing and sorted, and no prefix cache."""
    found = [
        Setting(f"page {page_size}", _header(page_size, pages), keys=True, batches=True)
        for page_size, pages in ((1, 48), (2, 40), (4, 32), (16, 24), (64, 12))
    ]
    for page_size, pages in ((1, 40), (4, 32), (16, 24)):
        header = _header(page_size, pages)
        for name, rule in (
            ("scheduler's admission rule", {"admission": "sglang"}),
            ("freed pages sorted", {"need_sort": True}),
            ("no prefix cache", {"enable_prefix_cache": False}),
        ):
            found.append(Setting(f"page {page_size}, {name}", header | rule, batches=True))
    return found


def _header(page_size: int, pages: int) -> dict[str, Any]:
    return {"page_size": page_size, "num_slots": page_size * pages, "max_model_len": 2 * page_size * pages}
