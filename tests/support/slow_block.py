"""The block design once more: a list for the queue, a dict for what pages hold, and every count taken anew.

Written from the rules of vLLM 0.32.0 and of kvarena's fork, sharing no code with it. What a page serves is the whole
text up to its end, so a page is found by comparing texts; holders are counted by looking at all rows.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from support.slow_facts import Facts, SlowGate, pages


@dataclass
class SlowRow:
    """Pages of one request (0: left behind by a window); `found` of them came from the cache."""

    facts: Facts
    pages: list[int]
    found: int
    offered: int
    written: int
    headroom: int = 0
    held: bool = False
    granted: int = 0  # tokens up to which a reserve was granted, or that are written


@dataclass
class SlowBlock:
    """All state there is: the queue, what pages serve (in the order in which they came to), rows, pins, open pages."""

    num_pages: int
    size: int
    cache: bool = True
    last_token_rule: bool = True
    window: int | None = None
    interval: int | None = 0
    queue: list[int] = field(default_factory=list)
    serves: dict[int, Any] = field(default_factory=dict)
    rows: dict[str, SlowRow] = field(default_factory=dict)
    pins: dict[str, SlowRow] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = list(range(1, self.num_pages + 1))
        self.tail = 0 if self.window is None else pages(self.window - 1, self.size)

    # --- what can be counted ---

    def holders(self, page: int) -> int:
        rows = [*self.rows.values(), *(row for row in self.pins.values() if row.held)]
        return sum(row.pages.count(page) for row in rows)

    def text(self, facts: Facts, position: int) -> Any:
        """Everything up to the end of the page at `position`: two pages are the same exactly if this is."""
        end = (position + 1) * self.size
        seen = []
        for page in range(position + 1):
            start = page * self.size
            overlapping = [i for i in facts.items if i[0] < start + self.size and i[0] + i[1] > start]
            seen.append(sorted((offset - start, content) for offset, _, content in overlapping))
        return (repr(facts.namespace), tuple(facts.tokens[:end]), repr(seen))

    def first_with(self, text: Any) -> int | None:
        """The page that has served this text for longest."""
        return next((page for page, served in self.serves.items() if served == text), None)

    def counts(self) -> dict[str, int]:
        texts = list(self.serves.values())
        evictable = sum(page in self.serves for page in self.queue)
        return {
            "free": len(self.queue) - evictable,
            "evictable": evictable,
            "in_use": self.num_pages - len(self.queue),
            "shared": sum(self.holders(page) > 1 for page in range(1, self.num_pages + 1)),
            "duplicates": sum(text in texts[:at] for at, text in enumerate(texts)),
            "wasted_slots": sum(len(row.pages) * self.size - row.written for row in self.rows.values()),
        }

    # --- look-up ---

    def lookup(self, facts: Facts, limit: int) -> list[int]:
        if not self.cache:
            return []
        found = [self.first_with(self.text(facts, at)) for at in range(limit)]
        if self.window is None:
            run = 0
            while run < limit and found[run] is not None:
                run += 1
            return [page for page in found[:run] if page is not None]
        for end in range(limit, 0, -1):
            start = max(end - max(self.tail, 1), 0)
            run = [page for page in found[start:end] if page is not None]
            if len(run) == end - start:
                return [0] * start + run
        return []

    def match(self, facts: Facts) -> int:
        return len(self.lookup(facts, len(facts.tokens) // self.size)) * self.size

    def pin(self, facts: Facts, gate: SlowGate) -> list[int] | None:
        found = self.lookup(facts, (facts.prefill - self.last_token_rule) // self.size)
        idle = len({page for page in found if page and not self.holders(page)})
        if gate.whole_prompt and not self._fits(facts, len(found), idle, gate):
            return None
        headroom = gate.headroom if gate.page_rounded else 0
        self.pins[facts.name] = SlowRow(facts, found, len(found), len(found), len(found) * self.size, headroom)
        facts.computed = len(found) * self.size
        return list(found)

    def _fits(self, facts: Facts, found: int, idle: int, gate: SlowGate) -> bool:
        if gate.page_rounded:
            need = pages(facts.prefill, self.size) - found + idle
            if self.window is not None and gate.in_flight is not None:
                need = min(need, pages(self.window - 1 + gate.in_flight, self.size) + 1)
            need, room = need + gate.headroom, len(self.queue)
        else:
            need = facts.prefill - found * self.size + gate.headroom
            room = (len(self.queue) - idle) * self.size
        return need < room if gate.strict else need <= room

    # --- room ---

    def _hold_pins(self, only: set[str] | None = None) -> None:
        """Every page that a pin names is held before any page is taken or loses its content."""
        for name, row in self.pins.items():
            if not row.held and (only is None or name in only):
                row.held = True
                self.queue = [page for page in self.queue if page not in row.pages]

    def _take(self, row: SlowRow, count: int) -> tuple[list[int], list[int]]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        evicted = [page for page in taken if page in self.serves]
        for page in evicted:
            del self.serves[page]
        row.pages += taken
        return taken, evicted

    def _to_queue(self, idle: list[int]) -> tuple[list[int], list[int]]:
        """Nobody holds these any more: those without content to the head as one run, cached ones to the tail."""
        empty = [page for page in idle if page not in self.serves]
        cached = [page for page in idle if page in self.serves]
        self.queue = empty + self.queue + cached
        return empty, cached

    def _left_behind(self, row: SlowRow) -> list[int]:
        """Positions that no later token sees, from the last one backwards up to the first that is gone already."""
        if self.window is None:
            return []
        at = min(max(row.written - self.window + 1, 0) // self.size, len(row.pages))
        found = []
        while at and row.pages[at - 1]:
            at -= 1
            found.append(at)
        return found

    def _drop_left_behind(self, row: SlowRow) -> list[int]:
        gone = []
        for at in self._left_behind(row):
            gone.append(row.pages[at])
            row.pages[at] = 0
        empty, cached = self._to_queue([page for page in gone if not self.holders(page)])
        return empty + cached

    # --- reserve ---

    def reserve(self, wants: list[tuple[str, int]], others_held: bool = True) -> list[dict[str, list[int]]] | None:
        """All or nothing: carried out on a copy that is thrown away when one does not fit.

        others_held: a call that takes no page may hold the pages of pins outside of it, or leave that for later.
        """
        before = deepcopy(self.__dict__)
        fresh = {name for name, row in self.pins.items() if not row.held}
        takes = any(self._missing(name, n) for name, n in wants)
        self._hold_pins(None if others_held or takes else {name for name, _ in wants})
        answers: list[dict[str, list[int]]] = []
        for number, (name, n) in enumerate(wants):
            answer = self._reserve_one(name, n, name in fresh)
            if answer is None:
                self._refused(before, wants, number)
                return None
            answers.append(answer)
        return answers

    def _missing(self, name: str, n: int) -> int:
        row = self.rows.get(name) or self.pins[name]
        return max(pages(row.facts.computed + n, self.size) - len(row.pages), 0)

    def _reserve_one(self, name: str, n: int, fresh: bool) -> dict[str, list[int]] | None:
        count, row = self._missing(name, n), self.rows.get(name) or self.pins[name]
        dropped = self._drop_left_behind(row) if name in self.rows else []
        if count + (row.headroom if fresh else 0) > len(self.queue):
            return None
        if name in self.pins:
            self.rows[name] = self.pins.pop(name)
        taken, evicted = self._take(row, count)
        row.granted = row.facts.computed + n
        repeated = self._offer(row, row.granted)
        return {"taken": taken, "evicted": evicted, "freed": dropped, "duplicates": repeated}

    def _refused(self, before: dict[str, Any], wants: list[tuple[str, int]], number: int) -> None:
        """Nothing was taken; what left a window is gone all the same, and pins of the call are dropped."""
        computed = {name: row.facts for name, row in [*self.rows.items(), *self.pins.items()]}
        self.__dict__.update(before)
        for name, _ in wants[: number + 1]:
            if name in self.rows:
                self._drop_left_behind(self.rows[name])
        for row in [*self.rows.values(), *self.pins.values()]:
            row.facts = computed[row.facts.name]
        for name, _ in wants:
            if name in self.pins:
                row = self.pins.pop(name)
                row.facts.computed = 0
                if row.held:
                    self._to_queue([page for page in reversed(row.pages) if page and not self.holders(page)])

    # --- publishing ---

    def _offer(self, row: SlowRow, end: int) -> list[int]:
        """Full pages of known tokens before `end` serve their text from now on; returns those that repeat one."""
        if not self.cache:
            return []
        full = min(end, len(row.facts.tokens)) // self.size
        position = self._shared_open(row)
        if position is not None:
            full = min(full, position)
        repeated = []
        for at in range(row.offered, full):
            if not row.pages[at] or not self._retained(at, row.facts.prompt):
                continue
            text = self.text(row.facts, at)
            if self.first_with(text) is not None:
                repeated.append(row.pages[at])
            self.serves[row.pages[at]] = text
        row.offered = max(row.offered, full)
        return repeated

    def _retained(self, position: int, prompt: int) -> bool:
        """Sparse publishing under a window: what a hit border of the prompt, or every k-th token, looks back at."""
        if self.window is None or self.interval is None:
            return True
        borders = [(prompt - 1) // self.size]
        if self.interval:
            step = self.interval // self.size
            borders.append((position // step + 1) * step)
        return any(border - self.tail <= position < border for border in borders)

    def _shared_open(self, row: SlowRow) -> int | None:
        position = self.open.get(row.facts.name)
        if position is not None and self.holders(row.pages[position]) == 1:
            del self.open[row.facts.name]
            return None
        return position

    def commit(self, name: str, n: int) -> list[int]:
        row, repeated = self.rows[name], []
        if n > row.facts.computed:
            row.facts.computed = n
        elif n >= (row.offered + 1) * self.size:  # a scheduler ran ahead: published when the tokens arrive
            repeated = self._offer(row, n)
        row.written = max(row.written, n)
        row.granted = n
        return repeated

    # --- giving back ---

    def release(self, names: list[str], abort: bool) -> dict[str, list[int]]:
        answer: dict[str, list[int]] = {"freed": [], "cached": [], "evicted": []}
        for name in names:
            row = self.rows[name] if name in self.rows else self.pins[name]
            if name in self.rows:
                del self.rows[name]
                self.open.pop(name, None)
            else:
                del self.pins[name]
            row.facts.computed = 0
            if not row.held:
                continue
            if abort:
                answer["evicted"] += self._take_back(row)
            empty, cached = self._to_queue([page for page in reversed(row.pages) if page and not self.holders(page)])
            answer["freed"] += empty
            answer["cached"] += cached
        return answer

    def _take_back(self, row: SlowRow) -> list[int]:
        """What an aborted request published without having it written serves nobody."""
        start = max(row.found, row.written // self.size)
        if start >= row.offered:
            return []
        self._hold_pins()
        gone = [page for page in row.pages[start : row.offered] if page in self.serves]
        for page in gone:
            del self.serves[page]
        return gone

    def evict(self, tokens: int) -> list[int]:
        self._hold_pins()
        cached = [page for page in self.queue if page in self.serves]
        gone = cached[: max(pages(tokens, self.size) - (len(self.queue) - len(cached)), 0)]
        for page in gone:
            del self.serves[page]
        return gone

    def reset(self) -> bool:
        if self.rows or self.pins:
            return False
        self.serves.clear()
        return True

    # --- fork ---

    def fork(
        self, parent: str, child: Facts, num_tokens: int | None = None
    ) -> tuple[list[tuple[int, int]], list[int]] | None:
        row = self.rows[parent]
        written = min(row.written, row.facts.computed)
        computed = num_tokens or written
        full, rest = divmod(computed, self.size)
        ahead = row.facts.computed > row.written or written > computed
        being_written = rest > 0 and (row.offered > full or ahead)
        if being_written and not self._has_page():
            return None
        self._offer(row, written)
        shared = full + (1 if rest and not being_written else 0)
        offered = min(row.offered, full)
        new = SlowRow(child, row.pages[:shared], offered, offered, computed, held=True, granted=computed)
        row.granted = computed
        self.rows[child.name] = new
        child.computed = computed
        if child.prompt <= computed:
            child.prefill = computed
        if rest and not being_written:
            self.open[parent] = self.open[child.name] = full
        if not being_written:
            return [], []
        self._hold_pins()
        taken, evicted = self._take(new, 1)
        return [(row.pages[full], taken[0])], evicted

    def prepare_write(self, name: str, start: int, end: int) -> list[tuple[int, int]] | None:
        row, position = self.rows[name], self.open.get(name)
        if position is None or not start // self.size <= position < pages(end, self.size):
            return []
        copies = []
        if self.holders(row.pages[position]) > 1:
            if not self._has_page():
                return None
            self._hold_pins()
            source = row.pages[position]
            (page,), _ = self._take(row, 1)
            row.pages.pop()
            row.pages[position] = page
            copies = [(source, page)]
        del self.open[name]
        self._offer(row, min(end, row.granted))
        return copies

    def _has_page(self) -> bool:
        named = {page for row in self.pins.values() if not row.held for page in row.pages}
        return any(page not in named for page in self.queue)
