"""The fields of a sweep that vary over its cells, as columns of a table: which cell a row is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

PREFIX = "sweep."  # as in sweep.csv
_IN_ITS_ROW = {"trace", "pool", "seeds", "allocators"}  # a row has its trace, pool and allocator, and is of all seeds
_IN_ITS_HEAD = _IN_ITS_ROW | {"unit", "live", "outputs"}  # of a cell's table on the study's page


def varied(points: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Cell -> column (as sweep.csv names it) -> value, of every field that two cells have unlike or only some have.

    A field whose values are of one plain type keeps them; else they are text, as in sweep.csv, and empty where missing.

    >>> varied({"a": {"live": 1, "pool": "1 GiB"}, "b": {"live": 2, "pool": "1 GiB"}})
    {'a': {'sweep.live': 1}, 'b': {'sweep.live': 2}}
    """
    names = list(dict.fromkeys(name for point in points.values() for name in point))
    found: dict[str, dict[str, Any]] = {key: {} for key in points}
    for name in names:
        values = {key: point.get(name) for key, point in points.items()}
        if len({repr(value) for value in values.values()}) == 1:
            continue
        types = {type(value) for value in values.values()}
        plain = len(types) == 1 and types <= {int, float, str, bool}
        for key, value in values.items():
            found[key][PREFIX + name] = value if plain else "" if value is None else str(value)
    return found


def shown(rows: pd.DataFrame, told: set[str] | None = None) -> dict[str, str]:
    """Column -> its short head, of the fields that a row's other columns do not tell; `told`: last names of those that
    they do."""
    told = _IN_ITS_ROW if told is None else told
    columns = [name for name in map(str, rows) if name.startswith(PREFIX) and _last(name) not in told]
    heads = [_last(name) for name in columns]
    return {name: _last(name) if heads.count(_last(name)) == 1 else name[len(PREFIX) :] for name in columns}


def _last(column: str) -> str:
    """`sweep.engine.live` -> live; a field of one allocator keeps its place."""
    above, _, name = column[len(PREFIX) :].rpartition(".")
    return f"{name} ({above})" if above.startswith("allocators.") else name


def alike(rows: pd.DataFrame, fields: Iterable[str]) -> bool:
    """Whether two cells have a row of the same trace, fields, pool and allocator: only their keys tell them apart."""
    names = ["trace", *fields, "pool_bytes", "allocator"]
    return bool(rows[["cell", *names]].drop_duplicates()[names].duplicated().any())


def value_words(value: Any) -> str:
    """A value in a table; nothing for a field that the cell does not set.

    >>> value_words(3.0), value_words(0.25), value_words(float("nan")), value_words("10 %")
    ('3', '0.25', '', '10 %')
    """
    if isinstance(value, float):
        return "" if value != value else f"{value:g}"
    return str(value)


def headline(rows: pd.DataFrame) -> str:
    """What a table of one cell has to say beyond trace, unit, live requests and outputs; empty for nothing."""
    first = rows.iloc[0]
    words = [(head, value_words(first[name])) for name, head in shown(rows, _IN_ITS_HEAD).items()]
    return "".join(f", {head} {value}" for head, value in words if value)
