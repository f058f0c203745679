"""Requests that go on in several ways: parallel samples of one prompt, and beams.

Neither upstream forks: both turn the samples of a prompt into requests of their own that meet in the prefix cache. Here
they are forks of one sequence (vLLM's early versions did so): the child shares the pages of the parent's tokens, and a
partly filled page gets copied by whoever writes it first, or at once (`allocators/block_fork.py`, `token_fork.py`).

    samples  with the first token of a prompt come the first tokens of its other replies; each forks, and is a request
             of its own from then on
    beams    when all beams of a request have their candidates, the best `width` continuations stay: the first of a beam
             goes on in place, others fork, a beam without any ends. Beams wait for one another, so none is scheduled
             while a result is out, and a beam that is thrown back takes the others along

Where there is no room for a fork, the child waits like a request that was thrown back, at the head of the queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvarena.allocators.interface import KVAllocator, Sequence
from kvarena.experiments.engine.beams import Beams, Candidate, Hypothesis
from kvarena.experiments.engine.request import End, EngineRequest, State

if TYPE_CHECKING:
    from kvarena.experiments.engine.scheduler import Sample, Scheduled, Scheduler


def can_fork(allocator: KVAllocator) -> bool:
    """Whether the design under any wrappers forks."""
    inner = getattr(allocator, "inner", None)
    return can_fork(inner) if inner is not None else hasattr(allocator, "fork")


def child_of(parent: EngineRequest, name: str, num_tokens: int, token: int) -> EngineRequest:
    """A request that goes on from the first `num_tokens` tokens of its parent with a token of its own."""
    seq = Sequence(
        name,
        [*parent.seq.token_ids[:num_tokens], token],
        num_prompt_tokens=parent.seq.num_prompt_tokens,
        namespace=parent.seq.namespace,
        extra_keys=parent.seq.extra_keys,  # type: ignore[arg-type]  # a tuple of such triples
        declared_max_tokens=parent.seq.declared_max_tokens,
        oracle_tokens=parent.seq.oracle_tokens,
    )
    # SGLang 0.5.22 cuts to 0 what it has no room for, and a first token comes all the same.
    child = EngineRequest(seq, max(parent.max_tokens, 1), parent.requested, parent.arrival_s, parent.priority)
    child.parent = parent.id
    return child


def fork(scheduler: Scheduler, parent: EngineRequest, child: EngineRequest, num_tokens: int) -> bool:
    """Make the child run, or wait when there is no room. True: it runs."""
    allocator, room = scheduler.allocator, parent.state is State.RUNNING and scheduler.has_row()
    ahead = parent.seq.num_computed_tokens > num_tokens
    made = None
    if room and can_fork(allocator):
        made = allocator.fork(parent.seq, child.seq, *([num_tokens] if ahead else []))  # type: ignore[attr-defined]
    if made is None:
        child.lost_tokens = num_tokens
        scheduler.waiting.appendleft(child)
        return False
    child.state, child.num_computed = State.RUNNING, num_tokens
    child.forked = parent.forked = True
    scheduler.forks += 1
    scheduler.note_copies(made.copies)
    scheduler.join(child)
    return True


def branch_samples(scheduler: Scheduler, entry: Scheduled, sample: Sample) -> list[EngineRequest]:
    """The other replies of a prompt whose first token is known and whose KV is committed. Returns those that end with
    their first token; the parent still holds its pages."""
    parent, ended = entry.request, []
    parent.branched = True
    if parent.state is State.RUNNING:
        # With lag 1 its next step may be in flight, and writes behind what the others share.
        parent.seq.num_computed_tokens = parent.num_computed
    for number, other in enumerate(sample.others, 1):
        child = child_of(parent, f"{parent.id}/{number}", entry.end, other.token)
        scheduler.children.append(child)
        end = scheduler.end_of(child, other)
        if end is None:
            fork(scheduler, parent, child, entry.end)
        else:
            child.state, child.end = State.FINISHED, end
            ended.append(child)
    return ended


def note_candidates(request: EngineRequest, sample: Sample) -> None:
    """A beam's step is done."""
    beams = request.beams
    if beams is None or not sample.candidates:
        raise ValueError(f"request {request.id}: a beam needs candidates, its sample has none")
    if not beams.members:
        beams.root, beams.members, beams.scores = request.id, [request], {request.id: 0.0}
    beams.results[request.id] = sample.candidates


