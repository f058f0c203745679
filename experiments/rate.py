"""Latency and throughput against request rate, and what a hit is worth.

    [workload] [pool] [engine]      those of `kvarena run`
    [[allocators]]                  two or more, compared at the same rates
    [rate]                          shares of saturation, hit rates of the second part

Saturation is the rate at which the first allocator serves a backlog (all requests there at once). The trace's own
arrivals are then stretched or pressed together to shares of it, for every allocator alike. The knee of an allocator is
the rate at which its normalised latency (end-to-end time over output tokens, mean of the requests) has doubled from
the lowest rate; in between rates it is interpolated, and it is missing where the latency never doubles.

The second part asks what hits are worth: a workload with a chosen token hit rate h is served as a backlog with and
without a prefix cache. With f the share of the time without a cache that prompts take, Amdahl's law says that saved
prompts raise the throughput to 1 / (1 - f h) times. Where memory bounds the batch, hits are worth more than that:
requests that share pages leave room for others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from kvarena.experiments import metrics, partial
from kvarena.experiments.cells import floats
from kvarena.experiments.config import toml_value
from kvarena.experiments.engine.latency import PERCENTILES
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import RunConfig, run_config
from kvarena.experiments.engine.step_time import Compute, compute_of
from kvarena.experiments.foreign import read_json, read_toml
from kvarena.experiments.models import ModelShape
from kvarena.experiments.outputs import refuse_unwritable
from kvarena.experiments.provenance import provenance
from kvarena.experiments.results import Result
from kvarena.experiments.style import FORMATS
from kvarena.experiments.sweep_workers import in_processes
from kvarena.experiments.wrong_kind import reads
from pydantic import BaseModel, ConfigDict, Field, ValidationError

SCHEMA_VERSION = 1
BACKLOG_SPEED = 1e9  # arrivals so close together that all are there at once
KNEE = 2.0  # times the normalised latency at the lowest rate
TABLES = ("rates", "hits")
Share = Annotated[float, Field(gt=0, le=10)]
HitRate = Annotated[float, Field(ge=0, lt=1)]


class RateConfig(BaseModel):
    """The [rate] table.

    shares       rates, as shares of saturation, ascending
    hit_rates    token hit rates of the second part; empty: no second part
    hit_options  parameters of its workload, `hit_rate`
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shares: Annotated[list[Share], Field(min_length=2)] = [*(round(0.1 * tenth, 1) for tenth in range(1, 16))]
    hit_rates: list[HitRate] = [0.0, 0.2, 0.4, 0.6, 0.8]
    hit_options: dict[str, Any] = Field(default_factory=lambda: {"num_requests": 400})


@dataclass(frozen=True)
class RatePlan:
    """What is run: the base of every run, the allocators in order, and the [rate] table."""

    base: dict[str, Any]
    allocators: tuple[dict[str, Any], ...]
    rate: RateConfig

    def config(self, allocator: Mapping[str, Any], sets: Iterable[str] = ()) -> RunConfig:
        """The run of one allocator. Raises ValueError naming the field."""
        return run_config({**self.base, "allocator": dict(allocator)}, sets)


