"""What an engine run is asked to do, as data: [workload], [pool], [engine], and one [allocator].

A preset is a whole server: scheduler, limits, result lag, allocator and sizing of the pool of one upstream. What is
stated beside it wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from kvarena.experiments.budget import parse_bytes
from kvarena.experiments.capacity_backends import page_size_for
from kvarena.experiments.capacity_sizing import Server, preset_pages
from kvarena.experiments.config import PoolConfig, PositiveInt, WorkloadConfig, copied, load_config, toml_value
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.engine.step_time import HOST
from kvarena.experiments.foreign import read_toml
from kvarena.experiments.specs import AllocatorEntry, allocator_entry
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]

# Servers as they come. vLLM 0.32.0: class defaults of a server on a card of 70 GiB or more. SGLang 0.5.22: the budget
# of a prefill pass and the ceiling of running requests on a card of that size, its default page size and order.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "vllm-0.32.0": {
        "engine": {"scheduler": "vllm", "max_num_batched_tokens": 8192, "max_num_seqs": 1024, "result_lag": 1},
        "allocator": {"name": "vllm"},
    },
    "sglang-0.5.22": {
        "engine": {
            "scheduler": "sglang",
            "max_num_batched_tokens": 16384,
            "chunk_size": 8192,
            "max_num_seqs": 4096,
            "result_lag": 1,
        },
        "allocator": {"name": "sglang"},
    },
}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RunEngineConfig(_Section):
    """The engine of a run. The scheduler's limits and options are those of `SchedulerConfig`.

    samples         replies to each prompt (n), forks of one sequence, each as long as the trace's reply
    beam_width      beams of each request (policy vllm), as long as the trace's reply; 0: none
    executor        "simulated": a step-time model in place of a GPU; "kernels": the same clock and the same decisions,
                    beside real pools, page tables and kernels on random K and V, whose time is measured on this machine
    backend         kernels of executor "kernels": "triton", "torch" (gathers, any device) or "sdpa" (contiguous runs)
    device          of its pool: "cpu" or "cuda"
    attention       attention backend, which fixes the pages: its own choice where the allocator states no page_size,
                    else a check that it reads the stated ones (`kvarena capacity --backends`)
    clock           "feedback": a hit saves time, which decides who is admitted when; "fixed": one recorded schedule of
                    admissions and releases, so that the allocator alone differs; "both": the run of "feedback", with
                    the hits of "fixed" beside it
    schedule        folder of a finished run whose schedule the fixed clock replays; None: a neutral one (the same
                    scheduler over a pool of the same bytes that shares and keeps nothing)
    adapter         page table whose host part is built beside the run and timed on this machine ("block_table",
                    "req_to_token"; needs torch): rows brought up to date and the step's batch; None: not measured
    host            whose allocator time the host takes: "ours", or a recorded table
    host_base_us    the rest of a step's host time, microseconds
    step_times      JSON file of GPU coefficients; None: the checkout's calibration, else defaults that say so
    sessions        "open": every request at the trace's time; "closed": a turn comes after the one before has ended
    think_s         think time of closed sessions, seconds; None: from the trace
    speed           arrivals come so many times faster
    host_pool       bytes of a host tier ("32 GiB"): who is thrown back is swapped out, not computed again; None: none
    host_cache      bytes of a second-level prefix cache on the host: what the device evicts goes there and is copied
                    back on a hit; None: none
    declared        what schedulers are told of an output: the "cap", the "true" length (oracle), or "noisy": the true
                    length times a log-normal factor, never below it
    ttft_ms, tpot_ms, e2el_ms  limits of goodput, milliseconds; None: no limit
    steps_every     a row of steps.parquet every so many steps
    check_every     verify the allocator every so many steps; 0: never
    """

    scheduler: Literal["vllm", "sglang"] = "vllm"
    max_num_batched_tokens: PositiveInt = 8192
    max_num_seqs: PositiveInt = 256
    max_model_len: PositiveInt = 32_768
    chunked_prefill: bool = True
    chunk_size: PositiveInt | None = None
    result_lag: Literal[0, 1] = 1
    order: Literal["fcfs", "lpm", "dfs-weight", "priority"] = "fcfs"
    prefix_deferral: bool | None = None
    limits: Literal["exact", "upstream"] = "exact"
    watermark: Share = 0.0
    whole_prompt_gate: bool = True
    samples: PositiveInt = 1
    beam_width: Annotated[StrictInt, Field(ge=0)] = 0
    max_num_active_seqs: PositiveInt | None = None
    adaptive_cap: bool = False
    conservativeness: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    executor: Literal["simulated", "kernels"] = "simulated"
    backend: Literal["triton", "torch", "sdpa"] = "torch"
    device: Literal["cpu", "cuda"] = "cpu"
    attention: StrictStr | None = None
    clock: Literal["feedback", "fixed", "both"] = "feedback"
    schedule: StrictStr | None = None
    adapter: Literal["block_table", "req_to_token"] | None = None
    host: Literal["ours", "none", "ours-block", "ours-token", "vllm", "sglang"] = "ours"
    host_base_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    step_times: StrictStr | None = None
    sessions: Literal["open", "closed"] = "open"
    think_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    speed: PositiveFloat = 1.0
    host_pool: StrictStr | None = None
    host_cache: StrictStr | None = None
    declared: Literal["cap", "true", "noisy"] = "cap"
    declared_max_tokens: PositiveInt = 4096
    ttft_ms: PositiveFloat | None = None
    tpot_ms: PositiveFloat | None = None
    e2el_ms: PositiveFloat | None = None
    steps_every: PositiveInt = 10
    check_every: Annotated[StrictInt, Field(ge=0)] = 0

    @field_validator("declared", mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return "true" if value is True else value  # TOML's literal, as `--set declared=true` gives it

    @field_validator("host_pool", "host_cache")
    @classmethod
    def _bytes(cls, value: str | None) -> str | None:
        if value is not None:
            parse_bytes(value)
        return value

    @model_validator(mode="after")
    def _schedulable(self) -> RunEngineConfig:
        config = self.scheduler_config()
        if self.schedule is not None and self.clock == "feedback":
            raise ValueError("schedule is replayed by clock 'fixed' or 'both', and clock is 'feedback'")
        if self.executor == "kernels" and self.clock != "feedback":
            raise ValueError(f"executor 'kernels' runs steps, and clock {self.clock!r} replays events without any")
        self._branchable()
        if self.scheduler == "vllm" and config.max_num_batched_tokens < config.max_num_seqs:
            tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
            raise ValueError(f"max_num_batched_tokens {tokens} is less than max_num_seqs {seqs}")
        return self

    def _branchable(self) -> None:
        several = self.samples > 1 or self.beam_width > 0
        if self.beam_width == 1 or (self.beam_width and self.samples > 1):
            raise ValueError(
                f"beam_width: expected 0, or at least 2 with samples 1, found {self.beam_width} with {self.samples}"
            )
        if self.beam_width and self.scheduler != "vllm":
            raise ValueError("beam_width: scheduler 'sglang' has no beams; expected scheduler 'vllm'")
        if several and self.clock != "feedback":
            raise ValueError(f"samples, beam_width: clock {self.clock!r} replays one reply a request")
        if max(self.samples, self.beam_width) > self.max_num_seqs:
            raise ValueError(f"samples, beam_width: at most max_num_seqs ({self.max_num_seqs}) run at once")

    def scheduler_config(self, page_bytes: int = 1) -> SchedulerConfig:
        """The part that the scheduler gets, for pages of so many bytes."""
        sized: dict[str, Any] = {
            name: 0 if size is None else parse_bytes(size) // page_bytes
            for name, size in (("host_pages", self.host_pool), ("host_cache_pages", self.host_cache))
        }
        names = [name for name in SchedulerConfig.__dataclass_fields__ if name not in sized]
        return SchedulerConfig(**{name: getattr(self, name) for name in names}, **sized)

    def host_table(self, kind: str) -> str:
        """Name of the host table; "ours" goes by the allocator's kind."""
        if self.host != "ours":
            return self.host
        own = f"ours-{kind}"
        return own if own in HOST else "ours-block"


