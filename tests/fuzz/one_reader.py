"""One reader under atheris: `python tests/fuzz/one_reader.py READER CORPUS... [libFuzzer options]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

# A reader imports much only when it runs: it reads its right input here, where what it imports is instrumented.
with atheris.instrument_imports(include=["kvarena.experiments", "kvarena.allocators"]):
    from kvarena.experiments.traces.formats import formats

    formats()
    from support.hostile import RAW_VALUES
    from support.readers import readers

    READER = readers()[sys.argv[1]]
    with tempfile.TemporaryDirectory(prefix="kvarena-fuzz-right-") as first:
        READER.outcome(Path(first), READER.files[READER.main])


def words(path: Path, right: bytes) -> None:
    """A dictionary for libFuzzer: wrong values, and the words of the right input."""
    import re

    found = {word.encode() for word in RAW_VALUES if len(word) < 60} | set(re.findall(rb"[A-Za-z_.]{3,30}", right))
    quoted = ["".join(f"\\x{byte:02x}" for byte in word) for word in sorted(found) if word]
    path.write_text("".join(f'"{word}"\n' for word in quoted))


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvarena-fuzz-input-"))
    right = READER.files[READER.main]
    words(folder / "words.txt", right)
    fresh = next(Path(argument) for argument in sys.argv[2:] if not argument.startswith("-"))
    (fresh / "right").write_bytes(right)
    data = folder / "data"
    data.mkdir()

    def one_input(content: bytes) -> None:
        READER.outcome(data, content)

    atheris.Setup([sys.argv[0], *sys.argv[2:], f"-dict={folder / 'words.txt'}", "-verbosity=1"], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
