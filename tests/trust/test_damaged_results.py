"""A saved result of any kind, with any file damaged, is read or is one ValueError that names it: by `verify result`, by
`report`, and by the commands that show what was saved. `test_hostile_files.py` damages what goes in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from kvarena.experiments import report_pages
from kvarena.experiments.foreign import reading
from kvarena.experiments.report_pages import report
from kvarena.experiments.verify_kinds import kind_at
from kvarena.experiments.verify_result import verify
from support.commands import invoke
from support.damage import damaged
from support.kinds import MAKERS

ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "results"
DRAWN = (".pdf", ".svg", ".png", ".html", ".md")
# Kinds of which a result lies here; the others are made.
HERE = {
    "rate": SAVED / "rate",
    "ladder": SAVED / "paper" / "ladder-chat",
    "ablations": SAVED / "paper" / "ablations-chat",
    "page-size study": SAVED / "pagesize",
    "claims": SAVED / "claims",
    "laws": SAVED / "laws.csv",
    "reasons of a sweep": SAVED / "study",
    "live verification": SAVED / "upstream" / "vllm-0.32.0.json",
    "measurements on a card": SAVED / "h200" / "kernels.json",
    "capacity on a card": SAVED / "h200" / "capacity.json",
    "step times": SAVED / "h200" / "step_times.json",
    "allocator benchmark": SAVED / "allocators",
}
MADE = ("capacity", "reasons", "bounds", "forks", "aged pools")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A copy of a result of a kind, without what is drawn from it."""

    def of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("damaged")
        if kind not in HERE:
            name, make = MAKERS[kind]
            make(folder / name)
            return folder / name
        if HERE[kind].is_file():
            return Path(shutil.copy(HERE[kind], folder))
        left_out = shutil.ignore_patterns(*(f"*{suffix}" for suffix in DRAWN), "run*", "quiet", "sweep")
        return shutil.copytree(HERE[kind], folder / "out", ignore=left_out)

    return of


def files_of(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [file for file in found if file.suffix not in DRAWN]


BIG = {"measurements on a card": 4, "capacity on a card": 6}


def some(cases: Iterable[tuple[str, bytes]], most: int) -> list[tuple[str, bytes]]:
    """At most so many of them, evenly."""
    found = list(cases)
    return found[:: max(-(-len(found) // most), 1)]


def is_error(read: Callable[[Path], object], path: Path, what: str) -> bool:
    """Whether reading is refused. Any error but a ValueError that names the result passes through."""
    try:
        read(path)
    except ValueError as error:
        if str(path) not in str(error):
            raise AssertionError(f"{what}: the error does not name {path}: {error}") from error
        return True
    except Exception as error:
        error.add_note(what)
        raise
    return False


@pytest.mark.parametrize("kind", [*HERE, *MADE])
def test_damaged_anywhere_a_result_is_verified_and_reported_or_is_one_error(result, monkeypatch, kind):
    monkeypatch.setattr(report_pages, "_figure", lambda draw, caption: "")  # without the seconds of drawing
    path = result(kind)
    assert kind_at(path).name == kind
    errors = 0
    for number, file in enumerate(files_of(path)):
        right = file.read_bytes()
        for what, content in some(damaged(file, number, places=12), BIG.get(kind, 16)):
            file.write_bytes(content)
            errors += is_error(verify, path, f"verify, {file.name}: {what}")
            errors += is_error(report, path, f"report, {file.name}: {what}")
        file.write_bytes(right)
    assert errors > (0 if kind in BIG else 3)


SHOWS = {
    "rate": ("rates.csv", lambda path: ["rate", "--saved", path]),
    "ladder": ("attribution.csv", lambda path: ["ladder", "--show", path]),
    "ablations": ("ablations.csv", lambda path: ["ablations", "--show", path]),
    "page-size study": ("pagesize.csv", lambda path: ["pagesize", "--saved", path]),
    "claims": ("claims.json", lambda path: ["claims", "--saved", path]),
    "laws": ("laws.csv", lambda path: ["laws", "--saved", path]),
    "allocator benchmark": ("allocators.jsonl", lambda path: ["bench", "allocators", "--saved", path]),
    "capacity": ("capacity.csv", lambda path: ["capacity", "--saved", path]),
}


@pytest.mark.parametrize("kind", SHOWS)
def test_a_command_that_shows_what_was_saved_says_that_it_is_damaged(result, kind):
    path = result(kind)
    name, command = SHOWS[kind]
    file = path if path.is_file() else path / name
    errors = 0
    for what, content in some(damaged(file, 5, places=6), BIG.get(kind, 5)):
        file.write_bytes(content)
        errors += is_error(lambda path: invoke(*command(path)), path, what)
    assert errors > 0


def test_a_fault_of_our_own_is_not_laid_on_the_file():
    from kvarena.allocators.interface import AllocatorError

    with pytest.raises(AllocatorError), reading(Path("out")):
        raise AllocatorError("two owners")
    with pytest.raises(TypeError), reading(None):
        raise TypeError("nothing was read")
