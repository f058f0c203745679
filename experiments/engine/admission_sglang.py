"""Admission of SGLang 0.5.22: which prompts a pass takes, and the budgets that bound it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvarena.allocators.interface import AllocatorError, Gate, Pin, Release
from kvarena.experiments.engine.request import EngineRequest

if TYPE_CHECKING:
    from kvarena.experiments.engine.policy_sglang import SglangScheduler

OUTPUT_CAP = 4096  # tokens of declared output that are reckoned with, a request
Take = tuple[EngineRequest, int, bool]  # request, its new tokens, whether they complete the prompt


class Admitter:
    """One try at building a prefill batch.

    room    tokens free or evictable, less what running requests are reckoned to need and what this batch took
    current the same without the running requests
    """

    def __init__(self, scheduler: SglangScheduler, slots: int) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler.allocator
        self.page_size = scheduler.allocator.page_size
        self.slots = slots
        self.takes: list[Take] = []
        # Admitted by this try: with the pin that holds the prefix, or None for who came back from the host.
        self.fresh: dict[str, Pin | None] = {}
        ratio = scheduler.ratio.value
        # Finished requests that the decode batch still lists count too, with what they did not generate.
        self.reserved: float = sum(
            min(request.max_tokens - request.num_output, OUTPUT_CAP) * ratio for request in scheduler.running.requests
        )
        self.taken = 0
        self.input_left = scheduler.config.max_num_batched_tokens
        self.chunk_left = scheduler.chunk_tokens

    def run(self) -> None:
        """Take the prompt that is in chunks, then the queue in order until one is refused."""
        if self.scheduler.chunked is not None:
            self._take_next_chunk(self.scheduler.chunked)
        running = self.scheduler.running
        for request in self.scheduler.waiting:
            if len(self.takes) >= self.slots:
                running.full = True
            if running.full:
                break
            verdict = self._try(request)
            if verdict == "no token":
                running.full = bool(self.takes or running.requests)
            if verdict:
                break
        for _ in range(sum(request.id in self.fresh for request, _, _ in self.takes)):
            self.scheduler.waiting.popleft()

    def _available(self) -> int:
        return self.scheduler.available_pages() * self.page_size

    def _room(self) -> float:
        return self._available() - self.reserved

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def _charge(self, n: int, output: int) -> None:
        tokens = self._whole_pages(n)
        self.reserved += tokens + self.page_size + output
        self.taken += tokens + self.page_size
        self.input_left -= tokens
        if self.chunk_left is not None:
            self.chunk_left -= tokens

    def _take(self, request: EngineRequest, n: int, whole: bool) -> None:
        self.takes.append((request, n, whole))
        self._charge(n, min(request.max_tokens, OUTPUT_CAP) if whole else 0)

    def _take_next_chunk(self, request: EngineRequest) -> None:
        """SGLang 0.5.22: neither rounded to pages nor refused; its memory was tested with the whole prompt."""
        chunk, rest = self.chunk_left or 0, request.num_tokens - request.num_computed
        room = min(chunk, math.floor(self._room()))
        n = min(rest, room if room > 0 else chunk)
        self._take(request, n, n == rest)

    def _try(self, request: EngineRequest) -> str:
        """Admit one request; "" to go on with the next, else why the pass ends here."""
        if self.scheduler.on_host(request):
            return self._try_returning(request)
        request.seq.resume()
        pin = self.allocator.pin(request.seq, self._gate(request))
        if pin is None:
            return "no token"
        rest = request.num_tokens - pin.hit_tokens
        n = self._cut(rest, pin.hit_tokens)
        if n == 0:
            self.allocator.release([request.seq], Release.ABORT)
            return "other"
        self.fresh[request.id] = pin
        request.num_computed = pin.hit_tokens
        self._take(request, n, n == rest)
        return self._exhausted()

    def _try_returning(self, request: EngineRequest) -> str:
        """As `_try`, for a request whose KV comes back from the host."""
        rest = request.num_tokens - request.kept_tokens
        if self._cut(rest, request.kept_tokens) == 0:
            return "other"
        if not self.scheduler.swap_in(request, self._gate(request)):
            return "no token"
        self.fresh[request.id] = None
        rest = request.num_tokens - request.num_computed
        n = self._cut(rest, request.num_computed)
        self._take(request, n, n == rest)
        return self._exhausted()

    def _gate(self, request: EngineRequest) -> Gate:
        output = min(request.max_tokens - request.num_output, OUTPUT_CAP)
        headroom = output + self.page_size + math.floor(self.reserved)
        return Gate(page_rounded=False, strict=True, headroom=headroom)

    def _cut(self, rest: int, hit: int) -> int:
        """Tokens of the prompt that this pass computes; 0: none of it can run in what is left."""
        tokens = self._whole_pages(rest)
        if self.chunk_left is None:
            return 0 if self.takes and tokens >= self.input_left else rest
        if tokens <= self.chunk_left:
            return rest
        size = self.page_size
        n = self.chunk_left // size * size
        return max((hit + n) // size * size - hit, 0)

    def _exhausted(self) -> str:
        if self._room() <= 0 or self._available() - self.taken <= 0:
            return "no token"
        if self.input_left <= 0 or (self.chunk_left is not None and self.chunk_left <= 0):
            return "other"
        return ""

    def reserve(self) -> list[Take]:
        """Slots for the whole batch at once; the last of it goes back to the queue while there is no room.

        With token's pins that never happens (SGLang 0.5.22: it would crash). The block design counts a held prefix
        only when slots are taken, so what looked free may not be.
        """
        while self.takes and not self.scheduler.try_reserve([(request, n) for request, n, _ in self.takes]):
            self._put_back_last()
        for request, _, _ in self.takes:
            pin = self.fresh.get(request.id)
            if pin is not None:
                self.scheduler.admitted(request, pin.hit_tokens)
        return self.takes

    def _put_back_last(self) -> None:
        request, _, _ = self.takes.pop()
        if request.id not in self.fresh:
            self.scheduler.chunk_refused()
            return
        if self.fresh.pop(request.id) is None:
            self.scheduler.send_back(request)
        request.num_computed = 0
        self.scheduler.waiting.appendleft(request)
        for other, _, _ in self.takes:  # the refusal let their pins go as well
            before = self.fresh.get(other.id)
            if before is None:
                continue
            pin = self.allocator.pin(other.seq, Gate(whole_prompt=False))
            if pin is None or pin.hit_tokens != before.hit_tokens:
                raise AllocatorError(f"request {other.id}: the prefix of a refused batch changed")
