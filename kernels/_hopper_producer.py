"""The producer of the Gluon extend kernel: takes tiles from the list and fills the rings of K and V in shared memory.

By TMA boxes where a page has 8 tokens or more, by a gather of rows below. The rest of the kernel, and what it is
written for, is in `kvarena.kernels._hopper`; like it, this module imports triton alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

BLOCK = gl.constexpr(128)  # KV tokens a block, also head_dim
HALF = gl.constexpr(64)  # query rows of one consumer warpgroup
RECORD = gl.constexpr(8)  # int32 fields of a tile: first query token, tokens, position, seq_len, table row, KV head
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def next_stage(stage, phase):
    """The ring of two: the phase flips when stage 1 is left."""
    return stage ^ 1, phase ^ stage


@gluon.jit
def _hand_over(tile_s, tile_full, tile_empty, slot, phase, first, tokens, position, seq_len, head, W: gl.constexpr):
    """Give the consumers a tile's record through the two-slot ring; zero tokens ends their loop."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    mbarrier.wait(tile_empty.index(slot), phase ^ 1)
    tile_s.index(slot * RECORD).store(gl.full([1], first, gl.int32, one))
    tile_s.index(slot * RECORD + 1).store(gl.full([1], tokens, gl.int32, one))
    tile_s.index(slot * RECORD + 2).store(gl.full([1], position, gl.int32, one))
    tile_s.index(slot * RECORD + 3).store(gl.full([1], seq_len, gl.int32, one))
    tile_s.index(slot * RECORD + 5).store(gl.full([1], head, gl.int32, one))
    mbarrier.arrive(tile_full.index(slot))


@gluon.jit
def _take_tile(tiles_ptr, state_ptr, tile_s, tile_full, tile_empty, slot, phase, W: gl.constexpr):
    """The next tile of the list for this CTA, handed to the consumers too; zero tokens when the list is done."""
    index = gl.atomic_add(state_ptr + 1, 1)
    first, tokens, position, seq_len, row, head = 0, 0, 0, 0, 0, 0
    if index < gl.load(state_ptr):
        record = tiles_ptr + index * RECORD
        first = gl.load(record)
        tokens = gl.load(record + 1)
        position = gl.load(record + 2)
        seq_len = gl.load(record + 3)
        row = gl.load(record + 4)
        head = gl.load(record + 5)
    _hand_over(tile_s, tile_full, tile_empty, slot, phase, first, tokens, position, seq_len, head, W)
    return first, tokens, position, seq_len, row, head


@gluon.jit
def _leave(state_ptr):
    """The last CTA out resets the counters for the next launch on the same plan."""
    if gl.atomic_add(state_ptr + 2, 1) == gl.num_programs(0) - 1:
        gl.store(state_ptr + 1, 0)
        gl.store(state_ptr + 2, 0)


