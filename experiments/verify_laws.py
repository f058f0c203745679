"""Laws that the rows of a result keep whatever the allocator did. Each takes the rows of one cell and yields the faults
that it finds, in words; `LAWS` names them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from kvarena.experiments.verify_numbers import CellRows

Law = Callable[[CellRows], Iterator[str]]
ENDS = ("stop", "length", "pool", "rejected")


def pool_adds_up(cell: CellRows) -> Iterator[str]:
    """free + evictable + in use = pool, in every step."""
    rows = cell.steps
    total = rows["free"] + rows["evictable"] + rows["in_use"]
    yield from _steps(cell, total != cell.pages, lambda at: f"free + evictable + in use = {total.loc[at]}, expected "
                      f"{cell.pages} pages")  # fmt: skip


def pages_are_counts(cell: CellRows) -> Iterator[str]:
    """No page count is negative, shared pages are pages in use, waste lies in pages in use."""
    rows = cell.steps
    names = ("free", "evictable", "in_use", "shared", "duplicates", "wasted_slots", "tail_slots", "evicted_pages")
    for name in names:
        yield from _steps(cell, rows[name] < 0, _says(rows, name))
    yield from _steps(cell, rows["shared"] > rows["in_use"], lambda at: "more pages shared than in use")
    yield from _steps(
        cell, rows["wasted_slots"] > rows["in_use"] * cell.size, lambda at: "more slots wasted than in use"
    )


def tokens_fit_their_pages(cell: CellRows) -> Iterator[str]:
    """Live tokens, shared ones once for each, are no fewer than the slots in use that hold one."""
    rows = cell.steps
    if not (rows["wasted_slots"] >= rows["tail_slots"]).all():
        return  # the allocator does not count its waste
    held = rows["in_use"] * cell.size - rows["wasted_slots"]
    yield from _steps(cell, (rows["live_tokens"] == 0) & (held > 0), lambda at: f"{held.loc[at]} tokens held by nobody")


def each_request_once(cell: CellRows) -> Iterator[str]:
    """Requests are numbered 0, 1, 2 ... in order."""
    expected = np.arange(len(cell.requests))
    if not np.array_equal(cell.requests["index"].to_numpy(), expected):
        yield f"requests: expected the numbers 0 to {len(expected) - 1}, each once and in order"


def every_request_ended(cell: CellRows) -> Iterator[str]:
    """Requests in = finished + rejected: nobody is live at the end, and each says how it ended."""
    rows = cell.requests
    if "end" not in rows:
        refused = ~rows["admitted"].astype(bool)
        odd = rows[refused & ((rows["hit_tokens"] != 0) | (rows["reply_tokens"] != 0))]
        yield from (f"request {name}: rejected, and yet served" for name in odd["request_id"])
        return
    yield from (f"request {name}: ended neither way" for name in rows.loc[~rows["end"].isin(ENDS), "request_id"])
    odd = rows[(rows["end"] == "rejected") & (rows["admitted"].astype(bool) | (rows["output_tokens"] > 0))]
    yield from (f"request {name}: rejected, and yet served" for name in odd["request_id"])


def hits_and_misses_add_up(cell: CellRows) -> Iterator[str]:
    """hit + never seen + last token + rounding + lost = prompt tokens, each of them at least 0.

    The split starts from what an earlier request began with, in order of arrival. An engine admits in another order
    and may serve what came later, so there the hit alone is bounded.
    """
    for name, prompt, prefix, hit, admitted in _prompts(cell):
        limit = prompt - 1 if cell.about["last_token_rule"] else prompt
        if not 0 <= hit <= max(limit, 0) or (hit and not admitted):
            yield f"request {name}: hit {hit} of {prompt} prompt tokens, expected at most {limit if admitted else 0}"
        elif not 0 <= prefix <= prompt:
            yield f"request {name}: a known prefix of {prefix} in a prompt of {prompt}"
        elif "end" not in cell.requests:
            usable = min(prefix, limit)
            lost = usable - usable % cell.size - hit
            if admitted and lost < 0:
                yield f"request {name}: hit {hit} tokens, {-lost} more than any earlier request could leave"


def _prompts(cell: CellRows) -> Iterator[tuple[Any, ...]]:
    names = ("request_id", "num_prompt_tokens", "prefix_tokens", "hit_tokens", "admitted")
    return zip(*(cell.requests[name].tolist() for name in names), strict=True)


def ceilings_follow_from_prefixes(cell: CellRows) -> Iterator[str]:
    """ceiling = whole pages of the known prefix, without the last token."""
    rows = cell.requests
    limit = rows["num_prompt_tokens"] - (1 if cell.about["last_token_rule"] else 0)
    expected = np.minimum(rows["prefix_tokens"], limit) // cell.size * cell.size
    odd = rows[rows["ceiling_tokens"] != expected]
    yield from (f"request {name}: its ceiling does not follow from its prefix" for name in odd["request_id"])


def outputs_are_whole_or_cut(cell: CellRows) -> Iterator[str]:
    """Output tokens + tokens cut off = the output, at least one token; of an engine run."""
    if "end" not in cell.requests:
        return
    rows = cell.requests
    odd = rows[rows["output_tokens"] + rows["cut_output_tokens"] != np.maximum(rows["num_output_tokens"], 1)]
    yield from (f"request {name}: output and what was cut off do not add up" for name in odd["request_id"])


def times_go_forward(cell: CellRows) -> Iterator[str]:
    """Arrival <= first token <= last token <= end, and steps follow one another; arrivals of a replay are in order."""
    if "end" not in cell.requests:
        if (np.diff(cell.requests["arrival_s"]) < 0).any():
            yield "requests: arrivals are out of order"
        return
    rows = cell.requests
    first, last = (rows[name].astype(float).fillna(rows["end_s"]) for name in ("first_token_s", "last_token_s"))
    odd = rows[(first < rows["arrival_s"]) | (last < first) | (rows["end_s"] < last)]
    yield from (f"request {name}: its moments are not in order" for name in odd["request_id"])
    gaps = np.diff(cell.steps["time_s"])
    if (gaps < 0).any() or ((gaps == 0).any() and not cell.fixed_clock):
        yield "steps: time stands still or goes back"


def live_requests_are_those_that_came(cell: CellRows) -> Iterator[str]:
    """Requests in = ended + running + waiting, at every recorded step; of an engine run.

    A request that arrives while a step runs is let in at the next one, so the live ones lie between those that had
    arrived at the step before and those that have arrived by now. On a fixed clock nobody waits: who has its place in
    the schedule is let in at its moment, and of several events at one moment the row may show any.
    """
    if "end" not in cell.requests or not cell.every_step:
        return
    rows, live = cell.steps, cell.steps["running"] + cell.steps["waiting"]
    now = rows["time_s"].to_numpy()
    if cell.fixed_clock:
        placed = cell.requests[cell.requests["admitted_s"].notna()]
        comings, ends = np.sort(placed["admitted_s"].astype(float)), np.sort(placed["end_s"])
        least = np.searchsorted(comings, now, "left") - np.searchsorted(ends, now, "right")
        most = np.searchsorted(comings, now, "right") - np.searchsorted(ends, now, "left")
    else:
        comings, ends = np.sort(cell.requests["arrival_s"]), np.sort(cell.requests["end_s"])
        before = np.concatenate([[-np.inf], now[:-1]])
        gone = np.searchsorted(ends, now, "right")
        least, most = np.searchsorted(comings, before, "right") - gone, np.searchsorted(comings, now, "right") - gone
    odd = (live.to_numpy() < least) | (live.to_numpy() > most)
    yield from _steps(cell, pd.Series(odd, rows.index), lambda at: f"{live.loc[at]} requests running or waiting, "
                      "which is not arrived - ended")  # fmt: skip


def tokens_computed_add_up(cell: CellRows) -> Iterator[str]:
    """Tokens computed = prompts without their hits + output but its last tokens + what was computed again.

    With a lag of one step, a token that is on its way when its request ends or is thrown back was computed for nobody:
    at most one for each of these. Of runs with one reply a request and a row a step.
    """
    engine = cell.engine
    several = engine.get("samples", 1) > 1 or engine.get("beam_width", 0) > 0
    if "end" not in cell.requests or not cell.every_step or cell.fixed_clock or several:
        return
    rows = cell.requests[cell.requests["admitted"].astype(bool)]
    prompts = rows["num_prompt_tokens"] - rows["hit_tokens"] - rows["host_hit_tokens"]
    needed = int((prompts + (rows["output_tokens"] - 1).clip(lower=0) + rows["recomputed_tokens"]).sum())
    computed = int(cell.steps["new_tokens"].sum())
    spare = len(rows) + int(rows["preemptions"].sum()) if engine.get("result_lag", 1) else 0
    if not 0 <= computed - needed <= spare:
        yield f"steps: {computed} tokens computed, the requests needed {needed}"


def evictions_add_up(cell: CellRows) -> Iterator[str]:
    """Pages evicted in the recorded steps are no more than in the whole run."""
    seen, stated = int(cell.steps["evicted_pages"].sum()), int(cell.stated["evicted_pages"])
    if seen > stated:
        yield f"steps: {seen} pages evicted, the summary has {stated}"


def budget_adds_up(cell: CellRows) -> Iterator[str]:
    """KV + padding page + tables + what is left over = the pool's bytes."""
    parts = ("kv_bytes", "padding_page_bytes", "table_bytes", "slot_mapping_bytes", "unused_bytes")
    total = sum(int(cell.budget[name]) for name in parts)
    if total != cell.budget["pool_bytes"]:
        yield f"budget: its lines add up to {total} of {cell.budget['pool_bytes']} bytes"
    if cell.budget["kv_bytes"] != cell.pages * cell.size * cell.token_bytes:
        yield f"budget: {cell.budget['kv_bytes']} bytes of KV for {cell.pages} pages of {cell.size} tokens"


LAWS: dict[str, Law] = {
    "free + evictable + in use = pool": pool_adds_up,
    "page counts": pages_are_counts,
    "tokens fit their pages": tokens_fit_their_pages,
    "each request once": each_request_once,
    "requests in = finished + rejected": every_request_ended,
    "hits + misses = prompt tokens": hits_and_misses_add_up,
    "ceilings": ceilings_follow_from_prefixes,
    "output = served + cut": outputs_are_whole_or_cut,
    "times go forward": times_go_forward,
    "requests in = ended + running + waiting": live_requests_are_those_that_came,
    "tokens computed": tokens_computed_add_up,
    "evictions": evictions_add_up,
    "budget": budget_adds_up,
}


def _says(rows: pd.DataFrame, name: str) -> Callable[[Any], str]:
    return lambda at: f"{name} is {rows.loc[at, name]}"


def _steps(cell: CellRows, odd: pd.Series, say: Callable[[Any], str]) -> Iterator[str]:
    for at in cell.steps.index[odd.to_numpy()]:
        yield f"step {cell.steps.loc[at, 'step']}: {say(at)}"
