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


_MOONCAKE = (
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release"
)
_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"
_SERVINGSIM = "https://raw.githubusercontent.com/casys-kaist/LLMServingSim/5daddb21a545658d5150b535712d0494584b5278"

KNOWN = (
    Known(
        name="mooncake-conversation",
        file="conversation_trace.jsonl",
        format="mooncake",
        licence="Apache-2.0",
        about="Kimi chat, one hour, 12,031 requests",
        url=f"{_MOONCAKE}/traces/conversation_trace.jsonl",
        sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        size=3_029_533,
    ),
    Known(
        name="mooncake-synthetic",
        file="synthetic_trace.jsonl",
        format="mooncake",
        licence="Apache-2.0",
        about="ShareGPT, L-Eval and LooGLE questions, Poisson arrivals, 3,993 requests",
        url=f"{_MOONCAKE}/traces/synthetic_trace.jsonl",
        sha256="bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        size=1_136_313,
    ),
    Known(
        name="mooncake-toolagent",
        file="toolagent_trace.jsonl",
        format="mooncake",
        licence="Apache-2.0",
        about="tools and agents, one hour, 23,608 requests",
        how=f"get {_MOONCAKE}/traces/toolagent_trace.jsonl into a folder and set KVARENA_TRACES to it",
    ),
    Known(
        name="mooncake-arxiv",
        file="mooncake_trace.jsonl",
        format="mooncake",
        licence="Apache-2.0",
        about="the trace of the arXiv paper 2407.00079 (as replaced on 2024-07-31), 23,608 requests",
        how="get arxiv-trace/mooncake_trace.jsonl of github.com/kvcache-ai/Mooncake into a folder and set "
        "KVARENA_TRACES to it",
    ),
    Known(
        name="azure-2023-code",
        file="AzureLLMInferenceTrace_code.csv",
        format=None,
        licence="CC-BY-4.0",
        about="code completion, lengths and arrivals only, 8,819 requests",
        url=f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
        sha256="54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        size=320_117,
    ),
    Known(
        name="azure-2023-conv",
        file="AzureLLMInferenceTrace_conv.csv",
        format=None,
        licence="CC-BY-4.0",
        about="conversations, lengths and arrivals only, 19,366 requests",
        url=f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
        sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        size=719_188,
    ),
    Known(
        name="llmservingsim-example",
        file="example_trace.jsonl",
        format="tokens",
        licence="MIT",
        about="ten requests with token ids, a toy",
        url=f"{_SERVINGSIM}/workloads/example_trace.jsonl",
        sha256="8e55b35d62c0530fd6fefcf67d422b1dcb8b80e1c71243a21900f8ac829b5429",
        size=3573,
    ),
    Known(
        name="lmcache-miniswe",
        file="miniswe_blksz_16.jsonl",
        format="hashes",
        licence="Apache-2.0",
        about="coding agents, 16-token ids with ids of replies, 402 requests",
        how="derive chained 16-token block hashes from miniswe/ of github.com/LMCache/lmcache-agent-trace "
        "(docs/traces.md, hashes) and set KVARENA_TRACES to the folder",
    ),
    Known(
        name="lmcache-taubench",
        file="taubench_blksz_16.jsonl",
        format="hashes",
        licence="Apache-2.0",
        about="customer-service agents, 16-token ids with ids of replies, 471 requests",
        how="derive chained 16-token block hashes from taubench/ of github.com/LMCache/lmcache-agent-trace "
        "(docs/traces.md, hashes) and set KVARENA_TRACES to the folder",
    ),
    Known(
        name="lmcache-magagent",
        file="magagent_blksz_16.jsonl",
        format="hashes",
        licence="Apache-2.0",
        about="multi-agent runs, 16-token ids with ids of replies, 746 rows of which 53 have no prompt",
        how="derive chained 16-token block hashes from magagent/ of github.com/LMCache/lmcache-agent-trace "
        "(docs/traces.md, hashes) and set KVARENA_TRACES to the folder",
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
