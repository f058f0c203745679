"""A folder holds one study: what was begun with other options is neither carried on nor replaced."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from kvarena.experiments import resample, resample_commands
from kvarena.experiments.ladder import _resolve, read_base
from kvarena.experiments.ladder_plan import begin_ladder, plan_ladder
from support.commands import invoke

ROOT = Path(__file__).parents[2]
SAVED = ROOT / "results" / "paper"
CHAT: dict[str, Any] = {
    "workload": {
        "trace": "chat",
        "options": {"num_sessions": 4, "num_system_prompts": 2, "max_message": 80, "max_reply": 40},
    },
    "pool": {"pool": "350 MiB"},
}


def begin(folder: Path, sets: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    ends = {"lower": options.pop("lower", "vllm"), "upper": options.pop("upper", "sglang")}
    resolved, workloads = _resolve(CHAT, sets, ends["lower"], ends["upper"])
    plan = plan_ladder(resolved, workloads[0].trace.visible, **ends, **options)
    return begin_ladder(folder, resolved, plan, options.get("groups", ()), options.get("extra", {}))


OTHER = [
    ({"sets": ("live=4",)}, "engine.live (1 there, 4 asked for)"),
    ({"sets": ("options.num_sessions=5",)}, "workload.options.num_sessions (4 there, 5 asked for)"),
    ({"sets": ("pool='400 MiB'",)}, "pool.pool"),
    ({"lower": {"kind": "block", "page_size": 32}}, "ladder.from.page_size (16 there, 32 asked for)"),
    ({"groups": ("page_size",)}, "ladder.fields ([] there, ['page_size'] asked for)"),
    ({"extra": {"live": (1, 2)}}, "ladder.rungs.live"),
]


@pytest.mark.parametrize(("options", "said"), OTHER, ids=lambda item: str(item)[:40])
@pytest.mark.parametrize("begun", [True, False], ids=["by this version", "by one that kept rungs only"])
def test_a_ladder_with_other_options_keeps_its_folder(options, said, begun, tmp_path):
    config = begin(tmp_path)
    if not begun:
        plan = plan_ladder(
            {k: v for k, v in config.items() if k != "ladder"}, _resolve(CHAT, (), "vllm", "sglang")[1][0].trace.visible
        )
        rungs = {rung.name: {name: list(ends) for name, ends in rung.fields.items()} for rung in plan.rungs}
        (tmp_path / "ladder.json").write_text(json.dumps({"rungs": rungs}))
        (tmp_path / "config.toml").write_text(tomli_w.dumps({k: v for k, v in config.items() if k != "ladder"}))
        said = said.split(" ")[0].replace("ladder.from.page_size", "rungs").replace("ladder.fields", "rungs")
        said = said.replace("ladder.rungs.live", "rungs")
    before = (tmp_path / "config.toml").read_bytes()
    with pytest.raises(ValueError, match=re.escape(said)):
        begin(tmp_path, **options)
    assert (tmp_path / "config.toml").read_bytes() == before
    assert begin(tmp_path) == config


def test_the_config_of_a_ladder_asks_for_the_same_ladder(tmp_path):
    config = begin(tmp_path, groups=("page_size", "duplicates"))
    base, asked = read_base(str(tmp_path / "config.toml"))
    assert asked["from"]["page_size"] == 16
    assert asked["fields"] == ["page_size", "duplicates"]
    assert {**base, "ladder": asked}.keys() == config.keys()
    resolved, workloads = _resolve(base, (), asked["from"], asked["to"])
    ends = {"lower": asked["from"], "upper": asked["to"]}
    plan = plan_ladder(resolved, workloads[0].trace.visible, **ends, groups=asked["fields"])
    assert begin_ladder(tmp_path, resolved, plan, asked["fields"], {}) == config


@pytest.mark.parametrize("name", ["sweep", "config.toml", "notes.txt"])
def test_another_folder_is_no_ladder(name, tmp_path):
    path = tmp_path / name
    path.mkdir() if name == "sweep" else path.write_text("live = 1\n")
    with pytest.raises(ValueError, match="holds other files"):
        begin(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_ablations_with_other_options_keep_their_folder(tmp_path):
    out = tmp_path / "out"
    shutil.copytree(SAVED / "ablations-chat", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match=r"other options: workload.options.num_sessions \(40 there, 8 asked for\)"):
        invoke("ablations", "chat", "--set", "options.num_sessions=8", "--out", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_resamples_of_another_config_keep_their_folder(tmp_path):
    command = ("resample", "chat", "--set", "options.num_sessions=30", "--pool", "40 %", "--out", tmp_path)
    study = json.loads((SAVED / "chat-resampled" / "study.json").read_text())
    study["config"] = {"workload": {"trace": "chat", "options": {"num_sessions": 29}}}
    (tmp_path / "study.json").write_text(json.dumps(study))
    with pytest.raises(ValueError, match=r"workload.options.num_sessions \(29 there, 30 asked for\)"):
        invoke(*command)
    (tmp_path / "study.json").unlink()
    cell = tmp_path / "cells" / "0" / "config.toml"  # of a study that was killed
    cell.parent.mkdir(parents=True)
    cell.write_text(tomli_w.dumps({**study["config"], "workload": {**study["config"]["workload"], "resample": 3}}))
    with pytest.raises(ValueError, match=r"workload.options.num_sessions \(29 there, 30 asked for\)"):
        invoke(*command)
    assert [path.name for path in tmp_path.iterdir()] == ["cells"]


def test_a_saved_study_without_cells_is_carried_on(tmp_path, monkeypatch):
    """What is committed has no cells; `kvarena paper --rerun cpu` makes them anew in its place."""
    out = tmp_path / "out"
    shutil.copytree(SAVED / "chat-resampled", out)
    reached = []
    monkeypatch.setattr("kvarena.experiments.sweep._carry_out", lambda folder, *rest: reached.append(folder))
    monkeypatch.setattr(resample, "_collect", lambda done: resample.open_replicates(out))
    monkeypatch.setattr(resample_commands, "_show", lambda *args, **options: None)
    invoke("resample", "chat", "--set", "options.num_sessions=30", "--pool", "40 %", "--out", out)
    assert reached == [out]
