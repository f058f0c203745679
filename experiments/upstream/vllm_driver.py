"""vLLM's own KVCacheManager behind the neutral operations: what its scheduler calls, without the scheduler.

From an installed package, or from the dozen Python files of an unpacked wheel. Written against vLLM 0.32.0; another
version either answers the same calls or the comparison ends with what it raised.
"""

from __future__ import annotations

import bisect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvarena.experiments.upstream.compare import Setting, Upstream
from kvarena.experiments.upstream.stubs import Finder, install, names_of, version_of

REAL = (
    "vllm.v1.core",
    "vllm.v1.request",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.hisparse",
    "vllm.v1.utils",
    "vllm.utils.math_utils",
    "vllm.utils.hashing",
)
MENTIONED = ("vllm.v1.core.sched",)  # below a real package, and not needed
ABSENT = (
    *("msgspec", "cbor2", "zmq", "prometheus_client", "cachetools", "psutil", "regex"),
    *("cloudpickle", "uvloop", "fastapi", "uvicorn", "aiohttp"),
)
NAMES = {
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager",),
    "vllm.v1.core.kv_cache_utils": ("get_request_block_hasher", "init_none_hash"),
    "vllm.v1.kv_cache_interface": ("KVCacheConfig", "KVCacheGroupSpec", "FullAttentionSpec", "SlidingWindowSpec"),
    "vllm.v1.request": ("Request", "RequestStatus"),
    "vllm.utils.hashing": ("sha256",),
}


