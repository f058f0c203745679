"""State machines of the prefix indexes by themselves, and of the orders of eviction.

Hypothesis draws any order of calls; after every one the answers and all that can be read are those of a slow, obvious
model (`support/slow_indexes.py`).
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from kvarena.prefix.eviction import ORDERS, LeafQueue, order, queue_for
from kvarena.prefix.exact import ExactIndex, Prompt, PromptKey
from kvarena.prefix.hash_chain import HashChainIndex, PageChain
from kvarena.prefix.radix_tree import Node, RadixTree
from kvarena.prefix.run_tree import Run, RunTree
from kvarena.prefix.run_tree_check import holder_problems, tree_problems
from support import slow_indexes as slow

CI = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PAGES = 24
SOME = st.integers(0, 11)
NAMES = st.sampled_from([None, "a", 1, True])  # 1 and True hash alike
LETTERS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
HASHES = ["xxh3_64", "sha256", lambda data: b"always the same", lambda data: bytes([sum(data) % 3])]


# --- the hashed index ---


class HashedIndex(RuleBasedStateMachine):
    """Publish, publish again, drop, match, window, clear."""

    @initialize(size=st.integers(1, 3), hashed=st.sampled_from(HASHES))
    def begin(self, size: int, hashed: Any) -> None:
        self.size = size
        self.index = HashChainIndex(PAGES, size, hashed)
        self.model = slow.SlowPages()
        self.chains: list[tuple[PageChain, slow.Text]] = []

    def _of(self, number: int) -> tuple[PageChain, slow.Text]:
        return self.chains[number % len(self.chains)]

    @rule(name=NAMES, letters=LETTERS)
    def write(self, name: Any, letters: list[int]) -> None:
        chain = self.index.chain(name)
        tokens = array("i", [letter for letter in letters for _ in range(self.size)])
        for count in sorted({len(letters) // 2, len(letters)}):  # in two goes, as a reply grows
            chain.extend(tokens, count)
        self.chains.append((chain, (repr(name), *letters)))

    @rule(which=SOME, start=st.integers(0, 5), count=st.integers(1, 6))
    def publish(self, which: int, start: int, count: int) -> None:
        if not self.chains:
            return
        chain, text = self._of(which)
        free = [page for page in range(1, PAGES + 1) if not self.model.serves(page)]
        pages = free[: min(count, max(len(text) - 1 - start, 0))]
        expected = self.model.publish(pages, text, start)
        assert self.index.publish(pages, chain, start) == expected
        # Once more changes nothing; under another text it is refused.
        assert self.index.publish(pages, chain, start) == []
        other = self.index.chain("another")
        other.extend(array("i", [9] * self.size * len(text)), len(text) - 1)
        if pages and other.keys[start] != chain.keys[start]:
            with pytest.raises(ValueError, match="already serves other content"):
                self.index.publish(pages[:1], other, start)

    @rule(pages=st.lists(st.integers(1, PAGES), max_size=5, unique=True))
    def drop(self, pages: list[int]) -> None:
        assert self.index.drop(pages) == self.model.drop(pages)

    @rule(which=SOME, limit=st.integers(0, 7))
    def match(self, which: int, limit: int) -> None:
        if self.chains:
            chain, text = self._of(which)
            assert self.index.match(chain, limit) == self.model.match(text, limit)

    @rule(which=SOME, limit=st.integers(0, 7), need=st.integers(1, 3))
    def window(self, which: int, limit: int, need: int) -> None:
        """The last run of so many pages, else the first positions as far as they go."""
        if not self.chains:
            return
        chain, text = self._of(which)
        there = [self.model.find(text[: at + 2]) for at in range(min(limit, len(text) - 1))]
        starts = [at for at in range(len(there) - need + 1) if all(there[at : at + need])]
        front = self.model.match(text, limit)
        expected = (starts[-1], there[starts[-1] : starts[-1] + need]) if starts else (0, front)
        assert self.index.match_window(chain, limit, need) == expected

    @rule()
    def clear(self) -> None:
        expected = sorted(page for page, _ in self.model.served)
        assert self.index.clear() == expected
        self.model.drop(expected)

    @invariant()
    def alike(self) -> None:
        if not hasattr(self, "index"):
            return
        assert self.index.problems() == []
        assert len(self.index) == len(self.model.served)
        assert self.index.duplicates == self.model.duplicates
        for chain, text in self.chains[-3:]:
            for at in range(len(text) - 1):
                assert self.index.find(chain, at) == self.model.find(text[: at + 2])


# --- the tree of runs ---


@dataclass(eq=False)
class Sequence:
    """What one sequence holds: in the tree runs with their pages, in the model its pages and its text."""

    parts: list[tuple[Run, int]]
    node: Any
    name: str
    text: slow.Text
    pages: list[int]


def as_bytes(letters: slow.Text) -> bytes:
    return b"".join(bytes([97 + letter]) * 2 for letter in letters)


class TreeOfRuns(RuleBasedStateMachine):
    """Arrive, grow, fork, take back, leave, evict."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RunTree()
        self.model = slow.SlowPages()
        self.free = list(range(1, PAGES + 1))
        self.live: list[Sequence] = []

    @rule(name=st.sampled_from(["a", "b"]), letters=LETTERS, limit=st.integers(0, 6))
    def arrive(self, name: str, letters: list[int], limit: int) -> None:
        root = self.tree.root(name, 2)
        found = self.tree.match(root, as_bytes(tuple(letters)), min(limit, len(letters)))
        pages = self.model.match((name, *letters), limit)
        runs, node = self.tree.hold(found)
        assert [page for run in runs for page in run.pages] == pages
        assert found.num_idle == sum(page in self.model.idle for page in pages)
        self.model.hold(pages)
        one = Sequence(
            [(run, len(run.pages)) for run in runs], node or root, name, (name, *letters[: len(pages)]), pages
        )
        one.node.users += 1
        self.live.append(one)
        self._grow(one, letters[len(pages) :])

    def _grow(self, one: Sequence, letters: list[int]) -> None:
        letters = letters[: len(self.free) + len(self.model.idle)]
        if not letters:
            return
        self._make_room(len(letters))
        pages, self.free = self.free[: len(letters)], self.free[len(letters) :]
        start = len(one.pages)
        one.text, one.pages = (*one.text, *letters), one.pages + pages
        expected = self.model.publish(pages, one.text, start)
        self.model.hold(pages)
        text = as_bytes(tuple(letters))
        last, held = one.parts[-1] if one.parts else (None, 0)
        if last is not None and last.node is one.node and self.tree.extend(last, one.node, text, array("i", pages)):
            assert expected == []
            one.parts[-1] = (last, held + len(pages))
            return
        runs, node, duplicates = self.tree.publish(one.node, text, start, array("i", pages))
        assert list(duplicates) == expected
        one.parts += [(run, len(run.pages)) for run in runs]
        one.node.users -= 1
        node.users += 1
        one.node = node

    def _make_room(self, need: int) -> None:
        short = need - len(self.free)
        if short > 0:
            gone = list(self.tree.evict(short))
            assert gone == self.model.evict(short)
            self.free += gone

    @rule(which=SOME, letters=LETTERS)
    def grow(self, which: int, letters: list[int]) -> None:
        if self.live:
            self._grow(self.live[which % len(self.live)], letters)

    @rule(which=SOME)
    def fork(self, which: int) -> None:
        if not self.live:
            return
        one = self.live[which % len(self.live)]
        for run, count in one.parts:
            self.tree.share(run, count)
        one.node.users += 1
        self.model.hold(one.pages)
        self.live.append(Sequence(list(one.parts), one.node, one.name, one.text, list(one.pages)))

    @rule(which=SOME)
    def leave(self, which: int) -> None:
        if not self.live:
            return
        one = self.live.pop(which % len(self.live))
        runs: list[Run] = []
        idle = sum(self.tree.let_go(run, count, runs) for run, count in reversed(one.parts))
        freed, cached = self.model.let_go(one.pages)
        gone = [page for run in runs for page in run.pages[::-1]]
        assert [page for page in gone if page in freed] == freed
        assert [page for page in gone if page in cached] == cached
        assert idle == len(cached)
        self.free += freed
        one.node.users -= 1
        self.tree.prune(one.node)

    @rule(which=SOME, keep=st.integers(0, 5))
    def take_back(self, which: int, keep: int) -> None:
        """An abort before anything was written: what the last part published serves nobody any more."""
        alone = [one for one in self.live if one.parts and self._its_own(one)]
        if not alone:
            return
        one = alone[which % len(alone)]
        run, count = one.parts[-1]
        keep = min(keep, count)
        self.tree.unpublish(run, count, keep)
        self.model.drop(one.pages[len(one.pages) - count + keep :])
        self.live.remove(one)
        self.live.append(one)
        self.leave(len(self.live) - 1)

    def _its_own(self, one: Sequence) -> bool:
        """Whether all pages of the last part still serve."""
        _, count = one.parts[-1]
        return all(self.model.serves(page) for page in one.pages[-count:])

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        count = min(count, len(self.model.idle))
        if count:
            gone = list(self.tree.evict(count))
            assert gone == self.model.evict(count)
            self.free += gone

    @rule(name=st.sampled_from(["a", "b"]), letters=LETTERS, limit=st.integers(0, 6))
    def look(self, name: str, letters: list[int], limit: int) -> None:
        root = self.tree.find_root(name)
        pages = self.model.match((name, *letters), limit)
        if root is None:
            assert pages == []
            return
        before = self.tree.version
        found = self.tree.match(root, as_bytes(tuple(letters)), min(limit, len(letters)))
        told = [page for run in found.runs for page in run.pages]
        assert told[: len(told) - found.surplus] == pages
        assert self.tree.version == before

    @invariant()
    def alike(self) -> None:
        assert tree_problems(self.tree) == []
        runs: Counter[Run] = Counter()
        for one in self.live:
            for last, count in one.parts:
                run: Run | None = last
                while count > 0 and run is not None:
                    runs[run] += 1
                    count -= len(run.pages)
                    run = run.front
        assert list(holder_problems(self.tree, runs, Counter(id(one.node) for one in self.live))) == []
        assert [page for run in self.tree.idle() for page in reversed(run.pages)] == self.model.idle
        assert (self.tree.evictable, self.tree.shared) == (len(self.model.idle), self.model.shared)
        assert self.tree.duplicates == self.model.duplicates


