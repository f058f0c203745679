"""Carries a capacity study out, keeps it in a folder, and prints it.

capacity.csv     a row a panel, load and design: ideal, predicted, measured, and what each part costs
bursts.csv       every burst that was run to show it, and those beyond capacity
sizing.csv       where the card's bytes go, line by line
result.json      what was asked; provenance.json where it comes from; figures capacity.pdf|svg|png
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.experiments import partial
from kvarena.experiments.budget import format_bytes
from kvarena.experiments.capacity import DECLARED, PANELS, PARTS, Cell, Found, beyond_sizes, measure
from kvarena.experiments.capacity_backends import backend_rows
from kvarena.experiments.capacity_loads import load_shape
from kvarena.experiments.capacity_sizing import Server
from kvarena.experiments.engine.step_time import GpuTimes, load_gpu_times
from kvarena.experiments.foreign import read_json
from kvarena.experiments.models import model_shape
from kvarena.experiments.outputs import refuse_unwritable
from kvarena.experiments.provenance import provenance
from kvarena.experiments.sweep_workers import in_processes
from kvarena.experiments.wrong_kind import reads

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1
TABLES = ("capacity", "bursts", "sizing")
LINES = ("weights", "workspace", "kv", "padding_page", "table", "slot_mapping", "unused", "headroom")


@dataclass
class CapacityResult:
    """A finished study. Tables as in the module's head; `manifest` model, card, loads and step times as plain data."""

    capacity: pd.DataFrame
    bursts: pd.DataFrame
    sizing: pd.DataFrame
    manifest: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def loads(self) -> list[str]:
        return list(dict.fromkeys(self.capacity["load"]))

    @property
    def panels(self) -> list[str]:
        return list(dict.fromkeys(self.capacity["panel"]))

    def save(self, out: Path | str) -> Path:
        """Write the folder with its figure. Raises ValueError when `out` holds something else or cannot be written."""
        from kvarena.experiments.plots_capacity import save_capacity_figure

        folder = Path(out)
        refuse_other(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in TABLES:
                getattr(self, name).to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")
            _write_json(folder / "provenance.json", self.provenance)
            save_capacity_figure(self, folder / "capacity")
            _write_json(folder / "result.json", {"schema_version": SCHEMA_VERSION, "kind": "capacity", **self.manifest})
        except OSError as error:
            raise ValueError(f"{out}: cannot be written ({error.strerror})") from None
        return folder


def refuse_other(folder: Path) -> None:
    """Raise ValueError when `folder` takes no files, or holds something else than a finished study."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, found a file")
    refuse_unwritable(folder / "result.json")
    if folder.is_dir() and any(folder.iterdir()):
        load_capacity(folder)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@reads("capacity", "capacity on a card")
def load_capacity(path: Path | str) -> CapacityResult:
    """Read a finished study, or a card's file (.json). Raises ValueError naming what is missing or broken."""
    folder = Path(path)
    if folder.suffix == ".json":
        return from_card(folder)
    partial.refuse_partial(folder)
    try:
        manifest = read_json(folder / "result.json")
        if manifest.pop("schema_version", None) != SCHEMA_VERSION or manifest.pop("kind", None) != "capacity":
            raise ValueError(f"result.json: expected schema_version {SCHEMA_VERSION} and kind 'capacity'")
        frames = {name: pd.read_csv(folder / f"{name}.csv", keep_default_na=False) for name in TABLES}
        where = read_json(folder / "provenance.json")
    except (OSError, ValueError, AttributeError, RecursionError, pd.errors.ParserError) as error:
        raise ValueError(f"{folder}: not a finished capacity study ({error})") from None
    missing = {"panel", "load", "design", "measured", "predicted"} - set(frames["capacity"])
    if missing:
        raise ValueError(f"{folder}: not a finished capacity study (capacity.csv: no {', '.join(sorted(missing))})")
    return CapacityResult(**frames, manifest=manifest, provenance=where)


def joined(results: list[CapacityResult]) -> CapacityResult:
    """Studies of one model and card with unlike loads, as one. Raises ValueError naming what differs."""
    first, *others = results
    for other in others:
        for name in ("model", "declared_max_tokens", "max_model_len", "seed", "step_times"):
            if first.manifest[name] != other.manifest[name]:
                raise ValueError(f"these studies differ in {name}: {first.manifest[name]!r}, {other.manifest[name]!r}")
        if not first.sizing.equals(other.sizing):
            raise ValueError("these studies differ in sizing.csv: another card, or other designs")
        if set(first.loads) & set(other.loads):
            raise ValueError(f"these studies both have {', '.join(sorted(set(first.loads) & set(other.loads)))}")
        frames = {
            name: pd.concat([getattr(first, name), getattr(other, name)], ignore_index=True)
            for name in ("capacity", "bursts")
        }
        loads = {**first.manifest["loads"], **other.manifest["loads"]}
        first = CapacityResult(
            **frames, sizing=first.sizing, manifest={**first.manifest, "loads": loads}, provenance=first.provenance
        )
    return first


def run_study(
    plan: list[Cell],
    *,
    beyond: bool = True,
    jobs: int = 1,
    gpu: GpuTimes | None = None,
    tick: Callable[[str], None] | None = None,
    out: Path | None = None,
) -> CapacityResult:
    """Measure every cell; with `beyond`, also the bursts past capacity, in the panel of equal bytes.

    jobs  processes; `tick` is told each finished cell, in words
    out   where the result will be saved: beside it the finished cells are kept when the study is interrupted

    Raises ValueError for an empty plan, and when `out` cannot take the result.
    """
    if not plan:
        raise ValueError("capacity: expected at least one cell, found none")
    if out is not None:
        refuse_other(out)
        partial.refuse_other_partial(partial.partial_folder(out))
    started, times = time.time(), gpu or load_gpu_times()
    sizes = beyond_sizes(plan) if beyond else {}
    work = [(cell, tuple(sizes.get(cell.load, ())) if cell.panel == "equal" else (), times) for cell in plan]
    found: dict[int, Found] = {}
    try:
        with closing(in_processes(_measure, work, jobs)) as measured:
            for number, one in measured:
                found[number] = one
                if tick is not None:
                    tick(f"{one.cell.name}: predicted {one.cell.predicted}, measured {one.measured}")
    except KeyboardInterrupt:
        raise _interrupted(plan, found, times, started, out) from None
    return collect([found[number] for number in range(len(plan))], times, started)


def _interrupted(
    plan: list[Cell], found: dict[int, Found], gpu: GpuTimes, started: float, out: Path | None
) -> partial.Interrupted:
    """Keep the finished cells."""
    tables: dict[str, pd.DataFrame] = {}
    if found:
        whole = collect([found[number] for number in sorted(found)], gpu, started)
        tables = {name: getattr(whole, name) for name in TABLES}
    names = [cell.name for cell in plan]
    finished = [names[number] for number in sorted(found)]
    return partial.keep_tables(out, "capacity", tables, finished, partial.names_left(names, finished))


def _measure(work: tuple[Cell, tuple[int, ...], GpuTimes]) -> Found:
    cell, sizes, gpu = work
    return measure(cell, beyond=sizes, gpu=gpu)


def collect(found: list[Found], gpu: GpuTimes, started: float) -> CapacityResult:
    """The tables of a study."""
    bursts = []
    for one in found:
        cell = one.cell
        keys = {"panel": cell.panel, "load": cell.load, "design": cell.design}
        bursts += [{**keys, **burst.row()} for burst in one.bursts]
    sizing = [
        {"panel": one.cell.panel, "load": one.cell.load, "design": one.cell.design, **one.cell.sizing.lines()}
        for one in found
    ]
    cell = found[0].cell
    manifest = {
        "model": cell.model,
        "bytes_per_token": cell.shape.bytes_per_token,
        "shape": cell.shape.model_dump(exclude_none=True),
        "declared_max_tokens": cell.declared,
        "max_model_len": cell.rules.max_model_len,
        "loads": {name: load_shape(name).text for name in dict.fromkeys(one.cell.load for one in found)},
        "step_times": gpu.source,
        "seed": cell.seed,
    }
    return CapacityResult(
        pd.DataFrame([one.row() for one in found]),
        pd.DataFrame(bursts),
        pd.DataFrame(sizing).drop(columns="load").drop_duplicates(["panel", "design"], ignore_index=True),
        manifest,
        provenance([cell.seed], [], started),
    )


def from_card(path: Path) -> CapacityResult:
    """What a card measured, as a study: no bursts beyond capacity, and only the cells that were run there.

    Raises ValueError naming the file when it is no file of `capacity_card`.
    """
    from kvarena.experiments.capacity_beside import differences
    from kvarena.experiments.capacity_card import read_measured

    data = read_measured(path)
    cells = data["cells"]
    names = ["panel", "load", "seed", "design", "label", "policy", "page_size", "num_pages", "ideal", "predicted"]
    names += ["measured", *(f"lost_{part}" for part in PARTS), "stopped"]
    try:
        rows = pd.DataFrame([{name: cell[name] for name in names} for cell in cells])
        sizing = pd.DataFrame([{"panel": c["panel"], "design": c["design"], **c["sizing"]} for c in cells])
        model = cells[0]["model"]
    except KeyError as error:
        raise ValueError(f"{path}: a cell has no field {error}") from None
    shape = model_shape(model)
    manifest = {
        "model": model,
        "bytes_per_token": shape.bytes_per_token,
        "shape": shape.model_dump(exclude_none=True),
        "declared_max_tokens": DECLARED,
        "max_model_len": Server().max_model_len,
        "loads": {name: load_shape(name).text for name in dict.fromkeys(rows["load"])},
        "step_times": "none: real pools and kernels",
        "seed": int(rows["seed"].iloc[0]),
        "carried_by": data["gpu"]["name"],
    }
    bursts = pd.DataFrame(columns=["panel", "load", "design", "size", "carried"])
    sizing = sizing.drop_duplicates(["panel", "design"], ignore_index=True)
    manifest["budgets"] = {panel: differences(cells, sizing, panel) for panel in dict.fromkeys(sizing["panel"])}
    return CapacityResult(rows, bursts, sizing, manifest, {"inputs": [path.name], "gpu": data["gpu"]})


# --- for people ---


def answer_table(result: CapacityResult, panel: str) -> Table:
    """How many requests each design carries; with a card's results, what it carried and what was predicted for it."""
    from kvarena.experiments.capacity_beside import caption
    from rich.table import Table

    on_card = result.manifest.get("on_card") or {}
    known = {(cell["panel"], cell["load"], cell["design"]): cell for cell in on_card.get("cells", [])}

    title = f"Concurrent requests without preemption, {PANELS[panel]}: measured (predicted)"
    shown = Table(title=title, title_justify="left")
    shown.add_column("design")
    for load in result.loads:
        shown.add_column(result.manifest["loads"][load], justify="right")
    rows = result.capacity[result.capacity["panel"] == panel]
    for design in dict.fromkeys(rows["design"]):
        cells = [str(rows.loc[rows["design"] == design, "label"].iloc[0])]
        for load in result.loads:
            mine = rows[(rows["design"] == design) & (rows["load"] == load)]
            if not len(mine):
                cells.append("not run")
                continue
            row = mine.iloc[0]
            card = known.get((panel, load, design))
            beside = "" if card is None else f", card {card['measured']:,} ({card['predicted']:,})"
            cells.append(f"{row['measured']:,} ({row['predicted']:,}){beside}")
        shown.add_row(*cells)
    shown.caption = caption(on_card, panel) if on_card else None
    return shown


def parts_table(result: CapacityResult, panel: str) -> Table:
    """What each rule costs, in requests: ideal - the parts = measured."""
    from rich.table import Table

    shown = Table(title=f"Where the requests go, {PANELS[panel]} (ideal - parts = measured)", title_justify="left")
    for head in ("load", "design", "ideal", *PARTS, "measured", "one more"):
        shown.add_column(head, justify="left" if head in ("load", "design", "one more") else "right")
    for row in result.capacity[result.capacity["panel"] == panel].to_dict("records"):
        parts = [f"{row[f'lost_{name}']:,}" for name in PARTS]
        shown.add_row(row["load"], row["design"], f"{row['ideal']:,}", *parts, f"{row['measured']:,}", row["stopped"])
    return shown


def sizing_table(plan_or_result: CapacityResult, panel: str) -> Table:
    """Where the card's bytes go."""
    from kvarena.experiments.capacity_beside import difference_text
    from rich.table import Table

    shown = Table(title=f"Where the card's bytes go, {PANELS[panel]}", title_justify="left")
    for head in ("design", "page", "pages", "rows", *(line.replace("_", " ") for line in LINES)):
        shown.add_column(head, justify="left" if head == "design" else "right")
    sizing = plan_or_result.sizing
    token = plan_or_result.manifest["bytes_per_token"]
    for row in sizing[sizing["panel"] == panel].to_dict("records"):
        lines = [_signed(row[f"{line}_bytes"]) for line in LINES]
        page = format_bytes(row["page_size"] * token)
        shown.add_row(row["design"], page, f"{row['num_pages']:,}", f"{row['rows']:,}", *lines)
    if others := difference_text(plan_or_result.manifest.get("budgets", {}).get(panel, {})):
        shown.caption = f"the first load of each design; cells of other loads: {others}"
    return shown


def _signed(number: int) -> str:
    return format_bytes(number) if number >= 0 else f"-{format_bytes(-number)}"


def backends_table() -> Table:
    """The page size of each attention backend."""
    from rich.table import Table

    shown = Table(title="Page size by attention backend", title_justify="left")
    for head in ("backend", "reads", "chosen"):
        shown.add_column(head, justify="right" if head == "chosen" else "left")
    for row in backend_rows():
        shown.add_row(*map(str, row.values()))
    return shown
