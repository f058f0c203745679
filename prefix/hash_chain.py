"""Chained page hashes -> pages, duplicates kept: the prefix index of vLLM's design.

A page is found by a key that stands for its own tokens and for everything before it: the digest of (digest of the
page before, tokens, extra keys). Several pages may hold the same content; the earliest inserted one that is still
here serves. Nothing is merged, and a look-up changes nothing.

The hash only finds candidates; what decides is the text. Each cached page remembers whose text it holds and how far
into that text it stands, so a hit is confirmed by comparing bytes, the chain before included, also when the pages
before it are gone. A colliding or constant hash function costs time and never changes a decision.

In a gapless index one comparison will do. It is one where, of each cached page, all text before it is cached too,
and where no two texts share a key (which is noticed when the second one is published):

    look-up   k1 -> 7   k2 -> 3   k3 -> 9     9 holds the text up to the third page: compared
                                              so its first two pages are here under k1 and k2, and under no key is
                                              another text: 7 and 3 hold them
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from operator import itemgetter
from typing import Any

from kvarena.prefix import hash_chain_check
from kvarena.prefix.page_text import TOKEN_BYTES, HashFn, PageText, encode, resolve_hash

Key = Hashable  # bytes or int: a page hash. int or (scope, int): an id that a trace gave


class PageChain:
    """Keys of the whole pages of one sequence, each computed once; grows as tokens are appended."""

    __slots__ = ("_extra_keys", "index", "keys", "text")

    def __init__(
        self,
        index: HashChainIndex,
        namespace: Hashable = None,
        extra_keys: tuple[Any, ...] = (),
        given: bool = False,
    ) -> None:
        self.index = index
        self.text = PageText(namespace, extra_keys, index.page_size, given=given)
        self.keys: list[Key] = []
        self._extra_keys = extra_keys

    def fits(self, token_ids: array[int], namespace: Hashable, extra_keys: tuple[Any, ...]) -> bool:
        """Is this chain a prefix of these tokens under the same namespace and extra keys? One byte compare.

        Given ids are not compared again.
        """
        text = self.text
        if self._extra_keys != extra_keys or text.namespace != namespace or text.scope != encode(namespace):
            return False
        num_tokens = 0 if text.raw is None else len(text.raw) // TOKEN_BYTES
        if not num_tokens or text.raw is None:
            return True
        return len(token_ids) >= num_tokens and text.raw.startswith(memoryview(token_ids)[:num_tokens])

    def extend(self, token_ids: array[int], num_pages: int) -> None:
        """Add keys until `num_pages` whole pages have one. `token_ids` must hold that many pages."""
        index, text, known = self.index, self.text, len(self.keys)
        if known >= num_pages or text.raw is None:
            return
        new = token_ids[known * index.page_size : num_pages * index.page_size].tobytes()
        if known:
            above = self.keys[-1]
            text.raw += new
        else:
            above = index.page_hash.root(text.scope)
            text.raw = bytearray(new)  # of this very size; one that grew has room to spare
        self.keys += text.keys(index.page_hash, new, index.page_bytes, known, above)

    def extend_given(self, ids: array[int], num_pages: int) -> None:
        """As `extend`, with prefix-chained ids that a trace gave in place of hashes."""
        known = len(self.keys)
        if known < num_pages:
            new = ids[known:num_pages]
            self.keys += new if self.text.namespace is None else [(self.text.scope, page_id) for page_id in new]


class HashChainIndex:
    """Which page holds the text up to position i? Page ids 1..num_pages; all costs are per page of the argument.

    gapless  the owner's promise: who publishes a page holds pages with all text before it, and they leave after it.
             It is taken back, until the index is empty again, by setting this to False.

    >>> index = HashChainIndex(num_pages=4, page_size=2)
    >>> chain = index.chain()
    >>> chain.extend(array("i", [7, 8, 9, 9]), 2)
    >>> index.publish([3, 1], chain, 0), index.match(chain, 2)
    ([], [3, 1])
    >>> index.drop([1]), index.match(chain, 2)
    ([1], [3])
    """

    def __init__(
        self, num_pages: int, page_size: int, hash_fn: HashFn | str = "xxh3_64", *, gapless: bool = False
    ) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.page_hash = resolve_hash(hash_fn)
        self.keys: list[Key | None] = [None] * (num_pages + 1)  # of each page; None: holds no content
        self.duplicates = 0  # pages whose content an earlier page holds too
        self.gapless = gapless
        self._collided = False  # two texts had one key since the index was empty last
        self._texts: list[PageText | None] = [None] * (num_pages + 1)
        self._positions = [0] * (num_pages + 1)
        self._numbers: tuple[int, ...] = ()
        self._first: dict[Key, int] = {}  # the earliest inserted page under a key
        self._later: dict[Key, dict[int, None]] = {}  # those after it, in insertion order; rare

    def __len__(self) -> int:
        return len(self._first) + sum(map(len, self._later.values()))

    def chain(self, namespace: Hashable = None, extra_keys: tuple[Any, ...] = (), *, given: bool = False) -> PageChain:
        """An empty chain for one sequence."""
        return PageChain(self, namespace, extra_keys, given)

    # look-up: nothing below changes the index

    def match(self, chain: PageChain, limit: int) -> list[int]:
        """Pages of the longest cached prefix, at most `limit` of them."""
        pages = self._look_up(chain.keys if limit >= len(chain.keys) else chain.keys[:limit])
        if self._confirmed(chain.text, pages):
            return pages
        return self._match_through_collisions(chain, limit)

    def _look_up(self, keys: list[Key]) -> list[int]:
        """The earliest inserted page under each key, up to the first key without one."""
        first = self._first
        count = self._guess(keys)
        if count > 1:
            with suppress(KeyError):  # a gap
                return list(itemgetter(*keys[:count])(first))
        found: list[int] = []
        for page in map(first.get, keys):
            if page is None:
                break
            found.append(page)
        return found

    def _guess(self, keys: list[Key]) -> int:
        """How many keys at the front have a page, by halving; beside gaps it may be too many, never too few."""
        first, low, high = self._first, 0, len(keys)
        if high and keys[-1] in first:
            return high
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in first:
                low = middle + 1
            else:
                high = middle
        return low

    def _confirmed(self, text: PageText, pages: list[int]) -> bool:
        """Do these pages hold this text, each at its place? One byte compare, or one for each source they come
        from."""
        count = len(pages)
        if not count:
            return True
        if self.gapless and not self._collided and text.raw is not None:
            return self._holds(pages[-1], text, count - 1)
        if count == 1:
            return self._holds(pages[0], text, 0)
        held_by, numbers = itemgetter(*pages), self._counted(count)[:count]
        if held_by(self._positions) != numbers:
            return False
        sources = held_by(self._texts)
        if sources[0] is sources[-1] and sources.count(sources[0]) == count:
            return bool(sources[0].same_prefix(text, count * self.page_bytes, count))
        ends = dict(zip(sources, numbers, strict=True))
        return all(own.same_prefix(text, (end + 1) * self.page_bytes, end + 1) for own, end in ends.items())

    def _counted(self, count: int) -> tuple[int, ...]:
        """0, 1, 2 ... `count` or beyond, always the same int objects: they compare by identity and are stored once."""
        if len(self._numbers) < count:
            self._numbers += tuple(range(len(self._numbers), 2 * count))
        return self._numbers

    def _match_through_collisions(self, chain: PageChain, limit: int) -> list[int]:
        positions = range(min(limit, len(chain.keys)))
        return list(takewhile(bool, (self.find(chain, position) for position in positions)))

    def match_window(self, chain: PageChain, limit: int, need: int) -> tuple[int, list[int]]:
        """(pages skipped on the left, pages after them) for a sliding window that needs `need` pages in a row.

        vLLM 0.32.0: right to left; without such a run, the run that starts at position 0 counts, however short.
        """
        run: list[int] = []
        for position in range(min(limit, len(chain.keys)) - 1, -1, -1):
            page = self.find(chain, position)
            if not page:
                run.clear()
                continue
            run.append(page)
            if len(run) >= need:
                return position, run[::-1]
        return 0, run[::-1]

    def find(self, chain: PageChain, position: int) -> int:
        """The earliest inserted page that holds the text of `chain` up to and with `position`; 0 for none."""
        key = chain.keys[position]
        page = self._first.get(key, 0)
        if not page or self._holds(page, chain.text, position):
            return page
        return next((p for p in self._later.get(key, ()) if self._holds(p, chain.text, position)), 0)

    def _holds(self, page: int, text: PageText, position: int) -> bool:
        own = self._texts[page]
        num_bytes = (position + 1) * self.page_bytes
        return self._positions[page] == position and own is not None and own.same_prefix(text, num_bytes, position + 1)

    # change

    def publish(self, pages: Sequence[int], chain: PageChain, start: int) -> list[int]:
        """Let `pages` serve the text of `chain` from page position `start` on; returns those that are duplicates.

        A page that already has its key stays where it is in the order. Raises ValueError when it has another one.
        """
        own_keys, texts, positions, text = self.keys, self._texts, self._positions, chain.text
        first, end = self._first, start + len(pages)
        duplicates: list[int] = []
        for page, key, position in zip(pages, chain.keys[start:end], self._counted(end)[start:end], strict=True):
            if own_keys[page] is not None:
                self._expect_key(page, key)
                continue
            own_keys[page] = key
            texts[page] = text
            positions[page] = position
            if key not in first:
                first[key] = page
            elif self._add_later(key, page):
                duplicates.append(page)
        return duplicates

    def publish_one(self, page: int, chain: PageChain, position: int) -> bool:
        """`publish` for one page, as decode steps ask for it: is it a duplicate?"""
        key = chain.keys[position]
        if self.keys[page] is not None:
            self._expect_key(page, key)
            return False
        self.keys[page] = key
        self._texts[page] = chain.text
        self._positions[page] = self._counted(position + 1)[position]
        if key not in self._first:
            self._first[key] = page
            return False
        return self._add_later(key, page)

    def _expect_key(self, page: int, key: Key) -> None:
        if self.keys[page] != key:
            raise ValueError(f"page {page} already serves other content; drop it before it is published again")

    def _add_later(self, key: Key, page: int) -> bool:
        duplicate = self._has_equal(key, page)
        self._collided = self._collided or not duplicate
        self._later.setdefault(key, {})[page] = None
        self.duplicates += duplicate
        return duplicate

    def _has_equal(self, key: Key, page: int) -> bool:
        """Is there another page under `key` with the same text as `page`? Keys alone do not tell (collisions)."""
        others = (self._first[key], *self._later.get(key, ()))
        return any(self._equal(page, other) for other in others if other != page)

    def _equal(self, page: int, other: int) -> bool:
        text = self._texts[page]
        return text is not None and self._holds(other, text, self._positions[page])

    def drop(self, pages: Iterable[int]) -> list[int]:
        """Forget what `pages` hold; returns those that held something, in order."""
        own_keys, texts, first, later = self.keys, self._texts, self._first, self._later
        dropped = []
        for page in pages:
            key = own_keys[page]
            if key is not None:
                if later and key in later:
                    self._drop_one_of_many(key, page)
                else:
                    del first[key]
                own_keys[page] = texts[page] = None
                dropped.append(page)
        return dropped

    def _drop_one_of_many(self, key: Key, page: int) -> None:
        later = self._later[key]
        self.duplicates -= self._has_equal(key, page)
        if self._first[key] == page:
            self._first[key] = page = next(iter(later))
        del later[page]
        if not later:
            del self._later[key]

    def clear(self) -> list[int]:
        """Forget everything; returns the pages that held something, ascending."""
        dropped = self.drop([page for page, key in enumerate(self.keys) if key is not None])
        self._collided = False
        return dropped

    def problems(self) -> list[str]:
        """Everything that does not add up, recomputed from the texts; empty when sound. Hashes every text again."""
        return hash_chain_check.problems(self)
