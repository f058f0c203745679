"""The ladder: which fields are switched and which cannot be seen, whole tokens that add up, folders that reload."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from kvarena.allocators.config import GENERAL, design
from kvarena.experiments import ladder_times
from kvarena.experiments.ladder import TIME, Ladder, _time_rows, ladder, load_ladder, read_base
from kvarena.experiments.ladder_plan import LOWER_FAST, MAX_RUNGS, REST, UPPER_FAST, UPPER_WHOLE, plan_ladder
from kvarena.experiments.ladder_plots import plot_interactions, plot_metrics, plot_shares, plot_waterfall
from kvarena.experiments.ladder_tables import ladder_tables
from kvarena.experiments.traces.base import Visible
from support.traces import public_file
from typer.testing import CliRunner

SEEN = Visible(grain=1, publish_time=True, outputs="recorded", sessions=True)
CHAT: dict[str, Any] = {
    "workload": {
        "trace": "chat",
        "options": {"num_sessions": 8, "num_system_prompts": 2, "max_message": 80, "max_reply": 40},
    },
    "pool": {"pool": "350 MiB"},
}
ALL_FIELDS = {
    "page_size", "publish", "publish_generated", "duplicates", "eviction_unit", "recency", "split_touches_suffix",
    "demand_slack", "refused_evicts", "preempt_keeps", "index", "kind", "page_keys", "reversed_release",
    "unhashed_to_head",
}  # fmt: skip


def fields_of(plan: Any) -> set[str]:
    return {name for rung in plan.rungs for name in rung.fields}


# --- planning ---


@pytest.mark.parametrize(
    "base",
    [CHAT, {**CHAT, "engine": {"live": 4, "outputs": "replay"}}, {**CHAT, "engine": {"scheduler": "vllm"}}],
    ids=["prompts", "overlapping replies", "engine"],
)
def test_every_field_in_which_the_designs_differ_is_switched_or_said_to_be_unseen(base: dict[str, Any]) -> None:
    plan = plan_ladder(base, SEEN)
    assert fields_of(plan) | set(plan.held) == ALL_FIELDS
    assert not fields_of(plan) & set(plan.held)
    assert len(plan.rungs) <= MAX_RUNGS
    assert len(plan.cells) == 2 ** len(plan.rungs)
    assert len({cell.key for cell in plan.cells}) == len(plan.cells)


@pytest.mark.parametrize(
    ("name", "base", "visible", "reason"),
    [
        ("publish", CHAT, SEEN, "a replay writes what it reserves at once"),
        ("publish_generated", CHAT, SEEN, "no reply is replayed"),
        ("preempt_keeps", CHAT, SEEN, "a replay preempts nobody"),
        (
            "publish_generated",
            {**CHAT, "engine": {"live": 4, "outputs": "replay"}},
            Visible(1, True, "unreachable", True),
            "the trace's outputs are 'unreachable'",
        ),
        ("publish", {**CHAT, "engine": {"scheduler": "vllm"}}, Visible(1, False, "recorded", True), "close together"),
        ("page_size", CHAT, Visible(512, True, "none", False), "one id of the trace stands for 512 tokens"),
        ("page_keys", CHAT, SEEN, "no request of a trace carries an image"),
    ],
)
def test_what_a_trace_cannot_show_is_not_observable_and_never_zero(
    name: str, base: dict[str, Any], visible: Visible, reason: str
) -> None:
    plan = plan_ladder(base, visible)
    assert reason in plan.held[name]
    assert name not in fields_of(plan)


def test_more_rungs_than_can_be_run_are_refused_and_groups_make_fewer() -> None:
    names = sorted(ALL_FIELDS - {"publish", "publish_generated", "preempt_keeps", "refused_evicts", "page_keys"})
    with pytest.raises(ValueError, match=r"10 rungs .* make 1024 subsets; at most 8 are run: join some"):
        plan_ladder(CHAT, SEEN, groups=names)
    plan = plan_ladder(CHAT, SEEN, groups=["page_size", "duplicates+eviction_unit"])
    assert [rung.name for rung in plan.rungs] == ["page_size", "duplicates + eviction_unit", REST]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"groups": ["publish"]}, "publish is not observable here: a replay writes"),
        ({"groups": ["page_size", "page_size"]}, "no field in which the ends differ, or is named twice"),
        ({"groups": ["hash_fn"]}, "'hash_fn' is no field in which the ends differ"),
        ({"lower": "exact"}, "expected designs of kind block or token, found 'exact'"),
        ({"upper": "vllm"}, "the two ends do not differ in anything that can be seen here"),
        ({"extra": {"latency": (1, 2)}}, "rung 'latency': no field of an allocator or a config; known: trace"),
        ({"extra": {"hash_unit": ("none", 4)}}, r"hash_unit = 4: expected a divisor of the page size 1 .*switch them"),
    ],
)
def test_what_cannot_be_walked_is_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan_ladder(CHAT, SEEN, **options)


def test_the_ends_are_the_designs_themselves() -> None:
    plan = plan_ladder(CHAT, SEEN)
    rules = [cell.config["allocators"][0] for cell in (plan.cells[0], plan.ends[LOWER_FAST], plan.ends[UPPER_WHOLE])]
    assert [each["form"] for each in rules] == ["general", "auto", "general"]
    assert {**rules[0], "form": "auto"} == rules[1]
    assert {name: rules[2][name] for name in ("kind", "page_size", "publish", "index")} == {
        "kind": "token", "page_size": 1, "publish": "commit", "index": "tree",
    }  # fmt: skip
    assert plan.ends[UPPER_FAST].config["allocators"][0]["form"] == "auto"


def test_rungs_of_the_engine_need_an_engine() -> None:
    extra = {"result_lag": (0, 1), "order": ("fcfs", "lpm")}
    assert set(plan_ladder(CHAT, SEEN, extra=extra).held) >= set(extra)
    engine = {**CHAT, "engine": {"scheduler": "vllm"}}
    plan = plan_ladder(engine, SEEN, extra=extra, groups=["duplicates"])
    assert [rung.name for rung in plan.rungs] == ["duplicates", REST, "result_lag", "order"]
    assert plan.cells[-1].config["engine"]["order"] == "lpm"
    assert plan.cells[0].config["engine"]["result_lag"] == 0


# --- a ladder ---


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Ladder:
    return ladder(CHAT, tmp_path_factory.mktemp("ladder") / "out", groups=["duplicates", "eviction_unit"], jobs=1)


def test_whole_tokens_add_up_to_the_difference_with_nothing_left(made: Ladder) -> None:
    tokens = made.of("hit_tokens")
    difference = int(made.end("hit_tokens", upper=True) - made.end("hit_tokens", upper=False))
    assert difference != 0
    assert tokens["whole"].sum() == difference
    assert sum(map(Fraction, tokens["share"])) == difference
    assert (abs(tokens["whole"] - tokens["value"]) < 1).all()
    rates = made.of("token_hit_rate")
    ends = [made.subsets[["hit_tokens", "prompt_tokens"]].iloc[at].tolist() for at in (0, -1)]
    assert sum(map(Fraction, rates["share"])) == Fraction(*ends[1]) - Fraction(*ends[0])


def test_every_metric_has_a_share_for_every_rung_and_pairs_for_every_two(made: Ladder) -> None:
    assert set(made.attribution["metric"]) == {"hit_tokens", "token_hit_rate", "concurrency", "preemptions"}
    for metric in (*made.attribution["metric"].unique(), TIME):
        assert list(made.of(metric)["rung"]) == made.rungs == ["duplicates", "eviction_unit", REST]
    assert len(made.interactions) == 4 * 3
    assert len(made.subsets) == 8
    assert made.subsets["upper"].tolist()[:3] == ["none", "duplicates", "eviction_unit"]
    with pytest.raises(ValueError, match="known metrics: hit_tokens"):
        made.of("latency")


def test_the_fast_forms_were_run_and_agree_and_what_is_not_seen_changes_nothing(made: Ladder) -> None:
    (check,) = made.manifest["checks"]
    assert check["fast_forms_agree"] is True
    assert check["not_observable_changes"] == {"hit_tokens": 0, "preemptions": 0}


def test_a_folder_reloads_and_a_second_call_runs_nothing_and_writes_the_same(made: Ladder) -> None:
    assert made.path is not None
    before = _contents(made.path)
    again = ladder(CHAT, made.path, groups=["duplicates", "eviction_unit"], jobs=1)
    assert _contents(made.path) == before
    loaded = load_ladder(made.path)
    assert loaded.manifest == again.manifest
    assert loaded.of("hit_tokens")["whole"].tolist() == made.of("hit_tokens")["whole"].tolist()
    assert loaded.of("token_hit_rate")["share"].tolist() == made.of("token_hit_rate")["share"].tolist()


def _contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name not in ("provenance.json", ".lock")
    }


def test_a_half_folder_and_a_foreign_one_are_refused(made: Ladder, tmp_path: Path) -> None:
    assert made.path is not None
    half = tmp_path / "half"
    shutil.copytree(made.path, half)
    (half / "attribution.csv").unlink()
    with pytest.raises(ValueError, match="not a finished ladder"):
        load_ladder(half)
    other = json.loads((half / "ladder.json").read_text())
    (half / "ladder.json").write_text(json.dumps({**other, "kind": "compare"}))
    shutil.copy(made.path / "attribution.csv", half)
    with pytest.raises(ValueError, match="expected a ladder"):
        load_ladder(half)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="holds other files"):
        ladder(CHAT, tmp_path / "foreign", groups=["duplicates"], jobs=1)


def test_figures_show_the_walk_and_every_pair(made: Ladder) -> None:
    import matplotlib.pyplot as plt

    axes = plot_waterfall(made)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == len(made.rungs) + 2
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx([100 * value for value in made.of("token_hit_rate")["value"]])
    assert "token hit rate (%)" in axes.get_xlabel()
    heat = plot_interactions(made, metric="hit_tokens")
    assert len(heat.texts) == 3 + 3  # the diagonal and the pairs
    for metric in ("latency", "prompt_tokens"):
        with pytest.raises(ValueError, match="expected one of hit_tokens"):
            plot_waterfall(made, metric=metric)
    plt.close("all")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_the_scale_of_the_pairs_is_named_inside_the_figure(made: Ladder, count: int) -> None:
    import matplotlib.pyplot as plt

    names = made.rungs[:1] + [f"rung {number}" for number in range(1, count)]
    one = made.attribution.groupby(["metric", "pool_bytes"]).head(1)
    few = Ladder(
        {**made.manifest, "rungs": names}, pd.concat([one] * count), made.interactions[:0], made.subsets, made.times
    )
    figure: Any = plot_interactions(few).get_figure()
    figure.canvas.draw()
    label = figure.axes[-1].yaxis.label.get_window_extent()
    assert 0 <= label.y0 < label.y1 <= figure.bbox.height
    plt.close(figure)


def test_a_walk_through_the_engine_has_rungs_of_the_scheduler(tmp_path: Path) -> None:
    options = {"num_sessions": 4, "num_system_prompts": 2, "max_message": 60, "max_reply": 30}
    base = {
        "workload": {"trace": "chat", "options": options},
        "pool": {"pool": "200 MiB"},
        "engine": {"scheduler": "vllm", "max_num_seqs": 8, "max_num_batched_tokens": 256, "speed": 50.0},
    }
    done = ladder(
        base,
        tmp_path / "out",
        lower={"kind": "block", "page_size": 16},
        upper={"kind": "block", "page_size": 16, "hash_unit": 4, "publish_generated": "finish"},
        extra={"result_lag": (0, 1)},
        jobs=1,
        rounds=1,
    )
    assert done.manifest["of"] == "run"
    assert done.rungs == ["publish_generated", "hash_unit", "result_lag"]
    total = done.end("hit_tokens", upper=True) - done.end("hit_tokens", upper=False)
    assert done.of("hit_tokens")["whole"].sum() == total
    assert done.of("concurrency")["value"].abs().sum() > 0


# --- the anchor: two rules apart, the designs are one ---

EQUAL = {"last_token_rule": False, "page_size": 1}
TREE = {"eviction_unit": "page", "split_touches_suffix": False, "demand_slack": 0}


def anchor(base: dict[str, Any], out: Path) -> Ladder:
    """From block to token with those rules of eviction at block's values, each id a token, one request at a time."""
    return ladder(
        base,
        out,
        lower={"kind": "block", **EQUAL},
        upper={"kind": "token", **EQUAL, **TREE},
        groups=["duplicates+recency"],
        jobs=1,
        rounds=0,
    )


