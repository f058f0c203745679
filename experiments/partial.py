"""What an interrupted command leaves: whatever had finished, beside the result's place and under another name.

    OUT.partial/partial.json   kind, what finished, what is missing, the hash of every other file
    OUT.partial/...            tables of what finished

There is no `result.json`, so nothing that reads results takes the folder for one, and every reader says why. A process
that is killed outright writes none of this: what it leaves is complete or absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.experiments.foreign import read_json
from kvarena.experiments.provenance import sha256

if TYPE_CHECKING:
    import pandas as pd
    from kvarena.experiments.results import Result

PARTIAL = "partial.json"
UNFINISHED = "unfinished.parquet"
SCHEMA_VERSION = 1
_NAMED = 3  # missing parts that a message names


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with one line that says what was kept, where, and how to go on."""


def partial_folder(out: Path) -> Path:
    """Where an interrupted command keeps what it has: beside `out`, in its place never."""
    return out.with_name(f"{out.name}.partial")


def keep(
    out: Path | None,
    kind: str,
    write: Callable[[Path], None],
    *,
    finished: Sequence[str],
    missing: Sequence[str],
    unit: str = "cells",
    flying: str = "",
    **more: Any,
) -> Interrupted:
    """Write what had finished to `partial_folder(out)`, and return what to raise in place of the KeyboardInterrupt.

    out       where the result would have gone; None: nothing is written
    write     puts the tables into the folder that it is given
    finished, missing  names of the parts, `unit` what one is
    flying    what is kept of the part that was cut, in words; none: nothing
    more      further fields of partial.json

    Raises ValueError when it cannot be written. A second Ctrl-C leaves nothing.
    """
    if out is None:
        return Interrupted("nothing was kept, no --out was given")
    if not finished and not flying:
        return Interrupted("nothing had finished, nothing was kept")
    from kvarena.experiments.results import finished_folder

    folder = partial_folder(out)
    with finished_folder(folder, refuse_other_partial) as made:
        write(made)
        files = {path.relative_to(made).as_posix(): sha256(path) for path in sorted(made.rglob("*")) if path.is_file()}
        about = {"unit": unit, "finished": list(finished), "missing": list(missing), "flying": flying}
        data = {"schema_version": SCHEMA_VERSION, "partial": True, "kind": kind, **about, **more, "files": files}
        (made / PARTIAL).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return Interrupted(f"kept {extent(data)} in {folder}, named partial; the same command starts anew")


def keep_tables(
    out: Path | None,
    kind: str,
    tables: Mapping[str, pd.DataFrame],
    finished: Sequence[str],
    missing: Sequence[str],
    unit: str = "cells",
) -> Interrupted:
    """The same for tables, NAME.csv each; an empty one is left out."""

    def write(folder: Path) -> None:
        for name, table in tables.items():
            if len(table):
                table.to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")

    return keep(out, kind, write, finished=finished, missing=missing, unit=unit)


