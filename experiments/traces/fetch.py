"""Gets a known trace from its publisher at the pinned commit, or from a copy; keeps it only if its sha256 fits."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import url2pathname, urlopen

from kvarena.experiments.traces.catalog import Known, cache_folder
from kvarena.experiments.traces.write import whole_file

CHUNK = 1 << 16
TIMEOUT_S = 30.0

Progress = Callable[[int], None]


def fetch(known: Known, source: str | None = None, *, progress: Progress | None = None) -> Path:
    """Path of the trace in the cache, fetched if it is not there yet.

    source    None = the publisher; else where a copy lies: http(s):// or file:// address of the file or of its folder,
              or a local file or folder (looked through one folder deep). A .gz copy is unpacked; the sha256 is that
              of the unpacked file.
    progress  called with the number of bytes of each piece

    Raises ValueError, and keeps nothing, when the copy cannot be read or has another sha256.
    """
    if not known.url or not known.sha256:
        raise ValueError(f"trace {known.name!r}: cannot be fetched: {known.how}")
    target = cache_folder() / "traces" / known.name / known.file
    if target.is_file() and _sha256(target) == known.sha256:
        return target
    address = known.url if source is None else source
    with whole_file(target) as out:
        digest, size = _copy(_pieces(address, known.file), out, known, progress)
        if digest != known.sha256:
            raise ValueError(
                f"{address}: expected sha256 {known.sha256} ({known.size} bytes), found {digest} ({size} bytes); "
                "nothing is kept"
            )
    _note_source(target, known, address)
    return target


def _copy(pieces: Iterator[bytes], out: IO[bytes], known: Known, progress: Progress | None) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        if size > known.size:
            raise ValueError(f"{known.name}: expected {known.size} bytes, found more; nothing is kept")
        out.write(piece)
        if progress is not None:
            progress(len(piece))
    return digest.hexdigest(), size


def _pieces(address: str, file: str) -> Iterator[bytes]:
    """Unpacked content of the copy at that address, in pieces."""
    parts = urlsplit(address)
    try:
        if parts.scheme in ("http", "https"):
            yield from _from_web(address if address.endswith((file, f"{file}.gz")) else f"{address.rstrip('/')}/{file}")
        elif parts.scheme in ("", "file"):
            path = Path(url2pathname(parts.path)) if parts.scheme == "file" else Path(address)
            yield from _from_disk(path, file)
        else:
            raise ValueError(f"{address}: expected http://, https://, file:// or a local path")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{address}: expected whole gzip data, found a cut or damaged file ({error})") from None


def _from_web(address: str) -> Iterator[bytes]:
    try:
        with urlopen(address, timeout=TIMEOUT_S) as answer:
            stream: Any = gzip.GzipFile(fileobj=answer) if address.endswith(".gz") else answer
            while piece := stream.read(CHUNK):
                yield piece
    except HTTPError as error:
        raise ValueError(f"{address}: expected the file, found HTTP status {error.code} {error.reason}") from None
    except URLError as error:
        raise ValueError(f"{address}: cannot be reached ({error.reason})") from None
    except (TimeoutError, ConnectionError) as error:
        raise ValueError(f"{address}: the transfer broke off ({error})") from None


def _from_disk(path: Path, file: str) -> Iterator[bytes]:
    if path.is_dir():
        folders = [path, *sorted(folder for folder in path.iterdir() if folder.is_dir())]
        candidates = [folder / name for folder in folders for name in (file, f"{file}.gz")]
        path = next((candidate for candidate in candidates if candidate.is_file()), candidates[0])
    if not path.is_file():
        raise ValueError(f"{path}: expected the file, found nothing")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as stream:
        while piece := stream.read(CHUNK):
            yield piece


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _note_source(target: Path, known: Known, address: str) -> None:
    note = {"name": known.name, "from": address, "published": known.url, "licence": known.licence}
    with whole_file(target.with_name("SOURCE.json")) as out:
        out.write(json.dumps({**note, "sha256": known.sha256}, indent=2).encode() + b"\n")
