"""The tree of runs: cuts, copies, holders and the order of eviction."""

from __future__ import annotations

import doctest
import random
import re
from array import array
from collections import Counter
from typing import Any

import pytest
from kvarena.prefix import run_tree
from kvarena.prefix.run_tree import LONGEST_RUN, Node, Run, RunTree
from kvarena.prefix.run_tree_check import holder_problems, text_above, tree_problems

WIDTH = 2


def pages(*ids: int) -> array[int]:
    return array("i", ids)


def text(letters: str) -> bytes:
    """Pages of two equal letters."""
    return "".join(letter * WIDTH for letter in letters).encode()


class Holder:
    """A sequence as far as the tree knows it."""

    def __init__(self, tree: RunTree) -> None:
        self.tree = tree
        self.parts: list[tuple[Run, int]] = []
        self.node = tree.root(None, WIDTH)
        self.node.users += 1

    def adopt(self, letters: str, limit: int | None = None) -> int:
        found = self.tree.match(self.node, text(letters), len(letters) if limit is None else limit)
        runs, node = self.tree.hold(found)
        self.parts = [(run, len(run.pages)) for run in runs]
        self._end_in(self.node if node is None else node)
        return found.num_pages

    def add(self, letters: str, *ids: int) -> list[int]:
        runs, node, duplicates = self.tree.publish(self.node, text(letters), 0, pages(*ids))
        self.parts += [(run, len(run.pages)) for run in runs]
        self._end_in(node)
        return list(duplicates)

    def leave(self) -> tuple[list[int], list[int]]:
        runs: list[Run] = []
        idle = sum(self.tree.let_go(run, count, runs) for run, count in reversed(self.parts))
        freed, cached = (
            [page for run in runs if (run.node is None) == gone for page in run.pages[::-1]] for gone in (1, 0)
        )
        assert idle == len(cached)
        self.node.users -= 1
        self.tree.prune(self.node)
        return freed, cached

    def _end_in(self, node: Node) -> None:
        self.node.users -= 1
        node.users += 1
        self.node = node


def idle_order(tree: RunTree) -> list[int]:
    return [page for run in tree.idle() for page in reversed(run.pages)]


def test_docstring_example() -> None:
    assert doctest.testmod(run_tree).failed == 0


def test_a_shared_beginning_is_cut_out_and_leaves_last() -> None:
    tree = RunTree()
    first, second = Holder(tree), Holder(tree)
    first.add("abcd", 1, 2, 3, 4)
    assert second.adopt("abxy") == 2
    second.add("xy", 5, 6)
    assert tree.shared == 2
    assert first.leave() == ([], [4, 3])
    assert second.leave() == ([], [6, 5, 2, 1])
    assert idle_order(tree) == [4, 3, 6, 5, 2, 1]
    assert list(tree.evict(5)) == [4, 3, 6, 5, 2]
    assert tree.match(tree.root(None, WIDTH), text("ab"), 2).num_pages == 1
    assert tree_problems(tree) == []


def test_an_idle_run_that_is_cut_keeps_its_place() -> None:
    tree = RunTree()
    for letters, ids in (("abc", (1, 2, 3)), ("xyz", (4, 5, 6))):
        holder = Holder(tree)
        holder.add(letters, *ids)
        holder.leave()
    again = Holder(tree)
    again.adopt("abc", limit=1)
    assert idle_order(tree) == [3, 2, 6, 5, 4]
    again.leave()
    assert idle_order(tree) == [3, 2, 6, 5, 4, 1]


def test_the_earliest_copy_serves_and_the_next_takes_over() -> None:
    tree = RunTree()
    holders = [Holder(tree) for _ in range(3)]
    assert [holder.add("ab", 2 * i + 1, 2 * i + 2) for i, holder in enumerate(holders)] == [[], [3, 4], [5, 6]]
    assert tree.duplicates == 4
    holders[0].leave()
    assert list(tree.evict(1)) == [2]
    found = tree.match(tree.root(None, WIDTH), text("ab"), 2)
    assert ([list(run.pages) for run in found.runs], found.num_pages, tree.duplicates) == ([[1], [4]], 2, 3)
    assert list(tree.evict(1)) == [1]
    found = tree.match(tree.root(None, WIDTH), text("ab"), 2)
    assert ([list(run.pages) for run in found.runs], found.num_pages, tree.duplicates) == ([[3], [4]], 2, 2)
    assert tree_problems(tree) == []


def test_what_is_taken_back_serves_nobody_and_what_follows_waits() -> None:
    tree = RunTree()
    first, second = Holder(tree), Holder(tree)
    first.add("abcd", 1, 2, 3, 4)
    second.adopt("abcd")
    second.add("e", 5)
    tree.unpublish(first.parts[0][0], 4, 1)
    root = tree.root(None, WIDTH)
    assert tree.match(root, text("abcde"), 5).num_pages == 1
    assert first.leave() == ([], [])
    third = Holder(tree)
    assert third.adopt("abcde") == 1
    third.add("bcd", 7, 8, 9)
    assert tree.match(root, text("abcde"), 5).num_pages == 5
    assert second.leave() == ([4, 3, 2], [5])
    assert third.leave() == ([], [9, 8, 7, 1])
    assert tree_problems(tree) == []
    assert sorted(tree.clear()) == [1, 5, 7, 8, 9]
    assert tree._roots == {}


