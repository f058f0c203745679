"""Figures: nothing overlaps, nothing is drawn that is not there, and an allocator looks alike everywhere."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from kvarena.allocators.config import block, token
from kvarena.experiments import plots
from kvarena.experiments.compare import compare
from kvarena.experiments.report import result_footer
from kvarena.experiments.specs import allocator_entries
from kvarena.experiments.style import (
    KIND_COLOURS,
    STYLE,
    Look,
    add_footer,
    looks,
    printable,
    save_figure,
    use_paper_style,
)
from support.golden import CASES
from support.small import shared, small

mpl.use("agg")
CASE = {row["id"]: row for row in map(json.loads, CASES.read_text().splitlines())}
ALL = {**plots.PLOTS, "allocator_time": plots.allocator_time, "difference": plots.difference}
ALL["hit_rate_by_page_size"] = plots.hit_rate_by_page_size


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def with_frames(**frames):
    """The shared result with some tables replaced."""
    return replace(shared(), **frames)


def texts(figure):
    """Every text that is drawn, with its box in pixels."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    found = [*figure.texts, *(text for axes in figure.axes for text in texts_of(axes))]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in found if t.get_visible() and t.get_text().strip()]


def texts_of(axes):
    yield from (axes.title, axes._left_title, axes._right_title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
    if axes.get_legend() is not None:
        yield from axes.get_legend().get_texts()
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        low, high = sorted(limits)
        for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False):
            if low <= place <= high:
                yield label


def overlapping(figure):
    drawn = texts(figure)
    pairs = [(a, b) for i, a in enumerate(drawn) for b in drawn[i + 1 :]]
    return [(a[0], b[0]) for a, b in pairs if _area(a[1], b[1]) > 1.0]


def _area(a, b):
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(width, 0) * max(height, 0)


def renamed():
    """The shared result with long names of the user's own in front of its labels."""
    about = [
        {**one, "label": f"what I call ${place} and ${one['name']}: {one['label']}, page 64"}
        for place, one in enumerate(shared().manifest["allocators"])
    ]
    return replace(shared(), manifest={**shared().manifest, "allocators": about})


@pytest.mark.parametrize("given", [shared, renamed])
@pytest.mark.parametrize("name", list(ALL))
def test_no_labels_overlap_and_none_is_cut_off(name, given):
    with mpl.rc_context(STYLE):
        figure = ALL[name](given()).get_figure()
        add_footer(
            figure, "kvarena 0.0.0 · chat · llama-3-8b · 1 live · prompts only · outputs recorded · config 0123456789"
        )
        assert overlapping(figure) == []
        box = figure.bbox
        for text, extent in texts(figure):
            assert extent.x0 >= box.x0 - 1, text
            assert extent.x1 <= box.x1 + 1, text
            assert extent.y0 >= box.y0 - 1, text
            assert extent.y1 <= box.y1 + 1, text


@pytest.mark.parametrize("name", list(ALL))
def test_axes_given_are_drawn_into_and_no_default_changes(name):
    before = dict(mpl.rcParams)
    figure, ax = plt.subplots()
    assert ALL[name](shared(), ax=ax) is ax
    assert plt.get_fignums() == [figure.number]
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("name", list(ALL))
def test_axes_have_labels_and_units(name):
    ax = ALL[name](shared())
    for axes in ax.get_figure().axes:
        assert axes.get_ylabel() or [t.get_text() for t in axes.get_yticklabels()] == [
            "tail",
            "reservation",
            "duplicates",
        ]
    lowest = ax.get_figure().axes[-1]
    assert lowest.get_xlabel() or [t.get_text() for t in lowest.get_xticklabels()] == list(plots.VERBS)
    words = " ".join(a.get_xlabel() + a.get_ylabel() for a in ax.get_figure().axes)
    assert any(unit in words for unit in ("%", "bytes", "GiB", "MiB", "µs", "points", "tokens"))


def test_a_name_of_the_users_own_is_in_the_legend_before_the_rules():
    specs = [
        {"name": "frugal", "kind": "block", "page_size": 64},
        {"name": "sglang"},
        {"name": "block-16", "kind": "block"},
    ]
    labels = [entry.label for entry in allocator_entries(specs)]
    assert labels == [
        "frugal: block (vLLM 0.32.0 rules), page 64",
        "token (SGLang 0.5.22 rules)",
        "block (vLLM 0.32.0 rules)",
    ]
    again = [entry.label for entry in allocator_entries([entry.as_toml() for entry in allocator_entries(specs)])]
    assert again == labels


@pytest.mark.parametrize("name", ["hit_rate", "difference", "hit_rate_by_page_size"])
def test_what_is_known_of_replies_stands_under_every_hit_rate(name):
    lowest = ALL[name](shared()).get_figure().axes[-1]
    assert lowest.get_xlabel().endswith("; outputs: recorded")


def test_replies_that_were_not_replayed_are_said_to_be_so_and_those_that_were_are_not():
    recorded = shared()
    for outputs, told in (("replay", "recorded"), ("none", "recorded, not replayed")):
        engine = {**recorded.config["engine"], "outputs": outputs}
        result = replace(recorded, config={**recorded.config, "engine": engine})
        assert plots.difference(result).get_xlabel().endswith(f"; outputs: {told}")
        assert f" · outputs {told} · config " in result_footer(result)
    prompts = replace(recorded, config={**recorded.config, "engine": {**recorded.config["engine"], "outputs": "none"}})
    nothing = {**recorded.manifest, "visible": {**recorded.visible, "outputs": "none"}}
    assert " · outputs none · config " in result_footer(replace(prompts, manifest=nothing))


def test_a_name_is_no_formula():
    look = looks([{"name": "a", "label": "$x_1$ \x07", "kind": "block", "page_size": 16}])["a"]
    assert look.label == "\\$x_1\\$ \ufffd"


@pytest.mark.parametrize("name", list(ALL))
def test_legends_never_say_plain_vllm_or_sglang(name):
    for axes in ALL[name](shared()).get_figure().axes:
        legend = axes.get_legend()
        for text in [] if legend is None else legend.get_texts():
            assert text.get_text().strip() not in ("vLLM", "SGLang", "vllm", "sglang")


def test_an_empty_table_says_no_data_and_does_not_fail():
    empty = with_frames(
        summary=shared().summary.iloc[:0], steps=shared().steps.iloc[:0], timings=shared().timings.iloc[:0]
    )
    for name, plot in ALL.items():
        figure = plot(empty).get_figure()
        figure.canvas.draw()
        assert any("no data" in text for text, _ in texts(figure)), name


# --- the reported faults ---


def test_page_sizes_are_categories_in_numeric_order():
    case = CASE["plot-03"]
    sizes = [row["page_size"] for row in case["input"]["rows"]]
    result = small(allocators=[block(page_size=size) for size in sizes], pool="700 MiB")
    ax = plots.hit_rate_by_page_size(result)
    assert [int(t.get_text()) for t in ax.get_xticklabels()] == case["expect"]["order"]
    assert list(ax.get_xticks()) == [0, 1, 2, 3]
    legend = [t.get_text() for t in ax.get_legend().get_texts()]
    expected = {1: ", page 1", 4: ", page 4", 16: "", 128: ", page 128"}
    assert legend == [f"block (vLLM 0.32.0 rules){expected[int(size)]}" for size in case["expect"]["legend"]]
    assert len({line.get_color() for line in ax.get_lines()}) == 4


