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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from kvarena.experiments.bench import alloc_adapter, real_sglang, real_vllm
from kvarena.experiments.bench import alloc_studies as studies
from kvarena.experiments.bench.alloc_floor_ops import floor_ops
from kvarena.experiments.bench.alloc_load import Prompt, replay_prompts
from kvarena.experiments.bench.alloc_ops import Op, Timed, block_ops, token_ops
from kvarena.experiments.bench.alloc_recorded import MARKS, SOURCE, Mark, times_better, verdict
from kvarena.experiments.provenance import code_version

SCHEMA_VERSION = 1
STUDIES = ("counts", "replay", "op", "latency", "growth", "memory", "adapter")
Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure. `quick` is a smoke run: its figures say that it works, not how fast it is."""

    num_requests: int = 4000
    repeats: int = 5
    samples: int = 40
    largest: int = 1_000_000
    memory_tokens: int = 1_048_576
    largest_batch: int = 1024
    trace_requests: int = 4000

    @classmethod
    def quick(cls) -> Effort:
        return cls(
            num_requests=300,
            repeats=2,
            samples=5,
            largest=10_000,
            memory_tokens=65_536,
            largest_batch=16,
            trace_requests=50,
        )


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
        "latency": lambda: latency_rows(load, effort, say),
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
        "packages_here": peers_here(),
        "requests": effort.num_requests,
        "repeats": effort.repeats,
        "samples": effort.samples,
    }


def peers_here() -> dict[str, str]:
    """Versions of the real packages that can be imported."""
    found = {"vllm": real_vllm.version(), "sglang": real_sglang.version()}
    return {name: version for name, version in found.items() if version is not None}


def row(
    study: str,
    name: str,
    design: str,
    page_size: int,
    unit: str,
    values: list[float],
    here: Iterable[float] = (),
    floor: Iterable[float] = (),
) -> Row:
    """Median and range of a measurement, beside its yardsticks; `here` are the real package's values in its turns,
    `floor` those of the least that Python has to do.

    met           against the real package of this run, else against the recorded one
    met_recorded  against the recorded one alone; None where a figure is asked for, no ratio
    floor_ratio   how many times better than the real package (of this run, else recorded) the floor is
    """
    value = statistics.median(values)
    mark = MARKS.get((study, name, design, page_size), Mark())
    recorded = None if mark.real is None else times_better(value, mark.real, unit)
    beside = _beside(values, list(here), unit) | _floor(list(floor), list(here), mark, unit)
    found = value if mark.absolute else beside.get("here_ratio", recorded)
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
        "ratio": recorded,
        "must": mark.must,
        "aim": mark.aim,
        "absolute": mark.absolute,
        "met": verdict(found, mark, unit),
        "met_recorded": None if mark.absolute else verdict(recorded, mark, unit),
    } | beside


def _beside(ours: list[float], real: list[float], unit: str) -> Row:
    """The real package's value in the same turns, and how many times better ours is, with the range over turns."""
    if not real:
        return {}
    ratios = [times_better(mine, theirs, unit) for mine, theirs in zip(ours, real, strict=True)]
    return {
        "here": statistics.median(real),
        "here_ratio": statistics.median(ratios),
        "here_ratio_low": min(ratios),
        "here_ratio_high": max(ratios),
    }


def _floor(floor: list[float], real: list[float], mark: Mark, unit: str) -> Row:
    """The floor, and the ratio that it reaches where there is something to compare it with."""
    if not floor:
        return {}
    found = statistics.median(floor)
    if real:
        ratio = _beside(floor, real, unit)["here_ratio"]
    elif mark.real is not None:
        ratio = times_better(found, mark.real, unit)
    else:
        return {"floor": found}
    return {"floor": found, "floor_ratio": ratio}