def load(root: Path | None) -> SimpleNamespace:
    """vLLM's classes and functions by name, and its `version`.

    root  folder of an unpacked wheel; None: the installed package. Raises ImportError where there is none.
    """
    import torch

    if root is not None and not (root / "vllm" / "v1" / "core").is_dir():
        raise ImportError(f"{root} holds no vllm/v1/core")
    if root is not None:
        given: dict[str, dict[str, Any]] = {
            "vllm.multimodal.utils": {"get_mm_features_in_window": _items_in},
            "vllm.utils": {"length_from_prompt_token_ids_or_embeds": lambda ids, embeds: len(ids)},
            "vllm.v1.structured_output.request": {
                "StructuredOutputRequest": SimpleNamespace(from_sampling_params=lambda params: None)
            },
            "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        }
        install(Finder(root, "vllm", _is_real, given, ABSENT))
    found = names_of(NAMES) | {"torch": torch}
    return SimpleNamespace(**found, version=version_of("vllm", root))


def _is_real(name: str) -> bool:
    def below(parents: tuple[str, ...]) -> bool:
        return any(name == parent or name.startswith(f"{parent}.") for parent in parents)

    return below(REAL) and not below(MENTIONED)


def _items_in(items: list[Any], start: int, end: int) -> tuple[int, int]:
    """Half-open range of the items that overlap [start, end); items are in order and do not overlap."""
    first = bisect.bisect_right(items, start, key=lambda item: item.mm_position.offset + item.mm_position.length)
    return first, bisect.bisect_left(items, end, key=lambda item: item.mm_position.offset)


class RealVLLM:
    """Answers neutral operations as `ScenarioRunner` does, out of vLLM's own objects.

    Page id = block id, block 0 is the null block. Evicted pages are those whose hash was dropped when they were taken;
    without `watch` nobody notes them.
    """

    def __init__(self, vllm: SimpleNamespace, header: dict[str, Any], *, watch: bool = True) -> None:
        self.vllm = vllm
        self.page_size: int = header["page_size"]
        num_blocks = header["num_slots"] // self.page_size + 1
        window = header.get("sliding_window")
        shape = {"block_size": self.page_size, "num_kv_heads": 1, "head_size": 1, "dtype": vllm.torch.float16}
        spec = (
            vllm.FullAttentionSpec(**shape)
            if window is None
            else vllm.SlidingWindowSpec(**shape, sliding_window=window)
        )
        group = vllm.KVCacheGroupSpec(["layer"], spec)
        config = vllm.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        if window is not None:
            config.prefix_cache_retention_interval = header.get("retention_interval")
        self.manager = vllm.KVCacheManager(
            config,
            max_model_len=header.get("max_model_len", 1 << 20),
            scheduler_block_size=self.page_size,
            hash_block_size=self.page_size,
            enable_caching=header.get("enable_prefix_cache", True),
        )
        vllm.init_none_hash(vllm.sha256)
        caching = header.get("enable_prefix_cache", True)
        self.hasher = vllm.get_request_block_hasher(self.page_size, vllm.sha256) if caching else None
        self.pool = self.manager.block_pool
        self.live: dict[str, Any] = {}
        self.preempted: dict[str, Any] = {}
        self.evicted: list[int] = []
        if watch:
            self._watch_evictions()

    def _watch_evictions(self) -> None:
        drop = self.pool._maybe_evict_cached_block

        def watched(block: Any) -> bool:
            dropped = bool(drop(block))
            if dropped:
                self.evicted.append(block.block_id)
            return dropped

        self.pool._maybe_evict_cached_block = watched

    def decide(self, op: dict[str, Any]) -> dict[str, Any]:
        """Carry out one op; returns its decision-log line without `i`."""
        self.evicted.clear()
        if op["op"] == "reset":
            line: dict[str, Any] = self._reset()
        elif op["op"] == "arrive":
            line = self._arrive(op)
        elif op["id"] not in self.live:
            line = {"ok": False, "skipped": True, "hit": 0}
        else:
            line = getattr(self, f"_{op['op']}")(op, self.live[op["id"]])
        line["free"], line["evictable"] = self.room()
        return line | {"evicted": list(self.evicted)}

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages: those of the free queue without and with a hash."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        evictable = sum(block.block_hash is not None for block in free)
        return len(free) - evictable, evictable

    def request(self, op: dict[str, Any]) -> Any:
        """A vLLM request for an `arrive`; a preempted one comes back if its tokens are the same."""
        before = self.preempted.pop(op["id"], None)
        if before is not None and list(before.all_token_ids) == list(op["tokens"]):
            return before
        key = op.get("key", {})
        lora = SimpleNamespace(lora_name=key["lora"][0], lora_path=key["lora"][1]) if "lora" in key else None
        items = [
            SimpleNamespace(identifier=content, mm_position=SimpleNamespace(offset=offset, length=length))
            for offset, length, content in key.get("mm", ())
        ]
        params = SimpleNamespace(max_tokens=1 << 20, extra_args=None, skip_reading_prefix_cache=None)
        return self.vllm.Request(
            request_id=op["id"],
            prompt_token_ids=list(op["tokens"]),
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            mm_features=items,
            lora_request=lora,
            cache_salt=key.get("salt"),
            block_hasher=self.hasher,
        )

    def pages(self, request: Any) -> list[int]:
        return [block.block_id for block in self.manager.coordinator.get_blocks(request.request_id)[0]]

    def _arrive(self, op: dict[str, Any]) -> dict[str, Any]:
        if op["id"] in self.live:
            raise ValueError(f"arrive: request {op['id']!r} is already live")
        request = self.request(op)
        hit = self.admit(request, op.get("chunk"))
        if hit is None:
            return {"ok": False, "hit": 0, "pages": []}
        self.live[op["id"]] = request
        return {"ok": True, "hit": hit, "pages": self.pages(request)}

    def admit(self, request: Any, chunk: int | None = None) -> int | None:
        """Look up, allocate and publish the whole of it, in chunks; returns the hit, or None where it is refused."""
        found, hit, *_ = self.manager.get_computed_blocks(request)
        total = request.num_tokens
        first: dict[str, Any] = {
            "num_new_computed_tokens": hit,
            "new_computed_blocks": found,
            "full_sequence_must_fit": True,
        }
        while request.num_computed_tokens < total:
            computed = request.num_computed_tokens + (hit if first else 0)
            new = min(chunk or total, total - computed)
            if self.manager.allocate_slots(request, new, **first) is None:
                self._give_up(request, admitted=not first)
                return None
            request.status = self.vllm.RequestStatus.RUNNING
            request.num_computed_tokens = computed + new
            first = {}
        return hit

    def _give_up(self, request: Any, admitted: bool) -> None:
        if admitted:
            self.manager.free(request)

    def _decode(self, op: dict[str, Any], request: Any) -> dict[str, Any]:
        before = len(self.pages(request))
        request.append_output_token_ids(op["token"])
        if self.manager.allocate_slots(request, 1) is None:
            del request._output_token_ids[-1], request._all_token_ids[-1]
            del request.block_hashes[request.num_tokens // self.page_size :]
            return {"ok": False, "hit": 0, "new_pages": []}
        request.num_computed_tokens += 1
        return {"ok": True, "hit": 0, "new_pages": self.pages(request)[before:]}

    def _finish(self, op: dict[str, Any], request: Any) -> dict[str, Any]:
        self.manager.free(self.live.pop(op["id"]))
        return {"ok": True, "hit": 0}

    def _preempt(self, op: dict[str, Any], request: Any) -> dict[str, Any]:
        self.manager.free(self.live.pop(op["id"]))
        request.status = self.vllm.RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.preempted[op["id"]] = request
        return {"ok": True, "hit": 0}

    def _reset(self) -> dict[str, Any]:
        hashed = [block.block_id for block in self.pool.blocks if block.block_hash is not None]
        done = bool(self.manager.reset_prefix_cache())
        if done:
            self.evicted[:] = hashed
        return {"ok": done, "hit": 0}


def upstream(root: Path | None) -> Upstream:
    """vLLM, ready to be compared with both forms of our block design. ImportError: it is not there."""
    vllm = load(root)
    return Upstream("vllm", vllm.version, settings(), lambda header: RealVLLM(vllm, header), "block")


def settings() -> list[Setting]:
    """Page sizes, both forms, windows with every kind of retention, and no prefix cache."""
    found = []
    for form in ("hashed", "runs"):
        for page_size, pages in ((1, 48), (2, 40), (4, 32), (16, 24)):
            found.append(
                Setting(f"{form}, page {page_size}", _header(page_size, pages), {"form": form}, keys=page_size > 1)
            )
    for page_size, window, retention in ((4, 7, None), (4, 9, 0), (4, 10, 8), (16, 33, None), (16, 17, 32), (1, 5, 0)):
        header = _header(page_size, 28) | {"sliding_window": window, "retention_interval": retention}
        found.append(Setting(f"page {page_size}, window {window}, retention {retention}", header))
    header = _header(4, 24) | {"enable_prefix_cache": False}
    return [*found, Setting("page 4, no prefix cache", header)]


def _header(page_size: int, pages: int) -> dict[str, Any]:
    return {"page_size": page_size, "num_slots": page_size * pages, "max_model_len": 2 * page_size * pages}
