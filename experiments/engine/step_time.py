"""How long a step takes: a small model of GPU and host time, for runs without a GPU.

    GPU   = step + sampling + linear layers + layers x (store + attention) + list of tiles + bytes swapped / link
            store          launch + KV bytes written / rate
            linear layers  smooth max(bytes of the weights / bandwidth, 2 x parameters x tokens / rate)
            attention      by the lengths of the batch and the way the kernels share it out (`attention_time.py`)
            sampling       per sequence that yields a token
    host  = base + per request of the batch + per prompt token admitted, of the allocator and of the page table

Coefficients are fitted to measured kernels and steps (`calibrate.py`) and kept as JSON; without such a file the
defaults below are used, which are shares of the card's published peaks and are marked as not calibrated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from kvarena.experiments.engine.attention_time import (
    DecodeTimes,
    ExtendTimes,
    Layout,
    TableKind,
    decode_us,
    decode_work,
    extend_us,
    extend_work,
    list_us,
    page_factor,
)
from kvarena.experiments.engine.scheduler import StepPlan
from kvarena.experiments.foreign import read_json
from kvarena.experiments.models import ITEMSIZE, ModelShape

STEP_TIMES_VERSION = 2
CALIBRATION = Path("results/h200/step_times.json")  # in a checkout
NOT_CALIBRATED = "not calibrated: shares of the published peaks of an H200 (4.8 TB/s, 989 TFLOP/s in bf16)"


@dataclass(frozen=True)
class Compute:
    """What a step's time needs of a model beside its KV shape: query heads, and parameters read every step."""

    num_heads: int
    parameters: float


# From the models' public configuration files; parameters without the embedding, which a step does not read whole.
COMPUTE: dict[str, Compute] = {
    "llama-2-7b": Compute(32, 6.6e9),
    "llama-3-8b": Compute(32, 7.5e9),
    "llama-3-70b": Compute(64, 69.5e9),
    "mistral-7b": Compute(32, 7.1e9),
    "qwen-2.5-7b": Compute(28, 7.1e9),
    "qwen-2.5-72b": Compute(64, 71.5e9),
    "qwen-3-8b": Compute(32, 7.6e9),
    "qwen-3-32b": Compute(64, 32.0e9),
    "smollm2-135m": Compute(9, 0.11e9),
    "deepseek-v2-lite": Compute(16, 2.4e9),  # of 15.7e9, those that one token passes through
    "deepseek-v3": Compute(128, 37e9),  # of 671e9
}


def compute_of(model: str | Mapping[str, Any] | ModelShape, shape: ModelShape) -> Compute:
    """Of a named model; for one's own shape, 4 query heads a KV head and a Llama's parameters at that width."""
    if isinstance(model, str) and model in COMPUTE:
        return COMPUTE[model]
    heads = 4 * shape.num_kv_heads
    width = heads * shape.head_dim
    return Compute(heads, 13.0 * width * width * shape.num_layers)


@dataclass(frozen=True)
class GpuTimes:
    """Coefficients. Rates in GB/s and TFLOP/s, times in microseconds; store and attention once a layer.

    launch_us   host time of a layer's launches where no captured graph replays them, "decode" and "extend": the least
                that a layer takes in the `kernels` executor; a server's steps are replayed, so theirs leave it out
    sample_us   a sequence that yields a token
    error       relative error out of sample, {"steps, decode": [p50, p95], ...}; empty when not calibrated
    """

    decode: DecodeTimes = field(default_factory=DecodeTimes)
    extend: ExtendTimes = field(default_factory=ExtendTimes)
    linear_gbps: float = 0.8 * 4800
    linear_tflops: float = 0.65 * 989
    linear_sharpness: float = 4.0
    step_us: float = 300.0
    sample_us: float = 1.0
    store_us: float = 2.0
    store_gbps: float = 0.75 * 4800
    swap_gbps: float = 50.0
    launch_us: dict[str, float] = field(default_factory=lambda: {"decode": 60.0, "extend": 60.0})
    calibrated: bool = False
    source: str = NOT_CALIBRATED
    error: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class HostTimes:
    """Host time of a step, in microseconds: allocator and page table, beside a base for the rest of the step.

    table_us       of making a step's batch and page table; table_page_us: and a page of new tokens in it
    """

    base_us: float
    per_request_us: float
    per_prompt_token_us: float
    table_us: float = 0.0
    table_page_us: float = 0.0


