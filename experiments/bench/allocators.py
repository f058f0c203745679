"""kvarena bench allocators: what a decision costs on the host, ours beside the real packages and what is asked for.

Cost is shown in three ways that never share an axis: operation counts that follow from the decisions alone, the
real packages' times (recorded ones; measured here too where they can be imported), and ours. Times are process
CPU time, medians over samples with the whole range beside them; only latencies are wall time, since that is what a
step waits for. Everything runs on one core of the host; memory and cache are shared with whatever else runs there, so
compare ratios, not digits.

Nothing is timed before the designs' forms were found to decide alike on this workload.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvarena.experiments.bench import alloc_adapter, real_sglang, real_vllm
from kvarena.experiments.bench import alloc_studies as studies
from kvarena.experiments.bench.alloc_load import NUM_REQUESTS, Prompt, replay_prompts
from kvarena.experiments.bench.alloc_ops import Op, Timed, block_ops, token_ops
from kvarena.experiments.bench.alloc_recorded import MARKS, SOURCE, Mark
from kvarena.experiments.provenance import code_version

SCHEMA_VERSION = 1
STUDIES = ("counts", "replay", "op", "latency", "growth", "memory", "adapter")
Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure. `quick` is a smoke run: its figures say that it works, not how fast it is."""

    num_requests: int = NUM_REQUESTS
    repeats: int = 5
    samples: int = 41
    largest: int = 1_000_000
    memory_tokens: int = 1_048_576
    largest_batch: int = 1024

    @classmethod
    def quick(cls) -> Effort:
        return cls(num_requests=300, repeats=2, samples=5, largest=10_000, memory_tokens=65_536, largest_batch=16)


def run(chosen: Iterable[str], effort: Effort, say: Say) -> Iterator[Row]:
    """Rows of the chosen studies, header first. `say` hears of the progress."""
    chosen = list(chosen)
    unknown = sorted(set(chosen) - set(STUDIES))
    if unknown:
        raise ValueError(f"study: expected some of {', '.join(STUDIES)}, found {', '.join(unknown)}")
    yield header(effort)
    load = replay_prompts(effort.num_requests)
    say("gate: the designs' forms decide alike")
    studies.gate(load[:500])
    measure: dict[str, Callable[[], Iterator[Row]]] = {
        "counts": lambda: count_rows(load),
        "replay": lambda: replay_rows(load, effort, say),
        "op": lambda: op_rows(effort, say),
        "latency": lambda: latency_rows(load),
        "growth": lambda: growth_rows(effort),
        "memory": lambda: memory_rows(effort),
        "adapter": lambda: adapter_rows(effort, say),
    }
    for study in STUDIES:
        if study in chosen:
            say(f"study: {study}")
            yield from measure[study]()


def header(effort: Effort) -> Row:
    """Where the figures come from. `load_average` is that of the last 1, 5 and 15 minutes before the run."""
    return {
        "schema_version": SCHEMA_VERSION,
        "study": "header",
        "kvarena": code_version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "real": SOURCE,
        "requests": effort.num_requests,
        "repeats": effort.repeats,
        "samples": effort.samples,
    }


def row(study: str, name: str, design: str, page_size: int, unit: str, values: list[float]) -> Row:
    """Median and range of a measurement, beside its yardsticks."""
    value = statistics.median(values)
    mark = MARKS.get((study, name, design, page_size), Mark())
    return {
        "study": study,
        "name": name,
        "design": design,
        "page_size": page_size,
        "unit": unit,
        "value": value,
        "low": min(values),
        "high": max(values),
        "samples": len(values),
        "real": mark.real,
        "ratio": _ratio(value, mark, unit),
        "must": mark.must,
        "aim": mark.aim,
        "absolute": mark.absolute,
        "met": _met(value, mark, unit),
    }


def _ratio(value: float, mark: Mark, unit: str) -> float | None:
    """How many times better than the real package."""
    if mark.real is None:
        return None
    return value / mark.real if unit.startswith("requests") else mark.real / value


def _met(value: float, mark: Mark, unit: str) -> str | None:
    """ "aim", "must" or "no"; None where nothing is asked for."""
    if mark.must is None:
        return None
    more_is_better = unit.startswith("requests") or not mark.absolute
    found = value if mark.absolute else _ratio(value, mark, unit) or 0.0

    def reached(wanted: float | None) -> bool:
        return wanted is not None and (found >= wanted if more_is_better else found <= wanted)

    return "aim" if reached(mark.aim) else "must" if reached(mark.must) else "no"


def count_rows(load: list[Prompt]) -> Iterator[Row]:
    """Operation counts of one replay, a request each."""
    for contender in _decisions():
        found = studies.counts(contender, studies.sequences(load, contender.page_size, hashes=False))
        for name, total in found.items():
            yield row(
                "counts", name, contender.design.split()[0], contender.page_size, "a request", [total / len(load)]
            )


def _decisions() -> list[studies.Contender]:
    """One contender for each set of decisions: block's two forms decide alike."""
    return [contender for contender in studies.CONTENDERS if contender.design != "block runs"]


