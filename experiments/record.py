"""Record a real small model on scripted dialogues: token ids of every prompt and reply.

Each prompt of a dialogue is the prompt before it, the model's reply to that, token for token, and what the script
says next. So a reply is literally part of the next prompt, without being decoded and tokenised again.

The dialogues of a group have one preamble and are computed as one batch, with one KV cache for their whole life:
prompts are padded on the left of each turn's new tokens, and padding is masked for good. Replies are sampled at a
temperature, with a seed for each group; which tokens come out depends on the machine's floating point too, so a
recording is kept as a file and not made again to check it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.experiments.record_scripts import Script, Turn, scripts
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

TEMPERATURE = 0.7
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
        self._groups = 0

    def play(self, group: Sequence[Script]) -> list[Recorded]:
        """Every request of the group's dialogues and of their sub-agents, a dialogue after the other."""
        batch = _Batch(self.model, self.words.head(group[0].preamble), len(group), [self.seed, self._groups])
        self._groups += 1
        found: list[list[Recorded]] = [[] for _ in group]
        for number in range(max(len(script.turns) for script in group)):
            children = self._delegated(group, number)
            tails: list[list[int]] = []
            for script, done in zip(group, found, strict=True):
                if number >= len(script.turns):
                    tails.append([])
                    continue
                child = children.get(script.session, [])
                if child:
                    child[0].after = done[-1].request_id if done else None
                done += child
                tails.append(self._tail(script, number, done, child))
            limits = [script.turns[number].max_reply if number < len(script.turns) else 0 for script in group]
            replies = batch.answer(tails, limits, self.words.end)
            for script, done, tail, reply in zip(group, found, tails, replies, strict=True):
                if tail:
                    done.append(self._recorded(batch.head, script, number, done, tail, reply))
        return [request for done in found for request in done]

    def _delegated(self, group: Sequence[Script], number: int) -> dict[str, list[Recorded]]:
        """Requests of the sub-agents that this turn starts, by the parent's session."""
        parents = [s for s in group if s.child is not None and number < len(s.turns) and s.turns[number].delegate]
        if not parents:
            return {}
        requests = self.play([s.child for s in parents if s.child is not None])
        return {s.session: [r for r in requests if s.child and r.session_id == s.child.session] for s in parents}

    def _tail(self, script: Script, number: int, done: Sequence[Recorded], child: Sequence[Recorded]) -> list[int]:
        own = [request for request in done if request.session_id == script.session]
        before = own[-1].output.tolist() if own else None
        insert = [token for token in child[-1].output.tolist() if token != self.words.end] if child else []
        return self.words.turn(script.turns[number], before, insert)

    def _recorded(
        self,
        head: Sequence[int],
        script: Script,
        number: int,
        done: Sequence[Recorded],
        tail: Sequence[int],
        reply: Sequence[int],
    ) -> Recorded:
        self._tick()
        name = f"{script.session}.t{number}"
        whole = tail if number else [*head, *tail]
        after = done[-1].request_id if done else None
        return Recorded(name, script.session, script.kind, after, np.array(whole, np.int32), np.array(reply, np.int32))


class _Batch:
    """Dialogues with one preamble in one padded KV cache."""

    def __init__(self, model: Any, head: list[int], size: int, seed: list[int]) -> None:
        import torch

        self.model = model
        self.head = head
        self.rng = np.random.default_rng(seed)
        with torch.inference_mode():
            out = model(torch.tensor([head]), use_cache=True, logits_to_keep=1)
            self.cache = out.past_key_values
            self.cache.batch_repeat_interleave(size)
        self.mask = torch.ones(size, len(head), dtype=torch.long)
        self.lengths = np.full(size, len(head))

    def answer(self, tails: Sequence[Sequence[int]], limits: Sequence[int], end: int) -> list[list[int]]:
        """Replies to one turn of all dialogues, ids; empty where a dialogue is over (an empty tail)."""
        width = max(map(len, tails))
        ids, real = np.zeros((2, len(tails), width), np.int64)
        for row, tail in enumerate(tails):
            if tail:
                ids[row, -len(tail) :], real[row, -len(tail) :] = tail, 1
        replies: list[list[int]] = [[] for _ in tails]
        logits = self._forward(ids, real)
        while True:
            chosen = self._sample(logits)
            open_rows = [
                row
                for row, reply in enumerate(replies)
                if tails[row] and len(reply) < limits[row] and (not reply or reply[-1] != end)
            ]
            for row in open_rows:
                replies[row].append(int(chosen[row]))
            if not open_rows:
                return replies
            real = np.zeros((len(tails), 1), np.int64)
            real[open_rows] = 1
            logits = self._forward(np.where(real, chosen[:, None], 0), real)

    def _forward(self, ids: NDArray[np.int64], real: NDArray[np.int64]) -> NDArray[np.float64]:
        """Logits behind each row's last token, float64 [B, vocabulary]. Padding is masked from now on."""
        import torch

        positions = np.maximum(self.lengths[:, None] + np.cumsum(real, 1) - 1, 0)
        self.mask = torch.cat([self.mask, torch.from_numpy(real)], 1)
        self.lengths = self.lengths + real.sum(1)
        with torch.inference_mode():
            out = self.model(
                torch.from_numpy(ids),
                attention_mask=self.mask,
                position_ids=torch.from_numpy(positions),
                cache=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[:, -1].double().numpy()

    def _sample(self, logits: NDArray[np.float64]) -> NDArray[np.int64]:
        """Gumbel's way: the largest of logits / temperature + noise is a sample."""
        return np.argmax(logits / TEMPERATURE + self.rng.gumbel(size=logits.shape), axis=1)


def record_smollm2(num_requests: int, seed: int, tick: Callable[[], None] | None = None) -> list[Recorded]:
    """As `record`, with SmolLM2-135M-Instruct on one thread. ValueError says what to install where it is missing."""
    import torch
    from kvarena.experiments.model.loading import load_smollm2, load_tokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return record(load_smollm2(), load_tokenizer(), num_requests=num_requests, seed=seed, tick=tick)
    finally:
        torch.set_num_threads(threads)


def record(
    model: Any, tokenizer: Any, *, num_requests: int, seed: int = 0, tick: Callable[[], None] | None = None
) -> list[Recorded]:
    """Play `num_requests` requests' worth of dialogues. Raises ValueError for a number below 1."""
    if num_requests < 1:
        raise ValueError(f"num_requests: expected at least 1, found {num_requests}")
    recorder = Recorder(model, tokenizer, seed=seed, tick=tick)
    return [request for group in scripts(seed, num_requests) for request in recorder.play(group)]


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
