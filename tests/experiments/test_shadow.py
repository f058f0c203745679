"""What the shadow pool takes for the same KV."""

from __future__ import annotations

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Sequence
from kvarena.experiments.random_ops import RandomOps
from kvarena.experiments.shadow import Actor, Contents

PROMPT, IMAGE = [1, 2, 3, 4, 5, 6], (2, 2, "cat")


@pytest.mark.parametrize(
    ("tokens", "image", "same"),
    [
        ([1, 2, 9, 9, 5, 6], (2, 2, "cat"), 6),  # placeholders alone differ
        ([1, 2, 9, 9, 5, 7], (2, 2, "cat"), 5),
        ([1, 2, 3, 4, 5, 6], (2, 2, "dog"), 2),
        ([1, 2, 3, 4, 5, 6], (2, 3, "cat"), 2),
        ([1, 2, 3, 4, 5, 6], (3, 2, "cat"), 2),
        ([1, 9, 3, 4, 5, 6], (2, 2, "cat"), 1),
    ],
)
def test_below_an_image_the_image_is_the_content(tokens: list[int], image: tuple[int, int, str], same: int) -> None:
    contents = Contents()
    one = Actor(Sequence("one", PROMPT, extra_keys=[IMAGE]))
    other = Actor(Sequence("other", tokens, extra_keys=[image]))
    contents.note(one)
    contents.note(other)
    equal = [a == b for a, b in zip(one.content, other.content, strict=True)]
    assert equal == [True] * same + [False] * (len(PROMPT) - same)


@pytest.mark.parametrize("unit", ["leaf", "page"])
@pytest.mark.parametrize("seed", [22, 218])
def test_a_hit_on_an_image_over_another_placeholder_is_no_violation(seed: int, unit: str) -> None:
    """In these runs two prompts with one image differ in nothing but its placeholder; the token design shares it."""
    pool = make_allocator("token", num_pages=12, page_size=1, eviction_order="mru", eviction_unit=unit)
    RandomOps(pool, seed).run(300)


def test_the_order_in_which_images_are_listed_is_no_content() -> None:
    contents = Contents()
    items = [(0, 2, "cat"), (3, 2, "dog")]
    actors = [Actor(Sequence(f"r{step}", PROMPT, extra_keys=items[::step])) for step in (1, -1)]
    for actor in actors:
        contents.note(actor)
    assert actors[0].content == actors[1].content
