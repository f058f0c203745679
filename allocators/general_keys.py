"""What two pages must have in common to be the same, by `Design.page_keys`.

    hash     a page's tokens, and beside them the images that overlap it (vLLM 0.32.0: they enter the hash)
    tokens   a page's tokens alone, an image's positions replaced by ids of its content (SGLang 0.5.22)

The two differ only where images stand: under `hash` the placeholder tokens below an image count too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

from kvarena.allocators.config import Design
from kvarena.allocators.interface import Sequence
from kvarena.allocators.token_keys import TokenKeys, refuse_items
from kvarena.prefix.page_text import TOKEN_BYTES, encode, page_extras

PageKey = Hashable


class PageKeys(ABC):
    """Keys of whole pages, and of the first tokens of a page; all costs are per byte looked at."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    @abstractmethod
    def space(self, seq: Sequence) -> Hashable:
        """What isolates this sequence's pages from others: namespace, and whether a trace named its pages."""

    @abstractmethod
    def num_pages(self, seq: Sequence, num_tokens: int) -> int:
        """Whole pages among the first `num_tokens` tokens whose content is known."""

    @abstractmethod
    def pages(self, seq: Sequence, start: int, end: int) -> list[PageKey]:
        """Keys of the pages at positions [start, end)."""

    def part(self, seq: Sequence, start: int, end: int) -> PageKey | None:
        """Key of tokens [start, end), which begin a page. None: images, or pages named by a trace, have no parts."""
        if seq.page_hashes is not None or seq.extra_keys:
            return None
        return seq.token_ids[start:end].tobytes()

    @abstractmethod
    def check(self, seq: Sequence, start: int = 0) -> None:
        """Raise ValueError for tokens from position `start` on that a key cannot name."""

    @abstractmethod
    def forget(self) -> None:
        """Nothing is cached any more."""


class HashKeys(PageKeys):
    """vLLM 0.32.0: a page is its tokens and the items that overlap it."""

    def space(self, seq: Sequence) -> Hashable:
        name = None if seq.namespace is None else (encode(seq.namespace), seq.namespace)
        return seq.page_hashes is not None, name

    def num_pages(self, seq: Sequence, num_tokens: int) -> int:
        pages = min(num_tokens, seq.num_tokens) // self.page_size
        return pages if seq.page_hashes is None else min(pages, len(seq.page_hashes))

    def pages(self, seq: Sequence, start: int, end: int) -> list[PageKey]:
        if seq.page_hashes is not None:
            return _cut(seq.page_hashes[start:end].tobytes(), TOKEN_BYTES)
        width = self.page_size * TOKEN_BYTES
        keys = _cut(seq.token_ids[start * self.page_size : end * self.page_size].tobytes(), width)
        if seq.extra_keys:
            for position, *extra in page_extras(seq.extra_keys, self.page_size):
                if start <= position < end:
                    keys[position - start] = (keys[position - start], *extra)
        return keys

    def check(self, seq: Sequence, start: int = 0) -> None:
        return  # any token has a name

    def forget(self) -> None:
        return  # nothing is remembered


class TokenIdKeys(PageKeys):
    """SGLang 0.5.22: a page is its token ids, those of images replaced."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._keys = TokenKeys(page_size)

    def space(self, seq: Sequence) -> Hashable:
        return self._keys.space(seq)[0]

    def num_pages(self, seq: Sequence, num_tokens: int) -> int:
        return self._keys.num_pages(seq, min(num_tokens, seq.num_tokens))

    def pages(self, seq: Sequence, start: int, end: int) -> list[PageKey]:
        return _cut(self._keys.key(seq, start, end), self._keys.space(seq)[1])

    def check(self, seq: Sequence, start: int = 0) -> None:
        if seq.page_hashes is None:
            refuse_items(seq)
            self._keys.refuse_reserved(seq, start)

    def forget(self) -> None:
        self._keys.forget()


def make_keys(design: Design) -> PageKeys:
    """The keys that a design names."""
    return HashKeys(design.page_size) if design.page_keys == "hash" else TokenIdKeys(design.page_size)


def _cut(data: bytes, width: int) -> list[Any]:
    return [data[at : at + width] for at in range(0, len(data), width)]
