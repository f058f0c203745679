"""Saved tables and documents, damaged: bytes cut and flipped, and right files with wrong, missing or doubled parts."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pandas as pd
from support import hostile

JUNK = (b"", b"[]", b"{}", b"null", b"[" * 5000, b"\x00" * 99, b"\xff\xfe\x00", b"1e309", b"a,b\n1,2\n")
WRONG_JSON = ("NaN", "1e309", "null", "true", "[]", "{}", '"x"', "-1", "0.5", str(2**64), "[[1]]", '""')
WRONG_CELLS = ("", "x", "-1", "1e309", "nan", "9" * 30, "True", "[]", "<b>\x1b[31m")
WRONG_VALUES = ("x", -1, float("inf"), None, 2**62)


def damaged(path: Path, seed: int, places: int = 20) -> Iterator[tuple[str, bytes]]:
    """What was done, and the content: bytes of any file, and the parts of a .json, .csv or .parquet."""
    data, rng = path.read_bytes(), random.Random(seed)
    yield from ((f"junk {junk[:9]!r}", junk) for junk in JUNK)
    yield from (("cut", part) for part in list(hostile.cuts(data))[:: max(len(data) // 4, 1)])
    yield from (("a bit flipped", part) for part in hostile.flips(data, seed, 8))
    yield from (("spliced", part) for part in hostile.mixed(data, seed, 6))
    if path.suffix == ".json":
        yield from _documents(json.loads(data), rng, places)
    elif path.suffix == ".csv":
        yield from _tables(pd.read_csv(io.BytesIO(data)), rng)
    elif path.suffix == ".parquet":
        yield from _frames(pd.read_parquet(io.BytesIO(data)))


def _documents(data: object, rng: random.Random, places: int) -> Iterator[tuple[str, bytes]]:
    found = [place for place in hostile.places(data) if place]
    wrong = cycle(WRONG_JSON)
    for place in rng.sample(found, min(places, len(found))):
        yield f"{place} dropped", json.dumps(hostile.without(data, place)).encode()
        holed = json.dumps(hostile.put(data, place, hostile.MARK))
        for raw in (next(wrong), next(wrong)):
            yield f"{place} = {raw}", holed.replace(json.dumps(hostile.MARK), raw).encode()


def _tables(frame: pd.DataFrame, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    wrong = cycle(WRONG_CELLS)
    for column in frame.columns:
        yield f"{column} dropped", _csv(frame.drop(columns=column))
        for raw in (next(wrong), next(wrong)):
            changed = frame.astype(object)
            changed.loc[rng.randrange(len(frame)), column] = raw
            yield f"{column} = {raw!r}", _csv(changed)
    yield "no rows", _csv(frame.iloc[:0])
    yield "all rows twice", _csv(pd.concat([frame, frame]))


def _csv(frame: pd.DataFrame) -> bytes:
    return frame.to_csv(index=False).encode()


def _frames(frame: pd.DataFrame) -> Iterator[tuple[str, bytes]]:
    wrong = cycle(WRONG_VALUES)
    for column in frame.columns:
        yield f"{column} dropped", _parquet(frame.drop(columns=column))
        raw = next(wrong)
        yield f"{column} = {raw!r}", _parquet(frame.assign(**{column: pd.Series([raw] * len(frame), dtype=object)}))
    yield "no rows", _parquet(frame.iloc[:0])


def _parquet(frame: pd.DataFrame) -> bytes:
    out = io.BytesIO()
    frame.to_parquet(out)
    return out.getvalue()
