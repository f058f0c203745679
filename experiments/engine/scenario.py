"""Runs scheduler scenarios (kv-sched/1) through a policy and writes step logs.

A scenario is a JSON-lines file: a header with the limits, then one request a line with the step before which it
arrives. The log has one line a step, in the format in which the upstreams' own schedulers were recorded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import EventKind, KVAllocator
from kvarena.experiments.engine.engine import Engine, StepRecord, make_scheduler
from kvarena.experiments.engine.executors import HiddenOutputs, ScriptedExecutor
from kvarena.experiments.engine.policy_sglang import SglangScheduler
from kvarena.experiments.engine.request import End, EngineRequest, make_request
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.outputs import refuse_unwritable
from kvarena.experiments.scenarios import check_sizes, scenario_files, scenario_rows, write_decisions

SCHED_FORMAT = "kv-sched/1"
OWN_ALLOCATOR = {"vllm": "block", "sglang": "token"}
PEERS = {"vllm": "vllm 0.32.0", "sglang": "sglang 0.5.22"}


@dataclass(frozen=True)
class Arrival:
    """One request of a scenario: it arrives before step `step` is scheduled."""

    step: int
    request_id: str
    tokens: list[int]
    max_tokens: int
    output: list[int]


@dataclass(frozen=True)
class SchedScenario:
    """A parsed scenario: the header as written, and the arrivals in order."""

    path: Path
    header: dict[str, Any]
    arrivals: list[Arrival]

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".gz").removesuffix(".jsonl")


def read_sched_scenario(path: Path) -> SchedScenario:
    """Read a scheduler scenario (.jsonl or .jsonl.gz). Raises ValueError naming file, line and field."""
    rows = scenario_rows(path)
    if not rows:
        raise ValueError(f"{path}: empty; expected a header line with format {SCHED_FORMAT!r}")
    header = rows[0][1]
    if header.get("format") != SCHED_FORMAT:
        raise ValueError(f"{path}:1: format: expected {SCHED_FORMAT!r}, found {header.get('format')!r}")
    sizes = ("num_slots", "page_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs")
    check_sizes(header, sizes, f"{path}:1")
    arrivals: list[Arrival] = []
    seen: set[str] = set()
    for number, row in rows[1:]:
        arrival = _arrival(row, f"{path}:{number}")
        if arrival.request_id in seen:
            raise ValueError(f"{path}:{number}: id: {arrival.request_id!r} arrives twice")
        seen.add(arrival.request_id)
        if arrivals and arrival.step < arrivals[-1].step:
            raise ValueError(f"{path}:{number}: step: {arrival.step} comes after step {arrivals[-1].step}")
        arrivals.append(arrival)
    return SchedScenario(path, header, arrivals)


def _integer(row: dict[str, Any], name: str, where: str, least: int) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: {name}: expected an integer of at least {least}, found {value!r}")
    return value


def _tokens(row: dict[str, Any], name: str, where: str) -> list[int]:
    value = row.get(name)
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise ValueError(f"{where}: {name}: expected a list of at least one integer")
    return value


def _arrival(row: dict[str, Any], where: str) -> Arrival:
    request_id = row.get("id")
    if not isinstance(request_id, str):
        raise ValueError(f"{where}: id: expected a string, found {request_id!r}")
    arrival = Arrival(
        _integer(row, "step", where, 0),
        request_id,
        _tokens(row, "tokens", where),
        _integer(row, "max_tokens", where, 1),
        _tokens(row, "output", where),
    )
    if len(arrival.output) > arrival.max_tokens:
        raise ValueError(f"{where}: output: {len(arrival.output)} tokens, max_tokens is {arrival.max_tokens}")
    return arrival


def config_of(header: dict[str, Any], *, lag: int | None = None, order: str = "fcfs") -> SchedulerConfig:
    """The limits and options that a header states, under the upstream's own arrival rules."""
    options = {
        "watermark": "watermark",
        "whole_prompt_gate": "reserve_full_isl",
        "max_num_active_seqs": "max_num_active_seqs",
        "adaptive_cap": "adaptive_cap",
        "conservativeness": "conservativeness",
        "chunk_size": "chunk_size",
        "chunked_prefill": "chunked_prefill",
    }
    return SchedulerConfig(
        max_num_batched_tokens=header["max_num_batched_tokens"],
        max_num_seqs=header["max_num_seqs"],
        max_model_len=header["max_model_len"],
        result_lag=header.get("result_lag", 0) if lag is None else lag,  # type: ignore[arg-type]  # checked there
        order=order,  # type: ignore[arg-type]  # checked there
        limits="upstream",
        **{name: header[key] for name, key in options.items() if key in header},
    )