# Allocator times recorded in alternating runs beside the real packages, two shared cores (single figures move by up
# to 40 %): decode step of 256, hash of 4,096 tokens, admission of 4,096 uncached tokens. Page tables: ours on the
# H200's host (results/h200/kernels.json, rows "host": 256 decodes without and with a new page each, whose difference a
# page also says what a prefill of 8,192 takes); those of the real packages were not recorded and are left out.
HOST: dict[str, HostTimes] = {
    "none": HostTimes(0.0, 0.0, 0.0),
    "ours-block": HostTimes(0.0, 62 / 256, (55 + 18 + 63 * 2.56) / 4096, 76.2, (125.4 - 76.2) / 256),
    "ours-token": HostTimes(0.0, 12 / 256, 20 / 4096, 98.0, (135.4 - 98.0) / 256),
    "vllm": HostTimes(0.0, (2331 + 388) / 256, (629 + 387) / 4096),
    "sglang": HostTimes(0.0, 225 / 256, 1468 / 4096),
}


@dataclass(frozen=True, slots=True)
class StepAmounts:
    """What a step computes, as numbers to keep beside a measured time.

    num_decodes    sequences with one new token; decode_tokens: KV tokens that they read, their own included
    num_extends    sequences with more; extend_pairs: (query, key) pairs of theirs
    new_tokens     tokens computed in all
    moved_pages    pages copied between device and host
    """

    num_decodes: int
    decode_tokens: int
    num_extends: int
    extend_pairs: int
    new_tokens: int
    moved_pages: int = 0


def step_amounts(plan: StepPlan) -> StepAmounts:
    """The amounts of a plan.

    >>> step_amounts(StepPlan())
    StepAmounts(num_decodes=0, decode_tokens=0, num_extends=0, extend_pairs=0, new_tokens=0, moved_pages=0)
    """
    decode_tokens = pairs = num_decodes = num_new = 0
    for entry in plan.batch:
        n = entry.num_new
        num_new += n
        if n == 1:
            num_decodes += 1
            decode_tokens += entry.num_before + 1
        else:
            pairs += n * entry.num_before + n * (n + 1) // 2
    return StepAmounts(num_decodes, decode_tokens, len(plan.batch) - num_decodes, pairs, num_new, plan.num_moved_pages)


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds of a step for one model, one page size and table, and one set of coefficients.

    table_tokens  tokens that a row of the page table can name: the kernels cut sequences by it
    """

    shape: ModelShape
    compute: Compute
    page_size: int
    gpu: GpuTimes = field(default_factory=GpuTimes)
    host: HostTimes = HOST["none"]
    host_base_s: float = 0.0
    table: TableKind = "block_table"
    table_tokens: int = 32_768

    @cached_property
    def layout(self) -> Layout:
        """What the kernels see."""
        return layout_of(self.shape, self.compute.num_heads, self.page_size, self.table, self.table_tokens)

    def gpu_s(self, plan: StepPlan) -> float:
        """GPU time of a plan; 0 for an empty one."""
        if not plan.batch:
            return 0.0
        tokens = sum(entry.num_new for entry in plan.batch)
        us = self.gpu.step_us + self.gpu.sample_us * sum(entry.samples for entry in plan.batch)
        us += self._linear_us(tokens) + self.kernels_us(plan)
        us += plan.num_moved_pages * self.shape.bytes_per_page(self.page_size) / self.gpu.swap_gbps / 1e3
        return us / 1e6

    def prefill_s(self, plan: StepPlan) -> float:
        """Of the GPU time of a plan, what would not be there without its prompts."""
        if all(entry.num_new == 1 for entry in plan.batch):
            return 0.0
        decodes = [entry for entry in plan.batch if entry.num_new == 1]
        held = plan.pages_in_use
        return self.gpu_s(plan) - self.gpu_s(StepPlan(plan.kind, decodes, moves=plan.moves, pages_in_use=held))

    def kernels_us(self, plan: StepPlan, lists: int = 1) -> float:
        """Stores and attention of all layers, microseconds: what the `kernels` executor runs.

        `lists`: how often a step makes the list of tiles.
        """
        if not plan.batch:
            return 0.0
        layers, held = self.shape.num_layers, self._distinct_tokens(plan)
        tokens = sum(entry.num_new for entry in plan.batch)
        store = layers * self.gpu.store_us + tokens * self.shape.bytes_per_token / self.gpu.store_gbps / 1e3
        if tokens == len(plan.batch):
            work = decode_work([entry.num_before + 1 for entry in plan.batch], self.layout, held)
            token_us = self.gpu.decode.token_us[str(work.block)]
            return store + layers * decode_us(self.gpu.decode, work, token_us, self._factor(self.gpu.decode.pages))
        extend = self.gpu.extend
        tiles = extend_work(((entry.num_before, entry.num_new) for entry in plan.batch), self.layout)
        attention = layers * extend_us(extend, tiles, self._factor(extend.pages))
        return store + attention + lists * float(list_us(extend, tiles.sequences))

    def launched_us(self, plan: StepPlan, lists: int = 1) -> float:
        """The same, launched kernel by kernel: never below the host's time for it."""
        decodes = all(entry.num_new == 1 for entry in plan.batch)
        floor = self.shape.num_layers * self.gpu.launch_us["decode" if decodes else "extend"] if plan.batch else 0.0
        return max(self.kernels_us(plan, lists), floor)

    def _distinct_tokens(self, plan: StepPlan) -> int:
        """Of all pages that live requests hold, each once; where the plan does not say, as if nothing were shared."""
        return 2**62 if plan.pages_in_use is None else plan.pages_in_use * self.page_size

    def _factor(self, pages: Mapping[str, float]) -> float:
        return page_factor(pages, self.table, self.page_size)

    def _linear_us(self, num_tokens: int) -> float:
        gpu = self.gpu
        return linear_us(self.compute.parameters, num_tokens, gpu.linear_gbps, gpu.linear_tflops, gpu.linear_sharpness)

    def host_s(self, plan: StepPlan) -> float:
        """Host time of scheduling a plan."""
        prompt = sum(request.seq.num_prefill_tokens for request in plan.admitted)
        us = self.host.per_request_us * len(plan.batch) + self.host.per_prompt_token_us * prompt
        if plan.batch:
            us += self.host.table_us + self.host.table_page_us * plan.num_tokens / self.page_size
        return self.host_base_s + (self.host.base_us + us) / 1e6


