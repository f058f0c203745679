"""A decode batch decides as the list form of reserve, whatever happens between its steps."""

import random
from typing import Any

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.decode_batch import DecodeBatch, StepReservation
from kvarena.allocators.interface import EventKind, KVAllocator, Release, Sequence
from kvarena.allocators.token_batch import MOST_COLUMNS


def make(num_pages: int, *, events: bool = True, **fields: Any) -> KVAllocator:
    allocator = make_allocator({"kind": "token", **fields}, num_pages=num_pages)
    assert type(allocator.decode_batch([])) is not DecodeBatch  # a batch of its own is what is tested
    allocator.events.enabled = events
    return allocator


def prefill(allocator: KVAllocator, seq: Sequence) -> bool:
    if allocator.admit(seq) is None:
        return False
    allocator.commit([(seq, seq.num_prefill_tokens)])
    return True


def outcome(step: StepReservation | None) -> Any:
    if step is None:
        return None
    return [(list(r.page_ids), list(r.evicted), list(r.duplicates), r.rewritten) for r in step.reservations()]


class Twin:
    """The same requests on an allocator driven by its own batch and on one driven by the list form."""

    def __init__(self, **fields: Any) -> None:
        self.sides = [make(**fields), make(**fields)]
        self.live: list[dict[str, Sequence]] = [{}, {}]

    def arrive(self, name: str, tokens: list[int]) -> None:
        admitted = []
        for allocator, live in zip(self.sides, self.live, strict=True):
            seq = Sequence(name, tokens)
            admitted.append(prefill(allocator, seq))
            if admitted[-1]:
                live[name] = seq
        assert admitted[0] == admitted[1]

    def leave(self, name: str, reason: Release) -> None:
        for allocator, live in zip(self.sides, self.live, strict=True):
            allocator.release([live.pop(name)], reason)

    def steps(self, names: list[str], count: int, rng: random.Random) -> None:
        batches = [self.sides[0].decode_batch([self.live[0][n] for n in names])]
        batches.append(DecodeBatch(self.sides[1], [self.live[1][n] for n in names]))
        late = rng.random() < 0.3  # tokens come after their step
        for _ in range(count):
            if not late:
                self.append(names)
            taken = [batch.reserve() for batch in batches]
            results = [outcome(step) for step in taken]
            assert results[0] == results[1]
            if taken[0] is not None and taken[0].computed is not None:
                assert taken[0].computed.tolist() == [self.live[0][name].num_computed_tokens for name in names]
            if results[0] is None:
                for live in self.live:
                    for name in names if not late else ():
                        live[name].pop()
                break
            if rng.random() < 0.1:
                assert outcome(batches[0].reserve()) == outcome(batches[1].reserve())
            for batch in batches:
                batch.commit()
            assert len({str([live[name] for name in names]) for live in self.live}) == 1
            if late:
                self.append(names)
            if rng.random() < 0.2:  # another verb touches a member: the batch has to notice
                name = rng.choice(names)
                written = rng.randrange(4)
                for allocator, live in zip(self.sides, self.live, strict=True):
                    self.write_beside(allocator, live[name], written)
        self.compare()

    def write_beside(self, allocator: KVAllocator, seq: Sequence, written: int) -> None:
        """Three slots more, of which some are written at once."""
        if allocator.extend(seq, 3) is not None and written:
            for _ in range(seq.num_computed_tokens + written - seq.num_tokens):
                seq.append(7)
            allocator.commit([(seq, seq.num_computed_tokens + written)])

    def append(self, names: list[str]) -> None:
        for live in self.live:
            for name in names:
                live[name].append(7)

    def fork(self, name: str, parent: str) -> None:
        forks = []
        for allocator, live in zip(self.sides, self.live, strict=True):
            child = Sequence(name, live[parent].token_ids, num_prompt_tokens=live[parent].num_prompt_tokens)
            forks.append(allocator.fork(live[parent], child))
            if forks[-1] is not None:
                live[name] = child
        assert (forks[0] is None) == (forks[1] is None)
        for writer in (parent, name):
            if writer in self.live[0] and None in [self.prepare(side, writer) for side in (0, 1)]:
                self.leave(writer, Release.PREEMPT)

    def prepare(self, side: int, name: str) -> Any:
        seq = self.live[side][name]
        start = seq.num_computed_tokens
        return self.sides[side].prepare_write(seq, start, start + 20)

    def compare(self) -> None:
        assert self.sides[0].capacity() == self.sides[1].capacity()
        events = [[(e.kind, e.request_id, e.page_ids) for e in side.events.drain()] for side in self.sides]
        assert events[0] == events[1]
        for side in self.sides:
            side.check()
        for name in self.live[0]:
            one, two = (side.page_ids(live[name]) for side, live in zip(self.sides, self.live, strict=True))
            assert one == two


