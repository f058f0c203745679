"""Ways to damage a right file: cuts, flips, wrong values in each place, wrong encodings and line ends."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

RAW_VALUES = [
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "1e309",
        "-1e309",
        "-1",
        "-0.0",
        "0.5",
        "1e-400",
        "0",
        "null",
        "true",
        "[]",
        "{}",
    ),
    *('""', '"x"', '"nan"', '"1"', r'"\u0000"', r'"\ud800"', r'"\u202e<script>alert(1)</script>\u001b[31m"'),
    *(str(2**31), str(2**32), str(2**63), str(2**64), str(-(2**63) - 1), "1" + "0" * 5000, "01", "1_0", "0x10", "+1"),
    *(
        "[" * 3000 + "]" * 3000,
        '{"a":' * 3000 + "1" + "}" * 3000,
        "[NaN]",
        "[1.5]",
        '["1"]',
        "[true]",
        "[null]",
        "[-1]",
    ),
    *('[{"requests": []}]', "[[[1]]]", '"../../etc/passwd"', '"/dev/zero"'),
]
"""JSON texts that may stand where a value stood; some are no JSON."""

MARK = "\u0001hole\u0001"


def cuts(data: bytes) -> Iterator[bytes]:
    """The file cut at each byte."""
    return (data[:size] for size in range(len(data)))


def flips(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    """`count` single bits flipped, anywhere."""
    rng = random.Random(seed)
    for _ in range(count):
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        yield data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def mixed(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    """`count` random splices: a piece doubled, dropped, swapped with another, or overwritten."""
    rng = random.Random(seed)
    for _ in range(count):
        a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        c = rng.randrange(len(data) + 1)
        junk = bytes(rng.randrange(256) for _ in range(rng.randrange(4)))
        yield rng.choice([data[:a] + data[a:b] * 2 + data[b:], data[:a] + data[b:], data[:c] + data[a:b] + data[c:],
                          data[:a] + junk + data[b:], data[:a] + junk + data[a:]])  # fmt: skip


def encodings(data: bytes) -> dict[str, bytes]:
    """The same text in other bytes."""
    text = data.decode()
    return {
        "BOM": b"\xef\xbb\xbf" + data,
        "two BOMs": b"\xef\xbb\xbf\xef\xbb\xbf" + data,
        "CRLF": text.replace("\n", "\r\n").encode(),
        "CR": text.replace("\n", "\r").encode(),
        "mixed ends": b"".join(
            line.rstrip(b"\n") + (b"\r\n" if number % 2 else b"\n") for number, line in enumerate(data.splitlines(True))
        ),
        "no last newline": data.rstrip(b"\n"),
        "blank lines": data.replace(b"\n", b"\n\n   \n"),
        "UTF-16": text.encode("utf-16"),
        "UTF-32": text.encode("utf-32"),
        "Latin-1": data.replace(b"a", b"\xe9", 1),
        "NUL bytes": data.replace(b"\n", b"\x00\n"),
        "only NULs": b"\x00" * 100,
        "empty": b"",
        "blank": b"\n \n\t\n",
        "gzip under a plain name": gzip.compress(data),
        "cut gzip": gzip.compress(data)[:-5],
        "gzip with junk behind it": gzip.compress(data) + b"junk",
        "a picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        "vertical ends": data.replace(b"\n", b"\x0b"),
        "line separators": text.replace("\n", "\u2028").encode(),
    }


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value inside a JSON value, itself included."""
    yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from places(part, (*path, index))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with `new` at `path`."""
    if not path:
        return new
    out = copy.deepcopy(value)
    target = out
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = new
    return out


def without(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy without what stands at `path`."""
    out = copy.deepcopy(value)
    target = out
    for step in path[:-1]:
        target = target[step]
    del target[path[-1]]
    return out


def wrong_fields(rows: list[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Each place of each row: dropped, doubled, and with each wrong value. Yields (what, file content)."""
    for number, row in enumerate(rows):
        for path in places(row):
            where = f"row {number}{''.join(f'[{step}]' for step in path)}"
            if path:
                yield f"{where} dropped", _dump(rows, number, json.dumps(without(row, path)))
            if path and isinstance(path[-1], str):
                doubled = json.dumps(put(row, (*path[:-1], MARK), 0)).replace(json.dumps(MARK), json.dumps(path[-1]))
                yield f"{where} twice", _dump(rows, number, doubled)
            holed = json.dumps(put(row, path, MARK))
            for raw in RAW_VALUES:
                yield f"{where} = {raw[:40]}", _dump(rows, number, holed.replace(json.dumps(MARK), raw))


def _dump(rows: list[dict[str, Any]], number: int, text: str) -> bytes:
    texts = [json.dumps(row) for row in rows]
    texts[number] = text
    return ("\n".join(texts) + "\n").encode("utf-8", "surrogatepass")