def expect_zero(made: Ladder) -> None:
    for metric in ("hit_tokens", "token_hit_rate", "preemptions"):
        table = made.attribution[made.attribution["metric"] == metric]
        assert (table[["value", "low", "high"]] == 0).all(axis=None)
    assert made.subsets["hit_tokens"].nunique() == len(made.manifest["pools"])
    assert (made.subsets["evicted_pages"] > 0).all()


def test_without_the_three_rules_of_eviction_the_total_is_zero_on_a_synthetic_twin(tmp_path: Path) -> None:
    workload = {"trace": "mooncake_like", "unit": "ids", "requests": 150}
    expect_zero(anchor({"workload": workload, "pool": {"pool": ["10 %", "40 %"]}}, tmp_path / "out"))


def test_without_the_three_rules_of_eviction_the_total_is_zero_on_mooncake(tmp_path: Path) -> None:
    trace = str(public_file("conversation_trace.jsonl"))
    workload = {"trace": trace, "unit": "ids", "requests": 4000}
    expect_zero(anchor({"workload": workload, "pool": {"pool": ["5 %", "25 %"]}}, tmp_path / "out"))


# --- the command ---


def test_the_command_carries_a_ladder_on_prints_it_and_shows_it_again(made: Ladder, tmp_path: Path) -> None:
    import tomli_w
    from kvarena.experiments.cli import app

    config, runner = tmp_path / "ladder.toml", CliRunner()
    config.write_text(tomli_w.dumps({**CHAT, "ladder": {"fields": ["duplicates"]}}))
    arguments = ["ladder", str(config), "--fields", "duplicates", "--fields", "eviction_unit", "--jobs", "1"]
    done = runner.invoke(app, [*arguments, "--out", str(made.path), "--quiet"])
    assert done.exit_code == 0, done.output
    for text in ("eviction_unit", "rest", "all of them", "Not observable here", "preempt_keeps"):
        assert text in done.output
    shown = runner.invoke(app, ["ladder", "--show", str(made.path), "--out", str(tmp_path / "figures")])
    assert shown.exit_code == 0
    assert "all of them" in shown.output
    assert (tmp_path / "figures" / "waterfall.png").is_file()
    for wrong in (["ladder", "chat"], ["ladder", "chat", "--out", str(tmp_path / "x"), "--rung", "live=1"]):
        assert isinstance(runner.invoke(app, wrong).exception, ValueError)