def replay_rows(load: list[Prompt], effort: Effort, say: Say) -> Iterator[Row]:
    """Requests a CPU second; contenders take turns, so that a slow moment of the machine hits all of them.

    Where a real package can be imported it takes its turns too: `here` is its rate in this run.
    """
    importable = real_kinds(say)
    for form in ("tokens", "page hashes"):
        # A token a page is its own name: at page 1 hashes say nothing new.
        contenders = [c for c in studies.CONTENDERS if form == "tokens" or c.page_size > 1]
        sizes = {contender.page_size for contender in contenders}
        seqs = {size: studies.sequences(load, size, hashes=form != "tokens") for size in sizes}
        rates: dict[studies.Contender, list[float]] = {contender: [] for contender in contenders}
        pairs = {(contender.spec["kind"], contender.page_size) for contender in contenders if form == "tokens"}
        real: dict[tuple[str, int], list[float]] = {pair: [] for pair in sorted(pairs) if pair[0] in importable}
        for _ in range(effort.repeats):
            for contender, values in rates.items():
                values.append(studies.replay_rate(contender, seqs[contender.page_size]))
            for (kind, size), values in real.items():
                values.append(studies.real_rate(load, kind, size))
        for contender, values in rates.items():
            line = row("replay", form, contender.design, contender.page_size, "requests/CPU s", values)
            yield line | _beside(values, real.get((contender.spec["kind"], contender.page_size), []))


def real_kinds(say: Say) -> set[str]:
    """Designs whose real package can be imported; `say` hears why one cannot."""
    found = set()
    for kind, package in (("block", real_vllm), ("token", real_sglang)):
        missing = package.importable()
        if missing:
            say(missing)
        else:
            found.add(kind)
    return found


def _beside(ours: list[float], real: list[float], less_is_better: bool = False) -> Row:
    """The real package's value in the same turns, and how many times better ours is, with the range over turns."""
    if not real:
        return {}
    ratios = [mine / theirs for mine, theirs in zip(ours, real, strict=True)]
    if less_is_better:
        ratios = [1 / ratio for ratio in ratios]
    return {
        "here": statistics.median(real),
        "here_ratio": statistics.median(ratios),
        "here_ratio_low": min(ratios),
        "here_ratio_high": max(ratios),
    }


def op_rows(effort: Effort, say: Say) -> Iterator[Row]:
    """Microseconds of single operations; the real package's turn comes after each of ours where it can be imported."""
    importable = real_kinds(say)
    real = [
        op
        for kind, package in (("block", real_vllm), ("token", real_sglang))
        if kind in importable
        for op in package.real_ops()
    ]
    twins = {(op.name, op.design, op.page_size): op for op in real}
    for op in [*token_ops(), *block_ops()]:
        twin = twins.get((op.name, op.design.split()[0], op.page_size))
        ours, theirs = _in_turns(op, twin, effort.samples)
        line = row("op", op.name, op.design, op.page_size, "us", ours)
        yield line | _beside(ours, theirs, less_is_better=True)


def _in_turns(op: Op, twin: Op | None, samples: int) -> tuple[list[float], list[float]]:
    """Samples of ours and of the real package's, one of each in turn; the first, cold ones are dropped."""
    if twin is None:
        return op.measure(samples), []
    ours, theirs = op.make(), twin.make()
    turns = [(ours.sample(), theirs.sample()) for _ in range(samples + 1)][1:]
    return [mine for mine, _ in turns], [other for _, other in turns]


def latency_rows(load: list[Prompt]) -> Iterator[Row]:
    """p50, p99 and max of every verb's calls over one replay, wall time."""
    for contender in studies.CONTENDERS:
        seqs = studies.sequences(load, contender.page_size, hashes=False)
        for verb, taken in studies.latencies(contender, seqs).items():
            marks = np.percentile(taken, [50, 99, 100]) / 1000
            for label, value in zip(("p50", "p99", "max"), marks, strict=True):
                yield row("latency", f"{verb} {label}", contender.design, contender.page_size, "us", [float(value)])


def growth_rows(effort: Effort) -> Iterator[Row]:
    """The same operation in ever larger pools and trees; sizes take turns, so that a slow moment hits all of them."""
    for name, design, page_size, by_size in studies.growth(effort.largest):
        yield from _by_size("growth", name, design, page_size, by_size, effort.samples)


def _by_size(
    study: str, name: str, design: str, page_size: int, by_size: dict[int, Timed], samples: int
) -> Iterator[Row]:
    for timed in by_size.values():
        timed.sample()
    turns = [[timed.sample() for timed in by_size.values()] for _ in range(samples)]
    for size, values in zip(by_size, zip(*turns, strict=True), strict=True):
        yield row(study, name, design, page_size, "us", list(values)) | {"size": size}


def memory_rows(effort: Effort) -> Iterator[Row]:
    """Bytes a cached token and a node, seconds to build a large pool."""
    for contender in studies.CONTENDERS:
        labels = (contender.design, contender.page_size)
        yield row("memory", "bytes a cached token", *labels, "bytes", [studies.memory(contender, effort.memory_tokens)])
        seconds = [studies.build_seconds(contender)]
        yield row("memory", "seconds to build 1,000,000 pages", *labels, "s", seconds)
    yield row("memory", "bytes a radix node", "token", 1, "bytes", [studies.node_bytes()])


def adapter_rows(effort: Effort, say: Say) -> Iterator[Row]:
    """The host's part of a step through the adapters, against its requests."""
    missing = alloc_adapter.missing()
    if missing:
        say(missing)
        return
    for name, design, page_size, by_size in alloc_adapter.adapter_steps(effort.largest_batch):
        yield from _by_size("adapter", name, design, page_size, by_size, effort.samples)
