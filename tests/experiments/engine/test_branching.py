"""Parallel samples, beams and draft tokens through the scheduler: outputs, memory, and KV that is each one's own."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="KV that can be read needs torch")

from kvarena.allocators.config import make_allocator  # noqa: E402
from kvarena.allocators.interface import Sequence  # noqa: E402
from kvarena.experiments.engine.beams import Hypothesis  # noqa: E402
from kvarena.experiments.engine.metered import MeteredAllocator  # noqa: E402
from kvarena.experiments.engine.request import End, make_request  # noqa: E402
from support.engine import PAIRS, SmallEngine  # noqa: E402
from support.threads import one_thread  # noqa: E402
from support.truth import TruthEngine, beam_model  # noqa: E402

KINDS = ("block", "token")


@pytest.fixture(autouse=True)
def _threads():
    with one_thread():
        yield


def spec(kind: str, page_size: int) -> dict[str, Any]:
    return {"kind": kind, "page_size": page_size}


def expected(engine: TruthEngine, name: str, max_tokens: int) -> list[int]:
    return [engine.outputs._at(name, index).token for index in range(max_tokens)]


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_pages", [200, 64])
def test_samples_go_on_from_one_prompt(policy: str, kind: str, lag: int, page_size: int, num_pages: int) -> None:
    """The smaller pool preempts: who is thrown back and who found no room for its fork comes back by itself."""
    engine = TruthEngine(policy, spec(kind, page_size), num_pages // page_size, result_lag=lag)
    for number in range(4):
        engine.add(f"r{number}", range(100 * number, 100 * number + 7 + number), 12, samples=3)
    engine.run()
    assert len(engine.requests) == 12
    assert sorted(engine.ended) == sorted(engine.requests)
    for name in engine.requests:
        assert engine.output(name) == expected(engine, name, 12 - ("/1" in name)), name
    preemptions = sum(request.num_preemptions for request in engine.requests.values())
    assert (preemptions > 0) == (num_pages == 64)
    assert engine.scheduler.forks > 0
    assert engine.executor.num_checked > 0


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("prompt", [8, 9, 11])
def test_a_fork_copies_the_partial_page_and_no_other(policy: str, kind: str, prompt: int) -> None:
    """Three samples, pages of 4: of a full page nobody needs a copy; of a partial one all but its last holder do."""
    engine = TruthEngine(policy, spec(kind, 4), 60)
    engine.add("r", range(prompt), 6, samples=3)
    engine.step()
    shared = engine.inner.capacity().shared
    engine.run()
    assert engine.scheduler.forks == 2
    assert engine.scheduler.copied_pages == (2 if prompt % 4 else 0)
    assert shared >= prompt // 4


def test_a_lone_owner_writes_in_place() -> None:
    """The last holder of a forked page writes it without a copy: its ref count is 1."""
    engine = TruthEngine("vllm", spec("block", 4), 60)
    engine.add("r", range(6), 8, samples=2)
    engine.step()
    child = engine.requests["r/1"]
    page = engine.inner.page_ids(engine.requests["r"].seq)[1]
    assert engine.inner.page_ids(child.seq)[1] == page
    engine.step()
    rows = [list(engine.inner.page_ids(engine.requests[name].seq)) for name in ("r", "r/1")]
    assert sum(row[1] == page for row in rows) == 1  # one moved out, one stayed
    assert engine.scheduler.copied_pages == 1
    engine.run()


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("prompt", [8, 10])
def test_a_fork_leaves_alone_what_its_parent_writes_already(policy: str, kind: str, prompt: int) -> None:
    """Lag 1: the parent's next step is in flight when its samples fork, and writes into the page they begin in."""
    engine = TruthEngine(policy, spec(kind, 4), 60, result_lag=1)
    engine.add("r", range(prompt), 6, samples=3)
    engine.step()
    engine.step()
    assert engine.scheduler.forks == 2
    assert engine.engine.in_flight is not None
    assert engine.scheduler.copied_pages == (2 if prompt % 4 else 0)
    tails = [list(engine.inner.page_ids(request.seq))[prompt // 4 :] for request in engine.requests.values()]
    assert len({page for row in tails for page in row}) == sum(map(len, tails))
    engine.run()


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
def test_samples_beyond_the_running_limit_wait(policy: str, kind: str, lag: int) -> None:
    engine = TruthEngine(policy, spec(kind, 4), 100, result_lag=lag, max_num_seqs=3)
    engine.add("r", range(9), 5, samples=6)
    most = 0
    while engine.engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running_requests))
    assert most <= 3
    assert len(engine.ended) == 6
    assert all(engine.output(name) == expected(engine, name, len(engine.output(name))) for name in engine.requests)


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
def test_samples_that_end_with_their_first_token(policy: str, kind: str, lag: int) -> None:
    engine = TruthEngine(policy, spec(kind, 4), 40, result_lag=lag)
    engine.add("one", range(9), 1, samples=3)
    engine.add("two", range(50, 59), 2, samples=2)  # the second sample's only token is its last
    engine.run()
    assert {name: len(engine.output(name)) for name in engine.requests} == {
        "one": 1, "one/1": 1, "one/2": 1, "two": 2, "two/1": 1,
    }  # fmt: skip
    assert all(request.end in (End.STOP, End.LENGTH) for request in engine.requests.values())


