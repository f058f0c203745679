"""Writes lines to a file that appears only when it is whole."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvarena.experiments.outputs import whole


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file under a temporary name beside `path`, renamed when the block ends well, removed when it does not.

    Raises ValueError when the place cannot be written.
    """
    with whole(path) as partial, partial.open("wb") as stream:
        yield stream


def write_lines(lines: Iterable[str], path: Path) -> int:
    """Writes each line with a newline, gzip when the name ends in .gz (equal content, equal bytes); how many."""
    count = 0
    with whole_file(path) as stream:
        target: IO[bytes] = stream
        if path.suffix == ".gz":
            target = gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0)  # type: ignore[assignment]
        for line in lines:
            target.write(line.encode("utf-8") + b"\n")
            count += 1
        if target is not stream:
            target.close()
    return count
