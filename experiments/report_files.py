"""What a report shows of results that are one file: tables, logs and JSON documents, whole or their first rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.experiments.foreign import MAX_JSON_BYTES, read_object, read_text
from kvarena.experiments.report_pages import Page, Reader
from kvarena.experiments.tables import Table

MAX_ROWS = 200
MAX_CELL = 160  # characters


def _named(kind: str, path: Path) -> str:
    return f"{kind[:1].upper()}{kind[1:]}: {path.name}"


def of_table(kind: str, path: Path) -> Page:
    """A .csv or .parquet, row by row."""
    from kvarena.experiments.verify_files import read_table

    return Page(_named(kind, path), [_frame_table(read_table(path))])


def _frame_table(frame: pd.DataFrame) -> Table:
    shown = frame.head(MAX_ROWS)
    rows = [[_cell(value) for value in row] for row in shown.itertuples(index=False, name=None)]
    return Table("", [str(name) for name in frame.columns], rows, _cut_note(len(frame)))


def _cut_note(count: int) -> list[str]:
    return [f"the first {MAX_ROWS} of {count:,} rows; the file has all"] if count > MAX_ROWS else []


def _cell(value: Any) -> str:
    """Floats in six digits, nested data as JSON, and nothing wider than a line."""
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_CELL else text[:MAX_CELL] + " (cut)"


def of_laws(kind: str, path: Path) -> Page:
    """Predicted against measured."""
    from kvarena.experiments.laws import laws_table, load_laws
    from kvarena.experiments.laws_plots import draw_laws

    found, about = load_laws(path)
    caption = "Each law's prediction (line) and what was measured (marks)."
    return Page(f"Laws: {about}", [laws_table(found)], figures=[(partial(draw_laws, found, about), caption)])


def of_reasons(kind: str, path: Path) -> Page:
    """The reasons of a sweep: the table, or a folder with it and where it comes from."""
    from kvarena.experiments.study import REASONS_FILE, load_reasons, sweep_reasons_table

    file = path / REASONS_FILE if path.is_dir() else path
    about = file.parent / "provenance.json"
    return Page(
        f"Where the prompt tokens went: {path.name}",
        [sweep_reasons_table(load_reasons(file))],
        provenance=read_object(about) if path.is_dir() and about.is_file() else {},
    )


def of_json(kind: str, path: Path) -> Page:
    """A JSON document: its plain fields, and a table for each list of records."""
    return Page(_named(kind, path), list(_document_tables(read_object(path))))


def _document_tables(data: Mapping[str, Any]) -> Iterable[Table]:
    records = {name: value for name, value in data.items() if _is_records(value)}
    plain = _flat({name: value for name, value in data.items() if name not in records})
    yield Table("", ["field", "value"], [[name, _cell(value)] for name, value in plain])
    for name, rows in records.items():
        yield _records_table(name, rows)


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _flat(data: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _records_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in columns] for row in rows[:MAX_ROWS]]
    return Table(title, [str(name) for name in columns], cells, _cut_note(len(rows)))


def of_parts(kind: str, path: Path) -> Page:
    """Measurements on a card: figures and targets where the kernels were timed, else each part's tables."""
    from kvarena.experiments.bench.kernel_plots import load_kernels
    from kvarena.experiments.report_readers import kernels_page

    parts = load_kernels(path)["parts"]
    if any(row.get("study") == "grid" for part in parts.values() for row in part.get("rows", [])):
        return kernels_page(path)
    tables = []
    for name, part in parts.items():
        told = {key: value for key, value in part.items() if key != "provenance"}
        for table in _document_tables(told):
            table.title = f"{name}: {table.title}" if table.title else name
            tables += [table] if table.rows else []
    return Page(_named(kind, path), tables, provenance={name: part["provenance"] for name, part in parts.items()})


def of_log(kind: str, path: Path) -> Page:
    """A decision log: a line an answer."""
    lines = read_text(path, MAX_JSON_BYTES, kind).splitlines()
    rows = [json.loads(line) for line in lines]
    if not _is_records(rows):
        raise ValueError(f"{path}: cannot be read as a {kind} (expected an object on every line)")
    return Page(_named(kind, path), [_records_table("", rows)])


_READERS: dict[str, Callable[[str, Path], Page]] = {
    "laws": of_laws,
    "reasons of a sweep": of_reasons,
    "measurements on a card": of_parts,
    "decision log": of_log,
}


def file_reader(path: Path) -> Reader | None:
    """What reads a result that is one file, or the folder of one; None when it is of no such kind."""
    from kvarena.experiments.verify_kinds import KINDS

    kind = next((kind.name for kind in KINDS if kind.is_it(path)), None)
    if kind is None or (path.is_dir() and kind not in _READERS):
        return None
    by_ending = of_json if path.suffix == ".json" else of_table
    return partial(_READERS.get(kind, by_ending), kind)


def no_result(path: Path) -> str:
    """Why there is nothing to report at `path`: a part of a result, a folder of several, or nothing of ours."""
    from kvarena.experiments.verify_kinds import hint, kind_name

    if path.is_file():
        if whole := kind_name(path.parent):
            return f"{path}: is a part of a result ({whole}); give its folder, {path.parent}"
    elif not path.exists():
        return f"{path}: no result of ours, it is not there"
    return f"{path}: no result of ours{hint(path)}; `kvarena verify kinds` lists every kind"