class SchedRunner:
    """One scenario in one engine, a step at a time."""

    def __init__(
        self,
        scenario: SchedScenario,
        policy: str,
        *,
        allocator: str | Mapping[str, Any] | None = None,
        lag: int | None = None,
        order: str = "fcfs",
        page_size: int | None = None,
    ) -> None:
        header = scenario.header
        size = page_size or header["page_size"]
        num_pages = header["num_slots"] // size
        if num_pages < 1:
            raise ValueError(f"{scenario.path}:1: num_slots {header['num_slots']} holds no page of {size} tokens")
        kind = allocator or OWN_ALLOCATOR.get(policy, policy)
        spec: dict[str, Any] = {"page_size": size, **({"kind": kind} if isinstance(kind, str) else kind)}
        if not header.get("enable_prefix_cache", True):
            spec["prefix_cache"] = False
        config = config_of(header, lag=lag, order=order)
        self.allocator: KVAllocator = make_allocator(spec, num_pages=num_pages)
        self.allocator.events.enabled = True
        self.scheduler = make_scheduler(policy, self.allocator, config)
        self.outputs = HiddenOutputs()
        self.engine = Engine(self.scheduler, ScriptedExecutor(self.outputs))
        self.requests: dict[str, EngineRequest] = {}
        self._arrivals = list(reversed(scenario.arrivals))
        if policy == "sglang" and self._arrivals:
            # The recorded loop does nothing before the first arrival, and drains the batch in flight at the end.
            self.engine.num_steps = self._arrivals[-1].step
        self._drains = policy == "sglang"

    @property
    def finished(self) -> bool:
        """Every request has ended."""
        if self._arrivals or (self._drains and self.engine.in_flight is not None):
            return False
        return all(request.done for request in self.requests.values())

    def step(self) -> StepRecord:
        """Let the arrivals of this step in, and run it."""
        while self._arrivals and self._arrivals[-1].step <= self.engine.num_steps:
            self._arrive(self._arrivals.pop())
        self.allocator.events.drain()
        return self.engine.step()

    def _arrive(self, arrival: Arrival) -> None:
        request = make_request(arrival.request_id, arrival.tokens, arrival.max_tokens, arrival_s=float(arrival.step))
        self.requests[request.id] = request
        self.outputs.add(request.id, arrival.output)
        self.engine.add(request)

    def line(self, record: StepRecord) -> dict[str, Any]:
        """The log line of a step."""
        plan = record.plan
        free, evictable = self.allocator.room()
        turned_away = [request for request in record.finished if request.end is End.REJECTED]
        return {
            "step": record.step,
            "scheduled": {entry.request.id: [entry.num_new, entry.num_before] for entry in plan.batch},
            "admitted": [request.id for request in plan.admitted],
            "hit": {request.id: request.hits[-1] for request in plan.admitted},
            "preempted": [request.id for request in plan.preempted],
            "finished": self._finished_ids(record),
            "running": [request.id for request in self.scheduler.running_requests],
            "waiting": [request.id for request in self.scheduler.waiting],
            "free": free,
            "evictable": evictable,
            "extra": {
                **self._extra(record),
                "rejected": {request.id: request.message for request in (*turned_away, *record.ended)},
            },
        }

    def _finished_ids(self, record: StepRecord) -> list[str]:
        """In order of processing; the logs of SGLang list them in order of arrival."""
        ids = {request.id for request in record.finished}
        if isinstance(self.scheduler, SglangScheduler):
            return [request_id for request_id in self.requests if request_id in ids]
        return [request.id for request in record.finished]

    def _extra(self, record: StepRecord) -> dict[str, Any]:
        if not isinstance(self.scheduler, SglangScheduler):
            return self._pages_taken() | {
                "resumed": [request.id for request in record.plan.admitted if request.num_preemptions],
                "sampled": [entry.request.id for entry in record.plan.batch if entry.samples],
            }
        chunked = self.scheduler.chunked
        return {
            "kind": record.plan.kind,
            "new_token_ratio": round(self.scheduler.ratio.value, 9),
            "batch_is_full": self.scheduler.running.full,
            "chunked": None if chunked is None else chunked.id,
        }

    def _pages_taken(self) -> dict[str, Any]:
        """Pages newly taken by each request, and pages whose content was dropped for them, in order."""
        taken: dict[str, list[int]] = {}
        evicted: list[int] = []
        for event in self.allocator.events.rows:
            if event.kind is EventKind.RESERVE and event.page_ids:
                taken.setdefault(event.request_id or "", []).extend(event.page_ids)
            elif event.kind is EventKind.EVICT:
                evicted.extend(event.page_ids)
        return {"new_pages": taken, "evicted": evicted}