def keep_cells(
    out: Path | None,
    kind: str,
    result: Result | None,
    config: Mapping[str, Any],
    finished: Sequence[str],
    missing: Sequence[str],
    unfinished: pd.DataFrame | None = None,
    unit: str = "cells",
) -> Interrupted:
    """The same for a comparison or an engine run.

    result      the tables of the finished cells; None: none has finished
    config      as it was resolved
    unfinished  the requests of the cell that was cut which had ended
    """
    import tomli_w
    from kvarena.experiments.results import write_parquet

    rows = 0 if unfinished is None else len(unfinished)

    def write(folder: Path) -> None:
        if result is None:
            (folder / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        else:
            result._write_frames(folder)
            result._write_provenance(folder)
        if unfinished is not None and rows:
            write_parquet(unfinished, folder / UNFINISHED)

    return keep(
        out,
        kind,
        write,
        finished=finished,
        missing=missing,
        unit=unit,
        flying=f"{rows:,} ended requests of the next" if rows else "",
        manifest=None if result is None else result.manifest,
    )


def cell_name(keys: Mapping[str, Any]) -> str:
    """A cell in words.

    >>> cell_name({"seed": 0, "pool_bytes": 1 << 30, "allocator": "vllm"})
    'seed 0, 1073741824 B, vllm'
    """
    return f"seed {keys['seed']}, {keys['pool_bytes']} B, {keys['allocator']}"


def load_partial(path: Path | str) -> Result:
    """The finished cells of an interrupted comparison or engine run; its manifest has a field `partial` and its first
    warning says so. Raises ValueError when there are none, or when a file is broken."""
    from kvarena.experiments.results import load_tables

    folder = Path(path)
    about = read_partial(folder)
    manifest = about.get("manifest")
    if not isinstance(manifest, dict) or not about["finished"]:
        raise ValueError(f"{folder}: {partial_words(about)}; no cell of it had finished")
    words = {name: about[name] for name in ("unit", "finished", "missing", "flying")}
    warnings = [f"PARTIAL: interrupted with {extent(about)}", *manifest.get("warnings", [])]
    return load_tables(folder, {**manifest, "partial": words, "warnings": warnings})


def extent(about: dict[str, Any]) -> str:
    """How much of a result is there, in words.

    >>> extent({"unit": "cells", "finished": ["a"], "missing": ["b", "c"], "flying": "12 of 50 requests of b"})
    '1 of 3 cells and 12 of 50 requests of b'
    """
    done, total = len(about["finished"]), len(about["finished"]) + len(about["missing"])
    return f"{done} of {total} {about['unit']}" + (f" and {about['flying']}" if about["flying"] else "")


def is_partial(folder: Path) -> bool:
    """Whether an interrupted command left this folder."""
    return (folder / PARTIAL).is_file()


def read_partial(folder: Path) -> dict[str, Any]:
    """partial.json of a folder. Raises ValueError when it is none of ours."""
    path = folder / PARTIAL
    try:
        data = read_json(path)
        if data.get("schema_version") != SCHEMA_VERSION or data.get("partial") is not True:
            raise ValueError(f"expected schema_version {SCHEMA_VERSION} and partial true")
        for name, expected in (("unit", str), ("flying", str), ("kind", str), ("files", dict)):
            if not isinstance(data.get(name), expected):
                raise ValueError(f"{name}: expected {expected.__name__}")
        for name in ("finished", "missing"):
            if not isinstance(data.get(name), list) or not all(isinstance(one, str) for one in data[name]):
                raise ValueError(f"{name}: expected a list of names")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as what an interrupted command left ({error})") from None
    found: dict[str, Any] = data
    return found


def refuse_partial(folder: Path) -> None:
    """Raise ValueError when the folder holds what an interrupted command left, which is no result."""
    if is_partial(folder):
        raise ValueError(f"{folder}: {partial_words(read_partial(folder))}")


def partial_words(about: dict[str, Any]) -> str:
    """One line that says so, and what is missing."""
    named = "; ".join(about["missing"][:_NAMED])
    more = len(about["missing"]) - _NAMED
    return (
        f"is PARTIAL and no result: the {about['kind']} was interrupted with {extent(about)}"
        + (f" (missing: {named}" if named else "")
        + (f" and {more} more" if more > 0 else "")
        + (")" if named else "")
    )


def refuse_other_partial(folder: Path) -> None:
    """Raise ValueError when the folder is there and is neither empty nor left by an interrupted command."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is where an interrupted run would be kept: expected a folder, found a file")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    known = {PARTIAL, *read_partial(folder)["files"]} if is_partial(folder) else set()
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if foreign := sorted(found - known):
        raise ValueError(
            f"{folder}: is where an interrupted run would be kept, and holds other files ({foreign[0]}); move it away"
        )


def names_left(every: Iterable[str], finished: Iterable[str]) -> list[str]:
    """Those that are missing, in order."""
    done = set(finished)
    return [name for name in every if name not in done]
