"""From two designs to the cells of an attribution ladder: which fields are switched, which stay, and why.

A rung is one field, or several that are switched together, with its values at both ends:

    kvarena ladder chat --from vllm --to sglang                  every field in which the two designs differ
    --fields page_size --fields duplicates+eviction_unit         these rungs; what else differs is one rung, "rest"
    --rung result_lag=0:1                                        a field of the engine, or of the allocator, beside them

Fields that the trace, or this way of running it, cannot show are not switched: they are "not observable here", which
is not 0. With at most MAX_RUNGS rungs all 2^n subsets run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.allocators.config import Design
from kvarena.experiments.config import SECTION_OF
from kvarena.experiments.foreign import read_json, read_toml
from kvarena.experiments.outputs import refuse_other_options
from kvarena.experiments.results import refuse_others
from kvarena.experiments.specs import ID_PAGE, AllocatorEntry, allocator_entry
from kvarena.experiments.sweep import write_whole
from kvarena.experiments.sweep_plan import Kind, SweepCell, kind_of, sweep_cells

if TYPE_CHECKING:
    from kvarena.experiments.traces.base import Visible

MANIFEST = "ladder.json"
CONFIG = "config.toml"
MAX_RUNGS = 8
NAME = "ladder"  # of every cell's allocator: cells with equal rules are one cell
REST = "rest"
LOWER_FAST = "lower end, fast form"
UPPER_FAST = "upper end, fast form"
UPPER_WHOLE = "upper end, with what is not observable here"
# Fields that decide little by themselves go together where there are too many rungs, the first list first.
ALWAYS_TOGETHER: tuple[tuple[str, ...], ...] = (("index", "kind", "page_keys", "reversed_release", "unhashed_to_head"),)
TOGETHER: tuple[tuple[str, ...], ...] = (
    ("demand_slack", "refused_evicts"),
    ("publish_generated", "preempt_keeps"),
    ("recency", "split_touches_suffix"),
    ("eviction_unit", "demand_slack", "refused_evicts"),
)
OWN_NAMES = {ALWAYS_TOGETHER[0]: "free pages and index"}
ORDER = (
    *("page_size", "publish", "publish_generated", "duplicates", "eviction_unit", "eviction_order", "recency"),
    *("split_touches_suffix", "demand_slack", "refused_evicts", "preempt_keeps"),
)  # the others follow
# Fields that no replay and no run shows, or that say nothing of a decision.
SILENT = ("name", "form", "hash_fn", "need_sort", "sizing", "placement", "max_model_len", "retention_interval")


@dataclass(frozen=True)
class Rung:
    """Fields switched together: each name with its value at the lower and at the upper end."""

    name: str
    fields: dict[str, tuple[Any, Any]]

    def at(self, upper: bool) -> dict[str, Any]:
        """The fields at one end."""
        return {name: ends[upper] for name, ends in self.fields.items()}


@dataclass(frozen=True)
class LadderPlan:
    """What a ladder runs.

    held     fields in which the ends differ and that are not switched: name -> why they cannot be seen here
    cells    one for each subset of the rungs, by its bit mask (bit i: rung i is at the upper end)
    ends     cells beyond them: LOWER_FAST, UPPER_FAST and UPPER_WHOLE
    """

    kind: Kind
    lower: AllocatorEntry
    upper: AllocatorEntry
    rungs: tuple[Rung, ...]
    held: dict[str, str]
    cells: tuple[SweepCell, ...]
    ends: dict[str, SweepCell]


def plan_ladder(
    base: Mapping[str, Any],
    visible: Visible,
    *,
    lower: Any = "vllm",
    upper: Any = "sglang",
    groups: Sequence[str] = (),
    extra: Mapping[str, tuple[Any, Any]] | None = None,
) -> LadderPlan:
    """Plan a ladder over a base config (of `kvarena compare`, or of `kvarena run`), whose allocators do not count.

    groups  names of fields, joined with + where they are switched together; empty: chosen by what can be seen
    extra   fields beside those of the designs: name -> (lower, upper)

    Raises ValueError for more than MAX_RUNGS rungs, for a subset that is no legal design, and for unknown fields.
    """
    ends = [allocator_entry(lower), allocator_entry(upper)]
    if _by_ids(base, visible) and ends[0].page_size == ends[1].page_size:  # else both get an id a page below
        ends = [allocator_entry(spec, "ids") for spec in (lower, upper)]
    for entry in ends:
        if entry.kind not in ("block", "token"):
            raise ValueError(f"ladder: expected designs of kind block or token, found {entry.name!r} ({entry.kind})")
    kind = kind_of(base)
    differing = _differing(ends[0], ends[1])
    held = {name: why for name in differing if (why := unseen(name, differing, base, kind, visible))}
    seen = {name: values for name, values in differing.items() if name not in held}
    rungs = [*_rungs(seen, held, groups), *_extra_rungs(kind, visible, extra or {}, held)]
    if len(rungs) > MAX_RUNGS:
        raise ValueError(
            f"ladder: {len(rungs)} rungs ({', '.join(rung.name for rung in rungs)}) make {2 ** len(rungs)} subsets; "
            f"at most {MAX_RUNGS} are run: join some of them, --fields a+b"
        )
    if not rungs:
        raise ValueError("ladder: the two ends do not differ in anything that can be seen here")
    page = _page_of_ids(base, visible, differing)
    bottom = {**_fields(ends[0]), **page}
    cells = [_cell(kind, base, bottom, rungs, mask) for mask in range(1 << len(rungs))]
    checks = _end_cells(kind, base, bottom, {**_fields(ends[1]), **page}, rungs, held)
    return LadderPlan(kind, ends[0], ends[1], tuple(rungs), held, tuple(cells), checks)


def begin_ladder(
    folder: Path, resolved: Mapping[str, Any], plan: LadderPlan, groups: Sequence[str], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `config.toml` into the folder of a ladder that begins or goes on, and return it: the resolved config with a
    table [ladder], so that `kvarena ladder FOLDER/config.toml` is the same ladder.

    Raises ValueError when the folder holds other files, or a ladder with other options.
    """
    import tomli_w

    asked = {"from": plan.lower.as_toml(), "to": plan.upper.as_toml(), "fields": list(groups)}
    asked["rungs"] = {name: list(ends) for name, ends in extra.items()}
    config = {**resolved, "ladder": asked}
    earlier = _earlier(folder)
    if earlier is None:
        refuse_others(folder, False, "an earlier ladder")
    elif "ladder" in earlier:
        refuse_other_options(folder, "a ladder", earlier, tomllib.loads(tomli_w.dumps(config)))
    else:  # of an earlier version, which kept the rungs only
        rungs = read_json(folder / MANIFEST)["rungs"]
        now = {**resolved, "rungs": {rung.name: {k: list(v) for k, v in rung.fields.items()} for rung in plan.rungs}}
        refuse_other_options(folder, "a ladder", {**earlier, "rungs": rungs}, now)
    write_whole(folder / CONFIG, tomli_w.dumps(config))
    return config