@pytest.mark.parametrize("kind", KINDS)
def test_samples_take_less_memory_than_requests_of_their_own(kind: str) -> None:
    peaks = []
    for samples, copies in ((4, 1), (1, 4)):
        engine = TruthEngine("vllm", {**spec(kind, 4), "prefix_cache": kind == "block" and samples == 4}, 200)
        if kind == "token" and samples == 4:
            engine = TruthEngine("vllm", spec(kind, 4), 200)
        for number in range(copies):
            engine.add(f"r{number}", range(30), 10, samples=samples)
        peak = 0
        while engine.engine.has_work:
            engine.step()
            peak = max(peak, engine.inner.capacity().in_use)
        peaks.append(peak)
    assert peaks == [7 + 4 * 3, 4 * 10]


# Beams


def reference(lm: Any, root: str, width: int, max_tokens: int) -> list[Hypothesis]:
    """Beam search over plain tuples."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[Hypothesis] = []
    while live and len(finished) < width:
        every = [
            ((*tokens, each.token), score + each.logprob, each.stop)
            for tokens, score in live
            for each in lm(root, tokens, width)
        ]
        every.sort(key=lambda each: -each[1])
        live = []
        for tokens, score, stop in every:
            if len(live) == width:
                break
            if stop:
                finished.append(Hypothesis(tokens, score))
            else:
                live.append((tokens, score))
        if live and len(live[0][0]) == max_tokens and len(finished) < width:
            finished += [Hypothesis(*beam) for beam in live]
            break
    return sorted(finished, key=lambda each: -each.score)[:width]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_pages", [400, 76])
@pytest.mark.parametrize("stops", [0.0, 0.15])
def test_beams_are_those_of_a_plain_beam_search(
    kind: str, lag: int, page_size: int, num_pages: int, stops: float
) -> None:
    lm = beam_model(3, stops)
    engine = TruthEngine("vllm", spec(kind, page_size), num_pages // page_size, lm, result_lag=lag, max_num_seqs=12)
    widths = {"a": 4, "b": 2, "c": 3}
    beams = {}
    for number, (name, width) in enumerate(widths.items()):
        request = engine.add(name, range(100 * number, 100 * number + 6 + number), 14, beam_width=width)
        beams[name] = request.beams
        engine.add(f"plain{number}", range(900 + 50 * number, 905 + 50 * number), 9)
    engine.run()
    for name, width in widths.items():
        found = beams[name]
        assert found is not None
        assert [each.tokens for each in found.best()] == [each.tokens for each in reference(lm, name, width, 14)]
        assert [each.score for each in found.best()] == pytest.approx(
            [each.score for each in reference(lm, name, width, 14)]
        )
    assert engine.scheduler.forks > (0 if stops else 10)
    if num_pages == 76 and not stops:
        assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    assert all(engine.output(f"plain{number}") == expected(engine, f"plain{number}", 9) for number in range(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lag", [0, 1])
def test_beams_that_never_fit_together_end_with_the_numbers(kind: str, lag: int) -> None:
    engine = TruthEngine("vllm", spec(kind, 4), 9, beam_model(1), result_lag=lag)
    request = engine.add("r", range(10), 30, beam_width=6)
    small = engine.add("behind", range(500, 504), 3)
    engine.run()
    assert request.beams is not None
    ends = [each.end for each in engine.requests.values() if each.beams is not None]
    assert set(ends) <= {End.PRUNED, End.POOL}
    assert End.POOL in ends
    assert any("beams" in each.message and "pool of 9 pages" in each.message for each in engine.requests.values())
    assert small.num_output == 3


def test_bad_branches_are_named() -> None:
    for fields, message in (
        ({"samples": 0}, "samples"),
        ({"beam_width": 1}, "beam_width"),
        ({"beam_width": 3, "samples": 2}, "beam_width"),
    ):
        with pytest.raises(ValueError, match=message):
            make_request("r", [1, 2], 3, **fields)  # type: ignore[arg-type]
    sglang = SmallEngine("sglang", "token", 20, 4)
    with pytest.raises(ValueError, match="expected policy vllm"):
        sglang.add("r", range(5), 3, beam_width=2)
    narrow = SmallEngine("vllm", "block", 20, 4, max_num_seqs=2)
    assert "4 beams, max_num_seqs 2" in narrow.add("r", range(5), 3, beam_width=4).message
    blind = SmallEngine("vllm", "block", 20, 4)
    blind.add("r", range(5), 3, beam_width=2)
    with pytest.raises(ValueError, match="language model"):
        blind.run()
    with pytest.raises(ValueError, match="result_lag 0"):
        SmallEngine("vllm", "block", 20, 4, result_lag=1).scheduler.speculate(lambda request, n: [], 2)
    with pytest.raises(ValueError, match="num_drafts"):
        SmallEngine("vllm", "block", 20, 4).scheduler.speculate(lambda request, n: [], 0)


@pytest.mark.parametrize("kind", ["contiguous", "exact"])
def test_samples_of_a_design_that_cannot_fork_are_computed_again(kind: str) -> None:
    given = {"kind": kind, **({"sizing": "pow2"} if kind == "contiguous" else {})}
    engine = TruthEngine("vllm", given, 200)
    engine.add("r", range(9), 5, samples=3)
    engine.run()
    assert engine.scheduler.forks == 0
    assert all(engine.output(name) == expected(engine, name, len(engine.output(name))) for name in engine.requests)
    assert len(engine.ended) == 3


def test_a_metered_allocator_passes_forks_on() -> None:
    metered = MeteredAllocator(make_allocator({"kind": "block", "page_size": 4}, num_pages=20))
    parent = Sequence("p", range(6))
    assert metered.admit(parent) is not None
    metered.commit([(parent, 6)])
    child = Sequence("c", [*range(6), 9])
    assert metered.fork(parent, child) is not None
    assert len(metered.prepare_write(child, 6, 7) or ()) == 1
    assert metered.prepare_write(parent, 6, 7) == []  # alone by now
    assert [len(metered.nanoseconds[verb]) for verb in ("fork", "prepare_write")] == [1, 2]
    flat = MeteredAllocator(make_allocator({"kind": "contiguous", "sizing": "pow2"}, num_pages=20))
    with pytest.raises(ValueError, match="has no fork"):
        flat.fork(parent, child)


# Draft tokens


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("num_pages", [200, 56])
def test_drafts_change_the_number_of_steps_and_nothing_else(
    policy: str, kind: str, page_size: int, share: float, num_pages: int
) -> None:
    steps = {}
    for drafts in (0, 3):
        engine = TruthEngine(policy, spec(kind, page_size), num_pages // page_size)
        if drafts:
            engine.scheduler.speculate(engine.outputs.drafter(share), drafts)
        for number in range(4):
            engine.add(f"r{number}", range(100 * number, 100 * number + 5 + number), 17)
        engine.run()
        steps[drafts] = engine.engine.num_steps
        for name in engine.requests:
            assert engine.output(name) == expected(engine, name, 17)
    if share and num_pages == 200:
        assert steps[3] < steps[0]


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_are_never_published(kind: str) -> None:
    """All guesses are wrong: what the cache holds afterwards is the outputs alone."""
    engine = TruthEngine("vllm", spec(kind, 4), 40)
    engine.scheduler.speculate(engine.outputs.drafter(0.0), 3)
    engine.add("r", range(6), 16)
    while engine.engine.has_work:
        record = engine.step()
        for entry in record.plan.batch:
            wrong = [*entry.request.seq.token_ids[: entry.num_before + 1], *entry.drafts, *range(5000, 5008)]
            right = len(entry.request.seq.token_ids)
            assert engine.inner.match(Sequence("w", wrong)).hit_tokens <= min(entry.num_before + 1, right)
    whole = [*range(6), *expected(engine, "r", 16)]
    assert engine.inner.match(Sequence("again", whole)).hit_tokens == 20  # 21 have KV


@pytest.mark.parametrize("policy", ["vllm", "sglang"])
def test_drafts_stop_where_the_reply_may_not_go_on(policy: str) -> None:
    for max_tokens in range(1, 9):
        engine = TruthEngine(policy, spec("block", 4), 40, max_model_len=14)
        engine.scheduler.speculate(engine.outputs.drafter(1.0), 4)
        request = engine.add("r", range(8), max_tokens)
        engine.run()
        assert request.num_output == min(max_tokens, 6)
