"""Pages pass only through the states of the diagram, in every design, and a broken allocator is told."""

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import AllocatorError, EventKind
from kvarena.experiments.page_states import EDGES, FREE, PRIVATE, PageStates, request_diagram, state_diagram, watch
from typer.testing import CliRunner

DESIGNS = {
    "block runs": {"kind": "block", "page_size": 4},
    "block hashed": {"kind": "block", "page_size": 4, "form": "hashed"},
    "block 1": {"kind": "block", "page_size": 1},
    "token 1": {"kind": "token"},
    "token 4": {"kind": "token", "page_size": 4},
    "no cache": {"kind": "block", "page_size": 4, "prefix_cache": False},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DESIGNS)
def test_every_transition_of_a_run_is_in_the_diagram_and_states_add_up(name, seed):
    states = watch(make_allocator(DESIGNS[name], num_pages=40), seed=seed)
    assert set(states.edges) <= set(EDGES)
    assert sum(states.counts().values()) == 40


@pytest.mark.parametrize("name", ["block runs", "token 1", "token 4"])
def test_a_run_passes_every_edge_but_the_abort(name):
    edges = sum(
        (watch(make_allocator(DESIGNS[name], num_pages=40), seed=s).edges for s in range(3)),
        start=PageStates(make_allocator("vllm", num_pages=4)).edges,
    )
    assert set(edges) == {edge for edge, text in EDGES.items() if "abort" not in text}


def test_a_transition_that_no_rule_allows_is_told():
    allocator = make_allocator("vllm", num_pages=4)
    states = PageStates(allocator)
    allocator.events.add(EventKind.RESERVE, "r", (1,))
    states._follow(allocator.events.drain()[0])
    allocator.events.add(EventKind.PUBLISH, "r", (2,))
    with pytest.raises(AllocatorError, match="page 2 went from free to cached"):
        states.observe([])
    assert states.states[1] == PRIVATE
    assert states.states[2] == FREE


def test_states_that_do_not_add_up_to_the_capacity_are_told(monkeypatch):
    allocator = make_allocator("sglang", num_pages=8)
    states = PageStates(allocator)
    allocator.events.add(EventKind.PUBLISH, "r", ())
    monkeypatch.setattr(states, "states", ["free"] * 8)
    with pytest.raises(AllocatorError, match="capacity"):
        states.observe([])


def test_diagrams_carry_the_counts_and_the_hit_of_the_second_request():
    text = state_diagram(watch(make_allocator("sglang", num_pages=40)))
    assert text.startswith("stateDiagram-v2")
    assert "evictable --> cached: hit (" in text
    assert "hit 1 2\n" in request_diagram(make_allocator({"kind": "block", "page_size": 4}, num_pages=48)) + "\n"
    assert "hit 1 2 3 4 5 6 7 8 9 10\n" in request_diagram(make_allocator("sglang", num_pages=48)) + "\n"


def test_the_command_writes_markdown_and_refuses_other_words(tmp_path):
    from kvarena.experiments.cli import app

    done = CliRunner().invoke(app, ["diagram", "states", "--out", str(tmp_path / "s.md")])
    assert done.exit_code == 0
    assert (tmp_path / "s.md").read_text().count("```mermaid") == 2
    assert "expected states or request" in str(CliRunner().invoke(app, ["diagram", "tree"]).exception)
