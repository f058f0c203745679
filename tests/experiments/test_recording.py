"""The recording that ships: 2,000 requests of a real model, each reply literally part of the next prompt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kvarena.experiments import workloads
from kvarena.experiments.compare import compare
from kvarena.experiments.record import read_recording, write_recording
from kvarena.experiments.results import finished_folder
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.base import Request
from kvarena.experiments.traces.describe import describe
from kvarena.experiments.verify_result import verify
from kvarena.experiments.workloads import recording
from support.commands import invoke


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return list(workloads.make("recording"))


def test_it_is_2000_requests_in_less_than_two_megabytes(requests: list[Request]) -> None:
    assert len(requests) == 2000
    assert len({request.request_id for request in requests}) == 2000
    assert recording.SHIPPED.stat().st_size < 2 * 2**20
    assert "SmolLM2" in read_recording(recording.SHIPPED)[1]["model"]


def test_each_reply_is_in_the_next_prompt_and_that_comes_after_it(requests: list[Request]) -> None:
    by_id = {request.request_id: request for request in requests}
    last: dict[str, Request] = {}
    followed = 0
    for request in requests:
        before = last.get(str(request.session_id))
        if before is not None:
            said = np.concatenate([before.token_ids, before.output_ids])
            assert np.array_equal(request.token_ids[: len(said)], said), request.request_id
            followed += 1
        last[str(request.session_id)] = request
        if "after" in request.extra:
            earlier = by_id[request.extra["after"]]
            assert request.arrival_s >= earlier.arrival_s + 0.02 * earlier.num_output_tokens - 1e-9
    assert followed == 2000 - len(last) > 1200


def test_a_sub_agents_last_reply_is_in_its_parents_prompt(requests: list[Request]) -> None:
    by_id = {request.request_id: request for request in requests}
    found = 0
    for request in requests:
        earlier = by_id.get(request.extra.get("after", ""))
        if earlier is None or request.extra["kind"] != "agent" or earlier.extra["kind"] != "subagent":
            continue
        reply = earlier.output_ids[:-1]
        prompt = np.lib.stride_tricks.sliding_window_view(request.token_ids, len(reply))
        assert (prompt == reply).all(axis=1).any()
        found += 1
    assert found > 50


def test_the_seed_draws_times_and_nothing_else(requests: list[Request]) -> None:
    other = {request.request_id: request for request in workloads.make("recording", seed=1)}
    assert [r.request_id for r in requests] != list(other)
    for request in requests:
        assert np.array_equal(request.token_ids, other[request.request_id].token_ids)
        assert np.array_equal(request.output_ids, other[request.request_id].output_ids)


def test_it_shows_what_it_was_made_for() -> None:
    found = describe(workloads.make("recording"))
    assert found["visible"] == {
        "grain": 1,
        "publish_time": True,
        "outputs": "recorded",
        "sessions": True,
        "reuse": True,
    }
    assert found["replies_with_ids"] == 2000
    assert found["replies_that_return"] > 1200


def test_replies_are_served_from_the_cache() -> None:
    common = {"requests": 300, "pool": "100 %", "kernel_batches": 0}
    plain = compare("recording", **common).summary["token_hit_rate"]
    replayed = compare("recording", outputs="replay", **common).summary["token_hit_rate"]
    assert (replayed > plain).all()


def test_a_recording_of_ones_own_is_replayed_by_its_path(tmp_path: Path) -> None:
    rows, about = read_recording(recording.SHIPPED)
    write_recording(rows[:20], tmp_path / "mine.parquet", about)
    shown = invoke("trace", "describe", "recording", "--set", f"file={tmp_path / 'mine.parquet'}").stdout
    assert "recording: 20 requests" in shown
    assert "mine: 20 requests" in invoke("trace", "describe", tmp_path / "mine.parquet").stdout
    with pytest.raises(ValueError, match="cannot be read as a recording"):
        workloads.make("recording", file=str(tmp_path / "none.parquet"))
    with pytest.raises(ValueError, match=r"none\.parquet': expected a path that exists"):
        invoke("trace", "describe", tmp_path / "none.parquet")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "table.parquet")
    with pytest.raises(ValueError, match=r"table\.parquet: cannot be read as a recording"):
        invoke("trace", "describe", tmp_path / "table.parquet")
    with pytest.raises(ValueError, match="option 'file': expected none with the path of a recording"):
        load_trace(tmp_path / "mine.parquet", file="other.parquet")
    with pytest.raises(ValueError, match="think_median_s"):
        workloads.make("recording", think_median_s=0)
    with pytest.raises(ValueError, match=r"--out: expected a file \.parquet"):
        invoke("trace", "record", "--out", tmp_path / "r.jsonl")


def test_a_recordings_path_and_its_file_option_are_the_same_requests_in_every_command(tmp_path: Path) -> None:
    rows, about = read_recording(recording.SHIPPED)
    mine = tmp_path / "mine.parquet"
    write_recording(rows[:12], mine, about)
    common = {"pool": "100 %", "kernel_batches": 0, "seeds": 2}
    made = {"path": compare(str(mine), **common), "option": compare("recording", options={"file": str(mine)}, **common)}
    assert made["path"].summary.equals(made["option"].summary)
    assert made["path"].requests.equals(made["option"].requests)
    assert set(made["path"].summary["seed"]) == {0, 1}  # the seed draws the times of a path's recording too
    for name, result in made.items():
        assert [item["name"] for item in result.provenance["inputs"]] == ["mine.parquet"]
        with finished_folder(tmp_path / name) as partial:
            result._write_tables(partial)
        assert verify(tmp_path / name).stands
        assert "served" in invoke("explain", tmp_path / name, "--quiet").stdout
    invoke("compare", "--trace", mine, "--pool", "100 %", "--set", "kernel_batches=0")
    invoke("compare", "recording", "--set", f"options.file={mine}", "--pool", "100 %", "--set", "kernel_batches=0")
    with pytest.raises(
        ValueError, match=r"file: unknown field; known: trace.*; a parameter of a workload is options\.file"
    ):
        invoke("compare", "recording", "--set", f"file={mine}")
    write_recording(rows[:18], mine, about)  # other contents under the same name are read anew, and noticed
    assert load_trace(mine).num_requests == 18
    for name in made:
        assert any("is not the trace that was replayed" in problem for problem in verify(tmp_path / name).problems)


def test_it_is_replayed_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvarena as kv; "
    code += "print(len(kv.compare('recording', requests=50, pool='1 GiB').requests))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "100", done.stderr
