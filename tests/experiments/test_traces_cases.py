"""Cases of tests/cases that concern traces, as they are written there, and the whole of their kind."""

import json
from itertools import product
from pathlib import Path

import pytest
from kvarena.experiments.traces import load_trace
from support.traces import common_prefix, mooncake_row, rows_of, write, write_rows

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent.parent / "cases" / "cases.jsonl").read_text().splitlines())
    if case["id"].startswith("trace-")
}


def case_file(folder, entry):
    """The file of one case entry, with its leading bytes."""
    text = entry.get("text") or "\n".join(entry["lines"]) + "\n"
    name = "t.csv" if entry["format"] in ("azure", "burstgpt") else "t.jsonl"
    folder.mkdir(exist_ok=True)
    return write(folder / name, bytes.fromhex(entry.get("hex_prefix", "")) + text.encode())


def test_trace_02_ids_that_differ_in_the_upper_half(tmp_path):
    case = CASES["trace-02"]
    prompts = [r.prompt_ids().tolist() for r in load_trace(case_file(tmp_path, case["input"]), grain=4)]
    hits = [
        max((common_prefix(prompt, other) // 4 * 4 for other in prompts[:index]), default=0)
        for index, prompt in enumerate(prompts)
    ]
    assert hits == case["expect"]["prefix_hits_tokens_P4"]


def test_trace_04_order_and_origin_of_times(tmp_path):
    case = CASES["trace-04"]
    trace = load_trace(case_file(tmp_path, case["input"]), grain=16, speed=case["input"]["speed"])
    assert [r.num_prompt_tokens for r in trace] == case["expect"]["order_input_length"]
    assert [r.arrival_s for r in trace] == case["expect"]["arrival_s"]
    assert case["expect"]["warning"] in trace.warnings[0]


@pytest.mark.parametrize("order", list(product(range(3), repeat=4)), ids=str)
def test_any_order_of_times_is_sorted_stably_and_counted(tmp_path, order):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(t, n + 1, [n]) for n, t in enumerate(order)])
    trace = load_trace(path)
    wanted = sorted(range(4), key=lambda n: order[n])
    assert [r.num_prompt_tokens - 1 for r in trace] == wanted
    assert [r.arrival_s for r in trace] == [(order[n] - min(order)) / 1000 for n in wanted]
    late = sum(order[n] < max(order[:n]) for n in range(1, 4))
    assert trace.warnings == (
        [f"{late} rows out of order: sorted by time, equal times keep the file's order"] if late else []
    )


@pytest.mark.parametrize("index", [0, 1], ids=["mooncake", "bailian"])
def test_trace_05_unit_of_time_and_block_size_belong_to_the_format(tmp_path, index):
    case = CASES["trace-05"]
    entry = case["input"]["files"][index]
    trace = load_trace(case_file(tmp_path, entry))
    first, second = trace
    assert trace.source["format"] == entry["format"]
    assert [first.arrival_s, second.arrival_s] == case["expect"]["arrival_s"][index]
    assert trace.visible.grain == case["expect"]["block"][index]
    assert common_prefix(first.prompt_ids(), second.prompt_ids()) == case["expect"]["common_prefix_tokens"][index]


@pytest.mark.parametrize("scale", [1e-3, 1, 1e3, 1e9, 1e15])
def test_the_size_of_the_numbers_never_changes_the_unit(tmp_path, scale):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 4, [1]), mooncake_row(7 * scale, 4, [1])])
    assert [r.arrival_s for r in load_trace(path)] == [0.0, 7 * scale / 1000]


def test_trace_06_turns_are_whole_requests(tmp_path):
    case = CASES["trace-06"]
    requests = list(load_trace(case_file(tmp_path, case["input"])))
    assert [r.num_prompt_tokens for r in requests] == case["expect"]["prompt_tokens"]
    assert sum(len(r.prompt_ids()) for r in requests) == case["expect"]["total_prompt"]
    assert len(requests) == case["expect"]["rows"]
    assert requests[0].session_id == requests[1].session_id != requests[2].session_id


def test_trace_08_failed_calls(tmp_path):
    case = CASES["trace-08"]
    path = case_file(tmp_path, case["input"])
    default, kept = load_trace(path), load_trace(path, keep_failed=True)
    expected = case["expect"]["default"]
    assert default.num_requests == expected["kept"]
    assert default.source["dropped"] == {expected["reason"]: expected["dropped"]}
    assert f"{expected['dropped']} rows dropped: {expected['reason']}" in default.warnings
    assert kept.num_requests == case["expect"]["keep_failed"]["kept"]
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in kept] == [(40, 18), (100, 0), (41, 27)]
    assert kept.source["dropped"] == {"empty prompt": 1}


@pytest.mark.parametrize("index", [0, 1], ids=["azure", "mooncake"])
def test_trace_09_byte_order_mark_and_carriage_returns(tmp_path, index):
    case = CASES["trace-09"]
    entry = case["input"]["files"][index]
    trace = load_trace(case_file(tmp_path, entry))
    assert rows_of(trace) == [tuple(row) for row in case["expect"]["rows"][index]]
    plain = case_file(tmp_path / "plain", {"format": entry["format"], "text": entry["text"].replace("\r\n", "\n")})
    assert trace.warnings == load_trace(plain).warnings


@pytest.mark.parametrize(("mark", "end", "blanks", "last"), list(product(*[[False, True]] * 4)))
def test_marks_line_ends_and_blank_lines_change_no_row(tmp_path, mark, end, blanks, last):
    rows = [json.dumps(mooncake_row(t, 4 + t, [1])) for t in (0, 9)]
    newline = "\r\n" if end else "\n"
    text = newline.join(["", *rows[:1], " \t", "", *rows[1:]] if blanks else rows) + (newline if last else "")
    path = write(tmp_path / "t.jsonl", ("\ufeff" if mark else "") + text)
    assert rows_of(load_trace(path)) == [(0.0, 4, 1), (0.009, 13, 1)]
