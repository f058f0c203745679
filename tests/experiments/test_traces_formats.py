"""The readers of single formats: units, ids, sessions, and what each format's own traps must give."""

import gzip
import json

import numpy as np
import pytest
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.base import Request
from kvarena.experiments.traces.describe import describe
from kvarena.experiments.traces.formats import Format, RawRequest, formats, get_format, register
from support.traces import common_prefix, mooncake_row, needs_traces, public_file, rows_of, write, write_rows

# registry


def test_formats_are_listed_with_their_fields():
    known = formats()
    assert {
        "mooncake", "hashes", "tokens", "bailian", "weka", "azure", "burstgpt", "vidur",
        "llmservingsim", "ragpulse", "openai", "sharegpt",
    } <= set(known)  # fmt: skip
    assert all(known[name].name == name and known[name].fields for name in known)


def test_a_format_from_outside_is_one_small_object(monkeypatch):
    monkeypatch.setattr("kvarena.experiments.traces.formats._extra", {})

    def parse(rows, options):
        for row in rows:
            yield RawRequest(row.where, row.count("p", minimum=1), row.count("d"), time=row.time("ms"))

    mine = Format("mine", "mine", "jsonl", "p, d, ms", 0, 1000, lambda fields: "p" in fields, parse)
    register(mine)
    assert rows_of(load_trace([{"p": 3, "d": 1, "ms": 10}, {"p": 4, "d": 2, "ms": 30}])) == [(0, 3, 1), (0.02, 4, 2)]
    assert get_format("mine") is mine
    with pytest.raises(ValueError, match="'mine' exists already"):
        register(mine)


# lengths only


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,100,2\n2023-11-16 18:17:04,100,8\n",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0,100,2\n1,100,8\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n3,G,100,2,102,x\n4,G,100,8,108,x\n",
    ],
    ids=["azure", "vidur", "burstgpt"],
)
def test_prompts_known_by_length_share_nothing_and_say_so(tmp_path, text):
    trace = load_trace(write(tmp_path / "t.csv", text))
    first, second = (r.prompt_ids() for r in trace)
    assert len(first) == len(second) == 100
    assert common_prefix(first, second) == 0
    assert not trace.visible.reuse
    assert any("lengths only" in warning for warning in trace.warnings)
    assert describe(trace)["reuse"] is None
    assert describe(trace)["ceilings"] == []


def test_many_prompts_known_by_length_start_with_different_tokens():
    trace = load_trace([{"num_prefill_tokens": 5, "num_decode_tokens": 1}] * 3000)
    assert len({int(r.prompt_ids()[0]) for r in trace}) == 3000


@pytest.mark.parametrize(
    ("times", "gaps"),
    [
        (["2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.0000001"], 0.0200401),
        (["2023-12-31 23:59:59.5", "2024-01-01 00:00:00"], 0.5),
        (["2024-05-10 00:00:00.009930+00:00", "2024-05-10 02:00:00.009930+02:00"], 0.0),
        (["2024-05-10T00:00:00Z", "2024-05-10T00:00:01Z"], 1.0),
    ],
)
def test_azure_times_are_exact(tmp_path, times, gaps):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{time},1,1\n" for time in times)
    assert [r.arrival_s for r in load_trace(write(tmp_path / "t.csv", text))] == [0.0, gaps]