@dataclass
class RateResult:
    """A finished study.

    rates     a row a rate and allocator; hits: a row a hit rate and allocator of the second part
    manifest  saturation of each allocator, knees, limits, trace, step times, warnings
    """

    rates: pd.DataFrame
    hits: pd.DataFrame
    manifest: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)

    def save(self, out: Path | str) -> Path:
        """rates.csv, hits.csv, result.json, provenance.json, and last the figure: a fault in it costs no table. Raises
        ValueError when `out` holds other things or cannot be written."""
        from kvarena.experiments.plots_rate import save_rate_figure

        folder = Path(out)
        refuse_other(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for kind in FORMATS:  # of an earlier study there
                (folder / f"rate.{kind}").unlink(missing_ok=True)
            for name in TABLES:
                getattr(self, name).to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")
            _write_json(folder / "provenance.json", self.provenance)
            _write_json(folder / "result.json", {"schema_version": SCHEMA_VERSION, "kind": "rate", **self.manifest})
        except OSError as error:
            raise ValueError(f"{out}: cannot be written ({error.strerror})") from None
        try:
            save_rate_figure(self, folder / "rate")
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            raise ValueError(f"{out}: the study is saved, but its figure could not be made ({fault})") from error
        return folder


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_other(folder: Path) -> None:
    """Raise ValueError when `folder` takes no files, or holds something else than a finished study."""
    refuse_unwritable(folder / "result.json")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        load_rate(folder)


@reads("rate")
def load_rate(path: Path | str) -> RateResult:
    """Read a finished study. Raises ValueError naming what is missing or broken."""
    folder = Path(path)
    partial.refuse_partial(folder)
    try:
        manifest = read_json(folder / "result.json")
        if manifest.pop("schema_version", None) != SCHEMA_VERSION or manifest.pop("kind", None) != "rate":
            raise ValueError(f"result.json: expected schema_version {SCHEMA_VERSION} and kind 'rate'")
        frames = {name: pd.read_csv(folder / f"{name}.csv") for name in TABLES}
        where = read_json(folder / "provenance.json")
        if not {"allocator", "share", "rate_per_s"} <= set(frames["rates"]):
            raise ValueError("rates.csv: expected columns allocator, share and rate_per_s")
    except (OSError, ValueError, AttributeError, RecursionError, pd.errors.ParserError) as error:
        raise ValueError(f"{folder}: not a finished rate study ({error})") from None
    return RateResult(**frames, manifest=manifest, provenance=where)


def load_rate_plan(path: Path, sets: Iterable[str] = ()) -> RatePlan:
    """Read a TOML file. Raises ValueError naming file and field."""
    data = read_toml(path)
    try:
        return rate_plan(data, sets)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def rate_plan(data: Mapping[str, Any], sets: Iterable[str] = ()) -> RatePlan:
    """From sections, `key=value` pairs on top (`rate.shares=[0.5, 1.0]` for those of [rate])."""
    given = dict(data)
    table = given.pop("rate", {})
    if not isinstance(table, Mapping):
        raise ValueError(f"rate: expected a table, found {table!r}")
    table = dict(table)
    rest = []
    for item in sets:
        key, _, value = item.partition("=")
        if key.startswith("rate."):
            table[key.removeprefix("rate.")] = toml_value(value)
        else:
            rest.append(item)
    allocators = given.pop("allocators", [{"name": "vllm"}, {"name": "sglang"}])
    if not isinstance(allocators, list) or not allocators:
        raise ValueError("allocators: expected [[allocators]] tables, at least one")
    try:
        rate = RateConfig.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"rate.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if list(rate.shares) != sorted(set(rate.shares)):
        raise ValueError(f"rate.shares: expected ascending shares, each once, found {rate.shares}")
    base = apply_run_sets(given, rest)
    plan = RatePlan(base, tuple({"name": a} if isinstance(a, str) else dict(a) for a in allocators), rate)
    names = [plan.config(allocator).entry().name for allocator in plan.allocators]
    if len(set(names)) < len(names):
        raise ValueError(f"allocators: {', '.join(names)}: two have one name")
    return plan


def apply_run_sets(given: dict[str, Any], sets: list[str]) -> dict[str, Any]:
    """`--set` pairs of a run's fields, put into its sections."""
    return {
        name: part
        for name, part in run_config(given, sets).model_dump(exclude_none=True).items()
        if name != "allocator"
    }


# --- running ---


@dataclass
class _Sofar:
    """Rows of what has been run."""

    rates: list[dict[str, Any]] = field(default_factory=list)
    hits: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, plan: RatePlan, out: Path | None) -> partial.Interrupted:
        """What to raise when the study is interrupted, its rows kept."""
        done = dict.fromkeys(f"share {row['share']:g}" for row in self.rates)
        done |= dict.fromkeys(f"hit rate {row['target']:g}" for row in self.hits)
        every = [f"share {share:g}" for share in plan.rate.shares]
        every += [f"hit rate {target:g}" for target in plan.rate.hit_rates]
        tables = {"rates": pd.DataFrame(self.rates), "hits": pd.DataFrame(self.hits)}
        missing = partial.names_left(every, done)
        return partial.keep_tables(out, "rate", tables, list(done), missing, "rates")


def run_rate(
    plan: RatePlan, *, jobs: int = 1, tick: Callable[[str], None] | None = None, out: Path | None = None
) -> RateResult:
    """The whole study. `jobs` processes; `tick` is told each finished run; `out` is where the result will be saved:
    beside it the rows are kept when the study is interrupted. Raises ValueError when `out` cannot take the result."""
    if out is not None:
        refuse_other(out)
        partial.refuse_other_partial(partial.partial_folder(out))
    sofar = _Sofar()
    try:
        return _run_rate(plan, jobs, tick, sofar)
    except KeyboardInterrupt:
        raise sofar.keep(plan, out) from None
    except ValueError as error:  # what a later part of the study cannot run costs no row of those before
        raise ValueError(f"{error}; {sofar.keep(plan, out)}" if sofar.rates else str(error)) from error
    except Exception as error:
        error.add_note(str(sofar.keep(plan, out)))
        raise


