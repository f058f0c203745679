"""Device code of the Gluon extend kernel for Hopper (sm_90): two consumer warpgroups, one producer, one CTA an SM.

A tile is 128 query rows: 128 / GROUP tokens times the GROUP query heads that share one KV head; 64 rows a consumer.
The producer walks the tile's KV blocks of 128 tokens from the last to the first and fills two-stage rings of K and V
in shared memory; the consumers run softmax(q K^T) V on them with wgmma, softmax of block j beside PV of block j + 1.
Tiles come from a list that is sorted on the device (`kvarena.kernels.extend_plan`); whichever CTA is
free takes the next one through an atomic counter, and the last CTA to finish resets it.

This module and the producer's import triton alone, so that they compile for sm_90 in an environment without torch or
a GPU. Written for the experimental Gluon API of Triton 3.6.
"""

from kvarena.kernels._hopper_producer import BLOCK, HALF, RECORD, next_stage, produce_boxes, produce_rows
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
PROBS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=MMA.value, k_width=2))
ROWS = gl.constexpr(gl.SliceLayout(1, MMA.value))
COLS = gl.constexpr(gl.SliceLayout(0, MMA.value))
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
ONE = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))


@gluon.jit
def _release(bar, PER_THREAD: gl.constexpr):
    """Hand a buffer back: by every thread (no barrier before it), or by one thread after a barrier of the partition."""
    if PER_THREAD:
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        mbarrier.arrive(bar)


@gluon.jit
def _mask_scores(scores, limit):
    """[64, 128]: column c of a row stays where c <= limit, else -1e30 (finite: such a row heals at its next block)."""
    cols = gl.arange(0, BLOCK, COLS)
    # One asm for compare and select: as two ops, all predicates are computed first and packed into words.
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0fF149F2CA, p; }",
        "=f,f,r,r",
        [scores, cols[None, :], limit[:, None]],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _partial_sums(p):
    """Row sums of [64, 128] as four numbers a row, one a thread: no shuffle until the tile ends."""
    return gl.sum(gl.sum(gl.reshape(p, [HALF, BLOCK // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _rescale(sums, alpha):
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))
    return sums * factor[:, None]


@gluon.jit
def _field(tile_s, slot, FIELD: gl.constexpr):
    """One int32 of a tile's record in shared memory, as a scalar."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(tile_s.index(slot * RECORD + FIELD).load(one), 0)


@gluon.jit
def _clear_tail(v_s, valid):
    """Zero the rows of a V block from `valid` on: unowned slots may hold NaN, and 0 x NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))
    for i in gl.static_range(BLOCK // 32):
        if valid < (i + 1) * 32:
            part = v_s.slice(i * 32, 32)
            kept = (rows + i * 32) < valid
            part.store(gl.where(kept[:, None], part.load(layout), 0.0).to(v_s.dtype))
    gl.thread_barrier()
    fence_async_shared()


@gluon.jit
def _first_block(q, k_s, k_full, k_empty, ks, kp, limit, scale, IS_GATHER: gl.constexpr):
    """Scores of the tile's last KV block: probabilities fp32 [64, 128], row maximum [64], partial sums [64, 4]."""
    mbarrier.wait(k_full.index(ks), kp)
    if IS_GATHER:
        fence_async_shared()
    zero = gl.zeros([HALF, BLOCK], gl.float32, MMA)
    s = warpgroup_mma(q, k_s.index(ks).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    _release(k_empty.index(ks), IS_GATHER)
    s = _mask_scores(s, limit)
    m = gl.max(s, 1)
    p = gl.exp2(s * scale - (m * scale)[:, None])
    return p, m, _partial_sums(p)


@gluon.jit
def _next_block(
    p, m, sums, o, q, k_s, v_s, k_full, k_empty, v_full, v_empty, order, ks, kp, vs, vp, op, limit, scale,
    WG: gl.constexpr, MASK: gl.constexpr, ORDER: gl.constexpr, IS_GATHER: gl.constexpr,
):  # fmt: skip
    """Scores of block j and PV of block j + 1 in flight together; then softmax of block j while PV runs."""
    mbarrier.wait(k_full.index(ks), kp)
    if IS_GATHER:  # copies of the generic proxy: one fence before both products
        mbarrier.wait(v_full.index(vs), vp)
        fence_async_shared()
    if ORDER:
        mbarrier.wait(order.index(WG), op)
    zero = gl.zeros([HALF, BLOCK], gl.float32, MMA)
    s = warpgroup_mma(q, k_s.index(ks).permute((1, 0)), zero, use_acc=False, is_async=True)
    p16 = gl.convert_layout(p.to(v_s.dtype), PROBS)
    if not IS_GATHER:
        mbarrier.wait(v_full.index(vs), vp)
    o = warpgroup_mma(p16, v_s.index(vs), o, is_async=True)
    if ORDER:
        mbarrier.arrive(order.index(1 - WG))
    s = warpgroup_mma_wait(1, deps=[s])
    _release(k_empty.index(ks), IS_GATHER)
    if MASK:
        s = _mask_scores(s, limit)
    m_new = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - m_new) * scale)
    p = gl.exp2(s * scale - (m_new * scale)[:, None])
    sums = _rescale(sums, alpha) + _partial_sums(p)
    o = warpgroup_mma_wait(0, deps=[o])
    _release(v_empty.index(vs), IS_GATHER)
    o = o * alpha[:, None]
    return p, m_new, sums, o


