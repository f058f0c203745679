"""From owned pages to what kernels take: a page table, a slot mapping and the batch's offsets, on the device.

Two adapters, each for any allocator and any page size S:

    BlockTableAdapter   entries hold page ids; each step gathers the batch's rows, so rows = 0, 1, 2, ...
    ReqToTokenAdapter   entries hold slot ids, one a token; rows name each request's row in the whole table

Both keep a device row for each request and send only what changed: `update` notes the entries that a
`Reservation` appended or a `Reservation` or `Commit` rewrote, `batch` sends them together with the batch's rows
and lengths in one host-to-device copy. The order of calls in a step:

    reservations = allocator.reserve(wants);  adapter.update_all(reservations)   # new sequences get a row
    step = decode_batch.reserve();            adapter.update_step(step)          # all of a decode batch at once
    batch = adapter.batch(seqs, num_new_tokens)                                  # before commit
    ... kernels on batch.table, batch.slot_mapping, batch.query_start_loc ...
    adapter.update_all(allocator.commit(done))                                   # merged duplicates: other pages
    allocator.release([seq], reason);  adapter.remove(seq)                       # the row goes with its pages

Row 0 is padding: no request has it and its entries are 0, the page that nobody owns. A batch padded for a
captured graph gets rows 0 with seq_len 0 and slots -1, so padded work reads and writes nothing.

Example, S = 4: a has 6 tokens in pages [5, 2] and adds 1; b has nothing and brings 3, in page [7]; padded to
3 requests and 6 tokens.

    seq_lens         [7, 3, 0]            positions      [6, 0, 1, 2, 0, 0]
    query_start_loc  [0, 1, 4, 4]         slot_mapping   [10, 28, 29, 30, -1, -1]      (10 = 2 x 4 + 6 % 4)
    block_table      entries [[5, 2], [7, .], [0, .]], rows [0, 1, 2], tokens_per_entry 4
    req_to_token     entries [[0 ...], [20, 21, 22, 23, 8, 9, 10, 11], [28, 29, 30, 31, ...]], rows [1, 2, 0],
                     tokens_per_entry 1
    to_csr(4)        kv_indptr [0, 2, 3, 3], kv_indices [5, 2, 7], last_page_len [3, 3, 0]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from kvarena.allocators._rows import PageRows, PageSource
from kvarena.allocators.decode_batch import StepReservation
from kvarena.allocators.interface import AllocatorError, Commit, Reservation, Sequence
from kvarena.kernels.page_table import PageTable
from numpy.typing import NDArray
from torch import Tensor

MIN_STAGED_PAGES = 1024  # changed pages that travel with the batch's header; more of them go in a second copy


@dataclass(frozen=True)
class Batch:
    """One step's batch on the device. The tensors are views of the adapter's buffers: valid until its next batch.

    table            PageTable of B requests, padded ones included
    slot_mapping     int64 [T]; where each new token's KV goes, -1 for padded tokens
    query_start_loc  int32 [B + 1]; request b's new tokens are query_start_loc[b] .. query_start_loc[b + 1]
    positions        int64 [T]; position of each new token in its sequence, 0 for padded tokens
    num_requests, num_tokens      without padding
    max_query_len, max_seq_len    longest of the batch, tokens, known on the host
    """

    table: PageTable
    slot_mapping: Tensor
    query_start_loc: Tensor
    positions: Tensor
    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int


class _TableAdapter(ABC):
    """Rows, changes and the upload, the same for both tables.

    allocator         any `PageSource`: an allocator
    max_requests      rows, and requests a batch may have, padding included
    max_tokens        tokens a row can hold; rounded up to whole pages
    max_batch_tokens  new tokens a batch may have, padding included
    device            where the buffers live
    slots_by          "triton": the kernel, for S a power of two or a req_to_token. "torch": the same rule in
                      torch, for a CPU without the interpreter
    """

    tokens_per_entry: int

    def __init__(
        self,
        allocator: PageSource,
        *,
        max_requests: int,
        max_tokens: int,
        max_batch_tokens: int = 8192,
        device: str | torch.device = "cpu",
        slots_by: Literal["triton", "torch"] = "triton",
    ) -> None:
        if slots_by not in ("triton", "torch"):
            raise ValueError(f"slots_by: expected 'triton' or 'torch', found {slots_by!r}")
        self.host = PageRows(allocator, max_requests, max_tokens)
        self.page_size = allocator.page_size
        self.max_requests = max_requests
        self.max_batch_tokens = max(max_batch_tokens, max_requests)
        self.device = torch.device(device)
        self._compute_slots = _slots_by_torch if slots_by == "torch" else _slots_by_triton()
        self._make_buffers()

    def _make_buffers(self) -> None:
        requests, tokens = self.max_requests, self.max_batch_tokens
        self._header = 3 * requests + 1
        self._upload = _Upload(self._header + 3 * max(MIN_STAGED_PAGES, 4 * requests), self.device)
        inbox = self._upload.device_buffer
        self._batch_rows = inbox[:requests]
        self._seq_lens = inbox[requests : 2 * requests]
        self._query_start_loc = inbox[2 * requests : self._header]
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        self._slot_mapping = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        self._token_index = torch.arange(tokens, dtype=torch.int32, device=self.device)
        columns = self.host.width * (self.page_size // self.tokens_per_entry)
        self.entries = torch.zeros(requests + 1, columns, dtype=torch.int32, device=self.device)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self.host

    def __len__(self) -> int:
        return len(self.host)

    def add(self, seq: Sequence) -> None:
        """Give a live sequence a row with all pages that it owns. ValueError: it has one, or no row is free."""
        self.host.add(seq)

    def update(self, change: Reservation | Commit) -> None:
        """Note what a reservation or commit changed in its sequence's row; a reservation may bring a new sequence.

        Costs O(pages that changed). Call it once for each, in order. ValueError: more pages than a row holds.
        """
        self.host.update(change)

    def update_all(self, changes: Iterable[Reservation | Commit]) -> None:
        """`update` for each result of one `reserve` or `commit` call."""
        for change in changes:
            self.host.update(change)

    def update_step(self, step: StepReservation) -> None:
        """Note what a decode batch's step reserved; its sequences have rows. Costs a few array operations."""
        if step.one_page_each:
            self.host.append_each([step.seqs[member] for member in step.members], step.page_ids)
        else:
            self.update_all(step.reservations())

    def refresh(self, seq: Sequence) -> None:
        """Read a sequence's whole row again: for changes that no `Reservation` or `Commit` told.

        A refused `reserve` under a sliding window is one (pages left behind go all the same), a swap in another.
        """
        self.host.refresh(seq)

    def remove(self, seq: Sequence) -> None:
        """Drop the row of a sequence whose pages were released; nothing of it outlives a preemption."""
        self.host.remove(seq)

    def row(self, seq: Sequence) -> array[int]:
        """Page ids in the sequence's row, as the host knows them."""
        return self.host.pages(seq)

    def batch(
        self,
        seqs: ListLike[Sequence],
        num_new_tokens: ListLike[int],
        *,
        pad_requests: int | None = None,
        pad_tokens: int | None = None,
    ) -> Batch:
        """The step in which each sequence computes `num_new_tokens` tokens behind `num_computed_tokens`.

        Raises ValueError for a sequence without row, named twice, or whose row does not cover its new tokens, and
        for a batch larger than the buffers. Costs one host-to-device copy of 3 max_requests + 1 integers and three
        a changed page; no synchronisation.
        """
        num_tokens = sum(num_new_tokens)
        size, tokens = self._padded_shape(len(seqs), num_tokens, pad_requests, pad_tokens)
        buffer = self._upload.host_buffer()
        longest_query, longest = self._write_header(buffer, seqs, num_new_tokens)
        self._send_changes(buffer)
        starts = self._query_start_loc[: size + 1]
        table = self._table(len(seqs), size, -(-longest // self.page_size))
        positions = self._fill_positions(starts, size, num_tokens, tokens)
        slots = self._slot_mapping[:tokens]
        self._compute_slots(table, starts, positions[:num_tokens], slots)
        return Batch(table, slots, starts, positions, len(seqs), num_tokens, longest_query, longest)

    def _padded_shape(
        self, requests: int, tokens: int, pad_requests: int | None, pad_tokens: int | None
    ) -> tuple[int, int]:
        size = requests if pad_requests is None else pad_requests
        total = tokens if pad_tokens is None else pad_tokens
        if not requests <= size <= self.max_requests:
            raise ValueError(f"batch of {requests} requests, padded to {size}: at most {self.max_requests} fit")
        if not tokens <= total <= self.max_batch_tokens:
            raise ValueError(f"batch of {tokens} tokens, padded to {total}: at most {self.max_batch_tokens} fit")
        return size, total

    def _write_header(
        self, buffer: NDArray[np.int32], seqs: ListLike[Sequence], num_new_tokens: ListLike[int]
    ) -> tuple[int, int]:
        """Fill rows | seq_lens | query_start_loc; returns (longest query, longest sequence)."""
        count, limit = len(seqs), self.max_requests
        new = np.array(num_new_tokens, dtype=np.int64)
        if len(new) != count or (count and new.min() < 0):
            raise ValueError(f"num_new_tokens: expected {count} numbers >= 0, found {list(num_new_tokens)}")
        buffer[: self._header] = 0
        rows, lens, starts = buffer[:count], buffer[limit : limit + count], buffer[2 * limit : self._header]
        rows[:] = self.host.indices(seqs)
        lens[:] = [seq.num_computed_tokens for seq in seqs]
        lens += new.astype(np.int32)
        self.host.check_covered(seqs, rows, lens)
        starts[1 : count + 1] = np.cumsum(new)
        starts[count + 1 :] = starts[count]
        return (int(new.max()), int(lens.max())) if count else (0, 0)

    def _send_changes(self, buffer: NDArray[np.int32]) -> None:
        """Send header and changed entries; changes that the buffer cannot hold go in a copy of their own."""
        changes = self.host.take_changes()
        end = self._header + changes.size
        if end <= len(buffer):
            buffer[self._header : end] = changes.reshape(-1)
            sent = self._upload.send(end)[self._header :].view(3, -1)
        else:
            self._upload.send(self._header)
            sent = torch.from_numpy(changes).to(self.device)
        if changes.size:
            self._scatter(sent[0].long(), sent[1].long(), sent[2])

    def _fill_positions(self, starts: Tensor, size: int, num_tokens: int, tokens: int) -> Tensor:
        positions = self._positions[:tokens]
        positions[num_tokens:] = 0
        if num_tokens:
            index = self._token_index[:num_tokens]
            request = torch.searchsorted(starts[1:], index, right=True)
            positions[:num_tokens] = (self._seq_lens[:size] - starts[1:])[request] + index
        return positions

    @abstractmethod
    def _scatter(self, rows: Tensor, columns: Tensor, pages: Tensor) -> None:
        """Write pages to (row, page column) of `entries`; int64, int64, int32 [n]."""

    @abstractmethod
    def _table(self, count: int, size: int, columns: int) -> PageTable:
        """The table of the batch whose header was sent: `count` requests of at most `columns` pages, padded to
        `size`."""

    def nbytes(self) -> dict[str, int]:
        """Device bytes by buffer: a part of what an allocator costs, beside the pool itself."""
        inbox = self._upload.device_buffer
        buffers = {name.lstrip("_"): value for name, value in vars(self).items() if isinstance(value, Tensor)}
        own = {name: value for name, value in buffers.items() if value._base is not inbox}
        return {name: value.numel() * value.element_size() for name, value in {**own, "inbox": inbox}.items()}

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Rebuild every row from the allocator and compare host and device; `seqs` are all live sequences.

        Raises AllocatorError. Changes that no batch has sent yet are sent first. Synchronises.
        """
        live = list(seqs)
        self.host.check(live)
        self._send_changes(self._upload.host_buffer())
        if self.entries[0].any():
            raise AllocatorError(f"row 0, the padding row, names {self.entries[0].unique().tolist()} on the device")
        for seq in live:
            pages = np.array(self.host.pages(seq), dtype=np.int64)
            wanted = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
            found = self._device_slots(self.host.index(seq), len(pages))
            if not np.array_equal(found, wanted):
                raise AllocatorError(
                    f"request {seq.request_id}: the device's row names slots {found.tolist()}, owned are "
                    f"{wanted.tolist()}"
                )

    def _device_slots(self, row: int, num_pages: int) -> NDArray[np.int64]:
        entries = self.entries[row, : num_pages * (self.page_size // self.tokens_per_entry)].cpu().numpy()
        inside = np.arange(self.tokens_per_entry)
        return (entries.astype(np.int64)[:, None] * self.tokens_per_entry + inside).reshape(-1)


class BlockTableAdapter(_TableAdapter):
    """Page ids, one entry a page; the batch's rows are gathered on the device, as kernels with a block table expect.

    vLLM 0.32.0's runner does the same: a row for each request, gathered each step into the batch's input table.
    """

    def __init__(self, allocator: PageSource, **options: Any) -> None:
        self.tokens_per_entry = allocator.page_size
        super().__init__(allocator, **options)

    def _make_buffers(self) -> None:
        super()._make_buffers()
        self._gathered = torch.zeros_like(self.entries[1:])
        self._in_order = torch.arange(self.max_requests, dtype=torch.int32, device=self.device)

    def _scatter(self, rows: Tensor, columns: Tensor, pages: Tensor) -> None:
        self.entries[rows, columns] = pages

    def _table(self, count: int, size: int, columns: int) -> PageTable:
        gathered = self._gathered[:size]
        if columns:
            gathered[:count, :columns] = self.entries[:, :columns].index_select(0, self._batch_rows[:count])
        if size > count:
            gathered[count:] = 0
        return PageTable(gathered, self._in_order[:size], self._seq_lens[:size], self.tokens_per_entry)


class ReqToTokenAdapter(_TableAdapter):
    """Slot ids, one entry a token; kernels go through each request's row index.

    SGLang 0.5.22: int32 [rows + 1, longest context], row 0 for padding. The device expands pages to slots.
    """

    tokens_per_entry = 1

    def _make_buffers(self) -> None:
        super()._make_buffers()
        self._in_page = torch.arange(self.page_size, dtype=torch.int32, device=self.device)

    def _scatter(self, rows: Tensor, columns: Tensor, pages: Tensor) -> None:
        slots = pages[:, None] * self.page_size + self._in_page
        self.entries[rows[:, None], columns[:, None] * self.page_size + self._in_page] = slots

    def _table(self, count: int, size: int, columns: int) -> PageTable:
        return PageTable(self.entries, self._batch_rows[:size], self._seq_lens[:size], self.tokens_per_entry)


class _Upload:
    """One int32 device buffer at a fixed address, filled by one copy from pinned memory.

    Two host buffers take turns; one is written again only when its last copy is done.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._done: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def host_buffer(self) -> NDArray[np.int32]:
        """The buffer to write now, int32 [capacity]; waits until its last copy has left it."""
        self._turn ^= 1
        event = self._done[self._turn]
        if event is not None:
            event.synchronize()
        return self._hosts[self._turn].numpy()

    def send(self, count: int) -> Tensor:
        """Copy the first `count` integers; returns them on the device."""
        target = self.device_buffer[:count]
        target.copy_(self._hosts[self._turn][:count], non_blocking=True)
        if target.is_cuda:
            self._done[self._turn] = torch.cuda.Event()
            self._done[self._turn].record()  # type: ignore[union-attr]
        return target


def _slots_by_triton() -> Any:
    from kvarena.kernels.slots import compute_slot_mapping

    return compute_slot_mapping


def _slots_by_torch(table: PageTable, starts: Tensor, positions: Tensor, out: Tensor) -> Tensor:
    """What the kernel computes, for any page size."""
    out[len(positions) :] = -1
    index = torch.arange(len(positions), dtype=torch.int32, device=out.device)
    row = table.rows[torch.searchsorted(starts[1:], index, right=True)].long()
    entry = table.entries[row, positions // table.tokens_per_entry].long()
    out[: len(positions)] = entry * table.tokens_per_entry + positions % table.tokens_per_entry
    return out
