"""The allocator benchmark: its rows, its verdicts, its tables, and a pytest-benchmark case for every operation.

Times are compared by pytest-benchmark and never asserted; what is asserted is that everything runs and says what it
should.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Sequence
from kvarena.experiments.bench import alloc_saved, alloc_studies, allocators, real_sglang, real_vllm
from kvarena.experiments.bench.alloc_floor import BARE
from kvarena.experiments.bench.alloc_floor_ops import floor_ops
from kvarena.experiments.bench.alloc_load import page_names, replay_prompts
from kvarena.experiments.bench.alloc_ops import Op, Timed, block_ops, token_ops
from kvarena.experiments.bench.alloc_recorded import MARKS, Mark, times_better, verdict
from kvarena.experiments.bench.alloc_tables import SAMPLE, SECOND, growth_figure, text
from kvarena.experiments.cli import app
from typer.testing import CliRunner

OPS = [*token_ops(), *block_ops()]
REPLAYS = ("tokens", "tokens, verbs alone")  # as the engine calls the real package, and in the leanest way
SMALL = allocators.Effort(
    num_requests=60, repeats=2, samples=2, largest=10_000, memory_tokens=16_384, largest_batch=16, trace_requests=40
)


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.design}-{op.page_size}-{op.name}".replace(" ", "_"))
def test_benchmark_of(benchmark: Any, op: Op) -> None:
    benchmark.group = op.name
    timed = op.make()
    benchmark.pedantic(timed.work, setup=lambda: ((timed.before(),), {}), rounds=3, warmup_rounds=1)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(allocators.run(allocators.STUDIES, SMALL, lambda _: None))


def test_every_study_gives_rows_and_every_row_is_whole(rows: list[dict[str, Any]]) -> None:
    header, *others = rows
    assert header["study"] == "header"
    assert header["schema_version"] == 1
    assert {row["study"] for row in others} == {*allocators.STUDIES, "slowdown"}
    for row in others:
        assert row["low"] <= row["value"] <= row["high"]
        assert row["unit"]
        json.dumps(row)


def test_every_yardstick_belongs_to_a_measurement(rows: list[dict[str, Any]]) -> None:
    measured = {(row["study"], row["name"], row["design"], row["page_size"]) for row in rows[1:]}
    assert set(MARKS) <= measured


def test_the_table_has_a_line_for_every_row(rows: list[dict[str, Any]]) -> None:
    table = text(rows)
    for row in rows[1:]:
        name = row["name"].partition(" ")[0] if row["study"] == "latency" else row["name"]
        assert name in table
    assert "recorded 2026-11-29" in table


def test_what_is_asked_for_is_counted_against_the_package_here_and_the_recorded_one() -> None:
    name, mark = "decode step of 256", MARKS["op", "decode step of 256", "token", 1]
    assert mark.real is not None
    assert mark.must is not None
    slow, fast = mark.real / (mark.must - 1), mark.real / (mark.must + 1)
    for ours, here, met, recorded in (
        (slow, [], "missed", "missed"),  # without the package here the recorded one is all there is
        (slow, [slow * 100], "aim", "missed"),
        (fast, [fast], "missed", "must"),
    ):
        table = text([allocators.row("op", name, "token", 1, "us", [ours], here)])
        assert table.count("what is asked for") == 1
        asked = next(line for line in table.splitlines() if line.startswith("op: decode step"))
        assert asked.split()[-2:] == [met, recorded]
        for label, found in (("real packages here", met), ("recorded ones", recorded)):
            assert f"against the {label}: {int(found != 'missed')} of 1 met" in table


@pytest.mark.parametrize(("design", "page_size"), BARE, ids=str)
@pytest.mark.parametrize("pool_tokens", [24_000, 320_000], ids=["scarce", "roomy"])
def test_the_bare_structures_of_the_floors_find_the_hits_of_the_real_design(
    design: str, page_size: int, pool_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alloc_studies, "POOL_TOKENS", pool_tokens)
    load = replay_prompts(400, seed=page_size)
    bare = BARE[design, page_size](pool_tokens, page_size)
    hits = [bare.serve(prompt) for prompt in load]
    assert hits == alloc_studies.decisions(load, design.split()[0], page_size).hits
    assert sum(hits) > 0


def test_a_floor_that_finds_other_hits_is_refused() -> None:
    load = replay_prompts(60)
    for contender in alloc_studies.CONTENDERS:
        found = alloc_studies.decisions(load, contender.spec["kind"], contender.page_size)
        assert alloc_studies.floor_rate(contender, load, found) > 0
        wrong = alloc_studies.Decisions([*found.hits[:-1], found.hits[-1] + 1], found.room)
        with pytest.raises(ValueError, match="the floor found other hits"):
            alloc_studies.floor_rate(contender, load, wrong)


def test_floors_are_of_operations_that_are_measured_and_compared_as_ours_are(rows: list[dict[str, Any]]) -> None:
    labels = {(op.name, op.design, op.page_size) for op in floor_ops()}
    assert labels <= {(op.name, op.design, op.page_size) for op in OPS}
    with_floor = [row for row in rows[1:] if "floor" in row]
    assert {(row["name"], row["design"], row["page_size"]) for row in with_floor} == {
        *labels,
        *(("tokens", *each) for each in BARE),
    }
    for row in with_floor:
        assert row["floor_ratio"] == times_better(row["floor"], row["real"], row["unit"])


def test_a_missed_must_says_whether_the_floor_would_do() -> None:
    name, mark = "decode step of 256", MARKS["op", "decode step of 256", "block hashed", 16]
    assert mark.must is not None
    real = 1000.0
    wanted = real / mark.must
    for ours, floor, expected in (
        (
            wanted * 2,
            wanted / 2,
            "7.5x of 15x; the floor reaches 30x: asked for is 2.0 times its time, ours takes 4.0 times",
        ),
        (wanted * 2, wanted * 1.5, "7.5x of 15x; the floor reaches 10x: out of reach in Python"),
        (wanted / 2, wanted / 4, None),
    ):
        table = text([allocators.row("op", name, "block hashed", 16, "us", [ours], [real], [floor])])
        assert ("missed here, and why" in table) == (expected is not None)
        assert expected is None or f"{name} (op, block hashed, page 16): {expected}" in table
    unmeasured = text([allocators.row("op", name, "block hashed", 16, "us", [wanted * 2], [real])])
    assert "7.5x of 15x; no floor was measured" in unmeasured


def test_the_page_names_every_must_with_its_verdict(rows: list[dict[str, Any]]) -> None:
    asked = [row for row in rows if row.get("must") is not None]
    lines = alloc_saved.asked_for(rows).strip().splitlines()[2:]
    assert len(lines) == len(asked) == sum(mark.must is not None for mark in MARKS.values())
    for row, line in zip(asked, lines, strict=True):
        _, label, _, must, found, _ = line.split("|")
        assert label.strip().endswith(f"{row['name']}, {row['design']}, page {row['page_size']}")
        assert must.strip().rstrip("x") == f"{row['must']:,g}"
        assert found.strip().split(":")[0] == {"no": "missed"}.get(row["met"], row["met"])
    assert alloc_saved.asked_for([row | {"must": None} for row in rows[1:]]) == ""


def test_latencies_are_those_of_a_recorded_trace_where_one_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alloc_studies, "TRACE", "chat")
    held = list(allocators.run(["latency"], SMALL, lambda _: None))[1:]
    assert {row["trace"].partition(",")[0] for row in held} == {"chat"}
    assert {row["calls"] for row in held if row["name"] == "pin max"} == {SMALL.trace_requests}
    assert "chat, 40 requests" in text(held)
    monkeypatch.setattr(alloc_studies, "TRACE", "no-such-trace")
    said: list[str] = []
    own = list(allocators.run(["latency"], SMALL, said.append))[1:]
    assert {row["trace"] for row in own} == {"own load, 60 requests"}
    assert any("no-such-trace" in each for each in said)


def test_several_runs_are_saved_with_their_spread_and_laid_together(
    tmp_path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocators, "run", lambda *_: iter(rows))
    arguments = ["bench", "allocators", "--runs", "2"]
    alone = CliRunner().invoke(app, arguments)
    assert isinstance(alone.exception, ValueError)
    assert "--out is needed" in str(alone.exception)
    both = CliRunner().invoke(app, [*arguments, "--saved", str(tmp_path)])
    assert "nothing is run" in str(both.exception)
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    runs = [alloc_saved.load(tmp_path / name) for name in ("run1", "run2")]
    assert alloc_saved.load(tmp_path) == json.loads(json.dumps(alloc_saved.together(runs)))
    assert len((tmp_path / "spread.txt").read_text().splitlines()) == len(rows)
    assert (tmp_path / "run2" / "allocators.txt").read_text() == text(runs[1])
    assert {"growth.png", "latency.png", "adapter.png", "cost.md"} <= {path.name for path in tmp_path.iterdir()}


def test_runs_laid_together_are_judged_by_the_median_of_their_ratios() -> None:
    values = [(10, 60), (10, 100), (12, 144)]  # ours, the real package in its turns: 6x, 10x, 12x
    runs = [[allocators.row("op", "decode step of 256", "token", 1, "us", [ours], [real])] for ours, real in values]
    (joined,) = alloc_saved.together(runs)
    assert (joined["value"], joined["here_ratio"], joined["met"]) == (10, 10, "must")
    assert (joined["here_ratio_low"], joined["here_ratio_high"]) == (6, 12)


def test_growth_has_a_panel_for_each_operation_and_a_line_for_each_design(rows: list[dict[str, Any]]) -> None:
    panels = growth_figure(rows).axes
    assert [len(ax.get_lines()) for ax in panels] == [4, 1, 1]


def test_designs_of_one_colour_are_told_apart_in_the_legend_of_growth(rows: list[dict[str, Any]]) -> None:
    """By the marker's face, and by dashes of which a sample shows several on either side of it."""
    legend = growth_figure(rows).axes[0].get_legend()
    samples = legend.get_lines()
    seen = {(line.get_color(), line.get_markerfacecolor(), line.get_linestyle()) for line in samples}
    assert len(seen) == len({(colour, face) for colour, face, _ in seen}) == len(samples) == 4
    letter = legend.get_texts()[0].get_fontsize()  # points, as a dash times its width
    for line in samples:
        if line.get_linestyle() == "--":
            dash = sum(SECOND[1]) * line.get_linewidth()
            assert (SAMPLE * letter - line.get_markersize()) / 2 > 1.5 * dash


