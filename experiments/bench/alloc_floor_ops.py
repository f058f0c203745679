"""Floors of single operations: what the operations of the same names cannot leave out, as the fastest code known.

`alloc_floor` has those of whole replays.
"""

from __future__ import annotations

import itertools
from array import array
from functools import partial
from operator import itemgetter

import xxhash
from kvarena.allocators.interface import Commit, Match, Release, Released, Reservation, Sequence
from kvarena.experiments.bench.alloc_floor import TOKEN_BYTES, Hollow, Node
from kvarena.experiments.bench.alloc_load import Prompt
from kvarena.experiments.bench.alloc_ops import DECODES, Op, Timed, prompts, sequences_of


def floor_ops() -> list[Op]:
    """The operations that have a floor."""
    ops = [
        *(Op("insert 4,096 new tokens", "token", size, partial(_insert, size, 4096)) for size in (1, 16)),
        *(Op("admit 4,096 uncached tokens", "token", size, partial(_admit, size, 4096)) for size in (1, 16)),
    ]
    for length in (4096, 32_768):
        ops.append(Op(f"look up {length:,} cached tokens", "block hashed", 16, partial(_look_up, length)))
    ops.append(Op("free a request of 100 pages", "block runs", 16, _release))
    return [*ops, Op("decode step of 256", "block hashed", 16, _decode_step)]


def _insert(page_size: int, length: int) -> Timed:
    """The key, the tree's page ids and the answer's copied once each; one node, one place under its parent."""
    seq = sequences_of(length)()
    row, width, root = array("i", range(length // page_size)), TOKEN_BYTES * page_size, Node(None, b"", array("i"), 0)

    def work(_: None) -> list[Commit]:
        edge = seq.token_ids.tobytes()
        root.children[edge[:width]] = Node(root, edge, row[:], 1)
        return [Commit(seq, row[:])]

    return Timed(root.children.clear, work)


def _admit(page_size: int, length: int) -> Timed:
    """The sequence, its key bytes, its pages in the row and in the answer."""
    verbs, fresh, live = Hollow(page_size), prompts(length), list[Sequence]()

    def before() -> Prompt:
        verbs.release(live, Release.ABORT)
        live.clear()
        return fresh()

    def work(tokens: Prompt) -> bytes:
        live.append(Sequence("p", tokens))
        verbs.pin(live[0])
        verbs.reserve([(live[0], length)])
        return live[0].token_ids.tobytes()

    return Timed(before, work)


def _look_up(length: int, page_size: int = 16) -> Timed:
    """All keys of a request found in a dict at once, its text compared once, the answer."""
    tokens = array("i", prompts(length)().tobytes())
    text = tokens.tobytes()
    found = {hash(text[: end * TOKEN_BYTES]): end for end in range(page_size, length + 1, page_size)}
    keys = list(found)

    def work(_: None) -> Match | None:
        pages = itemgetter(*keys)(found)
        return Match(length, pages) if text.startswith(memoryview(tokens)) else None

    return Timed(lambda: None, work)


def _release(num_pages: int = 100, times: int = 32) -> Timed:
    """A row found and dropped, its pages told backwards without a copy."""
    rows: dict[str, array[int]] = {}

    def before() -> list[str]:
        rows.update((f"r{number}", array("i", range(num_pages))) for number in range(times))
        return list(rows)

    def work(names: list[str]) -> None:
        for name in names:
            Released((), memoryview(rows.pop(name))[::-1])

    return Timed(before, work, times)


def _decode_step(page_size: int = 16) -> Timed:
    """Of 256 members those whose page is full: it is cut, hashed and entered, a page taken, an answer made."""
    due = DECODES // page_size
    tokens = array("i", range(2 * page_size))
    seqs = [Sequence(f"r{number}", tokens) for number in range(due)]
    first: dict[int, int] = {}
    numbers = itertools.count(1)

    def work(_: None) -> list[Reservation]:
        answers = []
        for seq in seqs:
            page = next(numbers)
            key = xxhash.xxh3_64_intdigest(seq.token_ids[page_size : 2 * page_size].tobytes(), page)
            first[key] = page
            answers.append(Reservation(seq, array("i", (page,))))
        return answers

    return Timed(first.clear, work)
