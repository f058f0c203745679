"""Readers: what each format's fields mean, and the one clear error that each kind of bad row gets."""

import doctest
import gzip
import json
import tracemalloc
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
from kvarena.experiments.traces import lines as lines_module
from kvarena.experiments.traces import load_trace
from support.traces import common_prefix, mooncake_row, rows_of, write, write_rows


def hits_of_whole_pages(trace, page_size):
    """Longest shared prefix with any earlier prompt, in whole pages."""
    seen, hits = [], []
    for request in trace:
        tokens = request.prompt_ids().tolist()
        best = max((common_prefix(tokens, other) for other in seen), default=0)
        hits.append(best // page_size * page_size)
        seen.append(tokens)
    return hits


# ids


@pytest.mark.parametrize(
    "alias",
    [2**32, 2**31, 2**33, 2**63, 2**64, -(2**32), -(2**63), 10**30],
    ids=lambda value: f"{value:+d}"[:12],
)
def test_ids_that_agree_in_their_lower_bits_are_different_blocks(tmp_path, alias):
    path = write_rows(
        tmp_path / "t.jsonl",
        [
            mooncake_row(0, 9, [5, 6, 7]),
            mooncake_row(1, 9, [alias + 5, alias + 6, alias + 7]),
            mooncake_row(2, 9, [5, 6, 8]),
            mooncake_row(3, 9, [-5, 6, 7]),
        ],
    )
    trace = load_trace(path, grain=4)
    assert hits_of_whole_pages(trace, 4) == [0, 0, 8, 0]


def test_ids_become_indices_in_order_of_first_use(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 9, [900, -3, 7]), mooncake_row(1, 8, [900, 2**70])])
    first, second = load_trace(path, grain=4)
    assert first.hash_ids.tolist() == [0, 1, 2]
    assert second.hash_ids.tolist() == [0, 3]
    assert first.prompt_ids().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert second.prompt_ids().dtype == np.int32


def test_order_of_first_use_is_that_of_arrival_not_of_the_file(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(5, 4, [70]), mooncake_row(1, 4, [80])])
    assert [r.hash_ids.tolist() for r in load_trace(path, grain=4)] == [[0], [1]]


def test_tokens_past_31_bits_are_an_error_that_names_line_and_count(tmp_path):
    path = write_rows(
        tmp_path / "t.jsonl", [mooncake_row(0, 2**30, [1]), mooncake_row(0, 2**30, [2]), mooncake_row(0, 2**30, [3])]
    )
    with pytest.raises(ValueError, match=r"t\.jsonl:3: field 'hash_ids': expected at most .* distinct ids .* found 3"):
        load_trace(path, grain=2**30)
    assert load_trace(path, grain=2**30, limit=2).num_requests == 2


def test_last_block_is_cut_to_the_real_length(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 513, [1, 2]), mooncake_row(0, 1024, [1, 3])])
    assert [len(r.prompt_ids()) for r in load_trace(path)] == [513, 1024]


# unit, grain, order


def test_block_size_of_the_rows_is_used_and_must_agree(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 20, [1, 2], block_size=16)])
    assert load_trace(path).visible.grain == 16
    with pytest.raises(ValueError, match=r"t\.jsonl:1: field 'block_size': expected 512.*found 16"):
        load_trace(path, grain=512)
    mixed = write_rows(tmp_path / "m.jsonl", [mooncake_row(0, 4, [1], block_size=16), mooncake_row(0, 4, [1])])
    with pytest.raises(ValueError, match=r"m\.jsonl:2: field 'block_size': expected 16 .* found 512"):
        load_trace(mixed)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_number_of_ids_must_be_the_ceiling(tmp_path, count):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 513, list(range(count)))])
    with pytest.raises(ValueError, match=rf"t\.jsonl:1: field 'hash_ids': expected 2 ids = ceil.* found {count}"):
        load_trace(path)


def test_full_blocks_gives_the_tail_an_id_of_its_own(tmp_path):
    rows = [mooncake_row(0, 130, [1, 2], block_size=64), mooncake_row(1, 130, [1, 2], block_size=64)]
    path = write_rows(tmp_path / "t.jsonl", rows)
    with pytest.raises(ValueError, match="full_blocks"):
        load_trace(path)
    first, second = load_trace(path, full_blocks=True)
    assert common_prefix(first.prompt_ids(), second.prompt_ids()) == 128


