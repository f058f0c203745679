"""The commands `kvarena ladder` and `kvarena ablations`. They import what they need when they run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kvarena.experiments.console import Json, print_rich, print_rows

if TYPE_CHECKING:
    from kvarena.experiments.ladder import Ladder
    from kvarena.experiments.ladder_ablations import Ablations

LADDER_EXAMPLES = """Examples:\n
kvarena ladder chat --set options.num_sessions=20 --out out/ladder\n
kvarena ladder chat --pool '20 %' --live 8 --outputs replay --out out/overlap\n
kvarena ladder mooncake-conversation --set unit=ids --pool '5 %' --pool '25 %' --out out/ids\n
kvarena ladder my-run.toml --rung result_lag=0:1 --rung order=fcfs:lpm --out out/engine\n
kvarena ladder --show out/ladder"""


ABLATION_EXAMPLES = """Examples:\n
kvarena ablations chat --set live=8 --set outputs=replay --out out/ablations\n
kvarena ablations my.toml --pool '10 %' --pool '40 %' --out out/ablations"""
COLUMNS = 150
Force = Annotated[bool, typer.Option("--force", help="With --show: also over figures of others, and other files.")]


def add_ladder_command(app: typer.Typer) -> None:
    """Mount both commands."""
    app.command(epilog=LADDER_EXAMPLES)(ladder)
    app.command(epilog=ABLATION_EXAMPLES)(ablations)


def ladder(
    what: Annotated[
        str | None, typer.Argument(metavar="[TRACE|CONFIG.toml]", help="A trace, or a config of compare or run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the ladder; an earlier one there is carried on.")] = None,
    lower: Annotated[str | None, typer.Option("--from", help="Lower end; default vllm.")] = None,
    upper: Annotated[str | None, typer.Option("--to", help="Upper end; default sglang.")] = None,
    fields: Annotated[
        list[str] | None, typer.Option(help="A rung: a field, or several joined with +. Repeatable.")
    ] = None,
    rung: Annotated[
        list[str] | None, typer.Option(help="One more rung, NAME=FROM:TO, of the engine or allocator. Repeatable.")
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option(help="Pool size; repeatable. Default 30 % of the working set.")
    ] = None,
    live: Annotated[int | None, typer.Option(help="Requests that overlap.", min=1)] = None,
    outputs: Annotated[str | None, typer.Option(help="none or replay.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes at once; default: one a core.", min=1)] = None,
    ray: Annotated[str | None, typer.Option(help="'local', or the address of a Ray cluster.")] = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds of the allocator's time; 0: only what the counting runs took.", min=0)
    ] = 3,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config field; repeatable.")
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option("--show", "--saved", help="Print a finished ladder instead; with --out, draw its figures there."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Walk from one design to another and say what each field does: all subsets, exact shares, interactions."""
    from kvarena.experiments.foreign import reading
    from kvarena.experiments.ladder import ladder as run_ladder
    from kvarena.experiments.ladder import load_ladder, read_base
    from kvarena.experiments.ladder_plots import write_figures

    if show is not None:
        with reading(show):
            finished = load_ladder(show)
            if out is not None:
                write_figures(finished, out, force)
            _show(finished, as_json)
        return
    if what is None or out is None:
        raise ValueError("ladder: expected a trace or a config, and --out; or --show with a finished ladder")
    base, asked = read_base(what)
    sets = [*(f"{name}={value}" for name, value in _given(pool=_listed(pool), live=live, outputs=outputs))]
    sets += set_ or []
    extra = {**asked.get("rungs", {}), **dict(_ends_of(text) for text in rung or [])}
    made = run_ladder(
        base,
        out,
        lower=_spec(lower) if lower else asked.get("from", "vllm"),
        upper=_spec(upper) if upper else asked.get("to", "sglang"),
        groups=fields or asked.get("fields", ()),
        extra={name: (ends[0], ends[1]) for name, ends in extra.items()},
        sets=sets,
        jobs=jobs,
        ray=ray,
        rounds=rounds,
        progress=not quiet,
    )
    print(f"ladder in {out}", file=sys.stderr)
    _show(made, as_json)


def _show(made: Ladder, as_json: bool) -> None:
    print_rows(made.attribution) if as_json else print_rich(made, piped_columns=COLUMNS)


def ablations(
    what: Annotated[
        str | None, typer.Argument(metavar="[TRACE|CONFIG.toml]", help="A trace, or a config of compare.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for tables and figure.")] = None,
    pool: Annotated[list[str] | None, typer.Option(help="Pool size; repeatable. Default 10 %, 30 % and 100 %.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config field; repeatable.")
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option("--show", "--saved", help="Print finished ablations instead; with --out, draw their figure."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """With and without the rules for which reasons are usually given: what they do to hits, tables and time."""
    from kvarena.experiments.foreign import reading
    from kvarena.experiments.ladder import read_base
    from kvarena.experiments.ladder_ablations import ablations as run_ablations
    from kvarena.experiments.ladder_ablations import load_ablations
    from kvarena.experiments.ladder_plots import write_ablations

    if show is not None:
        with reading(show):
            made = load_ablations(show)
            if out is not None:
                write_ablations(made, out, force)
            _show_ablations(made, as_json)
        return
    if what is None or out is None:
        raise ValueError("ablations: expected a trace or a config, and --out; or --show with finished ablations")
    base, _ = read_base(what)
    chosen = {"pool": {"pool": ["10 %", "30 %", "100 %"]}, **base}
    if pool:
        chosen["pool"] = {**chosen["pool"], "pool": pool}
    tick = None if quiet else lambda text: print(text, file=sys.stderr, flush=True)
    made = run_ablations(chosen, out, sets=set_ or [], tick=tick)
    print(f"ablations in {out}", file=sys.stderr)
    _show_ablations(made, as_json)


def _show_ablations(made: Ablations, as_json: bool) -> None:
    from kvarena.experiments.ladder_tables import ablation_tables

    print_rows(made.table) if as_json else print_rich(*ablation_tables(made), piped_columns=COLUMNS)


def _given(**flags: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in flags.items() if value is not None]


def _listed(values: list[str] | None) -> str | None:
    """Several values as a TOML list, one as it is."""
    from kvarena.experiments.config import toml_value

    if not values:
        return None
    return values[0] if len(values) == 1 else json.dumps([toml_value(value) for value in values])


def _spec(text: str) -> Any:
    from kvarena.experiments.specs import parse_spec

    return parse_spec(text)


def _ends_of(text: str) -> tuple[str, tuple[Any, Any]]:
    """`result_lag=0:1` as a name and two values."""
    from kvarena.experiments.config import toml_value

    name, separator, ends = text.partition("=")
    low, colon, high = ends.partition(":")
    if not separator or not colon:
        raise ValueError(f"--rung: expected NAME=FROM:TO, found {text!r}")
    return name, (toml_value(low), toml_value(high))
