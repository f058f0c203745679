"""A complete third-party allocator: a stack of free pages, no sharing, no cache."""

from array import array

from kvarena.allocators.interface import Capacity, Commit, EventLog, KVAllocator, Pin, Released, Reservation


class StackAllocator(KVAllocator):
    kind = "stack"

    def __init__(self, num_pages, page_size=16):
        self.num_pages, self.page_size, self.events = num_pages, page_size, EventLog()
        self.free = list(range(num_pages, 0, -1))
        self.rows = {}

    def pages_for(self, num_tokens):
        return -(-num_tokens // self.page_size)

    def pin(self, seq, gate=None):
        if seq.request_id in self.rows:
            raise ValueError(f"request {seq.request_id} is live already")
        if self.pages_for(seq.num_prefill_tokens) > len(self.free):
            return None
        self.rows[seq.request_id] = array("i")
        return Pin(seq, 0)

    def reserve(self, wants):
        needs = [
            (s, max(self.pages_for(s.num_computed_tokens + n) - len(self.rows[s.request_id]), 0)) for s, n in wants
        ]
        if sum(need for _, need in needs) > len(self.free):
            return None
        taken = [(seq, array("i", [self.free.pop() for _ in range(need)])) for seq, need in needs]
        for seq, pages in taken:
            self.rows[seq.request_id].extend(pages)
        return [Reservation(seq, pages) for seq, pages in taken]

    def commit(self, done):
        return [self.written(seq, n) for seq, n in done]

    def written(self, seq, n):
        seq.num_computed_tokens = n
        return Commit(seq)

    def release(self, seqs, reason):
        freed = [page for seq in seqs for page in self.rows.pop(seq.request_id)]
        self.free.extend(reversed(freed))
        for seq in seqs:
            seq.num_computed_tokens = 0
        return Released(tuple(freed))

    def evict(self, num_tokens):
        return []

    def page_ids(self, seq):
        return self.rows[seq.request_id][:]

    def capacity(self):
        return Capacity(self.num_pages, self.page_size, len(self.free), 0, self.num_pages - len(self.free))

    def reset(self):
        return not self.rows

    def check(self):
        owned = [page for row in self.rows.values() for page in row]
        assert sorted(owned + self.free) == list(range(1, self.num_pages + 1)), (owned, self.free)