def test_the_figure_by_page_size_names_its_pool_and_shows_the_mean_and_range_of_the_seeds():
    result = shared()
    ax = plots.hit_rate_by_page_size(result)
    assert ax.get_xlabel().startswith("page size (tokens), pool 700 MiB;")
    assert "mean and range of 2 seeds" in [text.get_text() for text in ax.get_legend().get_texts()]
    at = result.summary[result.summary["pool_bytes"] == result.reference_pool]
    marks = {line.get_label(): line for line in ax.get_lines()}
    spans = [path.vertices[:, 1].tolist() for one in ax.collections for path in one.get_paths()]
    for (name, label), span in zip(result.labels.items(), spans, strict=True):
        rates = 100 * at.loc[at["allocator"] == name, "token_hit_rate"]
        assert list(marks[label].get_ydata()) == pytest.approx([rates.mean()])
        assert span == pytest.approx([rates.min(), rates.max()])


@pytest.mark.parametrize(
    ("sizes", "labels"),
    [
        ([1, 2, 3], ["1 GiB", "2 GiB", "3 GiB"]),
        ([3], ["3 GiB"]),
        ([1.5, 6, 21.5], ["1.5 GiB", "6 GiB", "21.5 GiB"]),
        ([1, 1.01, 3], ["1 GiB", "2 GiB"]),
        ([1, *(n / 8 for n in range(9, 64)), 8], ["1 GiB", "2 GiB", "4 GiB", "8 GiB"]),
    ],
    ids=["few", "one", "shares", "two-close", "many"],
)
def test_every_measured_pool_has_a_label_where_all_have_room_else_powers_of_two(sizes, labels):
    figure = plt.figure(figsize=(6.4, 2), layout="constrained")
    ax = figure.subplots()
    plots._pool_axis(ax, pd.DataFrame({"pool_bytes": [int(size * 2**30) for size in sizes]}))
    figure.canvas.draw()
    assert [text.get_text() for text in ax.get_xticklabels()] == labels
    assert not overlapping(figure)


def test_gaps_stay_gaps_and_an_empty_series_keeps_its_colour_and_says_so():
    case = CASE["plot-04"]["input"]["series"]
    _, ax = plt.subplots()
    styles = {
        "block": Look("block", "#0072B2", "o", "-", "white"),
        "radix": Look("radix", "#D55E00", "s", "-", "white"),
    }
    for name, values in case.items():
        plots.draw_series(ax, [1, 2, 3], values, styles[name])
    drawn = {line.get_label(): line for line in ax.get_lines()}
    y = list(drawn["block"].get_ydata())
    assert (y[0], y[2]) == (0.1, 0.3)
    assert math.isnan(y[1])
    assert len(drawn["radix: no data"].get_ydata()) == 0
    assert drawn["radix: no data"].get_color() == "#D55E00"
    handles, labels = ax.get_legend_handles_labels()
    assert labels == ["block", "radix: no data"]
    assert [handle.get_color() for handle in handles] == ["#0072B2", "#D55E00"]


def test_a_missing_rate_is_a_gap_in_the_curve_and_not_zero():
    summary = shared().summary.copy()
    hole = (summary["allocator"] == "vllm") & (summary["pool_bytes"] == shared().pools[0])
    summary.loc[hole, "token_hit_rate"] = math.nan
    ax = plots.hit_rate(with_frames(summary=summary), ax=plt.subplots()[1])
    line = next(line for line in ax.get_lines() if line.get_label() == "block (vLLM 0.32.0 rules)")
    values = list(line.get_ydata())
    assert math.isnan(values[0])
    assert values[1] > 0


def test_an_allocator_without_values_keeps_its_place_in_every_figure():
    summary = shared().summary.copy()
    summary.loc[summary["allocator"] == "vllm", ["token_hit_rate", "evicted_pages"]] = math.nan
    result = with_frames(summary=summary)
    for plot in (plots.hit_rate, plots.evictions):
        labels = [t.get_text() for t in plot(result, ax=plt.subplots()[1]).get_legend().get_texts()]
        assert labels[:2] == ["block (vLLM 0.32.0 rules): no data", "token (SGLang 0.5.22 rules)"]


# --- what the curves say ---


