"""Results of the kernel benchmark as tables for people: the grids, and each target beside its measured value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

Row = Mapping[str, Any]


def rows_of(whole: Mapping[str, Any], **labels: Any) -> list[Row]:
    """Rows of all parts that carry these labels and no error."""
    rows = [row for part in whole["parts"].values() for row in part["rows"] if "error" not in row]
    return [row for row in rows if all(row.get(key) == value for key, value in labels.items())]


def read_ceiling(whole: Mapping[str, Any]) -> float:
    """Best read-only rate of the decode part's own process (else of any part), GB/s; NaN when none was measured."""
    parts = whole["parts"]
    chosen = {"parts": {"decode": parts["decode"]}} if "decode" in parts else whole
    return max((row["gbps"] for row in rows_of(chosen, op="ceiling", what="read")), default=math.nan)


def whole_number(value: float) -> str:
    """To the next whole number, a half upwards: saved figures have one decimal, so halves are common.

    >>> [whole_number(value) for value in (436.5, 437.5, 436.4)]
    ['437', '438', '436']
    """
    return str(Decimal(repr(value)).quantize(Decimal(1), ROUND_HALF_UP))


def grid(
    rows: Iterable[Row], line: Callable[[Row], str], column: Callable[[Row], str], cell: Callable[[Row], str]
) -> str:
    """A text table: lines and columns in the order in which they first appear."""
    table: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        columns.setdefault(column(row))
        table.setdefault(line(row), {})[column(row)] = cell(row)
    width = max((len(name) for name in table), default=0)
    widths = [max(len(name), *(len(cells.get(name, "-")) for cells in table.values())) for name in columns]
    head = " " * width + "  " + "  ".join(name.rjust(w) for name, w in zip(columns, widths, strict=True))
    body = [
        name.ljust(width) + "  " + "  ".join(cells.get(c, "-").rjust(w) for c, w in zip(columns, widths, strict=True))
        for name, cells in table.items()
    ]
    return "\n".join([head, *body])


def print_tables(whole: Mapping[str, Any], file: Any) -> None:
    """Everything that was measured, part by part."""
    read = read_ceiling(whole)
    if not math.isnan(read):
        print(f"read ceiling {read:.0f} GB/s", file=file)
    decode = rows_of(whole, op="decode", study="grid")
    if decode:
        print("\ndecode 32/8 bf16, shuffled: us / share of the read ceiling", file=file)
        text = grid(decode, _line, lambda r: r["point"], lambda r: f"{r['us']:.1f}/{r['gbps'] / read:.3f}")
        print(text, file=file)
    extend = rows_of(whole, op="extend", study="grid")
    if extend:
        print("\nextend 32/8 bf16, shuffled: TFLOP/s", file=file)
        print(grid(extend, _line, lambda r: r["point"], lambda r: whole_number(r["tflops"])), file=file)
    others = ("store", "copy_pages", "swap", "slot_mapping", "host", "adapter")
    for row in [r for r in rows_of(whole) if r.get("op") in others]:
        print(" ".join(f"{key}={value}" for key, value in row.items() if key not in ("spread",)), file=file)
    _print_safety(whole, file)
    found = list(targets(whole))
    if found:
        print("\ntargets", file=file)
    for target in found:
        line = f"{'met ' if target.met else 'MISS'}  {target.name:58}  {target.wanted:>12}  {target.found}"
        print(f"{line:84}  ({target.beside})" if target.beside else line, file=file)


def _print_safety(whole: Mapping[str, Any], file: Any) -> None:
    """What the parts `safety` and `sanitize` found, a line a check."""
    parts = whole["parts"]
    counts: dict[str, list[int]] = {}
    for row in parts.get("safety", {}).get("rows", []):
        one = counts.setdefault(row.get("check") or f"random calls of {row['op']}", [0, 0])
        one[0] += row.get("draws", 1)
        one[1] += not row.get("passed", True) or "error" in row
    for name, (count, wrong) in counts.items():
        print(f"safety: {name}: {count:,} checked, {wrong} wrong", file=file)
    for row in parts.get("sanitize", {}).get("rows", []):
        found = row.get("error", f"{row.get('findings')} findings over {len(row.get('launched', []))} launches")
        print(f"compute-sanitizer: {row.get('tool')}, {row.get('kernels')} kernels: {found}", file=file)


