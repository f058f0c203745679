"""A slider over the samples of a timeline, as one piece of HTML: it works in Jupyter, in a saved notebook and in a
report, without a kernel, a package or a network.

The states of all pages travel as two bits each, what happened between samples as text; a few lines of script draw a
grid of pages on a canvas. Whatever comes from a trace is text there and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from kvarena.experiments.pool_map import COLOURS, told
from kvarena.experiments.style import printable
from kvarena.experiments.timeline import EVICTABLE, FREE, IN_USE, SHARED, STATES

if TYPE_CHECKING:
    from kvarena.experiments.timeline import Timeline

CELL = 11  # pixels of a page

_SCRIPT = """
(function () {
  const root = document.getElementById(NAME), canvas = root.querySelector("canvas");
  const slider = root.querySelector("input"), label = root.querySelector("output"), list = root.querySelector("pre");
  const packed = Uint8Array.from(atob(STATES), c => c.charCodeAt(0)), pen = canvas.getContext("2d");
  function show() {
    const sample = Number(slider.value), first = sample * PAGES;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    for (let page = 0; page < PAGES; page++) {
      const at = first + page, state = (packed[at >> 2] >> (2 * (at & 3))) & 3;
      pen.fillStyle = COLOURS[state];
      pen.fillRect((page % WIDTH) * CELL, Math.floor(page / WIDTH) * CELL, CELL - 1, CELL - 1);
    }
    label.textContent = STEPS[sample];
    list.textContent = TOLD[sample].join("\\n") || "nothing";
  }
  slider.addEventListener("input", show);
  show();
})();
"""


@dataclass(frozen=True)
class PoolSlider:
    """What Jupyter shows of a timeline, sample by sample."""

    timeline: Timeline

    def _repr_html_(self) -> str:
        return slider_html(self.timeline)

    def __repr__(self) -> str:
        made = self.timeline
        return f"PoolSlider({printable(made.title)}: {len(made.sampled)} samples of {len(made.page_ids)} pages)"


def slider_html(made: Timeline) -> str:
    """The slider as HTML. Raises ValueError when the timeline has no samples. About a byte for each four states, and
    the lines of `told`."""
    if not made.sampled:
        raise ValueError("timeline: has no samples to step through")
    count = len(made.page_ids)
    width = max(1, round((2.5 * count) ** 0.5))
    height = -(-count // width)
    steps = [f"{'step' if made.kind == 'run' else 'request'} {step:,}" for step in made.sampled]
    lines = [[printable(line) for line in told(made, sample)] for sample in range(len(made.sampled))]
    values = {
        "STATES": base64.b64encode(packed(made.states)).decode(),
        "PAGES": count,
        "WIDTH": width,
        "CELL": CELL,
        "COLOURS": [COLOURS[state] for state in range(4)],
        "STEPS": steps,
        "TOLD": lines,
    }
    name = "pool-" + hashlib.sha256(json.dumps(values).encode()).hexdigest()[:10]
    constants = "".join(f"const {key} = {_literal(value)};" for key, value in {"NAME": name, **values}.items())
    swatch = "<span style='background:{};border:1px solid #888;padding:0 .6em'></span> {}"
    shown = (SHARED, IN_USE, EVICTABLE, FREE)
    legend = " &nbsp; ".join(swatch.format(COLOURS[state], escape(STATES[state])) for state in shown)
    title = printable(f"{made.title}: {made.label}, {made.num_pages:,} pages of {made.page_size}")
    return (
        f"<div id='{name}' style='font:13px sans-serif;max-width:{max(width * CELL, 420)}px'>"
        f"<p>{escape(title)}</p><p>{legend}</p>"
        f"<input type='range' min='0' max='{len(steps) - 1}' value='0' step='1' style='width:75%' aria-label='sample'> "
        "<output></output>"
        f"<canvas width='{width * CELL}' height='{height * CELL}' style='display:block;max-width:100%'></canvas>"
        "<p>What happened since the sample before:</p>"
        "<pre style='height:16em;overflow:auto;white-space:pre-wrap'></pre></div>"
        f"<script>{{{constants}{_SCRIPT}}}</script>"
    )


def packed(states: np.ndarray) -> bytes:
    """States 0 to 3, uint8 [samples, pages], four to a byte, the first in the lowest bits.

    >>> packed(np.array([[1, 2, 3], [0, 1, 1]], np.uint8)).hex()
    '3905'
    """
    flat = states.reshape(-1).astype(np.uint8)
    padded = np.concatenate([flat, np.zeros(-len(flat) % 4, np.uint8)]).reshape(-1, 4)
    return bytes((padded << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1, dtype=np.uint8))


def _literal(value: object) -> str:
    """As JSON that cannot end the script it stands in."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