def test_curves_are_the_tables():
    result = shared()
    ax = plots.hit_rate(result, ax=plt.subplots()[1])
    line = next(line for line in ax.get_lines() if line.get_label().startswith("token"))
    rates = result.summary[result.summary["allocator"] == "sglang"].groupby("pool_bytes")["token_hit_rate"].mean()
    assert list(line.get_xdata()) == result.pools
    assert list(line.get_ydata()) == pytest.approx((100 * rates).tolist())


def test_the_difference_is_paired_by_seed():
    result = shared()
    ax = plots.difference(result)
    wide = result.summary.pivot(index=["pool_bytes", "seed"], columns="allocator", values="token_hit_rate")
    expected = (100 * (wide["sglang"] - wide["vllm"])).groupby("pool_bytes").mean()
    assert list(ax.get_lines()[0].get_ydata()) == pytest.approx(expected.tolist())


def test_the_pool_of_a_single_request_is_an_area_too():
    axes = plots.occupancy(compare([[1, 2, 3] * 30], pool="1 GiB", kernel_batches=0))
    axes.figure.canvas.draw()
    assert all(area.get_window_extent().width > 100 for area in axes.collections)
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_occupancy_fills_the_pool_at_every_step():
    ax = plots.occupancy(shared(), ax=plt.subplots()[1])
    tops = [collection.get_paths()[0].vertices[:, 1].max() for collection in ax.collections]
    assert max(tops) == pytest.approx(100)


def test_one_pool_and_one_allocator_are_drawn_too():
    result = small(pool="700 MiB", allocators=["vllm"])
    for plot in ALL.values():
        plot(result).get_figure().canvas.draw()


# --- looks ---


def entry(kind, size, name=None):
    return {"name": name or f"{kind}{size}", "label": f"{kind} {size}", "kind": kind, "page_size": size}


def test_an_allocator_looks_alike_whatever_stands_beside_it():
    alone = looks([entry("token", 1)])["token1"].colour
    beside = looks([entry("block", 16), entry("block", 64), entry("token", 1)])["token1"].colour
    assert alone == beside == KIND_COLOURS["token"]


def test_page_sizes_of_a_kind_are_shades_and_equal_ones_are_dashes():
    found = looks([entry("block", 16), entry("block", 64), entry("block", 16, "other")])
    assert found["block16"].colour != found["block64"].colour
    assert found["block16"].colour == found["other"].colour
    assert found["block16"].dashes != found["other"].dashes
    assert found["block16"].hatch != found["other"].hatch


def test_bars_of_one_colour_are_told_apart():
    result = small(allocators=["token:page_size=16", "token:page_size=64"], pool="700 MiB")
    one, two = plots.looks(result.manifest["allocators"]).values()
    assert one.colour == two.colour
    bars = plots.waste(result).patches
    assert {bar.get_hatch() for bar in bars} == {one.hatch, two.hatch}
    assert {bar.get_facecolor() for bar in bars} == {bars[0].get_facecolor()}
    lines = plots.allocator_time(result).get_legend().get_lines()
    assert len({str(line._unscaled_dash_pattern) for line in lines}) == 2


def test_designs_that_do_not_differ_give_a_flat_line_and_no_tiny_scale():
    result = compare([[1, 2, 3], [4, 5, 6]], pool="1 GiB", kernel_batches=0)
    upper = plots.hit_rate(result)
    lower = upper.get_figure().axes[1]
    assert upper.get_ylim()[1] >= 1
    assert lower.get_ylim() == (-0.05, 0.05)


def luminance(colour):
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_two_designs_differ_by_more_than_hue():
    a, b = looks([entry("block", 16), entry("token", 1)]).values()
    assert a.marker != b.marker
    assert a.face != b.face
    states = sorted(luminance(colour) for colour in plots.STATE_COLOURS.values())
    assert all(second - first > 0.2 for first, second in pairwise(states))


