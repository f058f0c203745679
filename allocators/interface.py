"""The one interface behind which every allocator stands.

The engine owns sequences; an allocator owns pages. Verbs, in the order a request meets them:

    pin      match the cached prefix, test the room, hold the prefix        (None: no room)
    reserve  slots for the next tokens                                      (None: no room)
    commit   the KV of these tokens is written: publish what the design publishes
    release  the sequence ends or is thrown back

Running out of room is a value and changes nothing beyond what the upstream's rules say it changes;
misuse raises `ValueError`; a broken invariant raises `AllocatorError`.

Misuse is the same in every design of this package, names the request or the argument, and changes no page:

    any verb    a sequence that is not live, or another one than the live one of its id      ValueError
    reserve     n negative or no integer; a sequence twice in one call                       ValueError
                n = 0                                            nothing new; block: ValueError, see `reserve`
    commit      n negative or no integer; past what is reserved                              ValueError
                n below num_computed_tokens                                      the length stays as it is
    release     a sequence twice in one call; a reason that is no `Release`                  ValueError
    evict       num_tokens negative or no integer                                            ValueError

Any integer type counts as an integer (NumPy's too), a float does not, 2.0 included.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from kvarena.allocators.decode_batch import DecodeBatch

PADDING_PAGE = 0  # never owned, never handed out; padded writes and left-behind window pages name it


class AllocatorError(RuntimeError):
    """An invariant of an allocator is broken: a bug in it, never a condition of the workload."""


class Release(enum.Enum):
    """Why a sequence gives its pages back."""

    FINISH = "finish"
    PREEMPT = "preempt"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Gate:
    """Admission test between match and allocation.

    Refused unless need + headroom <= free + evictable (`<` if strict), with the hits held.

    whole_prompt  test the whole of `num_prefill_tokens`, also when only a chunk is taken now
    page_rounded  count in whole pages (vLLM); else in tokens (SGLang's scheduler)
    headroom      pages if page_rounded, else tokens
    strict        `<` instead of `<=`
    max_in_flight_tokens  with a sliding window: tokens of the steps in flight, which cap the need of one sequence
                  (vLLM); None: no cap
    """

    whole_prompt: bool = True
    page_rounded: bool = True
    headroom: int = 0
    strict: bool = False
    max_in_flight_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("headroom", "max_in_flight_tokens"):
            value = getattr(self, name)
            if (value is not None or name == "headroom") and not (hasattr(value, "__index__") and value >= 0):
                raise ValueError(f"{name}: expected an int of at least 0, found {value!r}")


def as_token_buffer(tokens: Any) -> array[int]:
    """Copy `tokens` into a growable int32 buffer.

    Takes ints, an `array`, a view of one, or a NumPy integer array [n]. Raises ValueError when an id does not fit
    int32. Bytes are ids 0..255, as their view is.
    """
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens[:]
    dtype: Any = getattr(tokens, "dtype", None)
    if hasattr(dtype, "char"):  # NumPy's; other arrays are read as any iterable is
        if dtype.char != "i" or tokens.ndim != 1 or not dtype.isnative:
            tokens = _as_int32(tokens)
        return array("i", tokens.tobytes())
    try:
        return array("i", iter(tokens) if isinstance(tokens, bytes | bytearray) else tokens)
    except (OverflowError, TypeError, NotImplementedError) as error:
        raise ValueError(f"token_ids: expected integers that fit int32 ({error})") from None


def _as_int32(tokens: Any) -> Any:
    """A NumPy array [n] of another integer type, or of another byte order, as int32."""
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise ValueError(f"token_ids: expected a 1-d integer array, found {tokens.dtype} with shape {tokens.shape}")
    if tokens.size and not (int(tokens.min()) >= -(2**31) and int(tokens.max()) < 2**31):
        raise ValueError("token_ids: an id does not fit int32")
    return tokens.astype("int32")


def _check_hashable(request_id: Any, namespace: Any) -> None:
    """Raise ValueError for a name by which nothing can be found again."""
    for name, value in (("request_id", request_id), ("namespace", namespace)):
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(f"{name}: expected a hashable value, found {value!r} ({error})") from None


class Sequence:
    """One request as an allocator sees it: its tokens and how far their KV is written.

    request_id         unique among live sequences; any hashable value, mostly a string
    token_ids          array('i'): prompt, then generated tokens; grows by `append`. Any int32 is taken: a look for
                       negative ids would double the cost of a sequence. The token design refuses ids below -2**30,
                       which it gives to images
    num_prompt_tokens  length of the original prompt
    num_prefill_tokens tokens the present admission has to compute: the prompt, plus what was generated
                       before a preemption (set it with `resume`)
    num_computed_tokens tokens whose KV is written. Allocators set it: `pin` to the hit, `commit` to what
                       was committed, `release` to 0. A scheduler that runs ahead of its results (result lag)
                       may raise it itself.
    namespace          isolates whole sequences: LoRA, salt, tenant (any hashable value)
    extra_keys         (offset, length, content_id) of images and the like: two pages are the same only if
                       the items that overlap them are; pages before an item stay shared. Items do not overlap
                       (the token design refuses those that do); a content has one length, which no design compares
    page_hashes        ids of the prompt's pages given by a trace (int32 array, one symbol a page; the
                       allocator's page size must be the trace's grain). `token_ids` is then empty and
                       `num_tokens` comes from the trace.
    declared_max_tokens what the client allows the reply to grow to, tokens (max_tokens), or None. Only
                       `contiguous` with sizing "declared" decides by it
    oracle_tokens      true final length, prompt and reply, or None. No design decides by it but `contiguous`
                       with sizing "oracle", whose curves are labelled so; waste accounts may read it
    memo               private to the allocator: page keys computed so far, kept over refusals and preemptions
    """

    __slots__ = (
        "declared_max_tokens",
        "extra_keys",
        "memo",
        "namespace",
        "num_computed_tokens",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_unnamed_tokens",
        "oracle_tokens",
        "page_hashes",
        "request_id",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: Any = (),
        *,
        num_prompt_tokens: int | None = None,
        namespace: Hashable = None,
        extra_keys: Iterable[tuple[int, int, Hashable]] = (),
        page_hashes: Any = None,
        num_tokens: int | None = None,
        declared_max_tokens: int | None = None,
        oracle_tokens: int | None = None,
    ) -> None:
        if type(request_id) is not str or namespace is not None:
            _check_hashable(request_id, namespace)
        self.request_id = request_id
        self.declared_max_tokens = declared_max_tokens
        self.oracle_tokens = oracle_tokens
        self.token_ids = as_token_buffer(token_ids)
        self.namespace = namespace
        self.extra_keys = tuple(map(tuple, extra_keys)) if extra_keys != () else ()
        self.page_hashes: array[int] | None = None
        self.memo: Any = None
        self.num_unnamed_tokens = 0
        if page_hashes is not None:
            self.page_hashes = as_token_buffer(page_hashes)
            if self.token_ids or num_tokens is None:
                raise ValueError(f"request {request_id}: page_hashes come with num_tokens and without token_ids")
            self.num_unnamed_tokens = num_tokens
        known = len(self.token_ids) + self.num_unnamed_tokens
        if known == 0:
            raise ValueError(f"request {request_id}: the prompt is empty; at least one token is needed")
        if num_prompt_tokens is None:
            num_prompt_tokens = known
        elif not 0 < num_prompt_tokens <= known:
            raise ValueError(f"request {request_id}: num_prompt_tokens is {num_prompt_tokens}, expected 1..{known}")
        self.num_prompt_tokens = num_prompt_tokens
        self.num_prefill_tokens = known
        self.num_computed_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and generated."""
        return len(self.token_ids) + self.num_unnamed_tokens

    def append(self, token: int) -> None:
        """One more generated token, its KV not yet written."""
        if self.page_hashes is None:
            self.token_ids.append(token)
        else:
            self.num_unnamed_tokens += 1

    def pop(self) -> None:
        """Forget the last token (its slot was refused, or a draft was rejected)."""
        if self.page_hashes is None:
            self.token_ids.pop()
        else:
            self.num_unnamed_tokens -= 1

    def resume(self) -> None:
        """Prepare for another admission after a preemption: everything known has to be computed again."""
        self.num_computed_tokens = 0
        self.num_prefill_tokens = self.num_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.num_tokens} tokens, prompt {self.num_prompt_tokens}, "
            f"computed {self.num_computed_tokens})"
        )


