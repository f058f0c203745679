"""`long_document_qa`: several questions about each of many long documents, spread over time.

Every prompt is an instruction shared by all, a document, and a question. Questions about one document come at random
times over a window, in between those about others, so that keeping a document until its next question takes room: large
reuse, far apart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from kvarena.experiments.traces.base import Trace
from kvarena.experiments.workloads import trace_of
from kvarena.experiments.workloads.draws import (
    Timed,
    check_shape,
    in_arrival_order,
    lognormal_lengths,
    poisson_arrivals,
    request,
    text,
)


@dataclass(frozen=True)
class Shape:
    """Parameters of `long_document_qa`. Lengths are in tokens, times in seconds.

    num_documents, documents_per_s   documents, and how many are first asked about a second (Poisson)
    mean_questions                   questions about a document, geometric
    window_s                         mean time (exponential) from one question about a document to the next
    instruction_len                  length of the shared instruction
    document_median, document_sigma, max_document    log-normal lengths of documents
    question_median, reply_median    log-normal lengths (sigma 0.5)
    """

    num_documents: int = 150
    documents_per_s: float = 0.25
    mean_questions: float = 5.0
    window_s: float = 90.0
    instruction_len: int = 37
    document_median: float = 6000.0
    document_sigma: float = 0.7
    max_document: int = 32_000
    question_median: float = 30.0
    reply_median: float = 60.0


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `long_document_qa` workload of that seed. Raises ValueError for a bad parameter."""
    shape = shape or Shape()
    check_shape(
        seed,
        shape,
        counts=("num_documents", "instruction_len", "max_document"),
        positive=("documents_per_s", "window_s", "document_median", "question_median", "reply_median"),
        numbers=("document_sigma", "mean_questions"),
    )
    if shape.mean_questions < 1:
        raise ValueError(f"mean_questions: expected a finite number from 1 to inf, found {shape.mean_questions!r}")
    requests = in_arrival_order(_timed(np.random.default_rng([seed, 0xD0C]), shape))
    return trace_of("long_document_qa", requests, {"seed": seed, **asdict(shape)})


def _timed(rng: np.random.Generator, shape: Shape) -> Timed:
    instruction = text(rng, shape.instruction_len)
    sizes = lognormal_lengths(
        rng,
        shape.num_documents,
        median=shape.document_median,
        sigma=shape.document_sigma,
        low=1,
        high=shape.max_document,
    )
    starts = poisson_arrivals(rng, shape.num_documents, shape.documents_per_s)
    timed: Timed = []
    for document, (size, now) in enumerate(zip(sizes.tolist(), starts.tolist(), strict=True)):
        context = np.concatenate([instruction, text(rng, size)])
        for number in range(int(rng.geometric(1.0 / shape.mean_questions))):
            question, reply = (
                text(rng, int(lognormal_lengths(rng, 1, median=median, sigma=0.5, low=1, high=4000)[0]))
                for median in (shape.question_median, shape.reply_median)
            )
            prompt = np.concatenate([context, question])
            timed.append((now, request(f"d{document}.{number}", prompt, reply, extra={"document": document})))
            now += rng.exponential(shape.window_s)
    return timed