@pytest.mark.parametrize("time", ["", "yesterday", "2023-13-01 00:00:00", "2023-11-16", "12", "2023-11-16 25:00:00"])
def test_azure_times_that_are_none(tmp_path, time):
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,1\n{time},1,1\n"
    with pytest.raises(ValueError, match=r"t\.csv:3: field 'TIMESTAMP': expected a time such as"):
        load_trace(write(tmp_path / "t.csv", text))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("3,G,40,18,58", r"t\.csv:2: expected 6 fields .* found 5"),
        ("3,G,40,18,58,API log,9", r"t\.csv:2: expected 6 fields .* found 7"),
        ("3,G,40,18,59,API log", r"t\.csv:2: field 'Total tokens': expected 58 = request \+ response"),
        ("x,G,40,18,58,API log", r"t\.csv:2: field 'Timestamp': expected a finite number"),
        ("3,G,4.5,18,58,API log", r"t\.csv:2: field 'Request tokens': expected a whole number"),
        ("3,G,1_0,18,28,API log", r"t\.csv:2: field 'Request tokens': expected a whole number"),
        ("3,G,-1,18,17,API log", r"t\.csv:2: field 'Request tokens': expected a whole number"),
        ("3,G,,18,18,API log", r"t\.csv:2: field 'Request tokens': expected .* found nothing"),
        ("nan,G,4,18,22,API log", r"t\.csv:2: field 'Timestamp': expected a finite number"),
        ('3,"G,40,18,58,API log', r"t\.csv:2: expected CSV, found a fault"),
    ],
)
def test_bad_csv_rows(tmp_path, row, message):
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    with pytest.raises(ValueError, match=message):
        load_trace(write(tmp_path / "t.csv", f"{header}\n{row}\n"))


def test_a_csv_header_that_names_a_field_twice(tmp_path):
    text = "num_prefill_tokens,num_decode_tokens,num_decode_tokens\n1,1,1\n"
    with pytest.raises(ValueError, match=r"t\.csv:1: field 'num_decode_tokens': expected once"):
        load_trace(write(tmp_path / "t.csv", text))


def test_burstgpt_sessions(tmp_path):
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = write(tmp_path / "t.csv", f"{header}\n3,17,0.5,G,4,1,5,Conversation log\n4,,0.5,G,4,1,5,API log\n")
    assert [r.session_id for r in load_trace(path)] == ["17", None]


def test_vidur_length_files_have_no_arrivals(tmp_path):
    path = write(tmp_path / "t.csv", "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n5,2,7,2.5\n")
    trace = load_trace(path)
    assert rows_of(trace) == [(0.0, 5, 2)]
    assert "no arrival times" in trace.warnings[0]


# bailian


def bailian_row(chat, parent, time, ids, turn=1):
    return {"chat_id": chat, "parent_chat_id": parent, "type": "text", "turn": turn} | mooncake_row(
        time, 16 * len(ids), ids
    )


def test_bailian_sessions_follow_parents_also_those_that_were_cut_off():
    rows = [
        bailian_row(1, -1, 0, [1]),
        bailian_row(2, 1, 1, [1, 2], 2),
        bailian_row(3, 2, 2, [1, 2, 3], 3),
        bailian_row(5, 99, 3, [9], 4),
        bailian_row(6, 99, 4, [9, 8], 4),
        bailian_row(7, 6, 5, [9, 8, 7], 5),
    ]
    trace = load_trace(rows)
    assert [r.session_id for r in trace] == ["1", "1", "1", "99", "99", "99"]
    assert (trace.source["format"], trace.visible.grain, trace.visible.sessions) == ("bailian", 16, True)


def test_ids_that_name_content_are_found_out():
    chained = [bailian_row(1, -1, 0, [1, 2]), bailian_row(2, -1, 1, [1, 3]), bailian_row(3, -1, 2, [4, 5])]
    content = [*chained, bailian_row(4, -1, 3, [4, 2]), bailian_row(5, -1, 3, [3])]
    assert not [w for w in load_trace(chained).warnings if "name content" in w]
    assert [w.split(" ")[0] for w in load_trace(content).warnings if "name content" in w] == ["2"]


def test_a_cut_off_block_whose_id_is_longer_elsewhere_is_found_out_and_its_ceiling_is_that_of_the_tokens():
    row = bailian_row(1, -1, 0, [5, 6])
    even = [row, bailian_row(2, -1, 1, [5, 6])]
    uneven = [{**row, "input_length": row["input_length"] - 3}, bailian_row(2, -1, 1, [5, 6])]
    assert not [w for w in load_trace(even).warnings if "fewer tokens" in w]
    trace = load_trace(uneven)
    assert [w.split(" ")[0] for w in trace.warnings if "fewer tokens" in w] == ["1"]
    own = next(c for c in describe(trace)["ceilings"] if c["page_size"] == trace.visible.grain)
    lengths = [r["input_length"] for r in uneven]
    assert own["token_hit_rate"] == lengths[0] / sum(lengths)