def test_several_pools_of_the_command_are_walked_and_printed_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvarena.experiments import ladder_plots
    from kvarena.experiments.cli import app

    monkeypatch.setattr(ladder_plots, "write_figures", lambda *given: [])  # they take seconds
    arguments = ["ladder", "chat", "--from", "block", "--to", "block:duplicates=merge", "--set", "requests=6"]
    arguments += ["--rounds", "0", "--jobs", "1", "--quiet", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--pool", "200 MiB", "--pool", "150 MiB", "--live", "2"])
    assert done.exit_code == 0, done.output
    assert load_ladder(tmp_path / "out").manifest["pools"] == [150 << 20, 200 << 20]
    for pool in ("150 MiB", "200 MiB"):
        assert done.output.count(f"pool {pool}, 2 subsets") == 1
        assert f"than apart, hit tokens, pool {pool}" in " ".join(done.output.split())
    assert "least..most, points" in done.output


def test_a_pool_that_holds_no_request_is_refused_with_one_piece_of_advice(tmp_path: Path) -> None:
    for pool in ("150 MiB", "1 MiB"):
        with pytest.raises(ValueError, match=f"ladder: pool {pool}") as refused:
            ladder({"workload": {"trace": "chat"}, "pool": {"pool": pool}}, tmp_path / "out")
        assert str(refused.value).count("larger") == 1


def test_a_config_says_what_is_walked(tmp_path: Path) -> None:
    path = tmp_path / "ladder.toml"
    path.write_text(
        '[workload]\ntrace = "chat"\n[ladder]\nfrom = "vllm"\nfields = ["page_size"]\nrungs = { live = [1, 2] }\n'
    )
    base, asked = read_base(str(path))
    assert base == {"workload": {"trace": "chat"}}
    assert asked == {"from": "vllm", "fields": ["page_size"], "rungs": {"live": [1, 2]}}
    path.write_text("[ladder]\nform = 1\n")
    with pytest.raises(ValueError, match=r"\[ladder\]: expected fields, from, rungs, to"):
        read_base(str(path))


# --- the page ---

PAGE = (Path(__file__).parents[2] / "docs" / "ladder.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", [0, 1])
def test_python_on_the_page_runs(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[number], "ladder.md", "exec"), {"OUT": tmp_path / "out"})
    assert capsys.readouterr().out.strip()


