"""Experiments on memory and reuse: allocators replay requests, nothing is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvarena.experiments.forking import Method
    from kvarena.experiments.results import Result
    from kvarena.experiments.traces.base import Request


def shared_prompt(requests: int, system: int, question: int) -> dict[str, float]:
    """Pages of 16 and slots of page size 1 that live requests behind one system prompt own, against no sharing."""
    values: dict[str, float] = {}
    for size, word in ((16, "pages"), (1, "slots")):
        shared, apart = _owned(requests, system, question, size), requests * -(-(system + question) // size)
        values |= {f"{word}_shared_{size}": shared, f"{word}_apart_{size}": apart, f"saved_{size}": 1 - shared / apart}
    return values


def shared_prompt_lengths(requests: int, systems: Sequence[int], question: int) -> dict[str, float]:
    """The saved share in pages of 16 for each length of the system prompt."""
    found = {system: shared_prompt(requests, system, question) for system in systems}
    return {f"saved_16_at_{system}": values["saved_16"] for system, values in found.items()}


def prefill_gain(requests: Sequence[int], system: int, question: Sequence[int]) -> dict[str, float]:
    """Prompt tokens over tokens computed, token design, cold cache: what a shared prompt spares of prefill."""
    values = {}
    for count in requests:
        for own in question:
            rows = _behind_one_prompt(count, system, own)
            hits = _replayed(rows, page_size=1, pages=count * (system + own) + 1).summary["hit_tokens"]
            total = count * (system + own)
            values[f"gain_{count}_{own}"] = total / (total - float(hits.iloc[0]))
    return values


def waste(requests: int, live: int, max_model_len: int, seed: int) -> dict[str, float]:
    """Reserved slots without a token, over all reserved slots, mean over a run of ShareGPT-like lengths; `used_` is
    what is left, `gain_` the difference of pages of 16 to contiguous runs."""
    from kvarena.experiments.compare import compare

    runs = {f"contiguous_{sizing}": _contiguous(sizing, max_model_len) for sizing in ("max", "pow2", "oracle")}
    designs = {**runs, "block_16": {"kind": "block", "page_size": 16}, "token_1": {"kind": "token", "page_size": 1}}
    result = compare(
        _trace(_with_lengths(requests, max_model_len, seed), "ShareGPT-like lengths"),
        allocators=[{"name": name, **design} for name, design in designs.items()],
        pool=f"{live * max_model_len * 2 * 131072} B",
        live=live,
        outputs="replay",
        reply_chunk=1,
        kernel_batches=0,
    )
    wasted = result.summary.set_index("allocator")["fragmentation"]
    values = {f"waste_{name}": float(wasted[name]) for name in designs}
    values |= {f"used_{name}": 1 - float(wasted[name]) for name in designs}
    for sizing in ("max", "pow2", "oracle"):
        values[f"gain_block_16_over_{sizing}"] = float(wasted[f"contiguous_{sizing}"] - wasted["block_16"])
    return values


def tail_waste(sizes: Sequence[int], live: int, requests: int) -> dict[str, float]:
    """Tail slots a live request minus S - 1, the largest over all steps of `chat`; exact a request at live = 1."""
    designs = [{"name": f"block-{size}", "kind": "block", "page_size": size} for size in sizes]
    result = _compare("chat", designs, requests, pool="100 %", live=live, outputs="replay", reply_chunk=1)
    values = {}
    for size in sizes:
        steps = result.steps[result.steps["allocator"] == f"block-{size}"]
        values[f"most_over_bound_{size}"] = float((steps["tail_slots"] / steps["live"] - (size - 1)).max())
    return values


def duplicates(live: int, workloads: Sequence[str], requests: int) -> dict[str, float]:
    """Duplicate pages over pages in use, mean over the steps of each workload, block with pages of 16."""
    values = {}
    for name in workloads:
        steps = _compare(name, [{"kind": "block"}], requests, pool="100 %", live=live, outputs="replay").steps
        values[f"share_{name}"] = float((steps["duplicates"] / steps["in_use"].clip(lower=1)).mean())
    return values


def grain(workloads: Sequence[str], requests: int) -> dict[str, float]:
    """Token hit rate at page size 1 minus at 16, same design, pool as large as the working set."""
    sizes = [{"name": f"token-{size}", "kind": "token", "page_size": size} for size in (1, 16)]
    values = {}
    for name in workloads:
        rates = _compare(name, sizes, requests, pool="100 %").summary.set_index("allocator")["token_hit_rate"]
        values[f"gain_{name}"] = float(rates["token-1"] - rates["token-16"])
    return values


def hit_rates(workloads: Sequence[str], requests: int) -> dict[str, float]:
    """Token hit rate of the token design at page size 1, pool as large as the working set."""
    found = {name: _compare(name, [{"name": "sglang"}], requests, pool="100 %") for name in workloads}
    return {f"rate_{name}": float(result.summary["token_hit_rate"].iloc[0]) for name, result in found.items()}


def forks(method: Method, lengths: str, requests: int, seed: int) -> dict[str, float]:
    """Blocks saved over time by sharing among the sequences of a request, pages of 16 (`forking.py`)."""
    from kvarena.experiments.forking import ALPACA, SHAREGPT, WIDTHS, saving

    drawn = {one.name: one for one in (ALPACA, SHAREGPT)}[lengths]
    block = {"kind": "block", "page_size": 16}
    found = {width: saving(drawn, method, block, width, requests=requests, seed=seed) for width in WIDTHS}
    return {f"saved_{width}": one.saved for width, one in found.items()}


# --- requests and runs ---


def _behind_one_prompt(requests: int, system: int, question: int) -> list[Request]:
    head = np.arange(system, dtype=np.int32)
    own = [np.arange(question, dtype=np.int32) + system + i * question for i in range(requests)]
    return [_request(i, np.concatenate([head, tail])) for i, tail in enumerate(own)]


def _owned(requests: int, system: int, question: int, page_size: int) -> int:
    """Pages that all requests own together when all are live; the last step's count."""
    rows = _behind_one_prompt(requests, system, question)
    kind = "block" if page_size > 1 else "token"
    pages = requests * -(-(system + question) // page_size) + 1
    steps = _replayed(rows, page_size=page_size, pages=pages, kind=kind, live=requests).steps
    return int(steps["in_use"].iloc[-1])


def _replayed(rows: list[Request], *, page_size: int, pages: int, kind: str = "token", live: int = 1) -> Result:
    from kvarena.experiments.compare import compare

    design = {"kind": kind, "page_size": page_size}
    return compare(_trace(rows, "one system prompt"), allocators=[design], pool=pages, live=live, kernel_batches=0)


def _compare(name: str, designs: list[dict[str, Any]], requests: int, **fields: Any) -> Result:
    from kvarena.experiments.compare import compare

    return compare(name, allocators=designs, requests=requests, kernel_batches=0, **fields)


def _contiguous(sizing: str, max_model_len: int) -> dict[str, Any]:
    return {"kind": "contiguous", "sizing": sizing, **({"max_model_len": max_model_len} if sizing == "max" else {})}


def _with_lengths(requests: int, longest: int, seed: int) -> list[Request]:
    from kvarena.experiments.forking import SHAREGPT

    drawn = SHAREGPT.draw(np.random.default_rng(seed), requests)
    rows, start = [], 0
    for index, (prompt, reply) in enumerate(drawn):
        prompt, reply = min(prompt, longest // 2), min(reply, longest // 2)
        ids = np.arange(start, start + prompt + reply, dtype=np.int32)
        rows.append(_request(index, ids[:prompt], ids[prompt:]))
        start += prompt + reply
    return rows


def _request(index: int, prompt: Any, reply: Any = None) -> Request:
    from kvarena.experiments.traces.base import Request

    return Request(
        f"r{index}",
        float(index),
        len(prompt),
        0 if reply is None else len(reply),
        token_ids=prompt,
        output_ids=reply,
    )


def _trace(rows: list[Request], name: str) -> Any:
    from kvarena.experiments.traces.base import Trace, Visible

    outputs: Any = "recorded" if rows[0].output_ids is not None else "none"
    return Trace(name, Visible(1, True, outputs, False), lambda: iter(rows), len(rows))
