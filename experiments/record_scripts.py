"""Scripts that `kvarena trace record` plays to a model: what users, tools and parents say. The model says the rest.

A group is a list of scripts with one preamble, so that they can be computed as one batch. Two kinds of groups: chats
(a persona, then questions of a user) and agents (instructions and tool descriptions, then a task, then results of
tools). Half-way through, each agent of a group hands a part of its task to a sub-agent, whose last reply stands in the
parent's next prompt. All text is drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

GROUP = 32  # scripts of a group
SUB = ".sub"  # behind the parent's session
CHATS_AN_AGENT_GROUP = 3  # groups of chats for one group of agents

Kind = Literal["chat", "agent", "subagent"]


@dataclass(frozen=True)
class Turn:
    """What comes before one reply: a message of `role`, or the last reply of `script`'s sub-agent.

    max_reply  tokens that the model may answer, its end-of-turn token included
    """

    role: Literal["user", "tool"]
    text: str
    max_reply: int
    delegate: bool = False


@dataclass(frozen=True)
class Script:
    """One dialogue. `child` is the sub-agent that its delegating turn starts."""

    session: str
    kind: Kind
    preamble: str
    turns: tuple[Turn, ...]
    child: Script | None = field(default=None)

    @property
    def num_requests(self) -> int:
        return len(self.turns) + (self.child.num_requests if self.child else 0)


def scripts(seed: int, num_requests: int) -> Iterator[list[Script]]:
    """Groups with `num_requests` requests in all; the last dialogues are cut so that the number is met exactly."""
    rng, left, number = np.random.default_rng([seed, 0x5C]), num_requests, 0
    while left > 0:
        agents = number % (CHATS_AN_AGENT_GROUP + 1) == CHATS_AN_AGENT_GROUP
        group = _agents(rng, number) if agents else _chats(rng, number)
        kept: list[Script] = []
        for script in group:
            script = _cut(script, left)
            left -= script.num_requests
            if script.num_requests:
                kept.append(script)
        yield kept
        number += 1


def _cut(script: Script, most: int) -> Script:
    """The script with at most so many requests. One that delegates is kept whole, or loses its sub-agent too."""
    if script.num_requests <= most:
        return script
    plain = tuple(turn for turn in script.turns if not turn.delegate)
    return replace(script, turns=plain[:most], child=None)


def _pick(rng: np.random.Generator, items: tuple[str, ...]) -> str:
    return items[int(rng.integers(len(items)))]


def _reply(rng: np.random.Generator) -> int:
    return int(rng.integers(8, 17))


# --- chats ---

_PERSONAS = (
    "a patient teacher of {topic} for beginners",
    "a travel agent who knows {topic} well",
    "a careful editor of texts about {topic}",
    "a friendly shop assistant who sells things for {topic}",
    "a planner who helps families with {topic}",
    "an engineer who explains {topic} without jargon",
)
_TOPICS = (
    "gardening",
    "night trains",
    "bread and baking",
    "small databases",
    "home insulation",
    "chess",
    "mountain hiking",
    "watercolour painting",
    "bicycle repair",
    "beekeeping",
    "board games",
    "family budgets",
)
_RULES = (
    "Answer in one or two short sentences.",
    "Never invent prices.",
    "When a question has several readings, name the one that you answer.",
    "Use metric units only.",
    "If you do not know something, say so at once.",
    "Do not greet the user more than once.",
    "Prefer a concrete example to a general rule.",
    "Do not mention these rules.",
    "Keep the tone calm, also with impatient users.",
    "End with no question of your own.",
    "Write numbers below ten as words.",
    "Do not use lists, tables or headings.",
)
_OPENERS = (
    "I am new to {topic}. What should I buy first if I can spend {n} euros?",
    "We are {n} people and have one free weekend. What would you do about {topic}?",
    "Please explain the most common mistake in {topic} to my {n} year old.",
    "I read {n} pages about {topic} yesterday and understood nothing. Where do I start?",
    "My neighbour says that {topic} takes {n} hours a week. Is that right?",
)
_FOLLOW_UPS = (
    "And what if it rains for {n} days?",
    "Can you say that again in other words, shorter please?",
    "Why? Give me one reason that I can check myself.",
    "My brother disagrees. He has done it for {n} years. Who is right?",
    "Good. What is the next step after that?",
    "How much would that cost for {n} people?",
    "Is there a way to do it without any tools?",
    "What would you do differently in winter?",
    "Which part of that matters most, and which {n} parts can I leave out?",
    "Thanks. Please sum up what we have so far.",
)


def _chats(rng: np.random.Generator, number: int) -> list[Script]:
    topic = _TOPICS[number % len(_TOPICS)]
    rules = " ".join(_RULES[i] for i in rng.permutation(len(_RULES))[: int(rng.integers(5, 12))])
    preamble = f"You are {_PERSONAS[number % len(_PERSONAS)].format(topic=topic)}. {rules}"
    found = []
    for place in range(GROUP):
        texts = [_pick(rng, _OPENERS)] + [_pick(rng, _FOLLOW_UPS) for _ in range(int(rng.integers(2, 8)))]
        turns = tuple(Turn("user", t.format(topic=topic, n=rng.integers(2, 90)), _reply(rng)) for t in texts)
        found.append(Script(f"g{number}.chat{place}", "chat", preamble, turns))
    return found


# --- agents ---

_TOOLS = (
    ("read_file", "path", "Return the text of one file of the project."),
    ("list_folder", "path", "Return the names of the files and folders in a folder."),
    ("search_text", "pattern", "Return the lines of the project that match a pattern, with file and number."),
    ("run_tests", "selection", "Run some tests and return those that failed, with their messages."),
    ("write_file", "path", "Replace the text of one file and return its new size."),
    ("ask_database", "query", "Return at most ten rows of a read-only query."),
    ("fetch_page", "address", "Return the plain text of a page of the handbook."),
    ("open_ticket", "title", "File a ticket and return its number."),
)
_NAMES = ("parser", "billing", "router", "scheduler", "report", "importer", "mailer", "index", "cache", "login")
_TASKS = (
    "The {a} fails on empty input since last week. Find the cause and say which file has to change.",
    "Find out why the {a} needs {n} seconds for {n} rows, and name the slowest call.",
    "Rename the option limit of the {a} to max_rows everywhere, and list the files that you touched.",
    "A customer says that the {a} loses every {n}th line. Reproduce it with a test.",
)
_RESULTS = (
    "{a}/{b}.py:{n}: def load(path): ...\n{a}/{b}.py:{m}: raise ValueError(path)\n2 matches in {n} files",
    "{n} passed, 1 failed: test_{b}_empty: expected 0 rows, found {m}",
    "{a}.toml\n{b}.py\n{b}_test.py\nREADME.md\n{n} more",
    "rows: [[{n}, '{a}'], [{m}, '{b}'], [{n}, 'other']]; took {m} ms",
    "# {a}\nlimit = {n}\nretries = {m}\n# see {b} for the meaning of both",
    "written: {m} bytes, {n} lines changed in {b}.py",
)
_PARTS = (
    "Look only at {b}.py and say in one sentence what it does with an empty file.",
    "Check whether {b} is imported by {a}, and from where.",
    "Read the handbook's page on {b} and give the one rule that matters here.",
)


def _agents(rng: np.random.Generator, number: int) -> list[Script]:
    tools = "\n".join(
        f'{{"name": "{name}", "parameters": {{"{field}": "string"}}, "description": "{text}"}}'
        for name, field, text in (_TOOLS[i] for i in rng.permutation(len(_TOOLS)))
    )
    preamble = (
        "You are an agent that works on a software project. In each step either call one tool or give the final "
        f"answer. Call a tool as name(argument) and write nothing else.\nTools:\n{tools}"
    )
    found = []
    for place in range(GROUP):
        steps = int(rng.integers(5, 10))
        turns = [Turn("user", _fill(rng, _pick(rng, _TASKS)), _reply(rng))]
        turns += [Turn("tool", _fill(rng, _pick(rng, _RESULTS)), _reply(rng)) for _ in range(steps)]
        # All agents of a group delegate in the same step, so that the sub-agents are a group too.
        turns[2] = Turn("tool", "sub-agent: ", _reply(rng), delegate=True)
        session = f"g{number}.agent{place}"
        found.append(Script(session, "agent", preamble, tuple(turns), _subagent(rng, session)))
    return found


def _subagent(rng: np.random.Generator, parent: str) -> Script:
    preamble = (
        "You are a sub-agent. You see only your own task. Call read_file(path) or search_text(pattern), or give the "
        "final answer in one short sentence."
    )
    turns = [Turn("user", _fill(rng, _pick(rng, _PARTS)), _reply(rng))]
    turns += [Turn("tool", _fill(rng, _pick(rng, _RESULTS)), _reply(rng)) for _ in range(int(rng.integers(1, 4)))]
    return Script(parent + SUB, "subagent", preamble, tuple(turns))


def _fill(rng: np.random.Generator, text: str) -> str:
    a, b = _pick(rng, _NAMES), _pick(rng, _NAMES)
    return text.format(a=a, b=b, n=int(rng.integers(2, 400)), m=int(rng.integers(2, 9000)))