def _line(row: Row) -> str:
    return f"{row['kernel']} page {row['page']}"


class Target:
    """One target of the project: what was wanted, what was found, and beside it what bounds it in the same run."""

    def __init__(self, name: str, wanted: str, found: str, met: bool, beside: str = "") -> None:
        self.name, self.wanted, self.found, self.met, self.beside = name, wanted, found, met, beside


GROUPS = {
    "decode": "decode",
    "extend": "extend",
    "store_kv": "writes, copies, swap",
    "copy_pages": "writes, copies, swap",
    "swap": "writes, copies, swap",
    "slot": "slots and page table, device time",
    "adapter's": "slots and page table, device time",
    "host": "host time",
}
TARGETS_HEAD = "| targets | how many | met |"


def targets_markdown(whole: Mapping[str, Any]) -> str:
    """Two tables for a page: how many targets of each group are met, and those that are not, with what was found."""
    found = targets(whole)
    lines = [TARGETS_HEAD, "|---|---|---|"]
    for group in dict.fromkeys(GROUPS.values()):
        some = [target for target in found if GROUPS[target.name.split()[0]] == group]
        lines.append(f"| {group} | {len(some)} | {sum(target.met for target in some)} |")
    lines.append(f"| all | {len(found)} | {sum(target.met for target in found)} |")
    missed = [target for target in found if not target.met]
    if missed:
        lines += ["", "| not met | wanted | found | in the same run |", "|---|---|---|---|"]
        lines += [f"| {each.name} | {each.wanted} | {each.found} | {each.beside} |" for each in missed]
    return "\n".join(lines) + "\n"


# Share of the read ceiling that decode must reach, by point: (pages 16 and 64, page 1).
MUST = {
    "64x16k": (0.96, 0.95),
    "256x4k": (0.96, 0.95),
    "32x4k": (0.90, 0.87),
    "64x2k": (0.90, 0.87),
    "128x1k": (0.90, 0.87),
    "256x1k": (0.90, 0.87),
    "1x128k": (0.87, 0.87),
    "mix128": (0.87, 0.87),
    "8x8k": (0.82, 0.81),
}
TIES = {"1x8k": 1.03, "1x128k": 1.03}
# Extend against FlashAttention-3: (least on a shape, geometric mean, TFLOP/s on 8192/0) by page size.
EXTEND = {1: (0.95, 1.0, 600), 16: (0.97, 1.03, 640), 64: (1.0, 1.05, 650), 128: (0.97, 1.0, 670)}


def targets(whole: Mapping[str, Any]) -> list[Target]:
    """All targets that the measured parts can answer."""
    return [*_decode_targets(whole), *_extend_targets(whole), *_memory_targets(whole)]


def _by_kernel(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["kernel"]: row for row in rows}


def all_peers(whole: Mapping[str, Any]) -> str:
    """Study whose decode rows have every peer: the grid itself, or a run of its own."""
    return "grid_all_peers" if rows_of(whole, op="decode", study="grid_all_peers") else "grid"


def _decode_targets(whole: Mapping[str, Any]) -> list[Target]:
    grid_rows = rows_of(whole, op="decode", study="grid")
    found = _grid_targets(grid_rows, read_ceiling(whole), "")
    if all_peers(whole) != "grid":
        other = _grid_targets(
            rows_of(whole, op="decode", study="grid_all_peers"), read_ceiling(whole), " (earlier run)"
        )
        found += [target for target in other if "faster of" in target.name]
    found += _page_one_targets(grid_rows) + _runs_of_64_targets(whole, grid_rows)
    return found + _quantised_targets(whole) + _shape_targets(whole)