def _earlier(folder: Path) -> dict[str, Any] | None:
    """The config of the ladder in a folder; None when there is none."""
    try:
        found = read_toml(folder / CONFIG)
    except (OSError, ValueError):
        return None
    return found if "ladder" in found or (folder / MANIFEST).is_file() else None


def _fields(entry: AllocatorEntry) -> dict[str, Any]:
    fields = entry.as_toml()
    del fields["name"]
    return fields


def _differing(lower: AllocatorEntry, upper: AllocatorEntry) -> dict[str, tuple[Any, Any]]:
    low, high = _fields(lower), _fields(upper)
    names = [*ORDER, *(name for name in Design.model_fields if name not in (*SILENT, *ORDER))]
    none = "none"  # a field that stands at None is not written where that is its default
    both = {name: (low.get(name, none), high.get(name, none)) for name in names}
    return {name: ends for name, ends in both.items() if ends[0] != ends[1]}


# --- what can be seen ---


def unseen(
    name: str, differing: Mapping[str, tuple[Any, Any]], base: Mapping[str, Any], kind: Kind, visible: Visible
) -> str:
    """Why a field cannot be seen in these runs; empty when it can."""
    engine, workload = base.get("engine", {}), base.get("workload", {})
    replies = kind == "run" or (engine.get("outputs") == "replay" and engine.get("live", 1) > 1)
    if name == "page_size" and visible.grain > 1:
        if workload.get("unit") == "ids":
            return f"one id of the trace, {visible.grain} tokens, is a page in both designs"
        if all(visible.grain % size == 0 for size in differing[name]):
            return f"one id of the trace stands for {visible.grain} tokens: rounding below that cannot show"
    if name == "demand_slack" and _page_of_ids(base, visible, differing):
        return "at page size 1 no page is asked for on top"
    if name == "publish":
        if kind == "compare":
            return "a replay writes what it reserves at once, so both moments are one"
        if not visible.publish_time:
            return "sharers of a prefix do not arrive close together"
    if name == "preempt_keeps" and kind == "compare":
        return "a replay preempts nobody"
    if name == "refused_evicts" and not replies:
        return "only growing replies of overlapping requests are refused after their admission"
    if name == "publish_generated" and not replies:
        return "no reply is replayed, or none while another request is live"
    if name == "publish_generated" and kind == "compare" and visible.outputs not in ("recorded", "inferred"):
        return f"the trace's outputs are {visible.outputs!r}: no later prompt contains one"
    if name == "page_keys":
        return "no request of a trace carries an image"
    return ""


