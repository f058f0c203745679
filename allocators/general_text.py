"""The prefix tree of the general form, a node a page: what is cached, by which pages, and where edges begin.

    root - [t0 t1] - [t2 t3] - [t4 t5]        one edge of three pages: `run_on` leads from page to page
                        `----- [t6 t7]        another edge

A node (`Text`) stands for all tokens up to the end of one page. The pages of the pool that hold it are its `copies`,
the earliest published first, which serves. Edges matter where a whole leaf goes at once, and where a match that ends
inside an edge touches the rest of it; else they are drawn and never read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

_NONE: Any = {}  # shared by all texts without children or parts, never written


class Page:
    """A page of the pool from the moment it is taken to the moment it holds nothing and nobody.

    number       its id in the pool
    locks        rows that hold it
    text         what it serves, whole; None: not published, or its content was dropped
    part         (text before it, key) of the beginning of a page that it serves; None: none
    author       serial of the row that published it
    gone         nobody holds it, and it holds nothing: any entry of an eviction queue that names it is void
    last_access, created, hits, priority, serial, queued    what an eviction order may look at
    """

    __slots__ = (
        "author",
        "created",
        "gone",
        "hits",
        "last_access",
        "locks",
        "number",
        "part",
        "priority",
        "queued",
        "serial",
        "text",
    )

    def __init__(self, number: int, serial: int) -> None:
        self.number = number
        self.locks = 1
        self.text: Text | None = None
        self.part: tuple[Text, Hashable] | None = None
        self.author = 0
        self.gone = False
        self.serial = self.created = self.last_access = serial
        self.hits = 0
        self.priority = 0
        self.queued: Any = None

    @property
    def cached(self) -> bool:
        """It serves hits."""
        return self.text is not None or self.part is not None

    @property
    def children(self) -> bool:
        """Eviction may not take it now (the queue's word for it). In a flat pool any page may go."""
        return self.gone

    def __repr__(self) -> str:
        return f"Page({self.number}, locks {self.locks}{', cached' if self.cached else ''})"


class TreePage(Page):
    """A page that has to stay while something cached goes on from it, unless another copy holds the same."""

    __slots__ = ()

    @property
    def children(self) -> bool:
        text = self.text
        return self.gone or (text is not None and text.goes_on and len(text.copies) < 2)


class Text:
    """All tokens up to the end of one page.

    copies    pages that hold it, the earliest published first
    children  key of the next page -> its text
    parts     key of the beginning of a next page -> the pages that hold it
    run_on    the child that continues this text's edge; every other child begins an edge
    users     live or pinned sequences whose published text ends here
    """

    __slots__ = ("children", "copies", "key", "parent", "parts", "run_on", "users")

    def __init__(self, parent: Text | None, key: Hashable) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[Hashable, Text] = _NONE
        self.parts: dict[Hashable, list[Page]] = _NONE
        self.copies: list[Page] = []
        self.run_on: Text | None = None
        self.users = 0

    @property
    def goes_on(self) -> bool:
        """Something cached, or in use, follows."""
        return bool(self.children or self.parts)

    def child(self, key: Hashable) -> Text:
        """The text one page on, made where there is none. It begins an edge of its own."""
        found = self.children.get(key)
        if found is None:
            if self.children is _NONE:
                self.children = {}
            found = self.children[key] = Text(self, key)
        return found

    def add_part(self, key: Hashable, page: Page) -> None:
        """`page` serves the beginning of a next page."""
        if self.parts is _NONE:
            self.parts = {}
        self.parts.setdefault(key, []).append(page)

    def edge_before(self) -> Iterator[Text]:
        """This text and those before it on its edge, this one first."""
        text: Text | None = self
        while text is not None and text.parent is not None:
            yield text
            text = text.parent if text.parent.run_on is text else None

    def edge_after(self) -> Iterator[Text]:
        """The texts that follow on the same edge."""
        text = self.run_on
        while text is not None:
            yield text
            text = text.run_on


def prune(text: Text) -> Text | None:
    """Forget texts that nothing holds, from `text` upwards; returns the first that stays (None: a root went)."""
    while not (text.copies or text.children or text.parts or text.users):
        parent = text.parent
        if parent is None:
            return None
        del parent.children[text.key]
        if not parent.children:
            parent.children = _NONE
        if parent.run_on is text:
            parent.run_on = None
        text = parent
    return text


def texts_below(root: Text) -> Iterator[Text]:
    """All texts below a root, parents first."""
    stack = [root]
    while stack:
        text = stack.pop()
        if text.parent is not None:
            yield text
        stack.extend(text.children.values())
