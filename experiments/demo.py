"""`kvarena demo`: a small comparison that needs nothing but the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvarena.experiments.compare import compare

if TYPE_CHECKING:
    from kvarena.experiments.results import Result

# Small enough for seconds; overlapping requests and replies, so that every difference can show.
OPTIONS = {"num_sessions": 150, "num_system_prompts": 8}
POOL = ["4 %", "8 %", "16 %", "32 %", "64 %", "100 %"]


def demo(figure: Path) -> Result:
    """Compare both designs on a small `chat`, write the hit-rate figure to `figure`, return the result.

    The kernels are left out: the demo does not need torch.
    """
    from kvarena.experiments.outputs import check_figure
    from kvarena.experiments.report import write_one_figure

    check_figure(figure)
    result = compare("chat", pool=POOL, live=8, outputs="replay", options=OPTIONS, kernel_batches=0)
    result.manifest["kernel_check"]["reason"] = "the demo leaves the kernels out (kvarena compare runs them)"
    write_one_figure(result, "hit_rate", figure)
    return result
