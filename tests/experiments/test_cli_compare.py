"""The command line: what scripts can rely on. Bad input is one line on stderr, exit code 2, nothing written."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from kvarena.experiments.config import load_config
from kvarena.experiments.results import load_result
from support.interrupts import listen

OPTIONS = "options={num_sessions=10, num_system_prompts=3, max_message=100, max_reply=60}"
SMALL = ("--set", OPTIONS, "--set", "kernel_batches=0", "--pool", "600 MiB", "--pool", "900 MiB")


def kvarena(*arguments, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-m", "kvarena", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """One finished result, made by the command line."""
    out = tmp_path_factory.mktemp("cli") / "chat"
    done = kvarena("compare", "chat", *SMALL, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done


def test_compare_prints_tables_on_stdout_and_progress_on_stderr(chat):
    _, done = chat
    assert "Token hit rate over first admissions, chat" in done.stdout
    assert "First request on which the designs differ" in done.stdout
    assert "replay" not in done.stdout.split("Token hit rate")[0]
    assert re.search(r"^replay 4 of 4: sglang 900 MiB, about \d+ s left$", done.stderr, re.MULTILINE)
    assert "result in" in done.stderr


def test_compare_writes_a_result_that_loads(chat):
    result = load_result(chat[0])
    assert result.allocators == ["vllm", "sglang"]
    assert result.pools == [600 * 2**20, 900 * 2**20]


def test_another_process_and_hash_seed_write_the_same_bytes(chat, tmp_path):
    out = tmp_path / "again"
    done = kvarena("compare", "chat", *SMALL, "--out", out, "--quiet", PYTHONHASHSEED="7")
    assert done.returncode == 0, done.stderr
    files = [p.relative_to(out) for p in out.rglob("*") if p.is_file()]
    differing = {str(name) for name in files if (out / name).read_bytes() != (chat[0] / name).read_bytes()}
    assert {name for name in differing if not name.startswith(("timings.", "provenance."))} == set()


def test_without_out_only_tables_come(tmp_path):
    done = kvarena("compare", *SMALL, "--allocators", "sglang,block:page_size=64", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "block, page 64" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_config_file_and_set_on_top(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[workload.options]\nnum_sessions = 5\n[engine]\nkernel_batches = 0\n[pool]\npool = '3 GiB'\n")
    out = tmp_path / "out"
    done = kvarena("compare", path, "--set", "live=3", "--set", "allocators.0.page_size=32", "--out", out, "--quiet")
    assert done.returncode == 0, done.stderr
    config = load_config(out / "config.toml")
    assert config.engine.live == 3
    assert [entry.page_size for entry in config.entries()] == [32, 1]


def bad_inputs(folder):
    """(arguments, what the line must say) for everything that a user can get wrong."""
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}]
    good = "".join(json.dumps(row) + "\n" for row in rows)
    files = {
        "unknown.toml": "[engine]\nlives = 3\n",
        "type.toml": "[engine]\nlive = 'three'\n",
        "broken.toml": "[engine\n",
        "format.jsonl": '{"foo": 1}\n',
        "empty_prompt.jsonl": '{"token_ids": []}\n',
        "negative.jsonl": good.replace("600", "-600"),
        "fraction.jsonl": good.replace("600", "600.5"),
        "twice.jsonl": '{"request_id": "a", "token_ids": [1]}\n{"request_id": "a", "token_ids": [2]}\n',
        "nothing.jsonl": "",
        "half.jsonl": '{"request_id": "a\\ud800", "token_ids": [1]}\n',
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(good.encode() * 50)[:40])
    return {
        "unknown key": (["unknown.toml"], r"unknown\.toml:2: engine\.lives: unknown key; known: live"),
        "wrong type": (["type.toml"], r"type\.toml:2: engine\.live: .*found 'three'"),
        "broken toml": (["broken.toml"], r"broken\.toml: not TOML"),
        "no such trace": (["nowhere.jsonl"], r"nowhere\.jsonl.*expected"),
        "unknown format": (["format.jsonl"], r"(?s)format\.jsonl:1: unknown trace format: .*mooncake.*found: foo"),
        "truncated gz": (["cut.jsonl.gz"], r"cut\.jsonl\.gz"),
        "empty prompt": (["empty_prompt.jsonl"], r"empty_prompt\.jsonl:1: .*token_ids"),
        "negative count": (["negative.jsonl"], r"negative\.jsonl:1: .*input_length.*-600"),
        "fractional count": (["fraction.jsonl"], r"fraction\.jsonl:1: .*input_length.*600\.5"),
        "one id twice": (["twice.jsonl"], r"twice\.jsonl:2: .*request_id.*'a'"),
        "no request": (["nothing.jsonl"], r"nothing\.jsonl.*expected at least one"),
        "too long for the pool": (["chat", "--pool", "8 MiB"], r"request .* needs \d+ pages .* has \d+"),
        "pool without unit": (["chat", "--pool", "8 apples"], r"pool\.pool: .*'16 GiB'"),
        "pool past 2^63 bytes": (["chat", "--pool", "9" * 400 + " GiB"], r"pool: expected from 1 byte to 2\^63"),
        "pool past 2^31 slots": (["chat", "--pool", "999999 TiB"], r"pool: .*at most 2\^31 slots"),
        "pages in another script": (["chat", "--pool", "²"], r"pool\.pool: .*found \['²'\]"),
        "half a character": (["half.jsonl"], r"half\.jsonl:1: field 'request_id': expected text.*surrogates"),
        "pages of two sizes": (["chat", "--pool", "1000"], r"pool\.pool: .*give bytes"),
        "unknown allocator": (["chat", "--allocators", "vllm,lmcache"], r"allocators: .*'lmcache' is unknown"),
        "unknown field": (["chat", "--allocators", "block:pages=3"], r"allocators: pages: unknown key"),
        "unknown model": (["chat", "--model", "gpt-9"], r"pool\.model: .*known: "),
        "bad set": (["chat", "--set", "lives=3"], r"lives: unknown field"),
        "set without value": (["chat", "--set", "live"], r"--set expects key=value"),
        "trace twice": (["chat", "--trace", "chat"], r"--trace: .*twice"),
        "unknown option of a workload": (["chat", "--set", "options.speedy=1"], r"speedy"),
        "zero seeds": (["chat", "--seeds", "0"], r"seeds"),
    }


KINDS = [
    "unknown key", "wrong type", "broken toml", "no such trace", "unknown format", "truncated gz", "empty prompt",
    "negative count", "fractional count", "one id twice", "no request", "too long for the pool", "pool without unit",
    "pool past 2^63 bytes", "pool past 2^31 slots", "pages in another script", "half a character",
    "pages of two sizes", "unknown allocator", "unknown field", "unknown model", "bad set", "set without value",
    "trace twice", "unknown option of a workload", "zero seeds",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(kind, tmp_path):
    inputs = tmp_path / "inputs"
    work = tmp_path / "work"
    inputs.mkdir()
    work.mkdir()
    arguments, says = bad_inputs(inputs)[kind]
    first = inputs / arguments[0]
    given = [str(first) if first.exists() else arguments[0], *arguments[1:]]
    done = kvarena("compare", *given, "--set", "kernel_batches=0", "--out", work / "out", cwd=work)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert re.search(says, done.stderr), done.stderr
    if kind not in ("zero seeds", "unknown format"):  # the option parser's box, the list of all formats
        assert len(done.stderr.strip().splitlines()) == 1
    assert list(work.iterdir()) == []


def test_every_kind_of_bad_input_is_tried(tmp_path):
    assert set(bad_inputs(tmp_path)) == set(KINDS)


def test_plot_draws_finished_results_over_each_other(chat, tmp_path):
    other, figures = tmp_path / "other", tmp_path / "figures"
    assert kvarena("compare", "chat", *SMALL, "--allocators", "token:page_size=16", "--out", other).returncode == 0
    done = kvarena("plot", chat[0], other, "--out", figures)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in figures.iterdir()) == sorted(
        {
            f"{name}.{kind}"
            for name in ("hit_rate", "occupancy", "waste", "evictions", "timings")
            for kind in ("pdf", "svg", "png")
        }
    )


def test_plot_refuses_unlike_results_naming_the_fields(chat, tmp_path):
    other = tmp_path / "other"
    assert kvarena("compare", "chat", *SMALL, "--set", "live=2", "--out", other).returncode == 0
    done = kvarena("plot", chat[0], other, "--out", tmp_path / "figures")
    assert done.returncode == 2
    assert "engine.live (1 against 2)" in done.stderr
    assert not (tmp_path / "figures").exists()


def test_plot_of_something_else_is_a_clear_error(tmp_path):
    done = kvarena("plot", tmp_path, "--out", tmp_path / "figures")
    assert done.returncode == 2
    assert "cannot be read as a result" in done.stderr


def test_config_init_show_and_diff(tmp_path):
    path = tmp_path / "mine.toml"
    assert kvarena("config", "init", path).returncode == 0
    again = kvarena("config", "init", path)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    shown = kvarena("config", "show", path, "--set", "live=4")
    assert "live = 4" in shown.stdout
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(shown.stdout)
    differing = kvarena("config", "diff", path, resolved)
    assert (differing.returncode, differing.stdout) == (1, "engine.live: 1 -> 4\n")
    assert kvarena("config", "diff", path, path).returncode == 0


QUICK = ("compare", "chat", "--requests", "8", "--pool", "2GiB", "--set", "kernel_batches=0")


def test_a_reader_that_goes_away_is_no_traceback_and_costs_no_result(tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvarena", *QUICK, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in done.stderr
    assert done.returncode == 141
    assert len(load_result(tmp_path / "out").requests) == 16


@pytest.mark.parametrize("stream", [1, 2])
def test_a_closed_stream_ends_no_run(stream):
    done = subprocess.run(
        f"'{sys.executable}' -m kvarena {' '.join(QUICK)} {stream}>&-",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert ("Token hit rate" in done.stdout) == (stream == 2)


def test_a_terminal_that_cannot_spell_a_character_ends_no_run(tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"request_id": "日本", "token_ids": [1]}\n', encoding="utf-8")
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = kvarena("compare", trace, "--pool", "2 GiB", **ascii_only)
    assert done.returncode == 0, done.stderr
    assert "token ? block" in done.stdout
    converted = subprocess.run(
        [sys.executable, "-m", "kvarena", "trace", "convert", str(trace), "--to", "tokens"],
        env={**os.environ, **ascii_only}, capture_output=True, check=True,
    ).stdout  # fmt: skip
    assert json.loads(converted.decode("utf-8"))["request_id"] == "日本"


def test_interrupt_leaves_no_result_and_exits_130(tmp_path):
    arguments = ("chat", "--out", tmp_path / "out", "--set", "options.num_sessions=3000", "--set", "kernel_batches=0")
    command = [sys.executable, "-m", "kvarena", "compare", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, preexec_fn=listen)
    assert process.stderr.readline().startswith("replay 1 of 16")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    kept = [path.name for path in tmp_path.iterdir()]
    assert kept in ([], ["out.partial"])  # whether the first replay had ended
    assert ("out.partial" in errors) == bool(kept)


def test_a_decision_log_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    scenario = sorted((Path(__file__).parents[1] / "golden" / "scenarios").glob("*.jsonl*"))[0]
    done = kvarena("scenario", scenario, "--out", tmp_path / "file" / "log.jsonl")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "log.jsonl: cannot be written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- the demo, and what it must not need ---

BLOCK_TORCH = "import sys; sys.modules['torch'] = None; sys.modules['triton'] = None; "


def test_the_demo_needs_no_torch_and_no_checkout_and_is_quick(tmp_path):
    before = os.times()
    code = BLOCK_TORCH + "sys.argv = ['kvarena', 'demo']; from kvarena.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 15
    assert "Token hit rate over first admissions" in done.stdout
    assert re.search(r"request s\d+\.t\d+ \(number \d+ in order of arrival\)", done.stdout)
    assert "do not fill a page of 16" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["kvarena-demo.png"]
    assert (tmp_path / "kvarena-demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_says_what_figures_it_can_write(tmp_path):
    done = kvarena("demo", "--figure", tmp_path / "demo.txt")
    assert done.returncode == 2
    assert ".pdf, .svg or .png" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [[], ["compare"], ["plot"], ["demo"], ["scenario"], ["config"], ["config", "show"]])
def test_every_help_has_an_example(command):
    done = kvarena(*command, "--help")
    assert done.returncode == 0
    if command:
        assert "Example" in done.stdout


def test_no_command_imports_torch_before_it_must(tmp_path):
    scenario = tmp_path / "one.jsonl"
    scenario.write_text(
        '{"format": "kv-scenario/1", "num_slots": 64, "page_size": 4}\n{"op": "arrive", "id": "a", "tokens": [1, 2]}\n'
    )
    code = (
        f"import sys; sys.argv = ['kvarena', 'scenario', {str(scenario)!r}]\n"
        "from kvarena.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_comes_without_numpy_pandas_or_pydantic():
    code = (
        "import sys; sys.argv = ['kvarena', '--help']\n"
        "from kvarena.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'pandas', 'pydantic', 'matplotlib', 'torch', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_is_quick():
    before = os.times()
    assert kvarena("--help").returncode == 0
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 0.4, f"{used:.2f} s of CPU"


def test_measured_times_stay_out_of_the_summary(chat):
    summary = pd.read_csv(chat[0] / "summary.csv")
    assert not [column for column in summary.columns if column.endswith(("_us", "_ms", "_s"))]
