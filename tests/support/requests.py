"""Requests written by hand, for replays whose outcome can be worked out on paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from kvarena.experiments.traces.base import Request, Trace, Visible


def request(name: str, prompt: Sequence[int], reply: Sequence[int] = (), **fields: Any) -> Request:
    """One request with its token ids."""
    return Request(
        request_id=name,
        arrival_s=float(fields.pop("arrival_s", 0.0)),
        num_prompt_tokens=len(prompt),
        num_output_tokens=len(reply),
        token_ids=np.asarray(prompt, np.int32),
        output_ids=np.asarray(reply, np.int32),
        **fields,
    )


def trace(requests: Iterable[Request], name: str = "by hand", **visible: Any) -> Trace:
    """A trace of these requests, visible at token grain."""
    rows = list(requests)
    seen = {"grain": 1, "publish_time": True, "outputs": "recorded", "sessions": False, **visible}
    return Trace(name=name, visible=Visible(**seen), read=lambda: iter(rows), num_requests=len(rows))
