"""What holds for every command: help that teaches, rows for programs, exit codes, messages apart from results."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from kvarena.experiments.cli import app
from kvarena.experiments.console import print_rows
from support.commands import invoke
from typer.main import get_command

import kvarena

ROOT = Path(__file__).parents[2]
SAVED = ROOT / "results"


def _commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


WHOLE = get_command(app)
COMMANDS = dict(_commands(WHOLE))


def _examples(command) -> list[str]:
    text = inspect.cleandoc(command.epilog or "")
    found = re.split(r"\n|\s\|\s|, then: ", re.sub(r"^Examples?:", "", text))
    return [line.strip() for line in found if line.strip()]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_says_what_it_does_what_each_option_is_and_gives_an_example(path):
    command = COMMANDS[path]
    assert command.help
    assert command.help[0].isupper()
    for parameter in command.params:
        assert parameter.help, parameter.name
        assert parameter.help[0].isupper() or parameter.help.partition(":")[0] or "'" in parameter.help[0]
        assert parameter.help.endswith((".", ")", "default.")) or parameter.help.endswith("."), parameter.help
    assert re.match(r"Examples?:", command.epilog)
    assert any(example.startswith(f"kvarena {' '.join(path)}") for example in _examples(command))


def _parse(line: str) -> None:
    """Whether the command, and each of its options, is there. Nothing is run and no file is needed."""
    words = shlex.split(line, comments=True)[1:]
    command = WHOLE
    while hasattr(command, "commands"):
        name, words = words[0], words[1:]
        assert name in command.commands, line
        command = command.commands[name]
    parser = command.make_parser(command.context_class(command))
    given, _, _ = parser.parse_args(words)
    missing = [one.name for one in command.params if one.required and not given.get(one.name)]
    assert not missing, f"{line}: {missing}"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_example_parses(path):
    for example in _examples(COMMANDS[path]):
        assert example.startswith("kvarena "), example
        _parse(example)


def _written(text: str) -> list[str]:
    """Commands of a page: lines of code blocks, and code between words that has an option or more than one word."""
    lines = re.findall(r"^(?: {4}|\$ |)(?:\.venv/bin/)?(kvarena (?!`)(?:.*\\\n)*.*)$", text, re.MULTILINE)
    lines += [found for found in re.findall(r"`(kvarena [^`\n]+)`", text) if " --" in found]
    return [line.replace("\\\n", " ") for line in lines if not re.match(r"kvarena [A-Z]+ --help|kvarena [\d.]", line)]


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARTIFACT.md")] + sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_of_the_documents_parses(page):
    for line in _written(page.read_text(encoding="utf-8")):
        _parse(line)


def test_commands_are_found_in_the_documents():
    assert sum(len(_written(page.read_text(encoding="utf-8"))) for page in PAGES) > 60


JSON_ROWS = [
    (("claims", "--saved", SAVED / "claims"), "verdict"),
    (("claims", "--list"), "said"),
    (("capacity", "--saved", SAVED / "capacity"), "predicted"),
    (("rate", "--saved", SAVED / "rate"), "goodput_per_s"),
    (("ladder", "--show", SAVED / "paper" / "ladder-chat"), "share"),
    (("ladder", "--saved", SAVED / "paper" / "ladder-chat"), "rung"),
    (("ablations", "--saved", SAVED / "paper" / "ablations-chat"), "refusals"),
    (("pagesize", "--saved", SAVED / "pagesize"), "concurrency"),
    (("aged",), "next_slot_share"),
    (("forks", "--requests", 1), "published_low"),
    (("trace", "list"), "licence"),
    (("compare", "chat", "--requests", 12, "--set", "kernel_batches=0", "--pool", "2 GiB"), "token_hit_rate"),
    (("run", "--set", "requests=4", "--set", "options.num_sessions=4"), "token_hit_rate"),
    (("explain", "--trace", "chat", "--set", "requests=8", "--pool", "2 GiB"), "first_seen"),
]


@pytest.mark.parametrize(("command", "field"), JSON_ROWS, ids=lambda item: " ".join(map(str, item))[:24])
def test_json_rows_are_all_that_stands_on_stdout(command, field):
    result = invoke(*command, "--json")
    assert result.exit_code == 0
    text = result.stdout
    rows = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    assert rows
    assert all(field in row for row in rows)


def test_what_json_cannot_say_is_null(capsys):
    frame = pd.DataFrame({"a": [float("nan"), 1.5], "b": [float("inf"), 2], "c": ["\u2028", None], "d": [True, False]})
    print_rows(frame)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [{"a": None, "b": None, "c": "\u2028", "d": True}, {"a": 1.5, "b": 2.0, "c": None, "d": False}]


def test_the_version_and_the_exit_codes_are_told():
    assert invoke("--version").stdout == f"kvarena {kvarena.__version__}\n"
    shown = invoke("--help").stdout
    for code in (0, 1, 2, 3, 130, 141, 143):
        assert re.search(rf"^ *{code} ", shown, re.MULTILINE), code
