"""A result of another kind than a command reads: said at once, with the kind that it is and the kinds that are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvarena.experiments.cli import app
from kvarena.experiments.verify_kinds import KINDS, kind_name
from support.commands import invoke
from typer.main import get_command

SAVED = Path(__file__).resolve().parents[2] / "results"
RESULTS = [
    SAVED / name
    for name in (
        *("capacity", "rate", "claims", "pagesize", "study", "study/reasons.csv", "laws.csv", "allocators/run1"),
        *("paper/chat", "paper/ladder-chat", "paper/ablations-chat", "paper/chat-resampled"),
        *("upstream/vllm-0.32.0.json", "h200/kernels.json", "h200/capacity.json", "h200/step_times.json"),
        "h200/check.json",
    )
]
COMPARED = {"compare", "run"}
OUT = "OUT"
# command, with RESULT for the place of one -> the kinds that it reads
READERS = {
    ("plot", "RESULT", "--out", OUT): COMPARED,
    ("bounds", "RESULT"): COMPARED,
    ("explain", "RESULT", "--quiet"): COMPARED | {"sweep", "resample", "ladder"},
    ("timeline", "RESULT"): COMPARED,
    ("explain", "--saved", "RESULT"): {"reasons of a sweep"},
    ("capacity", "--saved", "RESULT"): {"capacity", "capacity on a card"},
    ("capacity", "--measured", "RESULT", "--saved", SAVED / "capacity"): {"capacity on a card"},
    ("rate", "--saved", "RESULT"): {"rate"},
    ("ladder", "--show", "RESULT"): {"ladder"},
    ("ablations", "--show", "RESULT"): {"ablations"},
    ("resample", "--saved", "RESULT", "--out", OUT): {"resample"},
    ("pagesize", "--saved", "RESULT"): {"page-size study"},
    ("claims", "--saved", "RESULT"): {"claims"},
    ("laws", "--saved", "RESULT"): {"laws"},
    ("bench", "allocators", "--saved", "RESULT"): {"allocator benchmark"},
    ("bench", "spread", "RESULT"): {"allocator benchmark"},
    ("bench", "kernels", "--saved", "RESULT"): {"measurements on a card"},
}


def test_the_results_are_of_every_kind_that_lies_here():
    lie = {kind_name(path) for path in SAVED.rglob("*")} - {None}
    assert {kind_name(path) for path in RESULTS} == lie
    assert set().union(*READERS.values()) <= {kind.name for kind in KINDS}


def test_every_command_that_reads_a_result_is_asked():
    options = {"saved", "show", "measured"}
    readers = {
        name
        for group in (get_command(app), get_command(app).commands["bench"])
        for name, command in group.commands.items()
        if any(
            one.name in options or one.name == "result" or one.metavar in ("RESULT", "RESULT...")
            for one in command.params
        )
    }
    assert readers - {part for command in READERS for part in command} == {"report"}  # which reads every kind


@pytest.mark.parametrize("command", READERS, ids=lambda command: " ".join(map(str, command[:3])))
def test_another_kind_is_named_beside_those_that_are_read(command, tmp_path):
    for path in RESULTS:
        kind = kind_name(path)
        if kind in READERS[command]:
            continue
        places = {"RESULT": path, OUT: tmp_path / "out"}
        said = rf"^{re.escape(str(path))}: is a result of another kind, {kind} \(`.*`\); expected "
        with pytest.raises(ValueError, match=said) as raised:
            invoke(*(places.get(part, part) for part in command))
        named = str(raised.value).partition("; expected ")[2].split(" or ")
        assert set(named) <= READERS[command]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_no_kind_and_a_broken_one_keep_their_own_message(tmp_path):
    with pytest.raises(ValueError, match=r"result\.json") as raised:
        invoke("bounds", tmp_path)
    assert "another kind" not in str(raised.value)
    (tmp_path / "result.json").write_text('{"schema_version": 1, "kind": "compare"}')
    with pytest.raises(ValueError, match=r"provenance\.json") as raised:
        invoke("bounds", tmp_path)
    assert "another kind" not in str(raised.value)