def _run_rate(plan: RatePlan, jobs: int, tick: Callable[[str], None] | None, sofar: _Sofar) -> RateResult:
    started = time.time()
    backlog = _one(plan, [f"speed={BACKLOG_SPEED}"], jobs, tick)
    names = list(backlog)
    saturation = {name: float(one.summary["requests_per_s"].mean()) for name, one in backlog.items()}
    if not saturation[names[0]] > 0:
        why = "; ".join(backlog[names[0]].warnings)
        raise ValueError(f"rate.shares: {names[0]} serves no request of a backlog, so there is no saturation ({why})")
    natural = _natural_rate(backlog[names[0]])
    work = [(share, share * saturation[names[0]]) for share in plan.rate.shares]
    sets = [[f"speed={rate / natural!r}"] for _, rate in work]
    with closing(_many(plan, sets, jobs, tick)) as runs:
        for (share, rate), found in zip(work, runs, strict=True):
            sofar.rates += [rate_row(name, share, rate, one) for name, one in found.items()]
    rates = floats(pd.DataFrame(sofar.rates))
    hits = hit_rows(plan, jobs, tick, sofar.hits)
    manifest = _manifest(plan, backlog, saturation, rates)
    return RateResult(
        rates, hits, manifest, provenance(plan.config(plan.allocators[0]).workload.seed_list, [], started)
    )


def _one(plan: RatePlan, sets: list[str], jobs: int, tick: Callable[[str], None] | None) -> dict[str, Result]:
    with closing(_many(plan, [sets], jobs, tick)) as runs:
        return next(runs)


def _many(
    plan: RatePlan, sets: list[list[str]], jobs: int, tick: Callable[[str], None] | None
) -> Generator[dict[str, Result], None, None]:
    """For each list of `--set` pairs the result of every allocator. Closing it ends its processes."""
    configs = [plan.config(allocator, each) for each in sets for allocator in plan.allocators]
    together: dict[str, Result] = {}
    with closing(_in_order(configs, jobs)) as results:
        for config, result in zip(configs, results, strict=True):
            together[result.allocators[0]] = result
            if tick is not None:
                tick(f"{config.entry().name} at speed {config.engine.speed:g}")
            if len(together) == len(plan.allocators):
                yield together
                together = {}


def _in_order(configs: list[RunConfig], jobs: int) -> Generator[Result, None, None]:
    early: dict[int, Result] = {}
    due = 0
    with closing(in_processes(run_engine, configs, jobs)) as results:
        for place, result in results:
            early[place] = result
            while due in early:
                yield early.pop(due)
                due += 1


def _natural_rate(result: Result) -> float:
    """Requests a second of the trace itself, at speed 1."""
    arrivals = result.requests["arrival_s"] * BACKLOG_SPEED
    span = float(arrivals.max() - arrivals.min())
    if span <= 0:
        raise ValueError("workload: all requests arrive at once, so that there is no rate to change")
    per_seed = result.requests.groupby("seed").size().mean()
    return float(per_seed) / span


def rate_row(name: str, share: float, rate: float, result: Result) -> dict[str, Any]:
    """One allocator at one rate, means over the seeds; latencies in milliseconds."""
    mean = result.summary.mean(numeric_only=True)
    columns = [f"{what}_{label}_ms" for what in ("ttft", "tpot") for label in PERCENTILES]
    kept = ["requests_per_s", "output_tokens_per_s", "goodput_per_s", "mean_batch", "token_hit_rate", "preemptions"]
    return {
        "allocator": name,
        "share": share,
        "rate_per_s": rate,
        "normalised_ms": normalised_ms(result.requests),
        **{column: mean[column] for column in columns},
        **{column: mean[column] for column in kept},
        **prefill_flops(result),
        "rejected": mean["rejected"],
    }


def normalised_ms(requests: pd.DataFrame) -> float:
    """Mean over the served requests of end-to-end time over output tokens, milliseconds."""
    served = requests[(requests["end"] != "rejected") & (requests["output_tokens"] > 0)]
    return float((served["e2el_ms"] / served["output_tokens"]).mean())


def prefill_flops(result: Result) -> dict[str, float]:
    """TFLOPs that prompts would take, and the share that hits saved; recomputation after preemptions is not in it."""
    from kvarena.experiments.models import model_shape

    model = result.config["pool"]["model"]
    shape = model_shape(model)
    compute = compute_of(model, shape)
    rows = result.requests[result.requests["admitted"]]
    whole = sum(prompt_flops(n, 0, shape, compute) for n in rows["num_prompt_tokens"])
    done = sum(
        prompt_flops(n, hit, shape, compute)
        for n, hit in zip(rows["num_prompt_tokens"], rows["hit_tokens"], strict=True)
    )
    return {"prefill_tflops": whole / 1e12, "prefill_saved": metrics.ratio(whole - done, whole) or 0.0}


