"""A comparison, an engine run, a scenario and a workload, written to a folder: `python one_of_each.py FOLDER`.

A script of its own, so that it can be run by another interpreter and under another environment, without pytest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvarena.allocators.config import block, token
from kvarena.experiments.compare import compare
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.scenarios import read_scenario, run_scenario, write_log
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.convert import convert_lines
from kvarena.experiments.traces.write import write_lines

HERE = Path(__file__).resolve().parent
SETS = ("trace='chat'", "requests=40", "options={num_sessions=8}", "pool='450 MiB'", "speed=20.0", "declared='noisy'")


def main(folder: Path) -> None:
    specs = ["vllm", "sglang", block(page_size=4), token(page_size=16), "exact"]
    options = {"num_sessions": 6, "num_system_prompts": 2, "max_message": 90, "max_reply": 40}
    compared = compare(
        "chat", allocators=specs, options=options, pool="450 MiB", live=3, outputs="replay", seeds=2, kernel_batches=0
    )
    results = {"compare": compared, "run": run_engine(run_config({}, SETS))}
    for name, result in results.items():
        (folder / name).mkdir(parents=True)
        result._write_tables(folder / name)
    for kind in ("block", "token"):
        scenario = read_scenario(HERE.parent / "golden" / "scenarios" / "page4.jsonl")
        write_log(run_scenario(scenario, kind), folder / f"{kind}.jsonl")
    write_lines(convert_lines(load_trace("agents", limit=30), "tokens"), folder / "agents.jsonl.gz")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
