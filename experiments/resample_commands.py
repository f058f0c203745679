"""The command that says how sure a difference is. It imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kvarena.experiments.console import Json, print_rich, print_rows

if TYPE_CHECKING:
    from kvarena.experiments.resample import Replicates

EXAMPLES = """Examples:\n
kvarena resample chat --out out/sure\n
kvarena resample --trace mooncake-conversation --set unit=ids --pool 10% --out out/sure-mooncake\n
kvarena resample my.toml --replicates 100 --jobs 8 --out out/sure-mine\n
kvarena resample --saved out/sure --out out/figures"""


def add_resample_command(app: typer.Typer) -> None:
    """Mount the command of this module."""
    app.command(epilog=EXAMPLES)(resample)


def resample(
    out: Annotated[Path, typer.Option(help="Folder of the study; an unfinished one there is carried on.")],
    what: Annotated[
        str | None,
        typer.Argument(metavar="[TRACE|CONFIG.toml]", help="A workload, a trace, or a config. Default: chat."),
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Path or name of a trace.")] = None,
    allocators: Annotated[list[str] | None, typer.Option(help="As in compare. Repeatable.")] = None,
    pool: Annotated[list[str] | None, typer.Option(help="As in compare. Repeatable.")] = None,
    model: Annotated[str | None, typer.Option(help="Model shape, such as llama-3-8b.")] = None,
    requests: Annotated[int | None, typer.Option(help="Only the first so many requests.", min=1)] = None,
    replicates: Annotated[int, typer.Option(help="How many resamples of the trace.", min=10)] = 30,
    jobs: Annotated[int | None, typer.Option(help="Processes at once; default: one a core.", min=1)] = None,
    ray: Annotated[str | None, typer.Option(help="'local', or the address of a Ray cluster.")] = None,
    saved: Annotated[Path | None, typer.Option(help="Draw an earlier --out into --out; nothing is run.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config field.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --saved: also over figures of others, and other files.")
    ] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Say how sure the differences are: redraw the trace's sessions or prefix families, rerun all allocators, and give
    95 % intervals of the paired differences, corrected for their number."""
    from kvarena.experiments.commands import compare_config
    from kvarena.experiments.foreign import reading
    from kvarena.experiments.resample import open_replicates, replicate

    if saved is not None:
        with reading(saved):
            _show(open_replicates(saved), out, force, as_json)
        return
    flags: dict[str, Any] = {"trace": trace, "allocators": allocators, "pool": pool, "model": model}
    config = compare_config(what, set_ or [], **flags, requests=requests, seeds=None)
    found = replicate(config, out, replicates=replicates, jobs=jobs, ray=ray, progress=not quiet)
    _show(found, out, True, as_json)


def _show(found: Replicates, out: Path, force: bool, as_json: bool) -> None:
    from kvarena.experiments.outputs import refuse_other_figures

    if not force:
        refuse_other_figures(out, ("intervals",), _source(found))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error.strerror})") from None
    _draw(found, out / "intervals")
    if as_json:
        print_rows(found.intervals)
    else:
        _print(found)
    print(out / "intervals.png", file=sys.stderr if as_json else sys.stdout)


def _source(found: Replicates) -> str:
    from kvarena.experiments.outputs import source_of

    return source_of("resample", found.trace, found.allocators, found.table.to_dict("list"))


def _draw(found: Replicates, stem: Path) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from kvarena.experiments.resample import plot_intervals
    from kvarena.experiments.style import STYLE, add_footer, save_figure

    with mpl.rc_context(STYLE):
        figure: Any = plot_intervals(found).get_figure()
        add_footer(figure, found.footer)
        save_figure(figure, stem, source=_source(found))
        plt.close(figure)


def _print(found: Replicates) -> None:
    from kvarena.experiments.resample import interval_table
    from kvarena.experiments.tables import rich_table
    from rich.text import Text

    table = interval_table(found)
    print_rich(rich_table(table, left=2, title=table.title), *(Text(note, style="dim") for note in table.notes))
