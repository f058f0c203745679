"""Recording a model: every prompt holds the reply before it, and a batch says what each dialogue alone would."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvarena[kernels]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'kvarena[model]'")

from kvarena.experiments import record, record_scripts  # noqa: E402
from kvarena.experiments.model.loading import random_model  # noqa: E402
from kvarena.experiments.record import Recorded, read_recording, write_recording  # noqa: E402
from kvarena.experiments.record_scripts import scripts  # noqa: E402

END = 255


class Words:
    """A tokenizer of words, with few ids; <|im_end|> is one token."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        parts = text.split("<|im_end|>")
        ids = [[zlib.crc32(word.encode()) % 250 for word in part.split()] for part in parts]
        found = ids[0]
        for more in ids[1:]:
            found = [*found, END, *more]
        return {"input_ids": found}


@pytest.fixture(scope="module", autouse=True)
def _small_groups() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(record_scripts, "GROUP", 2)
    patch.setattr(record_scripts, "CHATS_AN_AGENT_GROUP", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    patch.undo()


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama", seed=3, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def recorded(model: Any) -> list[Recorded]:
    return record.record(model, Words(), num_requests=50, seed=1)


def _prompts(rows: list[Recorded]) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    found = {}
    for row in rows:
        found[row.request_id] = [*said.get(row.session_id, []), *row.tail.tolist()]
        said[row.session_id] = [*found[row.request_id], *row.output.tolist()]
    return found


def test_scripts_have_the_number_of_requests_that_was_asked_for() -> None:
    for wanted in (1, 2, 17, 60, 75, 200):
        groups = list(scripts(4, wanted))
        assert sum(script.num_requests for group in groups for script in group) == wanted
        assert all(len({script.preamble for script in group}) == 1 for group in groups)
    assert list(scripts(4, 60)) == list(scripts(4, 60)) != list(scripts(5, 60))


def test_each_reply_is_literally_in_the_next_prompt(recorded: list[Recorded]) -> None:
    prompts = _prompts(recorded)
    by_id = {row.request_id: row for row in recorded}
    followed = 0
    for row in recorded:
        if row.after is not None and by_id[row.after].session_id == row.session_id:
            before = by_id[row.after]
            start = [*prompts[row.after], *before.output.tolist()]
            assert prompts[row.request_id][: len(start)] == start
            followed += 1
    assert followed > 25
    assert len(recorded) == 50


def test_a_sub_agents_last_reply_stands_in_its_parents_next_prompt(recorded: list[Recorded]) -> None:
    by_id = {row.request_id: row for row in recorded}
    found = 0
    for row in recorded:
        if row.kind == "agent" and row.after is not None and by_id[row.after].kind == "subagent":
            reply = [token for token in by_id[row.after].output.tolist() if token != END]
            text = row.tail.tolist()
            assert any(text[i : i + len(reply)] == reply for i in range(len(text)))
            found += 1
    assert found >= 2


def test_replies_end_at_their_limit_or_with_the_end_of_turn(recorded: list[Recorded]) -> None:
    limits = {}
    for group in scripts(1, 50):
        for script in [*group, *(s.child for s in group if s.child)]:
            limits |= {f"{script.session}.t{n}": turn.max_reply for n, turn in enumerate(script.turns)}
    for row in recorded:
        assert 1 <= len(row.output) <= limits[row.request_id]
        assert END not in row.output[:-1].tolist()


def test_a_batch_says_what_each_dialogue_alone_would(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "TEMPERATURE", 1e-9)
    rows = record.record(model, Words(), num_requests=24, seed=2)
    prompts, checked = _prompts(rows), 0
    model.set_attn_implementation("sdpa")
    for row in rows[::3]:
        ids = prompts[row.request_id]
        for token in row.output.tolist():
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1].double()
            top = torch.topk(logits, 2).values
            if top[0] - top[1] < 1e-3:
                break  # rounding decides between equals
            assert int(logits.argmax()) == token
            checked += 1
            ids = [*ids, token]
    assert checked > 30


def test_a_recording_goes_on_behind_its_last_finished_group(
    model: Any, tmp_path: Path, recorded: list[Recorded]
) -> None:
    done = 0

    def stop() -> None:
        nonlocal done
        done += 1
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record.record(model, Words(), num_requests=50, seed=1, tick=stop, keep=tmp_path)
    kept = sorted(path.name for path in tmp_path.glob("*.parquet"))
    assert kept
    counted: list[int] = []
    again = record.record(model, Words(), num_requests=50, seed=1, tick=lambda: counted.append(1), keep=tmp_path)
    assert 0 < len(counted) < 50
    assert [(r.request_id, r.after, r.tail.tolist(), r.output.tolist()) for r in again] == [
        (r.request_id, r.after, r.tail.tolist(), r.output.tolist()) for r in recorded
    ]


def test_a_file_gives_back_what_was_written(recorded: list[Recorded], tmp_path: Path) -> None:
    write_recording(recorded, tmp_path / "r.parquet", {"model": "random"})
    rows, about = read_recording(tmp_path / "r.parquet")
    assert about == {"model": "random"}
    assert all(
        np.array_equal(a.tail, b.tail) and np.array_equal(a.output, b.output)
        for a, b in zip(rows, recorded, strict=True)
    )
    assert [row.after for row in rows] == [row.after for row in recorded]
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"x\.parquet: cannot be read as a recording"):
        read_recording(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="num_requests: expected at least 1"):
        record.record(None, None, num_requests=0)
