"""`kvarena explain` as it is typed: tables and stories on stdout, files whole or not at all, bad input named."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest
from kvarena.experiments.explain import REASONS
from kvarena.experiments.results import finished_folder
from support.small import OPTIONS, small

FLAGS = ("--set", "options={" + ", ".join(f"{name} = {value}" for name, value in OPTIONS.items()) + "}")


def explain(*arguments):
    command = [sys.executable, "-m", "kvarena", "explain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("explain") / "out"
    with finished_folder(path) as partial:
        small(pool=["250 MiB", "450 MiB"], too_long="reject", live=2)._write_tables(partial)
    return path


def test_a_result_is_explained_and_the_table_of_all_requests_adds_up(folder, tmp_path):
    for name in ("reasons.csv", "reasons.parquet"):
        done = explain(folder, "--pool", "250 MiB", "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert "Where the prompt tokens of 78 requests went, pool 250 MiB" in done.stdout
        assert "was cached, and its page was evicted" in done.stdout
        assert "replayed 156 requests" in done.stderr
        table = pd.read_csv(tmp_path / name) if name.endswith("csv") else pd.read_parquet(tmp_path / name)
        assert (table["hit_tokens"] + table[list(REASONS)].sum(axis=1) == table["num_prompt_tokens"]).all()
        assert table["allocator"].unique().tolist() == ["vllm", "sglang"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reasons.csv", "reasons.parquet"]


def test_one_request_is_told_from_its_first_token_to_its_last(folder):
    done = explain(folder, "--allocator", "vllm", "--request", "s0.t1", "--quiet")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("request s0.t1, number ")
    assert "under block (vLLM 0.32.0 rules)" in lines[0]
    assert all(line.startswith("token") for line in lines[1:])
    assert done.stderr == ""


def test_a_trace_is_explained_without_a_result():
    done = explain("--trace", "chat", "--allocator", "block:page_size=64", "--pool", "450 MiB", *FLAGS, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "block (vLLM 0.32.0 rules), page 64" in done.stdout.replace("\n", " ")
    assert "computed before, but it does not fill a page" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("FOLDER", "--trace", "chat"), "--trace and --set are for explaining without one"),
        (("FOLDER", "--allocator", "nobody"), "allocator: expected one of vllm, sglang, found 'nobody'"),
        (("FOLDER", "--request", "nobody"), "no request of the id 'nobody'"),
        (("FOLDER", "--pool", "7 GiB"), "pool: expected one of"),
        (("FOLDER", "--out", "table.txt"), "--out: expected a file .csv or .parquet"),
        (("FOLDER", "--out", "/proc/nowhere/table.csv"), "cannot be written"),
        (("/nowhere",), "cannot be read as a result"),
        (("--trace", "/nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, arguments, message):
    done = explain(*[folder if a == "FOLDER" else a for a in arguments], "--quiet")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("kvarena: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_bounds_of_a_result_as_table_file_and_figure(folder, tmp_path):
    command = [sys.executable, "-m", "kvarena", "bounds", folder, "--out", "b.csv", "--figure", "b.pdf"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Token hit rate between its bounds, chat" in done.stdout
    table = pd.read_csv(tmp_path / "b.csv")
    assert (table["policy"] <= table["clairvoyant"]).all()
    assert (tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.csv", "b.pdf"]
