"""What `kvarena trace` prints: the list of traces, a description, the bar of a transfer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvarena.experiments.traces import catalog


def listing() -> list[dict[str, str]]:
    """One row a trace: name, state (built in, held, fetchable, by hand), licence, about, and where or how."""
    from kvarena.experiments import workloads

    rows = [
        {"name": name, "state": "built in", "licence": "Apache-2.0", "about": workloads.about(name), "where": ""}
        for name in workloads.NAMES
    ]
    for known in catalog.KNOWN:
        path = catalog.find(known)
        state = "held" if path else "fetchable" if known.url else "by hand"
        where = str(path) if path else known.url or known.how
        rows.append(
            {"name": known.name, "state": state, "licence": known.licence, "about": known.about, "where": where}
        )
    return rows


def print_listing(rows: list[dict[str, str]]) -> None:
    """A table on stdout, a line a trace."""
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in ("name", "state", "licence")}
    for row in [{"name": "name", "state": "state", "licence": "licence", "about": "what it is"}, *rows]:
        print("  ".join(row[key].ljust(widths[key]) for key in widths) + f"  {row['about']}")


def print_description(found: dict[str, Any]) -> None:
    """Sections of plain lines on stdout."""
    print(f"{found['name']}: {found['requests']:,} requests in {found['span_s']:,.1f} s")
    _section("can it show", [f"{key} = {value}" for key, value in found["visible"].items()])
    _section("not observable here", found["cannot_show"] or ["nothing: all factors show"])
    _section("warnings", found["warnings"] or ["none"])
    _section("lengths in tokens", [_lengths("input", found), _lengths("output", found)])
    _section("sessions", [_pairs(found["sessions"]) if found["sessions"] else "none"])
    _section(
        "replies",
        [f"{found['replies_with_ids']:,} have ids, {found['replies_that_return']:,} return in a later prompt"],
    )
    _section("ids", [found["ids"]])
    _section("reuse", [_pairs(found["reuse"]) if found["reuse"] else "none: lengths only"])
    _section("token hit rate of an infinite cache (last-token rule off)", _ceilings(found["ceilings"]))


def _section(title: str, lines: list[str]) -> None:
    print(title)
    for line in lines:
        print(f"  {line}")


def _lengths(kind: str, found: dict[str, Any]) -> str:
    values = found[f"{kind}_tokens"]
    return f"{kind:<7}" + "  ".join(f"{key} {value:,.0f}" for key, value in values.items())


def _pairs(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value:,}" for key, value in values.items()
    )


def _ceilings(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["none: lengths only"]
    lines = ["page_size  published            whole run  last half"]
    for row in rows:
        rates = f"{row['token_hit_rate']:>9.4f}  {row['token_hit_rate_last_half']:>9.4f}"
        lines.append(f"{row['page_size']:>9}  {row['published']:<20} {rates}")
    return lines


@contextmanager
def byte_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on stderr; yields what advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("fetch", total=total or None)
        yield lambda size: bar.advance(task, size)


@contextmanager
def counted(what: str, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Counts up to `total` on stderr: a bar on a terminal, a line every tenth in a log; yields what advances it."""
    if shown and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(file=sys.stderr)) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if shown and done % max(1, total // 10) == 0:
            print(f"{done:,} of {total:,} {what}", file=sys.stderr, flush=True)

    yield advance
