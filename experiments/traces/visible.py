"""Measures what a trace can show, from its requests in arrival order: see `Visible`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.experiments.traces.base import Outputs, Request, Visible

if TYPE_CHECKING:
    from numpy.typing import NDArray

IN_FLIGHT_S = 30.0
"""A request is taken to be possibly still running this long after its arrival (1,000 tokens at 30 ms each)."""

_SHORTEST_SHARED = 16
_UNSEEN = -2


class PrefixHasher:
    """64-bit hashes of all prefixes of a token sequence at once, for measuring, never for caching decisions.

    hash(t[:n]) = sum of mix(t[i]) x r^i mod 2^64. Equal prefixes have equal hashes; O(n), vectorised.
    """

    _RATIO = 0x9E3779B97F4A7C15

    def __init__(self) -> None:
        self._powers = np.ones(1, np.uint64)

    def hashes(self, tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
        """uint64 [n]: entry i is the hash of tokens[: i + 1]."""
        if len(tokens) > len(self._powers):
            ratios = np.full(2 * len(tokens), self._RATIO, np.uint64)
            ratios[0] = 1
            self._powers = np.cumprod(ratios, dtype=np.uint64)
        return np.cumsum(self._mix(tokens) * self._powers[: len(tokens)], dtype=np.uint64)

    @staticmethod
    def _mix(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(29))


class VisibleMeasure:
    """Feed every request in arrival order, then ask for `outputs` and `publish_time`.

    `replies` counts replies with ids and `returned` those that a later prompt contains (token grain: the later prompt
    starts with prompt and whole reply; id grain: it contains an id that this reply was the first to bring). With
    `exhaustive=False` counting stops once the answer is known.
    """

    def __init__(self, *, exhaustive: bool = False) -> None:
        self.exhaustive = exhaustive
        self.replies = 0
        self.returned = 0
        self.sessions = False
        self.publish_time = False
        self._hasher = PrefixHasher()
        self._scopes: dict[Any, _Replies] = {}
        self._output_owner: dict[int, int] = {}
        self._returned_replies: set[int] = set()
        self._first_seen = np.zeros(1024)
        self._known_ids = 0
        self._key_seen: dict[Any, float] = {}

    def feed(self, request: Request, time_s: float | None) -> None:
        """Takes one request; time_s None = the trace has no arrival times."""
        self.sessions = self.sessions or request.session_id is not None
        if request.hash_ids is not None:
            self._feed_ids(request, request.hash_ids, time_s)
        elif request.token_ids is not None:
            self._feed_tokens(request, request.token_ids, time_s)

    def outputs(self) -> Outputs:
        if not self.replies:
            return "none"
        return "recorded" if self.returned else "unreachable"

    def visible(self, grain: int, *, reuse: bool = True) -> Visible:
        return Visible(grain, self.publish_time, self.outputs(), self.sessions, reuse)

    def _feed_ids(self, request: Request, ids: NDArray[np.int32], time_s: float | None) -> None:
        if self._output_owner and (self.exhaustive or not self.returned):
            self._mark_returned({self._output_owner[i] for i in ids.tolist() if i in self._output_owner})
        known = self._known_ids
        if time_s is not None and not self.publish_time:
            old = ids[ids < known]
            self.publish_time = bool((self._first_seen[old] >= time_s - IN_FLIGHT_S).any())
        if request.output_ids is not None and len(request.output_ids):
            self._own(request.output_ids, max(known, int(ids.max()) + 1))
        self._see(int(ids.max()) + 1, time_s)

    def _own(self, outputs: NDArray[np.int32], fresh: int) -> None:
        """Notes the ids that this reply is the first to bring: those from `fresh` on that no reply owns."""
        for i in outputs.tolist():
            if i >= fresh:
                self._output_owner.setdefault(i, self.replies)
        self.replies += 1

    def _see(self, count: int, time_s: float | None) -> None:
        if count > len(self._first_seen):  # twice the room each time: a copy per request would be quadratic
            room = np.zeros(max(count, 2 * len(self._first_seen)))
            room[: self._known_ids] = self._first_seen[: self._known_ids]
            self._first_seen = room
        self._first_seen[self._known_ids : count] = time_s or 0.0
        self._known_ids = max(self._known_ids, count)

    def _feed_tokens(self, request: Request, tokens: NDArray[np.int32], time_s: float | None) -> None:
        outputs = request.output_ids
        if self._known_already(outputs):
            self.replies += outputs is not None and len(outputs) > 0
            return
        whole = tokens if outputs is None else np.concatenate([tokens, outputs])
        hashes = self._hasher.hashes(whole)
        if time_s is not None and not self.publish_time:
            self._feed_keys(hashes[: len(tokens)], time_s, request.namespace)
        where = (request.namespace, request.session_id)
        scope = self._scopes.get(where)
        if scope is not None and (self.exhaustive or not self.returned):
            self._mark_returned(scope.contained_in(hashes[: len(tokens)]))
        if outputs is not None and len(outputs):
            self._scopes.setdefault(where, _Replies()).add(len(whole), hashes[-1], self.replies)
            self.replies += 1

    def _known_already(self, outputs: NDArray[np.int32] | None) -> bool:
        """Whether this request can change no answer, so that its tokens need no hashing."""
        no_replies = outputs is None and not self._scopes
        return not self.exhaustive and self.publish_time and (self.returned > 0 or no_replies)

    def _feed_keys(self, hashes: NDArray[np.uint64], time_s: float, namespace: Any) -> None:
        """Prefixes at 16, 32, 64 ... tokens stand for all: a few keys a request, whatever its length."""
        length = _SHORTEST_SHARED
        while length <= len(hashes):
            key = (namespace, length, int(hashes[length - 1]))
            if key not in self._key_seen:
                self._key_seen[key] = time_s
            elif self._key_seen[key] >= time_s - IN_FLIGHT_S:
                self.publish_time = True
            length *= 2

    def _mark_returned(self, replies: set[int]) -> None:
        self._returned_replies |= replies
        self.returned = len(self._returned_replies)


class _Replies:
    """Ends of the replies of one session (or of a trace without sessions): which of them does a prompt contain?"""

    _LENGTH_MIX = 0xD6E8FEB86659FD93

    def __init__(self) -> None:
        self.owner: dict[int, int] = {}
        self._lengths: dict[int, None] = {}

    def add(self, length: int, whole_hash: np.uint64, reply: int) -> None:
        self._lengths[length] = None
        self.owner[int(self._keys(np.array([length]), np.array([whole_hash]))[0])] = reply

    def contained_in(self, hashes: NDArray[np.uint64]) -> set[int]:
        """Replies whose prompt and text the prompt with these prefix hashes starts with."""
        lengths = np.fromiter(self._lengths, np.int64, len(self._lengths))
        lengths = lengths[lengths <= len(hashes)]
        keys = self._keys(lengths, hashes[lengths - 1]).tolist()
        return {self.owner[key] for key in keys if key in self.owner}

    def _keys(self, lengths: NDArray[np.int64], hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return hashes ^ (lengths.astype(np.uint64) * np.uint64(self._LENGTH_MIX))


class ChainCheck:
    """Counts ids that stand behind different ids on different rows (prefix ids never do, content ids do), and ids that
    are a cut-off last block on one row and longer on another."""

    def __init__(self) -> None:
        self._parents = np.full(1024, _UNSEEN, np.int64)
        self._tokens = np.zeros(1024, np.int64)
        self._bad: set[int] = set()
        self._uneven: set[int] = set()

    @property
    def unchained(self) -> int:
        return len(self._bad)

    @property
    def uneven(self) -> int:
        return len(self._uneven)

    def feed(self, request: Request) -> None:
        """Takes one request with dense ids; requests with token ids say nothing here."""
        ids = request.hash_ids
        if ids is None:
            return
        self._make_room(int(ids.max()) + 1)
        self._check_lengths(request, ids)
        parents = np.concatenate([[-1], ids[:-1]])
        known = self._parents[ids]
        self._bad.update(ids[(known != parents) & (known != _UNSEEN)].tolist())
        self._parents[ids] = np.where(known == _UNSEEN, parents, known)

    def _check_lengths(self, request: Request, ids: NDArray[np.int32]) -> None:
        tokens = np.full(len(ids), request.grain, np.int64)
        tokens[-1] = request.num_prompt_tokens - (len(ids) - 1) * request.grain
        known = self._tokens[ids]
        self._uneven.update(ids[(known != tokens) & (known != 0)].tolist())
        self._tokens[ids] = np.maximum(tokens, known)

    def _make_room(self, top: int) -> None:
        if top > len(self._parents):
            added = 2 * top - len(self._parents)
            self._parents = np.concatenate([self._parents, np.full(added, _UNSEEN, np.int64)])
            self._tokens = np.concatenate([self._tokens, np.zeros(added, np.int64)])
