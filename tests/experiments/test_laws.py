"""Laws: closed forms against both designs, and a wrong closed form noticed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from kvarena.experiments import break_even, laws, laws_why
from kvarena.experiments.compare import compare
from kvarena.experiments.laws import Law
from kvarena.experiments.study import write_table
from kvarena.experiments.traces import load_trace
from kvarena.experiments.verify_result import verify
from support.commands import invoke

mpl.use("Agg")


@pytest.fixture(scope="module")
def found() -> list[Law]:
    return laws.laws("chat", requests=400, pages=(1, 16, 64))


def _of(found: list[Law], law: str) -> list[Law]:
    return [one for one in found if one.law == law]


def test_rounding_and_tails_are_as_predicted(found: list[Law]) -> None:
    for one in [*_of(found, "rounding"), *_of(found, "tail waste")]:
        assert one.holds, one
    assert {one.measured for one in _of(found, "rounding") if one.x == "1"} == {0.0}


def test_both_designs_round_alike_where_everything_fits(found: list[Law]) -> None:
    by_size: dict[str, set[float]] = {}
    for one in _of(found, "rounding"):
        by_size.setdefault(one.x, set()).add(round(one.measured, 12))
    assert all(len(values) == 1 for values in by_size.values())


@pytest.mark.parametrize("name", ["chat", "agents", "few_shot", "long_document_qa", "prefix_repetition", "recording"])
def test_rounding_by_lengths_is_what_whole_pages_lose_of_any_workload(name: str) -> None:
    for seed in range(2):
        facts = laws._facts(list(load_trace(name, limit=600, seed=seed)))
        for size in (4, 16, 64, 256):
            predicted, _, _ = laws._predict(facts, size)
            lost = 100 * float((facts.known % size).sum() / facts.prompts.sum())
            assert Law("rounding", "both", str(size), "%", predicted, lost, slack=0.1).holds, (seed, size)


def test_the_textbook_form_misses_where_few_lengths_are_known_often() -> None:
    facts = laws._facts(list(load_trace("prefix_repetition", limit=600)))
    by_length, textbook, _ = laws._predict(facts, 64)
    assert by_length == 0.0  # 1,024 tokens, always
    assert textbook > 5


def test_the_residual_of_the_textbook_form_is_few_lengths(found: list[Law]) -> None:
    rows = _of(found, "remainder, each length once")
    assert rows
    assert all(one.holds for one in rows), rows


def test_tables_gains_and_capacity_are_exact_or_within_one(found: list[Law]) -> None:
    for law in ("table bytes", "prefill gain", "capacity"):
        rows = _of(found, law)
        assert rows
        assert all(one.holds for one in rows), rows
    gains = {one.x: one.measured for one in _of(found, "prefill gain") if one.kind == "block"}
    assert gains["64"] == pytest.approx(64 * 2176 / (2048 + 64 * 128))


@pytest.mark.parametrize("law", ["rounding", "tail waste", "table bytes", "prefill gain", "capacity"])
def test_a_closed_form_that_is_twice_too_large_does_not_hold(found: list[Law], law: str) -> None:
    wrong = [replace(one, predicted=2 * one.predicted) for one in _of(found, law) if one.predicted > 1]
    assert wrong
    assert not any(one.holds for one in wrong)


def test_prefixes_that_end_inside_a_page_gain_less() -> None:
    assert laws.prefill_gain(2039, 128, 8, 16) < laws.prefill_gain(2039, 128, 8, 1)
    assert laws.prefill_gain(2039, 128, 8, 4096) == 1.0


def test_break_even_is_nowhere_when_a_look_up_costs_more_a_token() -> None:
    assert laws.break_even_tokens(1.0, 2.0, 2.0) == float("inf")
    assert laws.break_even_tokens(0.0, 0.0, 2.0) == 0.0


def test_a_line_of_relative_residuals_is_right_near_zero() -> None:
    lengths = (16, 64, 256, 1024, 4096, 16_384)
    bent = [1.0 + 0.005 * n if n < 512 else 3.0 + 0.001 * n for n in lengths]  # steeper at its short end
    fixed, slope = break_even.fit_line(lengths, bent)
    assert abs(fixed - 1.0) < 0.5
    assert fixed < np.polyfit(lengths, bent, 1)[1] - 0.5
    assert 0.001 < slope < 0.005


def test_every_length_is_looked_up_and_hit_in_a_pool_of_its_own() -> None:
    times = break_even.lookup_us("token", 1, [16, 16, 4096], rounds=20)
    assert len(times) == 3
    assert times[2] > 2 * times[0]


def test_break_even_lies_within_a_page_or_a_few(found: list[Law]) -> None:
    for one in _of(found, "break-even"):
        assert 1 <= one.measured <= 4096, one
        assert one.kind != "block" or one.measured % 16 == 0


def test_the_command_writes_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[Law]) -> None:
    monkeypatch.setattr(laws, "laws", lambda workload, requests: found)
    shown = invoke("laws", "--out", tmp_path / "l.csv", "--figure", tmp_path / "l.png")
    assert "prefill gain" in shown.stdout
    table = pd.read_csv(tmp_path / "l.csv")
    assert len(table) == len(found)
    assert (tmp_path / "l.png").stat().st_size > 20_000
    with pytest.raises(ValueError, match="--out: expected a file"):
        invoke("laws", "--out", tmp_path / "l.txt")
    kept, about = laws.load_laws(tmp_path / "l.csv")
    assert about == "chat · first 600 requests · outputs recorded"
    assert [(one.law, one.x, one.holds) for one in kept] == [(one.law, one.x, one.holds) for one in found]
    again = invoke("laws", "--saved", tmp_path / "l.csv", "--figure", tmp_path / "again.png")
    assert again.stdout == shown.stdout
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "l.png").read_bytes()


def test_break_even_has_to_hold_within_a_page_or_a_quarter() -> None:
    far = Law("break-even", "token", "small", "tokens", 9.0, 4.0, 0.25, 1.0)
    near = Law("break-even", "block", "small", "tokens", 32.0, 16.0, 0.25, 16.0)
    assert (far.holds, near.holds) == (False, True)


def test_traces_without_token_ids_are_told_so() -> None:
    with pytest.raises(ValueError, match="mooncake_like has no token ids"):
        laws.laws("mooncake_like", requests=5)


@pytest.fixture(scope="module")
def small() -> dict[str, list[Law]]:
    """Laws of workloads with few lengths: the parts that depend on the workload."""
    slow = pytest.MonkeyPatch()
    slow.setattr(break_even, "break_even_laws", list)
    slow.setattr(laws, "small_capacity_plan", list)
    slow.setattr(laws, "table_law", lambda kind, size: Law("table bytes", kind, str(size), "bytes", 1.0, 1.0))
    slow.setattr(laws, "prefill_law", lambda kind, size, n: Law("prefill gain", kind, str(n), "times", 1.0, 1.0))
    sizes = {"few_shot": 60, "prefix_repetition": 8, "no_reuse": 8}
    try:
        return {name: laws.laws(name, requests=count, pages=(4, 256)) for name, count in sizes.items()}
    finally:
        slow.undo()


def test_whatever_does_not_hold_of_few_lengths_has_its_computed_reason(
    small: dict[str, list[Law]], tmp_path: Path
) -> None:
    for name, found in small.items():
        off = [one for one in found if not one.holds]
        assert off, name
        assert all(one.why and any(char.isdigit() for char in one.why) for one in off), off
        assert not any(one.why for one in found if one.holds)
        write_table(laws.laws_frame(found, name), tmp_path / "laws.csv")
        assert verify(tmp_path / "laws.csv").stands


def test_both_designs_lose_the_same_to_pages_of_any_size_since_nothing_is_evicted(small: dict[str, list[Law]]) -> None:
    for name, found in small.items():
        facts = laws._facts(list(load_trace(name, limit=60)))
        for size in (4, 256):
            lost = {one.measured for one in _of(found, "rounding") if one.x == str(size)}
            assert len({round(value, 9) for value in lost}) == 1, (name, size)
            if name == "few_shot":
                exact = 100 * (facts.known % size).sum() / facts.prompts.sum()
                assert lost.pop() == pytest.approx(exact, abs=1e-9)


def test_a_workload_that_knows_nothing_has_no_remainders(small: dict[str, list[Law]]) -> None:
    assert not _of(small["no_reuse"], "remainder, each length once")
    assert _of(small["prefix_repetition"], "remainder, each length once")[0].why == (
        "one length is all there is, of 256 tokens: it leaves 0"
    )


@pytest.mark.parametrize("size", [4, 16, 256])
def test_parts_of_the_textbook_miss_add_up_to_it(size: int) -> None:
    facts = laws._facts(list(load_trace("few_shot", limit=60)))
    total = int(facts.prompts.sum())
    lost = 100 * float((facts.known % size).sum() / total)
    _, textbook, _ = laws._predict(facts, size)
    why = laws_why.textbook_why(facts.known, total, size, lost)
    whole, *parts = (float(points) for points in re.findall(r"[+-][0-9.]+", why))
    assert whole == pytest.approx(lost - textbook, abs=0.006)
    assert sum(parts) == pytest.approx(whole, abs=0.02)


def test_a_loss_that_lengths_do_not_give_has_no_reason() -> None:
    known = np.array([100, 200, 333])
    lost = 100 * float((known % 64).sum()) / 1000
    assert laws_why.rounding_why(known, 1000, 64, lost)
    for why in (laws_why.rounding_why, laws_why.textbook_why):
        assert why(known, 1000, 64, lost + 0.1) == ""
    assert laws_why.tail_why(known, 64, float((-known % 64).mean()))
    assert laws_why.tail_why(known, 64, 30.0) == ""


@pytest.mark.parametrize("name", ["chat", "recording"])
def test_lengths_of_live_requests_are_those_of_the_replay(name: str) -> None:
    trace = list(load_trace(name, limit=40))
    done = compare(name, allocators=["vllm"], pool="64 GiB", requests=40, outputs="replay", live=4, kernel_batches=0)
    lengths = laws_why.live_lengths(trace, 4)
    assert len(lengths) == done.steps["live"].sum()
    assert lengths.sum() == done.steps["live_tokens"].sum()
    assert (-lengths % 16).sum() == done.steps["tail_slots"].sum()


def test_few_lengths_are_told_from_lengths_that_do_not_end_evenly() -> None:
    once = np.ones(40, int)
    chance = laws_why.remainder_why(np.arange(16, 56, dtype=int) * 7 + 1, once, 16)
    odd = laws_why.remainder_why(np.arange(17, 337, 8, dtype=int), once, 16)
    assert "so few are known to" in chance
    assert "do not end evenly" in odd
    assert "40 of 40 are odd" in odd


def test_break_even_of_this_machine_is_judged_by_the_page_of_its_design(found: list[Law]) -> None:
    assert {(one.kind, one.slack) for one in _of(found, "break-even")} == {("block", 16), ("token", 1)}
