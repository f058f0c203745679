"""Every reader of the package with a small right input: what hostile-file tests and the fuzzer go through.

A reader takes a folder with its file and reads all of it. It may give anything, or raise a ValueError that names the
file; any other exception is a fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.traces import mooncake_row

MAX_REPLAYED = 2000  # scenario lines that are carried out after reading; more only takes time


@dataclass(frozen=True)
class Reader:
    """One reader. `files` are names and right contents, the first one is what gets damaged."""

    name: str
    files: dict[str, bytes]
    read: Callable[[Path], Any]
    rows: list[dict[str, Any]] = field(default_factory=list)  # of a reader of JSON lines

    @property
    def main(self) -> str:
        return next(iter(self.files))

    @property
    def binary(self) -> bool:
        """Whether its main file is no text."""
        return self.main.endswith((".msgpack", ".parquet"))

    def outcome(self, folder: Path, content: bytes) -> Any:
        """What reading `content` gives, or the error's text. Raises AssertionError for an error without its file,
        and whatever else the reader raised."""
        for name, right in self.files.items():
            (folder / name).write_bytes(right)
        (folder / self.main).write_bytes(content)
        try:
            return self.read(folder / self.main)
        except ValueError as error:
            text = str(error)
            if self.main not in text and folder.name not in text:
                raise AssertionError(f"{self.name}: the error does not name the file: {text[:300]}") from error
            if "Traceback" in text:
                raise AssertionError(f"{self.name}: a traceback for a message: {text[:300]}") from error
            return text


def _trace(format: str | None = None, **options: Any) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        from kvarena.experiments.traces import load_trace

        trace = load_trace(path, format, **options)
        rows = [(r.request_id, r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace]
        return rows, trace.warnings

    return read


def tokenizer(text: str) -> list[int]:
    """Bytes as token ids."""
    return list(text.encode("utf-8", "replace"))[:64] or [0]


def _scenario(path: Path) -> Any:
    from kvarena.experiments.scenarios import read_scenario, run_scenario

    scenario = read_scenario(path)
    scenario.ops[:] = scenario.ops[:MAX_REPLAYED]
    return [list(run_scenario(scenario, kind, check=False)) for kind in ("block", "token")]


def _sched(path: Path) -> Any:
    from kvarena.experiments.engine.scenario import read_sched_scenario

    return read_sched_scenario(path)


def _compare_config(path: Path) -> Any:
    from kvarena.experiments.config import load_config

    return load_config(path).resolved()


def _run_config(path: Path) -> Any:
    from kvarena.experiments.engine.run_config import load_run_config

    return load_run_config(path).resolved()


def _sweep_config(path: Path) -> Any:
    from kvarena.experiments.sweep_plan import load_sweep

    return [cell.key for cell in load_sweep(path)]


def _rate_config(path: Path) -> Any:
    from kvarena.experiments.rate import load_rate_plan

    return [repr(load_rate_plan(path))]


def _ladder_config(path: Path) -> Any:
    from kvarena.experiments.ladder import read_base

    return read_base(str(path))


def _measured_capacity(path: Path) -> Any:
    from kvarena.experiments.capacity_card import read_measured

    return read_measured(path)


def _step_times(path: Path) -> Any:
    from kvarena.experiments.engine.step_time import load_gpu_times

    return load_gpu_times(path)


def _recording(path: Path) -> Any:
    from kvarena.experiments.record import read_recording

    requests, about = read_recording(path)
    return [(r.request_id, r.session_id, r.kind, r.after, r.tail.tolist(), r.output.tolist()) for r in requests], about


def _layouts(path: Path) -> Any:
    from kvarena.experiments.aged import load_layouts

    return {name: (size, [slots.tolist() for slots in rows]) for name, (size, rows) in load_layouts(path).items()}


def _packed(*objects: Any) -> bytes:
    import msgpack

    return b"".join(map(msgpack.packb, objects))


def _recorded() -> bytes:
    """A recording of two requests, the second after the first."""
    from io import BytesIO

    import numpy as np
    import pyarrow.parquet as pq
    from kvarena.experiments.record import Recorded, recording_table

    ids = [np.array(row, np.int32) for row in ([1, 2, 3], [4, 5], [6], [7, 8])]
    rows = [Recorded("s0.t0", "s0", "chat", None, ids[0], ids[1]), Recorded("s0.t1", "s0", "chat", "s0.t0", *ids[2:])]
    stream = BytesIO()
    pq.write_table(recording_table(rows, {"model": "tiny", "seed": "0"}), stream)
    return stream.getvalue()


def _aged() -> bytes:
    """Slots of two requests of one allocator."""
    from io import BytesIO

    import pyarrow as pa
    import pyarrow.parquet as pq

    slots = pa.array([[16, 17, 18], [32, 33]], pa.list_(pa.int32()))
    columns = {"allocator": ["block-16"] * 2, "page_size": pa.array([16] * 2, pa.int32()), "request": ["a", "b"]}
    stream = BytesIO()
    pq.write_table(pa.table({**columns, "slots": slots}), stream)
    return stream.getvalue()


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "mooncake": ([mooncake_row(5, 600, [7, 8], session_id="a"), mooncake_row(9, 4, [7])], {}),
    "bailian": (
        [
            {"chat_id": 7, "parent_chat_id": -1, "turn": 1, "type": "text", **mooncake_row(0.5, 36, [1, 2, 3])},
            {"chat_id": 8, "parent_chat_id": 7, "turn": 2, "type": "text", **mooncake_row(9, 40, [1, 2, 4])},
        ],
        {},
    ),
    "hashes": ([mooncake_row(0.5, 20, [1, 2], output_hash_ids=[3]) | {"output_length": 12}], {}),
    "tokens": ([{"token_ids": [1, 2], "output_ids": [3], "arrival_s": 0.25}, {"token_ids": [1], "arrival_s": 1}], {}),
    "llmservingsim": ([{"arrival_time_ns": 5, "sub_requests": [{"input_toks": 3, "output_toks": 1}] * 2}], {}),
    "weka": (
        [
            {
                "id": "a",
                "block_size": 64,
                "requests": [
                    {"t": 0, "type": "n", "in": 70, "out": 1, "hash_ids": [1]},
                    {
                        "t": 1,
                        "type": "subagent",
                        "agent_id": "b",
                        "requests": [{"t": 0, "in": 9, "out": 1, "hash_ids": []}],
                    },
                ],
            }
        ],
        {},
    ),
    "openai": (
        [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "id": "a"}],
        {"tokenizer": tokenizer},
    ),
    "sharegpt": (
        [{"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}],
        {"tokenizer": tokenizer},
    ),
}
CSV = {
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2025-03-01 10:00:00.5,10,2\n2025-03-01 10:00:01.1234567,11,3\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n3,GPT-4,4,8,12,API log\n",
    "vidur": b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,3\n1.25,7,1\n",
}
RAGPULSE = {
    "0_trace.jsonl": [
        {
            "timestamp": "7",
            "input_length": 9,
            "output_length": 1,
            "hash_ids": {"sys_prompt": [1], "passages_ids": [2], "history": [], "web_search": [], "user_input": []},
            "session_id": "s",
        }
    ],
    "1_sys_prompt.jsonl": [{"sys_prompt_id": 1, "token_length": 4}],
    "2_passages.jsonl": [{"passage_id": 2, "token_length": 3}],
    "3_history.jsonl": [],
    "4_user_input.jsonl": [],
    "5_web_search.jsonl": [],
}
SCENARIO = [
    {"format": "kv-scenario/1", "name": "s", "num_slots": 16, "page_size": 4, "max_model_len": 64,
     "enable_prefix_cache": True},
    {"op": "arrive", "id": "a", "tokens": [1, 2, 3, 4, 5], "key": {"salt": "x", "mm": [[1, 2, "i"]]}, "chunk": 4},
    {"op": "decode", "id": "a", "token": 6},
    {"op": "preempt", "id": "a"},
    {"op": "arrive", "id": "a", "tokens": [1, 2, 3, 4, 5]},
    {"op": "finish", "id": "a"},
    {"op": "reset"},
]  # fmt: skip
SCHED = [
    {"format": "kv-sched/1", "name": "s", "num_slots": 64, "page_size": 4, "max_model_len": 64,
     "max_num_batched_tokens": 32, "max_num_seqs": 4},
    {"step": 0, "id": "a", "tokens": [1, 2, 3], "max_tokens": 2, "output": [8, 9]},
    {"step": 1, "id": "b", "tokens": [1, 2, 4], "max_tokens": 1, "output": [8]},
]  # fmt: skip
COMPARE = b"""schema_version = 1
[workload]
trace = "chat"
options = { num_sessions = 4 }
seeds = 2
[pool]
pool = ["1 GiB", "10 %"]
model = "llama-3-8b"
[engine]
live = 4
outputs = "replay"
[[allocators]]
kind = "block"
page_size = 16
[[allocators]]
name = "sglang"
"""
RUN = b"""schema_version = 1
preset = "vllm-0.32.0"
[workload]
trace = "chat"
[pool]
pool = "8 GiB"
[engine]
max_num_seqs = 16
speed = 8.0
ttft_ms = 500.0
[allocator]
kind = "block"
page_size = 16
"""
STORED = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU"]
REPLY = ["BlockStored", [13], 12, [5, 6], 2, None, "GPU"]
EVENTS = ([1.5, [STORED, REPLY]], [2.0, [["BlockRemoved", [13], "GPU"], ["AllBlocksCleared"]]], [2.5, [STORED]])
MESSAGES = tuple(
    [b"kv", number.to_bytes(8, "big"), _packed({"ts": 1.0 + number, "events": [
        {"type": "BlockStored", "block_hashes": [b"h%d" % number], "parent_block_hash": None, "token_ids": [1, number],
         "block_size": 2, "lora_name": "a"}]})]
    for number in range(2)
)  # fmt: skip
STEP_TIMES = {
    "schema_version": 2,
    "decode": {"base_us": 10.5, "token_us": {"128": 0.016}, "l2_gbps": 13072.1, "pages": {"req_to_token/1": 1.0}},
    "extend": {"base_us": 11.7, "gbps": 8000.0, "sharpness": 2.3},
    "linear_tflops": 752.4,
    "source": "a card",
}
MEASURED = {
    "schema_version": 1,
    "kind": "capacity",
    "gpu": {"name": "a card", "total_bytes": 80_000_000_000},
    "cells": [{"panel": "equal", "load": "short", "design": "block-16", "predicted": 9, "measured": 9}],
}
SWEEP = COMPARE + b'[sweep]\nlive = [1, 2]\n"allocators.0.page_size" = [1, 16]\n'


def readers() -> dict[str, Reader]:
    """All readers by name."""
    found = [
        Reader(name, {"t.jsonl": lines(*rows)}, _trace(None, **options), rows) for name, (rows, options) in ROWS.items()
    ]
    found += [Reader(name, {"t.csv": data}, _trace()) for name, data in CSV.items()]
    parts = {name: lines(*rows) for name, rows in RAGPULSE.items()}
    found.append(Reader("ragpulse", parts, _trace("ragpulse"), RAGPULSE["0_trace.jsonl"]))
    found.append(Reader("weka document", {"t.json": json.dumps(ROWS["weka"][0][0]).encode()}, _trace()))
    found.append(Reader("kv events", {"t.msgpack": _packed(*EVENTS)}, _trace()))
    found.append(Reader("kv events of sglang", {"t.msgpack": _packed(*EVENTS)}, _trace("kv_events", engine="sglang")))
    found.append(Reader("kv event messages", {"t.msgpack": _packed(*MESSAGES)}, _trace()))
    found.append(Reader("recording", {"r.parquet": _recorded()}, _recording))
    found.append(Reader("aged layouts", {"r.parquet": _aged()}, _layouts))
    found.append(Reader("scenario", {"s.jsonl": lines(*SCENARIO)}, _scenario, SCENARIO))
    found.append(Reader("sched scenario", {"s.jsonl": lines(*SCHED)}, _sched, SCHED))
    configs = {"compare config": (COMPARE, _compare_config), "run config": (RUN, _run_config)}
    configs["sweep config"] = (SWEEP, _sweep_config)
    configs["rate config"] = (RUN + b"[rate]\nshares = [0.5, 1.0]\nhit_rates = [0.3]\n", _rate_config)
    ends = b'[ladder]\nfrom = "vllm"\nto = "sglang"\nfields = ["page_size"]\n[ladder.rungs]\nlive = [1, 8]\n'
    configs["ladder config"] = (COMPARE + ends, _ladder_config)
    found += [Reader(name, {"c.toml": data}, read) for name, (data, read) in configs.items()]
    documents = {"step times": (STEP_TIMES, _step_times), "measured capacity": (MEASURED, _measured_capacity)}
    found += [Reader(name, {"d.json": json.dumps(data).encode()}, read) for name, (data, read) in documents.items()]
    return {reader.name: reader for reader in found}
