"""Laws: closed forms of what page size, sharing and tables cost, each written down before the run that tests it.

    rounding     prompt tokens lost to whole pages, over all prompt tokens: s mod S of a known length s that is below a
                 page or that several requests know (system prompts are few), (S - 1) / 2 of every other one
    rounding, every length alike   the textbook form: share of requests that share x (S - 1) / 2 / mean prompt
    tail waste   (S - 1) / 2 free slots in the last page of a live request
    table bytes  4 x rows x ceil(max length / S) (block_table), 4 x (rows + 1) x max length (req_to_token)
    capacity     `capacity_law.py`: requests of a burst that fit
    prefill gain (s + u) / (s / N + u) for N requests with a shared prompt of s and u own tokens each
    break-even   `break_even.py`: a / (c - b) tokens: a look-up takes a + b n, computing the n tokens again c n

A prediction needs a workload's lengths alone and is made before any allocator runs; `laws` puts it beside what both
designs did. It holds within its tolerance or has an explanation that says what the closed form leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Release
from kvarena.allocators.interface import Sequence as Tokens
from kvarena.experiments.budget import Tables, bytes_for_pages
from kvarena.experiments.laws_why import live_lengths, remainder_why, rounding_why, tail_why, textbook_why
from kvarena.experiments.wrong_kind import reads

if TYPE_CHECKING:
    from kvarena.experiments.capacity import Cell
    from kvarena.experiments.traces.base import Request
    from rich.table import Table

PAGES = (1, 4, 16, 64, 256)
KINDS = ("block", "token")
SHARERS = (1, 2, 4, 8, 16, 32, 64)
SYSTEM, OWN = 2048, 128  # tokens of the prefill law
PERCENT = "% of prompt tokens"
LIVE = 16  # requests at once in the replay of tails
TEXTBOOK = "rounding, every length alike"


@dataclass(frozen=True)
class Law:
    """One prediction and what came of it.

    law, kind, x  which law, whose design, at what page size, number of sharers, or load
    tolerance     relative; `slack` absolute, in the law's own unit, whichever is wider
    why           what the closed form leaves out, computed where it is off by more (`laws_why.py`); empty: not known
    """

    law: str
    kind: str
    x: str
    unit: str
    predicted: float
    measured: float
    tolerance: float = 0.1
    slack: float = 0.0
    why: str = ""

    @property
    def holds(self) -> bool:
        """Within the relative tolerance, or within `slack` in the law's own unit."""
        return abs(self.measured - self.predicted) <= max(self.tolerance * abs(self.predicted), self.slack)


# --- closed forms ---


def rounding_share(page_size: int, mean_prompt: float, sharing: float) -> float:
    """Share of prompt tokens that are known but fill no page, where every known length ends anywhere in a page.

    sharing  share of requests that know more than a page

    >>> round(rounding_share(16, 1000, 1.0), 4)
    0.0075
    """
    return sharing * (page_size - 1) / 2 / mean_prompt


def rounding_of_lengths(page_size: int, known: Sequence[int] | np.ndarray[Any, Any], prompt_tokens: int) -> float:
    """The same where the known lengths are few: one that is below a page, or that several requests know, ends where it
    ends; one that a single request knows ends anywhere in a page.

    >>> rounding_of_lengths(16, [40, 40, 40, 100], 1000)  # 3 x 8 and 7.5
    0.0315
    """
    lengths, which, times = np.unique(np.asarray(known), return_inverse=True, return_counts=True)
    lost = np.where((times > 1) | (lengths < page_size), lengths % page_size, (page_size - 1) / 2)
    return float(lost[which].sum() / prompt_tokens)


def tail_tokens(page_size: int) -> float:
    """Free slots in the last page of a request whose length ends anywhere in a page.

    >>> tail_tokens(16)
    7.5
    """
    return (page_size - 1) / 2


def table_bytes(kind: str, page_size: int, rows: int, max_tokens: int) -> int:
    """Bytes of the page table: int32, an entry a page, or an entry a token and one row for padding.

    >>> table_bytes("block", 16, 256, 4096), table_bytes("token", 16, 256, 4096)
    (262144, 4210688)
    """
    if kind == "token":
        return 4 * (rows + 1) * max_tokens
    return 4 * rows * math.ceil(max_tokens / page_size)


