"""Verification of a `HashChainIndex`: everything derived is recomputed from the texts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from kvarena.prefix.page_text import PageText

if TYPE_CHECKING:
    from kvarena.prefix.hash_chain import HashChainIndex

Keys = dict[int, Hashable]  # of pages
Texts = dict[int, PageText]


def problems(index: HashChainIndex) -> list[str]:
    """Everything that does not add up; empty when sound. Hashes every text again."""
    under: Keys = {page: key for key, page in index._first.items()}
    under.update((page, key) for key, later in index._later.items() for page in later)
    own: Keys = {page: key for page, key in enumerate(index.keys) if key is not None}
    texts = {page: text for page, text in enumerate(index._texts) if text is not None}
    found = [] if len(under) == len(index) else ["a page stands under two keys"]
    found += [f"page {page}: key {own.get(page)!r}, found under {under.get(page)!r}" for page in _differ(own, under)]
    found += [f"page {page}: key and text must come together" for page in own.keys() ^ texts.keys()]
    found += [f"page {page}: its key is not the hash of its text" for page in _wrong_keys(index, own, texts)]
    if index.gapless and not index._collided:
        found += _gaps(index, {page: texts[page] for page in own.keys() & texts.keys()})
    surplus = sum(1 + len(later) - _num_distinct(index, key) for key, later in index._later.items())
    if surplus != index.duplicates:
        found.append(f"duplicates is {index.duplicates}, counted {surplus}")
    return found


def _wrong_keys(index: HashChainIndex, own: Keys, texts: Texts) -> list[int]:
    keys = {id(text): _keys_of(index, text) for text in texts.values() if text.raw is not None}
    hashed = [page for page in own if page in texts and texts[page].raw is not None]
    return [page for page in hashed if keys[id(texts[page])].get(index._positions[page]) != own[page]]


def _gaps(index: HashChainIndex, texts: Texts) -> Iterator[str]:
    """Text before a cached page that no page holds under its key. The last page of each text is enough."""
    last = {id(texts[page]): page for page in sorted(texts, key=index._positions.__getitem__)}
    for page in last.values():
        text, end = texts[page], index._positions[page]
        for position, key in _keys_of(index, text).items() if text.raw is not None else ():
            if position < end and not index._holds(index._first.get(key, page), text, position):
                yield f"page {page}: its text up to position {position} is not cached"


def _num_distinct(index: HashChainIndex, key: Hashable) -> int:
    pages = [index._first[key], *index._later[key]]
    return sum(not any(index._equal(page, before) for before in pages[:i]) for i, page in enumerate(pages))


def _keys_of(index: HashChainIndex, text: PageText) -> Keys:
    root = index.page_hash.root(text.scope)
    return dict(enumerate(text.keys(index.page_hash, bytes(text.raw or b""), index.page_bytes, 0, root)))


def _differ(left: Keys, right: Keys) -> list[int]:
    return [page for page in sorted(left.keys() | right.keys()) if left.get(page) != right.get(page)]
