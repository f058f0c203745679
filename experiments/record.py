"""Record a real small model on scripted dialogues: token ids of every prompt and reply.

Each prompt of a dialogue is the prompt before it, the model's reply to that, token for token, and what the script
says next. So a reply is literally part of the next prompt, without being decoded and tokenised again.

The dialogues of a group have one preamble and are computed as one batch (`record_batch.py`). Replies are sampled at a
temperature, with a seed for each group; which tokens come out depends on the machine's floating point too, so a
recording is kept as a file and not made again to check it. Finished groups are kept beside the file until it is
whole, so that a recording that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.experiments.record_scripts import SUB, Script, Turn, scripts
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

TEMPERATURE = 0.7
SUB_GROUPS = 1000  # sub-agents of a group are sampled with its number and this
SCHEMA_VERSION = 1


@dataclass
class Recorded:
    """One request.

    after   request that has to end before this one comes: the turn before, or the sub-agent's last; None: none
    tail    int32 ids that the prompt has behind the turn before and its reply (all of a first prompt)
    output  int32 ids of the reply; the last one is the end of turn unless the reply was cut
    """

    request_id: str
    session_id: str
    kind: str
    after: str | None
    tail: NDArray[np.int32]
    output: NDArray[np.int32]


@dataclass
class Words:
    """Text to ids of one model's chat template: `<|im_start|>role`, newline, text, `<|im_end|>`, newline."""

    tokenizer: Any
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.ids("<|im_end|>")[0]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def head(self, preamble: str) -> list[int]:
        return self.ids(f"<|im_start|>system\n{preamble}<|im_end|>\n")

    def turn(self, turn: Turn, before: Sequence[int] | None, insert: Sequence[int]) -> list[int]:
        """Ids behind the reply `before` (None: behind the head): its end where it was cut, the message, the
        assistant's header. `insert` are ids that stand behind the message's text."""
        found = [] if before is None else self.ids("\n") if before[-1] == self.end else [self.end, *self.ids("\n")]
        found += [*self.ids(f"<|im_start|>{turn.role}\n{turn.text}"), *insert]
        return [*found, *self.ids("<|im_end|>\n<|im_start|>assistant\n")]


class Recorder:
    """Plays groups of scripts to one model. `tick` is called once a reply."""

    def __init__(self, model: Any, tokenizer: Any, *, seed: int = 0, tick: Callable[[], None] | None = None) -> None:
        self.model = model
        self.words = Words(tokenizer)
        self.seed = seed
        self._tick = tick or (lambda: None)

    def play(self, group: Sequence[Script], number: int) -> list[Recorded]:
        """Every request of the group's dialogues and of their sub-agents, a dialogue after the other.

        number  of the group in its recording: decides, with the seed, what is sampled
        """
        from kvarena.experiments.record_batch import Batch

        head = self.words.head(group[0].preamble)
        batch = Batch(self.model, head, len(group), [self.seed, number], TEMPERATURE)
        found: list[list[Recorded]] = [[] for _ in group]
        live = list(range(len(group)))
        for turn in range(max(len(script.turns) for script in group)):
            going_on = [place for place, row in enumerate(live) if turn < len(group[row].turns)]
            live = [live[place] for place in going_on]
            batch.keep(going_on)
            children = self._delegated([group[row] for row in live], turn, number)
            tails = [self._tail(group[row], turn, found[row], children) for row in live]
            limits = [group[row].turns[turn].max_reply for row in live]
            for row, tail, reply in zip(live, tails, batch.answer(tails, limits, self.words.end), strict=True):
                found[row].append(self._recorded(head, group[row], turn, found[row], tail, reply))
        return [request for done in found for request in done]

    def _delegated(self, group: Sequence[Script], turn: int, number: int) -> dict[str, list[Recorded]]:
        """Requests of the sub-agents that this turn starts, by the parent's session."""
        parents = [script for script in group if script.child is not None and script.turns[turn].delegate]
        if not parents:
            return {}
        requests = self.play([script.child for script in parents if script.child is not None], SUB_GROUPS + number)
        found: dict[str, list[Recorded]] = {script.session: [] for script in parents}
        for request in requests:
            found[request.session_id.removesuffix(SUB)].append(request)
        return found

    def _tail(self, script: Script, turn: int, done: list[Recorded], children: dict[str, list[Recorded]]) -> list[int]:
        """Ids of this turn's message; a sub-agent's requests are put before it in `done`."""
        own = [request for request in done if request.session_id == script.session]
        before = own[-1].output.tolist() if own else None
        child = children.get(script.session, [])
        if not child:
            return self.words.turn(script.turns[turn], before, [])
        child[0].after = done[-1].request_id if done else None
        done += child
        insert = [token for token in child[-1].output.tolist() if token != self.words.end]
        return self.words.turn(script.turns[turn], before, insert)

    def _recorded(
        self,
        head: Sequence[int],
        script: Script,
        turn: int,
        done: Sequence[Recorded],
        tail: Sequence[int],
        reply: Sequence[int],
    ) -> Recorded:
        self._tick()
        after = done[-1].request_id if done else None
        whole = tail if turn else [*head, *tail]
        ids = np.array(whole, np.int32), np.array(reply, np.int32)
        return Recorded(f"{script.session}.t{turn}", script.session, script.kind, after, *ids)


