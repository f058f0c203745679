"""One small comparison, run once a session and shared by the tests that only read it."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvarena.experiments.compare import compare
from kvarena.experiments.results import Result

OPTIONS = {"num_sessions": 12, "num_system_prompts": 3, "max_message": 120, "max_reply": 80}


def small(**fields: Any) -> Result:
    """A fresh comparison of about 60 requests, without the kernels."""
    return compare("chat", **{"options": OPTIONS, "kernel_batches": 0, "pool": ["450 MiB", "700 MiB"], **fields})


@cache
def shared() -> Result:
    """Read only."""
    return small(seeds=2, live=4, outputs="replay")
