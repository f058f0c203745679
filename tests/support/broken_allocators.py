"""Variants of the third-party allocator, each with one fault that a conformance run must name."""

from array import array
from dataclasses import replace

from kvarena.allocators.interface import Pin, Release, Released, Reservation
from support.third_party import StackAllocator


class LeakOnRelease(StackAllocator):
    """A released sequence's last page is lost."""

    def release(self, seqs, reason):
        released = super().release(seqs, reason)
        if released.freed:
            self.free.remove(released.freed[-1])
        return released


class DoubleOwner(StackAllocator):
    """A page is handed out and stays free."""

    def reserve(self, wants):
        reservations = super().reserve(wants)
        if reservations and reservations[0].page_ids:
            self.free.insert(0, reservations[0].page_ids[-1])
        return reservations


class HitCoversLastToken(StackAllocator):
    """The whole prompt is said to be cached."""

    def pin(self, seq, gate=None):
        pin = super().pin(seq, gate)
        if pin is not None:
            seq.num_computed_tokens = seq.num_prefill_tokens
            pin = replace(pin, hit_tokens=seq.num_prefill_tokens)
        return pin


class HitOnUnwrittenPages(StackAllocator):
    """A hit on pages that nobody wrote."""

    def pin(self, seq, gate=None):
        pin = super().pin(seq, gate)
        if pin is None or seq.num_prefill_tokens <= self.page_size or not self.free:
            return pin
        self.rows[seq.request_id].append(self.free.pop())
        seq.num_computed_tokens = self.page_size
        return Pin(seq, self.page_size, self.rows[seq.request_id][:])


class HitAcrossTenants(StackAllocator):
    """Caches by tokens alone: another namespace's KV is served."""

    def __init__(self, num_pages, page_size=4):
        super().__init__(num_pages, page_size)
        self.cache, self.refs = {}, {}

    def pin(self, seq, gate=None):
        pin = super().pin(seq, gate)
        page = self.cache.get(tuple(seq.token_ids[: self.page_size]))
        if pin is None or page is None or seq.num_prefill_tokens <= self.page_size:
            return pin
        self.rows[seq.request_id].append(page)
        self.refs[page] += 1
        seq.num_computed_tokens = self.page_size
        return Pin(seq, self.page_size, array("i", [page]))

    def written(self, seq, n):
        key = tuple(seq.token_ids[: self.page_size])
        if n >= self.page_size and key not in self.cache:
            self.cache[key] = self.rows[seq.request_id][0]
            self.refs[self.cache[key]] = 1
        return super().written(seq, n)

    def release(self, seqs, reason):
        for seq in seqs:
            row = self.rows[seq.request_id]
            if row and row[0] in self.refs:
                self.refs[row[0]] -= 1
                if self.refs[row[0]]:
                    self.rows[seq.request_id] = row[1:]
                else:
                    self.cache = {key: page for key, page in self.cache.items() if page != row[0]}
                    del self.refs[row[0]]
        return super().release(seqs, reason)

    def check(self):
        owned = {page for row in self.rows.values() for page in row}
        assert len(owned) + len(self.free) == self.num_pages


class RefusalTakesPages(StackAllocator):
    """A refused admission keeps a page."""

    def pin(self, seq, gate=None):
        pin = super().pin(seq, gate)
        if pin is None and self.free:
            self.rows.setdefault("lost", array("i")).append(self.free.pop())
        return pin


class RefusalRaises(StackAllocator):
    """No room is an exception instead of a value."""

    def pin(self, seq, gate=None):
        pin = super().pin(seq, gate)
        if pin is None:
            raise MemoryError("out of pages")
        return pin


class BatchByBatch(StackAllocator):
    """A batch that does not fit is served in part."""

    def reserve(self, wants):
        results = [super(BatchByBatch, self).reserve([want]) for want in wants]
        return None if None in results else [result[0] for result in results]


class TooFewPages(StackAllocator):
    """Rounds a partial page away."""

    def pages_for(self, num_tokens):
        return num_tokens // self.page_size


class LiveIdTwice(StackAllocator):
    """A second request with a live id replaces the first."""

    def pin(self, seq, gate=None):
        lost = self.rows.pop(seq.request_id, ())
        self.free.extend(lost)
        return super().pin(seq, gate)


class PaddingPage(StackAllocator):
    """Hands out page 0."""

    def __init__(self, num_pages, page_size=16):
        super().__init__(num_pages, page_size)
        self.free = list(range(num_pages - 1, -1, -1))

    def check(self):
        pass


class PageOutsideThePool(PaddingPage):
    """Hands out page num_pages + 1."""

    def __init__(self, num_pages, page_size=16):
        super().__init__(num_pages, page_size)
        self.free = list(range(num_pages + 1, 1, -1))


class WrongCount(StackAllocator):
    """Counts a page too many in use."""

    def capacity(self):
        capacity = super().capacity()
        return replace(capacity, in_use=capacity.in_use + bool(self.rows))


class ResetWhileLive(StackAllocator):
    """Drops live rows at a reset."""

    def reset(self):
        self.__init__(self.num_pages, self.page_size)
        return True


class EvictsLiveRows(StackAllocator):
    """Makes room by taking a live sequence's last page."""

    def evict(self, num_tokens):
        for row in self.rows.values():
            if len(row) > 1:
                page = row.pop()
                self.free.append(page)
                return [page]
        return []


