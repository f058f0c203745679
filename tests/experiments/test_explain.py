"""Every token that was not served has exactly one reason, and the right one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from kvarena.allocators.config import block, token
from kvarena.allocators.interface import AllocatorError
from kvarena.experiments.compare import compare
from kvarena.experiments.config import Config, EngineConfig, config_from_keywords
from kvarena.experiments.explain import REASONS, _numbered, explain, explain_replay, summarise
from kvarena.experiments.ledger import Ledger, WatchedAllocator
from kvarena.experiments.metrics import misses
from kvarena.experiments.page_names import name_pages
from kvarena.experiments.replay import Replay
from kvarena.experiments.results import finished_folder, load_result
from kvarena.experiments.scenarios import read_scenario, scenario_files, sequence_of
from kvarena.experiments.specs import allocator_entry
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.base import Request
from support.requests import request
from support.small import OPTIONS, small
from support.third_party import StackAllocator
from support.traces import needs_traces, public_file

GOLDEN = Path(__file__).parents[1] / "golden" / "scenarios"
DESIGNS = [f(page_size=size) for f in (block, token) for size in (1, 16, 64)]


def ids_of(design):
    return f"{design.kind}-{design.page_size}"


def told(requests, design, num_pages, **engine):
    engine = EngineConfig(**{"too_long": "reject", **engine})
    return explain_replay(requests, allocator_entry(design), num_pages, engine)


def spans(found, name):
    return [(s.start, s.end, s.reason) for s in found.spans[found.number_of(name)]]


def assert_adds_up(found) -> None:
    """Hits and reasons of every request cover its prompt exactly once, in the table and in the spans."""
    table = found.table
    assert (table["hit_tokens"] + table[list(REASONS)].sum(axis=1) == table["num_prompt_tokens"]).all()
    for row, own in zip(table.itertuples(), found.spans, strict=True):
        covered = [at for span in own for at in range(span.start, span.end)]
        assert covered == list(range(row.hit_tokens if row.admitted else 0, row.num_prompt_tokens))
        assert all(span.reason in REASONS for span in own)


def assert_first_seen_by_brute_force(found, *, replies: bool) -> None:
    """`first_seen` is what no earlier request's text begins with. For a run where each ends before the next."""
    earlier: list[list[int]] = []
    for r, row in zip(found.requests, found.table.itertuples(), strict=True):
        prompt = r.prompt_ids().tolist()
        best = max((common(prompt, text) for text in earlier), default=0)
        if row.admitted:
            assert row.first_seen == len(prompt) - best
            reply = r.reply_ids().tolist()[:-1] if replies else []
            earlier.append(prompt + reply)


def common(left, right):
    at = 0
    while at < min(len(left), len(right)) and left[at] == right[at]:
        at += 1
    return at


# --- one reason each, worked out by hand ---


def test_rounding_and_the_last_token():
    rows = [request("a", range(40)), request("b", range(40)), request("c", [*range(20), 99])]
    found = told(rows, block(page_size=16), 32)
    assert spans(found, "a") == [(0, 40, "first_seen")]
    assert spans(found, "b") == [(32, 39, "rounding"), (39, 40, "last_token")]
    assert spans(found, "c") == [(16, 20, "rounding"), (20, 21, "first_seen")]
    single = told(rows, token(page_size=1), 512)
    assert spans(single, "b") == [(39, 40, "last_token")]
    assert spans(single, "c") == [(20, 21, "first_seen")]


def test_a_full_page_that_only_the_last_token_rule_forbids_is_rounded_down_but_for_that_token():
    found = told([request("a", range(32)), request("b", range(32))], block(page_size=16), 32)
    assert spans(found, "b") == [(16, 31, "rounding"), (31, 32, "last_token")]


