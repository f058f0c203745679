"""The token design verb by verb, with every switch: the slow tree of `token_oracle`, and lists for all else.

Written from the rules of SGLang 0.5.22 and of kvarena's fork and switches; it shares no code with kvarena.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.slow_facts import Facts, SlowGate, pages
from support.token_oracle import OracleNode, TokenOracle


@dataclass
class SlowHold:
    """What a live request holds: its row, the locked node, and how much of the row the tree owns (pages)."""

    facts: Facts
    index: int
    row: list[int]
    node: OracleNode
    protected: int
    inserted: int = 0
    admitted: bool = False
    prefilled: bool = False


class SlowToken(TokenOracle):
    """The oracle's tree under the verbs of the interface, a root a namespace."""

    def __init__(
        self,
        num_pages: int,
        size: int,
        order: str = "lru",
        *,
        cache: bool = True,
        last_token_rule: bool = True,
        page_unit: bool = False,
        touches_suffix: bool = True,
        slack: int = 1,
        need_sort: bool = False,
        num_rows: int = 8,
    ) -> None:
        super().__init__(num_pages, size, order, page_unit=page_unit)
        self.num_pages, self.num_rows = num_pages, num_rows
        self.cache, self.rule, self.touches_suffix = cache, last_token_rule, touches_suffix
        self.slack = slack if size > 1 else 0
        self.need_sort = need_sort
        self.waiting: list[int] = []
        self.free_rows = list(range(1, num_rows + 1))
        self.holds: dict[str, SlowHold] = {}
        self.roots: dict[str, OracleNode] = {}

    # --- keys and namespaces ---

    def _symbols(self, facts: Facts, count: int) -> list[Any]:
        """Tokens, where an image lies replaced by its content: one symbol where it begins, another inside."""
        symbols: list[Any] = list(facts.tokens[:count])
        for offset, length, content in facts.items:
            for at in range(offset, min(offset + length, count)):
                symbols[at] = ("begin" if at == offset else "inside", repr(content))
        return symbols

    def _key(self, facts: Facts, count: int) -> list[Any]:
        return self._pages(self._symbols(facts, count)) if self.cache else []

    def _enter(self, facts: Facts) -> None:
        """Walks of this request start at its namespace's root."""
        name = repr(facts.namespace)
        self.root = self.roots.setdefault(name, OracleNode([], [], None, lock=1))

    def _nodes(self) -> list[OracleNode]:
        found: list[OracleNode] = []
        stack = [child for root in self.roots.values() for child in root.children]
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children
        return found

    def _split(self, child: OracleNode, cut: int) -> OracleNode:
        time = child.time
        upper = super()._split(child, cut)
        if not self.touches_suffix:
            child.time = time
        return upper

    # --- free pages ---

    def _put(self, run: list[int]) -> None:
        if self.need_sort:
            self.waiting = self.waiting + run
        else:
            super()._put(run)

    def _merge(self) -> None:
        if self.waiting:
            self.free, self.waiting = sorted(self.free + self.waiting), []

    def _take(self, count: int) -> list[int]:
        if count > len(self.free):
            self._merge()
        return super()._take(count)

    def num_free(self) -> int:
        return len(self.free) + len(self.waiting)

    def _evict_pages(self, short: int) -> list[int]:
        """Unlocked leaves go, the lowest first, until `short` pages came free; each is a call of its own."""
        gone: list[int] = []
        while short > len(gone):
            leaves = [node for node in self._nodes() if node.lock == 0 and not node.children]
            if not leaves:
                break
            leaf = min(leaves, key=self.order)
            count = 1 if self.page_unit else len(leaf.pages)
            run, leaf.pages, leaf.key = leaf.pages[-count:], leaf.pages[:-count], leaf.key[:-count]
            if not leaf.pages and leaf.parent is not None:
                leaf.parent.children.remove(leaf)
            self._put(run)
            gone += run
        return gone

    # --- verbs ---

    def match(self, facts: Facts) -> int:
        self._enter(facts)
        node = self._match(self._key(facts, len(facts.tokens)))
        return sum(len(step.pages) for step in self._path(node)) * self.size

    def pin(self, facts: Facts, gate: SlowGate) -> list[int] | None:
        if not self.free_rows:
            return None
        self._enter(facts)
        node = self._match(self._key(facts, facts.prefill - self.rule))
        hit = [page for step in self._path(node) for page in step.pages]
        self._lock(node, 1)
        need, room = gate.headroom, self.num_free() + self.evictable()
        if gate.whole_prompt:
            tokens = facts.prefill - len(hit) * self.size
            need += pages(tokens, self.size) if gate.page_rounded else tokens
        if not gate.page_rounded:
            room *= self.size
        if not (need < room if gate.strict else need <= room):
            self._lock(node, -1)
            return None
        self.holds[facts.name] = SlowHold(facts, self.free_rows.pop(), list(hit), node, len(hit))
        facts.computed = len(hit) * self.size
        return hit

    def reserve(self, wants: list[tuple[str, int]]) -> list[dict[str, list[int]]] | None:
        holds = [(self.holds[name], n) for name, n in wants]
        new = [max(pages(hold.facts.computed + n, self.size) - len(hold.row), 0) for hold, n in holds]
        evicted = self._evict_pages(self._demand(holds, new) - self.num_free())
        refused = sum(new) > self.num_free()
        if self.need_sort and self.size > 1 and self._bound(holds, refused) > len(self.free):
            self._merge()
        if refused:
            for hold, _ in holds:
                if not hold.admitted:
                    self._drop(hold)
            return None
        answers = []
        taken = self._take(sum(new))
        for (hold, _), count in zip(holds, new, strict=True):
            own, taken = taken[:count], taken[count:]
            hold.row += own
            hold.admitted = True
            answers.append({"taken": own, "evicted": evicted, "freed": [], "duplicates": []})
            evicted = []
        return answers

    def _demand(self, holds: list[tuple[SlowHold, int]], new: list[int]) -> int:
        """Pages that a call makes room for: with more than a slot a page, a page a request on top."""
        if not self.slack:
            return sum(new)
        tokens = 0
        for (hold, n), count in zip(holds, new, strict=True):
            decodes = hold.facts.computed >= hold.facts.prefill
            tokens += max(count, self.slack) * self.size if decodes else n + self.slack * self.size
        return pages(tokens, self.size)

    def _bound(self, holds: list[tuple[SlowHold, int]], refused: bool) -> int:
        """A decode without room never comes to the free pages."""
        prefills = [n for hold, n in holds if hold.facts.computed < hold.facts.prefill]
        loose = sum(prefills) // self.size + len(prefills) + 1 if prefills else 0
        return max(0 if refused else len(holds) - len(prefills), loose)

    def commit(self, done: list[tuple[str, int]]) -> list[list[int]]:
        group: list[int] = []
        given = []
        for name, n in done:
            hold = self.holds[name]
            hold.facts.computed = max(hold.facts.computed, n)
            if hold.prefilled:
                given.append([])
                continue
            hold.prefilled = n >= hold.facts.prefill
            runs = self._publish(hold, min(n, hold.facts.prefill))
            given.append([page for run in runs for page in run])
            if hold.prefilled:
                group += given[-1]
            else:
                for run in runs:
                    self._put(run)
        if group:
            self._put(group)
        return given

    def _publish(self, hold: SlowHold, computed: int) -> list[list[int]]:
        """The oracle's checkpoint: insert, a border at the prompt's end, match again, move the lock."""
        if not self.cache:
            return []
        self._enter(hold.facts)
        key = self._key(hold.facts, computed)
        frees = self._insert(key, hold.row, hold.protected, hold.inserted, 0)
        hold.inserted = len(key)
        prompt = key[: hold.facts.prompt // self.size]
        if prompt and len(prompt) < len(key):
            self._insert(prompt, hold.row, len(prompt), len(key), 1)
        node = self._match(key)
        hold.row[: len(key)] = [page for step in self._path(node) for page in step.pages]
        self._lock(node, 1)
        self._lock(hold.node, -1)
        hold.node, hold.protected = node, len(key)
        return frees

    def release(self, names: list[str], finish: bool) -> dict[str, list[int]]:
        group: list[int] = []
        answer: dict[str, list[int]] = {"freed": [], "cached": [], "duplicates": []}
        for name in names:
            hold = self.holds[name]
            if finish and hold.admitted:
                computed = min(hold.facts.computed, len(hold.facts.tokens), len(hold.row) * self.size)
                runs = self._publish(hold, computed)
                answer["duplicates"] += [page for run in runs for page in run]
                given = [page for run in runs for page in run] + hold.row[hold.protected :]
                group += given
            else:
                given = hold.row[hold.protected :]
                self._put(given)
            answer["freed"] += given
            answer["cached"] += self._drop(hold)
        if group:
            self._put(group)
        return answer

    def _drop(self, hold: SlowHold) -> list[int]:
        path = self._path(hold.node)
        self._lock(hold.node, -1)
        self.free_rows.append(hold.index)
        hold.facts.computed = 0
        del self.holds[hold.facts.name]
        return [page for step in path if step.lock == 0 for page in step.pages]

    def evict(self, tokens: int) -> list[int]:
        return self._evict_pages(pages(tokens, self.size) - self.num_free())

    def reset(self) -> bool:
        if self.holds:
            return False
        self.roots.clear()
        self.free, self.waiting = list(range(1, self.num_pages + 1)), []
        self.free_rows = list(range(1, self.num_rows + 1))
        return True

    def fork(
        self, parent: str, child: Facts, num_tokens: int | None = None
    ) -> tuple[list[tuple[int, int]], list[int]] | None:
        hold = self.holds[parent]
        computed = num_tokens or min(hold.facts.computed, len(hold.facts.tokens))
        covered = pages(computed, self.size)
        in_tree = computed // self.size if self.cache else 0
        if not self.free_rows or covered - in_tree > self.num_free() + self.evictable():
            return None
        runs = self._publish(hold, max(computed, hold.protected * self.size))
        if duplicates := [page for run in runs for page in run]:
            self._put(duplicates)
        node = hold.node
        if in_tree < hold.protected:
            self._enter(hold.facts)
            node = self._match(self._key(hold.facts, computed))
        evicted = self._evict_pages(covered - in_tree - self.num_free())
        taken = self._take(covered - in_tree)
        own = hold.row[:in_tree] + taken
        new = SlowHold(child, self.free_rows.pop(), own, node, in_tree, in_tree, admitted=True)
        self._lock(node, 1)
        self.holds[child.name] = new
        child.computed = computed
        if child.prompt <= computed:
            child.prefill = computed
        new.prefilled = computed >= child.prefill
        return list(zip(hold.row[in_tree:covered], taken, strict=True)), evicted

    def counts(self) -> dict[str, int]:
        free, evictable = self.num_free(), self.evictable()
        paths = [page for hold in self.holds.values() for step in self._path(hold.node) for page in step.pages]
        return {
            "free": free,
            "evictable": evictable,
            "in_use": self.num_pages - free - evictable,
            "shared": sum(paths.count(page) > 1 for page in set(paths)),
            "free_rows": len(self.free_rows),
            "wasted_slots": sum(len(h.row) * self.size - h.facts.computed for h in self.holds.values()),
        }