class RunConfig(_Section):
    """One engine run.

    preset  a server as it comes; where pool.pool is not stated, its upstream's own sizing on one H200 (`capacity`,
            panel "as deployed") gives the pages
    """

    schema_version: Literal[1] = 1
    preset: Literal["vllm-0.32.0", "sglang-0.5.22"] | None = None
    workload: WorkloadConfig = WorkloadConfig()
    pool: PoolConfig = PoolConfig(pool="16 GiB")
    engine: RunEngineConfig = Field(default_factory=RunEngineConfig)
    allocator: dict[str, Any] = Field(default_factory=lambda: {"name": "vllm"})

    def entry(self) -> AllocatorEntry:
        """The allocator, resolved. Raises ValueError for an unknown name, key or value."""
        return allocator_entry(self.allocator, self.workload.unit)

    def resolved(self) -> dict[str, Any]:
        """Every field with its value, ready for TOML; what is None is left out. The allocator is a list of one, so
        that finished runs can be laid over each other."""
        data = self.model_dump(exclude={"allocator"}, exclude_none=True)
        return {**data, "allocators": [self.entry().as_toml()]}


SECTIONS: dict[str, type[_Section] | type[BaseModel]] = {
    "workload": WorkloadConfig,
    "pool": PoolConfig,
    "engine": RunEngineConfig,
}
SECTION_OF = {field: name for name, section in SECTIONS.items() for field in section.model_fields}


