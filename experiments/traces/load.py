"""From rows to a `Trace`: one pass that checks every row, then as many passes as a replay wants.

The file is never held: a pass reads, orders, names and yields one request at a time. Rows out of time order wait in a
buffer only until their turn, so its size is how far they are displaced.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from kvarena.experiments.traces.base import MAX_TOKEN, Request, Trace
from kvarena.experiments.traces.formats import (
    Dropped,
    Format,
    Options,
    RawRequest,
    check_options,
    get_format,
    recognise,
    recognise_folder,
)
from kvarena.experiments.traces.lines import MAX_DOCUMENT_BYTES, TextFile
from kvarena.experiments.traces.packed import SUFFIX as PACKED
from kvarena.experiments.traces.packed import PackedFile
from kvarena.experiments.traces.rows import Row, RowSource, csv_rows, document_rows, frame_rows, json_rows, list_rows
from kvarena.experiments.traces.visible import ChainCheck, VisibleMeasure
from numpy.typing import NDArray

MAX_OWN_TOKENS = 2**24
"""Tokens of a prompt that is known by its length alone: more than any context window, and 128 MiB of ids."""


def load_file(path: Path, format: str | None, *, name: str, options: dict[str, Any], **settings: Any) -> Trace:
    """A trace from a file (.jsonl, .json, .csv, .msgpack, each also .gz) or a folder.

    Raises ValueError as `load_trace` says.
    """
    fmt = get_format(format) if format else None
    if path.is_dir():
        fmt = fmt or recognise_folder(path)
        rows = _folder_rows(path, fmt)
    else:
        rows, kinds = _file_rows(path, fmt)
        fmt = fmt or recognise(_first_row(rows, str(path)), kinds)
    return _trace(rows, fmt, options, name=name, path=path, **settings)


def load_rows(rows: RowSource, format: str | None, *, name: str, options: dict[str, Any], **settings: Any) -> Trace:
    """A trace from a DataFrame's or list's rows, whose fields decide the format unless it is given."""
    fmt = get_format(format) if format else recognise(_first_row(rows, name), ("jsonl", "csv"))
    return _trace(rows, fmt, options, name=name, path=None, **settings)


def _file_rows(path: Path, fmt: Format | None) -> tuple[RowSource, tuple[str, ...]]:
    if PACKED in path.suffixes or (fmt is not None and fmt.kind == "msgpack"):
        return PackedFile(path), ("msgpack",)
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    suffix = suffixes[-1] if suffixes else ""
    if fmt.kind == "csv" if fmt else suffix == ".csv":
        return CsvFile(path), ("csv",)
    if suffix == ".json":
        document = TextFile(path, max_line_bytes=MAX_DOCUMENT_BYTES)
        return (lambda: document_rows(document)), ("jsonl",)
    file = TextFile(path)
    return (lambda: json_rows(file)), ("jsonl",)


class CsvFile:
    """Rows of a CSV file, and whether its last line may have been cut: a shorter number is a number all the same."""

    def __init__(self, path: Path) -> None:
        self._file = TextFile(path)

    def __call__(self) -> Iterator[Row]:
        return csv_rows(self._file)

    def notes(self) -> list[str]:
        whole = self._file.ends_with_newline
        return [] if whole else ["the last line has no newline: if the file was cut, its last number may be cut too"]


def _folder_rows(path: Path, fmt: Format) -> RowSource:
    if fmt.open_folder is None:
        raise ValueError(f"{path}: expected a file of format {fmt.name!r}, found a folder")
    return fmt.open_folder(path)


def _first_row(rows: RowSource, where: str) -> Row:
    for row in rows():
        return row
    raise ValueError(f"{where}: expected at least one row, found none")


def _trace(
    rows: RowSource,
    fmt: Format,
    options: dict[str, Any],
    *,
    name: str,
    path: Path | None,
    speed: float,
    limit: int | None,
) -> Trace:
    checked = replace(check_options(fmt, options), path=path)
    pipeline = Pipeline(rows, fmt, checked, speed=speed, limit=limit)
    scan = pipeline.scan(str(path or name))
    settings: dict[str, Any] = {k: v for k, v in options.items() if not callable(v)}
    source = {"format": fmt.name, **settings, "speed": speed, "limit": limit, "dropped": dict(scan.dropped)}
    return Trace(
        name=name,
        visible=scan.measure.visible(scan.grain, reuse=scan.has_ids),
        read=lambda: pipeline.read(scan),
        num_requests=scan.num_requests,
        source=source if path is None else {"path": str(path), **source},
        path=path,
        warnings=[
            *scan.warnings(),
            *fmt.notes,
            *(rows.notes() if isinstance(rows, CsvFile | PackedFile) else []),
        ],
    )


@dataclass
class Scan:
    """What the first pass found."""

    grain: int = 1
    ticks: int = 1
    num_requests: int = 0
    base: int | float = 0
    timed: bool = True
    has_ids: bool = True
    following: int = 0
    out_of_order: int = 0
    ranks: NDArray[np.int64] | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    measure: VisibleMeasure = field(default_factory=VisibleMeasure)
    chains: ChainCheck = field(default_factory=ChainCheck)

    def warnings(self) -> list[str]:
        found = []
        if self.out_of_order:
            found.append(f"{self.out_of_order} rows out of order: sorted by time, equal times keep the file's order")
        if not self.timed:
            found.append("no arrival times: requests keep the order of the source and all arrive at 0 s")
        if not self.has_ids:
            found.append("lengths only: every prompt gets token ids of its own, no prefix can hit")
        if self.following:
            found.append(f"{self.following} arrivals follow a reply whose time is not in the trace: it counts as 0 s")
        if self.chains.unchained:
            found.append(
                f"{self.chains.unchained} ids stand behind different ids on different rows: they name content, not "
                "prefixes, and a hit on them may be false"
            )
        if self.chains.uneven:
            found.append(
                f"{self.chains.uneven} ids stand for fewer tokens on one row than on another: a last block that is cut "
                "off should have an id of its own; here the tokens that both have count as equal"
            )
        found += [f"{count} rows dropped: {reason}" for reason, count in self.dropped.items()]
        return found


class DenseIds:
    """Names to indices 0, 1, 2 ... in order of first use, so 64-bit and negative ids are safe."""

    def __init__(self, grain: int) -> None:
        self._grain = grain
        self._index: dict[Any, int] = {}

    def map(self, names: list[Any] | NDArray[np.int64], where: str) -> NDArray[np.int32]:
        """int32 [len(names)]. Raises ValueError when the tokens of the last id pass 2^31."""
        index = self._index
        listed = names if isinstance(names, list) else names.tolist()
        dense = [index.setdefault(name, len(index)) for name in listed]
        if len(index) * self._grain > MAX_TOKEN + 1:
            raise ValueError(
                f"{where}: field 'hash_ids': expected at most 2^31 / {self._grain} = {(MAX_TOKEN + 1) // self._grain} "
                f"distinct ids (a token is id x {self._grain} + j and has to fit 31 bits), found {len(index)}"
            )
        return np.array(dense, dtype=np.int32)


class Pipeline:
    """rows -> raw requests -> time order -> dense ids -> requests."""

    def __init__(self, rows: RowSource, fmt: Format, options: Options, *, speed: float, limit: int | None) -> None:
        self.rows = rows
        self.format = fmt
        self.options = options
        self.speed = speed
        self.limit = limit

    def scan(self, where: str) -> Scan:
        """Checks every row and measures what the trace can show."""
        scan = Scan()
        times = array("d")
        first: int | float = 0
        ids: set[str] = set()
        finish: _Finish | None = None
        for raw in self._raw(scan.dropped):
            if finish is None:
                first, scan.timed, scan.grain = raw.time or 0, raw.time is not None, raw.grain
                scan.ticks = raw.ticks_per_second or self.format.ticks_per_second
                scan.has_ids = has_ids(raw)
                finish = _Finish(scan, first, self.speed)
            self._check(raw, scan, ids, len(times))
            # Differences, not times: a nanosecond epoch does not fit a double.
            times.append((raw.time or 0) - first)
            request = finish(raw, len(times) - 1)
            scan.measure.feed(request, request.arrival_s if scan.timed else None)
            scan.chains.feed(request)
            scan.following += "delay_s" in request.extra
        if not times:
            raise ValueError(f"{where}: expected at least one request, found none{_reasons(scan.dropped)}")
        scan.num_requests = len(times)
        scan.base = first
        self._order(scan, np.frombuffer(times))
        return scan

    def read(self, scan: Scan) -> Iterator[Request]:
        """Requests in arrival order."""
        finish = _Finish(scan, scan.base, self.speed)
        for position, raw in self._in_order(scan.ranks):
            yield finish(raw, position)

    def _raw(self, dropped: Counter[str]) -> Iterator[RawRequest]:
        for raw in islice(self.format.parse(self.rows(), self.options), self.limit):
            if isinstance(raw, Dropped):
                dropped[raw.reason] += 1
            else:
                yield raw

    def _in_order(self, ranks: NDArray[np.int64] | None) -> Iterator[tuple[int, RawRequest]]:
        """(position in the file, raw request) by rank; rows ahead of their turn wait."""
        waiting: dict[int, tuple[int, RawRequest]] = {}
        turn = 0
        for position, raw in enumerate(self._raw(Counter())):
            if ranks is None:
                yield position, raw
                continue
            waiting[int(ranks[position])] = (position, raw)
            while turn in waiting:
                yield waiting.pop(turn)
                turn += 1

    def _check(self, raw: RawRequest, scan: Scan, ids: set[str], position: int) -> None:
        if not has_ids(raw) and raw.num_prompt_tokens > MAX_OWN_TOKENS:
            raise ValueError(
                f"{raw.where}: prompt: expected at most {MAX_OWN_TOKENS} tokens where only its length is known, found "
                f"{raw.num_prompt_tokens}"
            )
        if raw.grain != scan.grain:
            raise ValueError(
                f"{raw.where}: field 'block_size': expected {scan.grain} tokens an id on every row, found {raw.grain}"
            )
        if (raw.ticks_per_second or self.format.ticks_per_second) != scan.ticks and raw.time is not None:
            raise ValueError(f"{raw.where}: arrival time: expected one unit on all rows, found another here")
        if (raw.time is not None) != scan.timed:
            found = "none" if raw.time is None else "one"
            raise ValueError(f"{raw.where}: arrival time: expected on every row or on none, found {found} here")
        if has_ids(raw) != scan.has_ids:
            found = "some" if has_ids(raw) else "none"
            raise ValueError(f"{raw.where}: ids of the prompt: expected on every row or on none, found {found} here")
        name = raw.request_id if raw.request_id is not None else f"r{position}"
        if name in ids:
            raise ValueError(f"{raw.where}: field 'request_id': expected one row for each, found {name!r} twice")
        ids.add(name)

    def _order(self, scan: Scan, times: NDArray[np.float64]) -> None:
        scan.out_of_order = int((times < np.maximum.accumulate(times)).sum())
        if not scan.out_of_order:
            return
        order = np.argsort(times, kind="stable")
        scan.ranks = np.empty(len(times), np.int64)
        scan.ranks[order] = np.arange(len(times))
        scan.base = next(raw.time for i, raw in enumerate(self._raw(Counter())) if i == order[0]) or 0
        scan.measure = VisibleMeasure()
        for request in self.read(scan):
            scan.measure.feed(request, request.arrival_s)


class _Finish:
    """Raw requests in arrival order to requests: dense ids, seconds from the first arrival."""

    def __init__(self, scan: Scan, base: int | float, speed: float) -> None:
        self._ticks = scan.ticks
        self._speed = speed
        self._base = base
        self._dense = DenseIds(scan.grain)

    def __call__(self, raw: RawRequest, position: int) -> Request:
        hash_ids = None if raw.names is None else self._dense.map(raw.names, raw.where)
        token_ids = raw.token_ids if has_ids(raw) else own_tokens(position, raw.num_prompt_tokens)
        output_ids = raw.output_ids
        if raw.output_names is not None:
            output_ids = self._dense.map(raw.output_names, raw.where)
        return Request(
            request_id=raw.request_id if raw.request_id is not None else f"r{position}",
            arrival_s=0.0 if raw.time is None else (raw.time - self._base) / self._ticks / self._speed,
            num_prompt_tokens=raw.num_prompt_tokens,
            num_output_tokens=raw.num_output_tokens,
            grain=raw.grain,
            token_ids=token_ids,
            hash_ids=hash_ids,
            output_ids=output_ids,
            session_id=raw.session_id,
            namespace=raw.namespace,
            extra=raw.extra,
        )


def has_ids(raw: RawRequest) -> bool:
    return raw.names is not None or raw.token_ids is not None


def own_tokens(position: int, length: int) -> NDArray[np.int32]:
    """Token ids, int32 [length], of a prompt known by its length: no other prompt starts with the same token."""
    return ((position + np.arange(length, dtype=np.int64)) & MAX_TOKEN).astype(np.int32)


def _reasons(dropped: Counter[str]) -> str:
    return "".join(f"; {count} rows dropped: {reason}" for reason, count in dropped.items())


def source_rows(spec: Any) -> RowSource | None:
    """Rows of a DataFrame or a list, or None for anything else."""
    if hasattr(spec, "itertuples") and hasattr(spec, "columns"):
        return lambda: frame_rows(spec)
    if isinstance(spec, (list, tuple)):
        return lambda: list_rows(spec)
    return None
