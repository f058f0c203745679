"""The fork study: savings against closed forms and an oracle of the beams' common past, and the command."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvarena.allocators.config import make_allocator
from kvarena.experiments import forking
from kvarena.experiments.cli import app
from kvarena.experiments.forking import (
    ALPACA,
    SHAREGPT,
    Model,
    beam_steps,
    expected_saving,
    run_request,
    saving,
)
from typer.testing import CliRunner

BLOCK: dict[str, Any] = {"kind": "block", "page_size": 16}
TOKEN: dict[str, Any] = {"kind": "token", "page_size": 1}


def ceil(tokens: int, size: int) -> int:
    return -(-tokens // size)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("prompt", "reply"), [(1, 1), (16, 40), (21, 30), (33, 64)])
@pytest.mark.parametrize("spec", [BLOCK, TOKEN, {"kind": "token", "page_size": 16}], ids=["block", "token", "token16"])
def test_parallel_samples_share_the_prompts_whole_pages(spec: Any, prompt: int, reply: int, width: int) -> None:
    size = spec["page_size"]
    pool = make_allocator(spec, num_pages=4 * width * (prompt + reply))
    shared, apart, copies, tokens = run_request(
        pool, "parallel", width, (prompt, reply), np.random.default_rng(1), Model()
    )
    ends = [ceil(prompt + step, size) for step in range(1, reply + 1)]
    whole = prompt // size
    assert apart == width * sum(ends)
    assert shared == sum(whole + width * (end - whole) for end in ends)
    assert (copies, tokens) == ((width - 1) * (prompt % size > 0), width * reply)


def _texts(steps: Any) -> Any:
    """The generated tokens of each beam after each step."""
    beams: list[tuple[int, ...]] = [()]
    for parents, ranks in steps:
        beams = [(*beams[parent], rank) for parent, rank in zip(parents, ranks, strict=True)]
        yield beams


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_beams_hold_each_slot_of_their_common_past_once(width: int, scale: float) -> None:
    """Token, page size 1: slots in use are the different beginnings of the living beams."""
    prompt, reply = 5, 40
    steps = beam_steps(np.random.default_rng(3), width, reply, Model(scale))
    wanted = sum(
        prompt + len({text[: end + 1] for text in beams for end in range(len(text))}) for beams in _texts(steps)
    )
    pool = make_allocator(TOKEN, num_pages=2000)
    shared, apart, copies, _ = run_request(pool, "beam", width, (prompt, reply), np.random.default_rng(3), Model(scale))
    assert (shared, copies) == (wanted, 0)
    assert apart == width * sum(prompt + step for step in range(1, reply + 1))


@pytest.mark.parametrize("form", ["hashed", "runs"])
@pytest.mark.parametrize("prompt", [6, 8])
def test_beams_of_the_block_design_share_full_pages_and_own_partial_ones(form: str, prompt: int) -> None:
    reply, width, size, wanted = 60, 4, 4, 0
    for beams in _texts(beam_steps(np.random.default_rng(5), width, reply, Model())):
        full, rest = divmod(prompt + len(beams[0]), size)
        pasts = {(end, text[: max(end - prompt, 0)]) for text in beams for end in range(size, full * size + 1, size)}
        wanted += len(pasts) + width * (rest > 0)
    pool = make_allocator({"kind": "block", "page_size": size, "form": form}, num_pages=600)
    shared, apart, copies, tokens = run_request(pool, "beam", width, (prompt, reply), np.random.default_rng(5), Model())
    assert shared == wanted < apart
    assert 0 < copies < tokens


def test_beam_steps_keep_the_best_continuations() -> None:
    steps = list(beam_steps(np.random.default_rng(0), 4, 50, Model()))
    assert set(steps[0][0]) == {0}
    assert steps[0][1] == [0, 1, 2, 3]
    for parents, ranks in steps:
        pairs = list(zip(parents, ranks, strict=True))
        assert len(set(pairs)) == 4
        for parent in set(parents):  # a beam's worse continuation never stays without its better ones
            own = [rank for other, rank in pairs if other == parent]
            assert own == list(range(len(own)))


def test_the_study_repeats_and_orders_as_it_must() -> None:
    rows = forking.study(requests=6, seed=2)
    assert rows == forking.study(requests=6, seed=2)
    assert rows != forking.study(requests=6, seed=3)
    cells = {(row.lengths, row.method, row.allocator, row.width): row.saved for row in rows}
    for (lengths, method, allocator, width), saved in cells.items():
        assert 0 < saved < 1 - 1 / width
        if width > 2:
            assert saved > cells[lengths, method, allocator, width - 2]
        if method == "beam":
            assert saved > cells[lengths, "parallel", allocator, width]
        if allocator == "token 1":
            assert saved > cells[lengths, method, "block 16", width]


@pytest.mark.parametrize("lengths", [ALPACA, SHAREGPT], ids=lambda lengths: lengths.name)
def test_lengths_have_the_stated_means(lengths: forking.Lengths) -> None:
    for drawn in map(np.array, (method(np.random.default_rng(0), 20_000) for method in (lengths.draw, lengths.spread))):
        assert drawn[:, 0].mean() == pytest.approx(lengths.prompt, rel=0.05)
        assert drawn[:, 1].mean() == pytest.approx(lengths.reply, rel=0.08)  # the longest are clipped


@pytest.mark.parametrize("width", [2, 6])
@pytest.mark.parametrize("spec", [BLOCK, TOKEN], ids=["block", "token"])
def test_what_parallel_samples_save_is_the_closed_form(spec: Any, width: int) -> None:
    found = saving(ALPACA, "parallel", spec, width, requests=12, seed=0)
    assert found.saved == pytest.approx(expected_saving(ALPACA, width, spec["page_size"], requests=12), rel=1e-12)


@pytest.mark.parametrize("lengths", [ALPACA, SHAREGPT], ids=lambda lengths: lengths.name)
def test_a_wider_spread_of_lengths_comes_near_the_published_ends(lengths: forking.Lengths) -> None:
    published = forking.PUBLISHED[lengths.name, "parallel"]
    found = [expected_saving(replace(lengths, sigma=1.0), width, 16) for width in (2, 6)]
    assert found == pytest.approx(published, abs=0.022)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="at least 2 and 1, found 1 and 5"):
        saving(ALPACA, "beam", BLOCK, 1, requests=5)
    with pytest.raises(ValueError, match="'parallel' or 'beam', found 'greedy'"):
        saving(ALPACA, "greedy", BLOCK, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a design that forks"):
        saving(ALPACA, "beam", {"kind": "exact", "page_size": 4}, 2, requests=1)
    with pytest.raises(ValueError, match="sigma: expected"):
        forking.study(requests=1, sigma=0.0)
    with pytest.raises(ValueError, match="scale: expected"):
        Model(0.0)


def test_the_command_prints_and_writes_the_table(tmp_path: Any) -> None:
    out = tmp_path / "forks.csv"
    done = CliRunner().invoke(app, ["forks", "--requests", "2", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "sharegpt-like" in done.output
    assert "6.1 to 9.8 %" in done.output
    head, *lines = out.read_text().splitlines()
    assert head == "lengths,method,allocator,width,requests,seed,sigma,scale,saved,copies,published_low,published_high"
    assert "lengths alone decide" in done.output
    assert len(lines) == 24
