"""Runs neutral scenarios through an allocator and writes decision logs.

A scenario is a JSON-lines file: a header, then one op a line (arrive, decode, finish, preempt, reset). The
decision log answers each op with what the allocator did, in the format in which the upstreams' own decisions
were recorded, so that the two can be compared line by line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import EventKind, Gate, KVAllocator, Pin, Release, Sequence
from kvarena.experiments.outputs import refuse_other_file, whole

SCENARIO_FORMAT = "kv-scenario/1"
MAX_SIZE = 2**23  # of a scenario's pool, in slots: an 8B model's KV would fill a TiB. A header asks for memory.
MAX_ROWS = 10**6  # of a scenario, which is held whole
RETRACT_DECODE_STEPS = 20  # SGLang evicts this many tokens for each request left after a preemption
_PEERS = {"block": "vllm 0.32.0", "token": "sglang 0.5.22"}


@dataclass(frozen=True)
class Scenario:
    """A parsed scenario file: `header` as written, `ops` with the file line of each."""

    path: Path
    header: dict[str, Any]
    ops: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".gz").removesuffix(".jsonl")


def read_scenario(path: Path) -> Scenario:
    """Read a scenario (.jsonl or .jsonl.gz). Raises ValueError naming file and line."""
    rows = scenario_rows(path)
    if not rows:
        raise ValueError(f"{path}: empty; expected a header line with format {SCENARIO_FORMAT!r}")
    header = rows[0][1]
    if header.get("format") != SCENARIO_FORMAT:
        raise ValueError(f"{path}:1: format: expected {SCENARIO_FORMAT!r}, found {str(header.get('format'))[:60]!r}")
    check_sizes(header, ("num_slots", "page_size"), f"{path}:1")
    return Scenario(path, header, rows[1:])


def scenario_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank. Raises ValueError with file and line, as trace files do."""
    from kvarena.experiments.traces.lines import TextFile
    from kvarena.experiments.traces.rows import parse_object

    rows: list[tuple[int, dict[str, Any]]] = []
    for number, text in TextFile(path).lines():
        if len(rows) == MAX_ROWS:
            raise ValueError(f"{path}:{number}: expected at most {MAX_ROWS} lines, found more")
        rows.append((number, parse_object(text, f"{path}:{number}")))
    return rows


def check_sizes(header: dict[str, Any], names: Iterable[str], where: str) -> None:
    """Raise ValueError unless the header's sizes are whole numbers from 1 to MAX_SIZE."""
    for name in names:
        value = header.get(name)
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise ValueError(f"{where}: {name}: expected a whole number from 1 to {MAX_SIZE}, found {str(value)[:60]}")


_WHOLE = ("a whole number", lambda value: type(value) is int and -(2**31) <= value < 2**31)
_FIELDS: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "arrive": {"id": ("text", lambda value: isinstance(value, str)), "tokens": ("a list", lambda v: type(v) is list)},
    "decode": {"id": ("text", lambda value: isinstance(value, str)), "token": _WHOLE},
    "finish": {"id": ("text", lambda value: isinstance(value, str))},
    "preempt": {"id": ("text", lambda value: isinstance(value, str))},
    "reset": {},
}


def check_op(op: dict[str, Any]) -> None:
    """Raise ValueError naming the field of an op that is missing or of another type."""
    verb = op.get("op")
    if not isinstance(verb, str) or verb not in _FIELDS:
        raise ValueError(f"op: expected {', '.join(_FIELDS)}, found {str(verb)[:60]!r}")
    for name, (expected, fits) in _FIELDS[verb].items():
        if not fits(op.get(name)):
            raise ValueError(f"{verb}: {name}: expected {expected}, found {str(op.get(name))[:60]!r}")
    chunk = op.get("chunk")
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"{verb}: chunk: expected a whole number of at least 1, found {str(chunk)[:60]!r}")


