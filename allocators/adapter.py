"""From owned pages to what kernels take: a page table, a slot mapping and the batch's offsets, on the device.

Two adapters, each for any allocator and any page size S:

    BlockTableAdapter   entries hold page ids; each step gathers the batch's rows, so rows = 0, 1, 2, ...
    ReqToTokenAdapter   entries hold slot ids, one a token; rows name each request's row in the whole table

Both keep a device row for each request and send only what changed: `update` notes the entries that a
`Reservation` appended or a `Reservation` or `Commit` rewrote, `batch` packs them with the batch's rows, lengths and
the pages of its new tokens (`_packing.py`), sends all in one host-to-device copy, and one launch writes what follows
from them (`kernels/step.py`). A step of the same list of sequences as the one before, one token each, costs a handful
of array operations. The order of calls in a step:

    reservations = allocator.reserve(wants);  adapter.update_all(reservations)   # new sequences get a row
    batch = adapter.batch(seqs, num_new_tokens)                                  # before commit
    ... kernels on batch.table, batch.slot_mapping, batch.query_start_loc ...
    adapter.update_all(allocator.commit(done))                                   # merged duplicates: other pages
    allocator.release([seq], reason);  adapter.remove(seq)                       # the row goes with its pages

or, for a decode batch, `batch = adapter.decode(decode_batch.reserve())`, which is `update_step` and `batch` in one.
While its members stay, a step sends three numbers a row, and the host writes its rows later, many steps at once
(`_tail.py`).

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

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from kvarena.allocators._packing import MIN_STAGED_PAGES, Packed, StepPacking, computed_of
from kvarena.allocators._rows import Index, PageRows, PageSource
from kvarena.allocators._tail import DecodeTail
from kvarena.allocators.decode_batch import StepReservation
from kvarena.allocators.interface import AllocatorError, Commit, Reservation, Sequence
from kvarena.kernels._upload import Upload
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.step import StepBuffers, apply_decode, apply_step, gather_rows
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MIN_STAGED_PAGES", "Batch", "BlockTableAdapter", "PageSource", "ReqToTokenAdapter"]
SlotsBy = Literal["triton", "torch", "nobody"]
MAX_VIEWS = 1024  # batch shapes whose views are kept


class Batch(NamedTuple):  # made anew each step: three times sooner than a frozen dataclass
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


class _TableAdapter:
    """Rows, changes and the upload, the same for both tables.

    allocator         any `PageSource`: an allocator
    max_requests      rows, and requests a batch may have, padding included
    max_tokens        tokens a row can hold; rounded up to whole pages
    max_batch_tokens  new tokens a batch may have, padding included
    device            where the buffers live
    slots_by          "triton": the kernels. "torch": the same rule in torch, for a CPU without the interpreter.
                      "nobody": device buffers stay as they are, to measure the host's part
    """

    tokens_per_entry: int
    gathers: bool  # the batch's rows stand in a table of their own

    def __init__(
        self,
        allocator: PageSource,
        *,
        max_requests: int,
        max_tokens: int,
        max_batch_tokens: int = 8192,
        device: str | torch.device = "cpu",
        slots_by: SlotsBy = "triton",
    ) -> None:
        if slots_by not in get_args(SlotsBy):
            raise ValueError(f"slots_by: expected one of {', '.join(get_args(SlotsBy))}, found {slots_by!r}")
        self.host = PageRows(allocator, max_requests, max_tokens)
        self.page_size = allocator.page_size
        self.max_requests = max_requests
        self.max_batch_tokens = max(max_batch_tokens, max_requests)
        self.device = torch.device(device)
        self._views: dict[tuple[int, int], tuple[PageTable, Tensor, Tensor, Tensor]] = {}
        self._ones = [1] * max_requests
        self._tail: DecodeTail | None = None
        self._decoded_rows: Index | None = None  # of the step before, where it was a decode step
        self._make_buffers(slots_by)

    def _make_buffers(self, slots_by: SlotsBy) -> None:
        requests, tokens = self.max_requests, self.max_batch_tokens
        expand = self.page_size // self.tokens_per_entry
        columns = self.host.width * expand
        self.entries = torch.zeros(requests + 1, columns, dtype=torch.int32, device=self.device)
        gathered = torch.zeros_like(self.entries[1:]) if self.gathers else None
        self._table_entries = self.entries if gathered is None else gathered
        self._packing = StepPacking(self.host, tokens, gathered is not None)
        self._upload = Upload(self._packing.capacity, self.device)
        self._inbox = Upload(3 * requests, self.device)
        positions, slots = (torch.zeros(tokens, dtype=torch.int64, device=self.device) for _ in range(2))
        packed = self._upload.device_buffer
        self._buffers = StepBuffers(
            packed, self.entries, gathered, positions, slots, requests, self.page_size, expand, slots_by
        )

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self.host

    def __len__(self) -> int:
        return len(self.host)

    def add(self, seq: Sequence) -> None:
        """Give a live sequence a row with all pages that it owns. ValueError: it has one, or no row is free."""
        self._leave()
        self.host.add(seq)

    def update(self, change: Reservation | Commit) -> None:
        """Note what a reservation or commit changed in its sequence's row; a reservation may bring a new sequence.

        Costs O(pages that changed). Call it once for each, in order. ValueError: more pages than a row holds.
        """
        self._leave()
        self.host.update(change)

    def update_all(self, changes: Iterable[Reservation | Commit]) -> None:
        """`update` for each result of one `reserve` or `commit` call."""
        self._leave()
        self.host.update_all(changes)

    def update_step(self, step: StepReservation) -> None:
        """Note what a decode batch's step reserved; its sequences have rows. Costs a few array operations."""
        if self._tail is not None:
            if self._noted(self._tail, step):
                return
            self._leave()
        if step.one_page_each:
            self.host.append_each(self.host.rows_of(step.seqs), step.seqs, step.members, step.page_ids)
        else:
            self.update_all(step.reservations())

    def refresh(self, seq: Sequence) -> None:
        """Read a sequence's whole row again: for changes that no `Reservation` or `Commit` told.

        A refused `reserve` under a sliding window is one (pages left behind go all the same), a swap in another.
        """
        self._leave()
        self.host.refresh(seq)

    def remove(self, seq: Sequence) -> None:
        """Drop the row of a sequence whose pages were released; nothing of it outlives a preemption."""
        self._leave()
        self.host.remove(seq)

    def row(self, seq: Sequence) -> array[int]:
        """Page ids in the sequence's row, as the host knows them."""
        self._leave()
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
        for a batch larger than the buffers. Costs one host-to-device copy of 4 max_requests + 2 integers, one a page
        of new tokens and three or four a changed page; one launch, and one more where a block table has other
        members than the step before; no synchronisation.
        """
        decode = self._packing.is_decode(seqs, num_new_tokens)
        num_tokens = len(seqs) if decode else sum(num_new_tokens)
        shape = self._padded_shape(len(seqs), num_tokens, pad_requests, pad_tokens)
        if self._tail is not None:
            if decode and self._tail.seqs == seqs:
                batch = self._decode_tail(self._tail, computed_of(seqs), shape)
                if batch is not None:
                    return batch
            self._leave()
        return self._full(seqs, num_new_tokens, decode, shape)

    def _full(
        self, seqs: ListLike[Sequence], num_new_tokens: ListLike[int], decode: bool, shape: tuple[int, int]
    ) -> Batch:
        """Any step, all of it sent. A decode step of the members of the step before begins a tail."""
        buffer, packing, host = self._upload.host_buffer(), self._packing, self.host
        packed = packing.pack_decode(buffer, seqs) if decode else packing.pack(buffer, seqs, num_new_tokens)
        self._send(buffer, packed, len(seqs), shape[1])
        if decode and packed.rows is self._decoded_rows and isinstance(seqs, list):
            self._tail = DecodeTail(host, seqs, packed.rows)
        self._decoded_rows = packed.rows if decode else None
        views = self._views.get(shape) or self._make_views(*shape)
        return Batch(*views, len(seqs), packed.num_tokens, packed.longest_query, packed.longest)

    def decode(self, step: StepReservation, *, pad_requests: int | None = None, pad_tokens: int | None = None) -> Batch:
        """`update_step` and `batch` of a decode batch's step in one: each member computes one token.

        Where the batch keeps its members' lengths as a column and they are those of the step before, no member is
        looked at: a few array operations, a copy of three numbers a row, one launch. Raises ValueError as both do.
        """
        count, tail, computed = len(step.seqs), self._tail, step.computed
        if tail is None or computed is None or not self._noted(tail, step):
            self.update_step(step)
        else:
            shape = self._padded_shape(count, count, pad_requests, pad_tokens)
            batch = self._decode_tail(tail, computed, shape)
            if batch is not None:
                return batch
        return self.batch(step.seqs, self._ones[:count], pad_requests=pad_requests, pad_tokens=pad_tokens)

    def _noted(self, tail: DecodeTail, step: StepReservation) -> bool:
        """Whether the tail could take what this step reserved."""
        return tail.seqs == step.seqs and step.one_page_each and tail.note(step.members, step.page_ids)

    def _decode_tail(self, tail: DecodeTail, computed: Index, shape: tuple[int, int]) -> Batch | None:
        """A step of the tail's members at these positions; None where their pages do not reach so far."""
        inbox, count = self._inbox, len(tail.rows)
        longest = tail.pack(inbox.host_buffer(), computed)
        if not longest:
            return None
        inbox.send(3 * self.max_requests)
        apply_decode(self._buffers, inbox.device_buffer, count, shape[1])
        return Batch(*(self._views.get(shape) or self._make_views(*shape)), count, count, 1, longest)

    def _leave(self) -> None:
        """Write the tail's steps into the host's rows, before anything else looks at them or changes them."""
        tail, self._tail = self._tail, None
        if tail is not None:
            tail.settle()
            if tail.noted is not None:
                self.host.append_each(tail.rows, tail.seqs, *tail.noted)

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

    def _make_views(self, size: int, tokens: int) -> tuple[PageTable, Tensor, Tensor, Tensor]:
        """What a batch padded to `size` requests and `tokens` tokens hands out; made once a shape."""
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        buffers, (rows, lens, starts, _, _) = self._buffers, self._buffers.offsets
        packed = buffers.packed
        table = self._table(packed[rows : rows + size], packed[lens : lens + size])
        query_start_loc = packed[starts : starts + size + 1]
        views = table, buffers.slots[:tokens], query_start_loc, buffers.positions[:tokens]
        self._views[size, tokens] = views
        return views

    def _table(self, rows: Tensor, seq_lens: Tensor) -> PageTable:
        return PageTable(self.entries, rows, seq_lens, self.tokens_per_entry)

    def _send(self, buffer: NDArray[np.int32], packed: Packed, count: int, tokens: int) -> None:
        """Send the step and the changed entries, and carry them out; changes that the buffer cannot hold go in a
        copy of their own."""
        count_changed, apart = self._packing.write_changes(buffer, packed.end)
        own = None if apart is None else torch.from_numpy(apart).to(self.device)
        self._upload.send(packed.end if own is not None else packed.end + self._packing.fields * count_changed)
        longest = max(packed.longest_query, tokens - packed.num_tokens)
        at = packed.end if own is None else 0
        apply_step(self._buffers, count, tokens, longest, count_changed, at, own)

    def _send_changes(self) -> None:
        """Send changed entries outside of a batch, whose tensors stay as they are."""
        count, apart = self._packing.write_changes(np.empty(0, dtype=np.int32), 0)
        own = None if apart is None else torch.from_numpy(apart).to(self.device)
        apply_step(self._buffers, -1, 0, 0, count, 0, own)

    def nbytes(self) -> dict[str, int]:
        """Device bytes by buffer: a part of what an allocator costs, beside the pool itself."""
        buffers = self._buffers
        found = {
            "inbox": buffers.packed,
            "decode_inbox": self._inbox.device_buffer,
            "entries": self.entries,
            "gathered": buffers.gathered,
        }
        found |= {"positions": buffers.positions, "slot_mapping": buffers.slots}
        return {name: t.numel() * t.element_size() for name, t in found.items() if t is not None}

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Rebuild every row from the allocator and compare host and device; `seqs` are all live sequences.

        Raises AllocatorError. Changes that no batch has sent yet are sent first. Synchronises.
        """
        live = list(seqs)
        self._leave()
        self.host.check(live)
        self._send_changes()
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

    vLLM 0.32.0's runner does the same: a row for each request, gathered each step into the batch's input table. Here
    they are gathered when the batch's members change; a step of the same members writes what changed to both.
    """

    gathers = True

    def __init__(self, allocator: PageSource, **options: Any) -> None:
        self.tokens_per_entry = allocator.page_size
        super().__init__(allocator, **options)
        self._in_order = torch.arange(self.max_requests, dtype=torch.int32, device=self.device)
        self._gathered_rows: NDArray[np.intp] = np.empty(0, dtype=np.intp)

    def _send(self, buffer: NDArray[np.int32], packed: Packed, count: int, tokens: int) -> None:
        super()._send(buffer, packed, count, tokens)
        if packed.rows is not self._gathered_rows:
            gather_rows(self._buffers, count, self.host.longest(packed.rows), len(self._gathered_rows))
            self._packing.place(packed.rows)
            self._gathered_rows = packed.rows

    def _table(self, rows: Tensor, seq_lens: Tensor) -> PageTable:
        size = len(rows)
        return PageTable(self._table_entries[:size], self._in_order[:size], seq_lens, self.tokens_per_entry)

    def nbytes(self) -> dict[str, int]:
        return {**super().nbytes(), "in_order": self._in_order.numel() * self._in_order.element_size()}


class ReqToTokenAdapter(_TableAdapter):
    """Slot ids, one entry a token; kernels go through each request's row index.

    SGLang 0.5.22: int32 [rows + 1, longest context], row 0 for padding. The device expands pages to slots.
    """

    tokens_per_entry = 1
    gathers = False
