"""Hostile and broken files: every reader gives rows, or one ValueError that names the file. Never a traceback, a hang,
more than a stated memory, or code that runs.

`tests/experiments/test_traces_damage.py` cuts and flips trace files byte by byte and bit by bit and compares the rows
that are left; here every reader meets wrong values in each place, encodings, bombs, and paths that lead elsewhere.
"""

from __future__ import annotations

import ast
import gzip
import json
import math
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from kvarena.experiments import report, scenarios
from kvarena.experiments.compare import compare
from kvarena.experiments.config import load_config
from kvarena.experiments.results import load_result
from kvarena.experiments.sweep import open_sweep
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.lines import MAX_BLANK_LINES, MAX_LINE_BYTES, MAX_RATIO
from support import hostile
from support.readers import readers
from support.requests import request, trace
from support.small import shared

READERS = readers()
ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("allocators", "prefix", "kernels", "experiments", "kvarena")
CONFIGS = ("compare config", "run config", "sweep config", "rate config", "ladder config")
WHOLE = (*CONFIGS, "step times", "measured capacity")  # read at once, not line by line
each_reader = pytest.mark.parametrize("name", READERS)


@each_reader
def test_the_right_input_is_read(tmp_path, name):
    reader = READERS[name]
    assert not isinstance(reader.outcome(tmp_path, reader.files[reader.main]), str)


@each_reader
def test_cut_at_each_byte_flipped_or_spliced_anywhere_a_file_is_read_or_is_one_error(tmp_path, name):
    reader = READERS[name]
    data = reader.files[reader.main]
    many = 6 if name in CONFIGS else 150 if reader.binary else 30
    for damaged in [*hostile.cuts(data), *hostile.flips(data, 1, many), *hostile.mixed(data, 2, many)]:
        reader.outcome(tmp_path, damaged)


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.rows])
def test_a_wrong_missing_or_doubled_value_in_any_place_is_read_or_is_one_error(tmp_path, name):
    reader = READERS[name]
    cases = list(hostile.wrong_fields(reader.rows))
    errors = 0
    for place, (what, content) in enumerate(cases):
        if place % 5 and len(cases) > 400:
            continue  # a fifth of many is enough for every run; `make fuzz` takes them all
        found = reader.outcome(tmp_path, content)
        errors += isinstance(found, str)
        if isinstance(found, str):
            continue
        if "= NaN" in what or "= Infinity" in what or what.endswith("twice"):
            pytest.fail(f"{what} was read")
        if isinstance(found, tuple):
            assert_sane(found[0])
    assert errors > 50


def assert_sane(rows: list[tuple[str, float, int, int]]) -> None:
    """Requests in order, finite, with whole positive lengths."""
    arrivals = [arrival for _, arrival, _, _ in rows]
    assert arrivals == sorted(arrivals)
    assert all(math.isfinite(arrival) and arrival >= 0 for arrival in arrivals)
    assert all(type(prompt) is int and prompt >= 1 and output >= 0 for _, _, prompt, output in rows)


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
SAME = ("BOM", "CRLF", "mixed ends", "no last newline", "blank lines", "gzip under a plain name")
NEVER = (
    "two BOMs",
    "UTF-16",
    "UTF-32",
    "cut gzip",
    "gzip with junk behind it",
    "a picture",
    "empty",
    "blank",
    "only NULs",
)


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.binary])
def test_other_bytes_in_the_place_of_a_binary_file_are_one_error(tmp_path, name):
    reader = READERS[name]
    data = reader.files[reader.main]
    right = reader.outcome(tmp_path, data)
    for what, content in {**hostile.encodings(b'{"a": "b"}\n'), "cut gzip": gzip.compress(data)[:-5]}.items():
        assert isinstance(reader.outcome(tmp_path, content), str), what
    packed = reader.outcome(tmp_path, gzip.compress(data))
    assert packed == right if reader.main.endswith(".msgpack") else isinstance(packed, str)
    assert isinstance(reader.outcome(tmp_path, gzip.compress(data) + b"junk"), str)


UNHASHABLE = {"a map for a key": b"\x81\x80\x01", "a list for a key": b"\x81\x90\x01"}


@pytest.mark.parametrize("what", UNHASHABLE)
def test_a_key_that_no_map_can_have_is_one_error_in_a_batch_and_in_a_message(tmp_path, what):
    reader = READERS["kv events"]
    assert "expected msgpack, found a fault" in reader.outcome(tmp_path, UNHASHABLE[what])
    in_message = b"\x93\xc4\x02kv\xc4\x01\x00\xc4\x03" + UNHASHABLE[what]
    assert "expected msgpack in the message, found a fault" in reader.outcome(tmp_path, in_message)