def test_ties_keep_the_order_of_the_file(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(t, n, [n]) for n, t in enumerate([7, 0, 7, 0, 7], start=1)])
    trace = load_trace(path)
    assert [r.num_prompt_tokens for r in trace] == [2, 4, 1, 3, 5]
    assert [r.request_id for r in trace] == ["r1", "r3", "r0", "r2", "r4"]
    assert trace.warnings == ["2 rows out of order: sorted by time, equal times keep the file's order"]


@pytest.mark.parametrize("epoch_ns", [0, 1_790_000_003_000_000_000])
def test_nanosecond_epochs_keep_their_gaps(tmp_path, epoch_ns):
    rows = [{"input_tok_ids": [1], "output_tok_ids": [], "arrival_time_ns": epoch_ns + d} for d in (0, 1, 3)]
    trace = load_trace(write_rows(tmp_path / "t.jsonl", rows))
    assert [r.arrival_s for r in trace] == [0.0, 1e-9, 3e-9]


def test_speed_divides_gaps_only(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(1000, 4, [1]), mooncake_row(5000, 5, [2])])
    assert rows_of(load_trace(path, speed=4.0)) == [(0.0, 4, 1), (1.0, 5, 1)]


def test_delay_follows_the_session(tmp_path):
    rows = [
        mooncake_row(1000, 4, [1], session_id="a"),
        {"session_id": "a", "delay": 500, "input_length": 5, "output_length": 1, "hash_ids": [2]},
        mooncake_row(1200, 6, [3], session_id="b"),
    ]
    trace = load_trace(write_rows(tmp_path / "t.jsonl", rows))
    assert [(r.session_id, r.arrival_s) for r in trace] == [("a", 0.0), ("b", 0.2), ("a", 0.5)]
    orphan = write_rows(tmp_path / "o.jsonl", [rows[1]])
    with pytest.raises(ValueError, match=r"o\.jsonl:1: field 'timestamp': expected a time, or a delay after"):
        load_trace(orphan)


def test_every_pass_reads_the_same(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(t, 600, [t, t + 1]) for t in (9, 3, 5, 1)])
    trace = load_trace(path)
    passes = [[(r.request_id, r.arrival_s, r.hash_ids.tolist()) for r in trace] for _ in range(3)]
    assert passes[0] == passes[1] == passes[2]
    assert trace.num_requests == len(passes[0])


def test_a_file_that_changes_between_passes_is_an_error(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 4, [1])])
    trace = load_trace(path)
    write_rows(path, [mooncake_row(0, 4, [1]), mooncake_row(1, 4, [1])])
    with pytest.raises(ValueError, match="changed since it was loaded"):
        list(trace)


# formats


def test_formats_are_recognised_by_their_fields(tmp_path):
    rows = {
        "mooncake": mooncake_row(0, 4, [1]),
        "hashes": mooncake_row(0, 4, [1], output_hash_ids=[]),
        "tokens": {"token_ids": [1, 2]},
    }
    for name, row in rows.items():
        path = write_rows(tmp_path / f"{name}.jsonl", [row])
        assert load_trace(path).source["format"] == name


@pytest.mark.parametrize("row", [{}, {"foo": 1}, {"timestamp": 0, "input_length": 1}, {"prompt": "hello"}])
def test_an_unknown_row_lists_the_formats(tmp_path, row):
    path = write_rows(tmp_path / "t.jsonl", [row])
    with pytest.raises(ValueError, match=r"(?s)t\.jsonl:1: unknown trace format.*mooncake.*tokens"):
        load_trace(path)


def test_an_unknown_format_name_lists_the_formats(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 4, [1])])
    with pytest.raises(ValueError, match=r"(?s)unknown trace format 'moonkake'.*mooncake.*tokens"):
        load_trace(path, "moonkake")


def test_an_explicit_format_is_not_second_guessed(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 4, [1])])
    with pytest.raises(ValueError, match=r"t\.jsonl:1: field 'output_hash_ids': expected a list, found nothing"):
        load_trace(path, "hashes")


def test_options_of_another_format_are_errors(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [{"token_ids": [1]}])
    with pytest.raises(ValueError, match=r"option 'grain': expected one of those of format 'tokens'"):
        load_trace(path, grain=16)


def test_token_rows_of_both_spellings(tmp_path):
    plain = {"token_ids": [1, 2, 3], "output_ids": [4], "arrival_s": 1.5, "session_id": 7, "tenant": "x"}
    serving = {
        "input_toks": 2,
        "output_toks": 1,
        "arrival_time_ns": 2_500_000_000,
        "input_tok_ids": [1, 2],
        "output_tok_ids": [9],
    }
    (one,) = load_trace(write_rows(tmp_path / "a.jsonl", [plain]))
    (two,) = load_trace(write_rows(tmp_path / "b.jsonl", [serving]))
    assert (one.prompt_ids().tolist(), one.reply_ids().tolist(), one.session_id, one.extra) == (
        [1, 2, 3],
        [4],
        "7",
        {"tenant": "x"},
    )
    assert (two.prompt_ids().tolist(), two.reply_ids().tolist(), two.num_output_tokens) == ([1, 2], [9], 1)