# Page ids in order: arrays where there can be many, a view where they stand in one already.
PageIds: TypeAlias = "array[int] | memoryview[int] | tuple[int, ...]"


_SHOWN = 12


def _no_pages() -> array[int]:
    return array("i")


class _Answer:
    """Page ids print as lists, long ones cut short, and travel as arrays: a view has neither a text nor a pickle."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_worded(getattr(self, name))}" for name in self.__dataclass_fields__)
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        values = (getattr(self, name) for name in self.__dataclass_fields__)
        return type(self), tuple(array("i", value) if isinstance(value, memoryview) else value for value in values)


def _worded(value: object) -> str:
    if not isinstance(value, array | memoryview):
        return repr(value)
    ids = ", ".join(str(page) for page in value[:_SHOWN])
    return f"[{ids}]" if len(value) <= _SHOWN else f"[{ids}, ... {len(value):,} in all]"


@dataclass(frozen=True, slots=True)
class PageMove:
    """KV of one page must be copied from page `src` to page `dst` before the next write."""

    src: int
    dst: int


PageCopy = PageMove


@dataclass(slots=True, repr=False)
class Pin(_Answer):
    """A held prefix: `page_ids` hold the first `hit_tokens` tokens of the sequence."""

    seq: Sequence
    hit_tokens: int
    page_ids: array[int] = field(default_factory=_no_pages)


@dataclass(slots=True)
class Match:
    """What a lookup found. `path` names the cached units that hold the prefix, outermost first: two sequences share
    a unit if and only if their paths agree up to it, and among units that follow the same one the smaller name was
    cached first (token: tree nodes; block: pages, whose names say nothing of age)."""

    hit_tokens: int
    path: tuple[int, ...] = ()


@dataclass(slots=True, repr=False)
class Reservation(_Answer):
    """Slots for one sequence. `page_ids` are the pages that its row gained at the end, in position order.

    `rewritten` is the half-open range of row entries that changed although they existed before (window pages that
    fell to the padding page, or a run that moved: `moves` says where its KV is to be copied); (0, 0) for none.
    `freed` are pages that left the row, those that a window left behind and that still serve hits included.
    """

    seq: Sequence
    page_ids: array[int] = field(default_factory=_no_pages)
    moves: tuple[PageMove, ...] = ()
    evicted: PageIds = ()
    freed: PageIds = ()
    duplicates: PageIds = ()
    rewritten: tuple[int, int] = (0, 0)


@dataclass(slots=True, repr=False)
class Commit(_Answer):
    """What committing did. `published` pages entered the prefix cache; `duplicates` are own pages that were
    given up for equal ones already there (they are in `freed` too); `rewritten` is the half-open range of row
    entries that now name other pages."""

    seq: Sequence
    published: PageIds = ()
    evicted: PageIds = ()
    freed: PageIds = ()
    duplicates: PageIds = ()
    rewritten: tuple[int, int] = (0, 0)


@dataclass(slots=True, repr=False)
class Released(_Answer):
    """`freed` pages can be taken at once; `cached` ones are held by nobody but still serve hits."""

    freed: PageIds = ()
    cached: PageIds = ()
    evicted: PageIds = ()
    duplicates: PageIds = ()


@dataclass(frozen=True, slots=True)
class Capacity:
    """Where the pages are. free + evictable + in_use = num_pages.

    free        pages that hold nothing
    evictable   pages that hold cached content no live sequence uses
    in_use      pages that a live sequence owns or holds
    shared      pages in use by more than one live sequence
    duplicates  pages whose content an earlier page of the cache holds too
    free_rows   rows of the page table that no sequence has (-1: the design has no rows)
    wasted_slots slots in owned pages that hold no token (tail, reservation, holes)
    """

    num_pages: int
    page_size: int
    free: int
    evictable: int
    in_use: int
    shared: int = 0
    duplicates: int = 0
    free_rows: int = -1
    wasted_slots: int = 0


class EventKind(enum.Enum):
    HIT = "hit"
    RESERVE = "reserve"
    PUBLISH = "publish"
    EVICT = "evict"
    DUPLICATE = "duplicate"
    RELEASE = "release"
    COPY = "copy"
    FORK = "fork"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Event:
    """`request_id` is whose operation caused it; `reason` says why (capacity, finish, reset, ...)."""

    kind: EventKind
    request_id: str | None
    page_ids: tuple[int, ...]
    reason: str = ""


class EventLog:
    """Events of one allocator, in order. Off by default; `enabled = True` starts recording."""

    __slots__ = ("enabled", "rows")

    def __init__(self) -> None:
        self.enabled = False
        self.rows: list[Event] = []

    def add(self, kind: EventKind, request_id: str | None, page_ids: Iterable[int], reason: str = "") -> None:
        """Record one event. Callers test `enabled` first, so that a run without events pays one branch."""
        self.rows.append(Event(kind, request_id, tuple(page_ids), reason))

    def drain(self) -> list[Event]:
        """Take all recorded events."""
        rows, self.rows = self.rows, []
        return rows


class KVAllocator(ABC):
    """Hands out pages of a pool of `num_pages` pages of `page_size` tokens; ids run from 1 to `num_pages`.

    Conservation law, checked by `check()`: free + evictable + in_use = num_pages; every page has exactly one
    state; ref counts equal holders; no live row points at a free page.
    """

    kind: ClassVar[str] = "custom"
    page_size: int
    num_pages: int
    events: EventLog

    @abstractmethod
    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        """Match the longest cached prefix (never the last token), test the room, hold the prefix.

        Allocates nothing. None: no room, and no page changed owner (block leaves no trace; token keeps the split
        and the touch of its match). `gate=None` takes the design's own gate. Raises ValueError when a sequence
        of that id is live. Sets `seq.num_computed_tokens` to the hit.
        """

    @abstractmethod
    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        """Slots for positions [0, num_computed_tokens + n) of each sequence, in order, all or nothing.

        Demand is summed over the call before anything is evicted. Surplus slots stay with the sequence. None: no
        room; a pin of a sequence that was not admitted yet is dropped.

        n = 0 is granted to whoever is live or pinned. Only block refuses it with ValueError, as vLLM 0.32.0 does,
        but for a pin with a hit, whose pages it then takes. ValueError, before anything is taken: a sequence is
        neither live nor pinned, stands in the call twice, or n is negative or no integer.
        """

    @abstractmethod
    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        """The KV of the first n tokens of each sequence is written. One free group for the call.

        Raises `num_computed_tokens` to n and never lowers it: a scheduler that ran ahead of its results commits what
        it has counted already. ValueError: a sequence is not live, or n is negative, no integer or past its reserved
        slots; what stands before the bad pair in the call may be committed.
        """

    @abstractmethod
    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        """Give back what each sequence holds, in order, as one free group. Sets num_computed_tokens to 0.

        `freed` are exactly the pages that came free, `cached` those that became evictable (and equal ones that were,
        for which own ones were given up). ValueError, and nothing is
        given back: a sequence is neither live nor pinned (vLLM 0.32.0 passes over it; here a second release is a
        fault of the caller), stands in the call twice, or `reason` is no `Release`.
        """

    @abstractmethod
    def evict(self, num_tokens: int) -> list[int]:
        """Make room for `num_tokens` tokens if the design can evict on demand; returns the pages, in order.

        ValueError: `num_tokens` is negative or no integer, also where nothing can be evicted.
        """

    @abstractmethod
    def page_ids(self, seq: Sequence) -> array[int]:
        """Pages of a live sequence in position order, int32 [ceil(reserved tokens / page_size)]."""

    @abstractmethod
    def capacity(self) -> Capacity:
        """Page counts by state."""

    @abstractmethod
    def reset(self) -> bool:
        """Drop cached content. False, and nothing changed, while sequences are live."""

    @abstractmethod
    def check(self) -> None:
        """Recompute every derived field from raw contents; raise AllocatorError with a full dump."""

    def match(self, seq: Sequence) -> Match:
        """How much of a sequence is cached now, its last token included; holds nothing.

        Leaves what a lookup leaves in the design: nothing in block; a split and a touch in token. A scheduler that
        orders its queue by cached prefix asks this of sequences that are not live. This default pins and lets go,
        hence never sees the last token.
        """
        pin = self.pin(seq, Gate(whole_prompt=False))
        if pin is None:
            return Match(0)
        self.release([seq], Release.ABORT)
        return Match(pin.hit_tokens, tuple(pin.page_ids))

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages, as in `capacity()`, for callers that need no more. Designs make it O(1)."""
        capacity = self.capacity()
        return capacity.free, capacity.evictable

    def admit(self, seq: Sequence, n: int | None = None, gate: Gate | None = None) -> Pin | None:
        """`pin`, then `reserve` n tokens behind the hit (default: all of num_prefill_tokens)."""
        pin = self.pin(seq, gate)
        if pin is None:
            return None
        take = seq.num_prefill_tokens - pin.hit_tokens if n is None else n
        return None if self.reserve([(seq, take)]) is None else pin

    def extend(self, seq: Sequence, n: int) -> Reservation | None:
        """`reserve` n more tokens for one live sequence."""
        reservations = self.reserve([(seq, n)])
        return None if reservations is None else reservations[0]

    def decode_batch(self, seqs: Iterable[Sequence]) -> DecodeBatch:
        """These sequences as a batch that gains one token each in one call, step after step."""
        from kvarena.allocators.decode_batch import DecodeBatch

        return DecodeBatch(self, seqs)