def test_a_parquet_type_that_nobody_reads_is_one_error(tmp_path):
    """One of these flipped bits turns int32 into an integer of no known width: NotImplementedError in pyarrow."""
    reader = READERS["recording"]
    data = reader.files["r.parquet"]
    schema = data.index(b"ARROW:schema")
    for at in range(schema + 360, schema + 420):
        reader.outcome(tmp_path, data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if not reader.binary])
def test_encodings_and_line_ends(tmp_path, name):
    reader = READERS[name]
    data = reader.files[reader.main]
    right = reader.outcome(tmp_path, data)
    lines = name not in WHOLE
    for what, content in hostile.encodings(data).items():
        found = reader.outcome(tmp_path, content)
        if what in SAME and lines and not (what == "no last newline" and reader.main.endswith(".csv")):
            assert found == right, what
        if what in NEVER and (lines or what not in ("empty", "blank")):
            assert isinstance(found, str), what


TRACE_LINES = [name for name, reader in READERS.items() if reader.main.endswith(".jsonl")]


@pytest.mark.parametrize("name", TRACE_LINES)
def test_an_error_in_a_line_names_the_line(tmp_path, name):
    reader = READERS[name]
    data = reader.files[reader.main]
    count = len(data.splitlines())
    found = reader.outcome(tmp_path, data + b"\n\n{broken\n")
    assert f"{reader.main}:{count + 3}: expected JSON" in found


@pytest.mark.parametrize("name", ["mooncake", "scenario", "sched scenario", "azure"])
def test_a_bomb_is_refused_within_a_stated_memory(tmp_path, name):
    """256 MiB of one line in a quarter MiB. Stated: a line's limit, and as much again while it is put together."""
    reader = READERS[name]
    path = tmp_path / f"{reader.main}.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(256):
            file.write(b"[" * 2**20)
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"{path.name}:1: expected (a line of at most|gzip data that unpacks)"):
        reader.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * MAX_LINE_BYTES + 2**24