def lean_of(ours: list[float], real: list[float]) -> Row:
    """The real package's value and our ratio to it where it is called in the leanest way."""
    found = _beside(ours, real, "us")
    return {"lean": found["here"], "lean_ratio": found["here_ratio"]}


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

    Where a real package can be imported it takes its turns too: `here` is its rate in this run. The input is int32
    arrays and the real package called as its engine does; or, "verbs alone", requests made beforehand and the real
    package called in the leanest way.
    """
    pairs = sorted({_pair(contender) for contender in studies.CONTENDERS})
    importable = real_kinds(say)
    expected = {pair: studies.decisions(load, *pair) for pair in pairs}
    beside = {pair: known for pair, known in expected.items() if pair[0] in importable}
    sizes = {contender.page_size for contender in studies.CONTENDERS}
    made = {size: studies.sequences(load, size, hashes=False) for size in sizes}
    yield from _replays(
        "tokens",
        {c: partial(studies.replay_rate, c, load) for c in studies.CONTENDERS},
        {pair: partial(studies.real_rate, load, *pair, known, lean=False) for pair, known in beside.items()},
        {c: partial(studies.floor_rate, c, load, expected[_pair(c)]) for c in studies.CONTENDERS},
        effort,
    )
    yield from _replays(
        "tokens, verbs alone",
        {c: partial(studies.verbs_rate, c, made[c.page_size]) for c in studies.CONTENDERS},
        {pair: partial(studies.real_rate, load, *pair, known, lean=True) for pair, known in beside.items()},
        {},
        effort,
    )
    # A token a page is its own name: at page 1 hashes say nothing new.
    named = studies.sequences(load, 16, hashes=True)
    yield from _replays(
        "page hashes",
        {c: partial(studies.verbs_rate, c, named) for c in studies.CONTENDERS if c.page_size == 16},
        {},
        {},
        effort,
    )


Rate = Callable[[], float]
Pair = tuple[str, int]  # kind of design, page size: what the real package is asked for


def _pair(contender: studies.Contender) -> Pair:
    return contender.spec["kind"], contender.page_size


def _replays(
    form: str,
    ours: dict[studies.Contender, Rate],
    real: dict[Pair, Rate],
    floors: dict[studies.Contender, Rate],
    effort: Effort,
) -> Iterator[Row]:
    def turn(rates: Mapping[Any, Rate], found: dict[Any, list[float]]) -> None:
        for each, rate in rates.items():
            found.setdefault(each, []).append(rate())

    values: dict[studies.Contender, list[float]] = {}
    others: dict[Pair, list[float]] = {}
    least: dict[studies.Contender, list[float]] = {}
    for _ in range(effort.repeats):
        turn(ours, values)
        turn(real, others)
        turn(floors, least)
    for each, rates in values.items():
        beside = others.get(_pair(each), [])
        yield row("replay", form, each.design, each.page_size, "requests/CPU s", rates, beside, least.get(each, []))


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


def op_rows(effort: Effort, say: Say) -> Iterator[Row]:
    """Microseconds of single operations; the real package's turn comes after each of ours where it can be imported."""
    importable = real_kinds(say)
    packages = [package for kind, package in (("block", real_vllm), ("token", real_sglang)) if kind in importable]
    engine = _by_label(op for package in packages for op in package.real_ops())
    lean = _by_label(op for package in packages for op in package.lean_ops())
    floors = _by_label(floor_ops())
    for op in [*token_ops(), *block_ops()]:
        label = (op.name, op.design.split()[0], op.page_size)
        twins = {"ours": op, "here": engine.get(label), "lean": lean.get(label)}
        twins["floor"] = floors.get((op.name, op.design, op.page_size))
        known = {name: twin for name, twin in twins.items() if twin is not None}
        turns = dict(zip(known, _in_turns(list(known.values()), effort.samples, effort.repeats), strict=True))
        ours, here, floor = (turns.get(name, []) for name in ("ours", "here", "floor"))
        line = row("op", op.name, op.design, op.page_size, "us", ours, here, floor)
        yield line | (lean_of(ours, turns["lean"]) if "lean" in turns else {})


def _by_label(ops: Iterable[Op]) -> dict[tuple[str, str, int], Op]:
    return {(op.name, op.design, op.page_size): op for op in ops}


def _in_turns(ops: list[Op], samples: int, turns: int) -> list[list[float]]:
    """One value a turn for each, the median of its share of the samples; the first of a turn, a cold one, is dropped.

    A turn is several samples, so that nobody is charged for the memory that another one's turn has pushed out.
    """
    timed = [op.make() for op in ops]
    share = max(samples // turns, 1)

    def turn(each: Timed) -> float:
        return statistics.median([each.sample() for _ in range(share + 1)][1:])

    values = [[turn(each) for each in timed] for _ in range(turns)]
    return [list(column) for column in zip(*values, strict=True)]


def latency_rows(load: list[Prompt], effort: Effort, say: Say) -> Iterator[Row]:
    """p50, p99 and max of every verb's calls over one replay, wall time: of a recorded trace where one is held."""
    replayed = studies.recorded_replay(effort.trace_requests, say) or studies.own_replay(load)
    for contender in studies.CONTENDERS:
        for verb, taken in replayed.latencies(contender).items():
            marks = np.percentile(taken, [50, 99, 100]) / 1000
            for label, value in zip(("p50", "p99", "max"), marks, strict=True):
                line = row("latency", f"{verb} {label}", contender.design, contender.page_size, "us", [float(value)])
                yield line | {"calls": len(taken), "trace": replayed.name}


def growth_rows(effort: Effort) -> Iterator[Row]:
    """The same operation in ever larger pools and trees; sizes take turns, so that a slow moment hits all of them."""
    for name, design, page_size, by_size in studies.growth(effort.largest):
        values = _by_size(by_size, effort.samples)
        for size, column in values.items():
            yield row("growth", name, design, page_size, "us", column) | {"size": size}
        smallest, largest = values[min(values)], values[max(values)]
        times = statistics.median(largest) / statistics.median(smallest)
        yield row("slowdown", name, design, page_size, "times", [times]) | {"size": max(values)}


def _by_size(by_size: dict[int, Timed], samples: int) -> dict[int, list[float]]:
    """Samples of each size; the first, cold ones are dropped."""
    turns = [[timed.sample() for timed in by_size.values()] for _ in range(samples + 1)][1:]
    return {size: list(values) for size, values in zip(by_size, zip(*turns, strict=True), strict=True)}


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
        for size, values in _by_size(by_size, effort.samples).items():
            yield row("adapter", name, design, page_size, "us", values) | {"size": size}