def _shape_targets(whole: Mapping[str, Any]) -> list[Target]:
    """Other head counts and head dims: 0.90 of the read ceiling where half a GB or more is read."""
    found = []
    rows = [*rows_of(whole, op="decode", study="heads"), *rows_of(whole, op="decode", study="head_dim")]
    for row in rows:
        ours = row["kernel"] == "kvarena-block_table" and row["layout"] == "split"
        if ours and row["gbps"] * row["us"] > 0.5e6:
            shape = f"{row['heads']} head_dim {row['dim']}"
            name = f"decode {shape} {row['point']} page {row['page']}: share of the ceiling"
            found.append(_at_least(name, 0.9, round(row["gbps"] / read_ceiling(whole), 3), digits=3))
    return found


def _grid_targets(grid_rows: Sequence[Row], read: float, note: str) -> list[Target]:
    found = []
    for page in sorted({row["page"] for row in grid_rows}):
        for point in dict.fromkeys(row["point"] for row in grid_rows):
            kernels = _by_kernel([r for r in grid_rows if r["page"] == page and r["point"] == point])
            ours = kernels.get("kvarena-block_table")
            if ours is None:
                continue
            peers = [row["us"] for name, row in kernels.items() if name in ("fa3", "flashinfer")]
            if peers:
                ratio = ours["us"] / min(peers)
                limit = TIES.get(point, 1.005)
                names = " and ".join(name for name in ("fa3", "flashinfer") if name in kernels)
                name = f"decode {point} page {page}: time over the faster of {names}{note}"
                found.append(Target(name, f"<= {limit}", f"{ratio:.3f}", ratio <= limit))
            if point in MUST:
                must, share = MUST[point][0 if page > 1 else 1], ours["gbps"] / read
                name = f"decode {point} page {page}: share of the read ceiling"
                found.append(Target(name, f">= {must}", f"{share:.3f}", share >= must))
            other = kernels.get("kvarena-req_to_token")
            if other:
                ratio = other["us"] / ours["us"]
                name = f"decode {point} page {page}: req_to_token over block_table"
                found.append(Target(name, "<= 1.01", f"{ratio:.3f}", ratio <= 1.01))
    return found


def _page_one_targets(grid_rows: Sequence[Row]) -> list[Target]:
    """Page 1 against page 16, shuffled, by the same kernel."""
    found = []
    times = {(r["page"], r["point"]): r["us"] for r in grid_rows if r["kernel"] == "kvarena-block_table"}
    for point in dict.fromkeys(row["point"] for row in grid_rows):
        if (1, point) in times and (16, point) in times:
            ratio = times[1, point] / times[16, point]
            limit = {"128x1k": 1.05, "1x8k": 1.08}.get(point, 1.03)
            found.append(Target(f"decode {point}: page 1 over page 16", f"<= {limit}", f"{ratio:.3f}", ratio <= limit))
    return found


def _runs_of_64_targets(whole: Mapping[str, Any], grid_rows: Sequence[Row]) -> list[Target]:
    """Page 1 with slots in runs of 64 against page 16, shuffled: no slower, but for a tie."""
    found = []
    times = {r["point"]: r["us"] for r in grid_rows if r["kernel"] == "kvarena-block_table" and r["page"] == 16}
    for row in rows_of(whole, op="decode", study="placement", placement="groups64", page=1):
        if row["point"] in times:
            ratio = row["us"] / times[row["point"]]
            name = f"decode {row['point']}: page 1 in runs of 64 slots over page 16"
            found.append(Target(name, "<= 1.005", f"{ratio:.3f}", ratio <= 1.005))
    return found


def _quantised_targets(whole: Mapping[str, Any]) -> list[Target]:
    found = []
    plain = {
        (r["page"], r["point"]): r["us"]
        for r in rows_of(whole, op="decode", study="grid", kernel="kvarena-block_table")
    }
    for row in rows_of(whole, op="decode", study="quantised"):
        if (row["page"], row["point"]) in plain:
            ratio = plain[row["page"], row["point"]] / row["us"]
            name = f"decode {row['dtype']} {row['point']} page {row['page']}: speed over bf16"
            found.append(Target(name, ">= 1.5", f"{ratio:.2f}", ratio >= 1.5))
    return found