def test_a_bomb_of_many_lines_is_refused_by_its_ratio(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    row = b'{"token_ids": [1]}'.ljust(2**20 - 1) + b"\n"
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(160):
            file.write(row)
    assert path.stat().st_size * MAX_RATIO < 100 * 2**20
    with pytest.raises(
        ValueError, match=rf"t\.jsonl\.gz:\d+: expected gzip data that unpacks to at most {MAX_RATIO} times"
    ):
        load_trace(path)


@pytest.mark.parametrize("name", ["mooncake", "azure", "ragpulse", "weka document", "scenario", "sched scenario"])
@pytest.mark.parametrize("line", [b"\n", b"  \r\n"])
def test_a_bomb_of_blank_lines_is_refused_at_once(tmp_path, name, line):
    """50 million blank lines in some KiB: one in 500 of them is looked at."""
    reader = READERS[name]
    reader.outcome(tmp_path, reader.files[reader.main])
    bomb = gzip.compress(line * 2**20) * 50
    (tmp_path / reader.main).write_bytes(bomb)
    started = time.process_time()
    with pytest.raises(
        ValueError, match=rf"{reader.main}:\d+: expected at most {MAX_BLANK_LINES} blank lines in a row"
    ):
        reader.read(tmp_path / reader.main)
    assert time.process_time() - started < 5


def test_blank_lines_up_to_the_limit_are_none(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        b'{"token_ids": [1]}\n' + b"\n" * MAX_BLANK_LINES + b'{"token_ids": [2]}\n' + b"\n" * MAX_BLANK_LINES
    )
    assert len(list(load_trace(path))) == 2


def test_a_scenario_of_too_many_lines_is_refused_before_they_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(scenarios, "MAX_ROWS", 4)
    reader = READERS["scenario"]
    assert "s.jsonl:5: expected at most 4 lines" in reader.outcome(tmp_path, reader.files["s.jsonl"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0,2147483647,1\n"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2025-03-01 10:00:00.5,2147483647,2\n"),
        ("t.csv", f"{BURST}\n3,G,2147483640,1,2147483641,A\n"),
        ("t.jsonl", '{"arrival_time_ns": 5, "input_toks": 2147483647, "output_toks": 1}\n'),
    ],
)  # fmt: skip
def test_a_length_alone_asks_for_no_more_memory_than_any_context_window_would(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"{name}:\d: prompt: expected at most 16777216 tokens"):
        load_trace(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def test_a_component_asks_for_no_more_memory_than_any_context_window_would(tmp_path):
    reader = READERS["ragpulse"]
    for name, data in reader.files.items():
        (tmp_path / name).write_bytes(data.replace(b'"token_length": 4', b'"token_length": 2147483000'))
    with pytest.raises(
        ValueError, match=r"1_sys_prompt\.jsonl:1: field 'token_length': expected at most 16777216 tokens"
    ):
        load_trace(tmp_path, "ragpulse")


def test_a_file_that_changes_between_two_passes_is_an_error(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"token_ids": [1], "arrival_s": 0}\n{"token_ids": [2], "arrival_s": 1}\n')
    trace = load_trace(path)
    path.write_text('{"token_ids": [1], "arrival_s": 0}\n')
    with pytest.raises(ValueError, match="changed since it was loaded"):
        list(trace)


@pytest.mark.parametrize(
    ("times", "order", "arrivals"),
    [
        ([1790000003000, 1790000001000, 1790000002000], [1, 2, 0], [0.0, 1.0, 2.0]),
        ([5, 5, 5], [0, 1, 2], [0.0, 0.0, 0.0]),
        ([2**53 + 1, 2**53 + 3], [0, 1], [0.0, 0.002]),
        ([9e15, 0], [1, 0], [0.0, 9e12]),
        ([0.25, 0.125], [1, 0], [0.0, 0.000125]),
    ],
)
def test_epoch_and_unordered_times_are_sorted_and_start_at_zero(tmp_path, times, order, arrivals):
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": t, "input_length": 9, "output_length": 1, "hash_ids": [i]} for i, t in enumerate(times)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = load_trace(path, "mooncake")
    found = list(trace)
    assert [request.request_id for request in found] == [f"r{at}" for at in order]
    assert [request.arrival_s for request in found] == pytest.approx(arrivals)
    assert any("out of order" in text for text in trace.warnings) == (order != sorted(order))


@pytest.mark.parametrize("what", ["nothing", "folder", "device", "socket pipe"])
def test_what_is_no_file_is_an_error_and_never_a_hang(tmp_path, what):
    import os

    path = tmp_path / "t.jsonl"
    if what == "folder":
        path.mkdir()
    elif what == "socket pipe":
        os.mkfifo(path)
    target = Path("/dev/zero") if what == "device" else path
    with pytest.raises(ValueError, match=r"zero|t\.jsonl"):
        load_trace(target)


# --- results ---


def is_error(read: Callable[[], object], named: str) -> bool:
    """Whether reading raises a ValueError, which must name the file; any other exception passes through."""
    try:
        read()
    except ValueError as error:
        if named not in str(error):
            raise AssertionError(f"the error does not name {named}: {error}") from error
        return True
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hostile") / "out"
    out.mkdir()
    shared()._write_tables(out)
    return out


@pytest.mark.parametrize(
    "name", ["result.json", "provenance.json", "config.toml", "summary.csv", "requests.parquet", "steps.parquet"]
)
def test_a_result_with_any_file_damaged_is_read_or_is_one_error(folder, tmp_path, name):
    out = shutil.copytree(folder, tmp_path / "out", ignore=shutil.ignore_patterns("*.svg", "*.pdf", "*.png"))
    data = (folder / name).read_bytes()
    damaged = [*list(hostile.cuts(data))[:: max(len(data) // 5, 1)], *hostile.flips(data, 3, 8)]
    damaged += [*hostile.mixed(data, 4, 4), b"", b"\x00" * 99, b"[" * 5000, b'{"a":' * 5000, b"{}", b"null", b"1e309"]
    errors = 0
    for content in damaged:
        (out / name).write_bytes(content)
        errors += is_error(lambda: load_result(out), "out")
    assert errors > 8


def test_a_sweep_index_that_is_damaged_is_read_or_is_one_error(tmp_path):
    cells = [{"key": "0123456789abcdef0123", "point": {"live": 1}, "state": "pending"}]
    right = json.dumps({"schema_version": 1, "code": "x", "cells": cells}).encode()
    for content in [*hostile.cuts(right), *hostile.flips(right, 5, 200), b"[" * 5000, b"null", b"[]", b"1e309"]:
        (tmp_path / "sweep.json").write_bytes(content)
        is_error(lambda: open_sweep(tmp_path), "sweep.json")


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "..", "figures/../../evil", "a\x00b", "\n"])
def test_names_from_files_never_become_paths(tmp_path, monkeypatch, name):
    """Allocator names, ids and trace names go into tables, and no file is written outside of the folder."""
    monkeypatch.setattr(report, "write_figures", lambda *args: [])
    monkeypatch.setattr(report, "write_report", lambda *args: None)
    result = compare(trace([request(name, range(40))], name=name), pool="1 GiB", kernel_batches=0)
    before = set(tmp_path.rglob("*"))
    result.save(tmp_path / "out")
    written = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "out") for path in written)
    assert not (tmp_path.parent / "evil").exists()


