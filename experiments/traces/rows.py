"""Rows of a source, whatever it is: JSONL or CSV file, DataFrame, list. Each knows where it stands.

A `Row` hands out checked values; each error names file, line, field, expected and found.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from kvarena.experiments.traces.base import MAX_TOKEN
from kvarena.experiments.traces.lines import TextFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_COUNT = 2**31 - 1
"""The largest length in tokens that a row may state."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)


def _short(value: Any) -> str:
    """The value as an error message shows it."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `where` is file:line (or the like), `text` says that values are text (CSV)."""

    where: str
    fields: Mapping[str, Any]
    text: bool = False

    def fail(self, field: str, expected: str, found: Any) -> NoReturn:
        """Raises ValueError with place, field, expected and found."""
        raise ValueError(f"{self.where}: field {field!r}: expected {expected}, found {_short(found)}")

    def has(self, field: str) -> bool:
        return self.fields.get(field) is not None

    def count(self, field: str, *, minimum: int = 0) -> int:
        """A whole number of tokens in [minimum, 2^31 - 1]."""
        value = self.fields.get(field)
        number = self._parse(value)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not isinstance(number, int) or not minimum <= number <= MAX_COUNT:
            self.fail(field, f"a whole number from {minimum} to {MAX_COUNT}", value)
        return number

    def time(self, field: str) -> int | float:
        """A finite number >= 0, as it is written: the unit belongs to the format."""
        value = self.fields.get(field)
        number = self._parse(value)
        if number is None or not _is_time(number):
            self.fail(field, "a finite number >= 0", value)
        return number

    def string(self, field: str) -> str | None:
        """A name (text or whole number) as text, or None when the field is missing."""
        value = self.fields.get(field)
        if value is None:
            return None
        if isinstance(value, str):
            if not _is_unicode(value):
                self.fail(field, "text without lone surrogates", value)
            return value
        number = self._parse(value)
        if not isinstance(number, int):
            self.fail(field, "text or a whole number", value)
        return str(number)

    def names(self, field: str) -> list[int]:
        """Ids as names: whole numbers of any size and sign."""
        values = self.list(field)
        if not set(map(type, values)) <= {int}:
            self.fail(field, "a list of whole numbers", next(value for value in values if type(value) is not int))
        return values

    def tokens(self, field: str) -> NDArray[np.int32]:
        """Token ids, int32 [n]: whole numbers in [0, 2^31)."""
        import numpy as np

        values = self.names(field)
        for value in values:
            if not 0 <= value <= MAX_TOKEN:
                self.fail(field, f"token ids from 0 to {MAX_TOKEN}", value)
        return np.array(values, dtype=np.int32)

    def scalars(self, known: Iterable[str]) -> dict[str, Any]:
        """Fields that no reader asked for, where they are plain values."""
        taken = set(known)
        return {
            key: value
            for key, value in self.fields.items()
            if key not in taken and isinstance(value, (str, int, float)) and value == value
        }

    def rows(self, field: str) -> list[Row]:
        """A list of objects, each a row that knows its place in this one."""
        places = [(f"{self.where} {field}[{index}]", value) for index, value in enumerate(self.list(field))]
        return [Row(where, as_object(value, where)) for where, value in places]

    def list(self, field: str) -> list[Any]:
        value: Any = self.fields.get(field)
        if hasattr(value, "tolist"):  # NumPy array, as a DataFrame cell may hold
            value = value.tolist()
        if isinstance(value, tuple):
            value = list(value)
        if not isinstance(value, list):
            self.fail(field, "a list", value)
        return value

    def _parse(self, value: Any) -> int | float | None:
        if self.text and isinstance(value, str):
            return parse_number(value)
        if hasattr(value, "item"):  # NumPy scalar
            value = value.item()
        return value if type(value) in (int, float) else None


def parse_number(text: str) -> int | float | None:
    """The number that the text is, or None: no spaces inside, no underscores, no NaN or Infinity.

    >>> parse_number("12"), parse_number("0.5"), parse_number("1_0"), parse_number("nan")
    (12, 0.5, None, None)
    """
    text = text.strip()
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) and len(text) < 400 else None


def _is_unicode(text: str) -> bool:
    """Whether the text can be written: JSON can spell half a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_time(number: int | float) -> bool:
    return number >= 0 and (abs(number) < 2**63 if isinstance(number, int) else math.isfinite(number))


def json_rows(file: TextFile) -> Iterator[Row]:
    """One JSON object a line. NaN, Infinity, duplicate fields and anything but an object are errors."""
    for number, text in file.lines():
        where = f"{file.path}:{number}"
        yield Row(where, parse_object(text, where))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object that the text is. Raises ValueError with `where`."""
    return as_object(parse_json(text, where), where)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """The value, if it is a JSON object. Raises ValueError with `where`."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, found {_short(value)}")
    return value


def parse_json(text: str, where: str) -> Any:
    """JSON without NaN, Infinity or duplicate fields. Raises ValueError with `where`."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected JSON, found a fault at column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{where}: expected a flat JSON object, found nesting too deep to read") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"expected finite numbers, found {name}")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {twice!r}: expected once, found {names.count(twice)} times")
    return fields


def document_rows(file: TextFile) -> Iterator[Row]:
    """Rows of a JSON document: the objects of a list, or the one object that it is."""
    value = parse_json("\n".join(text for _, text in file.lines()) or "null", f"{file.path}")
    items = value if isinstance(value, list) else [value]
    for index, item in enumerate(items):
        where = f"{file.path}: item {index}" if isinstance(value, list) else f"{file.path}"
        yield Row(where, as_object(item, where))


def csv_rows(file: TextFile) -> Iterator[Row]:
    """Rows of a CSV file with a header line. A row with another number of fields is an error."""
    last = 0

    def texts() -> Iterator[str]:
        nonlocal last
        for number, text in file.lines():
            last = number
            yield text

    reader = csv.reader(texts(), strict=True)
    header: list[str] | None = None
    try:
        for values in reader:
            where = f"{file.path}:{last}"
            if header is None:
                header = _header(values, where)
                continue
            if len(values) != len(header):
                raise ValueError(f"{where}: expected {len(header)} fields ({', '.join(header)}), found {len(values)}")
            yield Row(where, {k: v or None for k, v in zip(header, values, strict=True)}, text=True)
    except csv.Error as error:
        raise ValueError(f"{file.path}:{last}: expected CSV, found a fault: {error}") from None


def _header(values: list[str], where: str) -> list[str]:
    header = [value.strip() for value in values]
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise ValueError(f"{where}: field {twice!r}: expected once in the header, found twice")
    return header


def frame_rows(frame: Any) -> Iterator[Row]:
    """Rows of a pandas DataFrame; a missing value is a missing field."""
    columns = [str(name) for name in frame.columns]
    for index, values in enumerate(frame.itertuples(index=False, name=None)):
        fields = {k: v for k, v in zip(columns, values, strict=True) if not (isinstance(v, float) and math.isnan(v))}
        yield Row(f"DataFrame row {index}", fields)


def list_rows(items: Iterable[Any]) -> Iterator[Row]:
    """Rows of a list: token lists (prompts), or dicts with the fields of a format."""
    for index, item in enumerate(items):
        where = f"list item {index}"
        if isinstance(item, Mapping):
            yield Row(where, item)
        elif isinstance(item, (list, tuple)) or hasattr(item, "tolist"):
            yield Row(where, {"token_ids": item})
        else:
            raise ValueError(f"{where}: expected a list of token ids or a dict of fields, found {_short(item)}")


RowSource = Callable[[], Iterator[Row]]
"""Called once per pass."""
