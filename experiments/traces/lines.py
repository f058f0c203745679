"""Lines of a text file, plain or gzip, one at a time, with their numbers.

Every fault of the container (cut or damaged gzip data, wrong encoding, a line or an unpacked size past its limit)
is a ValueError with file and line. A byte-order mark, carriage returns, blank lines and a missing last newline are
no faults and no rows.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is refused: 64 MiB is ten million token ids, more than any context window."""

MAX_DOCUMENT_BYTES = 2**31
"""A .json file is one document, held whole: 2 GiB."""

MAX_RATIO = 200
"""A gzip file that unpacks to more than this many times its size (past the first 64 MiB) is refused as a bomb."""

MAX_BLANK_LINES = 100_000
"""More blank lines in a row are refused: they cost time and are no rows, 64 MiB of them a minute and more."""

_PIECE_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"


class TextFile:
    """One file of lines, read again from the start at each pass.

    Raises ValueError when the file changed between passes: a replay of half of each is no result.
    """

    def __init__(self, path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.path = path
        self.max_line_bytes = max_line_bytes
        self.ends_with_newline = True
        if not path.is_file():
            raise ValueError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'nothing'}")
        self._stamp = self._read_stamp()

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yields (line number from 1, text without line end) of each line that is not blank."""
        if self._read_stamp() != self._stamp:
            raise ValueError(f"{self.path}: changed since it was loaded; load it again")
        number = last = 0
        try:
            with self._open() as stream:
                for number, raw in self._raw_lines(stream):
                    text = self._decode(number, raw)
                    if text.strip():
                        last = number
                        yield number, text
                    elif number - last > MAX_BLANK_LINES:
                        raise ValueError(
                            f"{self.path}:{number}: expected at most {MAX_BLANK_LINES} blank lines in a row, found more"
                        )
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{self.path}:{number + 1}: expected whole gzip data, found a cut or damaged file ({error})"
            ) from None
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read ({error.strerror or error})") from None

    def _open(self) -> IO[bytes]:
        stream = self.path.open("rb")
        magic = stream.read(2)
        stream.seek(0)
        if magic == _GZIP_MAGIC:
            stream.close()
            return gzip.open(self.path, "rb")  # type: ignore[return-value]
        if self.path.suffix == ".gz":
            stream.close()
            raise ValueError(f"{self.path}:1: expected gzip data (first bytes 1f 8b), found {magic.hex(' ') or 'none'}")
        return stream

    def _raw_lines(self, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        allowed = MAX_LINE_BYTES + MAX_RATIO * self.path.stat().st_size
        number, unpacked, pieces, length = 1, 0, [], 0
        # In pieces, so that a bomb of one line is refused long before it is unpacked.
        while piece := stream.readline(_PIECE_BYTES):
            pieces.append(piece)
            length += len(piece)
            unpacked += len(piece)
            self._check_size(number, length, unpacked, allowed)
            self.ends_with_newline = piece.endswith(b"\n")
            if self.ends_with_newline:
                yield number, b"".join(pieces)
                number, pieces, length = number + 1, [], 0
        if pieces:
            yield number, b"".join(pieces)

    def _check_size(self, number: int, length: int, unpacked: int, allowed: int) -> None:
        if length > self.max_line_bytes:
            raise ValueError(
                f"{self.path}:{number}: expected a line of at most {self.max_line_bytes} bytes, found a longer one"
            )
        if unpacked > allowed:
            raise ValueError(
                f"{self.path}:{number}: expected gzip data that unpacks to at most {MAX_RATIO} times its size, found "
                "more; unpack it first to read it all the same"
            )

    def _decode(self, number: int, raw: bytes) -> str:
        if number == 1:
            raw = raw.removeprefix(_UTF8_MARK)
            if raw.startswith(_UTF8_MARK):  # glued to the first name, it would hide that column
                raise ValueError(f"{self.path}:1: expected at most one byte-order mark, found two")
        try:
            return raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path}:{number}: expected UTF-8 text, found byte 0x{raw[error.start]:02x} at {error.start}"
            ) from None

    def _read_stamp(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns
