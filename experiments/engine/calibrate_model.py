"""What a step has beside attention, from the 8B model's own times: linear layers, sampling, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from kvarena.experiments.engine.request import make_request
from kvarena.experiments.engine.scheduler import Scheduled, StepPlan
from kvarena.experiments.engine.step_time import COMPUTE, GpuTimes, StepTimeModel, linear_us, table_of
from kvarena.experiments.models import SHAPES

MODEL = "llama-3-8b"


def linear_fit(rows: Iterable[Mapping[str, Any]], times: GpuTimes, parameters: float) -> GpuTimes:
    """Bandwidth, rate and sharpness of the linear layers with the logits; least squares of the relative error."""
    from scipy.optimize import least_squares

    tokens = np.array([row["tokens"] for row in rows], float)
    us = np.array([row["us"] + row["head_us"] for row in rows], float)

    def off(values: Any) -> Any:
        return np.log(linear_us(parameters, tokens, *values)) - np.log(us)

    found = least_squares(off, (3200.0, 700.0, 3.0), bounds=((500.0, 50.0, 1.0), (4800.0, 989.0, 20.0)), x_scale="jac")
    gbps, tflops, sharpness = map(float, found.x)
    return replace(times, linear_gbps=gbps, linear_tflops=tflops, linear_sharpness=sharpness)


@dataclass(frozen=True)
class DecodeCell:
    """A batch of the 8B model decoding at one context, and the GPU's time of a step, microseconds."""

    kind: str
    page_size: int
    batch: int
    context: int
    gpu_us: float

    def predicted(self, times: GpuTimes) -> float:
        """Microseconds by the model."""
        shape = SHAPES[MODEL]
        table = table_of(self.kind)
        model = StepTimeModel(shape, COMPUTE[MODEL], self.page_size, times, table=table, table_tokens=self.row_tokens)
        request = make_request("r", [0], 1)
        entries = [Scheduled(request, 1, self.context, True, 0) for _ in range(self.batch)]
        return 1e6 * model.gpu_s(StepPlan("decode", entries))

    def error(self, times: GpuTimes) -> float:
        """Relative, of a whole step."""
        return abs(self.predicted(times) / self.gpu_us - 1)

    @property
    def row_tokens(self) -> int:
        """Tokens that the benchmark's table could name."""
        return self.context + 512


def decode_cells(rows: Iterable[Mapping[str, Any]]) -> list[DecodeCell]:
    """From the benchmark's rows."""
    cells = []
    for row in rows:
        kind, size = row["design"].split(", ")
        cells.append(DecodeCell(kind, int(size), int(row["batch"]), int(row["context"]), 1e3 * float(row["gpu_ms"])))
    return cells


def fit_rest(cells: Sequence[DecodeCell], times: GpuTimes) -> GpuTimes:
    """`step_us` and `sample_us`, from what the rest of the model leaves; both at least 0."""
    from scipy.optimize import nnls

    bare = replace(times, step_us=0.0, sample_us=0.0)
    left = np.array([cell.gpu_us - cell.predicted(bare) for cell in cells])
    whole = np.array([cell.gpu_us for cell in cells])
    design = np.stack([np.ones(len(cells)), [cell.batch for cell in cells]], axis=1)
    (step, sample), _ = nnls(design / whole[:, None], np.maximum(left, 0.0) / whole)
    return replace(times, step_us=float(step), sample_us=float(sample))