def prefill_gain(shared: int, own: int, sharers: int, page_size: int = 1) -> float:
    """How many times fewer prompt tokens are computed when N requests share a prompt. Only whole pages are shared.

    >>> round(prefill_gain(2048, 128, 16), 3), round(prefill_gain(2048, 128, 10**9), 1)
    (8.5, 17.0)
    """
    whole = shared // page_size * page_size
    return (shared + own) / (whole / sharers + shared - whole + own)


def break_even_tokens(fixed_us: float, per_token_us: float, recompute_us: float) -> float:
    """Length of a cached prefix from which looking it up is quicker than computing it; inf when it never is.

    >>> break_even_tokens(50.0, 0.01, 10.01)
    5.0
    """
    gain = recompute_us - per_token_us
    return fixed_us / gain if gain > 0 else math.inf


# --- the study ---


@dataclass(frozen=True)
class Facts:
    """What the closed forms need of a workload.

    known   tokens of each prompt that an earlier request had, the last token never among them
    """

    prompts: np.ndarray[Any, np.dtype[np.int64]]
    known: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def mean_prompt(self) -> float:
        return float(self.prompts.mean())

    def sharing(self, page_size: int) -> float:
        """Share of the requests that know at least a page."""
        return float((self.known >= page_size).mean())


def laws(workload: str = "chat", *, pages: Sequence[int] = PAGES, requests: int | None = 600) -> list[Law]:
    """Every law, on a built-in workload. Predictions are made before anything runs."""
    from kvarena.experiments.break_even import break_even_laws
    from kvarena.experiments.compare import compare
    from kvarena.experiments.traces import load_trace

    loaded = load_trace(workload, limit=requests)
    if loaded.visible.grain > 1 or not loaded.visible.reuse:
        raise ValueError(
            f"laws: {loaded.name} has no token ids, so that rounding and tails do not show; give another trace"
        )
    listed = list(loaded)
    facts = _facts(listed)
    predicted = {size: _predict(facts, size) for size in pages}
    specs = [{"kind": kind, "page_size": size} for kind in KINDS for size in pages]
    common: dict[str, Any] = {"requests": requests, "kernel_batches": 0, "pool": _room(facts, listed, specs)}
    prompts = compare(workload, allocators=specs, **common)
    replies = compare(workload, allocators=specs, outputs="replay", live=LIVE, **common)
    found: list[Law] = []
    lengths = live_lengths(listed, LIVE)
    for entry in prompts.manifest["allocators"]:
        kind, size = entry["kind"], entry["page_size"]
        rounding, textbook, tail = predicted[size]
        lost = _rounding_loss(prompts.requests[prompts.requests["allocator"] == entry["name"]])
        found += _roundings(kind, size, facts, (rounding, textbook), lost)
        found.append(_tail(kind, size, tail, replies.steps[replies.steps["allocator"] == entry["name"]], lengths))
    found += [one for size in pages if size > 1 for one in _distinct(facts, size)]
    found += [table_law(kind, size) for kind in KINDS for size in pages]
    found += [prefill_law(kind, size, n) for kind, size in (("block", 16), ("token", 1)) for n in SHARERS]
    return found + capacity_laws(small_capacity_plan()) + break_even_laws()


def _facts(trace: Sequence[Any]) -> Facts:
    from kvarena.experiments.ceilings import measure_reuse

    prompts = np.array([request.num_prompt_tokens for request in trace], np.int64)
    known = np.minimum(np.array(measure_reuse(trace).prefix_tokens, np.int64), prompts - 1)
    return Facts(prompts, known)