class ScenarioRunner:
    """Replays one scenario through one allocator; `decide(op)` answers one line of the decision log."""

    def __init__(self, allocator: KVAllocator, gate: Gate | None = None) -> None:
        self.allocator = allocator
        self.gate = gate
        self.live: dict[str, Sequence] = {}
        self.preempted: dict[str, Sequence] = {}
        allocator.events.enabled = True

    @classmethod
    def for_scenario(
        cls,
        header: dict[str, Any],
        kind: str,
        *,
        page_size: int | None = None,
        admission: str = "exact",
        need_sort: bool = False,
        **overrides: Any,
    ) -> ScenarioRunner:
        """The allocator that a header asks for. `page_size` overrides the header's; num_slots stays."""
        size = page_size or header["page_size"]
        spec: dict[str, Any] = {"kind": kind, "page_size": size, **overrides}
        spec["prefix_cache"] = header.get("enable_prefix_cache", True)
        if not isinstance(spec["prefix_cache"], bool):
            raise ValueError(f"enable_prefix_cache: expected true or false, found {str(spec['prefix_cache'])[:60]!r}")
        if header.get("sliding_window") is not None:
            spec["sliding_window"] = header["sliding_window"]
            spec["retention_interval"] = header.get("retention_interval")
        if need_sort:
            spec["need_sort"] = True
        num_pages = header["num_slots"] // size
        if num_pages < 1:
            raise ValueError(f"num_slots {header['num_slots']} holds no page of {size} tokens")
        # SGLang's scheduler asks for a page more than the prompt, in tokens, strictly.
        gate = Gate(page_rounded=False, strict=True, headroom=size) if admission == "sglang" else Gate()
        return cls(make_allocator(spec, num_pages=num_pages), gate)

    def decide(self, op: dict[str, Any]) -> dict[str, Any]:
        """Carry out one op; returns its decision-log line without `i`."""
        self.allocator.events.drain()
        verb = op["op"]
        if verb == "reset":
            line: dict[str, Any] = {"ok": self.allocator.reset(), "hit": 0}
        elif verb == "arrive":
            line = self._arrive(op)
        elif verb in ("decode", "finish", "preempt"):
            if op["id"] not in self.live:
                line = {"ok": False, "skipped": True, "hit": 0}
            else:
                line = getattr(self, f"_{verb}")(op, self.live[op["id"]])
        else:
            raise ValueError(f"op: expected arrive, decode, finish, preempt or reset, found {verb!r}")
        capacity = self.allocator.capacity()
        line["free"], line["evictable"] = capacity.free, capacity.evictable
        line["evicted"] = [
            page for event in self.allocator.events.rows if event.kind is EventKind.EVICT for page in event.page_ids
        ]
        return line

    def _arrive(self, op: dict[str, Any]) -> dict[str, Any]:
        if op["id"] in self.live:
            return self._refuse_live(op)
        seq = self._sequence(op)
        pin = self.allocator.pin(seq, self.gate)
        if pin is None or not self._prefill(seq, pin, op.get("chunk")):
            return {"ok": False, "hit": 0, "pages": []}
        self.live[seq.request_id] = seq
        return {"ok": True, "hit": pin.hit_tokens, "pages": list(self.allocator.page_ids(seq))}

    def _refuse_live(self, op: dict[str, Any]) -> dict[str, Any]:
        """A second request under a live id. Where the room test turns it away the id never mattered, as in the
        upstreams' logs (one scenario does this under SGLang's admission rule); else it is an error."""
        seq = sequence_of({**op, "id": f"{op['id']} (arrived again)"})
        if self.allocator.pin(seq, self.gate) is not None:
            raise ValueError(f"arrive: request {op['id']!r} is already live")
        return {"ok": False, "hit": 0, "pages": []}

    def _sequence(self, op: dict[str, Any]) -> Sequence:
        seq = sequence_of(op)
        before = self.preempted.pop(seq.request_id, None)
        if before is not None and before.token_ids == seq.token_ids:
            before.resume()
            return before
        return seq

    def _prefill(self, seq: Sequence, pin: Pin, chunk: int | None) -> bool:
        end = seq.num_prefill_tokens
        step = end
        if chunk is not None:
            step = self._chunk_tokens(chunk)
        while seq.num_computed_tokens < end:
            n = min(step, end - seq.num_computed_tokens)
            if self.allocator.extend(seq, n) is None:
                self._give_up(seq, pin)
                return False
            self.allocator.commit([(seq, seq.num_computed_tokens + n)])
        return True

    def _give_up(self, seq: Sequence, pin: Pin) -> None:
        if seq.num_computed_tokens > pin.hit_tokens:  # an earlier chunk was taken
            self.allocator.release([seq], Release.ABORT)

    def _chunk_tokens(self, chunk: int) -> int:
        if self.allocator.kind != "token":
            return chunk
        size = self.allocator.page_size
        return max(chunk // size, 1) * size

    def _decode(self, op: dict[str, Any], seq: Sequence) -> dict[str, Any]:
        seq.append(op["token"])
        reservation = self.allocator.extend(seq, 1)
        if reservation is None:
            seq.pop()
            return {"ok": False, "hit": 0, "new_pages": []}
        self.allocator.commit([(seq, seq.num_tokens)])
        return {"ok": True, "hit": 0, "new_pages": list(reservation.page_ids)}

    def _finish(self, op: dict[str, Any], seq: Sequence) -> dict[str, Any]:
        self.allocator.release([self.live.pop(op["id"])], Release.FINISH)
        return {"ok": True, "hit": 0}

    def _preempt(self, op: dict[str, Any], seq: Sequence) -> dict[str, Any]:
        self.allocator.release([self.live.pop(op["id"])], Release.PREEMPT)
        if self.allocator.kind == "token":
            self.allocator.evict(RETRACT_DECODE_STEPS * len(self.live))
        else:
            # Only vLLM's rules know the request when it comes back.
            self.preempted[op["id"]] = seq
        return {"ok": True, "hit": 0}


def sequence_of(op: dict[str, Any]) -> Sequence:
    """The sequence that an `arrive` op describes, with its namespace and extra keys."""
    key = op.get("key", {})
    if not isinstance(key, dict):
        raise ValueError(f"arrive {op['id']!r}: key: expected an object with lora, salt or mm, found {str(key)[:60]!r}")
    unknown = set(key) - {"lora", "salt", "mm"}
    if unknown:
        raise ValueError(f"arrive {op['id']!r}: key: expected lora, salt or mm, found {sorted(unknown)}")
    namespace = tuple((name, _frozen(key[name])) for name in ("lora", "salt") if name in key) or None
    listed = key.get("mm", [])
    if not isinstance(listed, list):
        raise ValueError(f"arrive {op['id']!r}: key.mm: expected a list, found {str(listed)[:60]!r}")
    items = [_item(op, item) for item in listed]
    return Sequence(op["id"], op["tokens"], namespace=namespace, extra_keys=items)


def _item(op: dict[str, Any], item: Any) -> tuple[int, int, Any]:
    """An image's place, which lies in the prompt, and its content."""
    if isinstance(item, list) and len(item) == 3 and all(type(part) is int for part in item[:2]):
        offset, length, content = item
        if offset >= 0 and length >= 1 and offset + length <= len(op["tokens"]) and isinstance(content, str | int):
            return offset, length, content
    raise ValueError(
        f"arrive {op['id']!r}: key.mm: expected [offset, length, id] inside the prompt, found {str(item)[:60]!r}"
    )


def _frozen(value: Any) -> Any:
    """As a namespace has to be: hashable, all the way down."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(part)) for name, part in value.items())
    return value


def run_scenario(scenario: Scenario, kind: str, *, check: bool = False, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield the decision log of a scenario, header line first. `check` verifies the allocator after every op."""
    try:
        runner = ScenarioRunner.for_scenario(scenario.header, kind, **options)
    except ValueError as error:
        raise ValueError(f"{scenario.path}:1: {error}") from None
    size = runner.allocator.page_size
    yield {**scenario.header, "page_size": size, "peer": f"kvarena {kind} ({_PEERS.get(kind, 'own')} rules)"}
    for index, (number, op) in enumerate(scenario.ops, 1):
        try:
            check_op(op)
            line = runner.decide(op)
        except ValueError as error:
            raise ValueError(f"{scenario.path}:{number}: {error}") from None
        if check:
            runner.allocator.check()
        yield {"i": index, **line}


def scenario_files(path: Path) -> list[Path]:
    """The scenario itself, or all scenarios of a folder by name. Raises ValueError when there is none."""
    if path.is_file():
        return [path]
    files = sorted(p for p in path.glob("*.jsonl*") if p.name.endswith((".jsonl", ".jsonl.gz")))
    if not files:
        raise ValueError(f"{path}: no scenario found; expected a .jsonl or .jsonl.gz file, or a folder of them")
    return files


def write_decisions(lines: Iterable[dict[str, Any]], out: Path) -> None:
    """`write_log` for decisions. Raises ValueError when what is there is no log of ours: a scenario, a peer's log."""
    refuse_other_file(out, [b'"peer":"kvarena'])
    write_log(lines, out)


def write_log(lines: Iterable[dict[str, Any]], out: Path) -> None:
    """Write a decision log under a temporary name and rename it, so that a half log never stands."""
    with whole(out) as partial, open(partial, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
