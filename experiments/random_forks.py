"""Random forks, and copies before writes, for `random_ops`: only for allocators that support them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, cast

from kvarena.allocators.interface import PageCopy, Reservation, Sequence, SupportsFork
from kvarena.experiments.shadow import Actor, Violation

if TYPE_CHECKING:
    from kvarena.experiments.random_ops import RandomOps


def prepare(driver: RandomOps, wants: list[tuple[Actor, int]]) -> bool:
    """Have every page that the sequences will write to made their own; False when one was refused."""
    if not isinstance(driver.allocator, SupportsFork):
        return True
    for actor, n in wants:
        start, state = actor.seq.num_computed_tokens, driver.shadow.state()
        copies = driver.allocator.prepare_write(actor.seq, start, start + n)
        driver.decisions.append(copies)
        if copies is None:
            driver.shadow.expect_unchanged(state, "refused prepare_write")
            return False
        _carry_out(driver, actor, copies, start // driver.allocator.page_size)
    return True


def _carry_out(driver: RandomOps, actor: Actor, copies: list[PageCopy], column: int) -> None:
    """Copy, and tell the adapters in either way."""
    driver.shadow.move(copies)
    for adapter in driver.adapters if copies else ():
        if driver.random.random() < 0.5:
            adapter.refresh(actor.seq)
        else:
            adapter.update(Reservation(actor.seq, rewritten=(column, column + len(copies))))


def fork(driver: RandomOps, max_live: int, vocabulary: int) -> None:
    """A child of some live sequence, with or without tokens of its own behind what they share."""
    if not driver.live or len(driver.live) >= max_live or not isinstance(driver.allocator, SupportsFork):
        return
    parent = driver.random.choice(list(driver.live.values())).seq
    num_tokens = _shared(driver, parent)
    child = _child_of(driver, parent, num_tokens, vocabulary)
    state = driver.shadow.state()
    made = driver.allocator.fork(parent, child.seq, num_tokens)
    driver.decisions.append(None if made is None else made.copies)
    if made is None:
        driver.shadow.expect_unchanged(state, "refused fork")
        return
    if child.seq.num_computed_tokens != num_tokens:
        raise Violation(f"fork: {child.seq} did not compute the {num_tokens} tokens asked for of its parent {parent}")
    driver.live[child.seq.request_id] = child
    driver.shadow.forget(made.evicted)
    if made.commit is not None:
        driver._apply(made.commit)
    driver.shadow.move(made.copies)
    for adapter in driver.adapters:
        adapter.add(child.seq)
    driver.verify()
    driver._prefill(child, child.seq.num_tokens)


def _shared(driver: RandomOps, parent: Sequence) -> int:
    """How many tokens a child shares: all that are computed, or fewer, where no window has left pages behind."""
    computed = parent.num_computed_tokens
    if computed < 2 or driver.shadow.window is not None or driver.random.random() < 0.6:
        return computed
    return driver.random.randrange(1, computed)


def _child_of(driver: RandomOps, parent: Sequence, num_tokens: int, vocabulary: int) -> Actor:
    driver._count += 1
    own = [driver.random.randrange(vocabulary) for _ in range(driver.random.choice([0, 0, 1, 5]))]
    seq = Sequence(
        f"r{driver._count}",
        [*parent.token_ids[:num_tokens], *own],
        namespace=parent.namespace,
        extra_keys=cast("Iterable[tuple[int, int, Hashable]]", parent.extra_keys),
        declared_max_tokens=parent.declared_max_tokens,
        oracle_tokens=parent.oracle_tokens,
    )
    child = Actor(seq)
    driver._contents.note(child)
    return child
