"""The token design again, slow and obvious: the rules as written down, no shortcut.

Every node of a path is locked, every node of a match is touched, every eviction looks at all leaves, the free pages
are one list. Written from the rules alone, so that the fast structures have something to be compared with, also
under the eviction orders that no recorded log covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Page = tuple[int, ...]


@dataclass(eq=False)
class OracleNode:
    """An edge as a list of pages' tokens, and the ids of these pages."""

    key: list[Page]
    pages: list[int]
    parent: OracleNode | None
    children: list[OracleNode] = field(default_factory=list)
    lock: int = 0
    time: float = 0.0
    created: float = 0.0
    hits: int = 0
    priority: int = 0


@dataclass
class OracleRequest:
    tokens: list[int]
    num_prompt: int
    row: list[int]
    node: OracleNode
    protected: int  # pages
    inserted: int = 0  # pages that earlier checkpoints covered
    computed: int = 0  # tokens


ORDERS = {
    "lru": lambda n: (n.time,),
    "lfu": lambda n: (n.hits, n.time),
    "fifo": lambda n: (n.created, n.time),
    "filo": lambda n: (-n.created, n.time),
    "mru": lambda n: (-n.time,),
    "priority": lambda n: (n.priority, n.time),
    "slru": lambda n: (1 if n.hits >= 2 else 0, n.time),
}


