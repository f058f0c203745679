"""The commands around a comparison: compare, plot, demo, config. Each imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kvarena.experiments.console import Json, print_rich, print_rows

if TYPE_CHECKING:
    from kvarena.experiments.config import Config

config_app = typer.Typer(help="Make, show and compare configs.", no_args_is_help=True)

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config field; repeatable.")]
Force = Annotated[bool, typer.Option("--force", help="Also over figures of other results, and other files.")]

COMPARE_EXAMPLES = """Examples:\n
kvarena compare chat --out out/chat\n
kvarena compare --trace conversation_trace.jsonl.gz --pool '64 GiB' --pool '10 %'\n
kvarena compare chat --allocators vllm,sglang,block:page_size=64 --set live=8 --set outputs=replay\n
kvarena compare my.toml --set seeds=5"""
PLOT_EXAMPLES = "Example: kvarena plot out/chat out/chat-page64 --out out/both"
CONFIG_EXAMPLES = "Example: kvarena config init my.toml, then: kvarena compare my.toml"


def add_commands(app: typer.Typer) -> None:
    """Mount the commands of this module."""
    app.command(epilog=COMPARE_EXAMPLES)(compare)
    app.command(epilog=PLOT_EXAMPLES)(plot)
    app.command(epilog="Example: kvarena demo --figure demo.png")(demo)
    app.add_typer(config_app, name="config", epilog=CONFIG_EXAMPLES)


def compare(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[TRACE|CONFIG.toml]", help="A workload, a trace, or a config. Default: chat."),
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Path or name of a trace.")] = None,
    allocators: Annotated[
        list[str] | None, typer.Option(help="Names, commas between: vllm,sglang,block:page_size=64. Repeatable.")
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option(help="'16 GiB', '10 %' of the working set, pages, or sweep. Repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model shape, such as llama-3-8b.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, for a built-in workload.", min=1)] = None,
    requests: Annotated[int | None, typer.Option(help="Only the first so many requests.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result; without it, only the tables.")] = None,
    set_: Sets = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Replay a trace through several allocators at equal bytes; tables on stdout, the rest in --out."""
    from kvarena.experiments.compare import run

    chosen = compare_config(
        what, set_ or [], trace=trace, allocators=allocators, pool=pool, model=model, seeds=seeds, requests=requests
    )
    result = run(chosen, progress=not quiet, out=out)
    if out is not None:  # before anything is printed: a reader that goes away must not cost the result
        result.save(out)
        print(f"result in {out}", file=sys.stderr)
    print_rows(result.summary) if as_json else print_rich(result)


def compare_config(what: str | None, sets: list[str], **flags: Any) -> Config:
    """The config that the command line describes: file or trace, then flags, then --set."""
    from kvarena.experiments.config import Config, apply_sets, config_from_keywords, config_from_mapping, load_config

    base = Config()
    if what is not None and what.endswith(".toml"):
        base = load_config(Path(what))
    elif what is not None:
        if flags["trace"] is not None:
            raise ValueError(f"--trace: the trace is given twice, {what!r} and {flags['trace']!r}")
        flags["trace"] = what
    if flags["allocators"] is not None:
        flags["allocators"] = allocator_specs(flags["allocators"])
    if flags["pool"] is not None:
        flags["pool"] = [int(size) if size.isdecimal() and size.isascii() else size for size in flags["pool"]]
    chosen = config_from_keywords(flags, base)
    return config_from_mapping(apply_sets(chosen.model_dump(), sets)) if sets else chosen


def allocator_specs(texts: list[str]) -> tuple[dict[str, Any], ...]:
    """Names with commas between, each perhaps with fields."""
    from kvarena.experiments.specs import parse_spec

    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    return tuple(parse_spec(name) for name in names)


def plot(
    results: Annotated[list[Path], typer.Argument(help="Finished result folders.", metavar="RESULT...")],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures"),
    force: Force = False,
) -> None:
    """Draw finished results, several laid over each other; refuses results that differ in more than the allocators."""
    from kvarena.experiments.changed import changed_words
    from kvarena.experiments.report import plot_folder
    from kvarena.experiments.results import load_result, merge_results

    merged = merge_results(load_result(path) for path in results)
    for changed in filter(None, map(changed_words, results)):
        print(changed, file=sys.stderr)
    for path in plot_folder(merged, out, force):
        print(path)


def demo(
    figure: Annotated[Path, typer.Option(help="File of the figure: .png, .pdf or .svg.")] = Path("kvarena-demo.png"),
    as_json: Json = False,
) -> None:
    """A small comparison in seconds: no checkout, network, GPU or torch."""
    from kvarena.experiments.demo import demo as run_demo

    result = run_demo(figure)
    print_rows(result.summary) if as_json else print_rich(result)
    print(f"figure in {figure}", file=sys.stderr)


@config_app.command("init", epilog=CONFIG_EXAMPLES)
def config_init(
    path: Annotated[Path | None, typer.Argument(help="File to write; stdout when left out.")] = None,
) -> None:
    """Write a commented config to start from."""
    from kvarena.experiments.config import template
    from kvarena.experiments.outputs import whole

    if path is None:
        print(template(), end="")
        return
    if path.exists():
        raise ValueError(f"{path}: is there already; remove it first, or give another name")
    with whole(path) as partial:
        partial.write_text(template(), encoding="utf-8")


@config_app.command("show", epilog="Example: kvarena config show my.toml --set live=8")
def config_show(
    path: Annotated[Path | None, typer.Argument(help="A config; the defaults when left out.")] = None,
    set_: Sets = None,
) -> None:
    """Print a config with every field resolved."""
    import tomli_w
    from kvarena.experiments.config import Config, apply_sets, config_from_mapping
    from kvarena.experiments.engine.run_config import resolved_config

    if path is None:
        resolved = config_from_mapping(apply_sets(Config().model_dump(), set_ or [])).resolved()
    else:
        resolved = resolved_config(path, set_ or [])
    print(tomli_w.dumps(resolved), end="")


@config_app.command("diff", epilog="Example: kvarena config diff a.toml out/chat/config.toml")
def config_diff_command(
    a: Annotated[Path, typer.Argument(help="A config.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Print the fields in which two configs differ; exit code 1 when there are any."""
    from kvarena.experiments.config import config_diff
    from kvarena.experiments.engine.run_config import resolved_config

    differing = config_diff(resolved_config(a), resolved_config(b))
    for name, (left, right) in differing.items():
        print(f"{name}: {left!r} -> {right!r}")
    raise typer.Exit(1 if differing else 0)