def table_of(kind: str) -> TableKind:
    """The page table that a design comes with."""
    return "req_to_token" if kind == "token" else "block_table"


def layout_of(shape: ModelShape, num_heads: int, page_size: int, table: TableKind, table_tokens: int) -> Layout:
    """What the kernels see of a model and an allocator."""
    size = ITEMSIZE[shape.dtype]
    width = shape.bytes_per_token // shape.num_layers // shape.num_kv_heads // size
    group = max(num_heads // shape.num_kv_heads, 1)
    row = shape.head_dim * size
    return Layout(shape.num_kv_heads, group, row, width * size, width, page_size, table, table_tokens)


def linear_us(parameters: float, tokens: Any, gbps: float, tflops: float, sharpness: float) -> Any:
    """Projections and MLPs of all layers, and the logits."""
    reading = parameters * ITEMSIZE["bfloat16"] / gbps / 1e3
    computing = 2 * parameters * tokens / tflops / 1e6
    return (reading**sharpness + computing**sharpness) ** (1 / sharpness)


def load_gpu_times(path: Path | None = None) -> GpuTimes:
    """Coefficients from a JSON file (default: the checkout's calibration when it is there, else the defaults).

    Raises ValueError naming the file and the field.
    """
    if path is None:
        import kvarena

        path = Path(kvarena.__file__).resolve().parent.parent / CALIBRATION
        if not path.is_file():
            return GpuTimes()
    data = read_json(path, "step times")
    if not isinstance(data, dict) or data.pop("schema_version", None) != STEP_TIMES_VERSION:
        raise ValueError(f"{path}: schema_version: expected {STEP_TIMES_VERSION}")
    try:
        return _read(GpuTimes, data, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(kind: type[Any], data: Any, where: str) -> Any:
    """A dataclass of coefficients from plain data; ValueError names the field."""
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'the file'}: expected an object, found {type(data).__name__}")
    known = {entry.name for entry in fields(kind)}
    given: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise ValueError(f"{where}{name}: unknown field; known: {', '.join(sorted(known))}")
        part = {"decode": DecodeTimes, "extend": ExtendTimes}.get(name) if kind is GpuTimes else None
        given[name] = _read(part, value, f"{name}.") if part else _checked(f"{where}{name}", value)
    return kind(**given)


def _checked(name: str, value: Any) -> Any:
    numbers = list(value.values()) if isinstance(value, dict) else [value]
    if name == "error":
        numbers = [number for pair in numbers for number in (pair if isinstance(pair, list) else [pair])]
    for number in [] if name in ("source", "calibrated") else numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
            raise ValueError(f"{name}: expected a number from 0 up, found {number!r}")
    above = name.endswith(("gbps", "_tflops", "sharpness"))
    if above and not (isinstance(value, int | float) and value > 0):
        raise ValueError(f"{name}: expected a number above 0, found {value!r}")
    return value


def save_gpu_times(times: GpuTimes, path: Path) -> None:
    """Write coefficients so that `load_gpu_times` gives them back."""
    data = {"schema_version": STEP_TIMES_VERSION, **asdict(times)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