def _room(facts: Facts, trace: Sequence[Request], specs: Sequence[dict[str, Any]]) -> str:
    """A pool in which no design ever evicts: every request its own pages for all that no earlier prompt had in whole
    pages. What is lost is then lost to rounding. (100 % of the distinct tokens is less: large pages are padded.)"""
    from kvarena.experiments.config import PoolConfig

    whole = np.array([request.num_prompt_tokens + request.num_output_tokens for request in trace], np.int64)
    tables, shape = Tables(LIVE, int(whole.max())), PoolConfig().shape
    sizes = {spec["page_size"] for spec in specs}
    pages = {size: int((-(-whole // size) - facts.known // size).sum()) for size in sizes}
    needs = [bytes_for_pages(pages[s["page_size"]], s["kind"], s["page_size"], shape, tables) for s in specs]
    return f"{max(need.pool_bytes for need in needs)} B"


def _predict(facts: Facts, size: int) -> tuple[float, float, float]:
    """Rounding, percent of the prompt tokens, by known lengths and as in the textbook; free slots in a last page."""
    share = rounding_share(size, facts.mean_prompt, facts.sharing(size))
    return 100 * rounding_of_lengths(size, facts.known, int(facts.prompts.sum())), 100 * share, tail_tokens(size)


def _rounding_loss(rows: pd.DataFrame) -> float:
    """Percent of the prompt tokens. Where everything fits, what is known and was not served is rounding."""
    usable = np.minimum(rows["prefix_tokens"], rows["num_prompt_tokens"] - 1)
    return 100 * float((usable - rows["hit_tokens"]).sum() / rows["num_prompt_tokens"].sum())


def _roundings(kind: str, size: int, facts: Facts, predicted: tuple[float, float], lost: float) -> list[Law]:
    """By known lengths and as in the textbook."""
    total = int(facts.prompts.sum())
    laws = (("rounding", rounding_why), (TEXTBOOK, textbook_why))
    return [
        _explained(Law(law, kind, str(size), PERCENT, value, lost, slack=0.1), why, facts.known, total, size, lost)
        for (law, why), value in zip(laws, predicted, strict=True)
    ]


def _explained(law: Law, why: Callable[..., str], *of: Any) -> Law:
    """With its reason, where it does not hold."""
    return law if law.holds else replace(law, why=why(*of))


def _distinct(facts: Facts, size: int) -> list[Law]:
    """What the textbook form leaves out, tested: with each known length counted once, remainders are as it has them.
    Nothing where no prompt knows a page."""
    lengths, times = np.unique(facts.known[facts.known >= size], return_counts=True)
    if not len(lengths):
        return []
    measured = float((lengths % size).mean())
    law = Law("remainder, each length once", "both", str(size), "tokens", (size - 1) / 2, measured, slack=0.25)
    return [_explained(law, remainder_why, lengths, times, size)]


def _tail(kind: str, size: int, predicted: float, steps: pd.DataFrame, lengths: np.ndarray[Any, Any]) -> Law:
    """`lengths`: of the live requests at every step, for the reason."""
    measured = float(steps["tail_slots"].sum() / steps["live"].sum())
    law = Law("tail waste", kind, str(size), "slots a request", predicted, measured, slack=0.25)
    return _explained(law, tail_why, lengths, size, measured)


def table_law(kind: str, page_size: int, rows: int = 256, max_tokens: int = 4096) -> Law:
    """Bytes of the adapter's table, as torch holds it (without torch: as the pool's budget counts them)."""
    predicted = table_bytes(kind, page_size, rows, max_tokens)
    held = _held_bytes(kind, page_size, rows, max_tokens)
    # Ours keeps a padding row in both tables: one in `rows`.
    return Law("table bytes", kind, str(page_size), "bytes", predicted, held, 1.0 / rows)


def _held_bytes(kind: str, page_size: int, rows: int, max_tokens: int) -> int:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        from kvarena.experiments import budget

        return budget.page_table_bytes(kind, page_size, budget.Tables(rows, max_tokens))
    from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter

    pool = make_allocator({"kind": kind, "page_size": page_size}, num_pages=1)
    made = ReqToTokenAdapter if kind == "token" else BlockTableAdapter
    adapter = made(pool, max_requests=rows, max_tokens=max_tokens, max_batch_tokens=rows, slots_by="torch")
    return int(adapter.entries.numel() * adapter.entries.element_size())


def prefill_law(kind: str, page_size: int, sharers: int) -> Law:
    """N requests behind one system prompt, one after the other: prompt tokens over computed tokens."""
    pages = sharers * (SYSTEM // page_size + OWN // page_size + 2)
    pool = make_allocator({"kind": kind, "page_size": page_size}, num_pages=pages)
    system, computed = list(range(SYSTEM)), 0
    for number in range(sharers):
        seq = Tokens(f"r{number}", system + [10_000 + number * OWN + i for i in range(OWN)])
        if pool.admit(seq) is None:
            raise ValueError(f"prefill: the pool of {pool.num_pages} pages is too small for {sharers} requests")
        computed += seq.num_prefill_tokens - seq.num_computed_tokens
        pool.commit([(seq, seq.num_prefill_tokens)])
        pool.release([seq], Release.FINISH)
    measured, predicted = sharers * (SYSTEM + OWN) / computed, prefill_gain(SYSTEM, OWN, sharers, page_size)
    return Law("prefill gain", kind, str(sharers), "times", predicted, measured, 1e-9)


# --- capacity, by the study that has it ---


def capacity_laws(cells: Iterable[Cell]) -> list[Law]:
    """Predicted and measured bursts of a capacity plan, to the request."""
    from kvarena.experiments.capacity import measure

    found = []
    for cell in cells:
        done, kind, size = measure(cell), cell.spec["kind"], str(cell.sizing.page_size)
        why = f"stopped by: {done.stopped}"
        found.append(Law("capacity", kind, size, "requests", cell.predicted, done.measured, 0.0, 1.0, why))
    return found


def small_capacity_plan() -> list[Cell]:
    """Both designs at three page sizes on a card of 8 GiB without weights."""
    from kvarena.experiments.capacity import capacity_plan, small_card

    return capacity_plan(
        on=small_card("small", 8192),
        panels=["equal"],
        loads=["chat"],
        designs=["block-16", "block-32", "block-64", "token-1", "token-16", "token-64"],
        max_model_len=17_000,
        rows=256,
    )


def laws_table(found: Sequence[Law]) -> Table:
    """Predictions, measurements and verdicts for the terminal."""
    from rich.table import Table

    table = Table(title="Laws: predicted before the run, measured after it", title_justify="left")
    for head in ("law", "design", "at", "predicted", "measured", "unit", "holds", "what the closed form leaves out"):
        table.add_column(head, justify="right" if head in ("at", "predicted", "measured") else "left")
    for one in found:
        numbers = (f"{one.predicted:,.4g}", f"{one.measured:,.4g}", one.unit)
        table.add_row(one.law, one.kind, one.x, *numbers, "yes" if one.holds else "NO", "" if one.holds else one.why)
    return table


def laws_frame(found: Sequence[Law], about: str = "") -> pd.DataFrame:
    """The laws as a table with a row each; `about` says of what (`about_laws`)."""
    from dataclasses import asdict

    return pd.DataFrame([{**asdict(one), "holds": one.holds, "about": about} for one in found])


def about_laws(workload: str, requests: int | None) -> str:
    """What was run, for a footer: workload, how many of its requests, what is known of its replies."""
    from kvarena.experiments.traces import load_trace

    trace = load_trace(workload, limit=requests)
    count = sum(1 for _ in trace)
    return f"{trace.name} · first {count:,} requests · outputs {trace.visible.outputs}"


@reads("laws")
def load_laws(path: Path) -> tuple[list[Law], str]:
    """What `laws --out` wrote, and what it is about. Raises ValueError when it is something else."""
    names = [field.name for field in fields(Law)]
    try:
        table = pd.read_csv(path, keep_default_na=False) if path.suffix == ".csv" else pd.read_parquet(path)
        rows = table[[*names, "about"]].astype({"x": str}).to_dict("records")
        about = str(rows[0]["about"])
        numbers = ("predicted", "measured", "tolerance", "slack")
        values: list[dict[str, Any]] = [{n: float(row[n]) if n in numbers else row[n] for n in names} for row in rows]
        return [Law(**one) for one in values], about
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{path}: cannot be read as laws ({error})") from None