def _page_of_ids(base: Mapping[str, Any], visible: Visible, differing: Mapping[str, Any]) -> dict[str, Any]:
    """The page size that both ends get where ids stand for tokens and the ends do not agree on one: an id a page."""
    return {"page_size": ID_PAGE} if _by_ids(base, visible) and "page_size" in differing else {}


def _by_ids(base: Mapping[str, Any], visible: Visible) -> bool:
    """Whether each token of the replay is an id that stands for several."""
    return base.get("workload", {}).get("unit") == "ids" and visible.grain > 1


# --- rungs ---


def _rungs(seen: dict[str, tuple[Any, Any]], held: Mapping[str, str], groups: Sequence[str]) -> list[Rung]:
    if groups:
        return _named_rungs(seen, held, groups)
    names: list[tuple[str, ...]] = [(name,) for name in seen]
    for together in ALWAYS_TOGETHER:
        names = _joined(names, together)
    for together in TOGETHER:
        if len(names) > MAX_RUNGS:
            names = _joined(names, together)
    return [_rung(parts, seen) for parts in names]


def _joined(names: list[tuple[str, ...]], together: Iterable[str]) -> list[tuple[str, ...]]:
    """Rungs that hold any of these fields become one, where the first of them stood."""
    hit = [parts for parts in names if set(parts) & set(together)]
    if len(hit) < 2:
        return names
    merged = tuple(sorted(name for parts in hit for name in parts))
    return [merged if parts is hit[0] else parts for parts in names if parts is hit[0] or parts not in hit]


def _rung(parts: tuple[str, ...], seen: Mapping[str, tuple[Any, Any]]) -> Rung:
    for together, name in OWN_NAMES.items():
        if len(parts) > 1 and set(parts) <= set(together):
            return Rung(name, {part: seen[part] for part in parts})
    return Rung(" + ".join(parts), {part: seen[part] for part in parts})