@pytest.mark.parametrize("name", [*plots.PLOTS, "allocator_time"])
def test_the_same_figure_gives_the_same_bytes(name, tmp_path):
    written = []
    for turn in ("a", "b"):
        figure = plots.draw(name, shared(), "footer")
        written.append([path.read_bytes() for path in save_figure(figure, tmp_path / turn)])
    assert written[0] == written[1]


def test_paper_style_sets_the_column_width_and_embeds_fonts():
    with mpl.rc_context():
        use_paper_style("double")
        assert mpl.rcParams["figure.figsize"][0] == 7.0
        assert mpl.rcParams["pdf.fonttype"] == 42
        assert plots.hit_rate(shared()).get_figure().get_figwidth() == 7.0
        with pytest.raises(ValueError, match="single, double"):
            use_paper_style("triple")


def unreplayed():
    """The shared result as if its replies had been left out: what stands under its hit rates is longer."""
    return replace(shared(), config={**shared().config, "engine": {**shared().config["engine"], "outputs": "none"}})


OF_HIT_RATES = ("hit_rate", "difference", "hit_rate_by_page_size")
EVERY_FIGURE = [(name, given) for name in ALL for given in (shared, renamed)] + [(n, unreplayed) for n in OF_HIT_RATES]


@pytest.mark.parametrize(("name", "given"), EVERY_FIGURE)
def test_a_single_column_holds_every_figure_whole_and_without_overlap(name, given):
    with mpl.rc_context():
        use_paper_style("single")
        figure = ALL[name](given()).get_figure()
        add_footer(
            figure, "kvarena 0.0.0 · chat · llama-3-8b · 1 live · prompts only · outputs recorded · config 0123456789"
        )
        assert figure.get_figwidth() == 3.35
        assert overlapping(figure) == []
        for text, extent in texts(figure):
            assert figure.bbox.padded(1).containsx(extent.x0), text
            assert figure.bbox.padded(1).containsx(extent.x1), text
            assert figure.bbox.padded(1).containsy(extent.y0), text
            assert figure.bbox.padded(1).containsy(extent.y1), text
        renderer = figure.canvas.get_renderer()
        for axes in figure.axes:
            assert axes.get_window_extent(renderer).width > 0.4 * figure.bbox.width
            assert axes.get_window_extent(renderer).height > 0.5 * figure.dpi


@pytest.mark.parametrize("name", [*plots.PLOTS, "allocator_time"])
def test_figures_of_a_result_folder_are_the_same_whatever_style_is_set(name, tmp_path):
    written = []
    for turn in ("plain", "paper"):
        with mpl.rc_context():
            if turn == "paper":
                use_paper_style("single")
            figure = plots.draw(name, shared(), "footer")
            written.append([path.read_bytes() for path in save_figure(figure, tmp_path / turn, kinds=("png",))])
    assert written[0] == written[1]


def test_the_difference_says_which_of_two_designs_of_a_kind_it_is_to():
    result = small(allocators=[block(page_size=64), block(), token()], pool=["450 MiB"])
    assert plots.difference(result).get_ylabel().startswith("minus block, page 64\n")
    assert plots.difference(shared()).get_ylabel().startswith("minus block\n")


def test_control_characters_are_shown_as_such():
    assert printable("a\x1b[31mb\nc") == "a\ufffd[31mb\ufffdc"


def test_plots_do_not_touch_the_result():
    result = shared()
    before = [frame.copy() for frame in (result.summary, result.steps, result.timings)]
    for plot in ALL.values():
        plot(result)
    for frame, copy in zip((result.summary, result.steps, result.timings), before, strict=True):
        pd.testing.assert_frame_equal(frame, copy)


def test_many_allocators_do_not_crowd_the_legend():
    designs = [block(), token(), block(page_size=64), token(page_size=16), token(demand_slack=0)]
    result = small(allocators=designs, pool=["450 MiB", "700 MiB"])
    with mpl.rc_context(STYLE):
        for name, plot in ALL.items():
            figure = plot(result).get_figure()
            assert overlapping(figure) == [], name
