"""Timelines: what was replayed is what the result has, the export keeps the format's rules, the map shows the pool."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from kvarena.experiments import pool_map, pool_slider, timeline_export
from kvarena.experiments.compare import compare
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.report import result_footer
from kvarena.experiments.results import Result
from kvarena.experiments.timeline import SHARED, Timeline, summary_lines, timeline
from support.commands import invoke

import kvarena

mpl.use("Agg")

OPTIONS = {"num_sessions": 12}


@pytest.fixture(scope="module")
def compared() -> Result:
    return compare("chat", requests=60, pool="700 MiB", live=6, outputs="replay", kernel_batches=0, options=OPTIONS)


@pytest.fixture(scope="module")
def ran() -> Result:
    sets = [
        "trace=chat",
        "requests=40",
        "pool=700 MiB",
        "speed=8",
        "options={num_sessions=12}",
        "allocator.name=sglang",
    ]
    return run_engine(run_config({}, [*sets, "scheduler=sglang", "declared_max_tokens=200"]))


@pytest.fixture(scope="module")
def lines(compared: Result, ran: Result) -> dict[str, Timeline]:
    return {**{name: timeline(compared, allocator=name) for name in compared.allocators}, "run": timeline(ran)}


def test_the_replay_is_the_result(compared: Result, ran: Result, lines: dict[str, Timeline]) -> None:
    for name in compared.allocators:
        row = compared.summary[compared.summary["allocator"] == name].iloc[0]
        one = lines[name]
        assert sum(span.hit_tokens for span in one.spans) == row["hit_tokens"]
        assert sum(mark.num_pages for mark in one.evictions) == row["evicted_pages"] > 0
    row = ran.summary.iloc[0]
    assert len(lines["run"].steps) == row["steps"]
    assert sum(mark.num_pages for mark in lines["run"].evictions) == row["evicted_pages"]


def test_states_add_up_to_what_the_allocator_counts(lines: dict[str, Timeline]) -> None:
    for one in lines.values():
        steps = {step.step: step for step in one.steps}
        if len(one.page_ids) < one.num_pages:
            continue
        for sample, step in enumerate(one.sampled):
            counts = Counter(one.states[sample].tolist())
            assert counts[1] == steps[step].evictable
            assert counts[2] + counts[SHARED] == steps[step].in_use
    assert (lines["vllm"].states == SHARED).any(), "system prompts are shared"


def test_a_timeline_says_which_seed_and_pool_it_shows() -> None:
    several = compare("chat", requests=6, seeds=[2, 5], pool="400 MiB", kernel_batches=0, options=OPTIONS)
    for asked, shown in ((None, 2), (5, 5)):
        made = timeline(several, seed=asked)
        assert summary_lines(made)[0].startswith(f"chat, seed {shown}: block")
        assert summary_lines(made)[0].endswith("pool 400 MiB")
        about = timeline_export.trace_events(made)["otherData"]
        assert (about["seed"], about["pool_bytes"]) == (shown, 400 << 20)


def test_another_trace_or_version_is_noticed(compared: Result) -> None:
    rows = compared.requests.copy()
    rows.loc[rows.index[3], "hit_tokens"] += 16
    with pytest.raises(ValueError, match="was made by another version"):
        timeline(replace(compared, requests=rows))


def test_cells_that_are_not_there_are_named(compared: Result) -> None:
    with pytest.raises(ValueError, match="allocator: expected one of vllm, sglang"):
        timeline(compared, allocator="exact")
    with pytest.raises(ValueError, match="pool: expected one of"):
        timeline(compared, pool=17)
    with pytest.raises(ValueError, match="seed: expected one of 0"):
        timeline(compared, seed=5)


# --- the export, by rules written here once more ---


def _problems(found: dict[str, Any]) -> list[str]:
    problems = []
    open_until: dict[Any, list[float]] = {}
    for event in sorted(found["traceEvents"], key=lambda e: (e.get("ts", -1), -e.get("dur", 0))):
        for name in ("ph", "pid", "tid", "name", "args"):
            if name not in event:
                problems.append(f"{name} is missing")
        if event["ph"] != "M" and not (event["ts"] >= 0):
            problems.append("ts")
        if event["ph"] == "X":
            stack = open_until.setdefault((event["pid"], event["tid"]), [])
            while stack and stack[-1] <= event["ts"]:
                stack.pop()
            end = event["ts"] + event["dur"]
            if event["dur"] < 0 or (stack and end > stack[-1]):
                problems.append(f"slice {event['name']}")
            stack.append(end)
        if event["ph"] == "C" and not all(isinstance(v, int) and v >= 0 for v in event["args"].values()):
            problems.append("counter")
    return problems


@pytest.mark.parametrize("name", ["vllm", "sglang", "run"])
def test_the_export_keeps_the_rules(lines: dict[str, Timeline], name: str, tmp_path: Path) -> None:
    one = lines[name]
    for path in (tmp_path / "t.json", tmp_path / "t.json.gz"):
        count = timeline_export.write_trace_events(one, path)
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found = json.loads(data)
        assert len(found["traceEvents"]) == count
        assert _problems(found) == []
    phases = Counter(event["ph"] for event in found["traceEvents"])
    requests = [e for e in found["traceEvents"] if e.get("cat") == "request"]
    assert {e["name"] for e in requests} == {span.request_id for span in one.spans}
    assert phases["C"] == 2 * len(one.steps)
    assert phases["i"] == len(one.evictions) > 0
    reasons = {e["args"]["reason"] for e in found["traceEvents"] if e["ph"] == "i"}
    assert reasons == set(found["otherData"]["evictions_by_reason"])
    assert "" not in reasons
    for event in (e for e in found["traceEvents"] if e["ph"] == "C" and e["name"] == "pages"):
        assert sum(event["args"].values()) == one.num_pages


SLICE = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 10, "args": {}}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{**SLICE, "ph": "Q"}], "ph: expected one of"),
        ([{**SLICE, "name": 3}], "name: expected str"),
        ([{**SLICE, "ts": -1}], "ts: expected a number from 0"),
        ([{**SLICE, "dur": float("nan")}], "dur: expected a number from 0"),
        ([SLICE, {**SLICE, "ts": 5}], "crosses the end of another at 10"),
        ([{**SLICE, "ph": "i"}], "s: expected g, p or t"),
        ([{**SLICE, "ph": "C"}], "args: expected numbers"),
        ([{**SLICE, "ph": "C", "args": {"a": "1"}}], "args: expected numbers"),
    ],
)
def test_a_broken_rule_is_found(events: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timeline_export.check_trace_events({"traceEvents": events})


def test_slices_that_touch_or_nest_are_allowed() -> None:
    inside, after = {**SLICE, "ts": 2, "dur": 3}, {**SLICE, "ts": 10}
    timeline_export.check_trace_events({"traceEvents": [after, SLICE, inside, {**SLICE, "tid": 2, "ts": 5}]})


# --- looking ---


def test_the_map_has_a_column_a_sample_and_a_row_a_page(lines: dict[str, Timeline]) -> None:
    for one in lines.values():
        ax = pool_map.pool_map(one)
        mesh = ax.collections[0]
        assert np.array_equal(mesh.get_array().reshape(one.states.T.shape), one.states.T)
        assert {text.get_text() for text in ax.get_legend().get_texts()} >= {"shared", "in use", "evictable", "free"}
        mpl.pyplot.close(ax.get_figure())


def test_a_map_without_evictions_has_no_mark_of_them_and_one_with_them_has(lines: dict[str, Timeline]) -> None:
    one = next(each for each in lines.values() if each.evictions)
    for shown, expected in (
        (one, True),
        (replace(one, marks=[mark for mark in one.marks if mark not in one.evictions]), False),
    ):
        ax = pool_map.pool_map(shown)
        texts = {text.get_text() for text in ax.get_legend().get_texts()}
        assert ("evictions" in texts) == bool(ax.get_lines()) == expected
        mpl.pyplot.close(ax.get_figure())


def test_the_footer_of_a_map_names_pool_seed_and_config_as_those_of_the_result_do(
    compared: Result, ran: Result, lines: dict[str, Timeline]
) -> None:
    for result, made in ((compared, lines["vllm"]), (ran, lines["run"])):
        figure = pool_map.draw_pool_map(made)
        footer = figure.texts[-1].get_text()
        plt.close(figure)
        config = result_footer(result).rpartition(" · ")[2]
        assert config.startswith("config ")
        assert footer.startswith(f"kvarena {kvarena.__version__} · chat · pool 700 MiB · seed 0 · ")
        assert footer.endswith(f" samples · {config}")


def test_every_sample_can_be_shown_and_told(lines: dict[str, Timeline]) -> None:
    one = lines["vllm"]
    for sample in (0, len(one.sampled) - 1):
        ax = pool_map.pages_at(one, sample)
        assert f"step {one.sampled[sample]}" in ax.get_title(loc="left")
        mpl.pyplot.close(ax.get_figure())
    told = pool_map.told(one, len(one.sampled) - 1)
    assert 0 < len(told) <= pool_map.MAX_LINES + 1
    with pytest.raises(ValueError, match="sample: expected 0 to"):
        pool_map.pages_at(one, len(one.sampled))


def test_the_slider_is_one_piece_of_html_with_every_state_and_every_line(lines: dict[str, Timeline]) -> None:
    one = lines["vllm"]
    html = pool_map.step_through(one)._repr_html_()
    constants = dict(re.findall(r"const ([A-Z]+) = (.*?);(?=const |\n)", html))
    data = np.frombuffer(base64.b64decode(json.loads(constants["STATES"])), np.uint8)
    unpacked = np.stack([(data >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)
    assert np.array_equal(unpacked[: one.states.size].reshape(one.states.shape), one.states)
    assert len(json.loads(constants["TOLD"])) == len(json.loads(constants["STEPS"])) == len(one.sampled)
    assert f"max='{len(one.sampled) - 1}'" in html
    assert not re.search(r"https?:|src=|import ", html)


def test_hostile_names_do_not_leave_the_slider(lines: dict[str, Timeline]) -> None:
    one = lines["vllm"]
    marks = [replace(mark, request_id="</script><script>alert(1)</script>") for mark in one.marks]
    html = pool_slider.slider_html(replace(one, marks=marks, title="<b>t</b>"))
    assert html.count("<script>") == html.count("</script>") == 1
    assert "&lt;b&gt;t&lt;/b&gt;" in html
    assert "\\u003c/script>" in html


def test_without_samples_the_map_is_shown(lines: dict[str, Timeline]) -> None:
    empty = replace(lines["vllm"], sampled=[])
    assert pool_map.step_through(empty).texts[0].get_text() == "no data"
    with pytest.raises(ValueError, match="no samples"):
        pool_slider.slider_html(empty)


def test_the_command_writes_both(compared: Result, tmp_path: Path) -> None:
    compared.save(tmp_path / "r")
    out, figure = tmp_path / "t.json", tmp_path / "map.png"
    shown = invoke("timeline", tmp_path / "r", "--allocator", "sglang", "--out", out, "--figure", figure)
    assert "evictions for capacity" in shown.stdout
    assert _problems(json.loads(out.read_text())) == []
    assert figure.stat().st_size > 10_000
    with pytest.raises(ValueError, match="--out: expected a file"):
        invoke("timeline", tmp_path / "r", "--out", tmp_path / "t.txt")
