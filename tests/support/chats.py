"""Ragged chats for the real model, and its own answers to them: the reference of the paged runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from kvarena.experiments.engine.model_executor import TIE
from kvarena.experiments.model.loading import chat_ids, load_smollm2

NUM_TOKENS = 16
# More than 64 tokens in the template: a whole page of the largest size to share.
SYSTEM = (
    "You are a careful assistant in a small public library. Readers ask about books, opening hours, lost umbrellas "
    "and quiet seats by the window. Answer in one short sentence, politely, and never invent a title that the library "
    "does not hold. When you are not sure, say so and point to the desk near the entrance."
)
SHORT_SYSTEM = "Be brief."
QUESTIONS = (
    "When do you open?",
    "Who wrote Moby Dick?",
    "Is there a quiet seat near the window for two hours this afternoon?",
    "I lost a green umbrella yesterday. What should I do now?",
    "Name a book about the sea.",
    "Can I borrow seven books at once, and for how many weeks may I keep them at home?",
    "Where is the desk?",
    "What is a haiku?",
    "Do you hold old maps of the harbour, and may I copy one of them for a school project?",
    "Hello!",
)
COLD = (
    "What is the capital of France?",
    "Count from one to five.",
    "Write a line about rain.",
    "What is 12 plus 30?",
    "Name three colours and say in a few words what each one makes you think of.",
    "Is water wet?",
)
# 50 to 63 tokens: with 16 more they outgrow a page of 64 while they decode.
LONG = (
    "My neighbour says that the moon is made of cheese, that whales are fish and that bread was invented by the "
    "Romans. Which of these three claims is the least wrong?",
    "I have two apples, three pears and one plum, I give away one of each kind that I have more than once, and then "
    "I buy two more plums at the market. How many plums?",
)


@cache
def prompts() -> dict[str, list[int]]:
    """18 prompts, in order of arrival: two long cold ones, ten that share a system prompt of more than 64 tokens, six
    short cold ones."""
    groups = {"long": (SHORT_SYSTEM, LONG), "warm": (SYSTEM, QUESTIONS), "cold": (SHORT_SYSTEM, COLD)}
    chats = [(f"{name}{i}", system, text) for name, (system, texts) in groups.items() for i, text in enumerate(texts)]
    return {name: _chat(system, text) for name, system, text in chats}


def _chat(system: str, text: str) -> list[int]:
    return chat_ids([{"role": "system", "content": system}, {"role": "user", "content": text}])


@dataclass(frozen=True)
class Reference:
    """What the model itself generates, and how far apart the two best logits were at each step."""

    tokens: list[int]
    gaps: list[float]


def own_answers(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Reference]:
    """The library's `generate` with its own cache and attention, greedy, `num_tokens` tokens whatever they are.

    One batch, padded on the left, as the library does it.
    """
    model.set_attn_implementation("sdpa")
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    result = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(result.logits, 1).float().topk(2).values  # [B, num_tokens, 2]
    outputs, gaps = result.sequences[:, longest:].tolist(), (best[..., 0] - best[..., 1]).tolist()
    return [Reference(*pair) for pair in zip(outputs, gaps, strict=True)]


@cache
def references() -> dict[str, Reference]:
    """Answers to all chats, once a session."""
    answers = own_answers(load_smollm2(), list(prompts().values()), NUM_TOKENS)
    return dict(zip(prompts(), answers, strict=True))


def compare(name: str, output: Sequence[int], wanted: Reference) -> str:
    """Empty if the outputs are the same; "tie ..." where they part at a step that rounding decides; else the fault."""
    if list(output) == wanted.tokens:
        return ""
    if len(output) != len(wanted.tokens):
        return f"fault: {name} has {len(output)} tokens, expected {len(wanted.tokens)}"
    at = next(i for i, pair in enumerate(zip(output, wanted.tokens, strict=True)) if pair[0] != pair[1])
    kind = "tie" if wanted.gaps[at] < TIE else "fault"
    return (
        f"{kind}: {name} parts at output {at}, {output[at]} for {wanted.tokens[at]}, logits {wanted.gaps[at]:.2e} apart"
    )


@cache
def fork_reference(name: str, after: int = 6) -> tuple[int, Reference]:
    """(token with which a fork of a chat goes on, the model's own answer from there).

    The fork has the chat's first `after` - 1 outputs, then another token than the sixth.
    """
    ours = references()[name].tokens
    token = references()["warm0"].tokens[0]
    if token == ours[after - 1]:
        raise ValueError(f"chat {name}: the fork would go on as its parent does")
    prompt = [*prompts()[name], *ours[: after - 1], token]
    return token, own_answers(load_smollm2(), [prompt], NUM_TOKENS - after)[0]