def _named_rungs(seen: dict[str, tuple[Any, Any]], held: Mapping[str, str], groups: Sequence[str]) -> list[Rung]:
    rungs, left = [], dict(seen)
    for group in groups:
        parts = tuple(part.strip() for part in group.split("+"))
        for part in parts:
            if part in held:
                raise ValueError(f"ladder: {part} is not observable here: {held[part]}")
            if part not in left:
                raise ValueError(
                    f"ladder: {part!r} is no field in which the ends differ, or is named twice; they differ in "
                    f"{', '.join([*seen, *held])}"
                )
        rungs.append(_rung(parts, {part: left.pop(part) for part in parts}))
    if left:
        rungs.append(Rung(REST, left))
    return rungs


def _extra_rungs(
    kind: Kind, visible: Visible, extra: Mapping[str, tuple[Any, Any]], held: dict[str, str]
) -> list[Rung]:
    """Rungs beside the designs' own: fields of the engine, or of the allocator at values that neither design has."""
    from kvarena.experiments.engine.run_config import SECTION_OF as OF_RUNS

    known, rungs = OF_RUNS if kind == "run" else SECTION_OF, []
    for name, ends in extra.items():
        if name in Design.model_fields or name in known:
            rungs.append(Rung(name, {name: ends}))
        elif name in OF_RUNS:
            held[name] = "a replay has no scheduler; give a config of `kvarena run`"
        else:
            raise ValueError(f"ladder: rung {name!r}: no field of an allocator or a config; known: {', '.join(known)}")
    return rungs


# --- cells ---


def _cell(
    kind: Kind, base: Mapping[str, Any], bottom: Mapping[str, Any], rungs: Sequence[Rung], mask: int
) -> SweepCell:
    fields: dict[str, Any] = dict(bottom)
    for place, rung in enumerate(rungs):
        fields.update(rung.at(bool(mask >> place & 1)))
    up = [rung.name for place, rung in enumerate(rungs) if mask >> place & 1]
    return _make(kind, base, {**fields, "form": "general"}, " + ".join(up) or "none")


def _end_cells(
    kind: Kind,
    base: Mapping[str, Any],
    bottom: Mapping[str, Any],
    top: Mapping[str, Any],
    rungs: Sequence[Rung],
    held: Mapping[str, str],
) -> dict[str, SweepCell]:
    """The ends by their fast forms, and the upper one with the fields that are not observable here at its own values.

    The fast forms must decide as the general form does; the third cell says whether what cannot be seen does anything.
    """
    low, high = ({name: v for rung in rungs for name, v in rung.at(upper).items()} for upper in (False, True))
    # Another page size is another reading of the trace, so it stays where the trace cannot show it.
    page = {"page_size": bottom["page_size"]} if "page_size" in held else {}
    ends = {
        LOWER_FAST: {**bottom, **low, "form": "auto"},
        UPPER_FAST: {**top, **high, **page, "form": "auto"},
        UPPER_WHOLE: {**top, **high, **page, "form": "general"},
    }
    return {name: _make(kind, base, fields, name) for name, fields in ends.items()}


def _make(kind: Kind, base: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> SweepCell:
    """One cell. Fields of the engine among them go there."""
    rules = {field: value for field, value in fields.items() if field in Design.model_fields}
    others = {field: value for field, value in fields.items() if field not in Design.model_fields}
    table = {"name": NAME, **{field: value for field, value in rules.items() if not _is_default_none(field, value)}}
    plain = {part: value for part, value in base.items() if part not in ("allocator", "allocators")}
    if kind == "run" and "preset" not in base:
        plain["engine"] = {"scheduler": "vllm", **base.get("engine", {})}
    plain.update({"allocator": table} if kind == "run" else {"allocators": [table]})
    try:
        cell = sweep_cells({**plain, "sweep": [others]})[0]
    except ValueError as error:
        text = str(error).removeprefix(f"cell 1 ({SweepCell('', kind, others, {}).name}): ").split(", found {")[0]
        raise ValueError(f"ladder: with {name} at the upper end: {text}; switch them together, --fields a+b") from None
    return replace(cell, point={"upper": name})


def _is_default_none(field: str, value: Any) -> bool:
    return value == "none" and Design.model_fields[field].default is None
