"""The figures of a result as files, and one self-contained page that shows everything."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvarena.experiments import plots
from kvarena.experiments.budget import format_bytes
from kvarena.experiments.config import SCHEMA_VERSION
from kvarena.experiments.outputs import note_written, refuse_in_partial, refuse_other_figures, save_one, source_of
from kvarena.experiments.provenance import footer
from kvarena.experiments.style import printable, save_figure
from kvarena.experiments.tables import remarks, table_html, tables

if TYPE_CHECKING:
    import pandas as pd
    from kvarena.experiments.results import Result
    from matplotlib.figure import Figure

CAPTIONS = {
    "hit_rate": "Token hit rate against pool size, and the paired difference under it: the same requests, equal bytes.",
    "occupancy": "Where the pages are over the run. Free and evictable pages can both be taken at once.",
    "waste": "Slots without a token by kind, mean over the recorded steps.",
    "evictions": "KV that was dropped for room over the whole run.",
}
_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b2a41; max-width: 64rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0 .3rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #d9dfe6; text-align: right; }
thead th { border-bottom: 2px solid #7a93ac; vertical-align: bottom; }
tr > th:first-child { text-align: left; font-weight: 400; min-width: 4.5rem; }
td { white-space: nowrap; }
.w { text-align: left; } td.w { white-space: normal; min-width: 7rem; max-width: 34rem; overflow-wrap: break-word; }
h3 { font-size: 1rem; margin: 1.4rem 0 .2rem; }
caption { min-width: 12rem; }
.note { color: #5b6b7d; font-size: .85rem; margin: 0; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: #5b6b7d; font-size: .9rem; }
.warning { background: #fff3cd; border-left: 4px solid #c77700; padding: .6rem .8rem; font-weight: 600; }
pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; font-size: .8rem; }
footer { color: #5b6b7d; font-size: .8rem; margin-top: 3rem; border-top: 1px solid #d9dfe6; }
""".strip()


def write_figures(result: Result, folder: Path) -> list[Path]:
    """figures/NAME.{pdf,svg,png}; the figure of measured times stands outside, as timings.{pdf,svg,png}."""
    (folder / "figures").mkdir(exist_ok=True)
    stems = {name: folder / "figures" / name for name in captions(result)}
    if len(result.timings):
        stems["allocator_time"] = folder / "timings"
    paths = []
    for name, stem in stems.items():
        with drawn(result, name) as figure:
            paths += save_figure(figure, stem, source=result_source(result))
    return paths


def result_source(result: Result) -> str:
    """Names a result in its figures: equal for equal configs and inputs."""
    return source_of(
        result.manifest["kind"], result.config, [one["sha256"] for one in result.provenance.get("inputs", [])]
    )


def captions(result: Result) -> dict[str, str]:
    """The figures of a result and what each shows; an engine run has its own beside those of a comparison."""
    if result.manifest["kind"] != "run":
        return CAPTIONS
    from kvarena.experiments.engine import figures

    return {**figures.CAPTIONS, **CAPTIONS}


def plot_folder(result: Result, out: Path, force: bool = False) -> list[Path]:
    """All figures into `out`, each renamed into place when it is whole. Raises ValueError when other figures or another
    result are there, unless `force`."""
    refuse_in_partial(out / "figures")
    if not force:
        _refuse_other_result(result, out)
        refuse_other_figures(out, [*captions(result), "timings"], result_source(result))
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out, prefix=".partial-") as partial:
            written = write_figures(result, Path(partial))
            placed = [path.replace(out / path.name) for path in written]
        for path in placed:
            note_written(path)
        return placed
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error.strerror})") from None


def _refuse_other_result(result: Result, out: Path) -> None:
    from kvarena.experiments.verify_kinds import kind_name

    own = result.path is not None and out.exists() and out.samefile(result.path)
    if not own and (found := kind_name(out)) is not None:
        raise ValueError(f"{out}: holds another result ({found}); give another folder, or --force")


