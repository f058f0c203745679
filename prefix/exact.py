"""Whole prompts by content: which pages hold exactly this prompt? Nothing is matched in part.

A prompt is found by a digest over its length, ids, namespace and extra keys, each with its own length before it, so
that no two prompts have the same bytes: [1, 23] and [12, 3] differ, and so do a salt "x" and an adapter "x". What a
digest finds is compared item by item before it counts, so a hash that collides costs time and never a wrong hit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import xxhash

Digest = Callable[[bytes], Hashable]


@dataclass(frozen=True, slots=True)
class PromptKey:
    """What a prompt is.

    ids         array('i') of token ids, or of page ids that a trace gave (`given`)
    num_tokens  true length: given ids do not tell how full the last page is
    namespace   LoRA, salt, tenant: any hashable value
    extra_keys  (offset, length, content_id) of images and the like
    """

    ids: array[int]
    num_tokens: int
    given: bool = False
    namespace: Hashable = None
    extra_keys: tuple[Any, ...] = ()

    def encoded(self) -> bytes:
        """The prompt as bytes, every part behind its length. Equal bytes mean equal prompts.

        >>> PromptKey(array("i", [1]), 1).encoded() == PromptKey(array("i", [1]), 2).encoded()
        False
        """
        parts = [b"given" if self.given else b"tokens", str(self.num_tokens).encode(), self.ids.tobytes()]
        parts += [repr(item).encode() for item in (self.namespace, *self.extra_keys)]
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


@dataclass(slots=True)
class Prompt:
    """A registered prompt: the pages that hold its whole pages, in position order, and how many use it."""

    key: PromptKey
    page_ids: array[int]
    users: int = 1
    digest: Hashable = field(default=None)


class ExactIndex:
    """Registry of whole prompts. `hash_fn` takes bytes and gives a hashable value; xxh3-128 by default.

    >>> index, key = ExactIndex(), PromptKey(array("i", [7, 8]), 2)
    >>> entry = index.insert(key, array("i", [3]))
    >>> index.find(PromptKey(array("i", [7, 8]), 2)) is entry, index.find(PromptKey(array("i", [7]), 1))
    (True, None)
    """

    def __init__(self, hash_fn: Digest = xxhash.xxh3_128_digest) -> None:
        self.hash_fn = hash_fn
        self._prompts: dict[Hashable, list[Prompt]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._prompts.values()))

    def find(self, key: PromptKey) -> Prompt | None:
        """The registered prompt that equals `key`. Changes nothing. O(tokens)."""
        bucket = self._prompts.get(self.hash_fn(key.encoded()), ())
        return next((prompt for prompt in bucket if _same(prompt.key, key)), None)

    def insert(self, key: PromptKey, page_ids: array[int]) -> Prompt:
        """Register a prompt with one user. ValueError when it is registered already."""
        if self.find(key) is not None:
            raise ValueError(f"a prompt of {key.num_tokens} tokens is registered already")
        prompt = Prompt(key, page_ids, digest=self.hash_fn(key.encoded()))
        self._prompts.setdefault(prompt.digest, []).append(prompt)
        return prompt

    def remove(self, prompt: Prompt) -> None:
        """Forget a prompt. ValueError when it is not registered."""
        bucket = self._prompts.get(prompt.digest, [])
        kept = [other for other in bucket if other is not prompt]
        if len(kept) == len(bucket):
            raise ValueError(f"a prompt of {prompt.key.num_tokens} tokens is not registered")
        if kept:
            self._prompts[prompt.digest] = kept
        else:
            del self._prompts[prompt.digest]

    def prompts(self) -> list[Prompt]:
        """All registered prompts."""
        return [prompt for bucket in self._prompts.values() for prompt in bucket]

    def problems(self) -> list[str]:
        """What is wrong with the registry itself: prompts filed under another's digest, or twice."""
        found = []
        for digest, bucket in self._prompts.items():
            for prompt in bucket:
                if digest != prompt.digest or digest != self.hash_fn(prompt.key.encoded()):
                    found.append(f"prompt of pages {list(prompt.page_ids)} is filed under another digest")
                if sum(_same(prompt.key, other.key) for other in bucket) > 1:
                    found.append(f"prompt of pages {list(prompt.page_ids)} is registered twice")
        return found


def _same(left: PromptKey, right: PromptKey) -> bool:
    # repr tells 1 from True and 1.0, which `==` does not
    return left == right and repr((left.namespace, left.extra_keys)) == repr((right.namespace, right.extra_keys))