def run_sched_scenario(
    scenario: SchedScenario, policy: str, *, check: bool = False, **options: Any
) -> Iterator[dict[str, Any]]:
    """Yield the log of a scenario, header line first, until every request has ended.

    A request behind which the upstream would wait for ever is ended instead; the step's `extra.rejected` names it
    and says why. `check` verifies the allocator after every step.
    """
    runner = SchedRunner(scenario, policy, **options)
    config, allocator = runner.scheduler.config, runner.allocator
    yield {
        **scenario.header,
        "page_size": allocator.page_size,
        "result_lag": config.result_lag,
        "policy": config.order,
        "peer": f"kvarena {policy} policy ({PEERS[policy]} rules) over {allocator.kind}",
        "conventions": "as the upstream's logs; extra.rejected: requests that can never be served, with the numbers",
    }
    while not runner.finished:
        record = runner.step()
        if check:
            allocator.check()
        yield runner.line(record)


def log_name(scenario: SchedScenario, policy: str, page_size: int | None, order: str, lag: int) -> str:
    """File name of a log: NAME for vllm, NAME.pN.ORDER[.lag1] for sglang, as the upstreams' logs are named."""
    if policy == "vllm":
        return f"{scenario.name}{'' if page_size is None else f'.p{page_size}'}.jsonl"
    size = page_size or scenario.header["page_size"]
    return f"{scenario.name}.p{size}.{order}{'.lag1' if lag else ''}.jsonl"


def write_sched_logs(path: Path, policy: str, out: Path | None, *, check: bool = False, **options: Any) -> None:
    """Run a scenario, or a folder of them, and write the logs below `out` (None: to stdout).

    Raises ValueError for an unknown policy, order or lag. Says on stderr who was rejected.
    """
    if policy not in OWN_ALLOCATOR:
        raise ValueError(f"--scheduler: expected vllm or sglang, found {policy!r}")
    if options.get("allocator") not in (None, "block", "token"):
        raise ValueError(f"--allocator: expected block or token, found {options['allocator']!r}")
    files = scenario_files(path)
    if out is not None:
        refuse_unwritable(out / "file" if out.is_dir() else out)
    for file in files:
        scenario = read_sched_scenario(file)
        lines = [*run_sched_scenario(scenario, policy, check=check, **options)]
        for line in lines[1:]:
            for message in line["extra"]["rejected"].values():
                print(f"{scenario.name} step {line['step']}: {message}", file=sys.stderr)
        if out is None:
            for line in lines:
                print(json.dumps(line, separators=(",", ":")))
            continue
        head = lines[0]
        name = log_name(scenario, policy, options.get("page_size"), head["policy"], head["result_lag"])
        write_decisions(lines, out / name if path.is_dir() or out.is_dir() or not out.suffix else out)
    if out is not None:
        print(f"{len(files)} scheduler logs in {out}", file=sys.stderr)
