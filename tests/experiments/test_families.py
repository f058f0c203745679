"""Resamples of a trace keep what makes it a trace: groups whole, shared prefixes shared, copies without reuse of each
other."""

from collections import Counter

import numpy as np
import pytest
from kvarena.experiments.ceilings import measure_reuse
from kvarena.experiments.families import group, resample
from kvarena.experiments.traces.base import Request
from support.requests import request


def sessions(count: int, turns: int = 3, system: int = 4) -> list[Request]:
    """Each session: a shared system prompt, then tokens of its own, each turn longer by four."""
    rows = []
    for turn in range(turns):
        for s in range(count):
            prompt = [*range(system), *(1000 * (s + 1) + i for i in range(4 * (turn + 1)))]
            rows.append(request(f"{s}.{turn}", prompt, session_id=f"s{s}", arrival_s=10.0 * turn + 0.01 * s))
    return rows


def without_sessions(rows: list[Request]) -> list[Request]:
    return [request(r.request_id, r.token_ids.tolist(), arrival_s=r.arrival_s) for r in rows]


def hashed(rows: list[Request]) -> list[Request]:
    dense: dict[tuple[int, ...], int] = {}
    out = []
    for r in rows:
        tokens = r.token_ids.tolist()
        ids = [dense.setdefault(tuple(tokens[: i + 4]), len(dense)) for i in range(0, len(tokens), 4)]
        fields = {"grain": 4, "hash_ids": np.array(ids, np.int32), "arrival_s": r.arrival_s}
        out.append(Request(r.request_id, num_prompt_tokens=len(tokens), num_output_tokens=0, **fields))
    return out


FORMS = {
    "sessions": sessions,
    "families": lambda n: without_sessions(sessions(n)),
    "hashes": lambda n: hashed(sessions(n)),
}


@pytest.mark.parametrize("form", FORMS)
def test_groups_are_the_sessions_also_when_only_prefixes_tell_them_apart(form):
    rows = FORMS[form](60)
    groups = group(rows)
    assert groups.count == 60
    by_group = {}
    for label, row in zip(groups.label, rows, strict=True):
        by_group.setdefault(label, set()).add(row.request_id.partition(".")[0])
    assert all(len(members) == 1 for members in by_group.values())


@pytest.mark.parametrize("form", FORMS)
def test_depth_is_what_a_path_shares_with_other_groups(form):
    groups = group(FORMS[form](60))
    assert set(groups.depth.tolist()) == ({1} if form == "hashes" else {4})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("draw", [1, 2, 7])
def test_every_copy_reuses_the_shared_prefix_and_itself_and_no_other_copy(form, draw):
    rows = FORMS[form](60)
    made = resample(rows, draw)
    drawn = Counter(r.request_id for r in made)
    assert max(drawn.values()) == 1, "request ids stay unique"
    distinct_of_a_group = 12  # tokens a session has of its own
    groups = sum(r.request_id.split("~")[0].endswith(".0") for r in made)
    assert groups == 60
    reuse = measure_reuse(made)
    assert reuse.distinct_tokens == 4 + 60 * distinct_of_a_group


def test_a_session_with_a_branch_in_shared_ground_changes_every_branch():
    """Sessions 0 and 1 share eight tokens; session 0 also has a request that leaves after four."""
    rows = [request("x.0", [*range(4), 900, 901], session_id="a"), request("x.1", [*range(8), 500], session_id="a")]
    rows += [request(f"y{i}.0", [*range(8), 600 + i], session_id=f"y{i}") for i in range(30)]
    groups = group(rows)
    assert groups.depth[:2].tolist() == [4, 8]
    copies = [r for r in resample(rows, 3) if r.request_id.startswith("x.") and "~" in r.request_id]
    for copy in copies:
        original = rows[int(copy.request_id[2])].token_ids
        assert np.flatnonzero(copy.token_ids != original).tolist() == [4 if copy.request_id[2] == "0" else 8]


def test_a_reply_that_returns_in_the_next_turn_returns_in_the_copy():
    rows = []
    for s in range(40):
        own = 100 * (s + 1)
        rows.append(request(f"{s}.0", [1, 2], [own, own + 1], session_id=f"s{s}"))
        rows.append(request(f"{s}.1", [1, 2, own, own + 1, own + 2], [], session_id=f"s{s}"))
    by_id = {r.request_id: r for r in resample(rows, 1)}
    copies = [name for name in by_id if "~" in name and ".0" in name]
    assert copies
    for name in copies:
        first, second = by_id[name], by_id[name.replace(".0", ".1")]
        assert first.output_ids[0] > 4002, "a fresh token where the session leaves the shared prompt"
        assert second.token_ids[:4].tolist() == [*first.token_ids, *first.output_ids]


def test_the_same_draw_is_the_same_requests_and_another_draw_another():
    rows = sessions(40)
    names = [[(r.request_id, r.arrival_s) for r in resample(rows, draw)] for draw in (1, 1, 2)]
    assert names[0] == names[1] != names[2]


def test_arrivals_move_inside_the_clocks_tick_only_where_requests_arrive_together():
    coarse = [request(f"{i}", [i, i + 1], arrival_s=3.0 * (i // 4)) for i in range(80)]
    fine = [request(f"{i}", [i, i + 1], arrival_s=0.5 * i) for i in range(80)]
    for made in resample(coarse, 1):
        if "~" not in made.request_id:
            start = 3.0 * (int(made.request_id) // 4)
            assert start <= made.arrival_s < start + 3.0
    assert [r.arrival_s for r in resample(fine, 1)] == [0.5 * i for i in range(80)]
    for rows in (coarse, fine):
        times = [r.arrival_s for r in resample(rows, 2)]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (sessions(19), "19 session groups"),
        ([request(str(i), [5, 6, 7, i], session_id="one") for i in range(50)], "1 session groups"),
        ([Request(str(i), float(i), 10, 1) for i in range(50)], "lengths only"),
        ([request(str(i), [2**31 - 2, i]) for i in range(50)], "no fresh ones"),
    ],
)
def test_a_trace_that_cannot_be_resampled_is_refused_with_the_reason(rows, text):
    with pytest.raises(ValueError, match=text):
        resample(rows, 1)


@pytest.mark.parametrize("draw", [1, 2, 3])
def test_every_start_of_the_trace_is_taken_once(draw):
    rows = sessions(50)
    starts = sorted(r.arrival_s for r in resample(rows, draw) if ".0" in r.request_id)
    assert starts == pytest.approx([0.01 * s for s in range(50)])


def test_a_draw_below_one_is_refused():
    with pytest.raises(ValueError, match="from 1, found 0"):
        resample(sessions(30), 0)