def _extend_targets(whole: Mapping[str, Any]) -> list[Target]:
    found = []
    rows = rows_of(whole, op="extend", study="grid")
    for page, (least, mean, absolute) in EXTEND.items():
        at = {(r["kernel"], r["point"]): r["tflops"] for r in rows if r["page"] == page}
        points = [p for p in dict.fromkeys(r["point"] for r in rows) if p != "mix16"]
        ratios = {
            p: at["kvarena-gluon", p] / at["fa3", p] for p in points if ("kvarena-gluon", p) in at and ("fa3", p) in at
        }
        for point, ratio in ratios.items():
            want = 0.97 if page == 64 and point == "16/8192x32" else least
            name = f"extend {point} page {page}: speed over FA3"
            found.append(Target(name, f">= {want}", f"{ratio:.3f}", ratio >= want))
        if ratios:
            geo = math.exp(sum(math.log(ratio) for ratio in ratios.values()) / len(ratios))
            found.append(
                Target(f"extend page {page}: geometric mean over FA3", f">= {mean}", f"{geo:.3f}", geo >= mean)
            )
        for kernel, want in (("kvarena-gluon", absolute), ("kvarena-triton", 500 if page >= 64 else 375)):
            if (kernel, "8192/0x1") in at:
                value = at[kernel, "8192/0x1"]
                name = f"extend 8192/0x1 page {page}, {kernel}: TFLOP/s"
                found.append(Target(name, f">= {want}", whole_number(value), value >= want))
    return found


def _memory_targets(whole: Mapping[str, Any]) -> list[Target]:
    found = []
    for row in rows_of(whole, op="store", placement="shuffled"):
        want = {256: 870, 8192: 3450, 65_536: 3900}[row["tokens"]]
        found.append(_at_least(f"store_kv {row['tokens']} tokens scattered: GB/s", want, row["gbps"]))
    for row in rows_of(whole, op="copy_pages"):
        found.append(_at_least(f"copy_pages {row['pages']} pages, {row['layers']} layers: GB/s", 3300, row["gbps"]))
    for row in rows_of(whole, op="swap", kernel="kvarena"):
        if row.get("mb", 66) == 66:
            same = [r for r in rows_of(whole, op="swap", page=row["page"], way=row["way"], mb=66) if r is not row]
            beside = ", ".join(f"{each['kernel']}: {each['gbps']}" for each in same)
            found.append(_at_least(f"swap {row['way']} page {row['page']}: GB/s", 50, row["gbps"], beside=beside))
    for row in rows_of(whole, op="slot_mapping"):
        found.append(_at_most(f"slot mapping {row['point']} {row['table']}: us", 5, row["us"]))
    found += _host_targets(whole)
    for row in rows_of(whole, op="adapter"):
        if row["what"] != "gather":
            name = f"adapter's {row['what']} step, {row['table']} page {row['page']}: us"
            found.append(_at_most(name, 5, row["us"]))
    return found


def _host_targets(whole: Mapping[str, Any]) -> list[Target]:
    """Host times; beside an adapter's decode step what its copy and launch take alone, and the same step through the
    verbs for any batch, of which nothing is asked."""
    found = []
    rows = rows_of(whole, op="host")
    times = {(row["what"], row.get("table"), row.get("page")): row["us"] for row in rows}
    for row in rows:
        what, table, page = row["what"], row.get("table"), row.get("page")
        if what.startswith("adapter") and not what.startswith("adapter_decode"):
            continue
        limit = 60 if what.startswith("adapter") else {"decode_split": 70}.get(what, 30)
        where = f", {table} page {page}" if table else ""
        floor = times.get(("adapter_floor", table, 16))
        general = times.get((what.replace("_decode", "_lists"), table, page)) if table else None
        beside = [] if floor is None else [f"its copy and launch alone: {floor}"]
        beside += [] if general is None else [f"by update_step and batch: {general}"]
        found.append(_at_most(f"host time of {what}{where}: us", limit, row["us"], ", ".join(beside)))
    return found


def _at_least(name: str, want: float, value: float, digits: int = 1, beside: str = "") -> Target:
    return Target(name, f">= {want}", f"{value:.{digits}f}", value >= want, beside)


def _at_most(name: str, want: float, value: float, beside: str = "") -> Target:
    return Target(name, f"<= {want}", f"{value:.1f}", value <= want, beside)
