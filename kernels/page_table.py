"""PageTable: the one struct that kernels take, whichever allocator made it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PageTable:
    """Where each request's tokens lie in the pool.

    entries           int32 [R, C]; block_table: page ids. req_to_token: slot ids
    rows              int32 [B]; row of `entries` for each request. block_table: arange(B). req_to_token: req_index
    seq_lens          int32 [B]; tokens with KV after this step, 0 for padded rows
    tokens_per_entry  tokens that one entry stands for. block_table: S. req_to_token: 1

    slot of position p of request b = entries[rows[b], p // tokens_per_entry] * tokens_per_entry
    + p % tokens_per_entry; page = slot // S; offset = slot % S.
    """

    entries: Tensor
    rows: Tensor
    seq_lens: Tensor
    tokens_per_entry: int

    def slots(self, request: int) -> Tensor:
        """Slots of all tokens of one request, int64 [seq_len], in position order. Synchronises the device."""
        length = int(self.seq_lens[request])
        positions = torch.arange(length, device=self.entries.device)
        row = self.entries[self.rows[request].long()].long()
        return row[positions // self.tokens_per_entry] * self.tokens_per_entry + positions % self.tokens_per_entry

    def to_csr(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(kv_indptr int32 [B+1], kv_indices int32 [pages], last_page_len int32 [B]), counted in pages.

        last_page_len is (n - 1) % page_size + 1 for n > 0 tokens, and 0 for an empty row. Synchronises.
        """
        lens = self.seq_lens.long()
        num_pages = (lens + page_size - 1) // page_size
        kv_indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
        kv_indptr[1:] = num_pages.cumsum(0)
        request = torch.repeat_interleave(num_pages)  # of each page
        first = (torch.arange(len(request), device=lens.device) - kv_indptr[request]) * page_size
        entry = self.entries[self.rows[request].long(), first // self.tokens_per_entry].long()
        slot = entry * self.tokens_per_entry + first % self.tokens_per_entry
        last_page_len = torch.where(lens > 0, (lens - 1) % page_size + 1, torch.zeros_like(lens)).int()
        return kv_indptr, (slot // page_size).int(), last_page_len