@gluon.jit
def _load_query(q_desc, q_s, q_full, q_empty, phase, first, head, GROUP: gl.constexpr):
    """Both halves of the query tile by TMA; rows past the sequence belong to the next one and are never stored."""
    mbarrier.wait(q_empty, phase ^ 1)
    mbarrier.expect(q_full, 2 * HALF * BLOCK * 2)
    tma.async_copy_global_to_shared(q_desc, [first, head * GROUP, 0], q_full, q_s.index(0))
    tma.async_copy_global_to_shared(q_desc, [first + HALF // GROUP, head * GROUP, 0], q_full, q_s.index(1))


@gluon.jit
def _box_rows(
    entries, block, last_box, head_rows, PAGE: gl.constexpr, TPE: gl.constexpr, ROWS_A_PAGE: gl.constexpr,
    BOX: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    """Row in the pool's [rows, cols] view of each TMA box of a KV block, as a tuple of BLOCK / BOX scalars.

    CLAMP: the sequence may end inside the block; boxes past its last one repeat it.
    """
    rows = ()
    for i in gl.static_range(BLOCK // BOX):
        position = block * BLOCK + i * BOX
        if CLAMP:
            position = gl.minimum(position, last_box)
        if TPE == 1:
            row = gl.load(entries + position)
            if ROWS_A_PAGE != PAGE:
                row = row // PAGE * ROWS_A_PAGE + row % PAGE
        else:
            row = gl.load(entries + position // TPE) * ROWS_A_PAGE
            if PAGE > BOX:
                row += position % PAGE
        rows = rows + (row + head_rows,)  # type: ignore[assignment]  # noqa: RUF005 - starred tuples are no Triton
    return rows


@gluon.jit
def _load_boxes(desc, buf, full, empty, stage, phase, rows, col, BOX: gl.constexpr):
    """One KV block into a ring stage: BLOCK / BOX boxes, one `expect` for all their bytes."""
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), BLOCK * BLOCK * 2)
    for i in gl.static_range(BLOCK // BOX):
        tma.async_copy_global_to_shared(desc, [rows[i], col], full.index(stage), buf.index(stage).slice(i * BOX, BOX))


@gluon.jit
def produce_boxes(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full,
    tile_empty, entries_ptr, tiles_ptr, state_ptr, stride_entries, k_head_rows, k_head_cols, v_head_rows, v_head_cols,
    GROUP: gl.constexpr, PAGE: gl.constexpr, TPE: gl.constexpr, K_ROWS: gl.constexpr, V_ROWS: gl.constexpr,
    BOX: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Producer by TMA boxes of min(PAGE, 128) tokens: pages of 8 tokens and more."""
    ks, kp, vs, vp, qp, ts, tp = 0, 0, 0, 0, 0, 0, 0
    first, tokens, position, seq_len, row, head = _take_tile(
        tiles_ptr, state_ptr, tile_s, tile_full, tile_empty, ts, tp, W
    )
    while tokens > 0:
        entries = entries_ptr + row.to(gl.int64) * stride_entries
        last_box = gl.maximum(seq_len - 1, 0) // BOX * BOX
        last = gl.maximum(position + tokens - 1, 0) // BLOCK
        k_first, k_col, v_first, v_col = (
            head * k_head_rows, head * k_head_cols, head * v_head_rows, head * v_head_cols,
        )  # fmt: skip
        _load_query(q_desc, q_s, q_full, q_empty, qp, first, head, GROUP)
        qp = qp ^ 1
        rows = _box_rows(entries, last, last_box, k_first, PAGE, TPE, K_ROWS, BOX, True)
        _load_boxes(k_desc, k_s, k_full, k_empty, ks, kp, rows, k_col, BOX)
        ks, kp = next_stage(ks, kp)
        for j in range(last - 1, -1, -1):
            rows = _box_rows(entries, j, last_box, k_first, PAGE, TPE, K_ROWS, BOX, False)
            _load_boxes(k_desc, k_s, k_full, k_empty, ks, kp, rows, k_col, BOX)
            ks, kp = next_stage(ks, kp)
            rows = _box_rows(entries, j + 1, last_box, v_first, PAGE, TPE, V_ROWS, BOX, True)
            _load_boxes(v_desc, v_s, v_full, v_empty, vs, vp, rows, v_col, BOX)
            vs, vp = next_stage(vs, vp)
        rows = _box_rows(entries, 0, last_box, v_first, PAGE, TPE, V_ROWS, BOX, True)
        ts, tp = next_stage(ts, tp)
        # The next tile is taken before the wait for the last V: the counter's latency is hidden behind it.
        first, tokens, position, seq_len, row, head = _take_tile(
            tiles_ptr, state_ptr, tile_s, tile_full, tile_empty, ts, tp, W
        )
        _load_boxes(v_desc, v_s, v_full, v_empty, vs, vp, rows, v_col, BOX)
        vs, vp = next_stage(vs, vp)
    _leave(state_ptr)


@gluon.jit
def _token_slots(entries, block, end, TPE: gl.constexpr, CLAMP: gl.constexpr):
    """Slot of each of a KV block's 128 tokens; CLAMP: past the end, the last token again (always finite)."""
    position = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, GATHER))
    if CLAMP:
        position = gl.minimum(position, end)
    if TPE == 1:
        return gl.load(entries + position)
    return gl.load(entries + position // TPE) * TPE + position % TPE


@gluon.jit
def _copy_rows(
    ptr, slots, buf, full, empty, stage, phase, STRIDE_PAGE: gl.constexpr, STRIDE_SLOT: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """One KV block into a ring stage by 16-byte cp.async; each of the 128 threads arrives when its copies are done."""
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, GATHER))
    if STRIDE_PAGE == PAGE * STRIDE_SLOT:
        offsets = slots.to(gl.uint32).to(gl.uint64) * STRIDE_SLOT
    else:
        offsets = (slots // PAGE).to(gl.uint32).to(gl.uint64) * STRIDE_PAGE + (slots % PAGE) * STRIDE_SLOT
    pointers = (ptr + cols)[None, :] + offsets[:, None]
    mbarrier.wait(empty.index(stage), phase ^ 1)
    async_copy.async_copy_global_to_shared(buf.index(stage), pointers)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def produce_rows(
    q_desc, k_ptr, v_ptr, q_s, k_s, v_s, tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full,
    tile_empty, entries_ptr, tiles_ptr, state_ptr, stride_entries,
    GROUP: gl.constexpr, PAGE: gl.constexpr, TPE: gl.constexpr, K_STRIDES: gl.constexpr, V_STRIDES: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """Producer by gathered rows: pages of fewer than 8 tokens, where no TMA box fits the swizzled buffer."""
    ks, kp, vs, vp, qp, ts, tp = 0, 0, 0, 0, 0, 0, 0
    first, tokens, position, seq_len, row, head = _take_tile(
        tiles_ptr, state_ptr, tile_s, tile_full, tile_empty, ts, tp, W
    )
    while tokens > 0:
        entries = entries_ptr + row.to(gl.int64) * stride_entries
        k_head = k_ptr + head.to(gl.int64) * K_STRIDES[2]
        v_head = v_ptr + head.to(gl.int64) * V_STRIDES[2]
        last = gl.maximum(position + tokens - 1, 0) // BLOCK
        _load_query(q_desc, q_s, q_full, q_empty, qp, first, head, GROUP)
        qp = qp ^ 1
        slots = _token_slots(entries, last, gl.maximum(seq_len - 1, 0), TPE, True)
        slots = gl.where(seq_len > 0, slots, 0)  # an empty request's row may hold anything
        ahead = _token_slots(entries, gl.maximum(last - 1, 0), 0, TPE, False)
        _copy_rows(k_head, slots, k_s, k_full, k_empty, ks, kp, K_STRIDES[0], K_STRIDES[1], PAGE)
        ks, kp = next_stage(ks, kp)
        for j in range(last - 1, -1, -1):
            after = _token_slots(entries, gl.maximum(j - 1, 0), 0, TPE, False)
            _copy_rows(k_head, ahead, k_s, k_full, k_empty, ks, kp, K_STRIDES[0], K_STRIDES[1], PAGE)
            ks, kp = next_stage(ks, kp)
            _copy_rows(v_head, slots, v_s, v_full, v_empty, vs, vp, V_STRIDES[0], V_STRIDES[1], PAGE)
            vs, vp = next_stage(vs, vp)
            slots = ahead
            ahead = after
        ts, tp = next_stage(ts, tp)
        # The next tile is taken before the wait for the last V: the counter's latency is hidden behind it.
        first, tokens, position, seq_len, row, head = _take_tile(
            tiles_ptr, state_ptr, tile_s, tile_full, tile_empty, ts, tp, W
        )
        _copy_rows(v_head, slots, v_s, v_full, v_empty, vs, vp, V_STRIDES[0], V_STRIDES[1], PAGE)
        vs, vp = next_stage(vs, vp)
    _leave(state_ptr)