@pytest.mark.skipif(real_sglang.importable() is not None, reason="needs sglang 0.5.22 (extra: peers)")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lean", [False, True], ids=["as_the_engine", "lean"])
def test_the_real_sglang_decides_as_the_token_design(page_size: int, lean: bool) -> None:
    load = replay_prompts(300)
    expected = alloc_studies.decisions(load, "token", page_size)
    assert alloc_studies.real_rate(load, "token", page_size, expected, lean=lean) > 0


@pytest.mark.skipif(real_vllm.importable() is not None, reason="needs vllm 0.32.0 (extra: peers)")
@pytest.mark.parametrize("lean", [False, True], ids=["as_the_engine", "lean"])
def test_the_real_vllm_decides_as_the_block_design(lean: bool) -> None:
    load = replay_prompts(300)
    expected = alloc_studies.decisions(load, "block", 16)
    assert alloc_studies.real_rate(load, "block", 16, expected, lean=lean) > 0


class Counted:
    """A stand-in for a real package: ours, through the interface that the benchmark asks of it."""

    def __init__(self, kind: str, num_tokens: int, page_size: int, miscounted: int = 0) -> None:
        self.owner = make_allocator({"kind": kind, "page_size": page_size}, num_pages=num_tokens // page_size)
        self.miscounted, self.count = miscounted, 0

    def serve(self, token_ids: Any) -> int:
        self.count += 1
        return alloc_studies.serve(self.owner, Sequence(f"real{self.count}", token_ids)) + self.miscounted

    serve_lean = serve

    def lean_input(self, prompt: Any) -> Any:
        return prompt

    def room(self) -> tuple[int, int]:
        return self.owner.room()


def test_real_packages_take_their_turns_and_their_decisions_count_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, kind, name in ((real_vllm, "block", "RealVLLM"), (real_sglang, "token", "RealSGLang")):
        monkeypatch.setattr(package, "importable", lambda: None)
        monkeypatch.setattr(package, "version", lambda: "1.2.3")
        monkeypatch.setattr(alloc_studies, name, partial(Counted, kind))
        twin = Op("decode step of 256", kind, 16, lambda: Timed(lambda: None, lambda _: None))
        for drive in ("real_ops", "lean_ops"):
            monkeypatch.setattr(package, drive, lambda twin=twin: [twin])
    for name, make in (("token_ops", token_ops), ("block_ops", block_ops)):
        steps = [op for op in make() if op.name.startswith("decode step")]
        monkeypatch.setattr(allocators, name, lambda steps=steps: steps)
    header, *rows = allocators.run(["replay", "op"], SMALL, lambda _: None)
    assert header["packages_here"] == {"vllm": "1.2.3", "sglang": "1.2.3"}
    assert "real packages here: vllm 1.2.3, sglang 1.2.3" in text([header, *rows])
    beside = {(row["study"], row["name"], row["design"], row["page_size"]) for row in rows if "here" in row}
    assert beside == {
        *(("replay", name, f"block {form}", 16) for name in REPLAYS for form in ("hashed", "runs")),
        *(("replay", name, "token", size) for name in REPLAYS for size in (1, 16)),
        *(("op", "decode step of 256", design, 16) for design in ("block hashed", "block runs", "token")),
    }
    for row in rows:
        if "here" in row:
            assert row["here_ratio_low"] <= row["here_ratio"] <= row["here_ratio_high"]
            assert row["study"] == "replay" or row["here_ratio"] < 1  # an idle twin is faster than any step of ours
            assert ("lean" in row) == (row["study"] == "op")
    monkeypatch.setattr(alloc_studies, "RealVLLM", partial(Counted, "block", miscounted=1))
    with pytest.raises(ValueError, match="block, page size 16: the real package decided otherwise"):
        list(allocators.run(["replay"], SMALL, lambda _: None))


def test_a_missing_real_package_is_said_and_its_recorded_figures_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVARENA_PEERS", raising=False)
    for package in ("vllm", "sglang"):
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
    said: list[str] = []
    rows = list(allocators.run(["replay"], SMALL, said.append))
    assert "real packages here: none" in text(rows)
    for package in ("vllm", "sglang"):
        assert any(f"{package} cannot be imported" in text for text in said)
    assert not any("here" in row for row in rows)
    assert {row["real"] for row in rows[1:] if row["design"] == "token" and row["name"] == "tokens"} == {862, 530}


@pytest.mark.parametrize(
    ("value", "mark", "unit", "expected"),
    [
        (10, Mark(100, 8, 12), "us", "must"),
        (8, Mark(100, 8, 12), "us", "aim"),
        (13, Mark(100, 8, 12), "us", "no"),
        (900, Mark(100, 8, 12), "requests/CPU s", "must"),
        (1300, Mark(100, 8, 12), "requests/CPU s", "aim"),
        (700, Mark(100, 8, 12), "requests/CPU s", "no"),
        (700, Mark(None, 800, 900, absolute=True), "requests/CPU s", "no"),
        (850, Mark(None, 800, 900, absolute=True), "requests/CPU s", "must"),
        (17, Mark(34, 16, 12, absolute=True), "bytes", "no"),
        (15, Mark(34, 16, 12, absolute=True), "bytes", "must"),
        (11, Mark(34, 16, 12, absolute=True), "bytes", "aim"),
        (11, Mark(34), "bytes", None),
    ],
)
def test_the_verdict_follows_the_direction_of_the_unit(value: float, mark: Mark, unit: str, expected: str) -> None:
    found = value if mark.absolute else times_better(value, mark.real or 0, unit)
    assert verdict(found, mark, unit) == expected


def test_an_unknown_study_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected some of counts, replay.*found speed"):
        list(allocators.run(["speed"], SMALL, lambda _: None))


def test_nothing_is_timed_when_the_forms_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = alloc_studies.serve, []

    def lying(owner: Any, seq: Any) -> int:
        calls.append(seq)
        return real(owner, seq) + (len(calls) == 70)

    monkeypatch.setattr(alloc_studies, "serve", lying)
    with pytest.raises(ValueError, match="different hits"):
        alloc_studies.gate(replay_prompts(60))


def test_the_workload_is_the_one_described() -> None:
    prompts = replay_prompts(6000)
    assert 950 < np.mean([len(prompt) for prompt in prompts]) < 1080
    assert all((one == two).all() for one, two in zip(prompts, replay_prompts(6000), strict=True))
    starts = {prompt[:128].tobytes() for prompt in prompts}
    assert len(starts) <= 64


def test_page_names_stand_for_all_that_came_before() -> None:
    one, two = np.arange(40, dtype=np.int32), np.arange(40, dtype=np.int32)
    two[3] = 99
    first, second, third = page_names([one, two, one[:33]], 16)
    assert not set(first) & set(second)
    assert third[:2] == first[:2]
    assert third[2] != first[2]


def test_counts_do_not_depend_on_the_form_of_the_block_design() -> None:
    load = replay_prompts(80)
    by_design = {
        contender.design: alloc_studies.counts(contender, alloc_studies.sequences(load, 16, hashes=False))
        for contender in alloc_studies.CONTENDERS
        if contender.page_size == 16
    }
    assert by_design["block hashed"] == by_design["block runs"]
    assert by_design["token"]["bytes_hashed"] == 0
    assert by_design["token"]["nodes_visited"] > 0


def test_a_pool_that_is_too_small_is_an_error() -> None:
    (seq,) = alloc_studies.sequences(replay_prompts(1), 16, hashes=False)
    owner = make_allocator("vllm", num_pages=2)
    with pytest.raises(ValueError, match="too small"):
        alloc_studies.serve(owner, seq)


def test_the_command_writes_rows_table_and_figure(tmp_path: Path) -> None:
    arguments = ["bench", "allocators", "--quick", "--only", "growth", "--out", str(tmp_path / "bench")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "bench").iterdir()}
    assert names == {"allocators.jsonl", "allocators.txt", "cost.md", "growth.pdf", "growth.svg", "growth.png"}
    lines = (tmp_path / "bench" / "allocators.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["study"] == "header"


def test_the_spread_of_runs_is_shown_beside_their_values(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for factor, folder in zip((1, 2), folders, strict=True):
        folder.mkdir()
        scaled = [rows[0], *(row | {"value": row["value"] * factor} for row in rows[1:])]
        (folder / "allocators.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scaled))
    result = CliRunner().invoke(app, ["bench", "spread", *map(str, folders)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) == len(rows)
    assert all(line.endswith(("50%", "0")) for line in lines[1:])  # a count of zero has no range
    missing = CliRunner().invoke(app, ["bench", "spread", str(tmp_path)])
    assert isinstance(missing.exception, ValueError)


def test_saved_runs_are_shown_together_by_their_medians(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for factor, folder in zip((1, 10, 3), folders, strict=True):
        folder.mkdir()
        scaled = [rows[0], *(row | {name: row[name] * factor for name in ("value", "low", "high")} for row in rows[1:])]
        (folder / "allocators.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scaled))
    saved = [part for folder in folders for part in ("--saved", str(folder))]
    result = CliRunner().invoke(app, ["bench", "allocators", *saved, "--out", str(tmp_path / "shown")])
    assert result.exit_code == 0, result.output
    shown = alloc_saved.load(tmp_path / "shown")
    assert len(shown) == len(rows)
    for before, after in zip(rows[1:], shown[1:], strict=True):
        assert after["value"] == pytest.approx(3 * before["value"])
        assert (after["low"], after["high"]) == pytest.approx((before["low"], 10 * before["high"]))
    table = (tmp_path / "shown" / "cost.md").read_text().splitlines()
    main = table[: table.index("")]
    assert len(main) == 2 + len(alloc_saved.SUMMARY)
    assert all(line.count("|") == 2 + len(alloc_saved.DESIGNS) for line in main)
