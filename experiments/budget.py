"""From bytes on the device to pages, counting everything that an allocator needs there.

Lines of a budget: the KV of pages that requests can own, the padding page, the page table (or req_to_token) and
slot_mapping. Both designs get the same bytes; what their tables cost, their pages do not get.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace

from kvarena.experiments.models import ModelShape

ENTRY_BYTES = 4  # int32 page or slot ids
SLOT_MAPPING_BYTES = 8  # int64
MAX_SLOTS = 2**31
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "kB", "MB", "GB", "TB", "PB")
_UNITS = {name.lower(): (1024 if name.endswith("iB") else 1000) ** "bkmgtp".index(name[0].lower()) for name in _NAMES}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


class PoolTooSmallError(ValueError):
    """A pool that holds no page, or not the longest request. Commands that choose pools themselves say what to give."""


@dataclass(frozen=True)
class Budget:
    """Where the bytes of a pool go. `unused_bytes` is too small for one more page."""

    pool_bytes: int
    num_pages: int
    page_size: int
    kv_bytes: int
    padding_page_bytes: int
    table_bytes: int
    slot_mapping_bytes: int
    unused_bytes: int

    def lines(self) -> dict[str, int]:
        """Field names and values, in order."""
        return asdict(self)


@dataclass(frozen=True)
class Tables:
    """Sizes that fix the tables of a run.

    max_rows    requests that are live at once
    max_tokens  tokens of the longest request
    step_tokens tokens of the longest step; None: those of the longest request
    """

    max_rows: int
    max_tokens: int
    step_tokens: int | None = None


def parse_bytes(text: str, name: str = "pool", least: int = 1) -> int:
    """Bytes from a size with a unit, at least `least`. Raises ValueError, naming `name`, when the unit is missing or
    unknown, or for no size.

    >>> parse_bytes("16 GiB") == 16 * 2**30
    True
    """
    match = _SIZE.fullmatch(text)
    if match is not None and match.group(2).lower() not in _UNITS:
        known = ", ".join(_NAMES)
        raise ValueError(f"{name}: expected a size such as '16 GiB' in a unit of {known}, found {text!r}")
    if match is None:
        others = ", a share such as '10 %' or 'sweep'" if name == "pool" else ""
        raise ValueError(f"{name}: expected a size with a unit such as '16 GiB'{others}, found {text!r}")
    number = float(match.group(1)) * _UNITS[match.group(2).lower()]
    if not least <= number < 2**63:
        raise ValueError(f"{name}: expected from {least} byte{'' if least == 1 else 's'} to 2^63, found {text[:60]!r}")
    return int(number)


def parse_share(text: str) -> float | None:
    """The fraction that "10 %" or "0.5%" says; None for anything else. Raises ValueError outside (0, 100].

    >>> parse_share("10 %")
    0.1
    """
    if not text.strip().endswith("%"):
        return None
    try:
        percent = float(text.strip()[:-1])
    except ValueError:
        raise ValueError(f"pool: expected a share such as '10 %', found {text!r}") from None
    if not 0 < percent <= 100:
        raise ValueError(f"pool: expected a share above 0 % and up to 100 %, found {text!r}")
    return percent / 100


def check_size(text: str) -> None:
    """Raise ValueError unless `text` is "sweep", a share or a size."""
    if text != "sweep" and parse_share(text) is None:
        parse_bytes(text)


def format_bytes(number: float) -> str:
    """A size for people, three digits and a binary unit.

    >>> format_bytes(17179869184)
    '16 GiB'
    """
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def page_table_bytes(kind: str, page_size: int, tables: Tables) -> int:
    """Bytes of the rows of live requests: one entry a page (block_table), or one a token (req_to_token).

    SGLang 0.5.22: req_to_token has one row more than requests can be live, for padded batch entries.
    """
    if kind == "token":
        return (tables.max_rows + 1) * tables.max_tokens * ENTRY_BYTES
    return tables.max_rows * _pages(tables.max_tokens, page_size) * ENTRY_BYTES


def table_bytes(kind: str, page_size: int, tables: Tables) -> int:
    """Bytes of the page table and of what a step makes of it.

    vLLM 0.32.0: the rows of a batch are gathered into a table of their own, as large as the first. Kernels read
    req_to_token in place.
    """
    return page_table_bytes(kind, page_size, tables) * (1 if kind == "token" else 2)


def fit_pool(
    pool_bytes: int, kind: str, page_size: int, shape: ModelShape, tables: Tables, *, tokens_per_id: int = 1
) -> Budget:
    """The most pages that fit into `pool_bytes`. Raises ValueError when not even one does, and past 2^31 slots.

    tokens_per_id: tokens of KV behind one replayed token, when a trace's hash ids stand for tokens.
    """
    one = bytes_for_pages(1, kind, page_size, shape, tables, tokens_per_id=tokens_per_id)
    page = one.padding_page_bytes
    num_pages = (pool_bytes - one.table_bytes - one.slot_mapping_bytes) // page - 1
    if num_pages < 1:
        raise PoolTooSmallError(
            f"pool: {pool_bytes} bytes hold no page of {kind}: a page of {page_size * tokens_per_id} tokens takes "
            f"{page} bytes, the padding page as much, the table {one.table_bytes} and slot_mapping "
            f"{one.slot_mapping_bytes}; give a larger pool"
        )
    if (num_pages + 1) * page_size > MAX_SLOTS:
        raise ValueError(
            f"pool: {pool_bytes} bytes hold {num_pages} pages of {kind}: expected at most 2^31 slots, padding page "
            f"included, since slot ids are int32; found {(num_pages + 1) * page_size}"
        )
    exact = bytes_for_pages(num_pages, kind, page_size, shape, tables, tokens_per_id=tokens_per_id)
    return replace(exact, pool_bytes=pool_bytes, unused_bytes=pool_bytes - exact.pool_bytes)


def bytes_for_pages(
    num_pages: int, kind: str, page_size: int, shape: ModelShape, tables: Tables, *, tokens_per_id: int = 1
) -> Budget:
    """The budget of exactly `num_pages` pages."""
    page = shape.bytes_per_page(page_size) * tokens_per_id
    table = table_bytes(kind, page_size, tables)
    mapping = (tables.step_tokens or tables.max_tokens) * SLOT_MAPPING_BYTES
    total = (num_pages + 1) * page + table + mapping
    return Budget(total, num_pages, page_size, num_pages * page, page, table, mapping, 0)


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