def test_another_namespace_is_named_as_the_reason():
    rows = [request("a", range(20), namespace="x"), request("b", [*range(18), 7, 7], namespace=1)]
    rows += [request("c", range(20), namespace=True), request("d", range(20), namespace="x")]
    for design in (block(page_size=4), token(page_size=4)):
        found = told(rows, design, 64)
        assert spans(found, "b") == [(0, 18, "namespace"), (18, 20, "first_seen")]
        assert spans(found, "c") == [(0, 20, "namespace")]
        assert spans(found, "d") == [(16, 19, "rounding"), (19, 20, "last_token")]


@pytest.mark.parametrize("design", [block(page_size=4), token(page_size=4)], ids=ids_of)
def test_an_eviction_names_who_needed_the_room_and_when(design):
    rows = [request("a", range(12), arrival_s=0.5), request("b", range(100, 112), arrival_s=1.5)]
    rows += [request("c", range(200, 212), arrival_s=2.5), request("d", [*range(12), 5], arrival_s=3.5)]
    found = told(rows, design, 7)  # the token design asks for a page more than b needs
    number = found.number_of("d")
    evicted = [span for span in found.spans[number] if span.reason == "evicted"]
    assert {span.by for span in evicted} == {2}
    assert {span.step for span in evicted} == {2}
    assert {span.source for span in evicted} == {0}
    assert found.table["evicted_by"].tolist() == ["", "", "", "c"]
    text = "\n".join(found.tell("d"))
    assert "was cached, and its page was evicted; published by a; evicted when c arrived (2.500 s)" in text


def test_generated_tokens_of_a_live_request_were_computed_and_not_published_yet():
    first = request("a", range(8), range(100, 108))
    later = request("b", [*range(8), *range(100, 104), 9])
    found = told([first, later], token(page_size=4), 64, live=2, outputs="replay")
    # Half of the reply is computed when b comes: tokens 8 to 11. The token design publishes at the end.
    assert spans(found, "b") == [(8, 12, "never_published"), (12, 13, "first_seen")]
    assert "computed first by a" in "\n".join(found.tell("b"))
    after = told([first, later], token(page_size=4), 64, outputs="replay")
    assert spans(after, "b") == [(12, 13, "first_seen")]


def test_reply_tokens_that_were_not_computed_yet_count_as_never_seen():
    first = request("a", range(8), range(100, 116))
    later = request("b", [*range(8), *range(100, 116)])
    found = told([first, later], block(page_size=4), 64, live=2, outputs="replay")
    assert found.table["first_seen"].tolist() == [8, 8]


def test_a_request_that_never_fits_is_refused_with_all_its_tokens():
    found = told([request("a", range(4)), request("b", range(40)), request("c", [*range(4), 8])], block(page_size=4), 3)
    assert spans(found, "b") == [(0, 40, "refused")]
    assert found.table["admitted"].tolist() == [True, False, True]
    assert spans(found, "c") == [(4, 5, "first_seen")]


def test_designs_that_keep_nothing_say_so():
    rows = [request("a", range(20)), request("b", range(20))]
    for design in (block(page_size=4, prefix_cache=False), {"kind": "exact", "page_size": 4}):
        assert spans(told(rows, design, 64), "b") == [(0, 16, "not_kept"), (16, 19, "rounding"), (19, 20, "last_token")]


def test_pages_behind_a_window_are_not_published_or_behind_a_gap():
    rows = [request("a", range(40)), request("b", [*range(40), 1]), request("c", [*range(30), 1])]
    found = told(rows, block(page_size=4, sliding_window=8), 64)
    assert_adds_up(found)
    assert found.table["never_published"].tolist()[2] > 0


def test_somebody_elses_allocator_is_explained_too():
    rows = [request("a", range(20)), request("b", range(20))]
    found = explain_replay(rows, allocator_entry(StackAllocator), 64, EngineConfig())
    assert_adds_up(found)


# --- every request of whole traces ---


@cache
def chat(**fields):
    return list(load_trace("chat", num_sessions=14, num_system_prompts=3, max_message=120, max_reply=80, **fields))