def load_run_config(path: Path, sets: Iterable[str] = ()) -> RunConfig:
    """Read a TOML config of a run, with `key=value` pairs on top. Raises ValueError naming file and field."""
    data = read_toml(path)
    try:
        return run_config(data, sets)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def resolved_config(path: Path, sets: Iterable[str] = ()) -> dict[str, Any]:
    """A config file with every field resolved, whether it is one of a run (it has an [allocator], a preset or a
    scheduler) or of a comparison."""
    data = read_toml(path)
    engine = data.get("engine")
    if {"allocator", "preset"} & set(data) or (isinstance(engine, Mapping) and "scheduler" in engine):
        return load_run_config(path, sets).resolved()
    return load_config(path, sets).resolved()


def run_config(data: Mapping[str, Any], sets: Iterable[str] = ()) -> RunConfig:
    """Validate sections, with a preset underneath and `key=value` pairs on top. Raises ValueError naming the field."""
    given = copied(dict(data))
    _one_allocator(given)
    for item in sorted(sets, key=lambda item: not item.startswith("allocator.kind=")):
        _set(given, item)
    preset = PRESETS.get(str(given.get("preset")), {})
    if "engine" in preset:
        given["engine"] = {**preset["engine"], **given.get("engine", {})}
        given.setdefault("allocator", preset["allocator"])
    stated = given.get("allocator")
    if isinstance(stated, dict) and not {"name", "kind"} & set(stated):
        # Fields alone say what differs from the allocator that runs otherwise.
        given["allocator"] = {**preset.get("allocator", {"name": "vllm"}), **stated}
    _page_size_of_backend(given)
    try:
        config = RunConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError(_first_fault(error)) from None
    config.entry()
    return config if config.preset is None or "pool" in given.get("pool", {}) else _sized_by_preset(config)


def _sized_by_preset(config: RunConfig) -> RunConfig:
    """The pool that the preset's upstream makes of one H200 behind the model's weights: a count of pages."""
    preset, engine, entry = str(config.preset), config.engine, config.entry()
    chunk = engine.chunk_size or engine.max_num_batched_tokens
    server = Server(engine.max_num_seqs, engine.max_model_len, engine.max_num_batched_tokens, chunk)
    pages = preset_pages(preset, entry.kind, entry.page_size, config.pool.model, server)
    return config.model_copy(update={"pool": PoolConfig(pool=pages, model=config.pool.model)})


def _one_allocator(given: dict[str, Any]) -> None:
    listed = given.pop("allocators", None)
    if listed is None:
        return
    if "allocator" in given or not isinstance(listed, list) or len(listed) != 1:
        raise ValueError("allocators: a run takes one [allocator]; `kvarena compare` takes several")
    given["allocator"] = {"name": listed[0]} if isinstance(listed[0], str) else dict(listed[0])


def _page_size_of_backend(given: dict[str, Any]) -> None:
    engine, stated = given.get("engine"), given.get("allocator", {"name": "vllm"})
    if not isinstance(engine, dict) or not isinstance(engine.get("attention"), str) or not isinstance(stated, dict):
        return
    given["allocator"] = {**stated, "page_size": page_size_for([engine["attention"]], stated.get("page_size"))}


def _set(given: dict[str, Any], item: str) -> None:
    key, separator, raw = item.partition("=")
    parts = key.strip().split(".")
    if not separator:
        raise ValueError(f"--set expects key=value, found {item!r}")
    if parts[0] in SECTION_OF and (len(parts) == 1 or parts[0] not in SECTIONS):
        parts = [SECTION_OF[parts[0]], *parts]
    if parts == ["preset"]:
        given["preset"] = toml_value(raw)
        return
    if len(parts) < 2 or parts[0] not in (*SECTIONS, "allocator"):
        raise ValueError(f"{key}: unknown field; known: preset, allocator.FIELD, {', '.join(SECTION_OF)}")
    section = given
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ValueError(f"{key}: {part} is no table")
    if parts == ["allocator", "kind"]:
        # Another kind starts from its own preset: fields of the one before need not fit it.
        section.clear()
    section[parts[-1]] = toml_value(raw)


def _first_fault(error: ValidationError) -> str:
    item = error.errors()[0]
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        section = SECTIONS.get(str(item["loc"][0]), RunConfig)
        return f"{name}: unknown key; known: {', '.join(section.model_fields)}"
    return f"{name}: {item['msg'].removeprefix('Value error, ')}; found {item['input']!r}"[:400]
