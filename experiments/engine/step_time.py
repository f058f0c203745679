"""How long a step takes: a small model of GPU and host time, for runs without a GPU.

    GPU   = step + linear layers + layers x (store + decode attention + extend attention) + bytes swapped / link
            store             launch + KV bytes written / rate
            linear layers     max(bytes of the weights / bandwidth, 2 x parameters x tokens / rate)
            decode attention  launch + KV bytes read / bandwidth       (sequences with one new token)
            extend attention  launch + the longer of 4 x heads x head_dim x pairs in tiles / rate, and
                              KV bytes read / bandwidth
    host  = base + per request of the batch + per prompt token admitted

Attention coefficients are fitted to measured kernel times (`calibrate.py`) and kept as JSON; without such a file the
defaults below are used, which are shares of the card's published peaks and are marked as not calibrated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvarena.experiments.engine.scheduler import StepPlan
from kvarena.experiments.models import ITEMSIZE, ModelShape

STEP_TIMES_VERSION = 1
TILE_QUERIES = 32  # tokens of a tile of 128 rows with 4 query heads a KV head
TILE_KEYS = 128
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
    """Coefficients. Rates in GB/s and TFLOP/s, times in microseconds, launches once a layer.

    decode_gbps_by_page  bandwidth of decode attention at page sizes for which it was measured apart
    launch_us            host time of a layer's launches where no captured graph replays them: the least that a layer
                         takes in the `kernels` executor; a server's steps are replayed, so theirs leave it out
    error                relative error out of sample, {"decode": [p50, p95], ...}; empty when not calibrated
    """

    decode_us: float = 4.0
    decode_gbps: float = 0.85 * 4800
    extend_us: float = 6.0
    extend_tflops: float = 0.6 * 989
    linear_gbps: float = 0.8 * 4800
    linear_tflops: float = 0.65 * 989
    step_us: float = 300.0
    launch_us: float = 60.0
    store_us: float = 2.0
    store_gbps: float = 0.75 * 4800
    swap_gbps: float = 50.0
    decode_gbps_by_page: dict[str, float] = field(default_factory=dict)
    calibrated: bool = False
    source: str = NOT_CALIBRATED
    error: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class HostTimes:
    """Host time of a step, in microseconds: allocator work alone, beside a base for the rest of the step."""

    base_us: float
    per_request_us: float
    per_prompt_token_us: float


# Allocator times recorded in alternating runs beside the real packages, two shared cores (single figures move by up
# to 40 %): decode step of 256, hash of 4,096 tokens, admission of 4,096 uncached tokens.
HOST: dict[str, HostTimes] = {
    "none": HostTimes(0.0, 0.0, 0.0),
    "ours-block": HostTimes(0.0, 62 / 256, (55 + 18 + 63 * 2.56) / 4096),
    "ours-token": HostTimes(0.0, 12 / 256, 20 / 4096),
    "vllm": HostTimes(0.0, (2331 + 388) / 256, (629 + 387) / 4096),
    "sglang": HostTimes(0.0, 225 / 256, 1468 / 4096),
}


@dataclass(frozen=True, slots=True)
class StepAmounts:
    """What a step's time goes by.

    num_decodes    sequences with one new token; decode_tokens: KV tokens that they read, their own included
    num_extends    sequences with more; extend_pairs: (query, key) pairs of theirs
    tile_pairs     the same with queries in whole tiles of TILE_QUERIES and keys in whole tiles of TILE_KEYS, on
                   average: what a kernel computes; extend_tokens: KV tokens that they read
    new_tokens     tokens computed in all
    moved_pages    pages copied between device and host
    """

    num_decodes: int
    decode_tokens: int
    num_extends: int
    extend_pairs: int
    new_tokens: int
    moved_pages: int = 0
    tile_pairs: int = 0
    extend_tokens: int = 0


def tile_pairs(num_new: int, num_before: int) -> int:
    """Pairs that tiles cover for one sequence with `num_new` queries behind `num_before` cached tokens.

    >>> tile_pairs(16, 8192), 16 * 8192 + 16 * 17 // 2
    (264704, 131208)
    """
    rows = -(-num_new // TILE_QUERIES) * TILE_QUERIES
    return rows * num_before + rows * (rows + TILE_QUERIES) // 2 + rows * (TILE_KEYS // 2)


def step_amounts(plan: StepPlan) -> StepAmounts:
    """The amounts of a plan.

    >>> step_amounts(StepPlan())
    StepAmounts(num_decodes=0, decode_tokens=0, num_extends=0, extend_pairs=0, new_tokens=0, moved_pages=0, \
tile_pairs=0, extend_tokens=0)
    """
    decode_tokens = pairs = num_decodes = num_new = covered = read = 0
    for entry in plan.batch:
        n = entry.num_new
        num_new += n
        if n == 1:
            num_decodes += 1
            decode_tokens += entry.num_before + 1
        else:
            pairs += n * entry.num_before + n * (n + 1) // 2
            covered += tile_pairs(n, entry.num_before)
            read += entry.num_before + n
    return StepAmounts(
        num_decodes,
        decode_tokens,
        len(plan.batch) - num_decodes,
        pairs,
        num_new,
        plan.num_moved_pages,
        covered,
        read,
    )


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds of a step for one model, one page size and one set of coefficients."""

    shape: ModelShape
    compute: Compute
    page_size: int
    gpu: GpuTimes = GpuTimes()
    host: HostTimes = HOST["none"]
    host_base_s: float = 0.0

    def gpu_s(self, plan: StepPlan) -> float:
        """GPU time of a plan; 0 for an empty one."""
        if not plan.batch:
            return 0.0
        amounts = step_amounts(plan)
        us = self.gpu.step_us + self._linear_us(amounts.new_tokens) + self.kernels_us(amounts)
        us += amounts.moved_pages * self.shape.bytes_per_page(self.page_size) / self.gpu.swap_gbps / 1e3
        return us / 1e6

    def prefill_s(self, plan: StepPlan) -> float:
        """Of the GPU time of a plan, what would not be there without its prompts."""
        if all(entry.num_new == 1 for entry in plan.batch):
            return 0.0
        decodes = StepPlan(plan.kind, [entry for entry in plan.batch if entry.num_new == 1], moves=plan.moves)
        return self.gpu_s(plan) - self.gpu_s(decodes)

    def kernels_us(self, amounts: StepAmounts) -> float:
        """Stores and attention of all layers, microseconds: what the `kernels` executor runs."""
        stores = amounts.new_tokens * self.shape.bytes_per_token / self.gpu.store_gbps / 1e3
        stores += self.shape.num_layers * self.gpu.store_us if amounts.new_tokens else 0.0
        return stores + self._decode_us(amounts.decode_tokens) + self._extend_us(amounts)

    def launched_us(self, amounts: StepAmounts) -> float:
        """The same, launched kernel by kernel: never below the host's time for it."""
        floor = self.shape.num_layers * self.gpu.launch_us if amounts.new_tokens else 0.0
        return max(self.kernels_us(amounts), floor)

    def _linear_us(self, num_tokens: int) -> float:
        weights = self.compute.parameters * ITEMSIZE["bfloat16"]
        flops = 2 * self.compute.parameters * num_tokens
        return max(weights / self.gpu.linear_gbps / 1e3, flops / self.gpu.linear_tflops / 1e6)

    def _decode_us(self, kv_tokens: int) -> float:
        if not kv_tokens:
            return 0.0
        return self.shape.num_layers * self.gpu.decode_us + (
            kv_tokens * self.shape.bytes_per_token / _bandwidth(self.gpu, self.page_size) / 1e3
        )

    def _extend_us(self, amounts: StepAmounts) -> float:
        if not amounts.num_extends:
            return 0.0
        layers = self.shape.num_layers
        flops = 4 * self.compute.num_heads * self.shape.head_dim * amounts.tile_pairs * layers
        read = amounts.extend_tokens * self.shape.bytes_per_token / _bandwidth(self.gpu, self.page_size) / 1e3
        return layers * self.gpu.extend_us + max(flops / self.gpu.extend_tflops / 1e6, read)

    def host_s(self, plan: StepPlan) -> float:
        """Host time of scheduling a plan."""
        prompt = sum(request.seq.num_prefill_tokens for request in plan.admitted)
        us = self.host.per_request_us * len(plan.batch) + self.host.per_prompt_token_us * prompt
        return self.host_base_s + (self.host.base_us + us) / 1e6


