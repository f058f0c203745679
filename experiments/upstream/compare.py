"""The same random operations through a real allocator and through ours; every decision of both compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvarena.allocators.interface import EventKind
from kvarena.experiments.scenarios import ScenarioRunner
from kvarena.experiments.upstream.ops import RandomRequests

ENVIRONMENT = "KVARENA_PEERS"
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.22"}  # whose decisions ours take
OPS_A_SEED = 2000  # then both start from an empty pool
COMPARED = ("ok", "hit", "pages", "new_pages", "free", "evictable", "evicted")


class Runner(Protocol):
    """Answers neutral operations."""

    def decide(self, op: dict[str, Any]) -> dict[str, Any]: ...


class OurRunner(ScenarioRunner):
    """Ours, which also knows `step`: one token for each of `ids` in one call, all or nothing."""

    def decide(self, op: dict[str, Any]) -> dict[str, Any]:
        if op["op"] != "step":
            return super().decide(op)
        self.allocator.events.drain()
        line = self._step(op)
        capacity = self.allocator.capacity()
        evictions = (event for event in self.allocator.events.rows if event.kind is EventKind.EVICT)
        evicted = [page for event in evictions for page in event.page_ids]
        return line | {"free": capacity.free, "evictable": capacity.evictable, "evicted": evicted}

    def _step(self, op: dict[str, Any]) -> dict[str, Any]:
        seqs = [self.live[name] for name in op["ids"]]
        for seq, token in zip(seqs, op["tokens"], strict=True):
            seq.append(token)
        reservations = self.allocator.reserve([(seq, 1) for seq in seqs])
        if reservations is None:
            for seq in seqs:
                seq.pop()
            return {"ok": False, "hit": 0, "new_pages": []}
        self.allocator.commit([(seq, seq.num_tokens) for seq in seqs])
        return {"ok": True, "hit": 0, "new_pages": [list(each.page_ids) for each in reservations]}


@dataclass(frozen=True)
class Setting:
    """One configuration of both sides.

    header   of a scenario, with `admission` and `need_sort` where the token design has them
    ours     fields of our allocator's design on top of it
    keys     whether requests carry LoRAs, salts, images
    batches  whether decodes also come as one call for several requests
    """

    name: str
    header: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    keys: bool = False
    batches: bool = False


@dataclass(frozen=True)
class Difference:
    """Where the two first part: the op, what of the answer differs, and both values.

    raised   theirs gave no answer: it raised, as a version does whose methods have other names
    """

    seed: int
    number: int
    op: dict[str, Any]
    what: str
    ours: Any
    theirs: Any
    raised: bool = False

    def __str__(self) -> str:
        op = {name: value for name, value in self.op.items() if name != "tokens"}
        if "tokens" in self.op:
            op["tokens"] = f"{len(self.op['tokens'])} of them"
        where = f"seed {self.seed}, op {self.number} {op}"
        if self.raised:
            return f"{where}: {self.theirs}"
        return f"{where}: {self.what} is {self.ours} here, {self.theirs} there"


@dataclass(frozen=True)
class Outcome:
    """What one setting gave: ops compared, what they met, and the first difference, if any."""

    setting: str
    ops: int
    hits: int
    evicted: int
    refused: int
    difference: Difference | None


@dataclass(frozen=True)
class Upstream:
    """A real package, ready to be driven: its version, settings, and how to build both sides.

    detail   which of its interchangeable parts runs, where there is a choice
    """

    package: str
    version: str
    settings: list[Setting]
    theirs: Callable[[dict[str, Any]], Runner]
    kind: str
    detail: str = ""

    def ours(self, setting: Setting) -> ScenarioRunner:
        rules = {name: setting.header[name] for name in ("admission", "need_sort") if name in setting.header}
        return OurRunner.for_scenario(setting.header, self.kind, **rules, **setting.ours)


def compare(upstream: Upstream, setting: Setting, ops: int, first_seed: int = 0) -> Outcome:
    """Drive both for `ops` operations, a fresh pair every `OPS_A_SEED`; stops at the first difference."""
    met = {"hits": 0, "evicted": 0, "refused": 0}
    done, seed = 0, first_seed
    while done < ops:
        for difference in _one_seed(upstream, setting, seed, min(OPS_A_SEED, ops - done), met):
            done += difference is None or difference.number > 0
            if difference is not None:
                return Outcome(setting.name, done, **met, difference=difference)
        seed += 1
    return Outcome(setting.name, done, **met, difference=None)


def _one_seed(
    upstream: Upstream, setting: Setting, seed: int, ops: int, met: dict[str, int]
) -> Iterator[Difference | None]:
    requests = RandomRequests(seed, setting.header, keys=setting.keys, batches=setting.batches)
    ours = upstream.ours(setting)
    try:
        theirs = upstream.theirs(setting.header)
    except Exception as error:  # another version may not be built like this
        yield Difference(
            seed, 0, {"op": "build"}, "the allocator", "built", f"{type(error).__name__}: {error}", raised=True
        )
        return
    for number in range(1, ops + 1):
        op = requests.next()
        here = ours.decide(op)
        try:
            there = theirs.decide(op)
        except Exception as error:  # whatever another version raises is the difference
            yield Difference(seed, number, op, "the answer", here, f"{type(error).__name__}: {error}", raised=True)
            return
        yield _difference(seed, number, op, here, there)
        requests.learn(op, here)
        met["hits"] += here["hit"] > 0
        met["evicted"] += len(here["evicted"])
        met["refused"] += not here["ok"]
    ours.allocator.check()


def _difference(
    seed: int, number: int, op: dict[str, Any], here: dict[str, Any], there: dict[str, Any]
) -> Difference | None:
    for name in COMPARED:
        if here.get(name) != there.get(name):
            return Difference(seed, number, op, name, here.get(name), there.get(name))
    return None


def find(package: str, path: Path | None) -> Path | None:
    """The folder that holds an unpacked wheel: `path`, or one found through KVARENA_PEERS; None: use what is installed.

    KVARENA_PEERS lists folders; each is an unpacked wheel (holds PACKAGE/) or holds such folders. The version whose
    decisions ours take is preferred. ValueError: `path` does not hold the package.
    """
    if path is not None:
        if not (path / package).is_dir():
            raise ValueError(f"--path: expected a folder that holds {package}/, found {path}")
        return path
    for folder in filter(None, os.environ.get(ENVIRONMENT, "").split(os.pathsep)):
        if (Path(folder) / package).is_dir():
            return Path(folder)
        inside = sorted(each for each in Path(folder).glob(f"{package}-*") if (each / package).is_dir())
        named = [each for each in inside if each.name == f"{package}-{VERSIONS[package]}"]
        if named or inside:
            return (named or inside)[0]
    return None


def load(package: str, path: Path | None = None) -> Upstream:
    """The real package, from `path`, KVARENA_PEERS or the environment. ImportError: it is not there."""
    if package == "vllm":
        from kvarena.experiments.upstream.vllm_driver import upstream
    elif package == "sglang":
        from kvarena.experiments.upstream.sglang_driver import upstream
    else:
        raise ValueError(f"package: expected one of {', '.join(VERSIONS)}, found {package!r}")
    return upstream(find(package, path))
