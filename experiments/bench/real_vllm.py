"""The real vLLM 0.32.0 beside ours, where it can be imported: its KVCacheManager, driven by hand.

What a scheduler calls for a request, without the scheduler: the request with its page hashes (sha256, the default),
the look-up, the slots, the release. Requests are made from lists of ints, as its front end does.

A scheduler does more for a request, so this is the least that vLLM's cache costs, and recorded figures that include
such work are slower.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from kvarena.experiments.bench.alloc_ops import DECODES, POOL_TOKENS, Op, Timed, prompts

MAX_MODEL_LEN = 131_072
_PARAMETERS = SimpleNamespace(max_tokens=1 << 20, extra_args=None, skip_reading_prefix_cache=None)


class RealVLLM:
    """Requests through vLLM's own objects. Raises ImportError when the package is not there."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        from kvarena.experiments.upstream import vllm_driver
        from kvarena.experiments.upstream.compare import find

        self.vllm = vllm_driver.load(find("vllm", None))
        self.version: str = self.vllm.version
        header = {"num_slots": num_tokens, "page_size": page_size, "max_model_len": MAX_MODEL_LEN}
        self.driver = vllm_driver.RealVLLM(self.vllm, header, watch=False)
        self.manager = self.driver.manager
        self.numbers = itertools.count()

    def request(self, token_ids: list[int]) -> Any:
        """A new request; its pages are hashed here."""
        return self.vllm.Request(
            request_id=f"r{next(self.numbers)}",
            prompt_token_ids=token_ids,
            sampling_params=_PARAMETERS,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self.driver.hasher,
        )

    def admit(self, token_ids: list[int]) -> Any:
        """A request with all its slots. ValueError: it does not fit."""
        request = self.request(token_ids)
        if self.driver.admit(request) is None:
            raise ValueError(f"the benchmark's pool is too small for {len(token_ids)} tokens")
        return request

    def serve(self, token_ids: list[int]) -> int:
        """One request through its life; returns its hit in tokens."""
        request = self.request(token_ids)
        hit = self.driver.admit(request)
        if hit is None:
            raise ValueError(f"the benchmark's pool is too small for {len(token_ids)} tokens")
        self.manager.free(request)
        return hit

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages."""
        return self.driver.room()


def importable() -> str | None:
    """None when the real package is there; else why it is not."""
    try:
        RealVLLM(64, 16)
    except (ImportError, RuntimeError, OSError) as error:  # a missing or mismatched dependency of it
        return f"vllm cannot be imported ({error}); its recorded figures stand in"
    return None


def real_ops() -> list[Op]:
    """The operations of `alloc_ops.block_ops` on the real package, under the same names; one token array, as lists."""
    design, size = "block", 16
    return [
        Op("look up 4,096 cached tokens", design, size, lambda: _lookup(4096, hashed=True)),
        Op("look up 32,768 cached tokens", design, size, lambda: _lookup(32_768, hashed=True)),
        Op("hash and look up 4,096 cached tokens", design, size, lambda: _lookup(4096, hashed=False)),
        Op("hash and look up 32,768 cached tokens", design, size, lambda: _lookup(32_768, hashed=False)),
        Op("admit 100 new pages", design, size, _admit),
        Op("free a request of 100 pages", design, size, _release),
        Op("decode step of 256", design, size, _decode_step),
    ]


def _fresh(length: int) -> Any:
    source = prompts(length)
    return lambda: source().token_ids.tolist()


def _lookup(length: int, *, hashed: bool) -> Timed:
    real, tokens = RealVLLM(POOL_TOKENS, 16), _fresh(length)()
    real.serve([*tokens, 0])  # one more than is looked up, so that all of it can hit
    if hashed:
        return Timed(lambda: real.request([*tokens, 0]), real.manager.get_computed_blocks)
    return Timed(lambda: [*tokens, 0], lambda ids: real.manager.get_computed_blocks(real.request(ids)))


def _admit() -> Timed:
    real, fresh, live = RealVLLM(POOL_TOKENS, 16), _fresh(1600), list[Any]()

    def before() -> list[int]:
        while live:
            real.manager.free(live.pop())
        tokens: list[int] = fresh()
        return tokens

    return Timed(before, lambda tokens: live.append(real.admit(tokens)))


def _release() -> Timed:
    real, fresh = RealVLLM(POOL_TOKENS, 16), _fresh(1600)
    return Timed(lambda: real.admit(fresh()), real.manager.free)


def _decode_step() -> Timed:
    """The new tokens of 256 requests noted, their pages hashed where one filled, and a slot for each."""
    real = RealVLLM(POOL_TOKENS, 16)
    requests = [real.admit([number] * (100 + number)) for number in range(DECODES)]

    def work(_: None) -> None:
        for request in requests:
            request.append_output_token_ids(7)
            real.manager.allocate_slots(request, 1)

    def before() -> None:
        for request in requests:
            request.num_computed_tokens = request.num_tokens

    return Timed(before, work)
