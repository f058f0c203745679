"""What stands in the pages of one sequence, as bytes: compared to confirm a hit, hashed to find it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any, Protocol

import numpy as np
import xxhash

HashFn = Callable[[bytes], bytes]
TOKEN_BYTES = 4


class PageHash(Protocol):
    """How pages get their keys: each key stands for its page and, through the key before it, for all pages before."""

    def root(self, scope: bytes) -> Any:
        """What stands before the first page."""
        ...

    def keys(self, pages: list[bytes], above: Any) -> list[Any]:
        """Keys of consecutive pages that follow the key `above`: one hash call a page."""
        ...


class Chained:
    """Hashes the digest of the page before and the page: any function bytes -> bytes will do."""

    def __init__(self, hash_fn: HashFn) -> None:
        self.hash_fn = hash_fn

    def root(self, scope: bytes) -> bytes:
        return self.hash_fn(b"kvarena" + scope)

    def keys(self, pages: list[bytes], above: bytes) -> list[bytes]:
        hash_fn = self.hash_fn
        return [above := hash_fn(above + page) for page in pages]


class Seeded:
    """64 bits of xxh3, seeded with the key of the page before: nothing is joined, and keys are small ints."""

    def root(self, scope: bytes) -> int:
        return xxhash.xxh3_64_intdigest(scope)

    def keys(self, pages: list[bytes], above: int) -> list[int]:
        hash_page = xxhash.xxh3_64_intdigest
        return [above := hash_page(page, above) for page in pages]


HASH_FUNCTIONS: dict[str, PageHash] = {
    "xxh3_64": Seeded(),
    "xxh3_128": Chained(xxhash.xxh3_128_digest),
    "sha256": Chained(lambda data: hashlib.sha256(data).digest()),
}


def resolve_hash(hash_fn: HashFn | str) -> PageHash:
    """A page hash by name, or one that chains a callable bytes -> bytes. ValueError for anything else."""
    if isinstance(hash_fn, str):
        if hash_fn not in HASH_FUNCTIONS:
            raise ValueError(f"hash_fn: expected one of {', '.join(HASH_FUNCTIONS)} or a callable, found {hash_fn!r}")
        return HASH_FUNCTIONS[hash_fn]
    digest = hash_fn(b"")
    if not isinstance(digest, bytes):
        raise ValueError(f"hash_fn: expected bytes -> bytes, found a result of type {type(digest).__name__}")
    return Chained(hash_fn)


def encode(value: Hashable) -> bytes:
    """A value as tagged bytes that no other value shares, for hashing.

    Strings, bytes, numbers, None and tuples of them are spelled out; any other value enters by its own `hash`, and
    equality then decides.

    >>> encode(("lora", "X")) == encode(("salt", "X"))
    False
    >>> encode(("ab", "c")) == encode(("a", "bc"))
    False
    """
    if value is None:
        return b"cNone;"
    if isinstance(value, tuple):
        return b"t%d:" % len(value) + b"".join(map(encode, value))
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"s%d:" % len(text) + text
    if isinstance(value, bytes):
        return b"b%d:" % len(value) + value
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, (bool, int)):
        return b"%s%s;" % (b"i" if type(value) is int else b"c", str(value).encode())
    return b"h%d;" % hash(value) + encode(type(value).__qualname__)


NO_NAMESPACE = encode(None)


class PageText:
    """The text of one sequence's whole pages, in position order.

    raw        int32 tokens as bytes, grows; None when a trace gave ids in place of tokens
    namespace  isolates whole sequences; `scope` is its encoding (1 and True are two namespaces)
    extras     (page position, encoded items, content ids) of each page that an image or the like overlaps
    """

    __slots__ = ("extras", "namespace", "raw", "scope")

    def __init__(
        self, namespace: Hashable = None, extra_keys: Iterable[Any] = (), page_size: int = 1, *, given: bool = False
    ) -> None:
        self.namespace = namespace
        self.scope = NO_NAMESPACE if namespace is None else encode(namespace)
        self.extras = page_extras(extra_keys, page_size) if extra_keys else ()
        self.raw = None if given else bytearray()

    def same_prefix(self, other: PageText, num_bytes: int, num_pages: int) -> bool:
        """Do both texts agree on their first pages? Given ids are trusted: there is nothing to compare."""
        if self is other:
            return True
        if self.scope != other.scope or self.namespace != other.namespace:
            return False
        if self.raw is None or other.raw is None:
            return self.raw is other.raw
        if (self.extras or other.extras) and self._extras_before(num_pages) != other._extras_before(num_pages):
            return False
        return len(self.raw) >= num_bytes and self.raw.startswith(memoryview(other.raw)[:num_bytes])

    def _extras_before(self, num_pages: int) -> list[tuple[int, bytes, tuple[Any, ...]]]:
        return [item for item in self.extras if item[0] < num_pages]

    def keys(self, page_hash: PageHash, tokens: bytes, width: int, position: int, above: Any) -> list[Any]:
        """Keys of the pages in `tokens`, `width` bytes each; the first is page `position` and follows `above`.

        What is hashed of a page: its tokens, of fixed length, and then what images add to it.
        """
        pages = [tokens] if len(tokens) == width else cut_pages(tokens, width)  # a decode step brings one
        for page, encoded, _ in self.extras:
            if position <= page < position + len(pages):
                pages[page - position] += encoded
        return page_hash.keys(pages, above)


def cut_pages(tokens: bytes, width: int) -> list[bytes]:
    """Whole pages of `width` bytes. NumPy cuts them twice as fast as slices do.

    >>> cut_pages(b"aabbcc", 2)
    [b'aa', b'bb', b'cc']
    """
    pages: list[bytes] = np.frombuffer(tokens, _page_type(width)).tolist()
    return pages


@cache
def _page_type(width: int) -> np.dtype[np.void]:
    return np.dtype((np.void, width))


def page_extras(extra_keys: Iterable[Any], page_size: int) -> tuple[tuple[int, bytes, tuple[Any, ...]], ...]:
    """(page position, encoded items, content ids) of each page that an item (offset, length, content id) overlaps.

    vLLM 0.32.0: ("mm", identifier, item offset - page start) enters the key of every such page.
    """
    pages: dict[int, list[tuple[int, Any]]] = {}
    for offset, length, content in sorted(extra_keys, key=lambda item: item[0]):
        if offset < 0 or length < 1:
            raise ValueError(
                f"extra_keys: expected offset >= 0 and length >= 1, found ({offset}, {length}, {content!r})"
            )
        for position in range(offset // page_size, (offset + length - 1) // page_size + 1):
            pages.setdefault(position, []).append((offset - position * page_size, content))
    return tuple(
        (position, encode(("mm", *items)), tuple(content for _, content in items))
        for position, items in sorted(pages.items())
    )
