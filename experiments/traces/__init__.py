"""Readers for public trace formats, and where to get the traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvarena.experiments.traces.base import Request, Trace, Visible, adjusted

__all__ = ["Request", "Trace", "Visible", "load_trace"]


def load_trace(
    spec: Any, format: str | None = None, *, speed: float = 1.0, limit: int | None = None, **options: Any
) -> Trace:
    """A trace, whatever it is given as.

    spec      name of a built-in workload (`chat`, `mooncake_like` ...; options are its parameters, `seed` among them);
              name of a known trace found under KVARENA_TRACES or in the cache (`kvarena trace list`);
              path of a .jsonl, .csv or .msgpack file, plain or .gz, or of a .parquet that `kvarena trace record` wrote
              (options are the parameters of `recording`); DataFrame with the fields of a format as columns;
              list of token lists, or of dicts with the fields of a format; or a Trace
    format    name of a format; None = recognised by the fields of the first row
    speed     arrivals come this many times faster (2.0 halves all gaps); the lengths stay
    limit     read only the first rows of the source
    options   reader options of the format (mooncake: grain, full_blocks)

    Files are read as a stream, once here to check every row, once per pass later. Raises ValueError with file, line,
    field, expected and found.
    """
    _check_settings(speed, limit)
    if isinstance(spec, Trace):
        if options or format is not None:
            raise ValueError(f"trace: expected no format and no options for a Trace, found {format or sorted(options)}")
        return adjusted(spec, speed, limit)
    if isinstance(spec, str):
        from kvarena.experiments import workloads

        if spec in workloads.NAMES:
            return _built_in(spec, format, speed, limit, options)
    from kvarena.experiments.traces import catalog, load

    settings = {"speed": float(speed), "limit": limit}
    rows = load.source_rows(spec)
    if rows is not None:
        return load.load_rows(rows, format, name=type(spec).__name__, options=options, **settings)
    if not isinstance(spec, (str, Path)):
        raise ValueError(
            f"trace: expected a name, a path, a DataFrame or a list of token lists, found {type(spec).__name__}"
        )
    path, name, known_format = catalog.resolve(spec)
    if is_recording(path):
        return _recording(path, name, format, speed, limit, options)
    return load.load_file(path, format or known_format, name=name, options=options, **settings)


def is_recording(spec: Any) -> bool:
    """Whether a spec is the path of a recording, whose times are drawn from a seed as a built-in workload's are."""
    return isinstance(spec, (str, Path)) and Path(spec).suffix.lower() == ".parquet" and not Path(spec).is_dir()


def _recording(
    path: Path, name: str, format: str | None, speed: float, limit: int | None, options: dict[str, Any]
) -> Trace:
    """The workload `recording` over this file, under the file's name."""
    if "file" in options:
        raise ValueError(f"option 'file': expected none with the path of a recording, found {options['file']!r}")
    made = _built_in("recording", format, speed, limit, {**options, "file": str(path)})
    return replace(made, name=name)


def _check_settings(speed: float, limit: int | None) -> None:
    if not isinstance(speed, (int, float)) or not 0 < speed < float("inf"):
        raise ValueError(f"speed: expected a finite number > 0, found {speed!r}")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit: expected a whole number >= 1, found {limit!r}")


def _built_in(name: str, format: str | None, speed: float, limit: int | None, options: dict[str, Any]) -> Trace:
    from kvarena.experiments import workloads

    if format is not None:
        raise ValueError(f"format: expected none for the built-in workload {name!r}, found {format!r}")
    return workloads.make(name, speed=speed, limit=limit, **options)
