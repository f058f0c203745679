"""Rows of a msgpack file of KV events: batches as servers publish them, one behind the other, plain or gzip.

A batch is [ts, events, ...] or {"ts", "events"}; an event is ["BlockStored", hashes, parent, tokens, block size, ...]
(array form) or {"type": "BlockStored", "block_hashes": ...} (map form). A recording may also keep whole messages,
[topic, sequence number, payload], as they come from the socket: then missing messages are found.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvarena.experiments.traces.lines import MAX_LINE_BYTES, MAX_RATIO
from kvarena.experiments.traces.rows import Row

SUFFIX = ".msgpack"
FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Fields of each event in the order of its array form; what follows them is of later versions and not read."""

_MESSAGE = 3  # parts of a message: topic, sequence number, payload


class PackedFile:
    """Events of one file, read again from the start at each pass. Raises ValueError naming file, batch and event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'nothing'}")
        self._lost = 0

    def __call__(self) -> Iterator[Row]:
        sequence: int | None = None
        self._lost = 0
        for number, item in enumerate(self._items()):
            where = f"{self.path}: batch {number}"
            if _is_message(item):
                found = int.from_bytes(item[1], "big")
                self._lost += 0 if sequence is None else max(found - sequence - 1, 0)
                sequence, item = found, self._unpacked(item[2], where)
            yield from _events(item, where)

    def notes(self) -> list[str]:
        return [f"{self._lost} messages of the stream are missing from the recording"] if self._lost else []

    def _items(self) -> Iterator[Any]:
        """Objects of the stream. A file that ends inside one is cut: an error."""
        import msgpack

        with self._open() as stream:
            unpacker = msgpack.Unpacker(
                stream, raw=False, strict_map_key=False, max_buffer_size=MAX_LINE_BYTES, unicode_errors="strict"
            )
            allowed, number, end = MAX_LINE_BYTES + MAX_RATIO * self.path.stat().st_size, 0, 0
            try:
                while True:
                    try:
                        item = unpacker.unpack()
                    except msgpack.OutOfData:
                        break
                    end = unpacker.tell()
                    if end > allowed:
                        raise ValueError(f"expected gzip data that unpacks to at most {MAX_RATIO} times its size")
                    yield item
                    number += 1
                if end != _end(stream):
                    raise ValueError("expected whole msgpack objects, found the file's end inside one")
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{self.path}: batch {number}: expected whole gzip data, found {error}") from None
            except (msgpack.UnpackException, ValueError, TypeError, RecursionError) as error:
                text = f"expected msgpack, found a fault: {str(error) or type(error).__name__}"
                raise ValueError(f"{self.path}: batch {number}: {text}"[:400]) from None

    def _open(self) -> IO[bytes]:
        stream = self.path.open("rb")
        packed = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        if not packed:
            return stream
        stream.close()
        return gzip.open(self.path, "rb")  # type: ignore[return-value]

    @staticmethod
    def _unpacked(payload: bytes, where: str) -> Any:
        import msgpack

        try:
            return msgpack.unpackb(payload, raw=False, strict_map_key=False)
        except (msgpack.UnpackException, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{where}: expected msgpack in the message, found a fault: {error}"[:400]) from None


def _end(stream: IO[bytes]) -> int:
    """Bytes that the stream has given out, once all of them are read."""
    while stream.read(2**20):
        pass
    return stream.tell()


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, list)
        and len(item) == _MESSAGE
        and isinstance(item[0], bytes | str)
        and isinstance(item[1], bytes)
        and isinstance(item[2], bytes)
    )


def _events(batch: Any, where: str) -> Iterator[Row]:
    if isinstance(batch, Mapping):
        ts, events = batch.get("ts"), batch.get("events")
    elif isinstance(batch, list) and len(batch) >= 2:
        ts, events = batch[0], batch[1]
    else:
        raise ValueError(f"{where}: expected a batch [ts, events] or {{ts, events}}, found {_kind(batch)}")
    if not isinstance(events, list):
        raise ValueError(f"{where}: field 'events': expected a list, found {_kind(events)}")
    for index, event in enumerate(events):
        place = f"{where} event {index}"
        yield Row(place, {"ts": ts, **_fields(event, place)})


def _fields(event: Any, where: str) -> dict[str, Any]:
    """The event in map form. Raises ValueError for another kind."""
    if isinstance(event, Mapping):
        found = {str(name): value for name, value in event.items()}
    elif isinstance(event, list) and event and isinstance(event[0], str):
        names = FIELDS.get(event[0], ())
        found = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
    else:
        raise ValueError(f"{where}: expected an event [type, ...] or {{type, ...}}, found {_kind(event)}")
    kind = found.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"{where}: field 'type': expected one of {', '.join(FIELDS)}, found {kind!r}"[:300])
    return found


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list) else "")
