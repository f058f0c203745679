"""The registry of whole prompts: which prompts are the same, under any hash."""

import doctest
import itertools
from array import array

import pytest
from kvarena.prefix import exact
from kvarena.prefix.exact import ExactIndex, PromptKey

# Prompts that careless digests take for one another: joined ids, joined parts, other lengths, other kinds.
LOOKALIKES = [
    PromptKey(array("i", [1, 23]), 2),
    PromptKey(array("i", [12, 3]), 2),
    PromptKey(array("i", [123]), 1),
    PromptKey(array("i", [1, 2, 3]), 3),
    PromptKey(array("i", [1, 2]), 2),
    PromptKey(array("i", [1, 2, 0]), 3),
    PromptKey(array("i", [0, 1, 2]), 3),
    PromptKey(array("i", [-1]), 1),
    PromptKey(array("i", [-2]), 1),  # hash(-1) == hash(-2) in Python
    PromptKey(array("i", [1, 23]), 2, given=True),
    PromptKey(array("i", [1, 23]), 30, given=True),
    PromptKey(array("i", [1, 23]), 31, given=True),
    PromptKey(array("i", [1, 23]), 2, namespace="x"),
    PromptKey(array("i", [1, 23]), 2, namespace=("salt", "x")),
    PromptKey(array("i", [1, 23]), 2, namespace=("lora", "x")),
    PromptKey(array("i", [1, 23]), 2, namespace=1),
    PromptKey(array("i", [1, 23]), 2, namespace=True),
    PromptKey(array("i", [1, 23]), 2, namespace=1.0),
    PromptKey(array("i", [1, 23]), 2, namespace="1"),
    PromptKey(array("i", [1, 23]), 2, extra_keys=((0, 1, "a"),)),
    PromptKey(array("i", [1, 23]), 2, extra_keys=((0, 1, "b"),)),
    PromptKey(array("i", [1, 23]), 2, extra_keys=((1, 1, "a"),)),
    PromptKey(array("i", [1, 23]), 2, extra_keys=((0, 1, "a"), (1, 1, "a"))),
]
HASHES = {"xxh3_128": None, "constant": lambda data: 0, "length": len}


def index_by(name):
    return ExactIndex() if HASHES[name] is None else ExactIndex(HASHES[name])


def copy_of(key):
    return PromptKey(key.ids[:], key.num_tokens, key.given, key.namespace, key.extra_keys)


def test_doctests():
    result = doctest.testmod(exact)
    assert result.attempted
    assert not result.failed


def test_no_two_lookalikes_have_the_same_bytes():
    for left, right in itertools.combinations(LOOKALIKES, 2):
        assert left.encoded() != right.encoded(), (left, right)


@pytest.mark.parametrize("hash_name", HASHES)
def test_each_lookalike_finds_itself_and_nothing_else(hash_name):
    index = index_by(hash_name)
    for page, key in enumerate(LOOKALIKES, 1):
        assert index.find(key) is None, key
        index.insert(key, array("i", [page]))
    assert len(index) == len(LOOKALIKES)
    assert not index.problems()
    for page, key in enumerate(LOOKALIKES, 1):
        assert list(index.find(copy_of(key)).page_ids) == [page]


@pytest.mark.parametrize("hash_name", HASHES)
def test_removing_one_leaves_those_that_share_its_digest(hash_name):
    index = index_by(hash_name)
    prompts = [index.insert(key, array("i", [page])) for page, key in enumerate(LOOKALIKES, 1)]
    for gone, prompt in enumerate(prompts, 1):
        index.remove(prompt)
        assert [index.find(key) is None for key in LOOKALIKES] == [page <= gone for page in range(1, len(prompts) + 1)]
    assert len(index) == 0
    with pytest.raises(ValueError, match="is not registered"):
        index.remove(prompts[0])


def test_a_prompt_is_registered_once():
    index = ExactIndex()
    index.insert(LOOKALIKES[0], array("i", [1]))
    with pytest.raises(ValueError, match="a prompt of 2 tokens is registered already"):
        index.insert(copy_of(LOOKALIKES[0]), array("i", [2]))


def test_problems_names_a_misfiled_and_a_doubled_prompt():
    misfiled = ExactIndex()
    misfiled.insert(LOOKALIKES[0], array("i", [7]))
    misfiled._prompts[b"other"] = misfiled._prompts.pop(next(iter(misfiled._prompts)))
    doubled = ExactIndex()
    prompt = doubled.insert(LOOKALIKES[0], array("i", [7]))
    doubled._prompts[prompt.digest].append(prompt)
    assert misfiled.problems() == ["prompt of pages [7] is filed under another digest"]
    assert "prompt of pages [7] is registered twice" in doubled.problems()
