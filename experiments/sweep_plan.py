"""From a sweep's config to its cells: a comparison or an engine run each, and a key that says exactly what it is.

    [workload] ...                       the config of `kvarena compare` or `kvarena run`, as the base of every cell
    [sweep]                              a grid: every combination of these values
    live = [1, 8]
    "allocators.0.page_size" = [1, 16]

    [[sweep]]                            or a list: a cell a table
    live = 1
    pool = "10 %"

Names are those of `--set`. A cell's key is a hash of its resolved config, the code, and the contents of its trace: what
has the same key has the same result, so finished cells are never run again, and a longer sweep takes over those of a
shorter one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal

from kvarena.experiments.config import apply_sets, config_from_mapping
from kvarena.experiments.foreign import read_toml
from kvarena.experiments.provenance import sha256

Kind = Literal["compare", "run"]
PACKAGES = ("prefix", "allocators", "kernels", "experiments")
SOURCES = (".py", ".toml", ".json")


@dataclass(frozen=True)
class SweepCell:
    """One cell. `point` is what the sweep sets, `config` every field resolved."""

    key: str
    kind: Kind
    point: dict[str, Any]
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """For people: the values of the point."""
        return ", ".join(f"{name}={value}" for name, value in self.point.items()) or "the base config"


def load_sweep(path: Path, sets: Iterable[str] = ()) -> list[SweepCell]:
    """The cells of a TOML config, `sets` on top of its base. Every cell is checked before anything runs.

    Raises ValueError naming the file, the cell and the field.
    """
    data = read_toml(path)
    try:
        return sweep_cells(data, sets)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def sweep_cells(data: Mapping[str, Any], sets: Iterable[str] = ()) -> list[SweepCell]:
    """As `load_sweep`, from a mapping. Equal cells are taken once."""
    if "rate" in data and "sweep" not in data:
        raise ValueError("a study of request rates, with a table [rate]: `kvarena rate` runs it")
    base = {name: part for name, part in data.items() if name != "sweep"}
    kind, code = kind_of(base), code_digest()
    cells: dict[str, SweepCell] = {}
    for number, point in enumerate(points(data.get("sweep")), 1):
        try:
            config = _resolve(kind, base, [*sets, *(f"{name}={_literal(value)}" for name, value in point.items())])
        except ValueError as error:
            raise ValueError(f"cell {number} ({SweepCell('', kind, point, {}).name}): {error}") from None
        key = _key(kind, config, code)
        cells.setdefault(key, SweepCell(key, kind, point, config))
    return list(cells.values())


def kind_of(data: Mapping[str, Any]) -> Kind:
    """An engine run has an [allocator], a preset or a scheduler; else it is a comparison."""
    engine = data.get("engine")
    if {"allocator", "preset"} & set(data) or (isinstance(engine, Mapping) and "scheduler" in engine):
        return "run"
    return "compare"


def points(sweep: Any) -> list[dict[str, Any]]:
    """What each cell sets, by dotted names, the last name of a grid turning fastest.

    >>> points({"live": [1, 2], "pool": ["1 GiB"]})
    [{'live': 1, 'pool': '1 GiB'}, {'live': 2, 'pool': '1 GiB'}]
    >>> points([{"live": 1}, {"workload": {"requests": 9}}])
    [{'live': 1}, {'workload.requests': 9}]
    """
    if isinstance(sweep, list) and sweep and all(isinstance(point, dict) for point in sweep):
        return [_flat(point) for point in sweep]
    if not isinstance(sweep, dict) or not sweep:
        raise ValueError("sweep: expected a table [sweep] of lists, or tables [[sweep]], with at least one name")
    axes = _flat(sweep)
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"sweep.{name}: expected a list of values, found {values!r}")
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat


def _literal(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_literal(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _resolve(kind: Kind, base: Mapping[str, Any], sets: list[str]) -> dict[str, Any]:
    if kind == "run":
        from kvarena.experiments.engine.run_config import run_config

        return run_config(base, sets).resolved()
    # The kernels have nothing to say about a sweep's numbers, unless it asks for them.
    engine = {"kernel_batches": 0, **base.get("engine", {})}
    return config_from_mapping(apply_sets({**base, "engine": engine}, sets)).resolved()


def _key(kind: Kind, config: dict[str, Any], code: str) -> str:
    asked = config["workload"]
    files = [asked["trace"], config["engine"].get("step_times"), asked.get("options", {}).get("file") or None]
    contents = [_contents(file) for file in files if file is not None]
    text = json.dumps([kind, config, code, contents], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _contents(name: str) -> str | None:
    """Hash of a file or of a folder's files; None for a name that is neither."""
    path = Path(name)
    if path.is_file():
        return _hash_of(path, path.stat().st_mtime_ns)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        parts = [f"{file.relative_to(path)} {_hash_of(file, file.stat().st_mtime_ns)}" for file in files]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return None


@cache
def _hash_of(path: Path, _: int) -> str:
    return sha256(path)


@cache
def code_digest() -> str:
    """Hash of all source files that a result can depend on: another code, another key. Costs about 10 ms."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(f"kvarena.{package}")
        for root in sorted(spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(p for p in Path(root).rglob("*") if p.suffix in SOURCES and p.is_file()):
                digest.update(f"{package}/{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
