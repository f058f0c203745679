"""Aged pools: run lengths, layouts of live requests, and the layouts that ship."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Sequence
from kvarena.experiments import aged, aged_plots
from support.commands import invoke

mpl.use("Agg")

SMALL = aged.AgeConfig(hours=0.03, sessions_per_s=1.0, reply_median=20, pool_tokens=16_384)


@pytest.fixture(scope="module")
def grown() -> dict[str, aged.Aged]:
    return {one.name: aged.age(one, SMALL) for one in aged.ALLOCATORS}


def test_run_lengths_of_every_kind_of_break() -> None:
    for slots, runs in (([], []), ([7], [1]), ([3, 4, 5], [3]), ([5, 4, 3], [1, 1, 1]), ([1, 1, 2], [1, 2])):
        assert aged.run_lengths(np.array(slots, np.int32)).tolist() == runs


def test_a_token_counts_in_its_own_run() -> None:
    rows = [np.array([1, 2, 3, 9], np.int32), np.array([5], np.int32)]
    assert aged.token_runs(rows).tolist() == [1, 1, 3, 3, 3]
    stats = aged.run_stats(rows)
    assert (stats["runs"], stats["tokens_a_run"], stats["next_slot_share"]) == pytest.approx((3, 5 / 3, 2 / 3))


@pytest.mark.parametrize("spec", [{"kind": "block"}, {"kind": "token"}, {"kind": "token", "page_size": 16}])
def test_a_fresh_pool_gives_one_run(spec: dict[str, object]) -> None:
    pool = make_allocator(spec, num_pages=64)
    seq = Sequence("a", range(37))
    pool.admit(seq)
    pool.commit([(seq, 37)])
    layout = aged.layout_of(pool, [seq])
    assert aged.run_lengths(layout["a"]).tolist() == [37]
    assert layout["a"][0] == pool.page_ids(seq)[0] * pool.page_size


def test_churn_breaks_runs_no_shorter_than_a_page(grown: dict[str, aged.Aged]) -> None:
    for name, one in grown.items():
        first, last = one.churn[0], one.churn[-1]
        assert last["turnovers"] > 2 > first["turnovers"]
        assert last["tokens_a_run"] < first["tokens_a_run"]
        size = one.allocator.spec["page_size"]
        whole = [run for slots in one.layout.values() for run in aged.run_lengths(slots)[:-1]]
        assert all(run % size == 0 for run in whole), name


def test_live_requests_share_slots_only_at_the_same_position(grown: dict[str, aged.Aged]) -> None:
    for one in grown.values():
        place: dict[int, int] = {}
        for slots in one.layout.values():
            assert len(set(slots.tolist())) == len(slots)
            for position, slot in enumerate(slots.tolist()):
                assert place.setdefault(slot, position) == position
                assert slot >= one.allocator.spec["page_size"], "the padding page is nobody's"


def test_ageing_again_gives_the_same_files(grown: dict[str, aged.Aged], tmp_path: Path) -> None:
    again = [aged.age(one, SMALL) for one in aged.ALLOCATORS[:2]]
    first = aged.save([grown[one.name] for one in aged.ALLOCATORS[:2]], SMALL, tmp_path / "a")
    second = aged.save(again, SMALL, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    for name, (size, rows) in aged.load_layouts(first[0]).items():
        assert size == grown[name].allocator.spec["page_size"]
        assert [row.tolist() for row in rows] == [slots.tolist() for slots in grown[name].layout.values()][:64]


def test_the_layouts_that_ship_are_those_of_the_table() -> None:
    import pyarrow.parquet as pq

    metadata = pq.read_schema(aged.shipped_folder() / aged.LAYOUTS).metadata
    config, churn = aged.AgeConfig(**json.loads(metadata[b"aged"])), aged.load_churn()
    assert config == aged.AgeConfig(), "the command's defaults make the files that ship"
    layouts = aged.load_layouts()
    assert set(layouts) == {one.name for one in aged.ALLOCATORS if one.saved}
    for name, (size, rows) in layouts.items():
        slots = np.concatenate(rows)
        assert size <= slots.min()
        assert slots.max() < config.pool_tokens + size
        last = churn[churn["allocator"] == name].iloc[-1]
        assert len(rows) == min(aged.SAVED_REQUESTS, last["live"])
        if len(rows) == last["live"]:
            assert aged.run_stats(rows)["runs"] == last["runs"]


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hours: expected"):
        aged.AgeConfig(hours=0)
    with pytest.raises(ValueError, match="multiple of page size 16"):
        aged.age(aged.ALLOCATORS[0], aged.AgeConfig(pool_tokens=100))
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"x\.parquet: cannot be read as layouts"):
        aged.load_layouts(tmp_path / "x.parquet")


def _timed(op: str, point: str, placement: str, us: float, study: str = "recorded") -> dict[str, object]:
    row = {"op": op, "point": point, "kernel": "kvarena-block_table", "placement": placement, "study": study}
    return {**row, "us": us}


def test_costs_are_percent_over_the_same_pages_in_order(tmp_path: Path) -> None:
    decode = [
        _timed("decode", "aged:token-1", "in_order", 100.0),
        _timed("decode", "aged:token-1", "recorded", 101.5),
        _timed("decode", "aged:token-1", "shuffled", 98.0),
        _timed("decode", "aged:block-16", "recorded", 7.0),  # nothing in order to hold it against
        _timed("decode", "toy:token", "in_order", 1.0),
        _timed("decode", "toy:token", "recorded", 2.0),
        _timed("decode", "aged:token-1", "recorded", 500.0, study="grid"),
        {"op": "decode", "point": "aged:token-1", "study": "recorded", "error": "no time left"},
    ]
    extend = [
        _timed("extend", "aged:token-1", "in_order", 1000.0),
        _timed("extend", "aged:token-1", "recorded", 1001.0),
        _timed("decode", "aged:token-1", "recorded", 3.0),
    ]
    path = tmp_path / "k.json"
    path.write_text(json.dumps({"parts": {"decode": {"rows": decode}, "rest": {"rows": extend}}}))
    found = aged_plots.kernel_costs(path)
    assert [(r["op"], r["allocator"], r["placement"], round(r["percent"], 9)) for r in found.to_dict("records")] == [
        ("decode", "token-1", "recorded", 1.5),
        ("decode", "token-1", "shuffled", -2.0),
        ("extend", "token-1", "recorded", 0.1),
    ]
    path.write_text(json.dumps({"parts": {"rest": {"rows": extend}}}))
    assert list(aged_plots.kernel_costs(path)["op"]) == ["extend"]
    assert len(aged_plots.kernel_costs(tmp_path / "none.json")) == 0
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json: cannot be read as kernel times"):
        aged_plots.kernel_costs(tmp_path / "bad.json")


def test_the_card_that_ships_has_costs_of_both_kernels() -> None:
    found = aged_plots.kernel_costs()
    for op in ("decode", "extend"):
        rows = found[found["op"] == op]
        assert set(rows["allocator"]) == {"block-16", "token-1", "token-16"}
        assert set(rows["placement"]) == {"recorded", "shuffled"}


def test_a_figure_with_costs_has_a_panel_for_each_kernel_and_without_none() -> None:
    layouts, table = aged.load_layouts(), aged.load_churn()
    row = {"allocator": "token-1", "table": "a", "placement": "recorded", "percent": 1.0}
    one = pd.DataFrame([{"op": "decode", **row}])
    both = pd.DataFrame([{"op": "decode", **row}, {"op": "extend", **row}])
    given = (None, one.iloc[:0], one, both)
    counts = [len(aged_plots.draw_aged(table, layouts, "", costs).get_axes()) for costs in given]
    plt.close("all")
    assert counts == [2, 2, 3, 4]


def test_the_command_shows_and_draws_what_ships(tmp_path: Path) -> None:
    assert "token-16" in invoke("aged", "--figure", tmp_path / "f.png").stdout
    assert (tmp_path / "f.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="--out and --seed age pools anew"):
        invoke("aged", "--seed", 1)
    with pytest.raises(ValueError, match=r"expected a file \.pdf"):
        invoke("aged", "--figure", tmp_path / "f.gif")


def test_no_two_lines_look_alike() -> None:
    found = [
        (look.colour, look.marker) for look in aged_plots.aged_looks([one.name for one in aged.ALLOCATORS]).values()
    ]
    assert len(set(found)) == len(found)


def test_runs_that_differ_by_a_few_hundredths_are_printed_apart(capsys: pytest.CaptureFixture[str]) -> None:
    from kvarena.experiments.console import print_rich

    print_rich(aged.aged_table(aged.load_churn()), piped_columns=150)
    shown = capsys.readouterr().out
    assert "1.15" in shown
    assert "1.18" in shown
