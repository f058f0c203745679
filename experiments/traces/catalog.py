"""The traces that kvarena knows by name: publisher, pinned commit, licence, sha256, format, and where files are kept.

None of them is part of the project. `kvarena trace fetch NAME` gets one from its publisher.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Known:
    """A public trace.

    file      file name at the publisher; found under KVARENA_TRACES as it is or with .gz
    url       its address at the pinned commit; "" = by hand, see `how`
    sha256    of the file as published; "" = not known, so it cannot be fetched
    size      bytes as published; 0 = not known
    how       what to do by hand
    """

    name: str
    file: str
    format: str | None
    licence: str
    about: str
    url: str = ""
    sha256: str = ""
    size: int = 0
    how: str = ""


_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28"

KNOWN = (
    Known(
        name="mooncake-conversation",
        file="conversation_trace.jsonl",
        format="mooncake",
        licence="Apache-2.0",
        about="Kimi chat, one hour, 12,031 requests",
        url=f"{_MOONCAKE}/FAST25-release/traces/conversation_trace.jsonl",
        size=3_029_533,
    ),
)


def get(name: str) -> Known:
    """The known trace of that name. Raises ValueError that lists them."""
    for known in KNOWN:
        if known.name == name:
            return known
    raise ValueError(f"unknown trace {name!r}: expected one of {', '.join(k.name for k in KNOWN)}")


def cache_folder() -> Path:
    """KVARENA_CACHE, else $XDG_CACHE_HOME/kvarena, else ~/.cache/kvarena."""
    if folder := os.environ.get("KVARENA_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvarena"


def find(known: Known) -> Path | None:
    """Where the trace is held: under KVARENA_TRACES (at most two folders deep), then in the cache; or None."""
    places = [cache_folder() / "traces" / known.name]
    if traces := os.environ.get("KVARENA_TRACES"):
        root = Path(traces)
        places = [root, *sorted(p for p in root.glob("*") if p.is_dir()), *places]
    for place in places:
        for file in (known.file, f"{known.file}.gz"):
            if (place / file).exists():
                return place / file
    return None


def resolve(spec: str | Path) -> tuple[Path, str, str | None]:
    """(path, name, format or None) of a known trace's name or of a path. Raises ValueError when neither is there."""
    known = next((k for k in KNOWN if k.name == str(spec)), None)
    if known is None:
        path = Path(spec)
        if path.exists():
            return path, _stem(path), None
        from kvarena.experiments import workloads

        raise ValueError(
            f"trace {str(spec)!r}: expected a path that exists, a built-in workload ({', '.join(workloads.NAMES)}) "
            f"or a known trace ({', '.join(k.name for k in KNOWN)}), found none of them"
        )
    found = find(known)
    if found is None:
        how = f"run: kvarena trace fetch {known.name}" if known.url else known.how
        raise ValueError(
            f"trace {known.name!r}: expected {known.file} under KVARENA_TRACES or in {cache_folder()}, "
            f"found none; {how}"
        )
    return found, known.name, known.format


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rsplit(".", 1)[0] or path.name