class ForgottenMove(StackAllocator):
    """Moves a row to other pages and does not say so."""

    def reserve(self, wants):
        reservations = super().reserve(wants)
        for reservation in reservations or ():
            row = self.rows[reservation.seq.request_id]
            if reservation.seq.num_computed_tokens and self.free:
                row[0], self.free[0] = self.free[0], row[0]
        return reservations


class UntoldPages(StackAllocator):
    """A reservation does not name all pages that it added, so adapters miss one."""

    def reserve(self, wants):
        reservations = super().reserve(wants)
        return reservations and [Reservation(r.seq, r.page_ids[:-1]) for r in reservations]


class StaleRowAfterPreemption(StackAllocator):
    """A preempted sequence finds its old pages again, though they were freed."""

    def __init__(self, num_pages, page_size=16):
        super().__init__(num_pages, page_size)
        self.old = {}

    def pin(self, seq, gate=None):
        pin = super().pin(seq, gate)
        if pin is not None:
            self.rows[seq.request_id] = self.old.pop(seq.request_id, array("i"))
        return pin

    def release(self, seqs, reason):
        if reason is Release.PREEMPT:
            self.old.update({seq.request_id: self.rows[seq.request_id][:] for seq in seqs})
        return super().release(seqs, reason)

    def check(self):
        pass


class ComputedNotReset(StackAllocator):
    """A released sequence keeps num_computed_tokens."""

    def release(self, seqs, reason):
        kept = [seq.num_computed_tokens for seq in seqs]
        released = super().release(seqs, reason)
        for seq, n in zip(seqs, kept, strict=True):
            seq.num_computed_tokens = n
        return released


class SilentRelease(StackAllocator):
    """Never says which pages a release gave back."""

    def release(self, seqs, reason):
        super().release(seqs, reason)
        return Released()


class ReportsFreedAsCached(StackAllocator):
    """Calls pages cached that hold nothing any more."""

    def release(self, seqs, reason):
        return Released(cached=super().release(seqs, reason).freed)


class ReportsOtherPages(StackAllocator):
    """The right number of wrong pages: what was free before, while there is enough of it."""

    def release(self, seqs, reason):
        before = list(self.free)
        freed = super().release(seqs, reason).freed
        return Released(tuple(before[: len(freed)]) if len(before) >= len(freed) else freed)


class ReportsAPageTwice(StackAllocator):
    """The first page stands in the report for the last one too."""

    def release(self, seqs, reason):
        freed = super().release(seqs, reason).freed
        return Released((*freed[:-1], *freed[:1]))


class DecidesByEvents(StackAllocator):
    """Hands out pages from the other end while events are recorded."""

    def reserve(self, wants):
        if self.events.enabled:
            self.free.reverse()
        return super().reserve(wants)


class DecidesByIdentity(StackAllocator):
    """Hands out pages in an order that differs from pool to pool."""

    pools = 0

    def __init__(self, num_pages, page_size=16):
        super().__init__(num_pages, page_size)
        type(self).pools += 1
        turn = type(self).pools % num_pages
        self.free = self.free[turn:] + self.free[:turn]


class EventsAlwaysOn(StackAllocator):
    """Records events nobody asked for."""

    def __init__(self, num_pages, page_size=16):
        super().__init__(num_pages, page_size)
        self.events.enabled = True


class FailsItsOwnCheck(StackAllocator):
    """`check` finds something."""

    def check(self):
        raise AssertionError("free list and rows disagree")


class NeverAdmits(StackAllocator):
    """Refuses everything."""

    def pin(self, seq, gate=None):
        return None


class ForgetsHalfThePool(StackAllocator):
    """Half of the pages are never handed out again after a release."""

    def release(self, seqs, reason):
        released = super().release(seqs, reason)
        self.free = self.free[: max(len(self.free) - len(released.freed) // 2, 0)]
        return released

    def capacity(self):
        owned = sum(map(len, self.rows.values()))
        return replace(super().capacity(), free=self.num_pages - owned, in_use=owned)

    def check(self):
        pass


# Fault -> what the report must say.
BROKEN = {
    LeakOnRelease: "leak: 1 pages in use although no sequence is live",
    DoubleOwner: "conservation",
    HitCoversLastToken: "the last token is never hit",
    HitOnUnwrittenPages: "does not hold its KV",
    HitAcrossTenants: "does not hold its KV",
    RefusalTakesPages: "no page may change owner",
    RefusalRaises: "raised MemoryError: out of pages",
    BatchByBatch: "refused batch: the row of",
    TooFewPages: "pages of 16 for",
    LiveIdTwice: "a second request with the id of a live one was taken",
    PaddingPage: "owns the padding page",
    PageOutsideThePool: "expected 1..24",
    WrongCount: "conservation",
    ResetWhileLive: "reset: expected False while sequences are live",
    EvictsLiveRows: "evict: the row of",
    ForgottenMove: "does not hold its KV",
    UntoldPages: "reserve first, and update with the reservation",
    StaleRowAfterPreemption: "pages are in live rows",
    ComputedNotReset: "release: num_computed_tokens is",
    SilentRelease: "release: 0 pages are reported freed",
    ReportsFreedAsCached: "release: 0 pages are reported freed",
    ReportsOtherPages: "it was free already",
    ReportsAPageTwice: "is reported twice",
    DecidesByEvents: "decisions depend on chance or on the event log",
    DecidesByIdentity: "decisions depend on chance or on the event log",
    EventsAlwaysOn: "expected an EventLog, off",
    FailsItsOwnCheck: "free list and rows disagree",
    NeverAdmits: "a request of one token is refused by an empty pool",
    ForgetsHalfThePool: "a refused request was not admitted",
}
