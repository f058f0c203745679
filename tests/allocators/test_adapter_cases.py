"""Case adapter-06 as it was reported: its very ops, through both adapters over both designs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="adapters need torch")

from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Release, Sequence

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent.parent / "cases/cases.jsonl").read_text().splitlines())
}


class Play:
    """Carries out ops in words, and compares rows with the allocator after each."""

    def __init__(self, design: str, adapter: type, page_size: int, num_slots: int) -> None:
        self.pool = make_allocator({"kind": design, "page_size": page_size}, num_pages=num_slots // page_size)
        self.adapter = adapter(self.pool, max_requests=4, max_tokens=40, slots_by="torch")
        self.seqs: dict[str, Sequence] = {}
        self.live: set[str] = set()
        self.admitted: list[bool] = []

    def carry_out(self, op: str) -> None:
        if found := re.fullmatch(r"(\w) arrives, (\d+) (?:unrelated )?tokens", op):
            first = 100 * len(self.seqs)
            self.seqs[found[1]] = Sequence(found[1], range(first, first + int(found[2])))
            self._arrive(found[1])
        elif found := re.fullmatch(r"(\w) decodes to (\d+)", op):
            self._decode(self.seqs[found[1]], int(found[2]))
        elif found := re.fullmatch(r"preempt (\w)", op):
            self.pool.release([self.seqs[found[1]]], Release.PREEMPT)
            self.adapter.remove(self.seqs[found[1]])
            self.live.remove(found[1])
        elif found := re.fullmatch(r"(\w) arrives again with its (\d+) tokens", op):
            seq = self.seqs[found[1]]
            seq.resume()
            assert seq.num_tokens == int(found[2])
            self._arrive(found[1])
        else:
            assert op == "refused or admitted", op
        self.compare()

    def _arrive(self, name: str) -> None:
        seq = self.seqs[name]
        pin = self.pool.pin(seq)
        reserved = None if pin is None else self.pool.reserve([(seq, seq.num_prefill_tokens - pin.hit_tokens)])
        self.admitted.append(reserved is not None)
        if reserved is not None:
            self.adapter.update_all(reserved)
            self.adapter.update_all(self.pool.commit([(seq, seq.num_prefill_tokens)]))
            self.live.add(name)

    def _decode(self, seq: Sequence, length: int) -> None:
        while seq.num_tokens < length:
            seq.append(7)
            self.adapter.update_all(self.pool.reserve([(seq, 1)]))
            self.adapter.batch([seq], [1])
            self.adapter.update_all(self.pool.commit([(seq, seq.num_tokens)]))

    def compare(self) -> None:
        rows = {}
        for name, seq in self.seqs.items():
            assert (seq in self.adapter) == (name in self.live)
            if name in self.live:
                rows[name] = list(self.adapter.row(seq))
                assert rows[name] == list(self.pool.page_ids(seq))
        held = [page for row in rows.values() for page in row]
        assert len(held) == len(set(held))  # nothing is shared between unrelated requests
        self.adapter.check([self.seqs[name] for name in rows])
        self.pool.check()


@pytest.mark.parametrize("adapter", [BlockTableAdapter, ReqToTokenAdapter])
@pytest.mark.parametrize("design", ["block", "token"])
def test_case_adapter_06_no_row_is_left_behind_by_a_preemption(design, adapter):
    given = CASES["adapter-06"]["input"]
    play = Play(design, adapter, given["page_size"], given["num_slots"])
    for op in given["ops"]:
        play.carry_out(op)
    assert play.admitted == [True, True, False]  # 3 of 4 pages are b's: a's return is refused
    assert play.live == {"b"}