def _bandwidth(gpu: GpuTimes, page_size: int) -> float:
    """The bandwidth measured at the largest page size that is not larger; else the common one."""
    known = sorted((int(size), rate) for size, rate in gpu.decode_gbps_by_page.items() if int(size) <= page_size)
    return known[-1][1] if known else gpu.decode_gbps


def load_gpu_times(path: Path | None = None) -> GpuTimes:
    """Coefficients from a JSON file (default: the checkout's calibration when it is there, else the defaults).

    Raises ValueError naming the file and the field.
    """
    if path is None:
        import kvarena

        path = Path(kvarena.__file__).resolve().parent.parent / CALIBRATION
        if not path.is_file():
            return GpuTimes()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as step times ({error})") from None
    if not isinstance(data, dict) or data.pop("schema_version", None) != STEP_TIMES_VERSION:
        raise ValueError(f"{path}: schema_version: expected {STEP_TIMES_VERSION}")
    known = {entry.name for entry in fields(GpuTimes)}
    for name, value in data.items():
        if name not in known:
            raise ValueError(f"{path}: {name}: unknown field; known: {', '.join(sorted(known))}")
        if name.endswith(("_us", "_gbps", "_tflops")) and not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"{path}: {name}: expected a number above 0, found {value!r}")
    return GpuTimes(**data)


def save_gpu_times(times: GpuTimes, path: Path) -> None:
    """Write coefficients so that `load_gpu_times` gives them back."""
    data = {"schema_version": STEP_TIMES_VERSION, **asdict(times)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