# weka


def weka_file(name, *requests, **more):
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **more}


def weka_request(t, tokens, ids, **more):
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": 5, "hash_ids": ids, **more}


def weka_folder(path, *files):
    path.mkdir()
    for number, content in enumerate(files):
        packed = number % 2
        write(path / f"trace_{number:04}.json{'.gz' if packed else ''}", json.dumps(content))
    return path


def test_weka_ids_are_local_to_a_conversation_and_tails_are_their_own(tmp_path):
    one = weka_file("a", weka_request(0, 130, [1, 2]), weka_request(9.5, 130, [1, 2]))
    two = weka_file("b", weka_request(0, 128, [1, 2]), weka_request(1, 192, [1, 2, 3]))
    trace = load_trace(weka_folder(tmp_path / "w", one, two))
    prompts = {r.session_id: [q.prompt_ids() for q in trace if q.session_id == r.session_id] for r in trace}
    assert [(r.session_id, r.arrival_s) for r in trace] == [("a", 0.0), ("a", 9.5), ("b", 60.0), ("b", 61.0)]
    assert common_prefix(*prompts["a"]) == 128
    assert common_prefix(*prompts["b"]) == 128
    assert common_prefix(prompts["a"][0], prompts["b"][0]) == 0
    assert trace.visible.grain == 64


def test_weka_global_ids_are_shared(tmp_path):
    files = [weka_file(name, weka_request(0, 64, [1]), hash_id_scope="global", tag=name) for name in "ab"]
    files[1]["requests"][0]["out"] = 6
    first, second = load_trace(weka_folder(tmp_path / "w", *files))
    assert common_prefix(first.prompt_ids(), second.prompt_ids()) == 64


def test_weka_sub_agents_start_at_their_marker_and_share_the_parents_ids(tmp_path):
    marker = {"t": 10, "type": "subagent", "agent_id": "x", "requests": [weka_request(2, 128, [1, 7])]}
    trace = load_trace([weka_file("a", weka_request(0, 128, [1, 2]), marker, weka_request(11, 128, [1, 3]))])
    found = [(r.session_id, r.arrival_s, r.hash_ids.tolist()) for r in trace]
    assert found == [("a", 0.0, [0, 1]), ("a", 11.0, [0, 2]), ("a/x", 12.0, [0, 3])]


def test_weka_copies_are_dropped_and_counted(tmp_path):
    files = [weka_file(name, weka_request(0, 64, [1])) for name in "abc"]
    folder = weka_folder(tmp_path / "w", *files, weka_file("d", weka_request(0, 65, [1])))
    trace = load_trace(folder)
    assert [(r.session_id, r.arrival_s) for r in trace] == [("a", 0.0), ("d", 60.0)]
    assert "2 rows dropped: conversation is an exact copy of an earlier one" in trace.warnings
    assert load_trace(folder, keep_copies=True, start_every_s=1).num_requests == 4


def test_weka_faults_name_file_and_request(tmp_path):
    bad = weka_file("b", weka_request(0, 64, [1]), weka_request(0, 130, [1]))
    folder = weka_folder(tmp_path / "w", weka_file("a", weka_request(0, 64, [1])), bad)
    with pytest.raises(ValueError, match=r"trace_0001\.json\.gz requests\[1\]: field 'hash_ids': expected 2 ids"):
        load_trace(folder)
    with pytest.raises(ValueError, match=r"expected a file, or a folder with the files of one of ragpulse, weka"):
        load_trace(tmp_path)
    with pytest.raises(ValueError, match=r"expected files \*\.json"):
        load_trace(tmp_path, "weka")
    with pytest.raises(ValueError, match=r"expected a file of format 'mooncake', found a folder"):
        load_trace(tmp_path, "mooncake")


