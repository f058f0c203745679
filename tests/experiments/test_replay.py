"""Replay without an engine: who is live when, what is counted, and what happens when there is no room."""

from __future__ import annotations

import numpy as np
import pytest
from kvarena.allocators.config import make_allocator
from kvarena.experiments.config import EngineConfig
from kvarena.experiments.replay import Replay, longest_tokens
from kvarena.experiments.workloads import make
from support.requests import request


class Recorder:
    """Stands between a replay and an allocator: remembers each verb with ids and counts."""

    def __init__(self, allocator):
        self._allocator = allocator
        self.calls = []

    def __getattr__(self, name):
        return getattr(self._allocator, name)

    def pin(self, seq, gate=None):
        pin = self._allocator.pin(seq, gate)
        self.calls.append(("pin", seq.request_id, None if pin is None else pin.hit_tokens))
        return pin

    def reserve(self, wants):
        wants = list(wants)
        answer = self._allocator.reserve(wants)
        self.calls += [("reserve" if answer is not None else "refused", seq.request_id, n) for seq, n in wants]
        return answer

    def commit(self, done):
        done = list(done)
        self.calls += [("commit", seq.request_id, n) for seq, n in done]
        return self._allocator.commit(done)

    def release(self, seqs, reason):
        self.calls += [("release", seq.request_id, reason.value) for seq in seqs]
        return self._allocator.release(seqs, reason)


def replay(requests, *, kind="block", num_pages=16, page_size=4, **engine):
    spec = {"kind": kind, "page_size": page_size, **({"sizing": "pow2"} if kind == "contiguous" else {})}
    recorder = Recorder(make_allocator(spec, num_pages=num_pages))
    lane = Replay(recorder, EngineConfig(**engine), check=True).run(requests)
    assert recorder.capacity().in_use == 0
    return lane, recorder.calls


A = request("a", range(10), range(100, 105))
B = request("b", [*range(10), *range(20, 26)], range(200, 203))
C = request("c", range(300, 308), range(400, 401))


def test_one_live_request_is_released_before_the_next_arrives():
    lane, calls = replay([A, B])
    assert calls == [
        ("pin", "a", 0), ("reserve", "a", 10), ("commit", "a", 10), ("release", "a", "finish"),
        ("pin", "b", 8), ("reserve", "b", 8), ("commit", "b", 16), ("release", "b", "finish"),
    ]  # fmt: skip
    assert [row.hit_tokens for row in lane.requests] == [0, 8]


def test_two_live_requests_overlap_and_the_oldest_makes_way():
    _, calls = replay([A, B, C], live=2)
    order = [(verb, name) for verb, name, _ in calls if verb in ("pin", "release")]
    assert order == [
        ("pin", "a"), ("pin", "b"), ("release", "a"), ("pin", "c"), ("release", "b"), ("release", "c"),
    ]  # fmt: skip


def test_a_reply_is_committed_but_its_last_token():
    lane, calls = replay([A], outputs="replay")
    assert calls == [
        ("pin", "a", 0), ("reserve", "a", 10), ("commit", "a", 10),
        ("reserve", "a", 4), ("commit", "a", 14), ("release", "a", "finish"),
    ]  # fmt: skip
    assert (lane.requests[0].reply_tokens, lane.requests[0].cut_output_tokens) == (4, 0)


def test_a_reply_of_one_token_writes_nothing():
    _, calls = replay([C], outputs="replay")
    assert [call[0] for call in calls] == ["pin", "reserve", "commit", "release"]


def test_a_reply_token_by_token():
    _, calls = replay([A], outputs="replay", reply_chunk=1)
    assert calls[3:-1] == [step for n in range(11, 15) for step in (("reserve", "a", 1), ("commit", "a", n))]


def test_each_live_request_appends_its_share_a_step():
    _, calls = replay([A, C], live=2, outputs="replay")
    # a's five reply tokens: three in its first step, two (one of them without KV) in its second.
    assert ("reserve", "a", 3) in calls
    assert calls.index(("commit", "a", 13)) < calls.index(("pin", "c", 0)) < calls.index(("commit", "a", 14))


@pytest.mark.parametrize("kind", ["block", "token"])
def test_a_session_s_next_prompt_finds_the_whole_reply(kind):
    first = request("t0", range(10), range(100, 107), session_id="s")
    second = request("t1", [*range(10), *range(100, 107), 7, 8], session_id="s")
    size = 4 if kind == "block" else 1
    lane, calls = replay([first, second], kind=kind, page_size=size, num_pages=64, live=8, outputs="replay")
    assert [call[:2] for call in calls if call[0] in ("pin", "release")][:3] == [
        ("pin", "t0"), ("release", "t0"), ("pin", "t1"),
    ]  # fmt: skip
    assert (
        lane.requests[1].hit_tokens == 16 // size * size
    )  # 16 tokens have KV: the prompt and six of the reply's seven
    assert lane.requests[0].cut_output_tokens == 0


def test_a_retry_in_the_same_session_overlaps():
    first = request("t0", range(10), range(100, 107), session_id="s")
    again = request("t0.again", range(10), range(200, 207), session_id="s")
    _, calls = replay([first, again], num_pages=64, live=8)
    assert [call[:2] for call in calls if call[0] in ("pin", "release")][:2] == [("pin", "t0"), ("pin", "t0.again")]


