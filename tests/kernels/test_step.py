"""apply_step and gather_rows: what the packed numbers say, against plain loops, in Triton and in torch."""

from __future__ import annotations

import random

import pytest
import torch
from kvarena.kernels.step import BLOCK, LANES, StepBuffers, apply_decode, apply_step, gather_rows
from support.attention import CUDA, DEVICE

R, COLUMNS, TOKENS = 5, 9, 64
WAYS = ["triton"] if CUDA else ["triton", "torch"]


def make_buffers(page_size: int, gathers: bool, slots_by: str, columns: int = COLUMNS) -> StepBuffers:
    expand = 1 if gathers else page_size

    def filled(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype, device=DEVICE)

    entries = filled(R + 1, columns * expand)
    entries[0] = 0
    gathered = filled(R, columns) if gathers else None
    long = (filled(TOKENS + 3, dtype=torch.int64) for _ in range(2))
    return StepBuffers(filled(4096), entries, gathered, *long, R, page_size, expand, slots_by)  # type: ignore[arg-type]


def pack(buffers: StepBuffers, rows: list[int], lens: list[int], new: list[int], pages: list[list[int]]) -> int:
    """Write header and step pages as the module says; returns where changes may begin."""
    size, count = buffers.page_size, len(rows)
    starts = [sum(new[:b]) for b in range(count + 1)] + [sum(new)] * (R - count)
    step_pages, page_start = [], []
    for row, length, n in zip(pages, lens, new, strict=True):
        page_start.append(len(step_pages))
        step_pages += row[(length - n) // size : -(-length // size)] if n else []
    header = [*rows, *[0] * (R - count), *lens, *[0] * (R - count), *starts, *page_start, *[0] * (R + 1 - count)]
    assert buffers.offsets == (0, R, 2 * R, 3 * R + 1, len(header))
    numbers = header + step_pages
    buffers.packed[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    return len(numbers)


@pytest.mark.parametrize("slots_by", WAYS)
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_slots_and_positions_of_random_steps(page_size: int, slots_by: str) -> None:
    rng = random.Random(page_size)
    for _ in range(12):
        buffers = make_buffers(page_size, True, slots_by)
        lens = [rng.randint(0, COLUMNS * page_size) for _ in range(rng.randint(0, R))]
        new = [min(rng.choice([0, 1, 1, length]), length, 12) for length in lens]
        pages = [[rng.randint(1, 9999) for _ in range(COLUMNS)] for _ in lens]
        rows = rng.sample(range(1, R + 1), len(lens))
        at = pack(buffers, rows, lens, new, pages)
        num_out = sum(new) + rng.choice([0, 3])
        apply_step(buffers, len(lens), num_out, max([*new, num_out - sum(new)]), 0, at)
        positions = [p for length, n in zip(lens, new, strict=True) for p in range(length - n, length)]
        owners = [b for b, n in enumerate(new) for _ in range(n)]
        slots = [pages[b][p // page_size] * page_size + p % page_size for b, p in zip(owners, positions, strict=True)]
        rest = num_out - sum(new)
        assert buffers.slots[:num_out].tolist() == slots + [-1] * rest
        assert buffers.positions[:num_out].tolist() == positions + [0] * rest
        assert set(buffers.slots[num_out:].tolist()) == {77}  # nothing is written past the step


@pytest.mark.parametrize("slots_by", WAYS)
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("apart", [False, True], ids=["in the step's copy", "in a copy of their own"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_changes_land_where_they_belong_and_nowhere_else(
    page_size: int, apart: bool, gathers: bool, slots_by: str
) -> None:
    rng = random.Random(7)
    for count in (1, 2, 40):
        buffers = make_buffers(page_size, gathers, slots_by, columns=30)
        wanted, gathered = buffers.entries.clone(), None if buffers.gathered is None else buffers.gathered.clone()
        places = [0, 3, -1, 0, -1, 4]  # of rows 0 .. 5 in the gathered batch
        cells = rng.sample([(row, column) for row in range(1, R + 1) for column in range(30)], count)
        pages = [rng.randint(1, 9999) for _ in cells]
        for (row, column), page in zip(cells, pages, strict=True):
            if gathered is None:
                first = column * page_size
                wanted[row, first : first + page_size] = page * page_size + torch.arange(page_size, device=DEVICE)
            else:
                wanted[row, column] = page
                if places[row] >= 0:
                    gathered[places[row], column] = page
        changes = [*(row for row, _ in cells), *(column for _, column in cells), *pages]
        changes += [places[row] for row, _ in cells] if gathers else []
        numbers = torch.tensor(changes, dtype=torch.int32, device=DEVICE)
        at = pack(buffers, [2], [1], [1], [[5]])
        if not apart:
            buffers.packed[at : at + len(changes)] = numbers
        apply_step(buffers, 1, 1, 1, count, 0 if apart else at, numbers if apart else None)
        assert torch.equal(buffers.entries, wanted)
        assert gathered is None or torch.equal(buffers.gathered, gathered)  # type: ignore[arg-type]
        assert buffers.slots[:1].tolist() == [5 * page_size]


@pytest.mark.parametrize("slots_by", WAYS)
def test_changes_alone_leave_the_step_as_it_was(slots_by: str) -> None:
    buffers = make_buffers(4, True, slots_by)
    apply_step(buffers, -1, 0, 0, 1, 0, torch.tensor([2, 3, 9, -1], dtype=torch.int32, device=DEVICE))
    apply_step(buffers, -1, 0, 0, 0, 0)
    assert buffers.entries[2, 3] == 9
    assert (buffers.entries == 9).sum() == 1
    for tensor in (buffers.slots, buffers.positions, buffers.packed, buffers.gathered):
        assert set(tensor.flatten().tolist()) == {77}  # type: ignore[union-attr]


@pytest.mark.parametrize("slots_by", WAYS)
def test_a_long_prefill_is_shared_by_programs(slots_by: str) -> None:
    tokens = 3 * BLOCK + 5
    long = [torch.full((tokens + 9,), 77, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    packed, entries = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (4096, 2 * 4096))
    buffers = StepBuffers(packed, entries.view(2, -1), None, *long, 1, 4, 4, slots_by)  # type: ignore[arg-type]
    pages = list(range(900, 900 - -(-tokens // 4) - 1, -1))
    numbers = [1, tokens + 2, 0, tokens, 0, 0, *pages]
    buffers.packed[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    apply_step(buffers, 1, tokens + 9, tokens, 0, len(numbers))
    assert buffers.slots.tolist() == [pages[p // 4] * 4 + p % 4 for p in range(2, tokens + 2)] + [-1] * 9


@pytest.mark.parametrize("slots_by", WAYS)
def test_gathered_rows_are_copies_and_rows_behind_the_batch_are_cleared(slots_by: str) -> None:
    buffers = make_buffers(4, True, slots_by, columns=BLOCK + 4)
    buffers.entries[1:] = torch.arange(R * (BLOCK + 4), device=DEVICE).view(R, -1)
    pack(buffers, [4, 2], [1, 1], [1, 1], [[5], [6]])
    gather_rows(buffers, 2, BLOCK + 2, 4)
    gathered = buffers.gathered
    assert gathered is not None
    assert torch.equal(gathered[:2, : BLOCK + 2], buffers.entries[[4, 2], : BLOCK + 2])
    assert set(gathered[:2, BLOCK + 2 :].flatten().tolist()) | set(gathered[4].tolist()) == {77}
    assert not gathered[2:4].any()
    gather_rows(buffers, 0, 0, 0)
    gather_rows(buffers, 0, 0, 5)
    assert not gathered.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expand": 2}, "expand: expected 1 or the page size, 4, found 2"),
        ({"expand": 4}, "gathered: expected None where a page is several entries"),
        ({"packed": torch.zeros(9)}, "packed: expected torch.int32"),
        ({"slots": torch.zeros(9)}, "slots: expected torch.int64"),
    ],
)
def test_buffers_that_do_not_fit_raise(changes: dict, message: str) -> None:
    fields = dict(vars(make_buffers(4, True, WAYS[-1])))
    fields = {name: value for name, value in fields.items() if not name.startswith("_")}
    with pytest.raises(ValueError, match=message):
        StepBuffers(**{**fields, **changes})


def test_a_table_without_gathered_rows_is_not_gathered() -> None:
    with pytest.raises(ValueError, match="no gathered rows"):
        gather_rows(make_buffers(4, False, WAYS[-1]), 1, 1, 1)


def test_the_benchmark_calls_run_and_write_what_they_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvarena.experiments.bench import adapter_cells

    monkeypatch.setattr(adapter_cells, "DEVICE", DEVICE)
    monkeypatch.setattr(adapter_cells, "PROMPT", 64)
    monkeypatch.setattr(adapter_cells, "REQUESTS", 6)
    for kind in ("block_table", "req_to_token"):
        for _, _, call in adapter_cells._host_calls(kind):
            call()
            call()
    for page_size in (1, 16):
        step = adapter_cells._packed("block_table", page_size, [64])
        pages = 64 // page_size
        apply_step(step, 1, 64, 64, pages, 4 * 6 + 2 + pages)
        slots = step.entries[1].repeat_interleave(page_size) * page_size + torch.arange(64, device=DEVICE) % page_size
        assert torch.equal(step.slots, slots)
        assert torch.equal(step.gathered[0], step.entries[1])  # type: ignore[index]
    calls = list(adapter_cells._device_calls())
    assert len(calls) == 14
    for _, call in calls:
        call()


@pytest.mark.parametrize("slots_by", WAYS)
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_decode_step_appends_pages_and_names_slots(page_size: int, gathers: bool, slots_by: str) -> None:
    """New pages for some, at the new token's column or behind it; what lies beyond the batch stays."""
    rng = random.Random(page_size)
    for _ in range(12):
        buffers = make_buffers(page_size, gathers, slots_by)
        count, expand = rng.randint(0, R), buffers.expand
        rows = rng.sample(range(1, R + 1), count)
        buffers.packed[:count] = torch.tensor(rows, dtype=torch.int32)
        computed = [rng.randrange((COLUMNS - 1) * page_size) for _ in rows]
        columns = [p // page_size + rng.randint(0, 1) for p in computed]
        new = [rng.choice([-1, rng.randint(1, 9999)]) for _ in rows]
        held = [rng.randint(1, 9999) for _ in rows]
        for row, p, page in zip(rows, computed, held, strict=True):
            first = p // page_size * expand
            buffers.entries[row, first : first + expand] = page * expand + torch.arange(expand)
        wanted, gathered = buffers.entries.clone(), None if buffers.gathered is None else buffers.gathered.clone()
        for b, (row, column, page) in enumerate(zip(rows, columns, new, strict=True)):
            if page >= 0:
                wanted[row, column * expand : (column + 1) * expand] = page * expand + torch.arange(expand)
                if gathered is not None:
                    gathered[b, column] = page
        inbox = torch.full((3 * R,), -5, dtype=torch.int32)  # columns without a new page may hold anything
        for at, numbers in enumerate((computed, new, [c if n >= 0 else -5 for c, n in zip(columns, new, strict=True)])):
            inbox[at * R : at * R + count] = torch.tensor(numbers, dtype=torch.int32)
        num_out = count + rng.choice([0, 3])
        apply_decode(buffers, inbox.to(DEVICE), count, num_out)
        pages = [
            n if n >= 0 and c == p // page_size else old
            for n, c, p, old in zip(new, columns, computed, held, strict=True)
        ]
        slots = [page * page_size + p % page_size for page, p in zip(pages, computed, strict=True)]
        assert buffers.slots[:num_out].tolist() == slots + [-1] * (num_out - count)
        assert buffers.positions[:num_out].tolist() == computed + [0] * (num_out - count)
        assert buffers.packed[R : 2 * R].tolist() == [p + 1 for p in computed] + [77] * (R - count)
        assert set(buffers.slots[num_out:].tolist()) == set(buffers.positions[num_out:].tolist()) == {77}
        assert torch.equal(buffers.entries, wanted)
        assert gathered is None or torch.equal(buffers.gathered, gathered)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots_by", WAYS)
def test_a_decode_step_of_more_requests_than_a_program_has_lanes(slots_by: str) -> None:
    count = 2 * LANES + 5
    packed = torch.zeros(2 * count, dtype=torch.int32, device=DEVICE)
    packed[:count] = torch.arange(count, 0, -1)
    entries = torch.zeros(count + 1, 4, dtype=torch.int32, device=DEVICE)
    long = [torch.full((count + 7,), 77, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    buffers = StepBuffers(packed, entries, torch.zeros_like(entries[1:]), *long, count, 4, 1, slots_by)  # type: ignore[arg-type]
    inbox = torch.arange(3 * count, dtype=torch.int32, device=DEVICE)
    inbox[:count], inbox[2 * count :] = 5, 1
    apply_decode(buffers, inbox, count, count + 7)
    assert buffers.slots.tolist() == [4 * (count + b) + 1 for b in range(count)] + [-1] * 7
    assert buffers.gathered[:, 1].tolist() == list(range(count, 2 * count))  # type: ignore[index]
    assert entries[1:, 1].tolist() == list(range(2 * count - 1, count - 1, -1))