# llmservingsim


def test_sub_requests_follow_each_other_by_the_tools_time():
    session = {
        "session_id": "s",
        "arrival_time_ns": 5_000_000_000,
        "sub_requests": [
            {"input_toks": 10, "output_toks": 2, "tool_duration_ns": 3_000_000_000},
            {"input_toks": 20, "output_toks": 1, "tool_duration_ns": 0},
            {"input_toks": 30, "output_toks": 1},
        ],
    }
    flat = {"input_toks": 7, "output_toks": 1, "arrival_time_ns": 6_000_000_000}
    trace = load_trace([session, flat])
    assert [(r.num_prompt_tokens, r.arrival_s, r.session_id, r.extra.get("delay_s")) for r in trace] == [
        (10, 0.0, "s", None),
        (7, 1.0, None, None),
        (20, 3.0, "s", 3.0),
        (30, 3.0, "s", 0.0),
    ]
    assert any("2 arrivals follow a reply" in warning for warning in trace.warnings)


def test_lengths_and_ids_in_one_file_are_an_error():
    rows = [
        {"input_toks": 7, "output_toks": 1, "arrival_time_ns": 6},
        {"input_toks": 1, "output_toks": 1, "arrival_time_ns": 6, "input_tok_ids": [4]},
    ]
    with pytest.raises(ValueError, match="list item 1: ids of the prompt: expected on every row or on none, found"):
        load_trace(rows)


# ragpulse

SIDES = {
    "1_sys_prompt": ("sys_prompt_id", {1: 40, 2: 30}),
    "2_passages": ("passage_id", {1: 100, 2: 120, 3: 90}),
    "3_history": ("history_id", {5: 10}),
    "4_user_input": ("user_input_id", {8: 9, 9: 7}),
    "5_web_search": ("web_search_id", {}),
}


def ragpulse_folder(path, rows, packed=False):
    path.mkdir()
    end = ".jsonl.gz" if packed else ".jsonl"
    for name, (field, lengths) in SIDES.items():
        write_rows(path / f"{name}{end}", [{field: key, "token_length": n} for key, n in lengths.items()])
    write_rows(path / f"0_trace{end}", rows)
    return path


def ragpulse_row(time, length, sys_prompt, passages, user_input, history=(5,)):
    ids = {
        "sys_prompt": sys_prompt,
        "passages_ids": passages,
        "history": list(history),
        "web_search": [],
        "user_input": user_input,
    }
    return {"timestamp": time, "input_length": length, "output_length": 3, "hash_ids": ids, "session_id": "s0"}


@pytest.mark.parametrize("packed", [False, True])
def test_ragpulse_components_become_true_prefixes(tmp_path, packed):
    rows = [
        ragpulse_row("7", 40 + 100 + 120 + 10 + 9 + 6, [1], [1, 2], [8]),
        ragpulse_row("3", 40 + 120 + 100 + 10 + 9 + 6, [1], [2, 1], [8]),
        ragpulse_row("9", 40 + 100 + 120 + 10 + 7 + 6, [1], [1, 2], [9]),
        ragpulse_row("9.5", 30 + 100 + 120 + 10 + 9 + 6, [2], [1, 2], [8]),
    ]
    folder = ragpulse_folder(tmp_path / "r", rows, packed)
    trace = load_trace(folder)
    swapped, first, other_question, other_system = (r.prompt_ids() for r in trace)
    assert [r.arrival_s for r in trace] == [0.0, 4.0, 6.0, 6.5]
    assert [len(p) for p in (swapped, first, other_question, other_system)] == [285, 285, 283, 275]
    # The same passages in another order, or behind another system prompt, are no prefix.
    assert common_prefix(first, swapped) == 40
    assert common_prefix(first, other_system) == 0
    assert common_prefix(first, other_question) == 40 + 100 + 120 + 10
    assert trace.visible.grain == 1
    again = load_trace(folder / ("0_trace.jsonl.gz" if packed else "0_trace.jsonl"))
    assert [r.prompt_ids().tolist() for r in again] == [r.prompt_ids().tolist() for r in trace]