# --- the radix tree ---


class TokenTree(RuleBasedStateMachine):
    """Match, insert under a lock, lock, unlock, border, hits, evict, clear; with every order and both units."""

    @initialize(
        name=st.sampled_from(sorted(slow.ORDERS)), unit=st.sampled_from(["leaf", "page"]), rest=st.booleans(),
        width=st.sampled_from([1, 4]),
    )  # fmt: skip
    def begin(self, name: str, unit: Any, rest: bool, width: int) -> None:
        self.width = width
        self.tree = RadixTree(order(name), eviction_unit=unit, split_touches_suffix=rest)
        self.model = slow.SlowTree(name, by_page=unit == "page", touches_rest=rest)
        self.locks: list[tuple[Node, slow.SlowNode]] = []
        self.free = list(range(1, PAGES + 1))

    def _key(self, letters: list[int]) -> bytes:
        return b"".join(bytes([letter]) * self.width for letter in letters)

    @rule(name=NAMES, letters=LETTERS, beyond=LETTERS, keep=st.booleans())
    def match(self, name: Any, letters: list[int], beyond: list[int], keep: bool) -> None:
        """Of a key that may go on behind the pages that are asked for."""
        node, pages = self.tree.match(self._key(letters + beyond), self.width, name, len(letters))
        mine, expected = self.model.match(name, letters)
        assert list(pages) == expected
        assert list(self.tree.path_pages(node)) == expected
        if keep:
            self.tree.lock(node)
            mine.holds += 1
            self.locks.append((node, mine))

    @rule(which=SOME, letters=LETTERS)
    def insert(self, which: int, letters: list[int]) -> None:
        """What was computed behind a locked node."""
        if not self.locks:
            return
        at = which % len(self.locks)
        node, mine = self.locks[at]
        if len(self.free) < len(letters):
            self._evict(len(letters) - len(self.free))
        letters = letters[: len(self.free)]
        if not letters:
            return
        fresh, self.free = self.free[: len(letters)], self.free[len(letters) :]
        row = [*mine.path(), *fresh]
        start = len(row) - len(fresh)
        pages = array("i", row)
        end, given_up, new_from = self.tree.insert(node, self._key(letters), self.width, pages, start)
        own_end, duplicates = self.model.insert(mine, letters, row, start)
        assert [page for run in given_up for page in run] == duplicates
        assert new_from == start + len(duplicates)
        assert list(pages) == own_end.path() == list(self.tree.path_pages(end))
        self.free += duplicates
        self.locks[at] = (end, own_end)

    @rule(which=SOME)
    def unlock(self, which: int) -> None:
        if not self.locks:
            return
        node, mine = self.locks.pop(which % len(self.locks))
        before = self.model.evictable
        let_go = self.tree.unlock(node)
        mine.holds -= 1
        assert let_go == self.model.evictable - before

    @rule(which=SOME)
    def touch_and_count(self, which: int) -> None:
        if self.locks:
            node, mine = self.locks[which % len(self.locks)]
            self.tree.touch(node)
            self.model.see(mine)
            self.tree.count_hit(node)
            one: slow.SlowNode | None = mine
            while one is not None:
                one.hits += one.above is not None
                one = one.above

    @rule(which=SOME, at=st.integers(0, 6))
    def border(self, which: int, at: int) -> None:
        if self.locks:
            node, mine = self.locks[which % len(self.locks)]
            end = len(mine.path())
            if at <= end:
                above = self.tree.border(node, end, at)
                assert list(self.tree.path_pages(above)) == mine.path()[:at]
                if self.tree.uses_priority:
                    self.tree.raise_priority(above)
                self.model.border(mine, at)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        self._evict(count)

    def _evict(self, count: int) -> None:
        runs = [list(run) for run in self.tree.evict(count)]
        assert runs == self.model.evict(count)
        self.free += [page for run in runs for page in run]

    @rule()
    def clear(self) -> None:
        if self.locks or len(self.free) > PAGES // 2:
            return
        self.tree.clear()
        self.model.roots.clear()
        self.free = list(range(1, PAGES + 1))

    @invariant()
    def alike(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert list(self.tree.faults()) == []
        assert self.tree.evictable_pages == self.model.evictable
        mine = sorted((node.path(), node.pages, node.hits, node.priority) for node in self.model.nodes())
        uses = self.tree.order
        theirs = sorted(
            (list(self.tree.path_pages(node)), list(node.pages), node.hits, node.priority) for node in self.tree.nodes()
        )
        if not uses.uses_priority:  # nobody asks for them
            mine = [(path, pages, hits, 0) for path, pages, hits, _ in mine]
        assert theirs == mine


# --- whole prompts ---


class WholePrompts(RuleBasedStateMachine):
    """Register, find, remove, under digests that collide."""

    @initialize(digest=st.sampled_from([None, lambda data: 0, lambda data: sum(data) % 2]))
    def begin(self, digest: Any) -> None:
        self.index = ExactIndex() if digest is None else ExactIndex(digest)
        self.known: dict[str, Prompt] = {}

    @rule(letters=st.lists(st.integers(0, 2), max_size=3), more=st.integers(0, 1), given=st.booleans(), name=NAMES,
          item=st.sampled_from([(), ((0, 1, "x"),), ((0, 1, True),), ((0, 1, 1),)]))  # fmt: skip
    def ask(self, letters: list[int], more: int, given: bool, name: Any, item: Any) -> None:
        key = PromptKey(array("i", letters), len(letters) + more, given, name, item)
        text = repr((letters, more, given, name, item))
        assert self.index.find(key) is self.known.get(text)
        if text in self.known:
            with pytest.raises(ValueError, match="is registered already"):
                self.index.insert(key, array("i"))
        else:
            self.known[text] = self.index.insert(key, array("i", [len(self.known) + 1]))

    @rule(which=SOME)
    def remove(self, which: int) -> None:
        if self.known:
            prompt = self.known.pop(sorted(self.known)[which % len(self.known)])
            self.index.remove(prompt)
            with pytest.raises(ValueError, match="is not registered"):
                self.index.remove(prompt)

    @invariant()
    def alike(self) -> None:
        if hasattr(self, "index"):
            assert self.index.problems() == []
            assert len(self.index) == len(self.known)
            assert {id(prompt) for prompt in self.index.prompts()} == {id(prompt) for prompt in self.known.values()}


# --- the orders of eviction as such ---


@dataclass(eq=False)
class Leaf:
    serial: int
    last_access: int
    created: int
    priority: int
    hits: int = 0
    queued: Any = None
    locks: int = 0
    children: tuple[int, ...] = ()

    @property
    def born(self) -> int:
        return self.created

    @property
    def seen(self) -> int:
        return self.last_access


class Orders(RuleBasedStateMachine):
    """Leaves come, are used, held, get children and lose them, and go; the queue says which."""

    @initialize(name=st.sampled_from(sorted(ORDERS)), heap=st.booleans())
    def begin(self, name: str, heap: bool) -> None:
        self.name, self.order = name, order(name)
        by_key = self.order.queue is None
        self.queue: Any = LeafQueue(self.order) if heap and by_key else queue_for(self.order)
        self.sieve = slow.SlowSieve()
        self.leaves: list[Leaf] = []
        self.now = 0

    def _free(self, leaf: Leaf) -> bool:
        return not leaf.locks and not leaf.children

    def _offer(self, leaf: Leaf) -> None:
        if self._free(leaf):
            self.queue.offer(leaf)
            self.sieve.offer(leaf)

    @rule(priority=st.integers(0, 2))
    def come(self, priority: int) -> None:
        self.now += 1
        leaf = Leaf(self.now, self.now, self.now, priority)
        self.leaves.append(leaf)
        self._offer(leaf)

    @rule(which=SOME, hit=st.booleans(), far=st.booleans())
    def use(self, which: int, hit: bool, far: bool) -> None:
        if self.leaves:
            leaf = self.leaves[which % len(self.leaves)]
            self.now += 300 if far else 1  # over the border of a span
            leaf.last_access, leaf.hits = self.now, leaf.hits + hit
            if not self.order.only_grows:
                self._offer(leaf)

    @rule(which=SOME)
    def hold_or_let_go(self, which: int) -> None:
        if self.leaves:
            leaf = self.leaves[which % len(self.leaves)]
            leaf.locks = 1 - leaf.locks
            self._offer(leaf)

    @rule(which=SOME)
    def bear_or_lose_a_child(self, which: int) -> None:
        if self.leaves:
            leaf = self.leaves[which % len(self.leaves)]
            leaf.children = () if leaf.children else (1,)
            self._offer(leaf)

    @rule()
    def pop(self) -> None:
        found = self.queue.pop()
        free = [leaf for leaf in self.leaves if self._free(leaf)]
        if self.name == "random":
            assert found in free if free else found is None
        elif self.name == "sieve":
            assert found is self.sieve.pop(self._free)
        else:
            assert found is (min(free, key=slow.ORDERS[self.name]) if free else None)
        if found is not None:
            assert found.queued is None
            self.leaves.remove(found)

    @rule()
    def clear(self) -> None:
        if self.now % 5:
            return
        self.queue.clear()
        self.sieve.clear()
        self.leaves.clear()
        assert self.queue.pop() is None

    @invariant()
    def nobody_is_forgotten(self) -> None:
        if hasattr(self, "queue"):
            named = {id(leaf) for key, leaf in self.queue.entries() if leaf.queued == key}
            assert {id(leaf) for leaf in self.leaves if self._free(leaf)} <= named


MACHINES = (HashedIndex, TreeOfRuns, TokenTree, WholePrompts, Orders)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_any_order_of_calls_gives_what_a_slow_model_gives(machine):
    run_state_machine_as_test(machine, settings=CI)


Draws = dict[str, tuple[int, Callable[[random.Random], dict[str, Any]]]]


def some(rng: random.Random) -> int:
    return rng.randrange(12)


def letters(rng: random.Random, most: int = 6) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randint(1, most))]


