"""A finished comparison: tables as DataFrames, and the folder that holds them.

A folder is written under a temporary name and renamed when it is whole, so what stands is finished. All files but
`provenance.json` and `timings.*` are byte-equal for equal configs.

    config.toml        the resolved config            requests.parquet   a row a request, allocator, pool and seed
    result.json        visible, budgets, warnings     steps.parquet      a row a step, allocator, pool and seed
    summary.csv        a row an allocator, pool, seed timings.parquet    measured times of each verb
    provenance.json    versions, machine, inputs      figures/           each as PDF, SVG and PNG
    report.html        one self-contained page        timings.pdf ...    the figure of the measured times
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.experiments.alike import CELL_KEYS, unlike_requests
from kvarena.experiments.config import SCHEMA_VERSION, config_diff
from kvarena.experiments.foreign import read_object, read_toml
from kvarena.experiments.outputs import as_path, refuse_unwritable, remove_stale
from kvarena.experiments.provenance import sha256
from kvarena.experiments.result_check import check_manifest, check_same_numbers, check_tables, other_code
from kvarena.experiments.wrong_kind import reads

if TYPE_CHECKING:
    from kvarena.experiments.divergence import Divergence
    from rich.console import Console, ConsoleOptions, RenderResult

FRAMES = ("requests", "steps", "timings")
KEYS = ["seed", "pool_bytes", "allocator"]
MANIFEST = "result.json"
FIGURES = "figures"
_FILES = {"config.toml", MANIFEST, "provenance.json", "summary.csv", "report.html", *(f"{n}.parquet" for n in FRAMES)}
_KINDS = (".pdf", ".svg", ".png")


@dataclass
class Result:
    """One comparison.

    config      resolved config, plain data
    manifest    kind, visible, allocators, pools, budgets, warnings, kernel check, first divergence
    requests    seed, pool_bytes, allocator, then the fields of `RequestRow`, with prefix and ceiling tokens
    steps       seed, pool_bytes, allocator, then the fields of `StepRow`
    summary     the measures of `metrics.py` for each seed, pool and allocator
    timings     measured microseconds of each verb
    provenance  versions, machine, seeds, inputs
    """

    config: dict[str, Any]
    manifest: dict[str, Any]
    requests: pd.DataFrame
    steps: pd.DataFrame
    summary: pd.DataFrame
    timings: pd.DataFrame
    provenance: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @property
    def visible(self) -> dict[str, Any]:
        """What the trace can show; a factor that it cannot show is not observable here, which is not 0."""
        return self.manifest["visible"]

    @property
    def allocators(self) -> list[str]:
        """Short names, in the order of the config."""
        return [entry["name"] for entry in self.manifest["allocators"]]

    @property
    def labels(self) -> dict[str, str]:
        """Legend text of each allocator."""
        return {entry["name"]: entry["label"] for entry in self.manifest["allocators"]}

    @property
    def pools(self) -> list[int]:
        """Pool sizes in bytes, ascending."""
        return list(self.manifest["pools"])

    @property
    def reference_pool(self) -> int:
        """The pool size that single-pool tables and figures show."""
        return self.manifest["reference_pool"]

    @property
    def warnings(self) -> list[str]:
        """What was skipped, changed or cannot be seen."""
        return self.manifest["warnings"]

    def save(self, out: Path | str) -> Path:
        """Write the folder with all figures and the report. Raises ValueError when `out` holds something else, and for
        what `load_partial` read. When it is interrupted, or a figure cannot be drawn, the tables are kept in
        `out`.partial."""
        if "partial" in self.manifest:
            raise ValueError(f"{out}: what an interrupted command left is no result, and is not saved as one")
        out = as_path(out, "out")
        try:
            with finished_folder(out) as made:
                self._write_tables(made)
                self._draw(made, out)
                self._write_provenance(made)
        except KeyboardInterrupt:
            raise self._keep_tables(out) from None
        self.path = out
        return out

    def _draw(self, folder: Path, out: Path) -> None:
        """Figures and report. A fault in one of them costs no table: it is raised when the tables have been kept."""
        from kvarena.experiments.report import write_figures, write_report

        try:
            write_figures(self, folder)
            write_report(self, folder / "report.html")
        except OSError:
            raise  # what cannot be written here cannot be kept either
        except Exception as error:
            kept, fault = self._keep_tables(out), f"{type(error).__name__}: {error}"
            raise ValueError(f"{out}: figures or report could not be made ({fault}); {kept}") from error

    def _keep_tables(self, out: Path) -> KeyboardInterrupt:
        from kvarena.experiments.partial import keep_cells

        kind, missing = self.manifest["kind"], ["figures and report"]
        return keep_cells(out, kind, self, self.config, ["tables"], missing, unit="parts")

    def _write_tables(self, folder: Path) -> None:
        _write_json(folder / MANIFEST, {"schema_version": SCHEMA_VERSION, **self.manifest})
        self._write_frames(folder)
        self._write_provenance(folder)

    def _write_frames(self, folder: Path) -> None:
        import tomli_w

        (folder / "config.toml").write_text(tomli_w.dumps(self.config), encoding="utf-8")
        summary = self.summary.assign(schema_version=SCHEMA_VERSION)
        summary.to_csv(folder / "summary.csv", index=False, lineterminator="\n")
        for name in FRAMES:
            write_parquet(getattr(self, name), folder / f"{name}.parquet")

    def _write_provenance(self, folder: Path) -> None:
        """With the hash of every other file that stands in the folder by now."""
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "provenance.json")
        hashes = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
        data = {"schema_version": SCHEMA_VERSION, **self.provenance, "files": hashes}
        _write_json(folder / "provenance.json", data)

    # --- questions ---

    def first_divergence(
        self, a: str | None = None, b: str | None = None, pool: int | None = None
    ) -> Divergence | None:
        """The first request on which two allocators differ in hit tokens or admission, with the reason.

        Default: the first allocator that shares prefixes and the first of another kind, at the reference pool; for
        these the evidence (who evicted the missing page) was recorded by the run. None when they never differ.
        """
        from kvarena.experiments.divergence import first_divergence

        return first_divergence(self, a, b, pool)

    def why(self, metric: str = "token_hit_rate", pool: int | None = None) -> pd.DataFrame:
        """Where the prompt tokens went, for each allocator, and what makes the difference to the first one.

        Shares of all prompt tokens of admitted requests; each column adds up to 1, the difference to 0. A factor that
        the trace cannot show says so.
        """
        from kvarena.experiments.why import why

        return why(self, metric, pool)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from kvarena.experiments.tables import result_tables

        yield from result_tables(self)

    def _repr_html_(self) -> str:
        from kvarena.experiments.tables import result_html

        return result_html(self)

    def __repr__(self) -> str:
        names = ", ".join(self.allocators)
        return f"Result({self.manifest['trace']}: {names}; {len(self.pools)} pools; {len(self.summary)} cells)"


@reads("compare", "run")
def load_result(path: Path | str) -> Result:
    """Read a finished result folder. Raises ValueError naming the file that is missing or broken, and for a folder
    that an interrupted command left (`partial.load_partial` reads it)."""
    from kvarena.experiments.partial import refuse_partial

    folder = as_path(path, "path")
    refuse_partial(folder)
    manifest = read_object(folder / MANIFEST)
    if manifest.pop("schema_version", None) != SCHEMA_VERSION:
        raise ValueError(f"{folder / MANIFEST}: schema_version: expected {SCHEMA_VERSION}")
    return load_tables(folder, manifest)


def load_tables(folder: Path, manifest: dict[str, Any]) -> Result:
    """The tables beside a manifest. Raises ValueError naming what is missing, broken, or does not belong together."""
    provenance = read_object(folder / "provenance.json")
    if provenance.pop("schema_version", None) != SCHEMA_VERSION:
        raise ValueError(f"{folder / 'provenance.json'}: schema_version: expected {SCHEMA_VERSION}")
    try:
        check_manifest(manifest)
        config = read_toml(folder / "config.toml")
        summary = _read_summary(folder / "summary.csv", len(manifest["budgets"]))
        frames = {name: pd.read_parquet(folder / f"{name}.parquet") for name in FRAMES}
        check_tables({**frames, "summary": summary})
    except (OSError, KeyError, pd.errors.ParserError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{folder}: not a whole result folder ({error})") from None
    return Result(config, manifest, summary=summary, provenance=provenance, path=folder, **frames)


def _read_summary(path: Path, cells: int) -> pd.DataFrame:
    frame = pd.read_csv(path)
    if len(frame) != cells or not (frame["schema_version"] == SCHEMA_VERSION).all():
        raise ValueError(f"{path.name}: expected {cells} rows of schema_version {SCHEMA_VERSION}")
    return frame.drop(columns="schema_version")


def merge_results(results: Iterable[Result]) -> Result:
    """Lay finished results over each other. Raises ValueError naming the fields when they differ in more than the
    allocators, and when one adds no allocator to those before it."""
    given = [] if isinstance(results, Result) or not isinstance(results, Iterable) else list(results)
    if not given or not all(isinstance(one, Result) for one in given):
        raise ValueError(f"results: expected one Result or more in a list, found {results!r}")
    first, *rest = given
    merged = first
    for other in rest:
        _refuse_unlike(first, other)
        joined = _joined(merged, other)
        if joined.allocators == merged.allocators:
            name = f"{other.path or 'a result'} ({', '.join(other.allocators)})"
            raise ValueError(f"{name}: adds no allocator to the results before it; is it given twice?")
        merged = joined
    return merged


def _refuse_unlike(a: Result, b: Result) -> None:
    inputs = [[item["sha256"] for item in r.provenance.get("inputs", [])] for r in (a, b)]
    differing = [
        f"{name} ({left!r} against {right!r})"
        for name, (left, right) in config_diff(_without_allocators(a.config), _without_allocators(b.config)).items()
        # A file read from elsewhere is the same trace when its contents are.
        if name != "workload.trace" or not inputs[0] or inputs[0] != inputs[1]
    ]
    for name in ("kind", "visible", "working_set_bytes", "pools"):
        if a.manifest.get(name) != b.manifest.get(name) and not differing:
            differing.append(f"{name} ({a.manifest.get(name)!r} against {b.manifest.get(name)!r})")
    if inputs[0] != inputs[1]:
        differing.append("the trace's contents (sha256)")
    elif not differing and not _same_arrivals(a, b):
        differing.append("the requests themselves: lengths, order or reuse of the trace")
    if differing:
        raise ValueError(f"these results differ in more than the allocators: {'; '.join(differing)}")


def _arrivals(result: Result) -> pd.DataFrame:
    """What every allocator was given, whatever became of it."""
    frame = result.requests
    first = (frame["allocator"] == result.allocators[0]) & (frame["pool_bytes"] == result.pools[0])
    columns = ["seed", "index", "request_id", "num_prompt_tokens", "num_output_tokens", "prefix_tokens"]
    return frame.loc[first, columns].sort_values(["seed", "index"], ignore_index=True)


def _same_arrivals(a: Result, b: Result) -> bool:
    """In engine runs the last token of a reply is known to some designs and not to others (`serves_last_tokens`)."""
    left, right = _arrivals(a), _arrivals(b)
    apart = (left.pop("prefix_tokens") - right.pop("prefix_tokens")).abs()
    return bool(left.equals(right) and (apart <= (a.manifest["kind"] == "run")).all())


def _without_allocators(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "allocators"}


def _joined(a: Result, b: Result) -> Result:
    """Rows of both; an allocator that both have is taken once, after checking that it is the same one."""
    mine = {entry["name"]: entry for entry in a.config["allocators"]}
    for entry in b.config["allocators"]:
        if entry["name"] in mine and mine[entry["name"]] != entry:
            raise ValueError(f"allocator {entry['name']!r} has other rules in the two results; rename one of them")
        if entry["name"] in mine:
            check_same_numbers(entry["name"], a.summary, b.summary)
    new = [name for name in b.allocators if name not in mine]
    config = {**a.config, "allocators": a.config["allocators"] + _named(b.config["allocators"], new)}
    manifest = {**a.manifest, "allocators": a.manifest["allocators"] + _named(b.manifest["allocators"], new)}
    manifest["budgets"] = a.manifest["budgets"] + [row for row in b.manifest["budgets"] if row["allocator"] in new]
    said = other_code(a.provenance, b.provenance)
    manifest["other_code"] = bool(said) or a.manifest.get("other_code", False)
    frames = {
        name: pd.concat([getattr(a, name), frame[frame["allocator"].isin(new)]], ignore_index=True)
        for name in (*FRAMES, "summary")
        for frame in [getattr(b, name)]
    }
    unlike = unlike_requests(rows for _, rows in frames["requests"].groupby(list(CELL_KEYS), sort=False))
    manifest["warnings"] = list(dict.fromkeys([*a.warnings, *b.warnings, *said, *unlike]))
    return Result(config, manifest, provenance=a.provenance, **frames)


def _named(entries: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["name"] in names]


class finished_folder:
    """Context: a folder under a temporary name, renamed to `out` when the block ends well, removed when it does not.

    An older result of ours at `out` is replaced; anything else there is refused.
    """

    def __init__(self, out: Path, refuse: Callable[[Path], None] | None = None) -> None:
        """`refuse` raises ValueError when what is at `out` may not be replaced; default: `refuse_foreign`."""
        # A link stays a link: the folder that it leads to is what gets replaced.
        self.out = out.resolve()
        self.refuse = refuse or refuse_foreign
        self.partial = self.out.with_name(f".{self.out.name}.{os.getpid()}.partial")

    def __enter__(self) -> Path:
        self.refuse(self.out)
        remove_stale(self.out)
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"{self.out}: cannot be written ({error.strerror})") from None
        return self.partial

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        old = self.out.with_name(f".{self.out.name}.{os.getpid()}.old")
        while not self._moved(old):
            pass
        shutil.rmtree(old, ignore_errors=True)

    def _moved(self, old: Path) -> bool:
        """Whether the new folder stands; False when another run put its own there in between."""
        shutil.rmtree(old, ignore_errors=True)
        with suppress(FileNotFoundError):
            self.out.rename(old)
        try:
            self.partial.rename(self.out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True


def refuse_foreign(out: Path) -> None:
    """Raise ValueError when `out` cannot be made, or is there and is neither empty nor an earlier result."""
    refuse_unwritable(out.resolve())
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out}: expected a folder, found a file")
    if Path.cwd().is_relative_to(out.resolve()):
        raise ValueError(f"{out}: is where you stand and would be replaced; give another folder, or start elsewhere")
    foreign = next((path for path in out.rglob("*") if not _is_ours(path.relative_to(out))), None)
    if foreign is not None or (any(out.iterdir()) and not _has_manifest(out)):
        named = "" if foreign is None else f" ({foreign.relative_to(out)})"
        raise ValueError(f"{out}: holds other files{named}; give an empty folder, a new one, or an earlier result")


def refuse_others(folder: Path, ours: bool, what: str) -> None:
    """Raise ValueError when `folder` is a file, takes no files, or holds some and is not `ours`, an earlier output."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, found a file")
    refuse_unwritable(folder / "file")
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise ValueError(f"{folder}: holds other files; give a new folder, or that of {what}")


def _is_ours(path: Path) -> bool:
    """Whether a result folder has a file of that name (relative to the folder). What else is there is never deleted."""
    if path.parent == Path(FIGURES) or path.stem == "timings":
        return path.suffix in (*_KINDS, ".parquet")
    return str(path) in _FILES or path == Path(FIGURES)


def _has_manifest(folder: Path) -> bool:
    try:
        return "schema_version" in read_object(folder / MANIFEST)
    except ValueError:
        return False


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """A frame with its schema_version in the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    metadata = {**(table.schema.metadata or {}), b"schema_version": str(SCHEMA_VERSION).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
