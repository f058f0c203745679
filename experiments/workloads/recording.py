"""`recording`: a real small model on scripted dialogues: chats, and agents with tools and sub-agents, token for token.

Prompts and replies are those of the recording (`kvarena trace record`); each reply is literally part of the next
prompt of its dialogue, and a sub-agent's last reply stands in its parent's next prompt. Only the times are drawn, from
the seed: dialogues start one after the other, a reply takes its nominal time, users think and tools run before the next
prompt comes. The recording that ships was made with SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from kvarena.experiments.record import Recorded, read_recording
from kvarena.experiments.traces.base import Request, Trace
from kvarena.experiments.workloads import trace_of
from kvarena.experiments.workloads.draws import (
    DECODE_S_PER_TOKEN,
    Timed,
    Tokens,
    check_number,
    check_shape,
    in_arrival_order,
    request,
)

SHIPPED = Path(__file__).with_name("recording.parquet")


@dataclass(frozen=True)
class Shape:
    """Parameters of `recording`; times in seconds.

    file            a recording of one's own; "": the one that ships
    dialogues_per_s chats and agents that start a second, Poisson, in the order of the recording shuffled by the seed
    think_median_s  log-normal pause (sigma 0.8) before a user's next message
    tool_median_s   log-normal time (sigma 1) that a tool runs
    """

    file: str = ""
    dialogues_per_s: float = 1.0
    think_median_s: float = 15.0
    tool_median_s: float = 2.0


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `recording` workload with the times of that seed. Raises ValueError for a bad parameter or file."""
    shape = shape or Shape()
    check_shape(seed, shape, positive=("dialogues_per_s", "think_median_s", "tool_median_s"))
    check_number("dialogues_per_s", shape.dialogues_per_s, maximum=1e6)
    if not isinstance(shape.file, str):
        raise ValueError(f"file: expected the path of a recording, found {shape.file!r}")
    path = Path(shape.file or SHIPPED)
    rows = _recording(str(path), path.stat().st_mtime_ns if path.is_file() else 0)
    rng = np.random.default_rng([seed, 0x4EC0])
    made = trace_of("recording", in_arrival_order(_timed(rows, rng, shape)), {"seed": seed, **asdict(shape)})
    return replace(made, path=path) if shape.file else made  # a file of one's own is an input, and is hashed as one


@functools.lru_cache(maxsize=4)
def _recording(path: str, changed: int) -> list[tuple[Recorded, Tokens]]:
    """Each request with its whole prompt, in the order of the file. changed: when it was written, nanoseconds."""
    found: list[tuple[Recorded, Tokens]] = []
    said: dict[str, Tokens] = {}
    for row in read_recording(Path(path))[0]:
        prompt = np.concatenate([said.get(row.session_id, np.zeros(0, np.int32)), row.tail])
        said[row.session_id] = np.concatenate([prompt, row.output])
        found.append((row, prompt))
    if not found:
        raise ValueError(f"{path}: expected a recording with requests, found none")
    return found


def _timed(rows: list[tuple[Recorded, Tokens]], rng: np.random.Generator, shape: Shape) -> Timed:
    starts = _starts(rows, rng, shape)
    ended: dict[str, float] = {}
    timed: Timed = []
    for row, prompt in rows:
        at = starts[row.request_id] if row.after is None else ended[row.after] + _pause(row, rng, shape)
        ended[row.request_id] = at + len(row.output) * DECODE_S_PER_TOKEN
        timed.append((at, _request(row, prompt)))
    return timed


def _starts(rows: list[tuple[Recorded, Tokens]], rng: np.random.Generator, shape: Shape) -> dict[str, float]:
    """Time of each dialogue's first request."""
    first = [row.request_id for row, _ in rows if row.after is None]
    times = np.cumsum(rng.exponential(1.0 / shape.dialogues_per_s, len(first)))
    return {first[place]: float(at) for place, at in zip(rng.permutation(len(first)).tolist(), times, strict=True)}


def _pause(row: Recorded, rng: np.random.Generator, shape: Shape) -> float:
    """A sub-agent starts at once; tools take their time, and so do users."""
    if row.kind == "subagent" and row.request_id.endswith(".t0"):
        return 0.0
    if row.kind == "chat":
        return float(rng.lognormal(np.log(shape.think_median_s), 0.8))
    return float(rng.lognormal(np.log(shape.tool_median_s), 1.0))


def _request(row: Recorded, prompt: Tokens) -> Request:
    about = {"kind": row.kind, **({} if row.after is None else {"after": row.after})}
    return request(row.request_id, prompt, row.output, session=row.session_id, extra=about)