def test_a_run_grows_only_while_nobody_could_tell() -> None:
    tree = RunTree()
    holder = Holder(tree)
    holder.add("a", 1)
    run = holder.parts[0][0]
    assert tree.extend(run, holder.node, text("b"), pages(2))
    holder.parts[0] = (run, 2)
    other = Holder(tree)
    other.adopt("ab")
    assert not tree.extend(run, holder.node, text("c"), pages(3))
    other.leave()
    holder.add("c", 3)
    assert not tree.extend(run, holder.node, text("d"), pages(4))
    run = holder.parts[-1][0]
    assert not tree.extend(run, holder.node, text("x" * LONGEST_RUN), pages(*range(10, 10 + LONGEST_RUN)))
    assert tree_problems(tree) == []


@pytest.mark.parametrize("count", [1, LONGEST_RUN, LONGEST_RUN + 1, 3 * LONGEST_RUN])
def test_runs_are_bounded(count: int) -> None:
    tree = RunTree()
    holder = Holder(tree)
    holder.add("q" * count, *range(1, count + 1))
    assert max(len(run.pages) for run, _ in holder.parts) <= LONGEST_RUN
    assert sum(n for _, n in holder.parts) == count


def test_items_stand_alone_and_separate() -> None:
    tree = RunTree()
    root = tree.root(None, WIDTH)
    root.users += 1
    runs, node, _ = tree.publish(root, text("aiib"), 0, pages(1, 2, 3, 4), {1: "cat", 2: "cat2"})
    node.users += 1
    assert [list(run.pages) for run in runs] == [[1], [2], [3], [4]]
    for extras, hit in (
        ({1: "cat", 2: "cat2"}, 4),
        ({1: "cat"}, 2),
        ({1: "dog", 2: "cat2"}, 1),
        ({}, 1),
        ({0: "x"}, 0),
    ):
        assert tree.match(root, text("aiib"), 4, extras).num_pages == hit
    assert tree.match(root, text("aiib"), 3, {1: "cat", 2: "cat2"}).num_pages == 3
    assert tree.match(root, text("aiib"), 1, {3: "far"}).num_pages == 1
    assert text_above(node) == [b"aa", (b"ii", "cat"), (b"ii", "cat2"), b"bb"]


@pytest.mark.parametrize("seed", range(8))
def test_random_holders_keep_every_invariant(seed: int) -> None:
    rng, tree, free = random.Random(seed), RunTree(), list(range(1, 61))
    holders: list[Holder] = []
    for _ in range(300):
        if holders and rng.random() < 0.45:
            freed, _ = holders.pop(rng.randrange(len(holders))).leave()
            free += freed
        else:
            letters = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 8)))
            holder = Holder(tree)
            held = holder.adopt(letters, limit=rng.randrange(len(letters) + 1))
            need = len(letters) - held
            if need > len(free):
                free += tree.evict(min(need - len(free), tree.evictable))
            take = [free.pop() for _ in range(min(need, len(free)))]
            holder.add(letters[held : held + len(take)], *take)
            holders.append(holder)
        assert tree_problems(tree) == []
        runs: Counter[Run] = Counter()
        for holder in holders:
            for last, count in holder.parts:
                run: Run | None = last
                while count > 0 and run is not None:
                    runs[run] += 1
                    count -= len(run.pages)
                    run = run.front
        assert list(holder_problems(tree, runs, Counter(id(holder.node) for holder in holders))) == []
        held_pages = {page for run in runs for page in run.pages}
        assert sorted([*free, *idle_order(tree), *held_pages]) == list(range(1, 61))


def planted() -> tuple[RunTree, Any]:
    tree = RunTree()
    holder, gone, copy = Holder(tree), Holder(tree), Holder(tree)
    holder.add("ab", 1, 2)
    gone.add("xyz", 3, 4, 5)
    copy.add("ab", 6, 7)
    gone.leave()
    assert tree_problems(tree) == []
    return tree, holder


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda tree, run: setattr(tree, "evictable", 9), "evictable is 9, 3 pages"),
        (lambda tree, run: setattr(tree, "duplicates", 0), "duplicates is 0, counted 2"),
        (lambda tree, run: run.pages.pop(), "does not fit its node of 2 pages"),
        (lambda tree, run: setattr(run, "refs", 0), "is leaked"),
        (lambda tree, run: tree._link(run, tree._ends), "has holders"),
        (lambda tree, run: setattr(next(tree.idle()), "refs", 1), "is idle and has holders"),
        (lambda tree, run: tree._unlink(next(tree.idle())), "is leaked"),
        (lambda tree, run: setattr(next(tree.idle()), "before", run), "does not name the run before it"),
        (lambda tree, run: setattr(tree._ends, "before", run), "does not end with the run"),
        (lambda tree, run: setattr(run.node, "edge", b"zzbb"), "does not begin with its key"),
        (lambda tree, run: run.node.parent.children.update({b"qq": run.node}), "stands under key b'qq'"),
        (lambda tree, run: run.node.children.update({b"cc": Node(b"cc", run.node, b"cc", 2)}), "leads nowhere"),
        (lambda tree, run: run.node.copies.remove(run), "duplicates is 2, counted 0"),
    ],
)
def test_planted_faults_are_found(plant: Any, message: str) -> None:
    tree, holder = planted()
    plant(tree, holder.parts[0][0])
    assert re.search(message, "; ".join(tree_problems(tree)))
