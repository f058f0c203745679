"""The point of it all: two allocators, two page tables, one kernel set, the same attention.

The same random requests run through the block allocator with a block_table and the token allocator with a
req_to_token. Each has its own pool, poisoned with NaN and filled by `store_kv` through its own slot mapping only:
what one of them hits it does not write again. Keys, values and queries are functions of a token's content (all
tokens up to it), so both must give the same output for the same token: bitwise where both tables have the same
width (the same tiles in the same order), and within the derived bound of float64 attention without any pages.
"""

import random
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need triton")

from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter  # noqa: E402
from kvarena.allocators.config import make_allocator  # noqa: E402
from kvarena.allocators.interface import Release, Sequence  # noqa: E402
from kvarena.experiments.kernel_runs import attend  # noqa: E402
from kvarena.experiments.shadow import Actor, Contents  # noqa: E402
from kvarena.kernels.decode import paged_decode  # noqa: E402
from kvarena.kernels.extend import paged_extend  # noqa: E402
from kvarena.kernels.pool import KVPool  # noqa: E402
from kvarena.kernels.store import store_kv  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_TOKENS = 64  # of a row, in every table: the same width gives the same splits
HEAD_DIM = 64


@dataclass
class Model:
    """Keys, values and queries by content, and the requests' contents."""

    num_heads: int
    num_kv_heads: int
    seed: int
    contents: Contents = field(default_factory=Contents)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.num_kv_heads, self.num_kv_heads, self.num_heads)
        tables = [torch.randn(600, n, HEAD_DIM, generator=generator).to(DEVICE) for n in heads]
        self.keys, self.values, self.queries = tables

    def exact(self, content):
        """(bound, float64 output) of a token whose tokens up to it have these contents."""
        return attend(self.queries[content[-1]], self.keys[content], self.values[content])