def write_one_figure(result: Result, name: str, path: Path) -> None:
    """One figure in the format that the file's name asks for."""
    with drawn(result, name) as figure:
        save_one(figure, path, result_source(result))


@contextmanager
def drawn(result: Result, name: str) -> Iterator[Figure]:
    """A figure for saving, drawn without a screen; the caller's backend is put back."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    with mpl.rc_context():
        figure = plots.draw(name, result, result_footer(result))
        try:
            yield figure
        finally:
            plt.close(figure)


def result_footer(result: Result) -> str:
    """One line of provenance without a date; of what an interrupted command left, it begins with PARTIAL."""
    text = footer(result.config, result.manifest["trace"], result.visible["outputs"])
    text += " · made by more than one version" if result.manifest.get("other_code") else ""
    return f"PARTIAL · {text}" if "partial" in result.manifest else text


def write_report(result: Result, path: Path) -> None:
    """One page, with its figures inside and everything from traces escaped. Needs the SVG files beside it."""
    import tomli_w

    title = printable(f"{result.manifest['trace']}: {' against '.join(result.labels.values())}")
    sections = [f"<div class='scroll'>{table_html(table)}</div>" for table in tables(result)]
    for head, lines in remarks(result):
        sections.append(f"<h2>{escape(head)}</h2>" + "".join(f"<p>{escape(line)}</p>" for line in lines))
    sections.append("<h2>Figures</h2>")
    sections += [_figure(path.parent / "figures" / f"{name}.svg", text) for name, text in captions(result).items()]
    sections.append(_why_section(result))
    sections.append(f"<h2>Config</h2><pre>{escape(tomli_w.dumps(result.config))}</pre>")
    sections.append(
        "<footer>Measured times are in timings.parquet and timings.svg, versions and machine in provenance.json. "
        f"{escape(printable(result_footer(result)))}</footer>"
    )
    path.write_text(_page(title, "\n".join(sections)), encoding="utf-8")


def _page(title: str, body: str) -> str:
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>\n"
        f"<meta name='schema_version' content='{SCHEMA_VERSION}'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<style>{_CSS}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _figure(svg: Path, caption: str) -> str:
    data = base64.b64encode(svg.read_bytes()).decode()
    return (
        f"<figure><img alt='{escape(caption, quote=True)}' src='data:image/svg+xml;base64,{data}'>"
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _why_section(result: Result) -> str:
    if not any(entry["shares_prefixes"] for entry in result.manifest["allocators"]):
        return ""
    return f"<h2>{why_head(result)}</h2><div class='scroll'>{_frame_html(result.why())}</div>"


def why_head(result: Result) -> str:
    """What the table of reasons is about: one pool, all seeds together."""
    return f"Where the prompt tokens went, pool {format_bytes(result.reference_pool)}"


def _frame_html(frame: pd.DataFrame) -> str:
    frame = frame.loc[:, [any(value != "" for value in frame[name]) for name in frame.columns]]
    words = [" class='w'" if all(isinstance(value, str) for value in frame[name]) else "" for name in frame.columns]
    units = ["points" if _is_difference(str(name), set(frame.columns)) else "%" for name in frame.columns]
    columns = zip(words, frame.columns, strict=True)
    head = "<th></th>" + "".join(f"<th{word}>{escape(str(column))}</th>" for word, column in columns)
    rows = []
    for name, row in frame.iterrows():
        shown = [escape(_cell(value, unit)) for value, unit in zip(row, units, strict=True)]
        cells = "".join(f"<td{word}>{cell}</td>" for word, cell in zip(words, shown, strict=True))
        rows.append(f"<tr><th>{escape(str(name).replace('_', ' '))}</th>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _is_difference(name: str, names: set[str]) -> bool:
    first, _, second = name.partition(" - ")
    return {first, second} <= names


def _cell(value: Any, unit: str) -> str:
    return f"{100 * value:+.2f} {unit}".removeprefix("+") if isinstance(value, float) else str(value)
