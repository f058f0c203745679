"""Random requests against an allocator, beside a shadow pool; every law is verified after every operation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

from kvarena.allocators.interface import Commit, KVAllocator, Release, Reservation, Sequence, SupportsFork
from kvarena.experiments import random_forks
from kvarena.experiments.shadow import Actor, Contents, ShadowPool, State, Violation

MAX_LIVE = 6
VOCABULARY = 3  # few tokens, so that prompts share prefixes and diverge inside pages
MAX_DRAFT = 4


class RandomOps:
    """Drives one allocator by one seed; `run(n)` takes n operations and verifies after each.

    adapters   objects with the adapters' interface, kept up to date and compared
    decisions  every answer so far, to compare two runs
    """

    def __init__(self, allocator: KVAllocator, seed: int, adapters: Iterable[Any] = ()) -> None:
        self.allocator = allocator
        self.random = random.Random(seed)
        self.adapters = list(adapters)
        self.live: dict[str, Actor] = {}
        self.preempted: list[Actor] = []
        self.decisions: list[Any] = []
        self.last_op = "start"
        self.shadow = ShadowPool(allocator, self.live)
        self._contents = Contents()
        self._prompts: list[tuple[list[int], Any, list[tuple[int, int, str]]]] = []
        self._count = 0
        self._ops: dict[str, tuple[int, Callable[[], None]]] = {
            "arrive": (6, self._arrive),
            "burst": (2, self._burst),
            "resume": (2, self._resume),
            "decode": (8, self._decode),
            "decode batch": (3, self._decode_batch),
            "draft": (2, self._draft),
            "finish": (3, self._finish),
            "preempt": (2, self._preempt),
            "match": (1, self._match),
            "evict": (1, self._evict),
            "reset": (1, self._reset),
        }
        if isinstance(allocator, SupportsFork):
            self._ops["fork"] = (3, partial(random_forks.fork, self, MAX_LIVE, VOCABULARY))

    def run(self, ops: int) -> None:
        """Take `ops` random operations, then end all requests. Raises Violation."""
        names = list(self._ops)
        weights = [self._ops[name][0] for name in names]
        for number in range(ops):
            name = self.random.choices(names, weights)[0]
            self.last_op = f"op {number} ({name})"
            self._ops[name][1]()
            self.verify()
        self.last_op = "end of all requests"
        self.drain()

    def verify(self) -> None:
        """All laws, the allocator's own `check`, and the adapters' buffers against a rebuild."""
        self.shadow.verify()
        for adapter in self.adapters:
            adapter.check([actor.seq for actor in self.live.values()])

    def drain(self) -> None:
        """Finish everything: no page may stay in use, and a reset must leave the whole pool free."""
        while self.live:
            self._finish()
            self.verify()
        capacity = self.allocator.capacity()
        if capacity.in_use:
            raise Violation(f"leak: {capacity.in_use} pages in use although no sequence is live")
        if not self.allocator.reset():
            raise Violation("reset: refused although no sequence is live")
        if self.allocator.capacity().free != self.allocator.num_pages:
            raise Violation(f"reset: {self.allocator.capacity().free} of {self.allocator.num_pages} pages are free")

    # --- operations --------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if len(self.live) < MAX_LIVE:
            self._admit(self._new_actor(), chunked=self.random.random() < 0.3)

    def _burst(self) -> None:
        """Several admissions in one step: later ones may share pages whose KV the same step writes."""
        admitted = []
        for _ in range(min(3, MAX_LIVE - len(self.live))):
            actor = self._new_actor()
            if self._pin_and_reserve(actor, None):
                admitted.append(actor)
        self._compute([(a, a.seq.num_prefill_tokens - a.seq.num_computed_tokens) for a in admitted])

    def _resume(self) -> None:
        if self.preempted and len(self.live) < MAX_LIVE:
            actor = self.preempted.pop(0)
            actor.seq.resume()
            self._admit(actor, chunked=False)

    def _admit(self, actor: Actor, chunked: bool) -> None:
        chunk = self.random.randint(1, 2 * self.allocator.page_size) if chunked else None
        if not self._pin_and_reserve(actor, chunk):
            return
        seq = actor.seq
        step = chunk or seq.num_prefill_tokens
        self._compute([(actor, min(step, seq.num_prefill_tokens - seq.num_computed_tokens))])
        self._prefill(actor, step)

    def _prefill(self, actor: Actor, step: int) -> None:
        """The rest of what an admission has to compute, in chunks; an abort where one is refused."""
        seq = actor.seq
        while seq.num_computed_tokens < seq.num_prefill_tokens:
            n = min(step, seq.num_prefill_tokens - seq.num_computed_tokens)
            if not self._reserve([(actor, n)]):
                self._release(actor, Release.ABORT)
                return
            self._compute([(actor, n)])

    def _pin_and_reserve(self, actor: Actor, chunk: int | None) -> bool:
        seq, before = actor.seq, self.shadow.state()
        pin = self.allocator.pin(seq)
        self.decisions.append(None if pin is None else (pin.hit_tokens, tuple(pin.page_ids)))
        if pin is None:
            self.shadow.expect_unchanged(before, "refused pin")
            return False
        if not 0 <= pin.hit_tokens < seq.num_prefill_tokens:
            raise Violation(
                f"hit: request {seq.request_id} hits {pin.hit_tokens} tokens, expected 0..{seq.num_prefill_tokens - 1} "
                "(the last token is never hit)"
            )
        if seq.num_computed_tokens != pin.hit_tokens:
            raise Violation(f"hit: num_computed_tokens is {seq.num_computed_tokens}, the hit {pin.hit_tokens}")
        if len(pin.page_ids) * self.allocator.page_size < pin.hit_tokens:
            raise Violation(f"hit: {len(pin.page_ids)} pages are held for {pin.hit_tokens} tokens")
        self.shadow.expect_same_rows(before, "pin")
        rest = seq.num_prefill_tokens - pin.hit_tokens
        self.live[seq.request_id] = actor
        if not self._reserve([(actor, min(chunk or rest, rest))], before):
            del self.live[seq.request_id]
            return False
        return True

    def _reserve(self, wants: list[tuple[Actor, int]], before: State | None = None) -> bool:
        """Reserve in one call. `before` is the state before a pin that a refusal must drop."""
        if before is None and not random_forks.prepare(self, wants):
            return False
        state = before or self.shadow.state()
        results = self.allocator.reserve([(actor.seq, n) for actor, n in wants])
        self.decisions.append(None if results is None else [tuple(result.page_ids) for result in results])
        if results is None:
            self.shadow.expect_nothing_taken(state, "refused reserve")
            self._refresh_adapters()
            return False
        if [result.seq for result in results] != [actor.seq for actor, _ in wants]:
            raise Violation("reserve: expected one reservation for each want, in order")
        for (actor, n), result in zip(wants, results, strict=True):
            self._expect_covered(actor, n)
            self._apply(result)
        return True

    def _refresh_adapters(self) -> None:
        """A refused reserve may have let window pages go all the same, with no reservation to tell of it."""
        if self.shadow.window is None:
            return
        for adapter in self.adapters:
            for actor in self.live.values():
                if actor.seq in adapter:
                    adapter.refresh(actor.seq)

    def _expect_covered(self, actor: Actor, n: int) -> None:
        seq, size = actor.seq, self.allocator.page_size
        pages, end = len(self.allocator.page_ids(seq)), seq.num_computed_tokens + n
        if pages * size < end:
            raise Violation(f"reserve: request {seq.request_id} has {pages} pages of {size} for {end} tokens")

    def _apply(self, result: Reservation | Commit, tell: bool = True) -> None:
        """Carry out moves, forget what was freed or evicted, tell the adapters (unless they hear it otherwise)."""
        self.shadow.forget(result.evicted)  # first: an evicted page may be the target of a move
        if isinstance(result, Reservation):
            self.shadow.move(result.moves)
        # A reservation lists pages that left the window under `freed`, also those that still serve hits.
        if self.shadow.window is None or isinstance(result, Commit):
            self.shadow.forget(result.freed)
        for adapter in self.adapters if tell else ():
            adapter.update(result)

    def _compute(self, work: list[tuple[Actor, int]], keep: int | None = None) -> None:
        """Write the KV of n more tokens of each and commit (`keep` of them: rejected drafts)."""
        if not work:
            return
        self._write(work)
        done = [(a.seq, a.seq.num_computed_tokens + (n if keep is None else min(keep, n))) for a, n in work]
        commits = self.allocator.commit(done)
        if [(commit.seq, commit.seq.num_computed_tokens) for commit in commits] != done:
            raise Violation(f"commit: expected num_computed_tokens {[n for _, n in done]}, found {commits}")
        for commit in commits:
            self._apply(commit)

    def _decode(self) -> None:
        """One token for some sequences in one call; refused, the last of them is preempted and the rest retried."""
        members = self._next_tokens()
        while members and not self._reserve([(actor, 1) for actor in members]):
            self._release(members.pop(), Release.PREEMPT)
        self._compute([(actor, 1) for actor in members])

    def _decode_batch(self) -> None:
        """The same for two steps through a decode batch, which a refusal ends."""
        members = self._next_tokens()
        if not random_forks.prepare(self, [(actor, 1) for actor in members]):
            for actor in members:
                self._forget_last(actor)
            return
        batch = self.allocator.decode_batch([actor.seq for actor in members])
        for _ in range(2 if members else 0):
            state, step = self.shadow.state(), batch.reserve()
            self.decisions.append(None if step is None else (list(step.members), list(step.page_ids)))
            if step is None:
                self.shadow.expect_nothing_taken(state, "refused decode batch")
                self._refresh_adapters()
                for actor in members:
                    self._forget_last(actor)
                self._release(members[-1], Release.PREEMPT)
                return
            for actor, result in zip(members, step.reservations(), strict=True):
                self._expect_covered(actor, 1)
                self._apply(result, tell=False)
            for adapter in self.adapters:
                adapter.update_step(step)
            self._write([(actor, 1) for actor in members])
            batch.commit()
            self._next_tokens(members)
        for actor in members:
            self._forget_last(actor)

    def _write(self, work: list[tuple[Actor, int]]) -> None:
        """The KV of n more tokens of each goes to its slots, which the adapters must name alike."""
        slots = [self.shadow.slots_of(actor, n) for actor, n in work]
        for adapter in self.adapters:
            batch = adapter.batch([actor.seq for actor, _ in work], [n for _, n in work])
            if batch.slot_mapping.tolist() != list(chain.from_iterable(slots)):
                raise Violation(f"adapter: slot_mapping {batch.slot_mapping.tolist()}, owned slots {slots}")
        for (actor, _), own in zip(work, slots, strict=True):
            self.shadow.write(actor, own)

    def _next_tokens(self, actors: list[Actor] | None = None) -> list[Actor]:
        """One more known token for some live sequences, or for these; returns them."""
        chosen = [actor for actor in self.live.values() if self.random.random() < 0.7] if actors is None else actors
        for actor in chosen:
            self._append(actor, self.random.randrange(VOCABULARY))
        return chosen

    def _forget_last(self, actor: Actor) -> None:
        actor.seq.pop()
        actor.content.pop()

    def _draft(self) -> None:
        """Slots for draft tokens, some of which are rejected: fewer are committed, the rest forgotten."""
        if not self.live:
            return
        actor = self.random.choice(list(self.live.values()))
        n = self.random.randint(2, MAX_DRAFT)
        if not self._reserve([(actor, n)]):
            return
        accepted = self.random.randint(1, n)
        for _ in range(n):
            self._append(actor, self.random.randrange(VOCABULARY))
        content = actor.content[:]
        for _ in range(n - accepted):
            actor.seq.pop()
        self._compute([(actor, n)], keep=accepted)
        actor.content = content[: actor.seq.num_tokens]

    def _finish(self) -> None:
        if self.live:
            self._release(self.random.choice(list(self.live.values())), Release.FINISH)

    def _preempt(self) -> None:
        if self.live:
            self._release(list(self.live.values())[-1], Release.PREEMPT)

    def _release(self, actor: Actor, reason: Release) -> None:
        before = self.shadow.state()
        del self.live[actor.seq.request_id]
        released = self.allocator.release([actor.seq], reason)
        self.decisions.append(tuple(released.freed))
        if actor.seq.num_computed_tokens:
            raise Violation(f"release: num_computed_tokens is {actor.seq.num_computed_tokens}, expected 0")
        self.shadow.expect_released(before, actor.seq.request_id, released)
        self.shadow.forget([*released.freed, *released.evicted])
        for adapter in self.adapters:
            adapter.remove(actor.seq)
        if reason is Release.PREEMPT:
            self.preempted.append(actor)

    def _match(self) -> None:
        before = self.shadow.state()
        actor = self._new_actor()
        match = self.allocator.match(actor.seq)
        if not 0 <= match.hit_tokens <= actor.seq.num_tokens:
            raise Violation(f"match: {match.hit_tokens} of {actor.seq.num_tokens} tokens")
        self.shadow.expect_unchanged(before, "match")

    def _evict(self) -> None:
        before = self.shadow.state()
        pages = list(self.allocator.evict(self.random.randint(1, 3 * self.allocator.page_size)))
        self.decisions.append(pages)
        self.shadow.forget(pages)
        self.shadow.expect_same_rows(before, "evict")
        grown = self.allocator.capacity().free - before.capacity.free
        if grown != len(pages):
            raise Violation(f"evict: {len(pages)} pages returned, {grown} more are free")

    def _reset(self) -> None:
        before = self.shadow.state()
        done = self.allocator.reset()
        if done == bool(self.live):
            raise Violation(f"reset: returned {done} with {len(self.live)} live sequences")
        if self.live:
            self.shadow.expect_unchanged(before, "refused reset")
        else:
            self.shadow.clear()

    # --- requests ----------------------------------------------------------------------------------------------

    def _new_actor(self) -> Actor:
        """An earlier prompt again (whole, or with another end), or a new one."""
        self._count += 1
        if not self._prompts or self.random.random() < 0.6:
            self._prompts.append(self._new_prompt())
        tokens, namespace, items = self.random.choice(self._prompts[-6:])
        if self.random.random() < 0.3:
            tokens = [*tokens, *(self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 5)))]
        seq = Sequence(
            f"r{self._count}",
            tokens,
            namespace=namespace,
            extra_keys=items,
            declared_max_tokens=self.random.randint(1, 12),
            oracle_tokens=len(tokens) + self.random.randint(0, 12),
        )
        actor = Actor(seq)
        self._contents.note(actor)
        return actor

    def _new_prompt(self) -> tuple[list[int], Any, list[tuple[int, int, str]]]:
        """1 to half a pool of tokens, mostly equal ones; some with a namespace or an image."""
        slots = self.allocator.num_pages * self.allocator.page_size
        length = self.random.randint(1, max(min(slots // 2, 6 * self.allocator.page_size + 3), 1))
        tokens = [self.random.randrange(VOCABULARY) if self.random.random() < 0.05 else 0 for _ in range(length)]
        namespace = self.random.choice([None, None, None, "tenant", ("lora", "tenant")])
        items = [(self.random.randrange(length), 1, f"image {self.random.randrange(2)}")]
        return tokens, namespace, items if self.random.random() < 0.2 else []

    def _append(self, actor: Actor, token: int) -> None:
        actor.seq.append(token)
        self._contents.note(actor)
