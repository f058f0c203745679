"""Figures of the kernel benchmark, from a saved results file: no GPU, no torch, nothing read or saved by a plot.

Each `plot(result, ax=None) -> Axes` takes what `load_kernels` gives. "The cost of paging" is four numbers with four
denominators (`paging_cost`): looking up, scatter, page size, and the best contiguous library kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvarena.experiments.bench.tables import TARGETS_HEAD, Row, all_peers, read_ceiling, rows_of, targets_markdown
from kvarena.experiments.foreign import read_object
from kvarena.experiments.outputs import refuse_other_figures, refuse_other_file, source_of
from kvarena.experiments.style import STYLE, add_footer, save_figure
from kvarena.experiments.wrong_kind import reads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
# Okabe and Ito: told apart with every common colour blindness. One colour a kernel, in every figure.
COLOURS = {
    "kvarena-block_table": "#0072B2",
    "kvarena-req_to_token": "#D55E00",
    "kvarena-gluon": "#0072B2",
    "kvarena-triton": "#56B4E9",
    "fa3": "#666666",
    "flashinfer": "#009E73",
    "sdpa-contiguous": "#E69F00",
    "vllm-triton": "#CC79A7",
    "sglang-triton": "#000000",
}
LABELS = {
    "kvarena-block_table": "ours, block_table",
    "kvarena-req_to_token": "ours, req_to_token",
    "kvarena-gluon": "ours, Gluon",
    "kvarena-triton": "ours, plain Triton",
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "sdpa-contiguous": "SDPA (cuDNN), contiguous",
    "vllm-triton": "vLLM, Triton",
    "sglang-triton": "SGLang, Triton",
}
EXTEND_KERNELS = ("kvarena-gluon", "kvarena-triton", "fa3", "flashinfer", "vllm-triton", "sglang-triton")
POINT_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")


@reads("measurements on a card")
def load_kernels(path: Path) -> dict[str, Any]:
    """A results file of `kvarena bench kernels`. ValueError: not one, or of another schema."""
    whole = read_object(path)
    if whole.get("schema_version") != 1:
        raise ValueError(f"{path}: schema_version: expected 1, found {whole.get('schema_version')!r}")
    if not isinstance(whole.get("parts"), dict):
        raise ValueError(f"{path}: parts: expected those of `kvarena bench kernels`, found {', '.join(whole)}")
    return whole


def load_rows(path: Path) -> dict[str, Any]:
    """`load_kernels` of a file whose parts are rows: the model on a card has other tables. ValueError: none."""
    whole = load_kernels(path)
    for name, part in whole["parts"].items():
        if not isinstance(part, dict) or not isinstance(part.get("rows"), list):
            other = f"`kvarena report {path}` shows files of any kind"
            raise ValueError(f"{path}: parts.{name}: expected rows of `kvarena bench kernels`, found none; {other}")
    return whole


def footer(result: Result) -> str:
    """One line: card, driver, torch, Triton, and the commits of the timed parts."""
    timed = [part["provenance"] for name, part in result["parts"].items() if name != "check"]
    info = (timed or [part["provenance"] for part in result["parts"].values()])[0]
    card, driver = info["card"][0], info["card"][1] if len(info["card"]) > 1 else "?"
    commits = dict.fromkeys(str(part["kvarena"].get("commit") or "")[:7] for part in timed)
    return f"{card} · driver {driver} · torch {info['torch']} · Triton {info['triton']} · kvarena {', '.join(commits)}"


def decode_by_page(result: Result, ax: Axes | None = None) -> Axes:
    """Decode time against page size for both tables, over block_table at page 16: lines for a few points."""
    ax = _axes(ax)
    rows = rows_of(result, op="decode", study="grid")
    for colour, point in zip(POINT_COLOURS, ("1x128k", "32x4k", "128x1k", "64x16k", "256x4k"), strict=False):
        for kernel, dashes in (("kvarena-block_table", "-"), ("kvarena-req_to_token", (0, (2, 1.5)))):
            times = {r["page"]: r["us"] for r in rows if r["kernel"] == kernel and r["point"] == point}
            base = next((r["us"] for r in rows if _is(r, "kvarena-block_table", point, 16)), None)
            if base and times:
                pages = sorted(times)
                values = [100 * (times[page] / base - 1) for page in pages]
                label = point if dashes == "-" else None
                ax.plot(range(len(pages)), values, color=colour, linestyle=dashes, marker="o", label=label)
    ax.axhline(0, color="#999999", linewidth=0.8)
    pages = sorted({r["page"] for r in rows})
    ax.set_xticks(range(len(pages)), [str(page) for page in pages])
    ax.set_xlabel("page size [tokens], slots shuffled over the pool")
    ax.set_ylabel("decode time over page 16 [%]")
    ax.set_title("Decode 32/8 heads, bf16: solid block_table, dashed req_to_token")
    ax.legend(ncols=3)
    return ax


def _is(row: Row, kernel: str, point: str, page: int) -> bool:
    return bool(row["kernel"] == kernel and row["point"] == point and row["page"] == page)


def ceiling_share(result: Result, ax: Axes | None = None, page: int = 16) -> Axes:
    """Share of the read ceiling at each decode point: ours and the peers, at one page size."""
    ax = _axes(ax)
    read = read_ceiling(result)
    rows = rows_of(result, op="decode", study=all_peers(result), page=page)
    points = list(dict.fromkeys(r["point"] for r in rows))
    kernels = [k for k in COLOURS if any(r["kernel"] == k for r in rows)]
    values = {k: {r["point"]: 100 * r["gbps"] / read for r in rows if r["kernel"] == k} for k in kernels}
    _bars(ax, points, values)
    ax.axhline(100, color="#999999", linewidth=0.8)
    ax.set_ylabel(f"share of {read:,.0f} GB/s read [%]")
    ax.set_xlabel("requests x context")
    ax.set_title(f"Decode 32/8 heads, bf16, page {page}, shuffled")
    ax.set_ylim(0, 118)
    ax.legend(ncols=3, loc="upper left")
    return ax


def extend_tflops(result: Result, ax: Axes | None = None, page: int = 16) -> Axes:
    """Extend throughput at one page size, shape by shape: ours and the peers."""
    ax = _axes(ax)
    rows = rows_of(result, op="extend", study="grid", page=page)
    points = list(dict.fromkeys(r["point"] for r in rows))
    kernels = [k for k in EXTEND_KERNELS if any(r["kernel"] == k for r in rows)]
    values = {k: {r["point"]: r["tflops"] for r in rows if r["kernel"] == k} for k in kernels}
    _bars(ax, points, values)
    ax.set_ylabel("TFLOP/s, causal")
    ax.set_xlabel("new tokens / cached prefix x requests")
    ax.set_title(f"Extend 32/8 heads, bf16, page {page}, shuffled")
    ax.set_ylim(0, 1.25 * max((v for k in values.values() for v in k.values()), default=1))
    ax.legend(ncols=3, loc="upper left")
    return ax


def scatter_cost(result: Result, ax: Axes | None = None) -> Axes:
    """Decode time at page size 1 against run length of neighbouring slots, over slots in order."""
    ax = _axes(ax)
    runs = {"shuffled": "1", "groups16": "16", "groups64": "64", "in_order": "in order"}
    for colour, point in zip(POINT_COLOURS, ("32x4k", "128x1k", "64x16k", "256x4k"), strict=False):
        at = {r["placement"]: r["us"] for r in _page_one(result, point)}
        if "in_order" in at:
            values = [100 * (at[name] / at["in_order"] - 1) if name in at else float("nan") for name in runs]
            ax.plot(range(len(runs)), values, color=colour, marker="o", label=point)
    ax.axhline(0, color="#999999", linewidth=0.8)
    ax.set_xticks(range(len(runs)), list(runs.values()))
    ax.set_xlabel("run length of neighbouring slots [tokens], page size 1")
    ax.set_ylabel("decode time over in order [%]")
    ax.set_title("What scatter costs a decode step")
    ax.legend(ncols=2)
    return ax


def _page_one(result: Result, point: str) -> list[Row]:
    rows = rows_of(result, op="decode", point=point, page=1, kernel="kvarena-block_table")
    return [r for r in rows if r["study"] in ("grid", "placement")]


def paging_cost(result: Result, ax: Axes | None = None) -> Axes:
    """Four costs of paging, each with its own denominator (`COSTS`), for the decode points that have all four."""
    ax = _axes(ax)
    points = ("32x4k", "128x1k", "64x16k", "256x4k")
    width = 0.8 / len(COSTS)
    for i, (label, cost) in enumerate(COSTS.values()):
        values = [cost(result, point) for point in points]
        places = [x + (i - 1.5) * width for x in range(len(points))]
        ax.bar(places, values, width, color=POINT_COLOURS[i], label=label)
    ax.axhline(0, color="#666666", linewidth=0.8)
    ax.set_xticks(range(len(points)), points)
    ax.set_ylabel("time [%]")
    ax.set_xlabel("decode, requests x context, where all four were measured")
    ax.set_title("The cost of paging is four numbers")
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.75 * (high - low))
    ax.legend(loc="upper left")
    return ax


def recorded_layouts(result: Result, ax: Axes | None = None) -> Axes:
    """Decode time on layouts recorded from aged pools, and on the same pages shuffled, over the same pages in order."""
    ax = _axes(ax)
    rows = rows_of(result, op="decode", study="recorded", kernel="kvarena-block_table")
    batches = list(dict.fromkeys((r["point"], r["page"]) for r in rows if r["tokens"] > 10_000))
    width = 0.8 / 2
    for i, (placement, label) in enumerate((("recorded", "as the pool held them"), ("shuffled", "shuffled"))):
        values = []
        for point, page in batches:
            at = {r["placement"]: r["us"] for r in rows if (r["point"], r["page"]) == (point, page)}
            values.append(_percent(at[placement], at["in_order"]) if {placement, "in_order"} <= at.keys() else math.nan)
        places = [x + (i - 0.5) * width for x in range(len(batches))]
        ax.bar(places, values, width, color=POINT_COLOURS[i], label=label)
    runs = {(r["point"], r["page"]): r["run_length"] for r in rows if r["placement"] == "recorded"}
    names = [f"{point.split(':')[-1]}\nruns of {runs[point, page]:.1f}" for point, page in batches]
    ax.axhline(0, color="#666666", linewidth=0.8)
    ax.set_xticks(range(len(batches)), names)
    ax.set_ylabel("decode time over in order [%]")
    ax.set_xlabel("allocator and page size, mean run of neighbouring slots")
    ax.set_title("Layouts recorded from aged pools")
    ax.legend()
    return ax


def _time(result: Result, **labels: Any) -> float:
    rows = rows_of(result, op="decode", **labels)
    return float(rows[0]["us"]) if rows else float("nan")


def _percent(part: float, whole: float) -> float:
    return 100 * (part / whole - 1)


def _ours(result: Result, point: str, **labels: Any) -> float:
    return _time(result, point=point, kernel="kvarena-block_table", **labels)


def _lookup(result: Result, point: str) -> float:
    flat = _time(result, point=point, study="lookup", page=16, kernel="kvarena-one_entry")
    return _percent(_ours(result, point, study="lookup", page=16), flat)


def _scatter(result: Result, point: str) -> float:
    in_order = _ours(result, point, study="placement", page=16, placement="in_order")
    return _percent(_ours(result, point, study="grid", page=16), in_order)


def _page_size(result: Result, point: str) -> float:
    return _percent(_ours(result, point, study="grid", page=1), _ours(result, point, study="grid", page=64))


def _library(result: Result, point: str) -> float:
    study = all_peers(result)
    contiguous = _time(result, point=point, study=study, kernel="sdpa-contiguous")
    return _percent(_ours(result, point, study=study, page=16), contiguous)


# name -> what it is over what, and the cost in percent at a decode point (NaN where it was not measured)
COSTS: dict[str, tuple[str, Callable[[Result, str], float]]] = {
    "lookup": ("table lookup: page 16 over one entry a request", _lookup),
    "scatter": ("scatter: page 16 shuffled over in order", _scatter),
    "page": ("page size: page 1 over page 64, shuffled", _page_size),
    "library": ("ours, page 16 shuffled over contiguous cuDNN", _library),
}


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        return plt.subplots(figsize=(7.0, 3.6), layout="constrained")[1]


def _bars(ax: Axes, points: Sequence[str], values: Mapping[str, Mapping[str, float]]) -> None:
    """Groups of bars, one a kernel; a missing value is a gap."""
    width = 0.8 / max(1, len(values))
    for i, (kernel, found) in enumerate(values.items()):
        places = [x + (i - (len(values) - 1) / 2) * width for x in range(len(points))]
        heights = [found.get(point, float("nan")) for point in points]
        ax.bar(places, heights, width, color=COLOURS[kernel], label=LABELS[kernel])
    ax.set_xticks(range(len(points)), list(points), rotation=20, ha="right")


FIGURES: dict[str, Callable[..., Axes]] = {
    "decode_by_page": decode_by_page,
    "ceiling_share": ceiling_share,
    "extend_tflops": extend_tflops,
    "scatter_cost": scatter_cost,
    "paging_cost": paging_cost,
    "recorded_layouts": recorded_layouts,
}


def save_figures(result: Result, folder: Path, force: bool = False) -> list[Path]:
    """All figures as PDF, SVG and PNG, with the provenance below, and targets.md; returns the files.

    Raises ValueError when other figures are there, or another targets.md, unless `force`.
    """
    import matplotlib as mpl

    source, page = source_of("kernels", result), folder / "targets.md"
    if not force:
        refuse_other_figures(folder, FIGURES, source)
        refuse_other_file(page, [TARGETS_HEAD.encode()], "give another folder, or --force")
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text(targets_markdown(result), encoding="utf-8")
    written: list[Path] = [page]
    with mpl.rc_context(STYLE):
        import matplotlib.pyplot as plt

        for name, plot in FIGURES.items():
            figure = cast("Figure", plot(result).figure)
            add_footer(figure, footer(result))
            written += save_figure(figure, folder / name, source=source)
            plt.close(figure)
    return written