@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": 1, "num_pages": 200},
        {"page_size": 4, "num_pages": 60},
        {"page_size": 16, "num_pages": 24},
        {"page_size": 4, "num_pages": 60, "demand_slack": 0},
        {"page_size": 3, "num_pages": 60, "demand_slack": 2},
        {"page_size": 4, "num_pages": 60, "need_sort": True},
        {"page_size": 1, "num_pages": 200, "prefix_cache": False},
        {"kind": "block", "page_size": 1, "num_pages": 200},
        {"kind": "block", "page_size": 4, "num_pages": 60},
        {"kind": "block", "page_size": 4, "num_pages": 60, "form": "hashed"},
        {"kind": "block", "page_size": 16, "num_pages": 24, "form": "hashed"},
        {"kind": "block", "page_size": 4, "num_pages": 60, "sliding_window": 9},
        {"kind": "block", "page_size": 4, "num_pages": 60, "prefix_cache": False},
        *(
            {"kind": "block", "page_size": size, "num_pages": num_pages, "form": form, "events": False}
            for form in ("hashed", "runs")
            for size, num_pages in ((1, 200), (4, 60), (16, 24))
        ),
        {"kind": "block", "page_size": 4, "num_pages": 60, "sliding_window": 9, "events": False},
    ],
    ids=str,
)
def test_a_batch_step_decides_as_the_list_form(fields: dict[str, Any]) -> None:
    rng = random.Random(str(fields))
    twin = Twin(**fields)
    for number in range(120):
        verb = rng.random()
        if verb < 0.45 or not twin.live[0]:
            twin.arrive(f"r{number}", [rng.randint(0, 1) for _ in range(rng.randint(1, 30))])
        elif verb < 0.5 and "sliding_window" not in fields:
            twin.fork(f"r{number}", rng.choice(sorted(twin.live[0])))
        elif verb < 0.65:
            twin.leave(rng.choice(sorted(twin.live[0])), rng.choice([Release.FINISH, Release.PREEMPT]))
        else:
            names = rng.sample(sorted(twin.live[0]), rng.randint(1, len(twin.live[0])))
            twin.steps(names, rng.randint(1, 20), rng)
        twin.compare()


@pytest.mark.parametrize(("kind", "refusals"), [("token", 2), ("block", 1)])
def test_a_step_without_room_takes_nothing_and_says_so(kind: str, refusals: int) -> None:
    allocator = make(2, page_size=4, kind=kind)
    seqs = [Sequence(name, [number] * 4) for number, name in enumerate("ab")]
    for seq in seqs:
        prefill(allocator, seq)
    allocator.events.drain()
    batch = allocator.decode_batch(seqs)
    assert batch.reserve() is None
    assert [event.kind for event in allocator.events.drain()] == [EventKind.REFUSE] * refusals
    assert allocator.room() == (0, 0)
    allocator.release([seqs[0]], Release.PREEMPT)
    alone = allocator.decode_batch(seqs[1:])
    assert alone.reserve() is not None
    alone.commit()
    assert seqs[1].num_computed_tokens == 5
    allocator.check()


@pytest.mark.parametrize("form", ["hashed", "runs"])
@pytest.mark.parametrize("events", [True, False])
def test_a_step_publishes_and_evicts_member_by_member(form: str, events: bool) -> None:
    """a fills page 3 while page 2 still serves the same text, and then b takes page 2."""
    for own in (True, False):
        allocator = make(4, page_size=2, kind="block", form=form, events=events)
        old = Sequence("old", [7, 1, 7, 2])
        prefill(allocator, old)
        allocator.release([old], Release.FINISH)
        seqs = [Sequence("a", [7, 1, 7]), Sequence("b", [8, 9])]
        for seq in seqs:
            prefill(allocator, seq)
        batch = allocator.decode_batch(seqs) if own else DecodeBatch(allocator, seqs)
        seqs[0].append(2)
        assert outcome(batch.reserve()) == [([], [], [3], (0, 0)), ([2], [2], [], (0, 0))]
        assert allocator.capacity().duplicates == 0
        allocator.check()


@pytest.mark.parametrize("form", ["hashed", "runs"])
def test_a_step_behind_a_length_that_was_raised_without_slots_takes_all_that_is_missing(form: str) -> None:
    outcomes = []
    for own in (True, False):
        allocator = make(8, page_size=4, kind="block", form=form, events=False)
        seq = Sequence("a", range(4))
        prefill(allocator, seq)
        for token in range(9):
            seq.append(token)
        seq.num_computed_tokens = 12
        batch = allocator.decode_batch([seq]) if own else DecodeBatch(allocator, [seq])
        outcomes.append(outcome(batch.reserve()))
    assert outcomes[0] == outcomes[1] == [([2, 3, 4], [], [], (0, 0))]


