"""Every figure and table of README and docs, redrawn from saved results and compared with the committed one.

`docs/paper.toml` lists them; its head explains the fields. Works in a checkout, without a GPU. What differs beyond the
stated tolerance fails the run, so a document cannot show a number that its results do not give.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvarena.experiments.foreign import read_toml
from pydantic import BaseModel, ConfigDict, ValidationError

LIST = Path("docs/paper.toml")
ARTIFACT = Path("ARTIFACT.md")
PIXELS = 2.0  # root mean square difference of 255 levels: other versions of a font renderer, never another number


class Item(BaseModel):
    """One figure or table; fields as in the head of `docs/paper.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    redraw: tuple[str, ...]
    makes: str
    inputs: tuple[str, ...]
    rerun: tuple[str, ...]
    machine: str
    minutes: float
    seeds: str
    expect: str
    tolerance: float = PIXELS

    @property
    def path(self) -> Path:
        """The committed file."""
        return Path(self.target.partition("#")[0])

    @property
    def mark(self) -> str | None:
        """Name of the marked part of a text file; None: the whole file."""
        return self.target.partition("#")[2] or None

    @property
    def on_gpu(self) -> bool:
        """Whether its inputs need a GPU to be made."""
        return "H200" in self.machine


@dataclass(frozen=True)
class Outcome:
    """What became of one item: `fault` is empty when the redrawn one equals the committed one."""

    item: Item
    fault: str


def load_items(root: Path) -> list[Item]:
    """The list of a checkout. Raises ValueError naming the item and field, and outside a checkout."""
    if not (root / LIST).is_file():
        raise ValueError(f"{root / LIST}: not there; run from the folder of a checkout")
    data = read_toml(root / LIST)
    try:
        return [Item(**item) for item in data["item"]]
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"{root / LIST}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{root / LIST}: {error}") from None


def redraw(
    items: list[Item], root: Path, out: Path, run: Callable[[list[str]], None], *, update: bool = False
) -> Iterator[Outcome]:
    """Redraw each item into `out/NN-NAME` and compare; `update` writes the committed files instead.

    run  carries out arguments of kvarena in the checkout and raises for a failure
    """
    out.mkdir(parents=True, exist_ok=True)
    for number, item in enumerate(items):
        with TemporaryDirectory() as folder:
            scratch = Path(folder)
            try:
                run([part.replace("{out}", str(scratch)) for part in item.redraw])
                made = scratch / item.makes
                if not made.is_file():
                    raise ValueError(f"{shlex.join(item.redraw)} made no {item.makes}")
                shutil.copyfile(made, out / f"{number:02d}-{made.name}")
                if update:
                    _write(item, root, made)
                fault = _difference(item, root, made)
            except (ValueError, OSError) as error:
                fault = str(error)
        yield Outcome(item, fault)


def artifact(items: list[Item], root: Path) -> str:
    """ARTIFACT.md: what each figure is made of, how, where, how long, and what to expect."""
    lines = [
        "# Artifact",
        "",
        "`make paper` redraws everything below from the saved results in under five minutes, without a GPU, and fails",
        "where one differs beyond its tolerance. `make paper-cpu` makes the simulated results anew and redraws;",
        "`make paper-gpu` does so for what was measured on an H200. `kvarena paper --update` writes this page.",
    ]
    for item in items:
        lines += ["", f"## {item.target}", "", f"- redraw: `kvarena {shlex.join(item.redraw)}`, file `{item.makes}`"]
        lines += [f"- make its inputs anew: `kvarena {shlex.join(item.rerun)}`"]
        lines += [f"- machine: {item.machine}; {item.minutes:g} min; seeds {item.seeds}"]
        lines += [f"- expect: {item.expect}"]
        lines += [f"- input `{name}`, sha256 `{_digest(root / name)}`" for name in item.inputs]
    return "\n".join(lines) + "\n"


def _digest(path: Path) -> str:
    """Of a file, or of a folder's files: measured times and provenance left out, since they differ from run to run."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if not path.is_dir():
        raise ValueError(f"{path}: an input of {LIST} is not there")
    digest = hashlib.sha256()
    for file in sorted(
        p for p in path.rglob("*") if p.is_file() and p.name not in ("provenance.json", "timings.parquet")
    ):
        digest.update(f"{file.relative_to(path)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _difference(item: Item, root: Path, made: Path) -> str:
    """Why the redrawn file is not the committed one; empty when it is."""
    committed = root / item.path
    if not committed.is_file():
        return "is not there; `kvarena paper --update` writes it"
    if committed.suffix == ".png":
        return _pixels(committed, made, item.tolerance)
    kept, found = _part(committed.read_text(encoding="utf-8"), item), made.read_text(encoding="utf-8").strip()
    if kept == found:
        return ""
    pairs = zip([*kept.splitlines(), ""], [*found.splitlines(), ""], strict=False)
    first = next(((a, b) for a, b in pairs if a != b), ("", ""))
    return f"committed {first[0]!r}, redrawn {first[1]!r}"


def _pixels(committed: Path, made: Path, tolerance: float) -> str:
    import numpy as np
    from matplotlib.image import imread

    a, b = (np.asarray(imread(path), float)[..., :3] * 255 for path in (committed, made))
    if a.shape != b.shape:
        return f"committed {a.shape[1]} x {a.shape[0]} pixels, redrawn {b.shape[1]} x {b.shape[0]}"
    rms = float(np.sqrt(np.mean((a - b) ** 2)))
    return "" if rms <= tolerance else f"differs by {rms:.2f} of 255 levels (root mean square), allowed {tolerance:g}"


def _part(text: str, item: Item) -> str:
    if item.mark is None:
        return text.strip()
    found = re.search(_marked(item.mark), text, re.DOTALL)
    if found is None:
        raise ValueError(f"{item.path}: no part between <!-- {item.mark} --> and <!-- /{item.mark} -->")
    return found[2].strip()


def _marked(mark: str) -> str:
    return rf"(<!-- {re.escape(mark)} -->)(.*?)(<!-- /{re.escape(mark)} -->)"


def _write(item: Item, root: Path, made: Path) -> None:
    target = root / item.path
    target.parent.mkdir(parents=True, exist_ok=True)
    if item.mark is None:
        shutil.copyfile(made, target)
        return
    text = target.read_text(encoding="utf-8")
    _part(text, item)
    body = made.read_text(encoding="utf-8").strip()
    whole = re.sub(_marked(item.mark), lambda m: f"{m[1]}\n\n{body}\n\n{m[3]}", text, count=1, flags=re.DOTALL)
    target.write_text(whole, encoding="utf-8")


def run_quietly(arguments: list[str]) -> None:
    """Carry out a command of kvarena in this process, its tables unseen. Raises ValueError when it fails."""
    from kvarena.experiments.cli import app

    try:
        with redirect_stdout(StringIO()):
            code: Any = app(arguments, standalone_mode=False)
    except SystemExit as done:
        code = done.code
    if code:
        raise ValueError(f"kvarena {shlex.join(arguments)}: exit code {code}")
