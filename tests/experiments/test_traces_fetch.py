"""Fetching: from a web server and from folders, checked, atomic, and nothing kept when anything is wrong."""

import gzip
import hashlib
import json
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kvarena.experiments.traces import catalog, load_trace
from kvarena.experiments.traces.fetch import fetch
from kvarena.experiments.traces.listing import listing
from support.traces import mooncake_row

CONTENT = "".join(json.dumps(mooncake_row(t, 600, [0, t + 1])) + "\n" for t in range(200)).encode()


@pytest.fixture
def known(tmp_path, monkeypatch):
    """A known trace whose publisher nobody can reach, and an empty cache."""
    monkeypatch.setenv("KVARENA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVARENA_TRACES", raising=False)
    entry = catalog.Known(
        name="sample",
        file="sample.jsonl",
        format="mooncake",
        licence="CC0-1.0",
        about="a sample",
        url="http://127.0.0.1:9/sample.jsonl",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
    )
    monkeypatch.setattr(catalog, "KNOWN", (entry,))
    return entry


@pytest.fixture
def served(tmp_path):
    """(folder, address) of a local web server."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def kept(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_from_a_web_server_by_folder_file_and_packed_file(tmp_path, known, served):
    folder, address = served
    (folder / "sample.jsonl").write_bytes(CONTENT)
    (folder / "sample.jsonl.gz").write_bytes(gzip.compress(CONTENT))
    for source in (address, f"{address}/", f"{address}/sample.jsonl", f"{address}/sample.jsonl.gz"):
        pieces = []
        path = fetch(known, source, progress=pieces.append)
        assert path.read_bytes() == CONTENT
        assert sum(pieces) == len(CONTENT)
        assert kept(tmp_path) == ["SOURCE.json", "sample.jsonl"]
        path.unlink()


def test_from_the_publisher_itself(known, served):
    folder, address = served
    (folder / "sample.jsonl").write_bytes(CONTENT)
    assert fetch(replace(known, url=f"{address}/sample.jsonl")).read_bytes() == CONTENT


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_from_a_local_folder_or_file(tmp_path, known, packed, deep):
    folder = tmp_path / "copies" / ("deep" if deep else "")
    folder.mkdir(parents=True)
    file = folder / f"sample.jsonl{'.gz' if packed else ''}"
    file.write_bytes(gzip.compress(CONTENT) if packed else CONTENT)
    for source in (str(tmp_path / "copies"), (tmp_path / "copies").as_uri(), str(file), file.as_uri()):
        path = fetch(known, source)
        assert path.read_bytes() == CONTENT
        path.unlink()


def test_a_fetched_trace_is_found_by_name_and_not_fetched_again(tmp_path, known, served):
    folder, address = served
    (folder / "sample.jsonl").write_bytes(CONTENT)
    with pytest.raises(ValueError, match="run: kvarena trace fetch sample"):
        load_trace("sample")
    assert listing()[-1]["state"] == "fetchable"
    fetch(known, address)
    (folder / "sample.jsonl").unlink()
    fetch(known, address)
    assert load_trace("sample").num_requests == 200
    assert listing()[-1]["state"] == "held"
    note = json.loads((tmp_path / "cache" / "traces" / "sample" / "SOURCE.json").read_text())
    assert (note["licence"], note["from"], note["sha256"]) == ("CC0-1.0", address, known.sha256)


def test_a_damaged_file_in_the_cache_is_fetched_anew(known, served):
    folder, address = served
    (folder / "sample.jsonl").write_bytes(CONTENT)
    path = fetch(known, address)
    path.write_bytes(CONTENT[:-5])
    assert fetch(known, address).read_bytes() == CONTENT


DAMAGE = {
    "other content": b"x" * len(CONTENT),
    "one bit": CONTENT[:100] + bytes([CONTENT[100] ^ 1]) + CONTENT[101:],
    "cut": CONTENT[:-1],
    "longer": CONTENT + b"\n",
    "endless": CONTENT * 50,
    "empty": b"",
    "not found page": b"<html>404</html>",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("way", ["web", "folder", "packed"])
def test_with_another_sha256_nothing_is_kept(tmp_path, known, served, damage, way):
    folder, address = served
    content = DAMAGE[damage]
    name = "sample.jsonl.gz" if way == "packed" else "sample.jsonl"
    (folder / name).write_bytes(gzip.compress(content) if way == "packed" else content)
    source = address if way == "web" else str(folder)
    with pytest.raises(ValueError, match="nothing is kept"):
        fetch(known, source)
    assert kept(tmp_path) == []


def test_what_was_kept_before_survives_a_bad_copy(tmp_path, known, served, monkeypatch):
    folder, address = served
    (folder / "sample.jsonl").write_bytes(CONTENT)
    path = fetch(known, address)
    newer = replace(known, sha256="0" * 64)
    with pytest.raises(ValueError, match="expected sha256 0000"):
        fetch(newer, address)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("size", range(0, 60, 7))
def test_a_cut_packed_copy_is_an_error(tmp_path, known, size):
    folder = tmp_path / "copies"
    folder.mkdir()
    (folder / "sample.jsonl.gz").write_bytes(gzip.compress(CONTENT)[:size])
    with pytest.raises(ValueError, match=r"cut or damaged|nothing is kept"):
        fetch(known, str(folder))
    assert kept(tmp_path) == []


def test_sources_that_are_not_there(tmp_path, known, served):
    _, address = served
    for source, message in (
        (address, "HTTP status 404"),
        (None, "cannot be reached"),
        (str(tmp_path / "nowhere"), "expected the file, found nothing"),
        (str(tmp_path), "expected the file, found nothing"),
        ("ftp://host/x", "expected http://, https://, file:// or a local path"),
    ):
        with pytest.raises(ValueError, match=message):
            fetch(known, source)
    assert kept(tmp_path) == []


def test_a_transfer_that_breaks_off_keeps_nothing(tmp_path, known):
    class Short(SimpleHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:1000])

        def log_message(self, *_args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Short) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ValueError, match=r"nothing is kept|broke off"):
            fetch(known, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert kept(tmp_path) == []


def test_traces_to_be_had_by_hand_say_how(known):
    with pytest.raises(ValueError, match="cannot be fetched: ask them"):
        fetch(replace(known, url="", how="ask them"))


def test_the_catalog_is_whole():
    names = [entry.name for entry in catalog.KNOWN]
    assert len(names) == len(set(names))
    for entry in catalog.KNOWN:
        assert entry.licence
        assert entry.about
        if entry.url:
            assert len(entry.sha256) == 64
            assert entry.size > 0
            assert entry.url.endswith(entry.file)
            # Pinned: a commit of 40 hex digits stands in the address.
            assert any(len(part) == 40 and int(part, 16) >= 0 for part in entry.url.split("/") if len(part) == 40)
        else:
            assert entry.how


def test_a_trace_is_found_beside_or_one_folder_below(tmp_path, known, monkeypatch):
    monkeypatch.setenv("KVARENA_TRACES", str(tmp_path / "all"))
    (tmp_path / "all" / "group").mkdir(parents=True)
    assert catalog.find(known) is None
    (tmp_path / "all" / "group" / "sample.jsonl.gz").write_bytes(gzip.compress(CONTENT))
    assert catalog.find(known).name == "sample.jsonl.gz"
    assert load_trace("sample").num_requests == 200


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"KVARENA_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/kvarena"),
        ({"KVARENA_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"HOME": "/home/x"}, "/home/x/.cache/kvarena"),
    ],
)
def test_where_the_cache_is(monkeypatch, variables, folder):
    for name in ("KVARENA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(catalog.cache_folder()) == folder
