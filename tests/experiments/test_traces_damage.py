"""Damaged files, cut at each byte or with each bit flipped: right rows or one ValueError, never more."""

import gzip
import json

import pytest
from kvarena.experiments.traces import load_trace
from support.traces import mooncake_row

FILES = {
    "mooncake": [mooncake_row(3000, 600, [7, 8]), mooncake_row(0, 4, [7], session_id="é"), mooncake_row(9, 5, [2**40])],
    "hashes": [
        mooncake_row(0.5, 20, [1, 2], output_hash_ids=[3]) | {"output_length": 12},
        mooncake_row(2, 20, [1, 4], output_hash_ids=[]),
    ],
    "tokens": [{"token_ids": [1, 2], "output_ids": [3], "arrival_s": 0.25}, {"token_ids": [1], "arrival_s": 1}],
    "servingsim": [
        {"input_toks": 1, "output_toks": 1, "arrival_time_ns": 5, "input_tok_ids": [9], "output_tok_ids": [8]}
    ],
}


FILES |= {
    "bailian": [
        {"chat_id": 7, "parent_chat_id": -1, "turn": 1, **mooncake_row(0.5, 36, [1, 2, 3])},
        {"chat_id": 8, "parent_chat_id": 7, "turn": 2, **mooncake_row(9, 40, [1, 2, 4])},
    ],
    "weka": [{"id": "a", "block_size": 64, "requests": [{"t": 0, "type": "n", "in": 70, "out": 1, "hash_ids": [1]}]}],
    "sub_requests": [{"arrival_time_ns": 5, "sub_requests": [{"input_toks": 3, "output_toks": 1}] * 2}],
}
CSV = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2025-03-01 10:00:00.5,10,2\n2025-03-01 10:00:01.1234567,11,3\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n3,GPT-4,4,8,12,API log\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,3\n1.25,7,1\n",
}


def content(name):
    return "".join(json.dumps(row) + "\n" for row in FILES[name]).encode()


def outcome(path, data):
    """What loading gives: a list of plain values per request, or the error's text."""
    path.write_bytes(data)
    try:
        return [
            (r.request_id, r.arrival_s, r.num_output_tokens, r.session_id, r.prompt_ids().tolist())
            for r in load_trace(path)
        ]
    except ValueError as error:
        return str(error) if path.name in str(error) else pytest.fail(f"no file name in {error}")


@pytest.mark.parametrize("name", FILES)
def test_cut_at_each_byte_a_file_gives_its_first_rows_or_an_error(tmp_path, name):
    path, data = tmp_path / "t.jsonl", content(name)
    lines = data.splitlines(keepends=True)
    whole = {outcome_key(outcome(path, b"".join(lines[:n]))) for n in range(len(lines) + 1)}
    for size in range(len(data)):
        found = outcome(path, data[:size])
        assert isinstance(found, str) or outcome_key(found) in whole


def outcome_key(found):
    return json.dumps(found)


@pytest.mark.parametrize("name", FILES)
def test_cut_at_each_byte_a_gzip_file_is_an_error(tmp_path, name):
    path, data = tmp_path / "t.jsonl.gz", gzip.compress(content(name))
    assert isinstance(outcome(path, data), list)
    for size in range(len(data)):
        assert isinstance(outcome(path, data[:size]), str)


@pytest.mark.parametrize("name", FILES)
def test_with_each_bit_flipped_a_gzip_file_reads_the_same_or_is_an_error(tmp_path, name):
    path, data = tmp_path / "t.jsonl.gz", gzip.compress(content(name))
    right = outcome(path, data)
    for flipped in each_flip(data):
        assert outcome(path, flipped) == right or isinstance(outcome(path, flipped), str)


@pytest.mark.parametrize("name", FILES)
def test_with_each_bit_flipped_a_file_reads_as_valid_rows_or_is_an_error(tmp_path, name):
    path = tmp_path / "t.jsonl"
    for flipped in each_flip(content(name)):
        found = outcome(path, flipped)
        if isinstance(found, list):
            arrivals = [arrival for _, arrival, *_ in found]
            assert arrivals == sorted(arrivals)
            assert arrivals[0] == 0.0
            assert all(prompt and min(prompt) >= 0 for *_, prompt in found)


@pytest.mark.parametrize("name", CSV)
def test_a_csv_file_cut_or_flipped_anywhere_reads_as_valid_rows_or_is_an_error(tmp_path, name):
    path, data = tmp_path / "t.csv", CSV[name].encode()
    rows = len(outcome(path, data))
    for damaged in [*(data[:size] for size in range(len(data))), *each_flip(data)]:
        found = outcome(path, damaged)
        if isinstance(found, list):
            assert len(found) <= rows + 1
            assert all(prompt for *_, prompt in found)


@pytest.mark.parametrize("name", CSV)
def test_a_csv_file_whose_last_line_may_be_cut_says_so(tmp_path, name):
    path = tmp_path / "t.csv"
    path.write_text(CSV[name])
    assert not [w for w in load_trace(path).warnings if "newline" in w]
    path.write_text(CSV[name][:-1])
    assert [w for w in load_trace(path).warnings if "newline" in w]


def each_flip(data):
    for index in range(len(data)):
        for bit in range(8):
            yield data[:index] + bytes([data[index] ^ (1 << bit)]) + data[index + 1 :]


def test_trailing_bytes_after_gzip_data_are_an_error(tmp_path):
    data = gzip.compress(content("tokens"))
    assert isinstance(outcome(tmp_path / "t.jsonl.gz", data + b"junk"), str)
    two = outcome(tmp_path / "t.jsonl.gz", data + gzip.compress(b'{"token_ids":[5],"arrival_s":2}\n'))
    assert len(two) == 3


def test_a_json_document_cut_anywhere_is_an_error(tmp_path):
    path, data = tmp_path / "t.json", json.dumps(FILES["weka"][0]).encode()
    assert isinstance(outcome(path, data), list)
    for size in range(len(data)):
        assert isinstance(outcome(path, data[:size]), str)


def test_a_ragpulse_folder_with_any_file_cut_or_flipped_reads_or_is_an_error(tmp_path):
    files = {
        "0_trace.jsonl": b'{"timestamp":"7","input_length":9,"output_length":1,"hash_ids":{"sys_prompt":[1],'
        b'"passages_ids":[2],"history":[],"web_search":[],"user_input":[]},"session_id":"s"}\n',
        "1_sys_prompt.jsonl": b'{"sys_prompt_id":1,"token_length":4}\n',
        "2_passages.jsonl": b'{"passage_id":2,"token_length":3}\n',
        "3_history.jsonl": b"",
        "4_user_input.jsonl": b"",
        "5_web_search.jsonl": b"",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert [r.num_prompt_tokens for r in load_trace(tmp_path)] == [9]
    for name, data in files.items():
        for damaged in [*(data[:size] for size in range(len(data))), *each_flip(data)]:
            (tmp_path / name).write_bytes(damaged)
            try:
                found = [r.num_prompt_tokens for r in load_trace(tmp_path)]
            except ValueError as error:
                found = str(error)
            assert isinstance(found, list) or str(tmp_path) in found
        (tmp_path / name).write_bytes(data)
