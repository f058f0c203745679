"""What a format is, and the registry of formats.

A format is one small module with a `FORMAT`: how its first row is recognised, what its numbers mean (unit of time,
tokens an id), and a generator that turns rows into raw requests. `register` adds one from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvarena.experiments.traces.rows import Row, RowSource

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal["jsonl", "csv", "msgpack"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may ask of a reader.

    grain         tokens that one id stands for, where the file does not say (None = the format's own)
    full_blocks   hash_ids cover floor(input / grain) blocks: the tail gets an id of its own
    keep_failed   keep rows whose reply is empty (BurstGPT marks failed calls so)
    keep_copies   keep conversations that are exact copies of an earlier one (WEKA)
    start_every_s conversations that have no start of their own start one after the other, that far apart (WEKA)
    engine        who published the KV events: "vllm" or "sglang" (their replies are stored in different ways)
    tokenizer     text -> token ids, for formats that hold text; one with `apply_chat_template` renders chats itself
    path          the file that is read, for formats that need its neighbours; set by the loader
    """

    grain: int | None = None
    full_blocks: bool = False
    keep_failed: bool = False
    keep_copies: bool = False
    start_every_s: float = 60.0
    engine: str = "vllm"
    tokenizer: Any = None
    path: Path | None = None


@dataclass(slots=True)
class RawRequest:
    """A row as its format reads it: ids still names, order that of the file. Without names or token ids: lengths only.

    time   in the format's unit, or in ticks a second of its own (`ticks_per_second`)
    """

    where: str
    num_prompt_tokens: int
    num_output_tokens: int
    time: int | float | None = None
    ticks_per_second: int | None = None
    grain: int = 1
    request_id: str | None = None
    token_ids: NDArray[np.int32] | None = None
    names: list[Any] | NDArray[np.int64] | None = None
    output_ids: NDArray[np.int32] | None = None
    output_names: list[Any] | None = None
    session_id: str | None = None
    namespace: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is left out, and why. Drops are counted and reported, never silent."""

    reason: str


Parse = Callable[[Iterator[Row], Options], Iterator[RawRequest | Dropped]]


@dataclass(frozen=True)
class Format:
    """One trace format.

    ticks_per_second  1000 for milliseconds, 1 for seconds, 10^9 for nanoseconds
    grain             tokens that one id stands for unless a row or the caller says otherwise; 0 = lengths only
    matches           does a first row with these fields belong to this format?
    parse             rows to raw requests
    notes             what is to be said with every trace of this format
    options           names of the `Options` that it honours
    open_folder       rows of a folder, for formats that are spread over files
    holds             does this folder hold such files?
    """

    name: str
    about: str
    kind: Kind
    fields: str
    grain: int
    ticks_per_second: int
    matches: Callable[[Mapping[str, Any]], bool]
    parse: Parse
    options: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    open_folder: Callable[[Path], RowSource] | None = None
    holds: Callable[[Path], bool] | None = None


_BUILT_IN = (
    "ragpulse",
    "bailian",
    "hashes",
    "mooncake",
    "tokens",
    "llmservingsim",
    "weka",
    "openai",
    "sharegpt",
    "azure",
    "burstgpt",
    "vidur",
    "kv_events",
)
"""Modules of this package with a FORMAT, the more special first: the first match wins."""

_extra: dict[str, Format] = {}


def register(fmt: Format) -> None:
    """Adds a format under its name. Raises ValueError when the name is taken."""
    if fmt.name in formats():
        raise ValueError(f"format {fmt.name!r} exists already")
    _extra[fmt.name] = fmt


def formats() -> dict[str, Format]:
    """All formats by name, in the order in which a first row is tried."""
    built_in = (import_module(f"kvarena.experiments.traces.{name}").FORMAT for name in _BUILT_IN)
    return {**_extra, **{fmt.name: fmt for fmt in built_in}}


def get_format(name: str) -> Format:
    """The format of that name. Raises ValueError that lists the formats."""
    known = formats()
    if name not in known:
        raise ValueError(f"unknown trace format {name!r}: expected one of\n{format_table()}")
    return known[name]


def recognise(row: Row, kinds: Iterable[str]) -> Format:
    """The format whose fields the first row has; never a guess from the size of its numbers.

    Raises ValueError that lists the formats when none fits.
    """
    for fmt in formats().values():
        if fmt.kind in kinds and fmt.matches(row.fields):
            return fmt
    found = ", ".join(sorted(map(str, row.fields))) or "no fields"
    raise ValueError(
        f"{row.where}: unknown trace format: expected the fields of one of\n{format_table()}\nfound: {found[:300]}"
    )


def recognise_folder(path: Path) -> Format:
    """The format whose files the folder holds. Raises ValueError that names those that can be folders."""
    for fmt in formats().values():
        if fmt.holds is not None and fmt.holds(path):
            return fmt
    able = ", ".join(fmt.name for fmt in formats().values() if fmt.holds is not None)
    raise ValueError(f"{path}: expected a file, or a folder with the files of one of {able}; found neither")


def format_table() -> str:
    """One line a format: its name and its fields."""
    return "\n".join(f"  {fmt.name:<14} {fmt.fields}" for fmt in formats().values())


def check_options(fmt: Format, options: Mapping[str, Any]) -> Options:
    """Options of that format. Raises ValueError for one that it does not know."""
    for name, value in options.items():
        if name not in fmt.options:
            allowed = ", ".join(sorted(fmt.options)) or "none"
            raise ValueError(f"option {name!r}: expected one of those of format {fmt.name!r} ({allowed})")
        expected, fits = _OPTION_TYPES.get(name, ("", lambda _: True))
        if not fits(value):
            raise ValueError(f"option {name!r}: expected {expected}, found {value!r}")
    return Options(**options)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_FLAG = ("true or false", lambda value: isinstance(value, bool))
_OPTION_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "grain": ("a whole number >= 1", lambda value: type(value) is int and value >= 1),
    "full_blocks": _FLAG,
    "engine": ("vllm or sglang", lambda value: value in ("vllm", "sglang")),
    "keep_failed": _FLAG,
    "keep_copies": _FLAG,
    "start_every_s": ("a number of seconds from 0 to 1e9", lambda value: _is_number(value) and 0 <= value <= 1e9),
}
