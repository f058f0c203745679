"""KV events recorded from a server: both encodings, both engines' ways, and input that is broken or hostile."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from kvarena.experiments.compare import compare
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.describe import describe
from kvarena.experiments.traces.kv_events import UNKNOWN_PARENT
from kvarena.experiments.traces.packed import FIELDS
from kvarena.experiments.workloads import chat
from support.commands import invoke

Event = tuple[str, dict[str, Any]]


def stored(hashes: list[Any], parent: Any, tokens: list[int], size: int = 4, **more: Any) -> Event:
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
    return "BlockStored", {**fields, "lora_id": None, "medium": "GPU", **more}


def write(path: Path, batches: list[tuple[float, list[Event]]], *, form: str = "array", messages: bool = False) -> Path:
    packed = []
    for number, (ts, events) in enumerate(batches):
        if form == "map":
            batch: Any = {"ts": ts, "events": [{"type": kind, **fields} for kind, fields in events]}
        else:
            batch = [ts, [[kind, *(fields.get(n) for n in FIELDS[kind])] for kind, fields in events], 0]
        payload = msgpack.packb(batch)
        packed.append(msgpack.packb([b"kv", number.to_bytes(8, "big"), payload]) if messages else payload)
    data = b"".join(packed)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


TALK: list[tuple[float, list[Event]]] = [
    (100.0, [stored([11, 12], None, [1, 2, 3, 4, 5, 6, 7, 8])]),
    (100.5, [stored([13], 12, [20, 21, 22, 23])]),
    (101.0, [stored([14], 13, [24, 25, 26, 27]), ("BlockRemoved", {"block_hashes": [99], "medium": "GPU"})]),
    (109.0, [stored([31, 32], 14, [40, 41, 42, 43, 44, 45, 46, 47])]),
    (110.0, [stored([b"\x01" * 8, b"\x02" * 8], None, [1, 2, 3, 4, 9, 9, 9, 9], lora_name="fr")]),
]


@pytest.mark.parametrize("form", ["array", "map"])
@pytest.mark.parametrize("name", ["e.msgpack", "e.msgpack.gz"])
@pytest.mark.parametrize("messages", [False, True])
def test_prompts_and_replies_of_a_recording(tmp_path: Path, form: str, name: str, messages: bool) -> None:
    trace = load_trace(write(tmp_path / name, TALK, form=form, messages=messages))
    first, second, other = trace
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert first.output_ids.tolist() == [20, 21, 22, 23, 24, 25, 26, 27]
    assert second.token_ids.tolist() == [*first.token_ids, *first.output_ids, *range(40, 48)]
    assert (first.arrival_s, second.arrival_s, other.namespace) == (0.0, 9.0, "fr")
    assert trace.visible.outputs == "recorded"
    assert any("hit rates are too low" in warning for warning in trace.warnings)


def test_sglang_stores_a_reply_in_one_event(tmp_path: Path) -> None:
    batches = [
        (1.0, [("AllBlocksCleared", {}), stored([1, 2, 3], None, [7, 8, 9], size=1)]),
        (2.0, [stored([4, 5], 3, [10, 11], size=1)]),
        (3.0, [stored([6, 7], 5, [12, 13], size=1)]),
    ]
    path = write(tmp_path / "s.msgpack", batches)
    first, second = load_trace(path, engine="sglang")
    assert (first.token_ids.tolist(), first.output_ids.tolist()) == ([7, 8, 9], [10, 11])
    assert second.token_ids.tolist() == [7, 8, 9, 10, 11, 12, 13]
    assert [len(request.token_ids) for request in load_trace(path)] == [3, 5, 7], "vLLM's way reads it otherwise"


def test_events_of_a_whole_workload_give_its_prompts_back(tmp_path: Path) -> None:
    requests = list(chat.make(0, chat.Shape(num_sessions=30, message_median=120.0, retry_share=0.0)))
    known: set[bytes] = set()
    batches, prompts = [], []
    for request in requests:
        whole = np.concatenate([request.token_ids, request.output_ids])
        hashes = [whole[: 16 * (i + 1)].tobytes() for i in range(len(whole) // 16)]
        cut = len(request.token_ids) // 16
        have = next((i for i in range(cut) if hashes[i] not in known), cut)
        events = [_block_events(hashes, whole, have, cut)] if have < cut else []
        events += [_block_events(hashes, whole, i, i + 1) for i in range(max(cut, have), len(hashes))]
        known.update(hashes)
        batches.append((request.arrival_s, events))
        if cut - have > 1:
            prompts.append(request.token_ids[: 16 * cut].tolist())
    trace = load_trace(write(tmp_path / "chat.msgpack.gz", batches))
    assert trace.num_requests is not None
    found = [request.token_ids.tolist() for request in trace]
    missing = [prompt for prompt in prompts if prompt not in found]
    assert not missing
    assert len(prompts) > 0.9 * len(requests)
    described = describe(trace)
    assert described["visible"]["outputs"] == "recorded"
    assert described["replies_that_return"] > 0
    result = compare(trace, pool="1 GiB", kernel_batches=0, outputs="replay")
    assert result.summary["token_hit_rate"].min() > 0


def _block_events(hashes: list[bytes], whole: Any, start: int, end: int) -> Event:
    import hashlib

    names = [int.from_bytes(hashlib.sha256(h).digest()[:8], "big") for h in hashes[:end]]
    return stored(names[start:], names[start - 1] if start else None, whole[16 * start : 16 * end].tolist(), 16)


def test_what_came_before_the_recording_is_counted(tmp_path: Path) -> None:
    batches = [(1.0, [stored([5], 4, [1, 2, 3, 4]), stored([6], None, [1, 2, 3, 4])])]
    trace = load_trace(write(tmp_path / "late.msgpack", batches))
    assert trace.num_requests == 1
    assert f"1 rows dropped: {UNKNOWN_PARENT}" in trace.warnings


def test_missing_messages_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "gap.msgpack"
    payloads = [msgpack.packb([1.0 + n, [["BlockStored", [n], None, [n, n], 2, None, "GPU"]]]) for n in range(3)]
    path.write_bytes(b"".join(msgpack.packb([b"", (5 * n).to_bytes(8, "big"), p]) for n, p in enumerate(payloads)))
    assert "8 messages of the stream are missing from the recording" in load_trace(path).warnings


def test_tokens_are_forgotten_after_a_clear(tmp_path: Path) -> None:
    batches = [(1.0, [stored([1], None, [1, 2, 3, 4]), ("AllBlocksCleared", {}), stored([2], 1, [5, 6, 7, 8])])]
    trace = load_trace(write(tmp_path / "c.msgpack", batches))
    assert [request.token_ids.tolist() for request in trace] == [[1, 2, 3, 4]]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "at least one row, found none"),
    "text": (b"hello world", r"batch 0: expected a batch \[ts, events\]"),
    "reserved byte": (b"\xc1", "batch 0: expected msgpack, found a fault"),
    "cut": (msgpack.packb([1.0, [["BlockStored", [1], None, [1, 2], 2, None]]])[:-3], "the file's end inside one"),
    "deep": (b"\x91" * 5000 + b"\x01", "batch 0: expected msgpack, found a fault"),
    "huge length": (b"\xdd\xff\xff\xff\xff", "batch 0: expected msgpack, found a fault|end inside one"),
    "events no list": (msgpack.packb([1.0, 7]), "field 'events': expected a list"),
    "unknown event": (msgpack.packb([1.0, [["Boom"]]]), "field 'type': expected one of BlockStored"),
    "type no text": (msgpack.packb([1.0, [{"type": [1]}]]), "field 'type': expected one of"),
    "event a number": (msgpack.packb([1.0, [3]]), r"expected an event \[type"),
    "too few tokens": (msgpack.packb([1.0, [["BlockStored", [1, 2], None, [1, 2], 2]]]), "2 blocks of 2 token ids"),
    "negative token": (msgpack.packb([1.0, [["BlockStored", [1], None, [-1, 2], 2]]]), "token ids from 0"),
    "block size 0": (msgpack.packb([1.0, [["BlockStored", [1], None, [1], 0]]]), "field 'block_size'"),
    "no time": (msgpack.packb([None, [["BlockStored", [1], None, [1], 1]]]), "field 'ts': expected a finite"),
    "NaN time": (msgpack.packb([float("nan"), [["BlockStored", [1], None, [1], 1]]]), "field 'ts': expected a finite"),
    "hash a list": (msgpack.packb([1.0, [["BlockStored", [[1]], None, [1], 1]]]), "hashes"),
    "own parent": (
        msgpack.packb([1.0, [["BlockStored", [1], None, [1], 1], ["BlockStored", [2, 1], 1, [1, 2], 1]]]),
        "no block before itself",
    ),
    "a hash of two meanings": (
        msgpack.packb([1.0, [["BlockStored", [1], None, [1], 1], ["BlockStored", [1], None, [2], 1]]]),
        "the tokens that a hash had before",
    ),
    "message of rubbish": (msgpack.packb([b"t", b"\0" * 8, b"\xc1"]), "expected msgpack in the message"),
    "damaged gzip": (gzip.compress(msgpack.packb([1.0, []]))[:-9], "expected whole gzip data"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_one_clear_error(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "bad.msgpack"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        load_trace(path)
    assert "bad.msgpack" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_event_cut_anywhere_is_an_error_or_nothing(tmp_path: Path) -> None:
    data = write(tmp_path / "whole.msgpack", TALK[:2]).read_bytes()
    first = len(write(tmp_path / "one.msgpack", TALK[:1]).read_bytes())
    for end in range(1, len(data)):
        path = tmp_path / "cut.msgpack"
        path.write_bytes(data[:end])
        outcome = _load(path)
        assert (outcome == "1 requests") == (end in (first, len(data))), end
        assert outcome == "1 requests" or "cut.msgpack" in outcome


def _load(path: Path) -> str:
    try:
        return f"{load_trace(path).num_requests} requests"
    except ValueError as error:
        return str(error)


def test_describe_says_what_such_a_trace_can_show(tmp_path: Path) -> None:
    shown = invoke("trace", "describe", write(tmp_path / "e.msgpack", TALK)).stdout
    assert "outputs = recorded" in shown
    assert "hit rates are too low" in shown
