"""The page index: who serves which prefix, whatever the hash function is worth."""

from __future__ import annotations

import doctest
import random
from array import array
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from kvarena.prefix import hash_chain, page_text
from kvarena.prefix.hash_chain import HashChainIndex, PageChain
from kvarena.prefix.page_text import PageText, encode

SIZE = 2


def constant(data: bytes) -> bytes:
    return b"same"


def make_index(hash_fn: Any = "xxh3_64", num_pages: int = 64) -> HashChainIndex:
    return HashChainIndex(num_pages, SIZE, hash_fn)


def chain_of(index: HashChainIndex, tokens: list[int], **keys: Any) -> PageChain:
    chain = index.chain(keys.get("namespace"), tuple(keys.get("extra_keys", ())))
    chain.extend(array("i", tokens), len(tokens) // SIZE)
    return chain


@pytest.fixture(params=["xxh3_64", "xxh3_128", "sha256", constant], ids=["xxh3_64", "xxh3_128", "sha256", "constant"])
def index(request: pytest.FixtureRequest) -> HashChainIndex:
    return make_index(request.param)


@pytest.mark.parametrize("module", [hash_chain, page_text])
def test_docstring_examples(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def test_the_earliest_inserted_copy_serves_and_a_returning_one_queues_behind(index: HashChainIndex) -> None:
    chain = chain_of(index, [1, 2])
    for page in (5, 3, 9):
        index.publish([page], chain, 0)
    assert (index.match(chain, 1), index.duplicates) == ([5], 2)
    index.drop([5])
    assert index.match(chain, 1) == [3]
    assert index.publish([5], chain, 0) == [5]
    index.drop([3])
    assert index.match(chain, 1) == [9]
    index.drop([9])
    assert (index.match(chain, 1), index.duplicates) == ([5], 0)
    index.drop([5])
    assert (index.match(chain, 1), len(index)) == ([], 0)


def test_a_key_left_with_one_page_keeps_insertion_order(index: HashChainIndex) -> None:
    chain = chain_of(index, [1, 2])
    index.publish([4], chain, 0)
    index.publish([7], chain, 0)
    index.drop([4])
    index.publish([2], chain, 0)
    assert index.match(chain, 1) == [7]


def test_publishing_a_page_again_under_its_key_changes_nothing(index: HashChainIndex) -> None:
    chain = chain_of(index, [1, 2])
    index.publish([4], chain, 0)
    index.publish([7], chain, 0)
    assert index.publish([4], chain, 0) == []
    assert (index.match(chain, 1), index.duplicates, len(index)) == ([4], 1, 2)


def test_publishing_a_page_under_another_key_is_refused() -> None:
    index = make_index()
    index.publish([4], chain_of(index, [1, 2]), 0)
    with pytest.raises(ValueError, match="page 4 already serves"):
        index.publish([4], chain_of(index, [3, 4]), 0)


def test_equal_pages_after_different_beginnings_are_different(index: HashChainIndex) -> None:
    first, second = chain_of(index, [1, 1, 7, 7]), chain_of(index, [2, 2, 7, 7])
    index.publish([1, 2], first, 0)
    assert index.match(second, 2) == []
    assert index.find(second, 1) == 0
    index.publish([3, 4], second, 0)
    assert (index.match(first, 2), index.match(second, 2), index.duplicates) == ([1, 2], [3, 4], 0)


def test_a_page_is_found_when_those_before_it_are_gone(index: HashChainIndex) -> None:
    chain = chain_of(index, [1, 1, 2, 2, 3, 3, 4, 4])
    index.publish([1, 2, 3, 4], chain, 0)
    index.drop([1, 2])
    other = chain_of(index, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    assert index.match(other, 5) == []
    assert index.match_window(other, 5, 2) == (2, [3, 4])
    assert index.match_window(chain_of(index, [9, 9, 2, 2, 3, 3, 4, 4]), 4, 1) == (0, [])


@pytest.mark.parametrize(
    ("cached", "need", "expected"),
    [
        ([0, 1, 2, 3], 2, (2, [3, 4])),
        ([0, 1], 3, (0, [1, 2])),
        ([1, 2], 3, (0, [])),
        ([0, 2, 3], 2, (2, [3, 4])),
        ([0, 1, 3], 2, (0, [1, 2])),
        ([], 1, (0, [])),
    ],
)
def test_a_window_takes_the_rightmost_run_that_is_long_enough(
    index: HashChainIndex, cached: list[int], need: int, expected: tuple[int, list[int]]
) -> None:
    chain = chain_of(index, [1, 1, 2, 2, 3, 3, 4, 4])
    for position in cached:
        index.publish([position + 1], chain, position)
    assert index.match_window(chain, 4, need) == expected


def test_namespaces_isolate_whole_chains(index: HashChainIndex) -> None:
    names: list[Any] = [None, "X", b"X", ("lora", "X"), ("salt", "X"), (("lora", ("X", "a")),), (("lora", ("X", "b")),)]
    names += [0, False, 0.0, 1, True, (), ("",), "", ("ab", "c"), ("a", "bc"), frozenset({1}), frozenset({2})]
    for page, name in enumerate(names, 1):
        index.publish([page], chain_of(index, [7, 8], namespace=name), 0)
    assert index.duplicates == 0
    assert [index.match(chain_of(index, [7, 8], namespace=name), 1) for name in names] == [
        [page] for page in range(1, len(names) + 1)
    ]


def test_values_that_hash_alike_but_differ_are_kept_apart() -> None:
    class Twin:
        def __hash__(self) -> int:
            return 1

    one, other = Twin(), Twin()
    assert encode(one) == encode(other)
    index = make_index()
    index.publish([1], chain_of(index, [7, 8], namespace=one), 0)
    index.publish([2], chain_of(index, [7, 8], extra_keys=[(0, 2, one)]), 0)
    assert index.match(chain_of(index, [7, 8], namespace=other), 1) == []
    assert index.match(chain_of(index, [7, 8], namespace=one), 1) == [1]
    assert index.match(chain_of(index, [7, 8], extra_keys=[(0, 2, other)]), 1) == []
    assert index.match(chain_of(index, [7, 8], extra_keys=[(0, 2, one)]), 1) == [2]


def test_encodings_of_different_values_differ() -> None:
    values: list[Any] = [
        None,
        "",
        b"",
        (),
        0,
        False,
        0.0,
        "N",
        "s1:a",
        "a",
        b"a",
        ("a",),
        (("a",),),
        ("a", ()),
        -1,
        "-1",
    ]
    values += [("a", "b"), ("ab",), ("", "ab"), 2**80, 1.5, "1.5", True, 1, ("lora", ("n", "p")), ("lora", "n", "p")]
    assert len({encode(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    ("mine", "theirs", "shared_pages"),
    [
        ([(2, 2, "a")], [(2, 2, "b")], 1),
        ([(2, 2, "a")], [(2, 2, "a")], 4),
        ([(2, 2, "a")], [(3, 2, "a")], 1),
        ([(2, 2, "a")], [], 1),
        ([(1, 6, "a")], [(1, 6, "b")], 0),
        ([(7, 1, "a")], [(7, 1, 0x10005)], 3),
        ([(0, 1, "a"), (6, 1, "b")], [(6, 1, "b"), (0, 1, "a")], 4),
        ([(0, 1, "a"), (1, 1, "b")], [(0, 1, "b"), (1, 1, "a")], 0),
    ],
)
def test_pages_are_shared_up_to_the_first_item_that_differs(
    index: HashChainIndex, mine: list[Any], theirs: list[Any], shared_pages: int
) -> None:
    tokens = [5] * 8
    index.publish([1, 2, 3, 4], chain_of(index, tokens, extra_keys=mine), 0)
    assert len(index.match(chain_of(index, tokens, extra_keys=theirs), 4)) == shared_pages


@pytest.mark.parametrize("item", [(-1, 2, "a"), (0, 0, "a"), (3, -1, "a")])
def test_impossible_items_are_refused(item: Any) -> None:
    with pytest.raises(ValueError, match="extra_keys"):
        make_index().chain(None, (item,))


def test_given_ids_are_keys_and_never_meet_hashed_ones(index: HashChainIndex) -> None:
    given = index.chain(given=True)
    given.extend_given(array("i", [4, 5, 6]), 3)
    index.publish([1, 2, 3], given, 0)
    again = index.chain(given=True)
    again.extend_given(array("i", [4, 5, 9]), 3)
    walled = index.chain("tenant", given=True)
    walled.extend_given(array("i", [4, 5, 6]), 3)
    assert (index.match(again, 3), index.match(walled, 3)) == ([1, 2], [])
    assert index.match(chain_of(index, [4, 5, 6, 6]), 2) == []


def test_each_page_is_hashed_once() -> None:
    calls: list[int] = []

    def counting(data: bytes) -> bytes:
        calls.append(len(data))
        return b"%d" % hash(data)

    index = make_index(counting)
    tokens = array("i", range(10))
    chain = index.chain()
    before = len(calls)
    for num_pages in (1, 1, 3, 2, 5):
        chain.extend(tokens, num_pages)
    assert (len(calls) - before, len(chain.keys)) == (1 + 5, 5)  # what stands before the first page, and five pages
    assert chain.keys == chain_of(index, list(range(10))).keys


def test_a_chain_knows_whether_it_still_fits() -> None:
    index = make_index()
    chain = chain_of(index, [1, 2, 3, 4], namespace="n", extra_keys=((0, 1, "x"),))
    longer = array("i", [1, 2, 3, 4, 5])
    assert chain.fits(longer, "n", ((0, 1, "x"),))
    assert not chain.fits(array("i", [1, 2, 3]), "n", ((0, 1, "x"),))
    assert not chain.fits(array("i", [1, 2, 3, 9]), "n", ((0, 1, "x"),))
    assert not chain.fits(longer, "m", ((0, 1, "x"),))
    assert not chain.fits(longer, "n", ())


@pytest.mark.parametrize(
    ("hash_fn", "message"), [("md5", "expected one of xxh3_64, xxh3_128, sha256"), (lambda data: 7, "int")]
)
def test_a_bad_hash_function_is_named(hash_fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_index(hash_fn)


class NaiveIndex:
    """(text of the whole prefix, page) in order of insertion."""

    def __init__(self) -> None:
        self.rows: list[tuple[tuple[int, ...], int]] = []

    def find(self, prefix: tuple[int, ...]) -> int:
        return next((page for text, page in self.rows if text == prefix), 0)

    def surplus(self) -> int:
        return len(self.rows) - len({text for text, _ in self.rows})


def two_bits(data: bytes) -> bytes:
    return bytes([sum(data) & 3])


@pytest.mark.parametrize("hash_fn", ["xxh3_64", constant, two_bits], ids=["xxh3", "constant", "two_bits"])
@pytest.mark.parametrize("seed", range(4))
def test_random_inserts_and_drops_agree_with_a_list(hash_fn: Callable[[bytes], bytes] | str, seed: int) -> None:
    rng = random.Random(seed)
    index, naive, free = make_index(hash_fn), NaiveIndex(), list(range(1, 65))
    for _ in range(600):
        tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 5))]
        chain, position = chain_of(index, tokens), rng.randrange(len(tokens) // SIZE)
        if free and rng.random() < 0.55:
            page = free.pop(rng.randrange(len(free)))
            index.publish([page], chain, position)
            naive.rows.append((tuple(tokens[: (position + 1) * SIZE]), page))
        elif naive.rows:
            page = naive.rows.pop(rng.randrange(len(naive.rows)))[1]
            assert index.drop([page, page]) == [page]
            free.append(page)
        prefixes = [tuple(tokens[: end * SIZE]) for end in range(1, len(tokens) // SIZE + 1)]
        assert [index.find(chain, i) for i in range(len(prefixes))] == [naive.find(prefix) for prefix in prefixes]
        assert (len(index), index.duplicates) == (len(naive.rows), naive.surplus())
        assert index.problems() == []
    assert sorted(index.clear()) == sorted(page for _, page in naive.rows)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda index: index.keys.__setitem__(1, None), "page 1"),
        (lambda index: index._texts.__setitem__(1, None), "key and text"),
        (lambda index: index._positions.__setitem__(2, 0), "not the hash of its text"),
        (lambda index: index._first.pop(index.keys[1]), "page 1: key"),
        (lambda index: index._texts[1].raw.__setitem__(0, 9), "not the hash of its text"),
        (lambda index: setattr(index, "duplicates", 3), "duplicates is 3, counted 0"),
    ],
)
def test_planted_faults_are_found(plant: Callable[[Any], Any], message: str) -> None:
    index = make_index()
    index.publish([1, 2], chain_of(index, [1, 2, 3, 4]), 0)
    assert index.problems() == []
    plant(index)
    assert any(message in problem for problem in index.problems())


def test_texts_agree_only_where_everything_agrees() -> None:
    texts = [PageText(name, keys, SIZE) for name in (None, "n") for keys in ((), ((0, 1, "x"),))]
    for text in texts:
        assert text.raw is not None
        text.raw += array("i", [1, 2]).tobytes()
    assert not any(left.same_prefix(right, 8, 1) for left, right in combinations(texts, 2))
    longer = PageText(None, (), SIZE)
    assert longer.raw is not None
    longer.raw += array("i", [1, 2, 3, 4]).tobytes()
    assert longer.same_prefix(texts[0], 8, 1)
    assert not texts[0].same_prefix(longer, 16, 2)


def blunt(data: bytes) -> bytes:
    """Tells three pages apart, so that most texts share their keys with others."""
    return bytes([sum(data) % 3])


@pytest.mark.parametrize("hash_fn", ["xxh3_64", "sha256", constant, blunt])
@pytest.mark.parametrize("seed", range(8))
def test_a_gapless_index_finds_what_one_finds_that_looks_at_every_page(hash_fn: Any, seed: int) -> None:
    rng = random.Random(seed)
    gapless, thorough = HashChainIndex(64, SIZE, hash_fn, gapless=True), make_index(hash_fn)
    free, cached = list(range(1, 65)), list[list[int]]()
    for _ in range(150):
        tokens = [rng.randrange(2) for _ in range(SIZE * rng.randint(1, 6))]
        chains = [chain_of(index, tokens) for index in (gapless, thorough)]
        hit = gapless.match(chains[0], len(tokens) // SIZE)
        assert hit == thorough.match(chains[1], len(tokens) // SIZE)
        for own in cached:  # what is hit goes to the end of the order, the last page of a row first
            own[:] = [page for page in own if page not in hit]
        while len(free) < len(tokens) // SIZE:
            oldest = next(own for own in cached if own)
            page = oldest.pop()
            assert gapless.drop([page]) == thorough.drop([page]) == [page]
            free.append(page)
        new = [free.pop() for _ in range(len(tokens) // SIZE - len(hit))]
        for index, chain in zip((gapless, thorough), chains, strict=True):
            index.publish(new, chain, len(hit))
        cached.append([*hit, *new])
        assert (gapless.problems(), gapless.duplicates) == ([], thorough.duplicates)
    assert sorted(gapless.clear()) == sorted(thorough.clear())


def test_a_broken_promise_is_found() -> None:
    index = HashChainIndex(8, SIZE, gapless=True)
    chain = chain_of(index, [1, 2, 3, 4, 5, 6])
    index.publish([4, 5, 6], chain, 0)
    assert index.problems() == []
    index.drop([5])
    assert index.problems() == ["page 6: its text up to position 1 is not cached"]
    index.gapless = False
    assert index.problems() == []
    index.clear()
    index.gapless = True
    index.publish([5], chain, 1)
    assert index.problems() == ["page 5: its text up to position 0 is not cached"]


def test_colliding_texts_are_told_apart_in_a_gapless_index_until_it_is_empty_and_after() -> None:
    def parity(data: bytes) -> bytes:
        """Of the last token."""
        return bytes(byte % 2 for byte in data[-4:-3])

    index = HashChainIndex(8, SIZE, parity, gapless=True)
    for _ in range(2):
        one, other = chain_of(index, [1, 1, 7, 7]), chain_of(index, [3, 3, 5, 5])
        assert one.keys == other.keys
        index.publish([1, 2], one, 0)
        assert index.match(other, 2) == []
        index.publish([3, 4], other, 0)
        assert (index.match(one, 2), index.match(other, 2), index.problems()) == ([1, 2], [3, 4], [])
        index.drop([2, 1])
        assert (index.match(one, 2), index.match(other, 2)) == ([], [3, 4])
        assert index.match(chain_of(index, [3, 3, 9, 9]), 2) == [3]
        index.clear()
