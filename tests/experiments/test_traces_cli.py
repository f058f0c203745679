"""`kvarena trace`: what it prints and writes, and that a fault is one line, exit code 2, and no half file."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from kvarena.experiments import workloads
from kvarena.experiments.metrics import percentile
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.convert import convert_lines
from support.traces import common_prefix, mooncake_row, write_rows

LINES = [mooncake_row(0, 600, [0, 1]), mooncake_row(3000, 700, [0, 2], session_id="a")]


def kvarena(*arguments, **variables):
    """Runs the command line as a user does: (exit code, stdout, stderr)."""
    environment = {**os.environ, "COLUMNS": "200", "KVARENA_CACHE": "/nonexistent/cache", **variables}
    done = subprocess.run(
        [sys.executable, "-m", "kvarena", "trace", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_every_command_has_help_with_an_example():
    code, out, _ = kvarena("--help")
    assert code == 0
    for command in ("list", "fetch", "describe", "convert", "generate"):
        assert command in out
        code, text, _ = kvarena(command, "--help")
        assert code == 0
        assert f"kvarena trace {command}" in text.replace("\n", " ")


def test_list_names_built_in_and_known_traces():
    code, out, _ = kvarena("list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["chat"]["state"] == "built in"
    assert rows["mooncake-arxiv"]["state"] in ("by hand", "held")
    assert rows["mooncake-conversation"]["licence"] == "Apache-2.0"
    assert "mooncake_like" in kvarena("list")[1]


def test_describe_prints_a_table_and_json(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", LINES)
    code, out, _ = kvarena("describe", path)
    assert code == 0
    for text in ("2 requests", "not observable here", "page rounding below 512 tokens", "infinite cache"):
        assert text in out
    found = json.loads(kvarena("describe", path, "--json")[1])
    assert found["visible"] == {
        "grain": 512,
        "publish_time": True,
        "outputs": "none",
        "sessions": True,
        "reuse": True,
    }
    assert found["reuse"]["distinct_ids"] == 3
    assert found["ids"] == "chained"
    assert found["reuse"]["prefix_age_s_p50"] == 3.0
    own = next(row for row in found["ceilings"] if row["page_size"] == 512)
    assert own["token_hit_rate"] == 512 / 1300


def test_quantiles_are_those_of_all_tables_the_nearest_rank(tmp_path):
    lengths = [7, 3, 200, 5, 11, 90, 1, 2, 8, 40, 6]
    rows = [{"token_ids": [*range(n)], "output_length": n, "arrival_s": 2.0**k} for k, n in enumerate(lengths)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = json.loads(kvarena("describe", path, "--json")[1])
    for name, values in (("input_tokens", lengths), ("output_tokens", lengths)):
        for level in (50, 90, 99):
            value = found[name][f"p{level}"]
            # The smallest value that at least so many per cent do not exceed.
            enough = [v for v in values if sum(w <= v for w in values) >= level / 100 * len(values)]
            assert value == min(enough) == percentile(sorted(values), level / 100)
    ages = [found["reuse"][f"prefix_age_s_p{level}"] for level in (50, 90, 99)]
    gaps = {2.0**a - 2.0**b for a in range(len(lengths)) for b in range(a)}
    assert set(ages) <= gaps


FAULTS = {
    "nothing": ["describe", "nope"],
    "format": ["describe", "t.jsonl", "--format", "moon"],
    "broken": ["describe", "broken.jsonl"],
    "setting": ["generate", "chat", "--set", "num_sessions"],
    "parameter": ["generate", "chat", "--set", "sessions=3"],
    "value": ["generate", "chat", "--set", "num_sessions=-3"],
    "workload": ["generate", "chatty"],
    "target": ["convert", "t.jsonl", "--to", "parquet"],
    "block": ["convert", "t.jsonl", "--to", "mooncake", "--block-size", "3"],
    "tokens block": ["convert", "t.jsonl", "--to", "tokens", "--block-size", "16"],
    "name": ["fetch", "nope"],
    "hand": ["fetch", "mooncake-arxiv"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_message_exit_code_2_and_no_file(tmp_path, fault):
    write_rows(tmp_path / "t.jsonl", LINES)
    (tmp_path / "broken.jsonl").write_text(json.dumps(LINES[0]) + "\n{broken\n")
    before = sorted(tmp_path.iterdir())
    arguments = [str(tmp_path / a) if a.endswith(".jsonl") else a for a in FAULTS[fault]]
    out = ["--out", str(tmp_path / "out.jsonl")] if arguments[0] in ("convert", "generate") else []
    code, stdout, stderr = kvarena(*arguments, *out)
    assert code == 2
    assert stdout == ""
    assert "kvarena: " in stderr
    assert "Traceback" not in stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_fault_in_a_later_row_leaves_what_stood_there(tmp_path):
    good, bad, out = tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / "out.jsonl"
    write_rows(good, LINES)
    bad.write_text(good.read_text() + '{"timestamp":')
    assert kvarena("convert", good, "--to", "mooncake", "--out", out)[0] == 0
    before = out.read_bytes()
    code, _, stderr = kvarena("convert", bad, "--to", "mooncake", "--out", out)
    assert code == 2
    assert "bad.jsonl:3: expected JSON" in stderr
    assert out.read_bytes() == before


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", LINES)
    code, _, stderr = kvarena("convert", path, "--to", "mooncake", "--out", path / "below.jsonl")
    assert code == 2
    assert "cannot be written" in stderr


def test_mooncake_written_reads_back_the_same(tmp_path):
    rows = [mooncake_row(1500, 600, [7, 9]), mooncake_row(2501, 513, [7, 8], session_id="a")]
    once, twice = tmp_path / "once.jsonl", tmp_path / "twice.jsonl.gz"
    assert kvarena("convert", write_rows(tmp_path / "t.jsonl", rows), "--to", "mooncake", "--out", once)[0] == 0
    assert kvarena("convert", once, "--to", "mooncake", "--out", twice)[0] == 0
    assert gzip.decompress(twice.read_bytes()) == once.read_bytes()
    written = [json.loads(line) for line in once.read_text().splitlines()]
    assert written == [
        mooncake_row(0, 600, [0, 1], block_size=512),
        mooncake_row(1001, 513, [0, 2], session_id="a", block_size=512),
    ]


@pytest.mark.parametrize("size", [1, 16, 128, 512])
def test_finer_blocks_share_what_the_trace_shares(tmp_path, size):
    trace = load_trace(write_rows(tmp_path / "t.jsonl", [*LINES, mooncake_row(4000, 600, [0, 1])]))
    finer = load_trace([json.loads(line) for line in convert_lines(trace, "mooncake", block_size=size)])
    assert finer.visible.grain == size
    ids = [r.prompt_ids() for r in trace]
    found = [r.prompt_ids() for r in finer]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert common_prefix(found[left], found[right]) == common_prefix(ids[left], ids[right])


def test_tokens_written_read_back_the_same(tmp_path):
    out = tmp_path / "chat.jsonl.gz"
    code, _, _ = kvarena("generate", "chat", "--seed", 5, "--set", "num_sessions=6", "--out", out)
    assert code == 0
    wanted = list(workloads.make("chat", seed=5, num_sessions=6))
    found = list(load_trace(out))
    assert len(found) == len(wanted) > 6
    for one, other in zip(wanted, found, strict=True):
        assert (one.request_id, one.arrival_s, one.session_id) == (other.request_id, other.arrival_s, other.session_id)
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.output_ids, other.output_ids)
    assert load_trace(out).visible == workloads.make("chat", seed=5, num_sessions=6).visible


@pytest.mark.parametrize("size", [1, 16, 512])
def test_token_ids_become_chained_blocks_that_share_whole_blocks(size):
    trace = load_trace("chat", num_sessions=4)
    blocks = load_trace([json.loads(line) for line in convert_lines(trace, "mooncake", block_size=size)])
    tokens, ids = [r.prompt_ids().tolist() for r in trace], [r.hash_ids.tolist() for r in blocks]
    for left in range(0, len(tokens), 3):
        for right in range(left):
            shared = common_prefix(tokens[left], tokens[right])
            whole = shared // size + (shared % size > 0 and tokens[left] == tokens[right])
            assert common_prefix(ids[left], ids[right]) == whole


def test_equal_tokens_behind_unequal_prefixes_or_namespaces_are_other_blocks():
    rows = [
        {"token_ids": [1, 2, 3, 4]},
        {"token_ids": [9, 9, 3, 4]},
        {"token_ids": [1, 2, 3, 4], "namespace": "lora"},
        {"token_ids": [1, 2, 3, 4]},
    ]
    lines = [json.loads(line)["hash_ids"] for line in convert_lines(load_trace(rows), "mooncake", block_size=2)]
    assert lines == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_generate_writes_equal_bytes_for_equal_seeds(tmp_path):
    outs = []
    for name, seed in (("a.jsonl.gz", 1), ("b.jsonl.gz", 1), ("c.jsonl.gz", 2)):
        assert (
            kvarena("generate", "mooncake_like", "--seed", seed, "--set", "num_requests=50", "--out", tmp_path / name)[
                0
            ]
            == 0
        )
        outs.append((tmp_path / name).read_bytes())
    assert outs[0] == outs[1] != outs[2]
    assert json.loads(gzip.decompress(outs[0]).splitlines()[0])["block_size"] == 512