def test_a_result_whose_manifest_names_foreign_paths_writes_inside_its_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write_figures", lambda *args: [])
    monkeypatch.setattr(report, "write_report", lambda *args: None)
    out = shutil.copytree(folder, tmp_path / "in" / "out")
    manifest = json.loads((out / "result.json").read_text())
    manifest["trace"] = "../../../outside"
    (out / "result.json").write_text(json.dumps(manifest))
    load_result(out).save(tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "in"]


# --- nothing runs ---


def calls(path: Path) -> set[str]:
    """Dotted names of everything that a module calls or imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle", "cloudpickle", "dill", "marshal"),
    *("shelve", "joblib", "yaml", "yaml.load", "pd.read_pickle", "pandas.read_pickle", "torch.load", "runpy"),
}


def test_no_shipped_module_can_unpickle_or_evaluate():
    modules = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 100
    for path in modules:
        assert not calls(path) & FORBIDDEN, path
        assert "allow_pickle=True" not in path.read_text(), path


def test_a_parquet_file_that_holds_a_pickle_does_not_run_it(folder, tmp_path):
    """An extension type of old pyarrow versions carried its Python class as a pickle."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = shutil.copytree(folder, tmp_path / "out", ignore=shutil.ignore_patterns("*.svg", "*.pdf", "*.png"))
    table = pq.read_table(out / "timings.parquet")
    evil = f"cposix\nsystem\n(S'touch {tmp_path / 'evil'}'\ntR.".encode()
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": evil}
    fields = [field.with_metadata(metadata) for field in table.schema]
    pq.write_table(pa.table(table.columns, schema=pa.schema(fields, table.schema.metadata)), out / "timings.parquet")
    is_error(lambda: load_result(out), "out")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("tokenizer", ["os:system", "evil_module:run", "builtins:exec"])
def test_a_config_cannot_name_code(tmp_path, monkeypatch, tokenizer):
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'evil')!r}, 'w')\ndef run(text): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "c.toml"
    path.write_text(f"[workload]\ntrace = 't.jsonl'\noptions = {{tokenizer = {tokenizer!r}}}\n")
    with pytest.raises(ValueError, match=r"c\.toml:\d: workload.options: tokenizer: a config names no code"):
        load_config(path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("value", ["os:system", "__import__('os')", "{kind = 'evil.module.Class'}", "{custom = 'os'}"])
def test_a_config_cannot_name_a_class(tmp_path, value):
    path = tmp_path / "c.toml"
    path.write_text(f"allocators = [{value if value.startswith('{') else repr(value)}]\n".replace('"', "'").replace(
        "['__import__('os')']", '["__import__(\'os\')"]'))  # fmt: skip
    with pytest.raises(ValueError, match=r"c\.toml"):
        load_config(path)


def test_ids_with_control_characters_and_markup_stay_text_in_every_output(tmp_path):
    name = "../\x1b]0;evil\x07<script>alert(1)</script>\u202e"
    result = compare(trace([request(name, range(40)), request(name + "2", range(40))], name=name), pool="1 GiB",
                     kernel_batches=0)  # fmt: skip
    out = result.save(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    page = (out / "report.html").read_text()
    assert "<script>" not in page
    assert not set(page) & {"\x1b", "\x07", "\u202e"}
    again = pd.read_parquet(out / "requests.parquet")
    assert again["request_id"].iloc[0] == name  # data stays what it was


CORPUS = Path(__file__).resolve().parents[1] / "fuzz" / "corpus"


@pytest.mark.parametrize("name", sorted(readers()))
def test_every_input_that_fuzzing_kept_is_read_or_refused_by_name(name, tmp_path):
    """The committed corpus opened new code once; each reader has one."""
    inputs = sorted((CORPUS / name.replace(" ", "_")).iterdir())
    assert inputs
    for path in inputs:
        readers()[name].outcome(tmp_path, path.read_bytes())
