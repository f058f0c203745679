"""The rules that a design chooses, one small function each. None of them changes anything.

Each says which upstream's rule stands behind which value: B = vLLM 0.32.0 (block), T = SGLang 0.5.22 (token).
"""

from __future__ import annotations

from kvarena.allocators.config import Design
from kvarena.allocators.general_row import Plan, Row
from kvarena.allocators.interface import Gate, Release


def publish_at_reserve(design: Design, row: Row, end: int) -> int | None:
    """Tokens whose whole pages are offered when slots up to `end` are reserved; None: nothing is.

    publish            reserve: now, when the step is scheduled (B); commit: not yet (T)
    publish_generated  filled: generated tokens too (B); finish: the prefill's only (T)
    """
    if design.publish != "reserve":
        return None
    return min(end, _offered(design, row))


def publish_at_commit(design: Design, row: Row, n: int, late: bool) -> int | None:
    """Tokens whose whole pages are offered when the first `n` are written. `late`: the scheduler had counted them.

    T: a prefill's checkpoint, chunk by chunk; B: only what arrives late, results running behind the schedule.
    """
    if design.publish == "reserve":
        return min(n, _offered(design, row)) if late else None
    if not row.prefilled:
        return min(n, _offered(design, row))
    if design.publish_generated == "filled" and n // design.page_size > row.published:
        return min(n, row.seq.num_tokens)
    return None


def publish_at_release(design: Design, row: Row, reason: Release) -> int | None:
    """Tokens whose whole pages are offered before a sequence leaves.

    T: all that is computed, at a finish. preempt_keeps = all does the same for a preemption.
    """
    keeps = reason is Release.FINISH or (reason is Release.PREEMPT and design.preempt_keeps == "all")
    if not (keeps and row.admitted) or (design.publish == "reserve" and design.publish_generated == "filled"):
        return None
    return min(row.seq.num_computed_tokens, row.seq.num_tokens, len(row.pages) * design.page_size)


def withdrawn_from(design: Design, row: Row, reason: Release) -> int | None:
    """Position from which a sequence's own published pages lose their content when it leaves; None: none do.

    B: an abort takes back what was published and never written. preempt_keeps = checkpointed takes back what was
    generated, as T's retraction does by never publishing it.
    """
    if reason is Release.ABORT:
        return max(row.adopted, row.committed // design.page_size)
    if reason is Release.PREEMPT and design.preempt_keeps == "checkpointed":
        return max(row.adopted, row.seq.num_prefill_tokens // design.page_size)
    return None


def demand(design: Design, plans: list[Plan]) -> int:
    """Pages to make free before a reserve takes them.

    demand_slack  k > 0 at page_size > 1: a prefill asks for its tokens and k pages on top, a decode for k pages at
                  least, whatever they need (T: 1); 0: what is needed (B)
    """
    size, slack = design.page_size, design.demand_slack
    if not slack or size == 1:
        return sum(plan.take for plan in plans)
    tokens = sum(max(plan.take, slack) * size if plan.row.decoding else max(plan.n, 0) + slack * size for plan in plans)
    return -(-tokens // size)


def evicts_ahead(design: Design) -> bool:
    """Whether room is made before pages are taken (T), or by taking them (B)."""
    return design.index == "tree" or design.refused_evicts or (design.demand_slack > 0 and design.page_size > 1)


def does_something(design: Design, plan: Plan) -> bool:
    """Whether a reserve takes a page, offers one, or admits; if none of a call does, pins wait on (B)."""
    row = plan.row
    offers = design.publish == "reserve" and design.prefix_cache and plan.end // design.page_size > row.published
    return plan.take > 0 or offers or not row.admitted


def serves_all(plans: list[Plan], room: int) -> bool:
    """Whether the plans fit into `room` pages in order, the first reserve of each leaving its headroom (B)."""
    for plan in plans:
        if plan.take + (0 if plan.row.held else plan.row.headroom) > room:
            return False
        room -= plan.take
    return True


def gate_need(design: Design, row: Row, gate: Gate) -> int:
    """What an admission is tested for, behind its hit: pages if the gate rounds, else tokens."""
    if not gate.whole_prompt:
        return gate.headroom
    tokens = row.seq.num_prefill_tokens
    if gate.page_rounded:
        return gate.headroom + -(-tokens // design.page_size) - row.adopted
    return gate.headroom + tokens - row.hit_tokens


def tests_at_pin(design: Design, gate: Gate) -> bool:
    """Whether the gate is asked at all: B skips it for a chunk, T still asks for the headroom."""
    return gate.whole_prompt or design.index == "tree"


def _offered(design: Design, row: Row) -> int:
    return row.seq.num_tokens if design.publish_generated == "filled" else row.seq.num_prefill_tokens