class Side:
    """One allocator with its table and pool, and the outputs of each token it computed."""

    def __init__(self, model, spec, table, layout, num_slots):
        size = spec["page_size"]
        self.model = model
        self.allocator = make_allocator(spec, num_pages=num_slots // size)
        self.adapter = table(self.allocator, max_requests=5, max_tokens=MAX_TOKENS, device=DEVICE)
        self.pool = KVPool(
            1, num_slots // size, size, model.num_kv_heads, HEAD_DIM, dtype=torch.float32, device=DEVICE, layout=layout
        ).fill_(float("nan"))
        self.live = {}
        self.hits = 0
        self.outputs = {}  # (request, position, op) -> [HQ, D]
        self.stored = 0

    def step(self, finish, arrivals, decode):
        """End some requests, admit others, one token more for the rest; returns who computed in this step."""
        for name in finish:
            seq = self.live.pop(name).seq
            self.allocator.release([seq], Release.FINISH)
            self.adapter.remove(seq)
        work = []
        for name, token in decode:
            actor = self.live[name]
            actor.seq.append(token)
            work.append((actor, 1))
        grown = self.allocator.reserve([(actor.seq, n) for actor, n in work]) if work else []
        assert grown is not None
        self.adapter.update_all(grown)
        for name, tokens in arrivals:
            actor = self.live[name] = Actor(Sequence(name, tokens))
            pin = self.allocator.pin(actor.seq)
            self.hits += pin.hit_tokens
            work.append((actor, len(tokens) - pin.hit_tokens))
            self.adapter.update_all(self.allocator.reserve([(actor.seq, work[-1][1])]))
        self.compute(work)
        self.allocator.check()

    def compute(self, work):
        """One mixed batch: store all new tokens, extend over them, decode over each last one, commit."""
        model, seqs = self.model, [actor.seq for actor, _ in work]
        for actor, _ in work:
            model.contents.note(actor)
        batch = self.adapter.batch(seqs, [n for _, n in work], pad_requests=5)
        new = [c for actor, n in work for c in actor.content[-n:]]
        last = [actor.content[-1] for actor, _ in work]
        caches = self.pool.key(0), self.pool.value(0)
        store_kv(model.keys[new], model.values[new], *caches, batch.slot_mapping)
        extended = paged_extend(model.queries[new], *caches, batch.table, batch.query_start_loc)
        queries = torch.zeros(5, model.num_heads, HEAD_DIM, device=DEVICE)
        queries[: len(last)] = model.queries[last]
        decoded = paged_decode(queries, *caches, batch.table)
        assert not decoded[len(last) :].any()  # padded rows
        self.stored += len(new)
        row = 0
        for b, (actor, n) in enumerate(work):
            for position in range(actor.seq.num_tokens - n, actor.seq.num_tokens):
                self.outputs[actor.seq.request_id, position, "extend"] = extended[row]
                row += 1
            self.outputs[actor.seq.request_id, actor.seq.num_tokens - 1, "decode"] = decoded[b]
        self.adapter.update_all(self.allocator.commit([(actor.seq, actor.seq.num_tokens) for actor, _ in work]))
        self.adapter.check([actor.seq for actor in self.live.values()])


def schedule(seed):
    """Steps of (finished, arrivals, decodes): prompts with shared heads, some while the first owner still runs."""
    rng = random.Random(seed)
    live, steps, known = [], [], []
    for number in range(6):
        finish = [live.pop(rng.randrange(len(live)))] if len(live) > 3 or (live and rng.random() < 0.3) else []
        decode = [(name, rng.randrange(9)) for name in live]
        arrivals = []
        for part in range(2 if number < 2 else 1):
            head = rng.choice(known)[: rng.randint(6, 24)] if known and rng.random() < 0.8 else []
            prompt = [*head, *(rng.randrange(9) for _ in range(rng.randint(1, 6) if head else rng.randint(17, 24)))]
            known.append(prompt)
            arrivals.append((f"r{number}.{part}", prompt))
        live += [name for name, _ in arrivals]
        steps.append((finish, arrivals, decode))
    return steps


@pytest.mark.parametrize(
    ("block_page", "token_page", "heads", "seed"),
    [(16, 1, (2, 1), 0), (4, 1, (3, 1), 1), (16, 16, (4, 2), 2), (1, 4, (2, 2), 3)],
    ids=lambda value: f"{value}",
)
def test_two_allocators_and_two_tables_give_the_same_attention(block_page, token_page, heads, seed):
    model = Model(*heads, seed)
    block = Side(model, {"kind": "block", "page_size": block_page}, BlockTableAdapter, "fused", 192)
    token = Side(model, {"kind": "token", "page_size": token_page}, ReqToTokenAdapter, "split", 192)
    steps, contents = schedule(seed), {}
    for finish, arrivals, decode in steps:
        for side in (block, token):
            side.step(finish, arrivals, decode)
        contents |= {name: actor.content[:] for name, actor in block.live.items()}
    assert block.hits, "the schedule must share prefixes"
    assert token.hits
    for name, content in contents.items():
        for op in ("extend", "decode"):
            assert (name, len(content) - 1, op) in block.outputs.keys() & token.outputs.keys()
    both = block.outputs.keys() & token.outputs.keys()
    assert len(both) > 20
    for key in both:
        assert torch.equal(block.outputs[key], token.outputs[key]), key
    for side in (block, token):
        for (name, position, op), out in side.outputs.items():
            bound, exact = model.exact(contents[name][: position + 1])
            assert (out - exact).abs().max() <= bound, (name, position, op)


def test_the_two_runs_differ_in_what_they_store():
    """Else the comparison above would say nothing of hits: at page 16 a shared head is cut to pages."""
    model = Model(1, 1, 0)
    sides = [
        Side(model, {"kind": "block", "page_size": 16}, BlockTableAdapter, "fused", 192),
        Side(model, {"kind": "token", "page_size": 1}, ReqToTokenAdapter, "split", 192),
    ]
    for finish, arrivals, decode in schedule(0)[:4]:
        for side in sides:
            side.step(finish, arrivals, decode)
    assert sides[1].stored < sides[0].stored


@pytest.mark.parametrize("fault", ["stale row", "swapped pages", "short length"])
def test_a_wrong_table_changes_the_attention(fault):
    model = Model(2, 1, 5)
    side = Side(model, {"kind": "block", "page_size": 4}, BlockTableAdapter, "fused", 192)
    side.step([], [("a", list(range(9))), ("b", [8, 7, 6, 5, 4, 3])], [])
    a = side.live["a"]
    bound, exact = model.exact(a.content)
    table = side.adapter.batch([a.seq], [0]).table
    caches = side.pool.key(0), side.pool.value(0)
    query = model.queries[a.content[-1]][None]
    assert (paged_decode(query, *caches, table)[0] - exact).abs().max() <= bound
    if fault == "stale row":
        table.entries[0, 2] = side.allocator.page_ids(side.live["b"].seq)[0]
    elif fault == "swapped pages":
        table.entries[0, 0], table.entries[0, 2] = table.entries[0, 2].item(), table.entries[0, 0].item()
    else:
        table.seq_lens[0] -= 1
    assert not (paged_decode(query, *caches, table)[0] - exact).abs().max() <= bound  # NaN is not within either