@pytest.mark.parametrize("design", DESIGNS, ids=ids_of)
@pytest.mark.parametrize("engine", [{}, {"outputs": "replay"}, {"live": 5}, {"outputs": "replay", "live": 5}], ids=str)
def test_reasons_add_up_for_every_request_of_chat(design, engine):
    found = told(chat(), design, -(-4096 // design.page_size), **engine)
    assert_adds_up(found)
    totals = found.table[list(REASONS)].sum()
    assert totals["evicted"] > 0
    assert (totals["rounding"] > 0) == (design.page_size > 1)
    assert (found.table["evicted_by"] != "").any()
    if "live" not in engine:
        assert_first_seen_by_brute_force(found, replies="outputs" in engine)


def from_scenario(path: Path) -> tuple[list[Request], int]:
    """A golden scenario as a trace: each arrival with the tokens that it decodes, and the slots of its pool."""
    scenario = read_scenario(path)
    rows: list[list] = []
    live: dict[str, int] = {}
    for number, op in scenario.ops:
        if op["op"] == "arrive":
            seq = sequence_of({**op, "key": {k: v for k, v in op.get("key", {}).items() if k != "mm"}})
            live[op["id"]] = len(rows)
            rows.append([f"{op['id']}@{number}", op["tokens"], [], seq.namespace])
        elif op["op"] == "decode" and op["id"] in live:
            rows[live[op["id"]]][2].append(op["token"])
    return [request(i, p, r, namespace=n) for i, p, r, n in rows], scenario.header["num_slots"]


@pytest.mark.parametrize("design", DESIGNS, ids=ids_of)
def test_reasons_add_up_for_every_request_of_the_golden_scenarios(design):
    evicted = 0
    for path in scenario_files(GOLDEN):
        requests, slots = from_scenario(path)
        if slots < design.page_size or len(requests) > 1500:
            continue
        for engine in ({"live": 3, "outputs": "replay"}, {}):
            found = told(requests, design, slots // design.page_size, **engine)
            assert_adds_up(found)
            evicted += found.table["evicted"].sum()
    assert evicted > 0


@pytest.mark.trace
@needs_traces
@pytest.mark.parametrize("design", DESIGNS, ids=ids_of)
@pytest.mark.parametrize(("name", "count", "tokens"), [("conversation", 500, 2_000_000), ("synthetic", 300, 500_000)])
def test_reasons_add_up_for_every_request_of_mooncake(design, name, count, tokens):
    requests = list(load_trace(public_file(f"{name}_trace.jsonl"), limit=count))
    found = told(requests, design, tokens // design.page_size)
    table = found.table
    assert (table["hit_tokens"] + table[list(REASONS)].sum(axis=1) == table["num_prompt_tokens"]).all()
    assert table["evicted"].sum() > 0
    assert table["never_published"].sum() == 0


@pytest.mark.trace
@needs_traces
@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_reasons_add_up_for_the_whole_trace_at_its_own_grain(kind, name):
    config = config_from_keywords(
        {"trace": str(public_file(f"{name}_trace.jsonl")), "unit": "ids", "pool": "10 %",
         "allocators": [{"kind": kind, "page_size": 1}], "too_long": "reject"}
    )  # fmt: skip
    (found,) = explain(config)
    table = found.table
    assert len(table) == {"conversation": 12_031, "synthetic": 3_993}[name]
    assert (table["hit_tokens"] + table[list(REASONS)].sum(axis=1) == table["num_prompt_tokens"]).all()
    assert table["rounding"].sum() == 0


# --- the reasons are checked, and can fail ---


class _Liar(WatchedAllocator):
    """Says of its events what is not so."""

    def __init__(self, inner, ledger, kind):
        super().__init__(inner, ledger)
        real, log = ledger.read, self

        def read(events, rows):
            log.dropped = [e for e in events if e.kind.value == kind]
            real([e for e in events if e.kind.value != kind], rows)

        ledger.read = read


@pytest.mark.parametrize(
    ("kind", "message"),
    [("publish", "not all of their pages are cached|nobody published them"), ("evict", "serve another text|were not")],
)
@pytest.mark.parametrize("design", [block(page_size=4), token(page_size=4)], ids=ids_of)
def test_an_event_that_is_missing_is_noticed(kind, message, design):
    rows = [r for r in chat() if r.num_prompt_tokens < 400]
    ledger = Ledger(name_pages(rows, 4), 120, allocator_entry(design))
    liar = _Liar(allocator_entry(design).build(120), ledger, kind)
    replay = Replay(liar, EngineConfig(too_long="reject"))
    with pytest.raises(AllocatorError, match=message):
        replay.run(_numbered(rows, ledger))


def test_a_hit_on_what_nobody_computed_is_noticed():
    rows = [request("a", range(12))]
    ledger = Ledger(name_pages(rows, 4), 8, allocator_entry(block(page_size=4)))
    inner = allocator_entry(block(page_size=4)).build(8)
    seq = sequence_of({"id": "a", "tokens": list(range(12))})
    inner.pin(seq)
    with pytest.raises(AllocatorError, match="hit 4 tokens; 0 were computed before"):
        ledger.arrive(seq, 4)


# --- beside a result ---


@cache
def result():
    return small(pool=["250 MiB", "450 MiB"], seeds=2, too_long="reject")


def test_explaining_a_result_gives_its_hits_and_splits_as_why_does():
    for pool in result().pools:
        for found in explain(result(), pool=pool):
            assert_adds_up(found)
            for row in found.table[found.table["admitted"]].itertuples():
                split = misses(
                    row.num_prompt_tokens,
                    row.num_prompt_tokens - row.first_seen,
                    row.hit_tokens,
                    found.entry.page_size,
                    found.entry.last_token_rule,
                )
                assert (split.rounding, split.last_token) == (row.rounding, row.last_token)
                assert split.lost == row.evicted + row.behind_gap + row.never_published


def test_a_saved_result_is_explained_like_the_one_in_memory(tmp_path):
    with finished_folder(tmp_path / "out") as folder:
        result()._write_tables(folder)
    for a, b in zip(explain(load_result(tmp_path / "out")), explain(result()), strict=True):
        assert a.table.equals(b.table)
        assert a.spans == b.spans


def test_a_config_is_explained_without_a_result():
    config = config_from_keywords({"options": OPTIONS, "pool": "450 MiB", "seeds": [0]})
    a, b = explain(config), explain(result(), pool=450 * 2**20)
    assert [one.table["hit_tokens"].tolist() for one in a] == [one.table["hit_tokens"].tolist() for one in b]


def test_a_result_that_does_not_come_out_again_is_refused():
    changed = small(pool=["450 MiB"])
    changed.requests.loc[5, "hit_tokens"] += 16
    with pytest.raises(ValueError, match=r"does not come out again: request .* hit \d+ tokens there and \d+ here"):
        explain(changed)


def test_what_is_not_there_is_named():
    with pytest.raises(ValueError, match="allocator: expected one of vllm, sglang, found 'vlm'"):
        explain(result(), allocator="vlm")
    with pytest.raises(ValueError, match="pool: expected one of 262144000, 471859200, found 7"):
        explain(result(), pool=7)
    with pytest.raises(ValueError, match="seed: expected one of 0, 1, found 9"):
        explain(result(), seed=9)
    (found,) = explain(result(), allocator="vllm")
    with pytest.raises(ValueError, match="no request of the id 'nobody'; ids look like"):
        found.tell("nobody")
    memory = compare([[1, 2], [1, 3]], pool="1 GiB", kernel_batches=0)
    with pytest.raises(ValueError, match="in memory; pass it again"):
        explain(memory)
    assert len(explain(memory, source=[[1, 2], [1, 3]])) == 2
    with pytest.raises(ValueError, match="in memory; pass it"):
        explain(Config.model_validate({"workload": {"trace": "in memory"}}))


def test_the_summary_adds_up_to_the_prompts():
    found = explain(result())
    table = summarise(found)
    for one in found:
        assert table[one.entry.name].sum() == one.table["num_prompt_tokens"].sum()
        assert np.isclose(table[f"{one.entry.name} share"].sum(), 1)