def test_two_units_of_time_in_one_file_are_an_error(tmp_path):
    rows = [{"token_ids": [1], "arrival_s": 1}, {"token_ids": [1], "arrival_time_ns": 2}]
    with pytest.raises(ValueError, match=r"t\.jsonl:2: arrival time: expected one unit"):
        load_trace(write_rows(tmp_path / "t.jsonl", rows))


def test_a_time_without_a_unit_is_an_error(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [{"token_ids": [1], "timestamp": 5}])
    with pytest.raises(ValueError, match=r"t\.jsonl:1: field 'timestamp': expected a field with a unit"):
        load_trace(path)


def test_times_on_some_rows_only_are_an_error(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [{"token_ids": [1], "arrival_s": 5}, {"token_ids": [1]}])
    with pytest.raises(ValueError, match=r"t\.jsonl:2: arrival time: expected on every row or on none"):
        load_trace(path)


def test_lists_and_frames_read_as_files_do(tmp_path):
    rows = [mooncake_row(3000, 600, [1, 2]), mooncake_row(1000, 700, [1, 3])]
    path = write_rows(tmp_path / "t.jsonl", rows)
    wanted = [(r.arrival_s, r.prompt_ids().tolist()) for r in load_trace(path)]
    for spec in (rows, pd.DataFrame(rows)):
        assert [(r.arrival_s, r.prompt_ids().tolist()) for r in load_trace(spec)] == wanted


def test_token_lists_arrive_in_order_and_say_so():
    trace = load_trace([[1, 2, 3], np.array([1, 2], np.int64), (7,)])
    assert [r.prompt_ids().tolist() for r in trace] == [[1, 2, 3], [1, 2], [7]]
    assert not trace.visible.publish_time
    assert "no arrival times" in trace.warnings[0]


def test_frame_without_a_value_misses_the_field():
    frame = pd.DataFrame({"token_ids": [[1], [2]], "session_id": ["a", None]})
    assert [r.session_id for r in load_trace(frame)] == ["a", None]
    bad = pd.DataFrame([mooncake_row(0, 4, [1]), mooncake_row(float("nan"), 4, [1])])
    with pytest.raises(ValueError, match=r"DataFrame row 1: field 'timestamp': expected a finite number"):
        load_trace(bad)


@pytest.mark.parametrize("spec", [3, 3.5, None, {"a": 1}, b"x", object()], ids=lambda spec: type(spec).__name__)
def test_a_spec_of_another_type_says_what_is_expected(spec):
    with pytest.raises(ValueError, match="expected a name, a path, a DataFrame or a list"):
        load_trace(spec)


def test_a_name_that_is_nothing_lists_what_there_is():
    with pytest.raises(ValueError, match=r"no-such: |'no-such'.*chat.*mooncake_like.*mooncake-conversation"):
        load_trace("no-such")


# bad values: one clear error each, with file, line, field, expected, found

BAD_COUNTS = [-1, 0.5, 2**31, 2**63, 1e300, True, "4", None, [4], {"n": 4}]


@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize("field", ["input_length", "output_length"])
def test_bad_counts(tmp_path, field, value):
    good = mooncake_row(0, 4, [1])
    path = write_rows(tmp_path / "t.jsonl", [good, {**good, field: value}])
    with pytest.raises(ValueError, match=rf"t\.jsonl:2: field '{field}': expected a whole number from [01] to .*found"):
        load_trace(path)


@pytest.mark.parametrize("value", [-1, "12", None, True, [], 2**63], ids=repr)
def test_bad_times(tmp_path, value):
    good = mooncake_row(0, 4, [1])
    path = write_rows(tmp_path / "t.jsonl", [good, {**good, "timestamp": value}])
    with pytest.raises(ValueError, match=r"t\.jsonl:2: field 'timestamp': expected a finite number >= 0, found"):
        load_trace(path)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e309", "-1e309"])
@pytest.mark.parametrize("field", ["timestamp", "input_length"])
def test_numbers_that_are_none(tmp_path, field, text):
    row = json.dumps(mooncake_row(0, 4, [1]))
    bad = json.dumps({**mooncake_row(0, 4, [1]), field: "HERE"}).replace('"HERE"', text)
    path = write(tmp_path / "t.jsonl", f"{row}\n{bad}\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:2: .*expected .*found"):
        load_trace(path)


