"""Laws: closed forms against both designs, and a wrong closed form noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from kvarena.experiments import break_even, laws
from kvarena.experiments.laws import Law
from kvarena.experiments.traces import load_trace
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


def test_too_few_requests_and_traces_without_token_ids_are_told_so() -> None:
    with pytest.raises(ValueError, match=r"2 requests of chat are too few for pages of 256 tokens.*give more requests"):
        laws.laws("chat", requests=2)
    with pytest.raises(ValueError, match="mooncake_like has no token ids"):
        laws.laws("mooncake_like", requests=5)


def test_break_even_of_this_machine_is_judged_by_the_page_of_its_design(found: list[Law]) -> None:
    assert {(one.kind, one.slack) for one in _of(found, "break-even")} == {("block", 16), ("token", 1)}
