"""Published and folklore numbers as experiments with a verdict.

A claim is one TOML file of this folder: what was said and where, the experiment that measures it, and for each measure
the range that the claim allows and the range that we predicted. Files are written before the first run, and their hash
stands in every result, so that an expectation cannot be moved to where a measurement fell unseen.

    reproduced   every measure lies in the claimed range
    refuted      none does
    depends      some do; the table says under which condition. Or repeats of a measure lie on both sides of the range's
                 end, so that noise decides
    not tested   no experiment here can tell, or its input is not at hand; the reason is given, and what we can
                 measure of our own may stand beside, without a claimed range

Whether our own predictions held is shown beside and is no part of the verdict.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from kvarena.experiments.config import SCHEMA_VERSION
from kvarena.experiments.foreign import read_json
from kvarena.experiments.wrong_kind import reads
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Verdict = Literal["reproduced", "refuted", "depends", "not tested"]
Range = tuple[float, float]
PARTS = ("allocation", "serving", "recorded")
PAGE_HEAD = "| claim | source | verdict |"  # first line of the page of findings


class NotHereError(Exception):
    """An experiment's input is not at hand (a trace, a saved measurement). The text says which, and how to get it."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Expectation(_Section):
    """One measure: its name in the experiment, the condition in words, its unit, and ranges with both ends included."""

    measure: str
    when: str
    unit: Literal["share", "pages", "slots", "tokens", "times"]
    claimed: Range | None = None
    predicted: Range

    @model_validator(mode="after")
    def _ordered(self) -> Expectation:
        for name in ("claimed", "predicted"):
            ends = getattr(self, name)
            if ends is not None and not ends[0] <= ends[1]:
                raise ValueError(f"{name}: expected [low, high], found {list(ends)}")
        return self


class Claim(_Section):
    """One claim.

    known       how we know it: seen (its text was read), second hand, memory (check before printing), folklore
    experiment  function of this folder that measures it; beside `not_tested` something of ours, not the claim
    not_tested  the reason why nothing here can tell
    sha256      of the file
    """

    id: str
    claim: str
    source: str
    known: Literal["seen", "second hand", "memory", "folklore"]
    note: str = ""
    experiment: str | None = None
    not_tested: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    expect: tuple[Expectation, ...] = ()
    sha256: str

    @model_validator(mode="after")
    def _testable(self) -> Claim:
        if self.experiment is None and self.not_tested is None:
            raise ValueError("expected either an experiment, or not_tested with the reason")
        judged = any(e.claimed is not None for e in self.expect)
        if self.not_tested is None and not judged:
            raise ValueError("expect: at least one measure needs a claimed range")
        if self.not_tested is not None and judged:
            raise ValueError("expect: what is not tested takes no claimed range")
        if self.experiment is None and self.expect:
            raise ValueError("expect: measures need an experiment")
        return self


@dataclass(frozen=True)
class Finding:
    """A claim after its run. `values` has one number a measure; empty when it was not tested, and `reason` says why."""

    claim: Claim
    values: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """As the head of this module defines it."""
        if self.claim.not_tested is not None or not self.values:
            return "not tested"
        sides = [_sides(self, e) for e in self.claim.expect if e.claimed is not None]
        if all(s == {True} for s in sides):
            return "reproduced"
        return "depends" if any(True in s for s in sides) else "refuted"

    @property
    def predictions(self) -> tuple[int, int]:
        """How many of our predictions held, and how many there were."""
        tested = self.claim.expect if self.values else ()
        return sum(_within(self.values[e.measure], e.predicted) for e in tested), len(tested)


def _sides(finding: Finding, expectation: Expectation) -> set[bool]:
    """Whether a measure lies in the claimed range; both where its repeats do not agree on that."""
    claimed = expectation.claimed
    if claimed is None:
        return set()
    names = (expectation.measure, f"{expectation.measure}.low", f"{expectation.measure}.high")
    return {_within(finding.values[name], claimed) for name in names if name in finding.values}


def _within(value: float, ends: Range) -> bool:
    return ends[0] <= value <= ends[1]


