"""Files that anybody may have written, edited or cut: whatever their shape, one ValueError that names the file, within
a stated memory. TOML and JSON documents here; lines and traces in `traces/lines.py`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_TOML_BYTES = 2**17
"""A longer config is refused: the longest of ours has 4 KiB."""

MAX_DEPTH = 64
"""A config nested deeper, by brackets or by a key of more parts, is refused: tomllib takes time with the square of a
key's parts, and walks over what it gives end at Python's recursion limit."""

MAX_JSON_BYTES = 2**26
"""A longer document of a result is refused: 64 MiB are an index of 200,000 cells."""

_PART = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""  # of a key; no part is looked at twice
_LONG_KEY = re.compile(rf"(?:{_PART}[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}", re.ASCII)
# What reading numbers out of text, a list for a mapping, or an index past an end gives. A broken invariant of ours
# (AllocatorError) is none of these, and passes.
_SHAPE = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, NotImplementedError)


@contextmanager
def reading(path: Path | None, what: str = "a result of kvarena") -> Iterator[None]:
    """Within, contents that are not shaped as expected are a ValueError that names `path`, the error of the shape as
    its cause. `path` None: nothing that was saved is read, and nothing is translated.

    >>> with reading(Path("out/rate")):
    ...     [] * 0.5
    Traceback (most recent call last):
    ...
    ValueError: out/rate: cannot be read as a result of kvarena (TypeError: can't multiply sequence by non-int of type \
'float')
    """
    try:
        yield
    except ValueError as error:
        if path is None or str(path) in str(error):
            raise
        raise ValueError(f"{path}: cannot be read as {what} ({error})") from error
    except _SHAPE as error:
        if path is None:
            raise
        raise ValueError(f"{path}: cannot be read as {what} ({type(error).__name__}: {error})") from error


def read_text(path: Path, most: int, what: str) -> str:
    """UTF-8 text of a file of at most `most` bytes, lines ending in a newline. A pipe or a device is no file."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: cannot be read as {what} (expected a file, found {_kind(path)})")
        with path.open("rb") as file:
            data = file.read(most + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as {what} ({error})") from None
    if len(data) > most:
        raise ValueError(f"{path}: cannot be read as {what} (expected at most {most} bytes, found more)")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device or socket"


def read_toml(path: Path, what: str = "a config") -> dict[str, Any]:
    """A TOML document. Raises ValueError naming the file and, of a fault in it, the place."""
    return parse_toml(read_text(path, MAX_TOML_BYTES, what), path)


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """The same of text that was read from `path`."""
    too_deep = f"{path}: nested too deeply: expected at most {MAX_DEPTH} levels"
    if _LONG_KEY.search(text):
        raise ValueError(too_deep)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    except RecursionError:
        raise ValueError(too_deep) from None
    if _is_deep(data):
        raise ValueError(too_deep)
    return data


def _is_deep(data: dict[str, Any]) -> bool:
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        level = [part for one in level if isinstance(one, dict | list) for part in _parts(one)]
    return bool(level)


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def read_json(path: Path, what: str = "a result of kvarena") -> Any:
    """A JSON document. Raises ValueError naming the file."""
    text = read_text(path, MAX_JSON_BYTES, what)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: cannot be read as {what} (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as {what} ({error})") from None


def read_object(path: Path, what: str = "a result of kvarena") -> dict[str, Any]:
    """A JSON document that is an object. Raises ValueError naming the file."""
    data = read_json(path, what)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected an object, found {type(data).__name__}")
    return data
