"""Where commands write: folders on the way are made, a file stands whole or not at all, and what kvarena did not write
is never written over.

What it wrote is known by the file itself: a figure names it in its metadata, a table has the command's columns, other
files the command's own words. A figure drawn from a result also names that result (`source_of`), so that the figures of
one are not taken for those of another.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.experiments.foreign import read_json
from kvarena.experiments.provenance import sha256
from kvarena.experiments.style import FORMATS, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES = (".csv", ".parquet")
FIGURES = tuple(f".{kind}" for kind in FORMATS)
_FIGURE_MARKS = {
    ".png": b"Software\0kvarena",
    ".svg": b"<dc:title>kvarena</dc:title>",
    ".pdf": b"/Creator (kvarena)",
}
_SOURCE = re.compile(rb"source ([0-9a-f]{16})")
_DEPTH = 3  # folders upwards in which a result is looked for
_NAMED = 5  # options that a message names
_LOOK_BYTES = 1 << 20  # of the head and of the tail: names of columns stand at either end


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, renamed to it when the block ends well and removed when it does not.

    Raises ValueError when the place cannot be written, and in what an interrupted command left.
    """
    refuse_in_partial(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
        note_written(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        _remove(partial)


def note_written(path: Path) -> None:
    """When `path` lies in the folder of a finished result, renew its hash there: what a command of ours adds to one,
    or draws anew in it, is no change behind the result's back."""
    for folder in list(path.absolute().parents)[:_DEPTH]:
        about = folder / "provenance.json"
        if about.is_file() and path.name != about.name:
            _note(about, path.absolute().relative_to(folder).as_posix(), sha256(path))
            return


def _note(about: Path, name: str, digest: str) -> None:
    try:
        data = read_json(about)
    except ValueError:  # no result of ours: `verify result` is who says so
        return
    if not isinstance(data, dict) or not isinstance(data.get("files"), dict) or data["files"].get(name) == digest:
        return
    data["files"] = dict(sorted({**data["files"], name: digest}.items()))
    renewed = about.with_name(f".{about.name}.{os.getpid()}.partial")
    renewed.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    renewed.replace(about)


def _remove(partial: Path) -> None:
    try:
        partial.unlink(missing_ok=True)
    except OSError:  # its folder is none: the error above says so
        return


def remove_stale(out: Path) -> None:
    """Clear what killed processes left beside `out`: unfinished folders, and replaced results.

    A process killed between its two renames left a whole new result under its temporary name: that one is put in
    its place first, so nothing that was finished is lost.
    """
    stale = [path for path in out.parent.glob(f".{out.name}.*") if _left_by_the_dead(path)]
    for path in stale:
        finished = path.with_suffix(".partial")
        if path.suffix == ".old" and not out.exists() and finished.is_dir():
            finished.rename(out)
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)


def _left_by_the_dead(path: Path) -> bool:
    _, pid, kind = path.name.rsplit(".", 2)
    if kind not in ("partial", "old") or not pid.isdigit():
        return False
    return Path("/proc").exists() and not Path("/proc", pid).exists()


def as_path(value: Any, name: str) -> Path:
    """A path from text or a Path. Raises ValueError naming the argument for anything else."""
    if not isinstance(value, str | Path):
        raise ValueError(f"{name}: expected a path, found {value!r}")
    return Path(value)


def check_file(path: Path | None, option: str, kinds: Sequence[str], marks: Iterable[str] = ()) -> None:
    """Raise ValueError, before anything runs, when `path` has another ending than `kinds`, cannot be made, or is there
    and lacks one of `marks`: texts that stand in what the command writes. None and an empty file are fine."""
    if path is None:
        return
    if not path.name.lower().endswith(tuple(kinds)):
        raise ValueError(f"{option}: expected a file {_either(kinds)}, found {path}")
    refuse_other_file(path, [mark.encode() for mark in marks])


def _either(kinds: Sequence[str]) -> str:
    *most, last = kinds
    return f"{', '.join(most)} or {last}" if most else last


def check_table(path: Path | None, columns: Iterable[str], option: str = "--out") -> None:
    """The same for a table with these columns."""
    check_file(path, option, TABLES, columns)


def check_figure(path: Path | None, option: str = "--figure") -> None:
    """The same for a figure."""
    if path is None:
        return
    check_file(path, option, FIGURES)
    refuse_other_file(path, [_FIGURE_MARKS[path.suffix.lower()]])


def refuse_other_file(path: Path, marks: Iterable[bytes], advice: str = "give another name, or remove it") -> None:
    """Raise ValueError when something is at `path` that is no file, or one with content that lacks a mark."""
    refuse_unwritable(path)
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, found a folder or a device")
    found = _ends(path)
    if found and not all(mark in found for mark in marks):
        raise ValueError(f"{path}: is there and is not what this command writes; {advice}")


def refuse_unwritable(path: Path) -> None:
    """Raise ValueError when nothing can be made at `path`, a file or folder to be. It is tried, with an empty folder
    that is gone again: rights alone tell nothing of a mount that is read-only, full, or none for files (/proc).
    """
    refuse_in_partial(path)
    try:
        first, parent = path.absolute(), path.absolute().parent
        while not parent.exists():
            first, parent = parent, parent.parent
        if not parent.is_dir():
            raise ValueError(f"{path}: cannot be written, {parent} is no folder that takes files")
        probe = parent / f".{first.name}.{os.getpid()}.partial"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{path}: cannot be written, {path.parent} is no folder that takes files ({why})") from None


def refuse_in_partial(path: Path) -> None:
    """Raise ValueError when `path` lies in what an interrupted command left: its files are known by their hashes, and
    nothing is added to them."""
    for folder in list(path.absolute().parents)[:_DEPTH]:
        if _left_by_an_interrupted(folder):
            raise ValueError(
                f"{path}: cannot be written, {folder} is what an interrupted command left; give another place"
            )


def _left_by_an_interrupted(folder: Path) -> bool:
    from kvarena.experiments.partial import is_partial, read_partial

    try:
        return is_partial(folder) and bool(read_partial(folder))
    except ValueError:  # somebody else's partial.json
        return False


def refuse_other_figures(folder: Path, names: Iterable[str], source: str) -> None:
    """Raise ValueError when `folder` has a figure NAME.pdf, .svg or .png that kvarena did not draw from `source`."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, found a file")
    refuse_unwritable(folder / "figures")
    for path in (folder / f"{name}{kind}" for name in names for kind in FIGURES):
        refuse_other_file(path, [_FIGURE_MARKS[path.suffix]], "give another folder, or --force")
        if path.exists() and path.stat().st_size and figure_source(path) != source:
            raise ValueError(f"{path}: is a figure of another result; give another folder, or --force")


def refuse_other_options(folder: Path, what: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError naming the fields when the study in `folder`, `what` in words, was begun with other options:
    its tables would be replaced."""
    from kvarena.experiments.config import config_diff

    differing = [
        f"{name} ({str(there)[:80]} there, {str(here)[:80]} asked for)"
        for name, (there, here) in config_diff(earlier, now).items()
    ]
    if differing:
        more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise ValueError(
            f"{folder}: holds {what} with other options: {', '.join(differing[:_NAMED])}{more}; "
            "give another folder, or remove that one"
        )


def figure_source(path: Path) -> str | None:
    """Which result a figure was drawn from, as `source_of` names it; None when it does not say."""
    found = _SOURCE.search(_ends(path))
    return None if found is None else found[1].decode()


def save_one(figure: Figure, path: Path, source: str = "") -> None:
    """Write one figure in the format that the file's name asks for, and close it. Raises ValueError when it cannot."""
    import matplotlib.pyplot as plt

    check_figure(path)
    kind = path.suffix.lower().removeprefix(".")
    try:
        with whole(path) as partial:
            drawn = partial.with_name(f"{partial.name}.{kind}")
            try:
                save_figure(figure, partial, (kind,), source)
                drawn.replace(partial)
            finally:
                _remove(drawn)
    finally:
        plt.close(figure)


def source_of(*parts: Any) -> str:
    """A name for what a figure shows: 16 digits of the hash of plain data, such as a resolved config.

    >>> source_of({"live": 1}), source_of({"live": 2})
    ('e749d6ca87159c4e', 'dde19a727f004cb6')
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _ends(path: Path) -> bytes:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as stream:
            head: bytes = stream.read(_LOOK_BYTES)
            if path.suffix == ".gz" or len(head) < _LOOK_BYTES:
                return head
            stream.seek(max(path.stat().st_size - _LOOK_BYTES, _LOOK_BYTES))
            return head + bytes(stream.read())
    except (OSError, EOFError) as error:
        if path.suffix == ".gz" and path.stat().st_size:
            return b"?"  # no gzip file: nothing of ours
        raise ValueError(f"{path}: cannot be read ({error})") from None
