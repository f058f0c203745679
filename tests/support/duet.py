"""An allocator and its slow model, driven by the same verbs: every answer and all state compared after each.

A `Duet` decides nothing by itself: callers draw the numbers, from Hypothesis or from `random`. Each act takes what it
can of its numbers (modulo what is live) and does nothing where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvarena.allocators.block import BlockAllocator
from kvarena.allocators.config import Design
from kvarena.allocators.host import HostTier
from kvarena.allocators.interface import PADDING_PAGE, Gate, Release, Sequence
from kvarena.allocators.token import TokenAllocator
from support.slow_block import SlowBlock
from support.slow_facts import Facts, SlowGate
from support.slow_host import SlowHost
from support.slow_token import SlowToken

MAX_LIVE = 6
NAMESPACES = (None, "tenant", 1, True, ("lora", "tenant"))


@dataclass
class Pair:
    """One request on both sides. `pending` tokens are reserved and not committed."""

    seq: Sequence
    facts: Facts
    pinned: bool = True
    pending: int = 0


class Difference(AssertionError):
    """The allocator and the model parted."""


def same(what: str, ours: Any, model: Any) -> None:
    if ours is not None and isinstance(model, list):
        ours = list(ours)
    if ours != model:
        raise Difference(f"{what}: the allocator has {ours}, the model {model}")


@dataclass
class Duet:
    """Both sides and the requests between them. `history` are prompts to share prefixes with."""

    design: Design
    num_pages: int
    host_pages: int = 6
    num_rows: int = 4
    pairs: dict[str, Pair] = field(default_factory=dict)
    away: list[Pair] = field(default_factory=list)
    history: list[Facts] = field(default_factory=list)
    count: int = 0
    acts: int = 0

    def __post_init__(self) -> None:
        self.ours: Any
        self.model: Any
        if self.design.kind == "block":
            self.ours = BlockAllocator(self.num_pages, self.design)
            self.model = slow_block(self.num_pages, self.design)
        else:
            self.ours = TokenAllocator(self.num_pages, self.design, num_rows=self.num_rows)
            self.model = slow_token(self.num_pages, self.design, self.num_rows)
        self.host, self.slow_host = (
            HostTier(self.ours, self.host_pages),
            SlowHost(self.host_pages, self.design.page_size),
        )

    # --- choosing ---

    def _live(self, choice: int, fits: Callable[[Pair], bool] = lambda pair: True) -> Pair | None:
        found = [pair for pair in self.pairs.values() if fits(pair)]
        return found[choice % len(found)] if found else None

    def _new(self, tokens: list[int], shared: int, item: int, namespace: int) -> Pair:
        """A prompt that begins like an earlier one for `shared` tokens, then goes on with `tokens`."""
        self.count += 1
        name, items, space = f"r{self.count}", (), NAMESPACES[namespace % len(NAMESPACES)]
        if self.history and shared:
            known = self.history[shared % len(self.history)]
            tokens = known.tokens[: shared % (len(known.tokens) + 1)] + tokens
            items, space = known.items, known.namespace
        if item and not items:
            items = ((item % len(tokens), 1 + item % 3, f"image {item % 2}"),)
        facts = Facts(name, list(tokens), space, items)
        self.history = [*self.history[-7:], facts]
        return Pair(Sequence(name, tokens, namespace=space, extra_keys=items), Facts(name, list(tokens), space, items))

    # --- acts ---

    def arrive(self, tokens: list[int], shared: int, item: int, namespace: int, gate: SlowGate) -> None:
        if len(self.pairs) < MAX_LIVE:
            self._pin(self._new(tokens, shared, item, namespace), gate)

    def resume(self, choice: int, gate: SlowGate) -> None:
        if self.away and len(self.pairs) < MAX_LIVE:
            pair = self.away.pop(choice % len(self.away))
            if pair.seq in self.host:
                same("dropped", self.host.drop(pair.seq), self.slow_host.drop(pair.facts.name))
            pair.seq.resume()
            pair.facts.prefill, pair.facts.computed = len(pair.facts.tokens), 0
            self._pin(pair, gate)

    def _pin(self, pair: Pair, gate: SlowGate) -> bool:
        asked = Gate(gate.whole_prompt, gate.page_rounded, gate.headroom, gate.strict, gate.in_flight)
        pin, found = self.ours.pin(pair.seq, asked), self.model.pin(pair.facts, gate)
        same("pin", None if pin is None else pin.page_ids, found)
        if found is None:
            return False
        same("hit", pin.hit_tokens, len(found) * self.design.page_size)
        pair.pinned, pair.pending = True, 0
        self.pairs[pair.facts.name] = pair
        return True

    def match(self, tokens: list[int], shared: int, item: int, namespace: int) -> None:
        pair = self._new(tokens, shared, item, namespace)
        same("match", self.ours.match(pair.seq).hit_tokens, self.model.match(pair.facts))

    def reserve(self, picks: list[tuple[int, int]], appended: bool) -> None:
        """Slots for several requests in one call: chunks of prompts, next tokens, drafts. Each request once."""
        wants: dict[str, int] = {}
        for choice, n in picks:
            pair = self._live(choice, lambda pair: not pair.pending)
            if pair is not None and pair.facts.name not in wants and (n := self._want(pair, n, appended)):
                wants[pair.facts.name] = n
        wants = {name: n for name, n in wants.items() if self._prepared(self.pairs[name], n)}
        if wants:
            self._reserve(wants)

    def _want(self, pair: Pair, n: int, appended: bool) -> int:
        facts = pair.facts
        left = facts.prefill - facts.computed
        if left > 0:
            return min(n, left)
        if appended and len(facts.tokens) == facts.computed:
            self._append(pair, n % 3)
        return n if not appended else 1

    def _append(self, pair: Pair, token: int) -> None:
        pair.seq.append(token)
        pair.facts.tokens.append(token)

    def _prepared(self, pair: Pair, n: int) -> bool:
        """A page of its own before it is written; False: no room for the copy."""
        if pair.pinned:
            return True
        start = pair.facts.computed
        copies = self.ours.prepare_write(pair.seq, start, start + n)
        expected = [] if self.design.kind == "token" else self.model.prepare_write(pair.facts.name, start, start + n)
        same("copies", None if copies is None else [(c.src, c.dst) for c in copies], expected)
        return copies is not None

    def _reserve(self, wants: dict[str, int]) -> bool:
        answers = self.ours.reserve([(self.pairs[name].seq, n) for name, n in wants.items()])
        expected = self._model_reserve(list(wants.items()))
        same("refused", answers is None, expected is None)
        if answers is None:
            for name in list(wants):
                if self.pairs[name].pinned:
                    del self.pairs[name]
            return False
        for (name, n), answer, right in zip(wants.items(), answers, expected, strict=True):
            same(f"pages of {name}", answer.page_ids, right["taken"])
            for what in ("evicted", "freed", "duplicates"):
                same(f"{what} for {name}", getattr(answer, what), right[what])
            if "moves" in right:
                same(f"moves for {name}", [(move.src, move.dst) for move in answer.moves], right["moves"])
            self.pairs[name].pinned, self.pairs[name].pending = False, n
        return True

    def _model_reserve(self, wants: list[tuple[str, int]]) -> Any:
        if self.design.kind == "token":
            return self.model.reserve(wants)
        others = [row.held for name, row in self.ours._pins.items()]
        return self.model.reserve(wants, all(others))

    def commit(self, choice: int, accepted: int) -> None:
        """What was reserved is written, all of it or (drafts) a part; tokens that came meanwhile are known now."""
        pair = self._live(choice, lambda pair: pair.pending > 0)
        if pair is None:
            return
        if not self._prepared(pair, pair.pending):  # it was forked meanwhile, and there is no room for the copy
            self._release([pair], Release.ABORT)
            return
        facts = pair.facts
        n = pair.pending if facts.computed < facts.prefill else 1 + accepted % pair.pending
        while len(facts.tokens) < facts.computed + n:
            self._append(pair, accepted % 3)
        end = facts.computed + n
        done = self.ours.commit([(pair.seq, end)])[0]
        self._same_commit(pair, done, end)
        pair.pending = 0

    def _same_commit(self, pair: Pair, done: Any, end: int) -> None:
        if self.design.kind == "token":
            same("freed by the commit", done.freed, self.model.commit([(pair.facts.name, end)])[0])
        else:
            same("duplicates of the commit", done.duplicates, self.model.commit(pair.facts.name, end))

    def run_ahead(self, choice: int, token: int) -> None:
        """A scheduler that counts a step before its result is in: a slot, the count, then the token and its commit."""
        pair = self._live(choice, lambda p: not p.pinned and not p.pending and p.facts.computed >= p.facts.prefill)
        if pair is None or len(pair.facts.tokens) > pair.facts.computed or not self._prepared(pair, 1):
            return
        if self._reserve({pair.facts.name: 1}):
            pair.pending = 0
            pair.seq.num_computed_tokens += 1
            pair.facts.computed += 1
            self._append(pair, token)
            self._same_commit(pair, self.ours.commit([(pair.seq, pair.facts.computed)])[0], pair.facts.computed)

    def two_in_flight(self, choice: int, token: int) -> None:
        """Two steps are counted before the first one's token is in: its commit ends a token before what is known."""
        pair = self._live(choice, lambda p: not p.pinned and not p.pending and p.facts.computed >= p.facts.prefill)
        if pair is None or len(pair.facts.tokens) > pair.facts.computed:
            return
        self._append(pair, token)
        for _ in range(2):
            if not self._prepared(pair, 1) or not self._reserve({pair.facts.name: 1}):
                break
            pair.pending = 0
            pair.seq.num_computed_tokens += 1
            pair.facts.computed += 1
        first = len(pair.facts.tokens)
        for end in range(first, pair.facts.computed + 1):
            self._append(pair, token)
            self._same_commit(pair, self.ours.commit([(pair.seq, end)])[0], end)

    def decode_batch(self, steps: int) -> None:
        """All decoding requests through a decode batch for some steps, against plain reserves of the model."""
        members = [p for p in self.pairs.values() if not p.pinned and not p.pending]
        members = [p for p in members if p.facts.computed == len(p.facts.tokens) >= p.facts.prefill]
        members = [p for p in members if self._prepared(p, steps)]
        if not members:
            return
        batch = self.ours.decode_batch([pair.seq for pair in members])
        for step in range(steps):
            for pair in members:
                self._append(pair, step % 3)
            answer = batch.reserve()
            expected = self._model_reserve([(pair.facts.name, 1) for pair in members])
            same("batch refused", answer is None, expected is None)
            if expected is None:
                return
            same("pages of the batch", answer.page_ids, [page for right in expected for page in right["taken"]])
            batch.commit()
            for pair in members:
                self._model_commit_to(pair.facts, pair.facts.computed + 1)

    def release(self, choices: list[int], reason: Release) -> None:
        """Some requests go in one call, whatever they have pending."""
        leaving: list[Pair] = []
        for choice in choices:
            pair = self._live(choice, lambda pair: pair not in leaving)
            if pair is not None:
                leaving.append(pair)
        self._release(leaving, reason)
        if reason is Release.PREEMPT:
            self.away = [*self.away, *leaving][-4:]

    def _release(self, leaving: list[Pair], reason: Release) -> None:
        released = self.ours.release([pair.seq for pair in leaving], reason)
        for pair in leaving:
            del self.pairs[pair.facts.name]
        expected = self._model_release([pair.facts.name for pair in leaving], reason)
        for what, right in expected.items():
            same(f"{what} by the release", getattr(released, what), right)

    def _model_release(self, names: list[str], reason: Release) -> dict[str, list[int]]:
        return self.model.release(names, reason is (Release.FINISH if self.design.kind == "token" else Release.ABORT))

    def evict(self, tokens: int) -> None:
        same("evicted on demand", self.ours.evict(tokens), self.model.evict(tokens))

    def reset(self) -> None:
        same("reset", self.ours.reset(), self.model.reset())

    def fork(self, choice: int, tail: list[int], whole_prompt: bool, fewer: int = 0) -> None:
        """A child of some live request, with tokens of its own behind what it shares: all, or `fewer` tokens less."""
        pair = self._live(choice, lambda pair: not pair.pinned and pair.facts.computed > 0)
        if pair is None or len(self.pairs) >= MAX_LIVE:
            return
        self.count += 1
        facts = pair.facts
        written = min(facts.computed, len(facts.tokens))
        complete = PADDING_PAGE not in self.ours.page_ids(pair.seq)  # of no page that a window left behind
        num_tokens = max(written - fewer, 1) if fewer and complete else None
        tokens = facts.tokens[: num_tokens or written] + tail
        prompt = len(tokens) if whole_prompt else min(facts.prompt, len(tokens))
        child = Facts(f"r{self.count}", tokens, facts.namespace, facts.items, prompt=prompt)
        seq = Sequence(child.name, tokens, num_prompt_tokens=prompt, namespace=facts.namespace, extra_keys=facts.items)
        made = self.ours.fork(pair.seq, seq, num_tokens)
        expected = self.model.fork(facts.name, child, num_tokens)
        same("fork refused", made is None, expected is None)
        if made is not None:
            same("copies of the fork", [(copy.src, copy.dst) for copy in made.copies], expected[0])
            same("evicted by the fork", made.evicted, expected[1])
            self.pairs[child.name] = Pair(seq, child, pinned=False)

    # --- host tier ---

    def swap_out(self, choice: int) -> None:
        pair = self._live(choice, lambda pair: not pair.pinned and not pair.pending)
        if pair is None:
            return
        expected = self.slow_host.swap_out(pair.facts, self._row(pair.facts))
        moved = self.host.swap_out(pair.seq)
        same("swap out refused", moved is None, expected is None)
        if moved is None:
            return
        same("moves out", [(move.src, move.dst) for move in moved.moves], expected[0])
        same("dropped", moved.dropped, expected[1])
        name = pair.facts.name
        self._model_release([name], Release.PREEMPT)
        del self.pairs[name]
        self.away.append(pair)

    def swap_in(self, choice: int) -> None:
        waiting = [pair for pair in self.away if pair.seq in self.host]
        if not waiting or len(self.pairs) >= MAX_LIVE:
            return
        pair = waiting[choice % len(waiting)]
        facts = pair.facts
        moves = self.host.swap_in(pair.seq)
        facts.prefill, facts.computed = len(facts.tokens), 0
        saved = self.slow_host.tokens(facts.name)
        found = self.model.pin(facts, SlowGate())
        granted = found is not None and self._model_reserve([(facts.name, max(saved - facts.computed, 0))]) is not None
        same("swap in refused", moves is None, not granted)
        if moves is None:
            return
        self._model_commit_to(facts, max(saved, facts.computed))
        right = self.slow_host.swap_in(facts.name, self._row(facts), len(found or []))
        same("moves in", [(move.src, move.dst) for move in moves], right)
        self.away.remove(pair)
        pair.pinned, pair.pending = False, 0
        self.pairs[facts.name] = pair

    def _row(self, facts: Facts) -> list[int]:
        """The model's pages of a live request."""
        if self.design.kind == "token":
            return list(self.model.holds[facts.name].row)
        return list(self.model.rows[facts.name].pages)

    def _model_commit_to(self, facts: Facts, end: int) -> None:
        if self.design.kind == "token":
            self.model.commit([(facts.name, end)])
        else:
            self.model.commit(facts.name, end)

    # --- state ---

    def verify(self) -> None:
        """All state alike, every derived field recomputed."""
        self.acts += 1
        self.ours.check()
        self.host.check()
        capacity, counts = self.ours.capacity(), self.model.counts()
        for name, right in counts.items():
            same(name, getattr(capacity, name), right)
        same("room", list(self.ours.room()), [counts["free"], counts["evictable"]])
        self._same_order()
        for pair in self.pairs.values():
            self._verify_pair(pair)

    def _same_order(self) -> None:
        if self.design.kind == "block":
            same("queue", list(self.ours._store.queue()), self.model.queue)
        else:
            same("free pages", list(self.ours._free), self.model.free + self.model.waiting)

    def _verify_pair(self, pair: Pair) -> None:
        name = pair.facts.name
        same(f"computed of {name}", pair.seq.num_computed_tokens, pair.facts.computed)
        same(f"prefill of {name}", pair.seq.num_prefill_tokens, pair.facts.prefill)
        self._same_row(pair)

    def _same_row(self, pair: Pair) -> None:
        name = pair.facts.name
        if self.design.kind == "token":
            same(f"row of {name}", self.ours.page_ids(pair.seq), self.model.holds[name].row)
            same(f"index of {name}", self.ours.row_index(pair.seq), self.model.holds[name].index)
        elif not pair.pinned:
            same(f"row of {name}", self.ours.page_ids(pair.seq), self.model.rows[name].pages)

    def drain(self) -> None:
        """Everything ends: no page may stay in use, and a reset leaves the whole pool free."""
        self._release(list(self.pairs.values()), Release.FINISH)
        self.verify()
        same("in use at the end", self.ours.capacity().in_use, 0)
        self.reset()
        self.verify()
        same("free at the end", self.ours.capacity().free, self.num_pages)


def slow_block(num_pages: int, design: Design) -> SlowBlock:
    return SlowBlock(
        num_pages,
        design.page_size,
        design.prefix_cache,
        design.last_token_rule,
        design.sliding_window,
        design.retention_interval,
    )


def slow_token(num_pages: int, design: Design, num_rows: int) -> SlowToken:
    return SlowToken(
        num_pages,
        design.page_size,
        design.eviction_order,
        cache=design.prefix_cache,
        last_token_rule=design.last_token_rule,
        page_unit=design.eviction_unit == "page",
        touches_suffix=design.split_touches_suffix,
        slack=design.demand_slack,
        need_sort=design.need_sort,
        num_rows=num_rows,
    )