@dataclass(frozen=True, slots=True)
class Fork:
    """`copies` are pages to copy now, before anything is written: what the child could not share.

    `commit` is what the fork published of the parent, whose row it may have rewritten; `evicted` pages lost their
    content to make room.
    """

    parent: Sequence
    child: Sequence
    copies: tuple[PageCopy, ...] = ()
    commit: Commit | None = None
    evicted: PageIds = ()


@dataclass(frozen=True, slots=True)
class SwapOut:
    """`moves`: device page to host page; `dropped`: host pages whose content had to go."""

    moves: tuple[PageMove, ...]
    dropped: tuple[int, ...] = ()


@runtime_checkable
class SupportsFork(Protocol):
    """Sequences that go on from a common past: parallel samples, beams, forked agents.

    Copies are carried out at once and before the next write, those of one call simultaneously; those whose sequence
    was released meanwhile are dropped.
    """

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
        """Make `child` live with the computed tokens of `parent`, which its own tokens must begin with.

        num_tokens: only so many of them, where a scheduler's parent is ahead of its results; its KV behind them may
        be written at any time, so a page that `num_tokens` does not fill is copied at once.

        Sets the child's `num_computed_tokens`, and `num_prefill_tokens` to the same once its prompt is computed.
        None: no room, and nothing changed. ValueError: the parent is not live or computed nothing, or the child is
        live already or has other tokens; num_tokens is not from 1 to what is computed, or so small that the child
        would still see pages that the parent's window left behind.
        """
        ...

    def prepare_write(self, seq: Sequence, start: int, end: int) -> list[PageCopy] | None:
        """See to it that the pages of positions [start, end) are the sequence's own or hold what it will write.

        To be called for whatever a step writes, before or after its `reserve`; positions without a slot yet need
        nothing. Returns the copies to carry out; None: no room, and nothing changed. An adapter hears of copies by
        `update(Reservation(seq, rewritten=...))` or `refresh(seq)`. ValueError: `start` lies before
        `num_computed_tokens`.
        """
        ...


@runtime_checkable
class SupportsSwap(Protocol):
    def swap_out(self, seq: Sequence) -> SwapOut | None: ...

    def swap_in(self, seq: Sequence) -> list[PageMove] | None: ...