def test_where_live_requests_do_not_fit_the_oldest_ends_early():
    wide = [request(f"r{i}", range(1000 * i, 1000 * i + 16), range(4)) for i in range(4)]
    lane, calls = replay(wide, num_pages=9, live=3)
    released = [name for verb, name, _ in calls if verb == "release"]
    assert released == ["r0", "r1", "r2", "r3"]
    assert [row.refusals for row in lane.requests] == [0, 0, 1, 1]
    assert all(row.admitted for row in lane.requests)
    assert [row.live for row in lane.steps] == [1, 2, 2, 2]


def test_replies_that_do_not_fit_are_counted_as_cut():
    lane, _ = replay([request("a", range(14), range(100, 120))], num_pages=4, outputs="replay", reply_chunk=1)
    row = lane.requests[0]
    assert row.reply_tokens == 2  # 16 slots hold the prompt's 14 tokens and two more
    assert row.cut_output_tokens == 18
    assert row.reply_tokens + row.cut_output_tokens == 20


def test_a_request_longer_than_the_pool_is_one_clear_error():
    with pytest.raises(ValueError, match=r"request big needs 5 pages \(17 tokens, page_size 4\).* has 4"):
        replay([request("big", range(17))], num_pages=4)


def test_a_request_that_a_design_s_rules_refuse_is_not_said_to_be_too_long():
    pool = make_allocator({"kind": "contiguous", "sizing": "declared"}, num_pages=100)
    with pytest.raises(ValueError, match=r"request a has 10 tokens .* contiguous refuses it with all of its 100 pages"):
        Replay(pool, EngineConfig(declared_max_tokens=4096)).run([A])


def test_a_request_longer_than_the_pool_is_counted_where_the_config_says_so():
    lane, _ = replay([request("big", range(17)), A], num_pages=4, too_long="reject", live=2)
    assert [row.admitted for row in lane.requests] == [False, True]
    assert [row.index for row in lane.requests] == [0, 1]


def test_two_live_requests_of_one_id_are_an_error():
    with pytest.raises(ValueError, match="request a: already live"):
        replay([A, A], live=2)


def test_one_id_twice_is_fine_when_the_first_has_ended():
    lane, _ = replay([A, A])
    assert [row.hit_tokens for row in lane.requests] == [0, 8]


def test_step_rows_by_hand():
    lane, _ = replay([A, B], live=2)
    first, second = lane.steps
    assert (first.free, first.evictable, first.in_use) == (13, 0, 3)
    assert (first.tail_slots, first.wasted_slots, first.live_tokens) == (2, 2, 10)
    # b shares two pages of a and takes two of its own.
    assert (second.free, second.in_use, second.shared) == (11, 5, 2)
    assert (second.tail_slots, second.live_tokens, second.live) == (2, 26, 2)


def test_steps_every_thins_the_rows_and_loses_no_eviction():
    rows = [request(f"r{i}", range(1000 * i, 1000 * i + 16)) for i in range(9)]
    thick, _ = replay(rows, num_pages=6)
    thin, _ = replay(rows, num_pages=6, steps_every=4)
    assert [row.step for row in thin.steps] == [0, 4, 8]
    assert sum(row.evicted_pages for row in thin.steps) == sum(row.evicted_pages for row in thick.steps) == 30
    assert sum(row.evicted_pages for row in thin.requests) == 30


@pytest.mark.parametrize("kind", ["block", "token", "contiguous", "exact"])
def test_chat_through_every_design_conserves_pages_and_requests(kind):
    requests = list(make("chat", num_sessions=6, num_system_prompts=2, max_message=60, max_reply=60))
    size = 16 if kind == "block" else 1
    lane, _ = replay(requests, kind=kind, page_size=size, num_pages=24_000 // size, live=5, outputs="replay")
    assert [row.request_id for row in lane.requests] == [r.request_id for r in requests]
    for row in lane.steps:
        assert row.free + row.evictable + row.in_use == 24_000 // size
    for row, source in zip(lane.requests, requests, strict=True):
        assert row.hit_tokens < source.num_prompt_tokens
        assert row.reply_tokens == max(len(source.output_ids) - 1, 0)
        assert row.cut_output_tokens == 0


def test_a_namespace_is_never_shared():
    lane, _ = replay([A, request("b", range(10), namespace="other"), request("c", range(10), namespace="other")])
    assert [row.hit_tokens for row in lane.requests] == [0, 0, 8]


def test_batches_are_recorded_at_the_asked_steps():
    allocator = make_allocator({"kind": "block", "page_size": 4}, num_pages=16)
    lane = Replay(allocator, EngineConfig(live=2), sample_steps=[1]).run([A, B])
    (batch,) = lane.batches
    assert (batch.step, batch.page_size) == (1, 4)
    assert {name: (tokens, len(pages)) for name, (tokens, pages) in batch.requests.items()} == {
        "a": (10, 3),
        "b": (16, 4),
    }


def test_longest_counts_the_reply_that_gets_kv():
    assert longest_tokens([A, C], "none") == (10, "a")
    assert longest_tokens([A, C], "replay") == (14, "a")


def test_a_request_s_own_arrays_are_not_touched():
    before = A.token_ids.copy()
    replay([A], outputs="replay")
    assert np.array_equal(A.token_ids, before)
