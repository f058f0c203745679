"""Self-check and description of the general form: everything is recomputed from rows and texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvarena.allocators.general_pool import pages_below
from kvarena.allocators.general_text import Page, Text, texts_below

if TYPE_CHECKING:
    from kvarena.allocators.general import GeneralAllocator

SHOWN = 40


def faults(allocator: GeneralAllocator) -> Iterator[str]:
    """What is inconsistent, a sentence each; nothing for a sound allocator. O(pages + texts)."""
    yield from _page_faults(allocator)
    yield from _text_faults(allocator)
    yield from _row_faults(allocator)


def _page_faults(allocator: GeneralAllocator) -> Iterator[str]:
    pool = allocator.pool
    held = Counter(page for row in allocator._rows.values() if row.held for page in row.named)
    cached = {page for root in pool.roots.values() for page in pages_below(root)}
    strays = [page for _, page in pool.queue.entries() if not (page.gone or page.locks or page.cached)]
    state: Counter[int] = Counter(pool.free)
    state.update({page.number for page in strays})
    state.update(page.number for page in held.keys() | cached)
    for number in range(1, allocator.num_pages + 1):
        if state.pop(number, 0) != 1:
            yield f"page {number} is in no state or in several"
    if state:
        yield f"pages {sorted(state)} do not exist: ids run from 1 to {allocator.num_pages}"
    for page in held.keys() | cached:
        if page.locks != held[page]:
            yield f"{page!r} has {page.locks} locks, {held[page]} rows name it"
        if page.gone:
            yield f"{page!r} is gone and in use"
    idle = {page for page in cached if not page.locks}
    queued = {page for _, page in pool.queue.entries()}
    for name, counted, true in (
        ("evictable", pool.evictable, len(idle)),
        ("shared", pool.shared, sum(count > 1 for count in held.values())),
        ("strays", pool.strays, len({page.number for page in strays})),
    ):
        if counted != true:
            yield f"{name} is {counted}, counted {true}"
    for page in idle - queued:
        if not page.children:
            yield f"{page!r} may be evicted and is not queued"


def _text_faults(allocator: GeneralAllocator) -> Iterator[str]:
    pool = allocator.pool
    duplicates, users = 0, Counter(id(row.text) for row in allocator._rows.values())
    for root in pool.roots.values():
        for text in (root, *texts_below(root)):
            duplicates += max(len(text.copies) - 1, 0)
            if text.users != users.pop(id(text), 0):
                yield f"text {text.key!r}: {text.users} users counted, rows say otherwise"
            if any(page.text is not text for page in text.copies):
                yield f"text {text.key!r}: a copy serves another text"
            if any(page.part != (text, key) for key, pages in text.parts.items() for page in pages):
                yield f"text {text.key!r}: a page serves another beginning"
            if text.run_on is not None and list(text.children.values()) != [text.run_on]:
                yield f"text {text.key!r}: an edge runs on where several begin"
            if not (text.copies or text.children or text.parts or text.users):
                yield f"text {text.key!r} is held by nothing"
    if users:
        yield f"{len(users)} rows end in texts that are not in the pool"
    if duplicates != pool.duplicates:
        yield f"duplicates is {pool.duplicates}, counted {duplicates}"


def _row_faults(allocator: GeneralAllocator) -> Iterator[str]:
    rows = allocator._rows
    taken = sorted([row.index for row in rows.values() if row.index] + allocator._free_rows)
    if allocator._tree and taken != list(range(1, allocator.num_rows + 1)):
        yield f"rows 1..{allocator.num_rows} are not each taken or free"
    for name, row in rows.items():
        if row.seq.request_id != name:
            yield f"the row of {row.seq.request_id!r} is filed under {name!r}"
        if len({page.number for page in row.pages}) < len(row.pages):
            yield f"the row of {name!r} names a page twice"
        if row.seq.num_computed_tokens > len(row.pages) * allocator.page_size and row.admitted:
            yield f"{name!r} has {row.seq.num_computed_tokens} computed tokens in {len(row.pages)} pages"
        yield from _key_faults(allocator, name, row.text, row.pages[: row.published])


def _key_faults(allocator: GeneralAllocator, name: str, text: Text, pages: list[Page]) -> Iterator[str]:
    """Does each published page serve what stands there, and does the row's text say the same?"""
    path: list[Text] = []
    at: Text | None = text
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    path.reverse()
    keys = allocator.keys.pages(allocator._rows[name].seq, 0, len(pages))
    if [each.key for each in path] != keys:
        yield f"request {name!r}: its text is not that of the place where its publication ends"
        return
    for page, expected in zip(pages, path, strict=True):
        if page.text not in (expected, None):
            yield f"request {name!r}: page {page.number} serves other content"


def describe(allocator: GeneralAllocator) -> str:
    """Counts, rows and free pages as text; long lists are cut."""
    capacity = allocator.capacity()
    lines = [
        f"general allocator ({allocator.design.kind} with switched fields), {capacity.num_pages} pages of "
        f"{capacity.page_size} tokens: {capacity.free} free, {capacity.evictable} evictable, {capacity.in_use} in use",
        f"free, front first: {_cut(list(allocator.pool.free))}",
    ]
    for name, row in list(allocator._rows.items())[:SHOWN]:
        state = "" if row.admitted else " (pinned)"
        lines.append(f"{name!r}{state}: pages {_cut([page.number for page in row.pages])}, {row.published} published")
    return "\n".join(lines)


def _cut(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:SHOWN]))}{', ...' if len(ids) > SHOWN else ''}]"