# rule -> (how often, its arguments); "begin" once. Longer and denser than what Hypothesis draws.
DRAWS: dict[type, Draws] = {
    HashedIndex: {
        "begin": (0, lambda rng: {"size": rng.randint(1, 3), "hashed": rng.choice(HASHES)}),
        "write": (2, lambda rng: {"name": rng.choice([None, "a", 1, True]), "letters": letters(rng)}),
        "publish": (4, lambda rng: {"which": some(rng), "start": rng.choice([0, 0, 1, 2]), "count": rng.randint(1, 6)}),
        "drop": (2, lambda rng: {"pages": rng.sample(range(1, PAGES + 1), rng.randrange(5))}),
        "match": (3, lambda rng: {"which": some(rng), "limit": rng.randrange(8)}),
        "window": (2, lambda rng: {"which": some(rng), "limit": rng.randrange(8), "need": rng.randint(1, 3)}),
        "clear": (0, lambda rng: {}),
    },
    TreeOfRuns: {
        "arrive": (4, lambda rng: {"name": rng.choice("ab"), "letters": letters(rng), "limit": rng.randrange(7)}),
        "grow": (3, lambda rng: {"which": some(rng), "letters": letters(rng, 3)}),
        "fork": (1, lambda rng: {"which": some(rng)}),
        "leave": (4, lambda rng: {"which": some(rng)}),
        "take_back": (1, lambda rng: {"which": some(rng), "keep": rng.randrange(6)}),
        "evict": (1, lambda rng: {"count": rng.randint(1, 5)}),
        "look": (2, lambda rng: {"name": rng.choice("ab"), "letters": letters(rng), "limit": rng.randrange(7)}),
    },
    TokenTree: {
        "begin": (
            0,
            lambda rng: {
                "name": rng.choice(sorted(slow.ORDERS)),
                "unit": rng.choice(["leaf", "page"]),
                "rest": rng.random() < 0.5,
                "width": rng.choice([1, 4]),
            },
        ),
        "match": (
            4,
            lambda rng: {
                "name": rng.choice([None, "a"]),
                "letters": letters(rng),
                "beyond": letters(rng, 2),
                "keep": some(rng) < 7,
            },
        ),
        "insert": (5, lambda rng: {"which": some(rng), "letters": letters(rng)}),
        "unlock": (3, lambda rng: {"which": some(rng)}),
        "touch_and_count": (2, lambda rng: {"which": some(rng)}),
        "border": (2, lambda rng: {"which": some(rng), "at": rng.randrange(7)}),
        "evict": (1, lambda rng: {"count": rng.randint(1, 6)}),
    },
    WholePrompts: {
        "begin": (0, lambda rng: {"digest": rng.choice([None, lambda data: 0, lambda data: sum(data) % 2])}),
        "ask": (
            3,
            lambda rng: {
                "letters": letters(rng, 2),
                "more": rng.randrange(2),
                "given": rng.random() < 0.3,
                "name": rng.choice([None, "a", 1, True]),
                "item": rng.choice([(), ((0, 1, "x"),), ((0, 1, True),), ((0, 1, 1),)]),
            },
        ),
        "remove": (2, lambda rng: {"which": some(rng)}),
    },
    Orders: {
        "begin": (0, lambda rng: {"name": rng.choice(sorted(ORDERS)), "heap": rng.random() < 0.5}),
        "come": (3, lambda rng: {"priority": rng.randrange(3)}),
        "use": (4, lambda rng: {"which": some(rng), "hit": rng.random() < 0.5, "far": rng.random() < 0.2}),
        "hold_or_let_go": (3, lambda rng: {"which": some(rng)}),
        "bear_or_lose_a_child": (1, lambda rng: {"which": some(rng)}),
        "pop": (2, lambda rng: {}),
    },
}  # fmt: skip