class TokenOracle:
    def __init__(self, num_pages: int, page_size: int, order: str = "lru", *, page_unit: bool = False) -> None:
        self.size = page_size
        self.order = ORDERS[order]
        self.page_unit = page_unit
        self.free = list(range(1, num_pages + 1))
        self.root = OracleNode([], [], None, lock=1)
        self.clock = 0
        self.live: dict[str, OracleRequest] = {}
        self.evicted: list[int] = []

    # --- operations ---

    def arrive(
        self, name: str, tokens: list[int], chunk: int | None = None, num_prompt: int | None = None
    ) -> tuple[bool, int, list[int]]:
        """`num_prompt` differs from the length for a request that comes back with what it had generated."""
        self.evicted = []
        node = self._match(self._pages(tokens[:-1]))
        path = self._path(node)
        hit = [page for step in path for page in step.pages]
        self._lock(node, 1)
        need = -(-len(tokens) // self.size) - len(hit)
        if need > len(self.free) + self.evictable():
            self._lock(node, -1)
            return False, 0, []
        request = OracleRequest(list(tokens), num_prompt or len(tokens), list(hit), node, len(hit))
        request.computed = len(hit) * self.size
        while request.computed < len(tokens):
            end = len(tokens) if chunk is None else min(request.computed + chunk, len(tokens))
            new = end - request.computed
            self._evict(new + (self.size if self.size > 1 else 0))
            count = -(-end // self.size) - len(request.row)
            if count > len(self.free):
                self._give_up(request)
                return False, 0, []
            request.row += self._take(count)
            request.computed = end
            frees = self._checkpoint(request, end)
            if end == len(tokens):
                self._put([page for run in frees for page in run])
            else:
                for run in frees:
                    self._put(run)
        self.live[name] = request
        return True, len(hit) * self.size, list(request.row)

    def decode(self, steps: list[tuple[str, int]]) -> list[list[int]] | None:
        """One token for each request of a batch; None when they do not all fit."""
        self.evicted = []
        self._evict(len(steps) * self.size)
        counts = []
        for name, _ in steps:
            request = self.live[name]
            counts.append(-(-(request.computed + 1) // self.size) - len(request.row))
        if sum(counts) > len(self.free):
            return None
        new = []
        for (name, token), count in zip(steps, counts, strict=True):
            request = self.live[name]
            new.append(self._take(count))
            request.row += new[-1]
            request.tokens.append(token)
            request.computed += 1
        return new

    def finish(self, name: str) -> None:
        self.evicted = []
        request = self.live.pop(name)
        frees = self._checkpoint(request, request.computed)
        frees.append(request.row[request.protected :])
        self._put([page for run in frees for page in run])
        self._lock(request.node, -1)

    def preempt(self, name: str) -> None:
        self.evicted = []
        self._give_up(self.live.pop(name))
        self._evict(20 * len(self.live))

    def evictable(self) -> int:
        return sum(len(node.pages) for node in self._nodes() if node.lock == 0)

    # --- tree ---

    def _pages(self, tokens: list[int]) -> list[Page]:
        whole = len(tokens) // self.size * self.size
        return [tuple(tokens[at : at + self.size]) for at in range(0, whole, self.size)]

    def _now(self) -> float:
        self.clock += 1
        return float(self.clock)

    def _step(self, node: OracleNode, key: list[Page]) -> tuple[OracleNode | None, int]:
        for child in node.children:
            common = 0
            while common < min(len(child.key), len(key)) and child.key[common] == key[common]:
                common += 1
            if common:
                return child, common
        return None, 0

    def _match(self, key: list[Page]) -> OracleNode:
        if not key:
            return self.root
        node = self.root
        while key:
            child, common = self._step(node, key)
            if child is None:
                break
            node = child if common == len(child.key) else self._split(child, common)
            if node is not child:
                break
            key = key[common:]
        now = self._now()
        for level, step in enumerate(reversed(self._path(node))):
            step.time = now - 1e-5 * level
        return node

    def _split(self, child: OracleNode, cut: int) -> OracleNode:
        parent = child.parent
        upper = OracleNode(child.key[:cut], child.pages[:cut], parent, [child])
        upper.lock, upper.priority, upper.hits, upper.created = child.lock, child.priority, child.hits, child.created
        parent.children[parent.children.index(child)] = upper
        child.key, child.pages, child.parent = child.key[cut:], child.pages[cut:], upper
        upper.time = self._now()
        child.time = self._now()
        return upper

    def _insert(self, key: list[Page], row: list[int], above: int, inserted: int, priority: int) -> list[list[int]]:
        self.root.time = self._now()
        node, at, frees = self.root, 0, []
        while at < len(key):
            child, common = self._step(node, key[at:])
            if child is None:
                child = OracleNode(key[at:], list(row[at : len(key)]), node, priority=priority)
                child.created = child.time = self._now()
                node.children.append(child)
                child.hits += len(key) > inserted
                break
            node = child if common == len(child.key) else self._split(child, common)
            node.time = self._now()
            node.priority = max(node.priority, priority)
            duplicate = row[max(at, above) : at + common]
            if duplicate:
                frees.append(list(duplicate))
            at += common
            node.hits += at > inserted
        return frees

    def _checkpoint(self, request: OracleRequest, computed: int) -> list[list[int]]:
        key = self._pages(request.tokens[:computed])
        frees = self._insert(key, request.row, request.protected, request.inserted, 0)
        request.inserted = len(key)
        prompt = self._pages(request.tokens[: request.num_prompt])
        if prompt and len(prompt) < len(key):
            self._insert(prompt, request.row, len(prompt), len(key), 1)
        node = self._match(key)
        held = [page for step in self._path(node) for page in step.pages]
        request.row[: len(key)] = held
        self._lock(node, 1)
        self._lock(request.node, -1)
        request.node, request.protected = node, len(key)
        return frees

    def _path(self, node: OracleNode) -> list[OracleNode]:
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _lock(self, node: OracleNode, by: int) -> None:
        for step in self._path(node):
            step.lock += by

    def _nodes(self) -> list[OracleNode]:
        found, stack = [], list(self.root.children)
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children
        return found

    # --- pages ---

    def _take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _put(self, run: list[int]) -> None:
        self.free = self.free + run if self.size == 1 else run + self.free

    def _give_up(self, request: OracleRequest) -> None:
        self._put(request.row[request.protected :])
        self._lock(request.node, -1)

    def _evict(self, tokens: int) -> None:
        short = tokens - len(self.free) * self.size
        while short > 0:
            leaves = [node for node in self._nodes() if node.lock == 0 and not node.children]
            if not leaves:
                return
            leaf = min(leaves, key=self.order)
            if self.page_unit:
                gone = [leaf.pages.pop()]
                leaf.key.pop()
            else:
                gone, leaf.pages = leaf.pages, []
            if not leaf.pages:
                leaf.parent.children.remove(leaf)
            self._put(gone)
            self.evicted += gone
            short -= len(gone) * self.size
