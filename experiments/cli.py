"""The command line. Commands import what they need when they run, so `--help` stays quick."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from kvarena.experiments.bench.cli import bench_app
from kvarena.experiments.capacity_commands import add_capacity_command
from kvarena.experiments.claims_commands import add_claims_command
from kvarena.experiments.commands import add_commands
from kvarena.experiments.diagram_commands import add_diagram_command
from kvarena.experiments.engine.commands import add_run_command
from kvarena.experiments.fork_commands import add_fork_command
from kvarena.experiments.insight_commands import add_insight_commands
from kvarena.experiments.ladder_commands import add_ladder_command
from kvarena.experiments.model.cli import add_generate_command
from kvarena.experiments.paper_commands import add_paper_command
from kvarena.experiments.rate_commands import add_rate_command
from kvarena.experiments.report_commands import add_report_command
from kvarena.experiments.resample_commands import add_resample_command
from kvarena.experiments.study_commands import add_study_commands
from kvarena.experiments.traces.cli import trace_app
from kvarena.experiments.verify_commands import verify_app

EXIT_CODES = """Exit codes:\n
0 done\n
1 something differs or failed, or a disk did\n
2 a bad argument, config or file\n
3 verify: there was nothing to compare with\n
130 interrupted; what is finished is kept\n
141 the reader of the output went away\n
143 ended by SIGTERM; what is finished is kept"""

app = typer.Typer(
    name="kvarena",
    help="Compare KV-cache allocators of LLM servers: the same requests, the same kernels, two allocators.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


app.add_typer(trace_app)
app.add_typer(bench_app)
app.add_typer(verify_app)


def run() -> None:
    """Entry point. One clear line and exit code 2 for a bad argument or file, 1 for a failing disk; 130 for Ctrl-C, 143
    for SIGTERM, 141 for a closed pipe."""
    _ready_streams()
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("MPLBACKEND", "agg")  # commands write files; in a notebook the user's backend stays
    try:
        app()
    except SystemExit as done:
        # Typer ends with 1 on a closed pipe, as if the command had failed.
        if isinstance(done.__context__, BrokenPipeError):
            raise SystemExit(141) from None
        if done.code == 130:  # Typer ends so on Ctrl-C, without a word
            raise SystemExit(_say_interrupted(done.__context__)) from None
        raise
    except ValueError as error:
        _say(f"kvarena: {error}")
        raise SystemExit(2) from None
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`); what is left in stdout's buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        _say(f"kvarena: {error}")
        raise SystemExit(1) from None
    except KeyboardInterrupt as stop:
        raise SystemExit(_say_interrupted(stop)) from None


class Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems send before they kill: commands end as on Ctrl-C."""


def _terminate(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
    raise Terminated


def _say_interrupted(error: BaseException | None) -> int:
    """One line, with what the command said of what it kept; returns the exit code."""
    kept, code = "", 130
    while error is not None:
        if isinstance(error, KeyboardInterrupt) and str(error) and not kept:
            kept = f"; {error}"
        code = 143 if isinstance(error, Terminated) else code
        error = error.__context__
    _say(f"kvarena: {'interrupted' if code == 130 else 'terminated'}{kept}")
    return code


def _say(text: str) -> None:
    """On stderr, line by line; what a name from a file would tell the terminal to do is shown and not done."""
    from kvarena.experiments.style import printable

    print("\n  ".join(map(printable, text.split("\n"))), file=sys.stderr)


def _ready_streams() -> None:
    """A stream that is closed, or that cannot spell a character, never ends a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _version(asked: bool) -> None:
    if asked:
        import kvarena

        print(f"kvarena {kvarena.__version__}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Compare KV-cache allocators of LLM servers: the same requests, the same kernels, two allocators."""


add_commands(app)
add_run_command(app)
add_generate_command(app)
add_study_commands(app)
add_report_command(app)
add_resample_command(app)
add_claims_command(app)
add_paper_command(app)
add_diagram_command(app)
add_fork_command(app)
add_capacity_command(app)
add_rate_command(app)
add_ladder_command(app)
add_insight_commands(app)


@app.command(epilog="Example: kvarena scenario tests/golden/scenarios --allocator token --page-size 16 --out out/logs")
def scenario(
    path: Annotated[Path, typer.Argument(help="A scenario file, or a folder of them.", exists=True)],
    allocator: Annotated[
        str | None, typer.Option(help="Which design decides: block or token; default block, or the scheduler's own.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Run scheduler scenarios (kv-sched/1) through this policy: vllm or sglang.")
    ] = None,
    lag: Annotated[int | None, typer.Option(help="Scheduler: result lag, 0 or 1, in place of the scenario's.")] = None,
    order: Annotated[str, typer.Option(help="Scheduler: waiting order, fcfs, lpm, dfs-weight or priority.")] = "fcfs",
    out: Annotated[Path | None, typer.Option(help="File or folder for decision logs; stdout when left out.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page, in place of the scenario's own.", min=1)] = None,
    admission: Annotated[str, typer.Option(help="Room test: exact, or sglang's scheduler rule.")] = "exact",
    need_sort: Annotated[bool, typer.Option(help="Token: freed pages wait and are merged sorted.")] = False,
    check: Annotated[bool, typer.Option(help="Verify every invariant after every op.")] = False,
) -> None:
    """Run neutral scenarios through an allocator and write its decision logs."""
    import json

    from kvarena.experiments import scenarios as sc
    from kvarena.experiments.outputs import refuse_unwritable

    if scheduler is not None:
        from kvarena.experiments.engine.scenario import write_sched_logs

        write_sched_logs(
            path, scheduler, out, allocator=allocator, lag=lag, order=order, page_size=page_size, check=check
        )
        return
    allocator = allocator or "block"
    if allocator not in ("block", "token"):
        raise ValueError(f"--allocator: expected block or token, found {allocator!r}")
    if admission not in ("exact", "sglang"):
        raise ValueError(f"--admission: expected exact or sglang, found {admission!r}")
    if out is not None:
        refuse_unwritable(out / "file" if out.is_dir() else out)
    written = 0
    for file in sc.scenario_files(path):
        parsed = sc.read_scenario(file)
        slots = parsed.header["num_slots"]
        if path.is_dir() and page_size is not None and slots < page_size:
            # One page size for a whole folder: scenarios with a smaller pool are left out, and said so.
            print(f"{file.name}: skipped, its {slots} slots hold no page of {page_size} tokens", file=sys.stderr)
            continue
        lines = sc.run_scenario(
            parsed, allocator, check=check, page_size=page_size, admission=admission, need_sort=need_sort
        )
        if out is None:
            for line in lines:
                print(json.dumps(line, separators=(",", ":")))
            continue
        suffix = "" if page_size is None else f".p{page_size}"
        target = out / f"{parsed.name}{suffix}.jsonl" if path.is_dir() or out.is_dir() else out
        sc.write_decisions(lines, target)
        written += 1
    if out is not None:
        print(f"{written} decision logs in {out}", file=sys.stderr)
