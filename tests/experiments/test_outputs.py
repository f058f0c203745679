"""What is assumed of replies: none, unreachable, inferred, recorded, and the band of the first two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvarena.experiments.ceilings import measure_reuse
from kvarena.experiments.compare import compare
from kvarena.experiments.results import load_result
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.base import Request, Visible
from kvarena.experiments.traces.outputs import with_outputs
from kvarena.experiments.workloads import chat, make

SHAPE = chat.Shape(num_sessions=40, reply_median=40.0, retry_share=0.0)
HIDDEN = Visible(grain=1, publish_time=True, outputs="none", sessions=True)


def _talk() -> list[Request]:
    return list(chat.make(1, SHAPE))


def _bare(requests: list[Request]) -> list[Request]:
    return [replace(request, output_ids=None) for request in requests]


def test_inferred_replies_are_the_recorded_ones_where_a_turn_follows() -> None:
    recorded = _talk()
    inferred, visible = with_outputs(_bare(recorded), HIDDEN, "inferred")
    assert visible.outputs == "inferred"
    last = {request.session_id: request.request_id for request in recorded}
    for one, other in zip(recorded, inferred, strict=True):
        if last[one.session_id] == one.request_id:
            assert other.output_ids is None
        else:
            assert one.output_ids is not None
            assert np.array_equal(other.output_ids, one.output_ids)


def test_inferred_at_a_coarse_grain_serves_what_the_next_prompt_asks() -> None:
    rows = [
        {"timestamp": 0, "input_length": 20, "output_length": 30, "hash_ids": [1, 2], "session_id": "a"},
        {"timestamp": 5, "input_length": 64, "output_length": 4, "hash_ids": [1, 3, 4, 5], "session_id": "a"},
    ]
    trace = load_trace(rows, "mooncake", grain=16)
    inferred, _ = with_outputs(list(trace), trace.visible, "inferred")
    first, second = inferred
    asked = second.prompt_ids()
    assert np.array_equal(np.concatenate([first.prompt_ids(), first.reply_ids()]), asked[:50])
    assert measure_reuse(inferred, replies=True).prefix_tokens == [0, 49], "the reply's last token has no KV"
    assert measure_reuse(list(trace), replies=True).prefix_tokens == [0, 16]


def test_a_prompt_that_does_not_follow_on_infers_nothing() -> None:
    one, two = _talk()[:2]
    strange = [replace(one, output_ids=None, session_id="x"), replace(two, output_ids=None, session_id="x")]
    assert [r.output_ids for r in with_outputs(strange, HIDDEN, "inferred")[0]] == [None, None]


def test_unreachable_replies_have_ids_that_nothing_else_has() -> None:
    requests = _talk()
    replies, visible = with_outputs(requests, HIDDEN, "unreachable")
    assert visible.outputs == "unreachable"
    ids = np.concatenate([request.output_ids for request in replies])
    assert len(np.unique(ids)) == len(ids) == sum(request.num_output_tokens for request in requests)
    assert ids.max() < 0 <= min(request.token_ids.min() for request in requests)


def test_assumptions_that_a_trace_does_not_allow_are_refused() -> None:
    requests = _talk()
    with pytest.raises(ValueError, match="'recorded' needs replies that return"):
        with_outputs(requests, HIDDEN, "recorded")
    with pytest.raises(ValueError, match="'inferred' needs sessions"):
        with_outputs(requests, replace(HIDDEN, sessions=False), "inferred")
    with pytest.raises(ValueError, match="expected one of trace, none"):
        with_outputs(requests, HIDDEN, "guessed")
    with pytest.raises(ValueError, match=r"workload\.replies: 'inferred' needs sessions"):
        compare([[1, 2, 3]], replies="inferred", pool="1 GiB")
    with pytest.raises(ValueError, match=r"workload\.replies: 'band' is for"):
        compare("chat", replies="band", outputs="replay", requests=3, pool="1 GiB")


def test_the_band_is_the_two_runs_that_it_stands_for(tmp_path: Path) -> None:
    settings = {
        "requests": 150,
        "pool": ["15 %", "40 %"],
        "kernel_batches": 0,
        "live": 2,
        "options": {"num_sessions": 40},
    }
    band = compare("chat", replies="band", **settings)
    pools = {**settings, "pool": [f"{size} B" for size in band.pools]}
    upper = compare("chat", replies="none", **pools)
    lower = compare("chat", replies="unreachable", outputs="replay", **pools)
    assert band.summary["token_hit_rate"].tolist() == upper.summary["token_hit_rate"].tolist()
    assert band.summary["token_hit_rate_unreachable"].tolist() == lower.summary["token_hit_rate"].tolist()
    assert (lower.summary["token_hit_rate"] < upper.summary["token_hit_rate"]).any(), "replies take room somewhere"
    band.save(tmp_path / "r")
    again = load_result(tmp_path / "r")
    assert again.summary.equals(band.summary)
    assert "outputs none to unreachable (band)" in (tmp_path / "r" / "report.html").read_text()


def test_the_figure_draws_the_band() -> None:
    from kvarena.experiments.plots import OUTPUTS_BAND, hit_rate

    result = compare("chat", replies="band", requests=30, pool="60 %", kernel_batches=0, options={"num_sessions": 9})
    labels = hit_rate(result).get_legend_handles_labels()[1]
    assert OUTPUTS_BAND in labels
    plain = compare("chat", requests=30, pool=["40 %", "60 %"], kernel_batches=0, options={"num_sessions": 9})
    assert OUTPUTS_BAND not in hit_rate(plain).get_legend_handles_labels()[1]


def test_every_built_in_workload_says_what_it_has() -> None:
    assert make("chat", num_sessions=5).visible.outputs == "recorded"
    assert make("mooncake_like", num_requests=50).visible.outputs == "none"