def test_the_config_on_the_page_is_a_ladder() -> None:
    (text,) = blocks("toml")
    base = tomllib.loads(text)
    asked = base.pop("ladder")
    plan = plan_ladder(base, SEEN, lower=asked["from"], upper=asked["to"], groups=asked["fields"], extra=asked["rungs"])
    assert [rung.name for rung in plan.rungs][-3:] == [REST, "result_lag", "order"]


def test_the_table_on_the_page_has_every_switch_with_both_designs_values() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+ \| [^|]+) \|", PAGE, re.MULTILINE))
    values = {name: tuple(part.strip(" `") for part in rows[name].split("|")) for name in GENERAL}
    for name in GENERAL:
        own = [getattr(design({"kind": kind}), name) for kind in ("block", "token")]
        assert values[name] == tuple("none" if value is None else str(value).lower() for value in own)


def test_the_shipped_config_is_a_ladder_through_the_engine() -> None:
    from importlib.resources import files

    base, asked = read_base(str(files("kvarena.experiments.configs") / "ladder-engine.toml"))
    extra = {name: tuple(ends) for name, ends in asked["rungs"].items()}
    plan = plan_ladder(base, SEEN, lower=asked["from"], upper=asked["to"], groups=asked["fields"], extra=extra)
    assert plan.kind == "run"
    assert {"result_lag", "order", "hash_unit"} <= {rung.name for rung in plan.rungs}


