"""The real vLLM 0.32.0 beside ours, where it can be imported: its KVCacheManager, driven by hand.

Two drives, each without the scheduler itself:

    serve        as the engine calls it, from an int32 array to page ids: the tokens as the list that a request takes,
                 the request with its page hashes (sha256, the default), a new step, look-up, slots, the ids of the
                 pages for the worker, what a scheduler drains behind each step, release
    serve_lean   the least that decides alike: the list made beforehand, no page ids, nothing drained
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from kvarena.experiments.bench.alloc_load import Prompt
from kvarena.experiments.bench.alloc_ops import DECODES, POOL_TOKENS, Op, Timed, prompts

MAX_MODEL_LEN = 131_072
LOOKUPS = (4096, 32_768)
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

    def serve(self, prompt: Prompt) -> int:
        """One request through its life, as the engine calls; returns its hit in tokens."""
        request = self.request(prompt.tolist())
        self.manager.new_step_starts()
        hit = self.driver.admit(request)
        if hit is None:
            raise ValueError(f"the benchmark's pool is too small for {len(prompt)} tokens")
        self.manager.get_block_ids(request.request_id)
        self.drain()
        self.manager.free(request)
        return hit

    def drain(self) -> None:
        """What a scheduler takes out of the manager at the end of a step."""
        self.manager.take_boundary_state_offloads()
        self.manager.take_kv_cache_block_copies()
        self.manager.take_new_block_ids()
        self.manager.take_events()

    @staticmethod
    def lean_input(prompt: Prompt) -> list[int]:
        return prompt.tolist()

    def serve_lean(self, token_ids: list[int]) -> int:
        """One request through its life, the least that decides alike; returns its hit in tokens."""
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


def version() -> str | None:
    """Of the real package; None where it cannot be imported."""
    return RealVLLM(64, 16).version if importable() is None else None


def real_ops() -> list[Op]:
    """The operations of `alloc_ops.block_ops` on the real package, under the same names, as the engine calls them."""
    return [
        *(_op(f"look up {length:,} cached tokens", _lookup, length) for length in LOOKUPS),
        *(_op(f"hash and look up {length:,} cached tokens", _hash_and_look_up, length) for length in LOOKUPS),
        _op("admit 100 new pages", _admit, 1600),
        _op("free a request of 100 pages", _release, 1600),
        _op("decode step of 256", _decode_step, True),
    ]


def lean_ops() -> list[Op]:
    """Those of which the least that decides alike is less than what the engine calls."""
    return [
        *(_op(f"look up {length:,} cached tokens", _lookup_lean, length) for length in LOOKUPS),
        _op("admit 100 new pages", _admit_lean, 1600),
        _op("decode step of 256", _decode_step, False),
    ]


def _op(name: str, make: Callable[..., Timed], *arguments: Any) -> Op:
    return Op(name, "block", 16, lambda: make(*arguments))


def _cached(length: int) -> tuple[RealVLLM, Prompt]:
    """A prompt that is cached; one token more than is looked up, so that all of that can hit."""
    real, tokens = RealVLLM(POOL_TOKENS, 16), np.append(prompts(length)(), np.int32(0))
    real.serve(tokens)
    return real, tokens


def _lookup(length: int) -> Timed:
    real, tokens = _cached(length)
    look_up = real.manager.get_computed_blocks
    return Timed(lambda: real.request(tokens.tolist()), lambda request: look_up(request)[0].get_block_ids())


def _lookup_lean(length: int) -> Timed:
    real, tokens = _cached(length)
    return Timed(lambda: real.request(tokens.tolist()), real.manager.get_computed_blocks)


def _hash_and_look_up(length: int) -> Timed:
    real, tokens = _cached(length)
    look_up = real.manager.get_computed_blocks
    return Timed(lambda: tokens, lambda ids: look_up(real.request(ids.tolist()))[0].get_block_ids())


def _admit(length: int) -> Timed:
    real, fresh, live = RealVLLM(POOL_TOKENS, 16), prompts(length), list[Any]()

    def before() -> Prompt:
        while live:
            real.manager.free(live.pop())
        return fresh()

    def work(tokens: Prompt) -> None:
        live.append(real.admit(tokens.tolist()))
        real.manager.get_block_ids(live[0].request_id)

    return Timed(before, work)


def _admit_lean(length: int) -> Timed:
    real, fresh, live = RealVLLM(POOL_TOKENS, 16), prompts(length), list[Any]()

    def before() -> list[int]:
        while live:
            real.manager.free(live.pop())
        return real.lean_input(fresh())

    return Timed(before, lambda tokens: live.append(real.admit(tokens)))


def _release(length: int) -> Timed:
    real, fresh = RealVLLM(POOL_TOKENS, 16), prompts(length)
    return Timed(lambda: real.admit(fresh().tolist()), real.manager.free)


def _decode_step(ids_too: bool) -> Timed:
    """The new tokens of 256 requests noted, their pages hashed where one filled, and a slot for each.

    The engine also asks every answer for its new page ids, and drains the manager behind the step.
    """
    real = RealVLLM(POOL_TOKENS, 16)
    requests = [real.admit([number] * (100 + number)) for number in range(DECODES)]

    def work(_: None) -> None:
        for request in requests:
            request.append_output_token_ids(7)
            new = real.manager.allocate_slots(request, 1)
            if ids_too:
                new.get_block_ids(allow_none=True)
        if ids_too:
            real.drain()

    def before() -> None:
        real.manager.new_step_starts()
        for request in requests:
            request.num_computed_tokens = request.num_tokens

    return Timed(before, work)
