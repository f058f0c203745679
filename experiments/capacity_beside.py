"""A card's results beside a study: each keeps the prediction made for it, and where their budgets differ is said.

A card's cells were measured with the bytes that were left on that day, so a pool may have some pages more or fewer than
the study's, and another prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from kvarena.experiments.budget import format_bytes

# What leaves more or less for KV.
CHANGES = ("weights", "workspace", "padding_page", "table", "slot_mapping", "headroom")
Cells = Iterable[Mapping[str, Any]]
KEPT = ("panel", "load", "design", "predicted", "measured")


def beside(on_card: Mapping[str, Any], sizing: pd.DataFrame) -> dict[str, Any]:
    """What a study keeps of a card's results: its name, the counts, and a panel's budget lines that differ.

    on_card  as `read_measured` gives it; cells without the lines of a budget are kept without a comparison
    sizing   the study's
    """
    cells = [{key: cell[key] for key in KEPT} for cell in on_card["cells"]]
    budgets = {panel: differences(on_card["cells"], sizing, panel) for panel in dict.fromkeys(sizing["panel"])}
    return {"name": on_card["gpu"]["name"], "cells": cells, "budgets": budgets}


def differences(cells: Cells, sizing: pd.DataFrame, panel: str) -> dict[str, tuple[int, int]]:
    """Lines in which cells of a panel differ from the budget that a design has in `sizing`, and what is left for KV:
    least and most, bytes. Empty where all agree."""
    ours = {row["design"]: row for row in sizing[sizing["panel"] == panel].to_dict("records")}
    names = [f"{line}_bytes" for line in ("kv", *CHANGES)]
    found: dict[str, list[int]] = {name: [] for name in names}
    for cell in cells:
        mine, theirs = ours.get(cell["design"]), cell.get("sizing")
        if cell["panel"] == panel and mine is not None and isinstance(theirs, Mapping):
            for name in names:
                if isinstance(theirs.get(name), int):
                    found[name].append(theirs[name] - int(mine[name]))
    return {name: (min(values), max(values)) for name, values in found.items() if any(values)}


def difference_text(found: Mapping[str, Iterable[int]]) -> str:
    """`KV -32 MiB to 0 B (workspace +32 MiB)`; nothing where nothing differs."""
    first, *others = [f"{_name(name)} {_range(*ends)}" for name, ends in found.items()] or [""]
    return f"{first} ({', '.join(others)})" if others else first


def caption(on_card: Mapping[str, Any], panel: str) -> str:
    """What stands under a table with a card's results."""
    text = f"{on_card['name']}: carried (predicted for the pool that it had)"
    differs = difference_text(on_card.get("budgets", {}).get(panel, {}))
    return f"{text}; its budgets differ from those above: {differs}" if differs else text


def _name(column: str) -> str:
    return column.removesuffix("_bytes").replace("_", " ").replace("kv", "KV")


def _range(low: int, high: int) -> str:
    return _bytes(low) if low == high else f"{_bytes(low)} to {_bytes(high)}"


def _bytes(number: int) -> str:
    return f"{'+' if number > 0 else '-' if number < 0 else ''}{format_bytes(abs(number))}"
