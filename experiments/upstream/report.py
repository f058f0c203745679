"""Runs the comparison of a package over its settings, says what was found, and writes it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvarena.experiments.outputs import whole
from kvarena.experiments.provenance import code_version
from kvarena.experiments.upstream.compare import VERSIONS, Outcome, Upstream, compare, load

SCHEMA_VERSION = 1


def compare_all(package: str, path: Path | None, *, ops: int, seed: int, only: list[str]) -> dict[str, Any] | str:
    """Outcomes of all settings, printed as they come; a reason where the package cannot be imported.

    ops   in all; every setting gets its share, at least one
    only  settings whose name contains one of these; all when empty. ValueError: none does.
    """
    try:
        upstream = load(package, path)
    except (ImportError, OSError, RuntimeError) as error:  # or a dependency of it that does not fit this machine
        return f"{package} cannot be imported ({error}); see --path, KVARENA_PEERS, extra: peers"
    chosen = [each for each in upstream.settings if not only or any(word in each.name for word in only)]
    if not chosen:
        names = ", ".join(repr(setting.name) for setting in upstream.settings)
        raise ValueError(f"--only: expected a part of {names}; found {', '.join(only)}")
    share = -(-ops // len(chosen))
    detail = f" ({upstream.detail})" if upstream.detail else ""
    print(f"{package} {upstream.version}{detail} against the decisions of {package} {VERSIONS[package]}", flush=True)
    outcomes = []
    for setting in chosen:
        outcomes.append(compare(upstream, setting, share, seed))
        print(line(outcomes[-1]), flush=True)
    return _whole(upstream, outcomes, seed)


def line(outcome: Outcome) -> str:
    """One outcome for people."""
    met = f"{outcome.ops:>8,} ops, {outcome.hits:,} hits, {outcome.evicted:,} evicted, {outcome.refused:,} refused"
    verdict = "agrees"
    if outcome.difference is not None:
        verdict = f"{'RAISES' if outcome.difference.raised else 'DIFFERS'}: {outcome.difference}"
    return f"{outcome.setting:36} {met}: {verdict}"


def _whole(upstream: Upstream, outcomes: list[Outcome], seed: int) -> dict[str, Any]:
    differing = sum(outcome.difference is not None for outcome in outcomes)
    total = sum(outcome.ops for outcome in outcomes)
    verdict = "every decision agrees" if not differing else f"{differing} of {len(outcomes)} settings differ"
    print(f"{upstream.package} {upstream.version}: {total:,} operations, {verdict}")
    return {
        "schema_version": SCHEMA_VERSION,
        "package": upstream.package,
        "version": upstream.version,
        "detail": upstream.detail,
        "kvarena": code_version(),
        "python": sys.version.split()[0],
        "seed": seed,
        "ops": total,
        "differences": differing,
        "settings": [asdict(outcome) for outcome in outcomes],
    }


def write(found: dict[str, Any], out: Path) -> None:
    """As JSON, whole or not at all. Raises ValueError when it cannot be written."""
    with whole(out) as partial:
        partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
