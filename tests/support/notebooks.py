"""Run a notebook in a fresh kernel. `python tests/support/notebooks.py FILE...` renders committed outputs anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run in its own folder, without times, machine or run numbers of the kernel."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        coalesce_streams=True,  # what one cell prints may come in pieces, as the kernel's clock has it
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def text_outputs(notebook: Any) -> list[str]:
    """What the cells print and return as text, pictures aside."""
    return [text for cell in notebook.cells if cell.cell_type == "code" for text in map(_text, cell.outputs) if text]


def _text(output: Any) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return ""
    return output.get("text", "") or data.get("text/html", "") or data.get("text/plain", "")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(executed(Path(name)), name)