@pytest.mark.parametrize("machine", DRAWS, ids=lambda machine: f"long {machine.__name__}")
def test_long_random_runs_give_what_a_slow_model_gives(machine):
    draws = {name: draw for name, draw in DRAWS[machine].items() if name != "begin"}
    names, weights = list(draws), [draws[name][0] for name in draws]
    for seed in range(40):
        rng, one = random.Random(seed), machine()
        if "begin" in DRAWS[machine]:
            one.begin(**DRAWS[machine]["begin"][1](rng))
        check = one.nobody_is_forgotten if machine is Orders else one.alike
        for name in rng.choices(names, weights, k=150):
            getattr(one, name)(**draws[name][1](rng))
            check()


def test_draws_are_the_same_for_the_same_calls_and_reach_everyone():
    """The one order whose pop the model cannot name."""
    gone = []
    for _ in range(2):
        queue, rng = queue_for(order("random")), random.Random(3)
        leaves = [Leaf(number, number, number, 0) for number in range(40)]
        for leaf in leaves:
            queue.offer(leaf)
        for leaf in rng.sample(leaves, 10):
            leaf.locks = 1
        found = []
        while (leaf := queue.pop()) is not None:
            found.append(leaf.serial)
        gone.append(found)
    assert gone[0] == gone[1]
    assert len(set(gone[0])) == 30
    assert gone[0] != sorted(gone[0])