@gluon.jit
def _write_tile(
    o, m, sums, scale, out_ptr, lse_ptr, tile_s, slot, WG: gl.constexpr, GROUP: gl.constexpr,
    HEADS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Normalise and store [64, 128]; rows past the sequence are masked; rows of an empty one are 0, lse -inf."""
    # Read again rather than kept in registers through the loop over KV blocks.
    first, tokens, position = _field(tile_s, slot, 0), _field(tile_s, slot, 1), _field(tile_s, slot, 2)
    head = _field(tile_s, slot, 5)
    total = gl.convert_layout(gl.sum(sums, 1), ROWS)
    o = o * (1.0 / total)[:, None]
    o16 = gl.convert_layout(o.to(out_ptr.dtype.element_ty), STORE)
    row = gl.arange(0, HALF, gl.SliceLayout(1, STORE))
    token = WG * (HALF // GROUP) + row // GROUP
    o16 = gl.where((position + token >= 0)[:, None], o16, 0.0).to(o16.dtype)
    start = ((first + token).to(gl.int64) * HEADS + head * GROUP + row % GROUP) * BLOCK
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, STORE))
    gl.store(out_ptr + start[:, None] + cols[None, :], o16, mask=(token < tokens)[:, None])
    if LSE:
        row = gl.arange(0, HALF, ROWS)
        token = WG * (HALF // GROUP) + row // GROUP
        lse = (m * scale + gl.log2(total)) / LOG2_E
        lse = gl.where(position + token >= 0, lse, -float("inf"))
        at = (first + token).to(gl.int64) * HEADS + head * GROUP + row % GROUP
        gl.store(lse_ptr + at, lse, mask=token < tokens)


@gluon.jit
def _consume(
    WG: gl.constexpr, q_s, k_s, v_s, tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, order, tile_full,
    tile_empty, out_ptr, lse_ptr, scale, GROUP: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr,
    ORDER: gl.constexpr, IS_GATHER: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup (4 warps): 64 of the tile's 128 query rows."""
    q = q_s.index(WG).reshape((HALF, BLOCK))
    token = WG * (HALF // GROUP) + gl.arange(0, HALF, ROWS) // GROUP
    ks, kp, vs, vp, qp, ts, tp = 0, 0, 0, 0, 0, 0, 0
    op = 1 - WG  # consumer 0 goes first
    mbarrier.wait(tile_full.index(ts), tp)
    tokens = _field(tile_s, ts, 1)
    while tokens > 0:
        position = _field(tile_s, ts, 2)
        last = gl.maximum(position + tokens - 1, 0) // BLOCK
        full = gl.minimum(gl.maximum(position + 1, 0) // BLOCK, last)
        mbarrier.wait(q_full, qp)
        limit = position + token - last * BLOCK
        p, m, sums = _first_block(q, k_s, k_full, k_empty, ks, kp, limit, scale, IS_GATHER)
        ks, kp = next_stage(ks, kp)
        o = gl.zeros([HALF, BLOCK], gl.float32, MMA)
        if PAGE > 1 and not IS_GATHER:
            seq_len = _field(tile_s, ts, 3)
            if (last + 1) * BLOCK > seq_len:
                mbarrier.wait(v_full.index(vs), vp)
                _clear_tail(v_s.index(vs), seq_len - last * BLOCK)
        for j in range(last - 1, full - 1, -1):
            limit = position + token - j * BLOCK
            p, m, sums, o = _next_block(
                p, m, sums, o, q, k_s, v_s, k_full, k_empty, v_full, v_empty, order, ks, kp, vs, vp, op, limit, scale,
                WG, True, ORDER, IS_GATHER,
            )  # fmt: skip
            ks, kp = next_stage(ks, kp)
            vs, vp = next_stage(vs, vp)
            op = op ^ 1
        for _ in range(full):
            p, m, sums, o = _next_block(
                p, m, sums, o, q, k_s, v_s, k_full, k_empty, v_full, v_empty, order, ks, kp, vs, vp, op, limit, scale,
                WG, False, ORDER, IS_GATHER,
            )  # fmt: skip
            ks, kp = next_stage(ks, kp)
            vs, vp = next_stage(vs, vp)
            op = op ^ 1
        mbarrier.arrive(q_empty)
        mbarrier.wait(v_full.index(vs), vp)
        if IS_GATHER:
            fence_async_shared()
        o = warpgroup_mma(gl.convert_layout(p.to(v_s.dtype), PROBS), v_s.index(vs), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        _release(v_empty.index(vs), IS_GATHER)
        vs, vp = next_stage(vs, vp)
        _write_tile(
            o, m, sums, scale, out_ptr, lse_ptr, tile_s, ts, WG, GROUP, HEADS, LSE,
        )  # fmt: skip
        mbarrier.arrive(tile_empty.index(ts))
        qp = qp ^ 1
        ts, tp = next_stage(ts, tp)
        mbarrier.wait(tile_full.index(ts), tp)
        tokens = _field(tile_s, ts, 1)


@gluon.jit
def extend_kernel(
    q_desc, k_desc, v_desc, k_ptr, v_ptr, out_ptr, lse_ptr, entries_ptr, tiles_ptr, state_at, scale,
    stride_entries, k_head_rows, k_head_cols, v_head_rows, v_head_cols,
    GROUP: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, TPE: gl.constexpr, K_STRIDES: gl.constexpr,
    V_STRIDES: gl.constexpr, BOX: gl.constexpr, ORDER: gl.constexpr, IS_GATHER: gl.constexpr, LSE: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """One persistent CTA; grid (number of SMs,). `scale` is the softmax scale times log2(e)."""
    dtype: gl.constexpr = q_desc.dtype
    state_ptr = tiles_ptr + state_at
    ring: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_s = gl.allocate_shared_memory(dtype, [2, HALF // GROUP, GROUP, BLOCK], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], ring)
    v_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], ring)
    tile_s = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], ONE)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    filled: gl.constexpr = 128 if IS_GATHER else 1  # arrivals that fill a stage: the threads, or one `expect`
    freed: gl.constexpr = 256 if IS_GATHER else 2  # arrivals that free a stage: the threads, or the two consumers
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=filled)
        mbarrier.init(v_full.index(i), count=filled)
        mbarrier.init(k_empty.index(i), count=freed)
        mbarrier.init(v_empty.index(i), count=freed)
        mbarrier.init(order.index(i), count=1)
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=2)
    # Tuples held in variables would turn compile-time values into tensors: every argument is spelled out.
    if IS_GATHER:
        gl.warp_specialize(
            [
                (_consume, (0, q_s, k_s, v_s, tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, order,
                            tile_full, tile_empty, out_ptr, lse_ptr, scale, GROUP, HEADS, PAGE, ORDER, IS_GATHER,
                            LSE)),
                (_consume, (1, q_s, k_s, v_s, tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, order,
                            tile_full, tile_empty, out_ptr, lse_ptr, scale, GROUP, HEADS, PAGE, ORDER, IS_GATHER,
                            LSE)),
                (produce_rows, (q_desc, k_ptr, v_ptr, q_s, k_s, v_s, tile_s, q_full, q_empty, k_full, k_empty,
                                 v_full, v_empty, tile_full, tile_empty, entries_ptr, tiles_ptr, state_ptr,
                                 stride_entries, GROUP, PAGE, TPE, K_STRIDES, V_STRIDES, PRODUCER_WARPS)),
            ],
            [4, PRODUCER_WARPS],
            [CONSUMER_REGS, PRODUCER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, q_s, k_s, v_s, tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, order,
                            tile_full, tile_empty, out_ptr, lse_ptr, scale, GROUP, HEADS, PAGE, ORDER, IS_GATHER,
                            LSE)),
                (_consume, (1, q_s, k_s, v_s, tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, order,
                            tile_full, tile_empty, out_ptr, lse_ptr, scale, GROUP, HEADS, PAGE, ORDER, IS_GATHER,
                            LSE)),
                (produce_boxes, (q_desc, k_desc, v_desc, q_s, k_s, v_s, tile_s, q_full, q_empty, k_full, k_empty,
                                  v_full, v_empty, tile_full, tile_empty, entries_ptr, tiles_ptr, state_ptr,
                                  stride_entries, k_head_rows, k_head_cols, v_head_rows, v_head_cols, GROUP, PAGE,
                                  TPE, K_STRIDES[0] // K_STRIDES[1], V_STRIDES[0] // V_STRIDES[1], BOX,
                                  PRODUCER_WARPS)),
            ],
            [4, PRODUCER_WARPS],
            [CONSUMER_REGS, PRODUCER_REGS],
        )  # fmt: skip