def test_ragpulse_faults(tmp_path):
    folder = ragpulse_folder(tmp_path / "a", [ragpulse_row("7", 60, [1], [], [77])])
    with pytest.raises(ValueError, match=r"0_trace\.jsonl:1: field 'hash_ids\.user_input': expected an id of the file"):
        load_trace(folder)
    folder = ragpulse_folder(tmp_path / "b", [ragpulse_row("7", 30, [1], [], [8])])
    with pytest.raises(ValueError, match=r"field 'input_length': expected 59 tokens of components"):
        load_trace(folder)
    (folder / "2_passages.jsonl").unlink()
    with pytest.raises(ValueError, match=r"expected one file \*2_passages\*\.jsonl, found 0"):
        load_trace(folder)
    with pytest.raises(ValueError, match="expected a path"):
        load_trace([ragpulse_row("7", 60, [1], [], [8])])


# text


def words(text):
    """A tokenizer for tests: a number for each piece."""
    return [sum(map(ord, piece)) * 31 + len(piece) for piece in text.replace("\n", " \n ").split(" ") if piece]


CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "what is a page"},
    {"role": "assistant", "content": "sixteen tokens"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "a slot"}]},
    {"role": "assistant", "content": "one token"},
]


def test_openai_messages_need_a_tokenizer():
    with pytest.raises(ValueError, match="format 'openai': expected the option tokenizer"):
        load_trace([{"messages": CHAT}])


def test_a_tokenizer_may_be_named(tmp_path, monkeypatch):
    (tmp_path / "my_words.py").write_text("def split(text):\n    return [len(word) for word in text.split()]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (request,) = load_trace([{"messages": CHAT[1:2]}], tokenizer="my_words:split")
    assert request.prompt_ids().tolist() == [8, 4, 2, 1, 4, 13]
    for name in ("my_words:missing", "no_such_module:f"):
        with pytest.raises(ValueError, match="option tokenizer: expected an importable module:name"):
            load_trace([{"messages": CHAT[1:2]}], tokenizer=name)
    with pytest.raises(ValueError, match="expected the option tokenizer"):
        load_trace([{"messages": CHAT[1:2]}], tokenizer="gpt2")


def test_openai_requests_grow_turn_by_turn():
    rows = [
        {"messages": CHAT[:3], "session_id": "a", "arrival_s": 1},
        {"custom_id": "x", "body": {"messages": CHAT[:4]}, "arrival_s": 4},
    ]
    first, second = load_trace(rows, tokenizer=words)
    assert second.request_id == "x"
    assert second.num_output_tokens == 0
    assert common_prefix(first.prompt_ids(), second.prompt_ids()) == first.num_prompt_tokens
    assert np.array_equal(first.output_ids, words("sixteen tokens"))
    assert second.prompt_ids()[first.num_prompt_tokens :][: len(first.output_ids)].tolist() == first.output_ids.tolist()


def test_a_tokenizer_with_a_chat_template_renders_the_prompt():
    class Template:
        def apply_chat_template(self, messages, tokenize, add_generation_prompt, **_more):
            assert tokenize
            assert add_generation_prompt
            return {"input_ids": [len(m["content"]) for m in messages]}

        def __call__(self, text):
            return {"input_ids": [7] * len(text.split())}

    (request,) = load_trace([{"messages": CHAT[:3]}], tokenizer=Template())
    assert (request.prompt_ids().tolist(), request.output_ids.tolist()) == ([7, 14], [7, 7])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ([CHAT[2]], "at least one message before the reply"),
        ([{"content": "x"}], "field 'role'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "expected a part of type text"),
        ([{"role": "user", "content": 5}], "field 'content': expected a list"),
        ("hello", "field 'messages': expected a list"),
        (["hello"], "expected a JSON object"),
    ],
)
def test_bad_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        load_trace([{"messages": messages}], "openai", tokenizer=words)


