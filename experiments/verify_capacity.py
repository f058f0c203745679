"""Verifies a capacity study: where the bytes go, the predictions of the closed form, the sums, and the bursts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvarena.experiments.capacity import PARTS, Cell, capacity_plan, measure
from kvarena.experiments.capacity_sizing import Card
from kvarena.experiments.capacity_study import LINES, CapacityResult, load_capacity
from kvarena.experiments.verify_numbers import agrees
from kvarena.experiments.verify_verdict import Verdict

KEYS = ("panel", "load", "design")


def verify_capacity(path: Path, again: bool) -> Verdict:
    """Every row of the three tables. Costs the closed form again, half a second a cell; `again`: its bursts too."""
    result = load_capacity(path)
    verdict = Verdict(path, f"capacity of {_model(result)}, {len(result.capacity)} cells")
    _check_sizing(result, verdict)
    for row in result.capacity.to_dict("records"):
        _check_row({str(name): value for name, value in row.items()}, result, verdict)
    for row in result.bursts.to_dict("records"):
        _check_burst({str(name): value for name, value in row.items()}, verdict)
    _check_plan(result, verdict, again)
    return verdict


def _model(result: CapacityResult) -> str:
    model = result.manifest.get("model")
    return model if isinstance(model, str) else "own model shape"


def _name(row: dict[str, Any]) -> str:
    return "/".join(str(row[key]) for key in KEYS if key in row)


def _check_sizing(result: CapacityResult, verdict: Verdict) -> None:
    token = result.manifest["bytes_per_token"]
    pages = {(row["panel"], row["design"]): row["num_pages"] for row in result.sizing.to_dict("records")}
    for row in result.sizing.to_dict("records"):
        name = f"sizing of {row['panel']}/{row['design']}"
        total = sum(int(row[f"{line}_bytes"]) for line in LINES)
        verdict.check("sizing", total == row["total_bytes"], f"{name}: lines are {total} of {row['total_bytes']} bytes")
        kv = row["num_pages"] * row["page_size"] * token
        verdict.check("sizing", kv == row["kv_bytes"], f"{name}: {row['kv_bytes']} bytes of KV, its pages take {kv}")
    for row in result.capacity.to_dict("records"):
        stated = pages.get((row["panel"], row["design"]))
        problem = f"{row['panel']}/{row['load']}/{row['design']}: {row['num_pages']} pages, sizing has {stated}"
        verdict.check("sizing", stated == row["num_pages"], problem)


def _check_row(row: dict[str, Any], result: CapacityResult, verdict: Verdict) -> None:
    """ideal - parts = measured; the largest carried burst is the measured one, and the next was not carried."""
    left = row["ideal"] - sum(row[f"lost_{part}"] for part in PARTS)
    verdict.check("sums", left == row["measured"], f"{_name(row)}: ideal - parts is {left}, measured {row['measured']}")
    rest = row["predicted"] - row["measured"]
    verdict.check("sums", rest == row["lost_residual"], f"{_name(row)}: residual is {row['lost_residual']}, not {rest}")
    if not len(result.bursts):
        verdict.unseen["measured"] = "a card's bursts are in its own file"
        return
    same = (result.bursts[list(KEYS)] == [row[key] for key in KEYS]).all(axis=1)
    carried = {int(b["size"]): _true(b["carried"]) for b in result.bursts[same].to_dict("records")}
    most = max((size for size, fine in carried.items() if fine), default=0)
    problem = f"{_name(row)}: measured is {row['measured']}, the largest carried burst has {most}"
    verdict.check("bursts", most == row["measured"], problem)
    one_more = carried.get(int(row["measured"]) + 1)
    verdict.check("bursts", one_more is False, f"{_name(row)}: no burst shows that one more is not carried")


def _true(value: Any) -> bool:
    return str(value) == "True"


def _check_burst(row: dict[str, Any], verdict: Verdict) -> None:
    """Carried: all ran at once, and nobody was preempted. Rates follow from counts."""
    name, fine = f"{_name(row)}, burst of {row['size']}", _true(row["carried"])
    verdict.check("bursts", fine == (row["stopped"] == ""), f"{name}: carried {fine}, stopped by {row['stopped']!r}")
    whole = row["preemptions"] == 0 and row["peak_running"] == row["size"]
    verdict.check("bursts", whole or not fine, f"{name}: carried, and yet preempted or not all at once")
    tokens = float(row["output_tokens"]) / float(row["duration_s"])
    verdict.check(
        "numbers", agrees(float(row["tokens_per_s"]), tokens), f"{name}: {row['tokens_per_s']} tokens a second"
    )
    share = float(row["preemptions"]) / float(row["size"])
    problem = f"{name}: {row['preemptions_per_request']} preemptions a request, by its counts {share}"
    verdict.check("numbers", agrees(float(row["preemptions_per_request"]), share), problem)


# --- the closed form again ---


def _check_plan(result: CapacityResult, verdict: Verdict, again: bool) -> None:
    if not isinstance(result.manifest.get("model"), str):
        verdict.notes.append("the model is a shape of one's own, whose weights are not stated: no prediction again")
        return
    for cell in _plan(result):
        same = (result.capacity[list(KEYS)] == [getattr(cell, key) for key in KEYS]).all(axis=1)
        for row in result.capacity[same].to_dict("records"):
            _compare(cell, {str(name): value for name, value in row.items()}, verdict)
            if again:
                found = measure(cell)
                problem = f"{cell.name}: measured {row['measured']}, measured again {found.measured}"
                verdict.check("bursts run again", found.measured == row["measured"], problem)


def _compare(cell: Cell, row: dict[str, Any], verdict: Verdict) -> None:
    stated = {"num_pages": cell.sizing.num_pages, "ideal": cell.ideal, "predicted": cell.predicted}
    stated |= {f"lost_{part}": count for part, count in cell.lost.items()}
    for name, expected in stated.items():
        verdict.check(
            "numbers", row[name] == expected, f"{cell.name}: {name} is {row[name]}, computed again {expected}"
        )


def _plan(result: CapacityResult) -> list[Cell]:
    """The study's cells, from what it states of card, server and loads. Raises ValueError when that names no study."""
    sizing, manifest = result.sizing.iloc[0], result.manifest
    on = Card("as stated", *(int(sizing[f"{name}_bytes"]) for name in ("total", "weights", "workspace")))
    equal = result.sizing.loc[result.sizing["panel"] == "equal", "rows"]
    return capacity_plan(
        manifest["model"],
        on=on,
        panels=result.panels,
        loads=result.loads,
        designs=list(dict.fromkeys(result.capacity["design"])),
        max_model_len=manifest["max_model_len"],
        declared=manifest["declared_max_tokens"],
        rows=int(equal.iloc[0]) if len(equal) else 2048,
        seed=manifest["seed"],
    )
