"""`[engine] executor`: real pools and kernels beside the simulated clock change no row of a run."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.experiments.engine import run_executors
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.results import Result

pytest.importorskip("torch")

CONFIG: dict[str, Any] = {
    "workload": {
        "trace": "chat",
        "options": {"num_sessions": 2, "max_turns": 2, "max_reply": 12},
    },
    "pool": {"pool": "1 MiB", "model": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "dtype": "float32"}},
    "engine": {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 2048, "check_every": 5},
}


def run(*sets: str) -> Result:
    return run_engine(run_config(CONFIG, sets))


@pytest.mark.parametrize("scheduler", ["vllm", "sglang"])
@pytest.mark.parametrize(("kind", "table"), [("block", "req_to_token"), ("token", "block_table")])
def test_kernels_beside_the_clock_change_no_row(kind: str, table: str, scheduler: str) -> None:
    sets = [f"allocator.kind={kind}", f"scheduler={scheduler}", "speed=50", "declared=true"]
    plain, real = run(*sets), run(*sets, "executor=kernels", f"adapter={table}")
    assert real.requests.equals(plain.requests)
    assert real.steps.equals(plain.steps)
    times = real.timings.set_index("verb")
    assert times.loc["kernels", "calls"] == times.loc["adapter", "calls"] > 0
    assert times.loc["kernels", "p50_us"] > 0
    assert "kernels" not in set(plain.timings["verb"])


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["clock=both"], "executor 'kernels' runs steps, and clock 'both' replays events"),
        (["pool.model=deepseek-v2-lite", "pool=1 GiB"], "K and V of one width"),
        (["backend=cuda"], "backend"),
    ],
)
def test_what_kernels_cannot_run_is_refused_by_name(sets: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run("executor=kernels", *sets)


def test_a_pool_larger_than_the_machine_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_executors.os, "sysconf", lambda name: 100)
    with pytest.raises(ValueError, match=r"holds the pool in memory, .* this machine has 9.77 KiB"):
        run("executor=kernels")


def test_ids_that_stand_for_many_tokens_have_no_kernels(tmp_path: Any) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n')
    with pytest.raises(ValueError, match="needs single tokens"):
        run(
            "executor=kernels",
            f"workload.trace={path}",
            "workload.options={}",
            "pool=1 GiB",
            "unit=ids",
            "allocator.page_size=1",
        )
