"""One small result of every kind that `kvarena verify result` can recompute, as its command writes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from kvarena.experiments import aged, forking, ladder_ablations, laws, one_axis
from kvarena.experiments.bounds import bounds
from kvarena.experiments.capacity import capacity_plan, small_card
from kvarena.experiments.capacity_study import run_study
from kvarena.experiments.config import config_from_keywords
from kvarena.experiments.explain import explain
from kvarena.experiments.ladder import ladder
from kvarena.experiments.rate import rate_plan, run_rate
from kvarena.experiments.resample import replicate
from kvarena.experiments.results import finished_folder
from kvarena.experiments.study import write_table
from support.commands import invoke
from support.small import OPTIONS, shared

ROOT = Path(__file__).resolve().parents[2]
CHAT = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": "450 MiB"}}


def make_comparison(out: Path) -> None:
    with finished_folder(out) as folder:  # without the seconds of drawing
        shared()._write_tables(folder)


def make_capacity(out: Path) -> None:
    plan = capacity_plan(
        "smollm2-135m",
        on=small_card("smollm2-135m", 400),
        panels=["equal"],
        loads=["short"],
        designs=["block-16", "token-16"],
        rows=64,
        max_model_len=4096,
    )
    run_study(plan).save(out)


def make_rate(out: Path) -> None:
    workload = {"trace": "chat", "options": {"num_sessions": 6}, "requests": 24}
    hits = {"shares": [0.5, 3.0], "hit_rates": [0.3], "hit_options": {"num_requests": 40}}
    run_rate(rate_plan({"workload": workload, "pool": {"pool": "1 GiB"}, "rate": hits})).save(out)


def make_ladder(out: Path) -> None:
    ladder(CHAT, out, groups=["duplicates", "eviction_unit"], jobs=1, rounds=1)


def make_ablations(out: Path) -> None:
    ladder_ablations.ablations(CHAT, out, lengths=[100])


def make_resample(out: Path) -> None:
    fields = {"trace": "chat", "options": {"num_sessions": 24}, "pool": "1 GiB", "kernel_batches": 0, "requests": 100}
    replicate(config_from_keywords(fields), out, replicates=10, jobs=1)


def make_pagesize(out: Path) -> None:
    one_axis.save(one_axis.study(["few_shot"], pages=[1, 64], requests=20, rounds=1), out)


def make_aged(out: Path) -> None:
    done = [aged.age(one, aged.AgeConfig(hours=0.02, pool_tokens=65_536)) for one in aged.ALLOCATORS[:2]]
    aged.save(done, aged.AgeConfig(hours=0.02, pool_tokens=65_536), out)


def make_claims(out: Path) -> None:
    invoke("claims", "shared_prompt_201_pages", "gqa_3x", "--out", out, "--quiet")


def make_laws(out: Path) -> None:
    write_table(laws.laws_frame([laws.Law("rounding", "block", "16", "%", 1.0, 1.05, 0.1, 0.0, "because")]), out)


def make_reasons(out: Path) -> None:
    write_table(explain(shared(), allocator="vllm", pool=shared().pools[0], seed=0)[0].table, out)


def make_sweep_reasons(out: Path) -> None:
    shutil.copyfile(ROOT / "results" / "study" / "reasons.csv", out)


def make_bounds(out: Path) -> None:
    write_table(bounds(shared()), out)


def make_forks(out: Path) -> None:
    row = forking.saving(forking.ALPACA, "beam", {"kind": "block", "page_size": 16}, 2, requests=2, seed=3)
    write_table(forking.frame([row]), out)


def make_upstream(out: Path) -> None:
    shutil.copyfile(ROOT / "results" / "upstream" / "vllm-0.32.0.json", out)


MAKERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "compare": ("out", make_comparison),
    "capacity": ("out", make_capacity),
    "rate": ("out", make_rate),
    "ladder": ("out", make_ladder),
    "ablations": ("out", make_ablations),
    "resample": ("out", make_resample),
    "page-size study": ("out", make_pagesize),
    "claims": ("out", make_claims),
    "aged pools": ("out", make_aged),
    "laws": ("laws.csv", make_laws),
    "reasons": ("reasons.parquet", make_reasons),
    "reasons of a sweep": ("reasons.csv", make_sweep_reasons),
    "bounds": ("bounds.csv", make_bounds),
    "forks": ("forks.csv", make_forks),
    "live verification": ("v.json", make_upstream),
}
