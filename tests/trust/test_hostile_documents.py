"""Configs and JSON documents: what is nested without end, larger than stated, or no file at all, is one error, soon and
within a stated memory. What is wrong inside of them: `test_hostile_files.py`, `test_damaged_results.py`."""

from __future__ import annotations

import ast
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from kvarena.experiments.config import toml_value
from kvarena.experiments.foreign import MAX_JSON_BYTES, MAX_TOML_BYTES, read_json, read_object, read_toml
from kvarena.experiments.results import load_result
from kvarena.experiments.traces.formats import formats
from support.commands import invoke
from support.readers import readers

ROOT = Path(__file__).resolve().parents[2]
READERS = readers()
DOCUMENTS = [name for name, reader in READERS.items() if reader.main.endswith((".toml", "d.json"))]
DEEP = {
    ".toml": [b"a = " + b"[" * 20_000, b"a = " + b"{a = " * 20_000, b"[" + b"a." * 2000 + b"a]\nb = 1\n"],
    ".json": [b"[" * 100_000, b'{"a":' * 100_000],
}
COMMANDS = (
    ("compare", "c.toml"),
    ("run", "c.toml"),
    ("sweep", "c.toml", "--out", "out"),
    ("rate", "c.toml"),
    ("ladder", "c.toml", "--out", "out"),
    ("ablations", "c.toml", "--out", "out"),
    ("resample", "c.toml", "--out", "out"),
    ("config", "show", "c.toml"),
)


def test_every_format_of_traces_and_every_config_is_among_the_readers_that_are_attacked():
    known = {name.replace(" ", "_") for name in READERS}
    assert set(formats()) <= known
    assert {"compare config", "run config", "sweep config", "rate config", "ladder config"} <= READERS.keys()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_nested_without_end_is_one_error(tmp_path, name):
    reader = READERS[name]
    for content in DEEP[Path(reader.main).suffix]:
        assert isinstance(reader.outcome(tmp_path, content), str)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("what", ["pipe", "device", "folder", "nested", "endless"])
def test_no_command_hangs_on_a_config(tmp_path, monkeypatch, command, what):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.toml"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()
    else:
        path.write_bytes(DEEP[".toml"][0] if what == "nested" else b"# " + b"x" * MAX_TOML_BYTES)
    with pytest.raises(ValueError, match=r"c\.toml: (cannot be read as a config|nested too deeply)"):
        invoke(*command)
    assert [found.name for found in tmp_path.iterdir()] == ["c.toml"]


@pytest.mark.parametrize(
    ("read", "most"), [(read_toml, MAX_TOML_BYTES), (read_json, MAX_JSON_BYTES), (load_result, MAX_JSON_BYTES)]
)
def test_a_gigabyte_is_refused_within_the_stated_memory(tmp_path, read, most):
    path = tmp_path / "result.json"
    with path.open("wb") as file:
        file.truncate(2**30)
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"result\.json: .*expected at most {most} bytes, found more"):
        read(path.parent if read is load_result else path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * most + 2**22


LONG = MAX_TOML_BYTES // 2 - 8


@pytest.mark.parametrize(
    "content",
    [b"a." * LONG + b"a = 1\n", b'"a" . ' * (LONG // 3) + b"a = 1\n", b"[" + b"a." * LONG + b"a]\n", b'"' * LONG,
     b"a" * LONG, b"a.b = 1\n" * (LONG // 8), b"x = '" + b"a b." * (LONG // 4) + b"'\n"],
    ids=lambda content: content[:6].decode(),
)  # fmt: skip
def test_a_config_of_the_allowed_length_takes_seconds_and_no_more(tmp_path, content):
    started = time.process_time()
    READERS["compare config"].outcome(tmp_path, content)
    assert time.process_time() - started < 5


def test_keys_and_lists_of_the_allowed_depth_are_read(tmp_path):
    path = tmp_path / "c.toml"
    for levels, fine in ((62, True), (63, False)):
        path.write_text("a = " + "[" * levels + "1" + "]" * levels)
        if fine:
            assert list(read_toml(path)) == ["a"]
        else:
            with pytest.raises(ValueError, match=r"c\.toml: nested too deeply: expected at most 64 levels"):
                read_toml(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"null", b'"text"', b"\xff", b"\x00", b"NaN garbage"])
def test_what_is_no_object_is_one_error(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"result\.json: (expected an object|cannot be read as a result of kvarena)"):
        read_object(path)


@pytest.mark.parametrize("raw", ["[" * 20_000, "{a=" * 20_000, "1\nb = 2", "x]", "", "\x00"])
def test_a_value_of_the_command_line_is_a_value_or_text(raw):
    assert toml_value(raw) in (raw, 1)


# Files that a user hands over; benchmarks and calibrations read what they wrote themselves a moment ago.
OWN = ("bench", "calibrate", "model_", "kernel_check")


def test_every_document_of_a_user_goes_through_the_reader_with_limits():
    for path in (ROOT / "experiments").rglob("*.py"):
        if path.name == "foreign.py" or any(part in str(path.relative_to(ROOT)) for part in OWN):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node) if isinstance(node, ast.Call) else ""
            assert not (called.startswith(("json.load", "tomllib.load")) and "read_text(" in called), (
                f"{path}: {called}"
            )