def test_time_is_a_median_of_rounds_with_their_range_and_marks_what_is_noise(made: Ladder) -> None:
    assert made.manifest["time_rounds"] == 3
    times = made.of(TIME)
    assert (times["spread_low"] <= times["spread_high"]).all()
    assert (times["within_noise"] == ((times["spread_low"] <= 0) & (times["spread_high"] >= 0))).all()
    assert times["value"].sum() == pytest.approx((times["upper_us"] - times["lower_us"]).iloc[0])
    assert (times["lower_us"] > 0).all()


def test_time_shares_come_from_what_each_round_measured() -> None:
    """Two rungs, worked out by hand: the first is worth 10 us in either setting, the second nothing but noise."""
    rounds = [[100.0, 110.0, 101.0, 111.0], [100.0, 110.0, 99.0, 109.0], [100.0, 110.0, 100.0, 110.0]]
    plan = SimpleNamespace(rungs=[SimpleNamespace(name="dear"), SimpleNamespace(name="idle")])
    dear, idle = _time_rows(plan, 1, rounds, [])  # type: ignore[arg-type]
    assert (dear["value"], dear["spread_low"], dear["spread_high"], dear["within_noise"]) == (10.0, 10.0, 10.0, False)
    assert (idle["value"], idle["spread_low"], idle["spread_high"], idle["within_noise"]) == (0.0, -1.0, 1.0, True)
    assert (dear["lower_us"], dear["upper_us"]) == (100.0, 110.0)


def test_without_rounds_the_time_is_not_shown_and_the_table_says_why(tmp_path: Path, made: Ladder) -> None:
    once = ladder(CHAT, tmp_path / "once", groups=["duplicates"], jobs=1, rounds=0)
    assert once.of(TIME)["spread_low"].isna().all()
    shown, timed = (next(ladder_tables(one)) for one in (once, made))
    assert "not shown, since it was taken once" in str(shown.caption)
    assert [any("µs" in str(column.header) for column in table.columns) for table in (shown, timed)] == [False, True]
    assert len(plot_metrics(once).axes) == 3
    assert "taken once" in plot_shares(once, metric=TIME).get_xlabel()


def test_rounds_say_how_far_they_are_and_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(ladder_times.time, "monotonic", lambda: next(clock))
    said: list[str] = []
    pace = ladder_times.Pace(2, 4, said.append, every=5)
    for _ in range(8):
        pace.next()
    assert said == [
        "allocator time: round 1 of 2, run 1 of 4",
        "allocator time: round 1 of 2, run 4 of 4; about 13 s left",
        "allocator time: round 2 of 2, run 1 of 4; about 10 s left",
        "allocator time: round 2 of 2, run 4 of 4; about 2 s left",
    ]


def test_bars_of_every_metric_have_the_shares_and_the_whiskers_of_the_tables(made: Ladder) -> None:
    for metric in ("token_hit_rate", "concurrency", "preemptions", TIME):
        ax = plot_shares(made, metric=metric)
        scale = 100 if metric == "token_hit_rate" else 1
        widths = [bar.get_width() for bar in ax.patches]
        assert widths == pytest.approx([scale * value for value in made.of(metric)["value"]])
    assert len(plot_metrics(made).axes) == 4
    with pytest.raises(ValueError, match="metric: expected one of"):
        plot_shares(made, metric="latency")