def test_an_empty_prompt(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl:1: field 'input_length': expected a whole number from 1.*found 0"):
        load_trace(write_rows(tmp_path / "a.jsonl", [mooncake_row(0, 0, [])]))
    with pytest.raises(ValueError, match=r"b\.jsonl:1: field 'token_ids': expected at least one token id"):
        load_trace(write_rows(tmp_path / "b.jsonl", [{"token_ids": []}]))


@pytest.mark.parametrize("ids", [[1.5], ["1"], [None], [True], [[1]], "12", 5, None], ids=repr)
def test_bad_ids(tmp_path, ids):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 4, [1]), {**mooncake_row(0, 4, [1]), "hash_ids": ids}])
    with pytest.raises(ValueError, match=r"t\.jsonl:2: field 'hash_ids': expected a list"):
        load_trace(path)


@pytest.mark.parametrize("token", [-1, 2**31, 2**63, 1.0, True], ids=repr)
def test_bad_token_ids(tmp_path, token):
    path = write_rows(tmp_path / "t.jsonl", [{"token_ids": [1, token]}])
    with pytest.raises(ValueError, match=r"t\.jsonl:1: field 'token_ids': expected .* found"):
        load_trace(path)


def test_a_missing_field_is_named(tmp_path):
    row = mooncake_row(0, 4, [1])
    del row["output_length"]
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 4, [1]), row])
    with pytest.raises(ValueError, match=r"t\.jsonl:2: field 'output_length': expected .* found nothing"):
        load_trace(path)


def test_a_field_that_stands_twice_is_an_error(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"token_ids":[1],"token_ids":[2]}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl:1: field 'token_ids': expected once, found 2 times"):
        load_trace(path)


def test_a_request_id_that_stands_twice_is_an_error(tmp_path):
    rows = [mooncake_row(0, 4, [1], request_id="x"), mooncake_row(1, 4, [1], request_id="x")]
    with pytest.raises(ValueError, match=r"t\.jsonl:2: field 'request_id': expected one row for each, found 'x' twice"):
        load_trace(write_rows(tmp_path / "t.jsonl", rows))


def test_lengths_that_disagree_with_ids_are_errors(tmp_path):
    serving = {"input_toks": 3, "output_toks": 1, "arrival_time_ns": 0, "input_tok_ids": [1, 2], "output_tok_ids": [9]}
    with pytest.raises(ValueError, match=r"field 'input_toks': expected 2, .* found 3"):
        load_trace([serving])
    with pytest.raises(ValueError, match=r"field 'output_toks': expected 1, .* found 5"):
        load_trace([{**serving, "input_toks": 2, "output_toks": 5}])
    with pytest.raises(ValueError, match=r"field 'output_hash_ids': expected 1 ids = .* found 2"):
        load_trace([mooncake_row(0, 20, [1, 2], output_hash_ids=[3, 4]) | {"output_length": 12}])


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff", "\r\n"], ids=repr)
def test_a_file_without_rows_is_an_error(tmp_path, text):
    with pytest.raises(ValueError, match=r"t\.jsonl: expected at least one row, found none"):
        load_trace(write(tmp_path / "t.jsonl", text))


@pytest.mark.parametrize(
    "text", ["[1,2]", "3", '"x"', "null", "{", "nonsense", '{"a":1} x', "[" * 100_000], ids=lambda t: t[:9]
)
def test_a_line_that_is_no_object_is_an_error(tmp_path, text):
    path = write(tmp_path / "t.jsonl", json.dumps(mooncake_row(0, 4, [1])) + "\n" + text + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:2: expected"):
        load_trace(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_past_the_limit_is_an_error_and_is_not_held(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(lines_module.TextFile.__init__, "__kwdefaults__", {"max_line_bytes": 4096})
    path = write(tmp_path / f"t.jsonl{suffix}", json.dumps(mooncake_row(0, 4, [1])) + "\n" + "x" * 100_000)
    with pytest.raises(ValueError, match=r"t\.jsonl.*:2: expected a line of at most 4096 bytes, found a longer one"):
        load_trace(path)


def test_a_gzip_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1 << 16)
    monkeypatch.setattr(lines_module, "MAX_BLANK_LINES", 4_000_000)
    path = write(tmp_path / "t.jsonl.gz", "\n" * 4_000_000)
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match=r"expected gzip data that unpacks to at most 200 times"):
        load_trace(path)


@pytest.mark.parametrize("name", ["t.json.gz", "t.jsonl.gz"])
def test_a_bomb_of_one_line_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, name):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1 << 20)
    path = write(tmp_path / name, b"[" + b" " * 200_000_000)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"at most 200 times its size|at most 67108864 bytes"):
        load_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150_000_000


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_another_encoding_is_named(tmp_path, encoding):
    path = write(tmp_path / "t.jsonl", '{"request_id":"é","token_ids":[1]}\n'.encode(encoding))
    with pytest.raises(ValueError, match=r"t\.jsonl:1: expected UTF-8 text, found byte"):
        load_trace(path)


