"""Which files of a result were changed after they were written, by the hashes that `verify result` compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kvarena.experiments.foreign import read_object
from kvarena.experiments.provenance import sha256

DRAWN = (".pdf", ".svg", ".png", ".html")  # made of the numbers; a result may be kept without them
_ABOUT = ("provenance.json", "partial.json")
_NAMED = 5


def changed_files(path: Path) -> list[str]:
    """Files with numbers at `path` that are not as they were written, or are gone; relative names, in order.

    Looks at the folder's own hashes and at those of the cells of a sweep in it. A file without hashes gives none.
    Costs one read of every file that has a hash. Raises ValueError when a provenance cannot be read.
    """
    return [f"{folder.relative_to(path) / name}" for folder in _folders(path) for name in _changed(folder)]


def _folders(path: Path) -> Iterator[Path]:
    yield path
    for cells in (path / "cells", path / "sweep" / "cells"):
        if cells.is_dir():
            yield from sorted(one for one in cells.iterdir() if one.is_dir())


def _changed(folder: Path) -> Iterator[str]:
    for about in (folder / name for name in _ABOUT):
        known = read_object(about).get("files") if about.is_file() else None
        if not isinstance(known, dict):
            continue
        for name, digest in sorted(known.items()):
            file = folder / name
            if file.suffix not in DRAWN and not (file.is_file() and sha256(file) == digest):
                yield name


def changed_words(path: Path) -> str:
    """One line that warns of them; empty when there are none."""
    names = changed_files(path) if path.is_dir() else []
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    named = ", ".join(names[:_NAMED])
    return f"WARNING: files changed since written: {named}{more}; `kvarena verify result {path}` says what is wrong"


def warn_of_changes(path: Path) -> None:
    """That line on stderr, where there is one."""
    if words := changed_words(path):
        print(words, file=sys.stderr)