def test_bad_token_ids_of_a_tokenizer_are_named():
    with pytest.raises(ValueError, match="field 'tokenizer': expected token ids"):
        load_trace([{"messages": CHAT[:2]}], tokenizer=lambda text: [-1])


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.jsonl"])
def test_sharegpt_replies_are_requests_whose_prompts_grow(tmp_path, name):
    said = [("system", "be kind"), ("human", "hi there"), ("gpt", "hello you"), ("human", "bye"), ("gpt", "see you")]
    rows = [
        {"id": "c", "conversations": [{"from": who, "value": text} for who, text in said]},
        {"id": "d", "conversations": []},
    ]
    if name.endswith("l"):
        path = write_rows(tmp_path / name, rows)
    else:
        path = write(tmp_path / name, json.dumps(rows, indent=1))
    trace = load_trace(path, tokenizer=words)
    first, second = trace
    whole = np.concatenate([first.prompt_ids(), first.output_ids])
    assert np.array_equal(second.prompt_ids()[: len(whole)], whole)
    assert (first.session_id, trace.visible.outputs) == ("c", "recorded")
    assert "1 rows dropped: conversation without a reply after a message" in trace.warnings


# the held slices


@needs_traces
@pytest.mark.trace
@pytest.mark.parametrize(
    ("name", "requests", "mean_input", "mean_output"),
    [
        ("AzureLLMInferenceTrace_code.csv", 8_819, 2_048, 27.9),
        ("AzureLLMInferenceTrace_conv.csv", 19_366, 1_155, 211.1),
        ("workload_me2_01_mixed.jsonl", 608, None, None),
    ],
)
def test_public_length_traces(name, requests, mean_input, mean_output):
    trace = load_trace(public_file(name))
    found = list(trace)
    assert len(found) == requests
    assert not trace.visible.reuse
    if mean_input:
        assert round(np.mean([r.num_prompt_tokens for r in found])) == mean_input
        assert round(float(np.mean([r.num_output_tokens for r in found])), 1) == mean_output


@needs_traces
@pytest.mark.trace
def test_public_weka_files_have_high_reuse_and_sub_agents(tmp_path):
    folder = tmp_path / "weka"
    folder.mkdir()
    total = 0
    for number in ("0001", "0002", "0006", "0007", "0008", "0277", "0291"):
        file = public_file(f"weka_trace_{number}.json")
        (folder / file.name).write_bytes(file.read_bytes())
        total += {"0001": 41, "0002": 33, "0006": 46, "0007": 12, "0008": 52, "0277": 53, "0291": 32}[number]
    trace = load_trace(folder)
    found = describe(trace)
    assert found["requests"] == total
    assert any("/" in (r.session_id or "") for r in trace)
    own = next(row for row in found["ceilings"] if row["page_size"] == 64)
    assert 0.85 < own["token_hit_rate"] < 0.99
    assert not [w for w in trace.warnings if "name content" in w]


@needs_traces
@pytest.mark.trace
def test_public_ragpulse_slice_is_read_as_prefixes(tmp_path):
    folder = tmp_path / "rag"
    folder.mkdir()
    source = public_file("ragpulse_0_trace.first1500.jsonl").parent
    for file in source.glob("ragpulse_*"):
        (folder / file.name).write_bytes(file.read_bytes())
    trace = load_trace(folder)
    found = describe(trace)
    assert found["requests"] == 1500
    whole = next(row for row in found["ceilings"] if row["page_size"] == 16)
    # A prefix cache gets about 31 % of this source; read as prefix ids it would be 72 %.
    assert 0.25 < whole["token_hit_rate"] < 0.37


def test_requests_without_ids_refuse_to_name_tokens():
    with pytest.raises(ValueError, match="lengths only"):
        Request("r", 0.0, 5, 1).prompt_ids()


def test_packed_csv_reads(tmp_path):
    text = "num_prefill_tokens,num_decode_tokens\n5,2\n"
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert rows_of(load_trace(tmp_path / "t.csv.gz")) == [(0.0, 5, 2)]