def record_smollm2(
    num_requests: int, seed: int, tick: Callable[[], None] | None = None, keep: Path | None = None
) -> list[Recorded]:
    """As `record`, with SmolLM2-135M-Instruct on one thread. ValueError says what to install where it is missing."""
    import torch
    from kvarena.experiments.model.loading import load_smollm2, load_tokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return record(load_smollm2(), load_tokenizer(), num_requests=num_requests, seed=seed, tick=tick, keep=keep)
    finally:
        torch.set_num_threads(threads)


def record(
    model: Any,
    tokenizer: Any,
    *,
    num_requests: int,
    seed: int = 0,
    tick: Callable[[], None] | None = None,
    keep: Path | None = None,
) -> list[Recorded]:
    """Play `num_requests` requests' worth of dialogues. Raises ValueError for a number below 1.

    keep  folder for finished groups; what is there already is not played again
    """
    if num_requests < 1:
        raise ValueError(f"num_requests: expected at least 1, found {num_requests}")
    recorder, found = Recorder(model, tokenizer, seed=seed, tick=tick), list[Recorded]()
    for number, group in enumerate(scripts(seed, num_requests)):
        part = None if keep is None else keep / f"seed{seed}-group{number}-{sum(s.num_requests for s in group)}.parquet"
        if part is not None and part.is_file():
            found += read_recording(part)[0]
            continue
        requests = recorder.play(group, number)
        if part is not None:
            write_recording(requests, part, {})
        found += requests
    return found


# --- file ---


def write_recording(requests: Sequence[Recorded], path: Path, about: dict[str, str]) -> None:
    """Write a recording as Parquet: a row a request, each token once. `about` (model, seed) goes into the metadata."""
    import pyarrow.parquet as pq
    from kvarena.experiments.traces.write import whole_file

    table = recording_table(requests, about)
    ids = {"tail.list.element": "DELTA_BINARY_PACKED", "output.list.element": "DELTA_BINARY_PACKED"}
    with whole_file(path) as stream:
        pq.write_table(
            table, stream, compression="zstd", compression_level=19, use_dictionary=["kind"], column_encoding=ids
        )


def recording_table(requests: Sequence[Recorded], about: dict[str, str]) -> pa.Table:
    """The recording as a table: request_id, session_id, kind, after, tail, output."""
    import json

    import pyarrow as pa

    table = pa.table(
        {
            **{name: [getattr(r, name) for r in requests] for name in ("request_id", "session_id", "kind", "after")},
            "tail": pa.array([r.tail for r in requests], pa.list_(pa.int32())),
            "output": pa.array([r.output for r in requests], pa.list_(pa.int32())),
        }
    )
    return table.replace_schema_metadata(
        {b"schema_version": str(SCHEMA_VERSION).encode(), b"recording": json.dumps(about).encode()}
    )


def read_recording(path: Path) -> tuple[list[Recorded], dict[str, str]]:
    """(requests, what the metadata says). Raises ValueError naming the file when it is no recording."""
    import json

    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        metadata = table.schema.metadata or {}
        if metadata.get(b"schema_version") != str(SCHEMA_VERSION).encode():
            raise ValueError(f"expected schema_version {SCHEMA_VERSION}")
        if b"recording" not in metadata:
            raise ValueError("its metadata names no recording")
        about = json.loads(metadata[b"recording"])
        columns = {name: table[name].to_pylist() for name in ("request_id", "session_id", "kind", "after")}
        ids = {name: [np.asarray(row.values, np.int32) for row in table[name]] for name in ("tail", "output")}
    except (OSError, KeyError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as a recording ({error})"[:300]) from None
    rows = zip(*columns.values(), ids["tail"], ids["output"], strict=True)
    return [Recorded(*row) for row in rows], about