def test_gzip_is_told_by_content_and_name(tmp_path):
    plain = json.dumps(mooncake_row(0, 4, [1])).encode()
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(plain))
    assert load_trace(tmp_path / "packed.jsonl").num_requests == 1
    (tmp_path / "plain.jsonl.gz").write_bytes(plain)
    with pytest.raises(ValueError, match=r"plain\.jsonl\.gz:1: expected gzip data"):
        load_trace(tmp_path / "plain.jsonl.gz")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "t.jsonl", [mooncake_row(0, 4, [1])])

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ValueError, match=r"t\.jsonl: cannot be read \(Permission denied\)"):
        load_trace(path)


def test_a_folder_is_no_trace_file(tmp_path):
    with pytest.raises(ValueError, match="expected a file, or a folder with the files of one of"):
        load_trace(tmp_path)


@pytest.mark.parametrize(
    ("option", "value"),
    [("grain", 0), ("grain", -4), ("grain", 1.5), ("grain", True), ("grain", "16"), ("full_blocks", "yes")],
)
def test_bad_option_values_are_named(option, value):
    with pytest.raises(ValueError, match=rf"option '{option}': expected .* found"):
        load_trace([mooncake_row(0, 4, [1])], **{option: value})


def test_a_trace_given_as_a_trace_takes_speed_and_limit_only():
    trace = load_trace([mooncake_row(t, 4, [1]) for t in (0, 1000, 4000)])
    assert load_trace(trace) is trace
    assert rows_of(load_trace(trace, speed=2.0, limit=2)) == [(0.0, 4, 1), (0.5, 4, 1)]
    with pytest.raises(ValueError, match="expected no format and no options for a Trace"):
        load_trace(trace, grain=16)


@pytest.mark.parametrize("module", ["rows", "cli"])
def test_examples_in_docstrings_hold(module):
    found = doctest.testmod(import_module(f"kvarena.experiments.traces.{module}"))
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize(("setting", "value"), [("speed", 0), ("speed", -1), ("speed", float("nan")), ("limit", 0)])
def test_bad_settings(setting, value):
    with pytest.raises(ValueError, match=rf"{setting}: expected"):
        load_trace([[1]], **{setting: value})


# what a trace can show is measured


def test_outputs_are_measured():
    turn = {"token_ids": [1, 2, 3], "output_ids": [4, 5], "arrival_s": 0}
    again = {"token_ids": [1, 2, 3, 4, 5, 6], "arrival_s": 1}
    other = {"token_ids": [1, 2, 3, 4, 6, 5], "arrival_s": 1}
    assert load_trace([again, other]).visible.outputs == "none"
    assert load_trace([turn, other]).visible.outputs == "unreachable"
    assert load_trace([turn, again]).visible.outputs == "recorded"
    assert load_trace([again | {"arrival_s": 0}, turn | {"arrival_s": 1}]).visible.outputs == "unreachable"


def test_outputs_at_grain_return_only_by_ids_that_a_reply_brought():
    first = mooncake_row(0, 16, [1], output_hash_ids=[2]) | {"output_length": 16}
    back = mooncake_row(1000, 32, [1, 2], output_hash_ids=[])
    away = mooncake_row(1000, 32, [1, 3], output_hash_ids=[])
    assert load_trace([first, back]).visible.outputs == "recorded"
    assert load_trace([first, away]).visible.outputs == "unreachable"
    # An id that a prompt had before the reply did is no sign of the reply.
    assert (
        load_trace([away | {"timestamp": 0}, {**first, "output_hash_ids": [3]}, away]).visible.outputs == "unreachable"
    )


def test_publishing_time_shows_where_sharers_come_close():
    def pair(gap):
        return load_trace([{"token_ids": list(range(40)), "arrival_s": t} for t in (0, gap)])

    assert pair(1).visible.publish_time
    assert not pair(100).visible.publish_time
    assert load_trace([mooncake_row(0, 4, [1]), mooncake_row(10, 4, [1])]).visible.publish_time
    assert not load_trace([mooncake_row(0, 4, [1]), mooncake_row(10, 4, [2])]).visible.publish_time