def load_claims(names: Iterable[str] | None = None) -> list[Claim]:
    """The claims of these ids; default: all, in order of ids. Raises ValueError for an unknown id or a bad file."""
    folder = {entry.name[:-5]: entry for entry in files(__name__).iterdir() if entry.name.endswith(".toml")}
    chosen = sorted(folder) if names is None else list(names)
    if unknown := [name for name in chosen if name not in folder]:
        raise ValueError(f"unknown claim {unknown[0]!r}: expected one of {', '.join(sorted(folder))}")
    return [parse_claim(name, folder[name].read_bytes()) for name in chosen]


def parse_claim(name: str, content: bytes) -> Claim:
    """One claim from the bytes of its file. Raises ValueError naming file and field."""
    try:
        data = tomllib.loads(content.decode())
        return Claim(id=name, sha256=hashlib.sha256(content).hexdigest(), **data)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"])) or "the file"
        raise ValueError(f"claims/{name}.toml: {place}: {fault['msg']}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, TypeError) as error:
        raise ValueError(f"claims/{name}.toml: {error}") from None


def experiment(name: str) -> Callable[..., Mapping[str, float]]:
    """The function that a claim names. Raises ValueError when there is none."""
    for part in PARTS:
        found = getattr(import_module(f"{__name__}.{part}"), name, None)
        if callable(found) and found.__module__ == f"{__name__}.{part}":
            return found
    raise ValueError(f"unknown experiment {name!r}")


def test_claim(claim: Claim) -> Finding:
    """Run one claim's experiment. Raises ValueError when it does not measure what the claim expects."""
    if claim.experiment is None:
        return Finding(claim, reason=claim.not_tested or "")
    try:
        values = dict(experiment(claim.experiment)(**claim.options))
    except NotHereError as error:
        return Finding(claim, reason=str(error))
    if missing := [e.measure for e in claim.expect if e.measure not in values]:
        raise ValueError(f"claim {claim.id}: experiment {claim.experiment} does not measure {missing[0]!r}")
    names = [f"{e.measure}{end}" for e in claim.expect for end in ("", ".low", ".high")]
    kept = {name: float(values[name]) for name in names if name in values}
    return Finding(claim, kept, reason=claim.not_tested or "")


def refuse_other(folder: Path) -> None:
    """Raise ValueError when the folder holds files and neither findings nor their page."""
    from kvarena.experiments.results import refuse_others

    page = folder / "claims.md"
    ours = (folder / "claims.json").is_file() or (
        page.is_file() and page.read_text(encoding="utf-8", errors="replace").startswith(PAGE_HEAD)
    )
    refuse_others(folder, ours, "earlier findings")


def save_findings(findings: Iterable[Finding], folder: Path) -> None:
    """`claims.json` (reloads) and `claims.md`. Findings of other claims that are there stay, unless their claim was
    edited since. Raises ValueError when it cannot be written."""
    import time

    from kvarena.experiments.provenance import provenance
    from kvarena.experiments.sweep import write_whole

    given = {finding.claim.id: finding for finding in findings}
    found = [finding for _, finding in sorted({**_still_valid(folder), **given}.items())]
    rows = [
        {"id": f.claim.id, "sha256": f.claim.sha256, "verdict": f.verdict, "values": f.values, "reason": f.reason}
        for f in found
    ]
    data = {"schema_version": SCHEMA_VERSION, "findings": rows, "provenance": provenance([], [], time.time())}
    try:
        write_whole(folder / "claims.json", json.dumps(data, indent=1, default=str) + "\n")
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from None
    write_page(found, folder)


def write_page(findings: Iterable[Finding], folder: Path) -> None:
    """`claims.md`. Raises ValueError when it cannot be written."""
    from kvarena.experiments.sweep import write_whole

    try:
        write_whole(folder / "claims.md", markdown(findings))
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from None


@reads("claims")
def load_findings(folder: Path) -> list[Finding]:
    """Read `claims.json`. Raises ValueError naming the claim whose file is no longer the one that was tested."""
    found = []
    for finding, digest in _read(folder):
        if finding.claim.sha256 != digest:
            name = finding.claim.id
            raise ValueError(
                f"{folder / 'claims.json'}: claim {name} was tested against another file than claims/{name}.toml is now"
            )
        found.append(finding)
    return found


def _still_valid(folder: Path) -> dict[str, Finding]:
    if not (folder / "claims.json").is_file():
        return {}
    return {finding.claim.id: finding for finding, digest in _read(folder) if finding.claim.sha256 == digest}


def _read(folder: Path) -> list[tuple[Finding, str]]:
    """Findings of claims as they are now, each with the hash of the file that was tested."""
    path = folder / "claims.json"
    try:
        rows = read_json(path)["findings"]
        kept = [(row["id"], row["sha256"], row["values"], row["reason"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as findings ({error})") from None
    chosen = load_claims(row[0] for row in kept)
    return [
        (Finding(claim, values, reason), digest)
        for claim, (_, digest, values, reason) in zip(chosen, kept, strict=True)
    ]


def markdown(findings: Iterable[Finding]) -> str:
    """The findings as a page: a summary table, then each claim with its measures."""
    found = list(findings)
    lines = [PAGE_HEAD, "|---|---|---|"]
    lines += [f"| [{f.claim.claim}](#{f.claim.id}) | {f.claim.source} | {f.verdict} |" for f in found]
    for f in found:
        lines += ["", f'<a id="{f.claim.id}"></a>', "", f"### {f.claim.claim}", ""]
        lines += [f"`kvarena claims {f.claim.id}`: **{f.verdict}**. Source: {f.claim.source} ({f.claim.known})."]
        lines += ["", f.claim.note] if f.claim.note else []
        lines += ["", f.reason] if f.reason else []
        if f.values:
            lines += ["", "| when | claimed | measured | predicted |", "|---|---|---|---|"]
            lines += [f"| {e.when} | {claimed(e)} | {measured(f, e)} | {predicted(f, e)} |" for e in f.claim.expect]
        lines += ["", f"<sub>`claims/{f.claim.id}.toml` sha256 {f.claim.sha256[:16]}</sub>"]
    return "\n".join(lines) + "\n"


def claimed(expectation: Expectation) -> str:
    """The claimed range for people; a dash when the claim does not speak of this measure."""
    return "–" if expectation.claimed is None else _range(expectation.claimed, expectation.unit)


def predicted(finding: Finding, expectation: Expectation) -> str:
    """Our prediction, and whether it held."""
    held = _within(finding.values[expectation.measure], expectation.predicted)
    return f"{_range(expectation.predicted, expectation.unit)}, {'held' if held else 'missed'}"


def _range(ends: Range, unit: str) -> str:
    low, high = ends
    if low == high:
        return shown(low, unit)
    if high >= 1000 and unit == "times":
        return f"at least {shown(low, unit)}"
    if low < -1e6 or (low <= -1 and unit == "share"):
        return f"at most {shown(high, unit)}"
    return f"{shown(low, unit)} to {shown(high, unit)}"


def measured(finding: Finding, expectation: Expectation) -> str:
    """The value, and where it was measured more than once the range of the repeats; said where some of these are in
    the claimed range and others are not."""
    name, unit = expectation.measure, expectation.unit
    text = shown(finding.values[name], unit)
    ends = [finding.values.get(f"{name}.{end}") for end in ("low", "high")]
    low, high = (None if end is None else shown(end, unit) for end in ends)
    if low is None or high is None:
        return text
    noise = ", within noise of the claim" if len(_sides(finding, expectation)) > 1 else ""
    return f"{text} ({low} to {high}{noise})"


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "share":
        return f"{100 * value:.2f} %" if abs(value) < 0.1 else f"{100 * value:.1f} %"
    if unit == "times":
        return f"{value:.3f}x" if 0.9 < value < 1.1 and round(value, 2) != value else f"{value:.2f}x"
    return f"{value:,.0f} {unit}" if value == int(value) else f"{value:,.2f} {unit}"