def branch_beams(scheduler: Scheduler, beams: Beams) -> list[EngineRequest]:
    """The next beams of a request all of whose beams have their candidates. Returns those that ended."""
    chosen, before = _choose(beams), beams.members
    beams.results.clear()
    if not chosen or len(beams.finished) >= beams.width:
        return _end_all(scheduler, beams, End.STOP)
    keeps = {id(parent) for parent, _, _ in chosen}
    ended = [member for member in before if id(member) not in keeps]
    for member in ended:
        scheduler.end_beam(member, End.PRUNED)
    _replace(scheduler, beams, chosen)
    lead = beams.members[0]
    if lead.num_output >= lead.max_tokens or lead.num_tokens >= scheduler.config.max_model_len:
        for member in beams.members:
            beams.finished.append(Hypothesis(_generated(member), beams.scores[member.id]))
        return [*ended, *_end_all(scheduler, beams, End.LENGTH)]
    if any(member.state is not State.RUNNING for member in beams.members):
        scheduler.throw_back_beams(beams)
    return ended


def _choose(beams: Beams) -> list[tuple[EngineRequest, Candidate, float]]:
    """The best `width` continuations that do not end; those that end and are as good are finished hypotheses."""
    every = [
        (member, candidate, beams.scores[member.id] + candidate.logprob)
        for member in beams.members
        for candidate in beams.results[member.id]
    ]
    every.sort(key=lambda each: -each[2])  # stable: among equals the better beam, the better candidate
    chosen: list[tuple[EngineRequest, Candidate, float]] = []
    for member, candidate, score in every:
        if len(chosen) == beams.width:
            break
        if candidate.stop:
            beams.finished.append(Hypothesis((*_generated(member), candidate.token), score))
        else:
            chosen.append((member, candidate, score))
    return chosen


def _replace(scheduler: Scheduler, beams: Beams, chosen: list[tuple[EngineRequest, Candidate, float]]) -> None:
    """Fork first, then append: a child begins with its parent's tokens as they are."""
    members: list[EngineRequest] = []
    stays: list[tuple[EngineRequest, int]] = []
    used: set[int] = set()
    scores: dict[str, float] = {}
    for parent, candidate, score in chosen:
        member = parent
        if id(parent) in used:
            beams.count += 1
            member = child_of(parent, f"{beams.root}^{beams.count}", parent.num_tokens, candidate.token)
            member.beams = beams
            scheduler.children.append(member)
            fork(scheduler, parent, member, parent.num_tokens)
        else:
            used.add(id(parent))
            stays.append((parent, candidate.token))
        members.append(member)
        scores[member.id] = score
    for parent, token in stays:
        parent.seq.append(token)
    beams.members, beams.scores, beams.setbacks = members, scores, 0


def _end_all(scheduler: Scheduler, beams: Beams, end: End) -> list[EngineRequest]:
    members, beams.members = beams.members, []
    for member in members:
        scheduler.end_beam(member, end)
    return members


def _generated(request: EngineRequest) -> tuple[int, ...]:
    return tuple(request.seq.token_ids[request.seq.num_prompt_tokens :])


def beams_of(requests: Iterable[EngineRequest]) -> list[Beams]:
    """The complete beams among these requests, each once, in order."""
    found = {id(request.beams): request.beams for request in requests if request.beams is not None}
    return [beams for beams in found.values() if beams.complete]
