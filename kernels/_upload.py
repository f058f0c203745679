"""One int32 device buffer at a fixed address, filled by one copy from pinned memory that is never waited for."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Upload:
    """`capacity` integers on `device`; write them into `host_buffer`, then `send`.

    Host buffers take turns. An event is recorded behind every half round of copies and waited for before that half is
    written again, so that a step pays for an eighth of an event.
    """

    HALF = 8

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2 * self.HALF)]
        self._events = [torch.cuda.Event() for _ in range(2)] if pinned else []
        self._arrays = [host.numpy() for host in self._hosts]
        self._pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # device and host views of the usual copies
        self._capacity = capacity
        self._turn = 0

    def host_buffer(self) -> NDArray[np.int32]:
        """The buffer to write now, int32 [capacity]; waits until its last copy has left it."""
        half, place = divmod(self._turn, self.HALF)
        if self._events and place == 0:
            self._events[half].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> None:
        """Copy the first `count` integers, and some behind them."""
        turn, count = self._turn, min(-(-count // 256) * 256, self._capacity)
        pair = self._pairs.get((turn, count))
        if pair is None:
            pair = self._pairs[turn, count] = self.device_buffer[:count], self._hosts[turn][:count]
        pair[0].copy_(pair[1], non_blocking=True)
        half, place = divmod(turn, self.HALF)
        if self._events and place == self.HALF - 1:
            self._events[half].record()
        self._turn = (turn + 1) % len(self._hosts)