def prompt_flops(prompt: int, hit: int, shape: ModelShape, compute: Compute) -> float:
    """Of the tokens behind the hit: 2 a parameter, and 4 x heads x head_dim a (query, key) pair and layer.

    >>> from kvarena.experiments.models import SHAPES
    >>> round(prompt_flops(1000, 0, SHAPES["llama-3-8b"], Compute(32, 7.5e9)) / 1e12, 2)
    15.26
    """
    new = int(prompt) - int(hit)
    pairs = new * int(hit) + new * (new + 1) // 2
    return 2.0 * compute.parameters * new + 4.0 * compute.num_heads * shape.head_dim * shape.num_layers * pairs


# --- what a hit is worth ---


def hit_rows(
    plan: RatePlan, jobs: int, tick: Callable[[str], None] | None, rows: list[dict[str, Any]] | None = None
) -> pd.DataFrame:
    """A row a hit rate and allocator: gain in throughput over the same requests without a cache, and Amdahl's.

    rows  list that takes them as they come
    """
    if not plan.rate.hit_rates:
        return pd.DataFrame(columns=["allocator", "token_hit_rate", "gain", "amdahl"])
    rows = [] if rows is None else rows
    plain = {"kind": "block", "page_size": 16, "prefix_cache": False, "name": "no cache"}
    for target in plan.rate.hit_rates:
        options = {**plan.rate.hit_options, "token_hit_rate": target, "page_size": 16}
        base = {**plan.base, "workload": {"trace": "hit_rate", "options": options}}
        engine = {**base["engine"], "sessions": "open", "speed": BACKLOG_SPEED}
        mine = RatePlan({**base, "engine": engine}, (plain, *plan.allocators), plan.rate)
        without, *others = _one(mine, [], jobs, tick).values()
        rows += [_hit_row(one, without, target) for one in others]
    return floats(pd.DataFrame(rows))


def _hit_row(one: Result, without: Result, target: float) -> dict[str, Any]:
    row, base_row = one.summary.iloc[0], without.summary.iloc[0]
    hit = float(row["token_hit_rate"])
    return {
        "allocator": one.allocators[0],
        "target": target,
        "token_hit_rate": hit,
        "gain": metrics.ratio(float(row["requests_per_s"]), float(base_row["requests_per_s"])),
        "prefill_share": float(base_row["prefill_share"]),
        "amdahl": 1 / (1 - float(base_row["prefill_share"]) * hit),
        **prefill_flops(one),
    }


# --- the knee ---


def knee(rates: pd.DataFrame) -> float | None:
    """Requests a second at which the normalised latency reaches KNEE times that of the lowest rate; None: never, or
    nothing was served at the lowest.

    >>> knee(pd.DataFrame({"rate_per_s": [1.0, 2.0, 3.0], "normalised_ms": [10.0, 15.0, 25.0]}))
    2.5
    """
    rows = rates.sort_values("rate_per_s")
    limit = KNEE * float(rows["normalised_ms"].iloc[0])
    before = None
    for rate, value in zip(rows["rate_per_s"], rows["normalised_ms"], strict=True):
        if value != value:
            continue  # nothing was served at this rate
        if value >= limit:
            if before is None:
                return float(rate)
            return float(before[0] + (rate - before[0]) * (limit - before[1]) / (value - before[1]))
        before = (rate, value)
    return None


def _manifest(
    plan: RatePlan, backlog: dict[str, Result], saturation: dict[str, float], rates: pd.DataFrame
) -> dict[str, Any]:
    results = list(backlog.values())
    first = results[0].manifest
    config = plan.config(plan.allocators[0])
    return {
        "trace": first["trace"],
        "policy": first["policy"],
        "allocators": [one.manifest["allocators"][0] for one in results],
        "saturation_per_s": saturation,
        "knee_per_s": {name: knee(part) for name, part in rates.groupby("allocator", sort=False)},
        "goodput_limits": first["goodput_limits"],
        "step_times": first["step_times"]["source"],
        "model": config.pool.model if isinstance(config.pool.model, str) else config.pool.shape.model_dump(),
        "pool_bytes": first["pools"],
        "result_lag": config.engine.result_lag,
        "clock": "feedback",
        "requests": int(results[0].summary["requests"].sum()),
        "warnings": list(dict.fromkeys(text for one in results for text in one.warnings)),
    }
