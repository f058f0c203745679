"""What the radix tree compares: the tokens of a sequence as bytes, with images replaced by ids of their content."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass
from operator import itemgetter
from typing import cast

import numpy as np
from kvarena.allocators.interface import Sequence
from kvarena.prefix.page_text import encode

TOKEN_BYTES = 4
FIRST_RESERVED = -(2**31)  # ids of image contents count up from here ...
END_RESERVED = -(2**30)  # ... to here; no token may be below it
INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class HashedNamespace:
    """Namespace of sequences that bring a symbol a page: never shared with token ids."""

    namespace: Hashable


class TokenKeys:
    """Turns pages of sequences into key bytes.

    Every position of an item (offset, length, content_id) is replaced by an id that stands for the content alone,
    whatever placeholder token was there: one id where the item begins and another one for the rest of it, so that
    two items of a content in a row differ from a longer one. Ids are given in order of first use from a range that
    tokens may not enter, so two contents never share one.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.width = TOKEN_BYTES * page_size  # key bytes a page of token ids
        self._ids: dict[Hashable, int] = {}

    def space(self, seq: Sequence) -> tuple[Hashable, int]:
        """Namespace of the tree that the sequence belongs to, and key bytes a page.

        Values that only compare equal (1, True, 1.0) are different namespaces, and so are they as image contents.
        """
        if seq.namespace is None and seq.page_hashes is None:
            return None, self.width
        space = None if seq.namespace is None else (encode(seq.namespace), seq.namespace)
        return (space, self.width) if seq.page_hashes is None else (HashedNamespace(space), TOKEN_BYTES)

    def num_pages(self, seq: Sequence, num_tokens: int) -> int:
        """Whole pages among the first `num_tokens` tokens whose content is known.

        Of a sequence with page hashes, pages of generated tokens have no name, so nobody could find them, and so it
        is with pages of the prompt for which none was given.
        """
        if seq.page_hashes is None:
            return num_tokens // self.page_size
        return min(min(num_tokens, seq.num_prompt_tokens) // self.page_size, len(seq.page_hashes))

    def prefix(self, seq: Sequence, num_tokens: int) -> bytes:
        """Key bytes of the whole pages among the first `num_tokens` tokens, at times with those of a part of a page
        behind them; checks all tokens of the sequence."""
        if _any_negative(seq.token_ids):
            self.refuse_reserved(seq)
        if seq.page_hashes is None and not seq.extra_keys:
            return seq.token_ids.tobytes()[: num_tokens * TOKEN_BYTES]  # all of it: the same object, no copy
        refuse_items(seq)
        return self.key(seq, 0, self.num_pages(seq, num_tokens))

    def key(self, seq: Sequence, start: int, end: int) -> bytes:
        """Key bytes of pages [start, end)."""
        if seq.page_hashes is not None:
            return seq.page_hashes[start:end].tobytes()
        first, last = start * self.page_size, end * self.page_size
        if not seq.extra_keys:
            return memoryview(seq.token_ids)[first:last].tobytes()
        tokens = seq.token_ids[first:last]
        self._put_items(seq, tokens, first)
        return tokens.tobytes()

    def refuse_reserved(self, seq: Sequence, start: int = 0) -> None:
        """Raise ValueError when a token from position `start` on, outside of items, lies in the reserved range."""
        tokens = seq.token_ids[start:] if start else seq.token_ids
        if not _any_negative(tokens):
            return
        for position, token in enumerate(tokens, start):
            if token < END_RESERVED and not any(low <= position < low + n for low, n, _ in _items(seq)):
                raise ValueError(
                    f"request {seq.request_id}: token id {token} at position {position} is below {END_RESERVED}; "
                    f"the ids from {FIRST_RESERVED} up to it are reserved for images"
                )

    def forget(self) -> None:
        """Start the ids anew (nothing is cached any more)."""
        self._ids.clear()

    def _put_items(self, seq: Sequence, tokens: array[int], first: int) -> None:
        """Overwrite what lies in an item; `tokens` start at position `first`."""
        for offset, length, content in _items(seq):
            low, high = max(offset - first, 0), min(offset + length - first, len(tokens))
            if low < high:
                begin = self._id(content)
                tokens[low:high] = array("i", [begin + 1]) * (high - low)
                if offset >= first:
                    tokens[low] = begin

    def _id(self, content: Hashable) -> int:
        name = (encode(content), content)
        found = self._ids.get(name)
        if found is None:
            found = self._ids[name] = FIRST_RESERVED + 2 * len(self._ids)
            if found + 2 > END_RESERVED:
                raise ValueError(f"image contents: more than {len(self._ids) - 1} distinct ones; reset the allocator")
        return found


def _any_negative(tokens: array[int]) -> bool:
    """Is one of these below zero? Almost never. Half a microsecond for 4,000: `argmin` has none of the overhead that
    `min` has, and copies nothing where the buffer can be written to."""
    return len(tokens) > 0 and tokens[np.frombuffer(tokens, INT32).argmin()] < 0


def refuse_items(seq: Sequence) -> None:
    """Raise ValueError for an item that lies nowhere, and for two at one position: a key has room for one of them."""
    end = 0
    for offset, length, content in sorted(_items(seq), key=itemgetter(0)):
        if offset < end or length < 1:
            raise ValueError(
                f"request {seq.request_id!r}: extra_keys: expected offset >= {end}, behind the item before, and "
                f"length >= 1, found ({offset}, {length}, {content!r})"
            )
        end = offset + length


def _items(seq: Sequence) -> tuple[tuple[int, int, Hashable], ...]:
    return cast("tuple[tuple[int, int, Hashable], ...]", seq.extra_keys)
