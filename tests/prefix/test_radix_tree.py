"""The radix tree by itself: match, insert, split, lock and evict, in pages."""

import doctest
import random
import sys
from array import array

import kvarena.prefix.radix_tree as radix_tree
import pytest
from kvarena.prefix.radix_tree import Node, RadixTree, common_pages

WIDTH = 4  # one int32 a page


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def pages(*ids: int) -> "array[int]":
    return array("i", ids)


def store(tree: RadixTree, tokens: tuple[int, ...], ids: tuple[int, ...], namespace: object = None) -> Node:
    """Insert from the root and let go."""
    root = tree.root(namespace)
    tree.lock(root)
    node = tree.insert(root, key(*tokens), WIDTH, pages(*ids))[0]
    tree.unlock(node)
    assert list(tree.faults()) == []
    return node


def grow(tree: RadixTree, text: bytes, width: int) -> Node:
    """Cache pages 1, 2, ... under `text`, held by nobody."""
    root = tree.root()
    tree.lock(root)
    node = tree.insert(root, text, width, pages(*range(1, len(text) // width + 1)))[0]
    tree.unlock(node)
    return node


def evicted(tree: RadixTree, num_pages: int) -> list[list[int]]:
    runs = [list(run) for run in tree.evict(num_pages)]
    assert list(tree.faults()) == []
    return runs


def test_doctests() -> None:
    assert doctest.testmod(radix_tree).failed == 0


def test_a_match_inside_an_edge_splits_it_and_changes_no_count() -> None:
    tree = RadixTree()
    store(tree, (1, 2, 3, 4), (11, 12, 13, 14))
    assert list(tree.match(key(1, 2, 9), WIDTH)[1]) == [11, 12]
    assert [list(node.pages) for node in tree.nodes()] == [[11, 12], [13, 14]]
    assert tree.evictable_pages == 4
    assert list(tree.faults()) == []


def test_a_match_never_ends_inside_a_page() -> None:
    tree = RadixTree()
    root = tree.root()
    tree.lock(root)
    tree.unlock(tree.insert(root, key(1, 2, 3, 4), 2 * WIDTH, pages(7, 8))[0])
    assert list(tree.match(key(1, 2, 3, 9), 2 * WIDTH)[1]) == [7]
    assert list(tree.match(key(1, 9, 3, 4), 2 * WIDTH)[1]) == []
    assert list(tree.faults()) == []


def test_no_match_touches_and_splits_nothing() -> None:
    tree = RadixTree()
    node = store(tree, (1, 2), (1, 2))
    before = node.last_access
    for tokens in ((), (9,), (2, 1)):
        assert not tree.match(key(*tokens), WIDTH)[1]
    assert node.last_access == before
    assert len(list(tree.nodes())) == 1


def test_a_match_looks_at_no_more_pages_than_it_is_asked_to() -> None:
    """At every place in and behind two edges, the part of a page behind the last whole one included."""
    for width in (WIDTH, 2 * WIDTH):
        for asked in range(5):
            cut, whole = RadixTree(), RadixTree()
            for tree in (cut, whole):
                grow(tree, key(*range(4), *range(10, 14)), width)
                tree.match(key(*range(4)), width)
            text = key(*range(4), *range(10, 15))
            node, found = cut.match(text, width, None, asked)
            twin, expected = whole.match(text[: asked * width], width)
            assert (list(found), node.edge) == (list(expected), twin.edge)
            assert sorted(each.edge for each in cut.nodes()) == sorted(each.edge for each in whole.nodes())


def test_pages_once_shown_stay_as_they_were() -> None:
    """A caller may keep a view of a node's pages: eviction by the page and splits make new arrays."""
    tree = RadixTree(eviction_unit="page")
    node = store(tree, (1, 2, 3, 4), (11, 12, 13, 14))
    shown = memoryview(node.pages)
    assert evicted(tree, 1) == [[14]]
    later = memoryview(node.pages)
    tree.match(key(1), WIDTH)
    assert evicted(tree, 1) == [[13]]
    assert (list(shown), list(later)) == ([11, 12, 13, 14], [11, 12, 13])


def test_unlocking_tells_how_much_of_the_path_nobody_holds() -> None:
    tree = RadixTree()
    store(tree, (1, 2, 3, 4), (1, 2, 3, 4))
    upper, lower = tree.match(key(1, 2), WIDTH)[0], tree.match(key(1, 2, 3, 4), WIDTH)[0]
    tree.lock(upper)
    tree.lock(lower)
    assert tree.unlock(lower) == 2
    tree.lock(lower)
    assert tree.unlock(upper) == 0
    assert tree.unlock(lower) == 4


def test_inserting_again_gives_up_the_new_pages_node_by_node() -> None:
    tree = RadixTree()
    store(tree, (1, 2, 3, 4), (11, 12, 13, 14))
    store(tree, (1, 2, 8), (21, 22, 23))
    row = pages(31, 32, 33, 34, 35)
    root = tree.root()
    tree.lock(root)
    node, duplicates, new_from = tree.insert(root, key(1, 2, 3, 4, 5), WIDTH, row)
    assert [list(run) for run in duplicates] == [[31, 32], [33, 34]]
    assert list(row) == [11, 12, 13, 14, 35]
    assert new_from == 4
    assert list(tree.path_pages(node)) == [11, 12, 13, 14, 35]
    assert tree.evictable_pages == 1


def test_an_insert_goes_on_from_a_locked_node() -> None:
    tree = RadixTree()
    node = store(tree, (1, 2), (1, 2))
    tree.lock(node)
    node, _, _ = tree.insert(node, key(3, 4), WIDTH, pages(1, 2, 3, 4), start=2)
    assert list(tree.path_pages(node)) == [1, 2, 3, 4]
    assert tree.evictable_pages == 0
    assert tree.unlock(node) == 4
    assert tree.evictable_pages == 4


def test_a_lock_keeps_the_node_and_all_above_it_and_nothing_below() -> None:
    """The kind of radix-04 and radix-06: the given node itself is held, the rest of a split edge is not."""
    tree = RadixTree()
    store(tree, (1, 2, 3, 4), (1, 2, 3, 4))
    node = tree.match(key(1, 2), WIDTH)[0]
    tree.lock(node)
    assert tree.evictable_pages == 2
    assert evicted(tree, 100) == [[3, 4]]
    assert evicted(tree, 100) == []
    tree.unlock(node)
    assert evicted(tree, 100) == [[1, 2]]


def test_locks_nest_and_survive_splits() -> None:
    tree = RadixTree()
    node = store(tree, tuple(range(8)), tuple(range(1, 9)))
    for _ in range(3):
        tree.lock(node)
    for cut in (6, 3, 1):
        tree.match(key(*range(cut)), WIDTH)
        assert tree.evictable_pages == 0
    for _ in range(2):
        assert tree.unlock(node) == 0
    assert evicted(tree, 100) == []
    assert tree.unlock(node) == 8
    assert tree.evictable_pages == 8


def test_leaf_by_leaf_least_recently_used_first_a_parent_after_its_last_child() -> None:
    tree = RadixTree()
    store(tree, (1, 2, 3), (1, 2, 3))
    store(tree, (1, 2, 4), (5, 6, 4))
    store(tree, (9,), (9,))
    assert evicted(tree, 1) == [[3]]
    assert evicted(tree, 2) == [[4], [1, 2]]
    assert evicted(tree, 100) == [[9]]


def test_the_cut_off_rest_of_a_split_is_as_fresh_as_the_design_says() -> None:
    """The kind of radix-07: under SGLang's rule the rest counts as used, under the plain rule it is the oldest."""
    first = {}
    for touches in (True, False):
        tree = RadixTree(split_touches_suffix=touches)
        store(tree, (1, 2, 3, 4), (1, 2, 3, 4))
        store(tree, (9,), (9,))
        tree.match(key(1, 2), WIDTH)
        first[touches] = evicted(tree, 1)
    assert first == {True: [[9]], False: [[3, 4]]}


def test_page_wise_eviction_takes_tails_and_stops_at_the_demand() -> None:
    tree = RadixTree(eviction_unit="page")
    store(tree, (1, 2, 3), (1, 2, 3))
    store(tree, (7, 8), (7, 8))
    assert evicted(tree, 2) == [[3, 2]]
    assert list(tree.match(key(1, 2, 3), WIDTH)[1]) == [1]
    assert evicted(tree, 2) == [[8, 7]]
    assert evicted(tree, 2) == [[1]]
    assert tree.evictable_pages == 0


def test_namespaces_are_disjoint_and_go_with_their_content() -> None:
    tree = RadixTree()
    store(tree, (1, 2), (1, 2), "a")
    store(tree, (1, 2), (3, 4), "b")
    assert list(tree.match(key(1, 2), WIDTH, "b")[1]) == [3, 4]
    assert evicted(tree, 4) == [[1, 2], [3, 4]]
    assert tree.roots == {}


def test_a_held_root_stays_until_it_is_let_go() -> None:
    tree = RadixTree()
    root = tree.match(key(1), WIDTH, "a")[0]
    tree.lock(root)
    node = tree.insert(root, key(1), WIDTH, pages(1))[0]
    tree.unlock(node)
    assert evicted(tree, 1) == [[1]]
    assert tree.roots == {}


def test_clear_forgets_everything() -> None:
    tree = RadixTree()
    store(tree, (1, 2), (1, 2))
    tree.clear()
    assert tree.evictable_pages == 0
    assert not tree.match(key(1, 2), WIDTH)[1]
    assert evicted(tree, 1) == []


@pytest.mark.parametrize("width", [1, 4, 12, 64])
def test_common_pages_finds_the_first_different_page(width: int) -> None:
    rng = random.Random(width)
    for _ in range(500):
        size = rng.randint(1, 40)
        edge = rng.randbytes(size * width)
        same = rng.randint(1, size)
        tail = b"" if same == size and rng.random() < 0.5 else bytes([edge[same * width] ^ 1 if same < size else 7])
        other = rng.randbytes(3) + edge[: same * width] + tail + rng.randbytes(rng.randint(0, 99))
        expected = 0
        while (
            edge[expected * width : (expected + 1) * width] == other[3 + expected * width : 3 + (expected + 1) * width]
        ):
            expected += 1
            if expected == size:
                break
        assert common_pages(edge, other, 3, width) == expected


def test_paths_longer_than_the_recursion_limit_work() -> None:
    tree = RadixTree()
    depth = sys.getrecursionlimit() + 500
    root = tree.root()
    tree.lock(root)
    node: Node = root
    row = pages(*range(1, depth + 1))
    for at in range(depth):
        node = tree.insert(node, key(at), WIDTH, row, start=at)[0]
    assert len(tree.match(key(*range(depth)), WIDTH)[1]) == depth
    assert tree.unlock(node) == depth
    assert list(tree.faults()) == []
    assert len(evicted(tree, depth)) == depth
