"""The capacity question: budgets that add up, a closed form that the engine confirms, parts that add up exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvarena.experiments.capacity import DESIGNS, PARTS, Cell, capacity_plan, measure, run_cell
from kvarena.experiments.capacity_backends import BACKENDS, page_size_for
from kvarena.experiments.capacity_beside import caption, differences
from kvarena.experiments.capacity_card import card_plan, kernels_of, measured_cell, read_measured, write_measured
from kvarena.experiments.capacity_law import Rules, capacity, carried, demand, largest, without
from kvarena.experiments.capacity_loads import first, make_load
from kvarena.experiments.capacity_sizing import Card, Server, card, deployed_sglang, deployed_vllm, equal_bytes
from kvarena.experiments.capacity_study import CapacityResult, joined, load_capacity, run_study
from kvarena.experiments.cli import app
from kvarena.experiments.models import SHAPES
from typer.testing import CliRunner

TINY = {"num_layers": 1, "num_kv_heads": 4, "head_dim": 64}  # 1 KiB of KV a token
ON = Card("small", 2**22, 0, 0)
SIZES: dict[str, Any] = {"rows": 128, "max_model_len": 256, "declared": 32, "step_tokens": 2048}
LLAMA = SHAPES["llama-3-8b"]


def plan(*designs: str, panels: tuple[str, ...] = ("equal",), **more: Any) -> list[Cell]:
    given = {"on": ON, **SIZES, **more}
    return capacity_plan(TINY, panels=panels, loads=("short",), designs=designs or tuple(DESIGNS), **given)


# --- bytes ---


def test_a_page_of_16_tokens_of_an_8b_shape_takes_2_mib_and_a_latent_head_keeps_no_values() -> None:
    assert LLAMA.bytes_per_page(16) == 2 * 2**20
    assert LLAMA.bytes_per_page(1) == 128 * 2**10
    assert SHAPES["deepseek-v2-lite"].bytes_per_page(64) == 27 * 64 * 576 * 2


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_line_of_a_card_is_counted_once(page_size: int) -> None:
    on = card("llama-3-8b")
    sizings = [
        equal_bytes(on, "token", page_size, LLAMA, Server()),
        deployed_vllm(on, "block", page_size, LLAMA, Server(rows=1024)),
        deployed_sglang(on, page_size, LLAMA, Server()),
    ]
    for sizing in sizings:
        lines = {name: value for name, value in sizing.lines().items() if str(name).endswith("_bytes")}
        total = lines.pop("total_bytes")
        assert sum(map(int, lines.values())) == total == on.total_bytes
        assert sizing.kv_bytes == sizing.num_pages * LLAMA.bytes_per_page(page_size)


def test_a_req_to_token_of_2048_rows_takes_a_gibibyte_and_costs_more_than_page_1_saves() -> None:
    sizing = equal_bytes(card("llama-3-8b"), "token", 1, LLAMA, Server())
    assert sizing.table_bytes == 2049 * 131_076 * 4
    block, token = capacity_plan(panels=["equal"], loads=["chat"], designs=["block-16", "token-1"])
    assert token.predicted < block.predicted
    assert token.lost["tables"] > block.lost["tables"] + block.lost["tail"]


def test_each_upstream_sizes_its_pool_by_its_own_rule() -> None:
    on = card("llama-3-8b")
    vllm = deployed_vllm(on, "block", 16, LLAMA, Server(rows=1024))
    left = on.total_bytes * 0.92 - on.weights_bytes - on.workspace_bytes
    assert 0 <= left - (vllm.num_pages + 1) * LLAMA.bytes_per_page(16) < 72 * 2**20  # two tables of 32 MiB
    sglang = deployed_sglang(on, 1, LLAMA, Server())
    assert sglang.num_pages == (int(on.total_bytes * 0.907) - on.weights_bytes) // LLAMA.bytes_per_token
    assert sglang.rows == sglang.num_pages * 512 // 131_072


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"memory: NVIDIA H200 with 140 GiB is too small for deepseek-v3.*1\.22 TiB"):
        card("deepseek-v3")
    with pytest.raises(ValueError, match=r"memory: x with 8 GiB is too small for SGLang .* keeps 13\.1 GiB"):
        deployed_sglang(Card("x", 2**33, 0, 0), 1, LLAMA, Server())
    with pytest.raises(
        ValueError, match=r"memory: x with 1 GiB is too small: .* no page of token.*fewer rows \(2048\)"
    ):
        equal_bytes(Card("x", 2**30, 0, 0), "token", 1, LLAMA, Server())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--memory", "1"], "memory: expected a size with a unit such as '16 GiB', found '1'"),
        (["--memory", "12 GiB"], "memory: a card with 12 GiB is too small for llama-3-8b"),
        (["--memory", "24 GiB"], "memory: a card with 24 GiB is too small for SGLang 0.5.22's own sizing"),
        (["--workspace", "x"], "workspace: expected a size"),
    ],
)
def test_a_card_that_is_too_small_is_what_the_command_blames(given: list[str], says: str) -> None:
    answer = CliRunner().invoke(app, ["capacity", *given, "--loads", "chat", "--designs", "token-1"])
    assert answer.exit_code != 0
    assert says in str(answer.exception or answer.output)


# --- page size by backend ---


def test_every_backend_takes_16_where_it_can_else_its_smallest() -> None:
    chosen = {name: page_size_for([name]) for name in BACKENDS}
    assert all(BACKENDS[name].supports(size) for name, size in chosen.items())
    assert chosen["flash_attn"] == chosen["kvarena"] == 16
    assert (chosen["flash_mla"], chosen["cutlass_mla"], chosen["flashinfer_mla"], chosen["cpu"]) == (64, 128, 32, 128)


@pytest.mark.parametrize(
    ("backends", "asked", "says"),
    [
        (["flashinfer"], 48, "flashinfer reads 16, 32, 64, found 48"),
        (["kvarena"], 48, "powers of two"),
        (["flash_mla", "cpu_mla"], None, "no page size in common"),
        ([], None, "at least one"),
        (["paper"], None, "expected one of"),
    ],
)
def test_a_page_size_that_a_backend_does_not_read_is_refused(backends: list[str], asked: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        page_size_for(backends, asked)


# --- the law ---


def test_the_demand_of_two_requests_by_hand() -> None:
    load = first(make_load("short", 2), 2)
    rules = Rules(1000, 16, shares=False, lag=0)
    held = demand(load, rules)
    first_step = sum(-(-int(p) // 16) for p in load.prompts)
    assert held[0] == first_step
    last = int(load.outputs.min()) - 1
    assert held[last] == sum(-(-(int(p) + last) // 16) for p in load.prompts)
    longest = int(load.outputs.argmax())
    assert held[-1] == -(-(int(load.prompts[longest]) + len(held) - 1) // 16)


# Where prompts in chunks and prefixes computed again decide: memory MiB, workspace MiB, tokens a row, rows, seed,
# declared tokens, tokens a step.
TIGHT = [
    (450, 40, 8192, 512, 1, 32, 2048),
    (450, 40, 4096, 256, 2, 4096, 2048),
    (512, 40, 4096, 256, 2, 32, 512),
    (420, 16, 4096, 512, 2, 4096, 2048),
    (512, 1, 512, 64, 0, 32, 8192),
]


@pytest.mark.parametrize(("mib", "workspace", "row", "rows", "seed", "declared", "tokens"), TIGHT)
def test_the_law_holds_on_small_cards_and_short_prompts(
    mib: int, workspace: int, row: int, rows: int, seed: int, declared: int, tokens: int
) -> None:
    cells = capacity_plan(
        "smollm2-135m",
        on=card("smollm2-135m", mib * 2**20, workspace * 2**20),
        panels=["equal"],
        loads=["short"],
        designs=["block-16", "token-1", "token-16", "token-64"],
        rows=rows,
        max_model_len=row,
        seed=seed,
        declared=declared,
        step_tokens=tokens,
    )
    for cell in cells:
        assert abs(measure(cell).measured - cell.predicted) <= 1, cell.name


def test_a_longer_burst_starts_with_the_shorter_one_and_never_needs_less() -> None:
    short, long = make_load("short", 20), make_load("short", 40)
    assert [r.request_id for r in short.requests] == [r.request_id for r in long.requests[:20]]
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(short.requests, long.requests, strict=False))
    rules = Rules(10_000, 4)
    assert [carried(first(long, n), without(rules, num_pages=300)) for n in range(1, 41)] == sorted(
        (carried(first(long, n), without(rules, num_pages=300)) for n in range(1, 41)), reverse=True
    )


@pytest.mark.parametrize("guess", [None, 1, 40, 77, 500])
def test_the_largest_carried_size_is_found_from_any_guess(guess: int | None) -> None:
    for border in (0, 1, 41, 499, 500):
        assert largest(lambda size, border=border: size <= border, 500, guess) == border


def test_each_rule_costs_what_its_name_says() -> None:
    by_design = {cell.design: cell.lost for cell in plan(rows=200)}
    assert by_design["token-1"]["tail"] == by_design["token-1"]["sharing"] == 0
    assert by_design["block-64"]["tail"] > by_design["block-16"]["tail"] > 0
    assert by_design["block-64"]["sharing"] > by_design["block-16"]["sharing"] > 0  # 37 shared tokens: 2 pages or none
    assert by_design["contiguous-max"]["reservation"] > by_design["contiguous-declared"]["reservation"] > 0
    assert all(cell.lost["rows"] > 0 for cell in plan("block-16", rows=4))


# --- the engine confirms it ---


@pytest.fixture(scope="module")
def found() -> CapacityResult:
    return run_study(plan())


def test_the_prediction_holds_within_one_request(found: CapacityResult) -> None:
    rows = found.capacity.set_index("design")
    off = (rows["measured"] - rows["predicted"]).abs()
    assert (off.drop("contiguous-pow2") <= 1).all(), off
    assert rows.loc["contiguous-pow2", "measured"] <= rows.loc["contiguous-pow2", "predicted"]
    assert rows["measured"].nunique() > 4  # the designs are told apart, so agreement means something


def test_parts_add_up_to_the_whole_difference(found: CapacityResult) -> None:
    rows = found.capacity
    assert (rows["ideal"] - rows[[f"lost_{name}" for name in PARTS]].sum(axis=1) == rows["measured"]).all()


def test_the_burst_behind_the_largest_is_not_carried(found: CapacityResult) -> None:
    for design, bursts in found.bursts.groupby("design"):
        measured = int(found.capacity.set_index("design").loc[design, "measured"])
        carried_at = dict(zip(bursts["size"], bursts["carried"], strict=True))
        assert carried_at[measured]
        assert not carried_at[measured + 1]


def test_beyond_capacity_requests_are_preempted_and_all_are_served() -> None:
    (cell,) = plan("token-1")
    over = run_cell(cell, 3 * cell.predicted)
    assert over.preemptions > 0 or over.stopped in ("room", "rows")
    assert over.served == over.size == 3 * cell.predicted
    assert over.output_tokens == int(cell.burst(over.size).outputs.sum())


def test_the_sglang_scheduler_keeps_room_for_declared_output() -> None:
    server = {"on": Card("x", 30 * 2**30, 0, 0), "max_model_len": 32_768}
    cells = capacity_plan("llama-3-8b", panels=["deployed"], loads=["long"], designs=["token-1", "token-64"], **server)
    for cell in cells:
        assert cell.policy == "sglang"
        assert cell.lost["reservation"] > 0
        assert abs(measure(cell).measured - cell.predicted) <= 1


def test_real_pools_carry_what_scripted_outputs_carry(tmp_path: Path) -> None:
    (cell,) = card_plan(["equal/short/token-16"], TINY, on=Card("x", 2**20, 0, 0), **{**SIZES, "rows": 32})
    scripted = measure(cell)
    real = measure(cell, make_executor=kernels_of(cell, "cpu", "torch"))
    assert real.measured == scripted.measured == cell.predicted
    assert len(real.bursts[0].steps) > 10
    assert all(step["kernels_us"] > 0 and step["new_tokens"] > 0 for step in real.bursts[0].steps)
    write_measured(tmp_path / "card.json", [measured_cell(real, {}, 1.0)], {"name": "a CPU"})
    assert read_measured(tmp_path / "card.json")["cells"][0]["measured"] == real.measured


# --- folders and the command ---


def test_a_study_survives_its_folder_and_two_are_joined(found: CapacityResult, tmp_path: Path) -> None:
    found.save(tmp_path / "a")
    again = load_capacity(tmp_path / "a")
    assert again.capacity["measured"].tolist() == found.capacity["measured"].tolist()
    assert {"capacity.pdf", "capacity.svg", "capacity.png"} <= {path.name for path in (tmp_path / "a").iterdir()}
    with pytest.raises(ValueError, match="both have short"):
        joined([again, again])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="not a finished capacity study"):
        found.save(tmp_path / "b")


def test_the_command_predicts_runs_saves_and_shows_a_card_beside(tmp_path: Path) -> None:
    small = ["--memory", "24 GiB", "--workspace", "0.1 GiB", "--loads", "long", "--panels", "equal", "--quiet"]
    out, beside = tmp_path / "out", tmp_path / "card.json"
    ran = CliRunner().invoke(
        app, ["capacity", *small, "--designs", "block-16,token-1", "--no-beyond", "--out", str(out)]
    )
    assert ran.exit_code == 0, ran.output
    row = load_capacity(out).capacity.iloc[0]
    sizing = {k: int(v) for k, v in load_capacity(out).sizing.iloc[0].items() if str(k).endswith("_bytes")}
    sizing["table_bytes"] -= 3 * 2**20
    cells: list[Any] = [{"panel": "equal", "load": "long", "design": "block-16", "predicted": 12346, "measured": 12345}]
    cells[0]["sizing"] = sizing
    gpu = {"name": "a card"}
    beside.write_text(json.dumps({"schema_version": 1, "kind": "capacity", "gpu": gpu, "cells": cells}))
    shown = CliRunner().invoke(app, ["capacity", "--saved", str(out), "--measured", str(beside)])
    assert shown.exit_code == 0, shown.output
    assert "card 12,345 (12,346)" in shown.output
    assert "budgets differ from those above: table -3 MiB" in shown.output
    assert f"{row['measured']:,} ({row['predicted']:,})" in shown.output


def test_budgets_that_agree_are_not_said_to_differ(found: CapacityResult) -> None:
    own = [{**row, "sizing": row} for row in found.sizing.to_dict("records")]
    assert differences(own, found.sizing, "equal") == {}
    assert "differ" not in caption({"name": "a card", "budgets": {"equal": {}}}, "equal")


@pytest.mark.parametrize("missing", ["measured", "predicted"])
def test_a_cards_cell_without_a_count_is_refused(tmp_path: Path, missing: str) -> None:
    cell = {"panel": "equal", "load": "long", "design": "block-16", "predicted": 1, "measured": 1}
    write_measured(tmp_path / "card.json", [{k: v for k, v in cell.items() if k != missing}], {"name": "a card"})
    with pytest.raises(ValueError, match=f"cannot be read as capacity results of a card .*{missing}"):
        read_measured(tmp_path / "card.json")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--loads", "poems"], "load: expected one of"),
        (["--designs", "block-7"], "design: expected one of"),
        (["--model", "llama-9"], "llama-9"),
        (["--memory", "12 bananas"], "memory: expected a size such as '16 GiB' in a unit of B, KiB"),
        (["--saved", "/nowhere"], "not a finished capacity study"),
        (["--measured", "/nowhere.json"], "cannot be read as capacity results"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], says: str) -> None:
    ran = CliRunner().invoke(app, ["capacity", *arguments])
    assert isinstance(ran.exception, ValueError)
    assert says in str(ran.exception)


def test_the_backend_table_is_printed() -> None:
    shown = CliRunner().invoke(app, ["capacity", "--backends"])
    assert all(name in shown.output for name in BACKENDS)


def test_the_backend_table_is_json_where_that_is_asked_for() -> None:
    shown = CliRunner().invoke(app, ["capacity", "--backends", "--json"])
    found = [json.loads(line) for line in shown.output.splitlines()]
    assert {row["backend"]: row["chosen"] for row in found} == {name: page_size_for([name]) for name in BACKENDS}
    assert all(row["reads"] == BACKENDS[row["backend"]].text() for row in found)


def test_random_lengths_agree_with_the_law() -> None:
    """The largest burst is where max D(t) crosses the pool, for random pools."""
    rng = np.random.default_rng(5)
    load = make_load("short", 300)
    for _ in range(5):
        rules = Rules(int(rng.integers(50, 400)), int(rng.choice([1, 4, 16])))
        size = capacity(load, rules)
        assert size == 0 or demand(first(load, size), rules).max() <= rules.num_pages
        assert not carried(first(load, size + 1), rules)