@pytest.mark.parametrize("form", ["hashed", "runs"])
def test_steps_behind_the_last_name_of_a_trace_publish_nothing_and_decide_as_the_list_form(form: str) -> None:
    """A trace names a prompt's pages, no reply's."""
    outcomes = []
    for own in (True, False):
        allocator = make(8, page_size=4, kind="block", form=form, events=False)
        seq = Sequence("a", page_hashes=[1, 2], num_tokens=8)
        prefill(allocator, seq)
        batch = allocator.decode_batch([seq]) if own else DecodeBatch(allocator, [seq])
        for _ in range(9):
            seq.append(0)
            outcomes.append(outcome(batch.reserve()))
            batch.commit()
            allocator.check()
        released = allocator.release([seq], Release.FINISH)
        outcomes.append((list(released.freed), list(released.cached)))
    assert outcomes[:10] == outcomes[10:]
    assert outcomes[9] == ([5, 4, 3], [2, 1])


@pytest.mark.parametrize("kind", ["token", "block"])
@pytest.mark.parametrize("own", [True, False])
def test_misuse_of_a_batch_raises(own: bool, kind: str) -> None:
    allocator = make(20, page_size=4, kind=kind)
    seq = Sequence("a", range(4))
    allocator.admit(seq)
    batch_of = allocator.decode_batch if own else lambda seqs: DecodeBatch(allocator, seqs)
    with pytest.raises(ValueError, match="'a' is not decoding"):
        batch_of([seq])
    allocator.commit([(seq, 4)])
    batch = batch_of([seq])
    with pytest.raises(ValueError, match=r"without a reserved slot|cannot commit 5 tokens|commits 5 tokens"):
        batch.commit()
    with pytest.raises(ValueError, match="twice"):
        batch_of([seq, seq])
    allocator.release([seq], Release.FINISH)
    seq.num_computed_tokens = 4
    with pytest.raises(ValueError, match="'a' is not live"):
        batch.reserve()


@pytest.mark.parametrize("kind", ["token", "block"])
def test_a_member_in_two_batches_keeps_its_row_whole(kind: str) -> None:
    allocator = make(64, page_size=4, kind=kind)
    seqs = [Sequence(name, [number] * 4) for number, name in enumerate("ab")]
    for seq in seqs:
        prefill(allocator, seq)
    first, second = allocator.decode_batch(seqs), allocator.decode_batch(seqs)
    for _ in range(9):
        for batch in (first, second):
            assert batch.reserve() is not None
            batch.commit()
            for seq in seqs:
                seq.append(1)
            allocator.check()
    assert [seq.num_computed_tokens for seq in seqs] == [22, 22]
    assert [len(allocator.page_ids(seq)) for seq in seqs] == [6, 6]


@pytest.mark.parametrize("own", [True, False])
def test_a_batch_writes_into_no_page_that_a_fork_shares(own: bool) -> None:
    allocator: Any = make(20, page_size=4, kind="block")
    parent, child = Sequence("p", range(6)), Sequence("c", range(6))
    prefill(allocator, parent)
    assert allocator.fork(parent, child) is not None
    child.append(6)
    batch = allocator.decode_batch([child]) if own else DecodeBatch(allocator, [child])
    assert batch.reserve() is not None
    with pytest.raises(ValueError, match="call prepare_write before"):
        batch.commit()
    assert allocator.prepare_write(child, 6, 7)
    batch.commit()
    assert child.num_computed_tokens == 7
    allocator.check()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("form", ["hashed", "runs"])
def test_a_scheduler_that_ran_ahead_of_its_results_may_go_on_in_a_batch(form: str, own: bool) -> None:
    allocator = make(20, page_size=4, kind="block", form=form)
    seq = Sequence("a", range(6))
    prefill(allocator, seq)
    assert allocator.extend(seq, 1) is not None
    seq.num_computed_tokens += 1  # in flight
    batch = allocator.decode_batch([seq]) if own else DecodeBatch(allocator, [seq])
    assert batch.reserve() is not None
    seq.append(6)
    seq.append(7)
    batch.commit()
    allocator.check()
    assert allocator.capacity().wasted_slots == 0


def seen_over_many_steps(*, own: bool) -> list[Any]:
    """What others see of four requests that decode for so long that whole steps are written into their rows twice."""
    allocator = make(2000)
    seqs = [Sequence(name, [number] * (number + 2)) for number, name in enumerate("abcd")]
    for seq in seqs:
        assert prefill(allocator, seq)
    batch = allocator.decode_batch(seqs) if own else DecodeBatch(allocator, seqs)
    seen: list[Any] = []
    for number in range(2 * MOST_COLUMNS + 9):
        for seq in seqs:
            seq.append(number)
        assert batch.reserve() is not None
        batch.commit()
        if number == 40:
            seen.append(list(allocator.page_ids(seqs[1])))
        if number == 50:
            seen.append(allocator.capacity())
        if number == 60:
            allocator.check()
            seen.append(repr(allocator))
    released = allocator.release(seqs, Release.FINISH)
    allocator.check()
    return [*seen, list(released.freed), list(released.cached)]


def test_whole_steps_reach_the_rows_whoever_looks_at_them_and_however_many_there_are() -> None:
    assert seen_over_many_steps(own=True) == seen_over_many_steps(own=False)
