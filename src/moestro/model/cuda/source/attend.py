"""Paged attention of a step, decodes and chunks alike, whose bits depend on a query's own sequence alone.

Keys are cut at fixed positions into splits of SPLIT tokens. A split is reduced by itself, in tiles of TILE keys, and
splits are merged in ascending order. Whether one program walks all splits of a query (a chunk), or each split has a
program of its own and the last of them to end joins them (a decode), the operations on a row are the same. The weights
are summed by a product with ones, because the order of `tl.sum` depends on the tile's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moestro.model.cuda.source.launches import find, wait

LOG2E = tl.constexpr(1.4426950408889634)
NEGATIVE = tl.constexpr(float("-inf"))
NARROW = tl.constexpr(16)  # rows of a decode's tile


@triton.jit
def _nothing(ROWS: tl.constexpr, WIDE_V: tl.constexpr):
    """The reduction of no keys."""
    none = tl.full([ROWS], NEGATIVE, tl.float32)
    return none, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE_V], tl.float32)


@triton.jit
def _range_of(length, num_new, first, QUERIES: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """Keys that QUERIES queries from `first` on see, from the oldest to before the newest, and splits likewise."""
    newest = tl.minimum(length - num_new + first + QUERIES, length)
    oldest = tl.maximum(length - num_new + first - WINDOW + 1, 0) if WINDOW else 0
    return oldest, newest, oldest // SPLIT, (newest + SPLIT - 1) // SPLIT


@triton.jit
def _read_rows(at, is_row, SIZE_K: tl.constexpr, HEAD_K: tl.constexpr, REST_K: tl.constexpr):
    """The SIZE_K numbers of each row in two parts, as `attend` has keys. Without a second part it is the first."""
    d = tl.arange(0, HEAD_K)[None]
    head = tl.load(at[:, None] + d, is_row[:, None] & (d < SIZE_K), 0.0)
    if REST_K:
        d = HEAD_K + tl.arange(0, REST_K)[None]
        return head, tl.load(at[:, None] + d, is_row[:, None] & (d < SIZE_K), 0.0)
    else:  # noqa: RET505 - the compiler must not see the type of what it leaves out
        return head, head


@triton.jit
def _merge(m, l, acc, m_new, l_new, acc_new):
    """Join the reductions of two sets of keys. An empty second set changes no bit."""
    top = tl.maximum(m, m_new)
    safe = tl.where(top == NEGATIVE, 0.0, top)
    old, new = tl.exp2(m - safe), tl.exp2(m_new - safe)
    return top, l * old + l_new * new, acc * old[:, None] + acc_new * new[:, None]


@triton.jit
def _finish(m, l, acc, sinks, q_head, is_row, kind: tl.constexpr, HAS_SINK: tl.constexpr):
    """Divide by the sum of weights, a sink's included, and round to `kind`."""
    if HAS_SINK:
        sink = tl.load(find(sinks, kind) + q_head, is_row, 0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        scale = tl.exp2(m - top)
        return (acc * scale[:, None] / (l * scale + tl.exp2(sink - top))[:, None]).to(kind)
    return (acc / l[:, None]).to(kind)


@triton.jit
def _add_tile(
    m, l, acc, q, q_rest, keys, values, table, head, start, length, position, is_row, key_stride, value_stride, factor,
    SIZE_K: tl.constexpr, HEAD_K: tl.constexpr, REST_K: tl.constexpr, SIZE_V: tl.constexpr, WIDE_V: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SEES_ALL: tl.constexpr,
):  # fmt: skip
    """Join the reduction (m, l, acc) and that of the TILE keys from `start` on. SEES_ALL: each row sees all of them."""
    dk, dr, dv = tl.arange(0, HEAD_K), HEAD_K + tl.arange(0, REST_K if REST_K else 16), tl.arange(0, WIDE_V)
    key_at = start + tl.arange(0, TILE)
    exists = tl.full([TILE], 1, tl.int1) if SEES_ALL else key_at < length
    slot = tl.load(table + key_at // BLOCK, exists, 0).to(tl.int64) * BLOCK + key_at % BLOCK
    k_at = keys + slot[None, :] * key_stride + head * SIZE_K
    is_k = exists[None, :]
    if HEAD_K > SIZE_K:
        is_k = is_k & (dk < SIZE_K)[:, None]
    scores = tl.dot(q, tl.load(k_at + dk[:, None], is_k, 0.0), input_precision="ieee")
    if REST_K:
        k_rest = tl.load(k_at + dr[:, None], exists[None, :] & (dr < SIZE_K)[:, None], 0.0)
        scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
    v_at = values + slot[:, None] * value_stride + head * SIZE_V + dv[None, :]
    v = tl.load(v_at, exists[:, None] & (dv < SIZE_V)[None, :], 0.0)
    scores = scores * factor
    if not SEES_ALL:
        sees = is_row[:, None] & (key_at[None, :] <= position[:, None])
        if WINDOW:
            sees = sees & (key_at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(sees, scores, NEGATIVE)
    top = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(top == NEGATIVE, 0.0, top)
    weight, old = tl.exp2(scores - safe[:, None]).to(v.dtype), tl.exp2(m - safe)
    ones = tl.full([TILE, 16], 1.0, v.dtype)
    l = l * old + tl.max(tl.dot(weight, ones, input_precision="ieee"), 1)
    acc = tl.dot(weight, v, acc * old[:, None], input_precision="ieee")
    return top, l, acc


@triton.jit
def _reduce_keys(
    q, q_rest, keys, values, table, head, low, high, length, position, is_row, key_stride, value_stride, factor, common,
    ROWS: tl.constexpr, SIZE_K: tl.constexpr, HEAD_K: tl.constexpr, REST_K: tl.constexpr, SIZE_V: tl.constexpr,
    WIDE_V: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Reduce keys low .. high - 1 from nothing: (largest score, sum of weights, weighted values) of each row.

    `common`: keys before this one are seen by all rows, a window apart.
    """
    m, l, acc = _nothing(ROWS, WIDE_V)
    middle = low
    if WINDOW == 0 and ROWS > NARROW:  # the loads of a second loop would delay a decode's few tiles
        middle = low + tl.maximum(tl.minimum(high, common) - low, 0) // TILE * TILE
        for start in range(low, middle, TILE):
            m, l, acc = _add_tile(
                m, l, acc, q, q_rest, keys, values, table, head, start, length, position, is_row, key_stride,
                value_stride, factor, SIZE_K, HEAD_K, REST_K, SIZE_V, WIDE_V, BLOCK, TILE, WINDOW, SEES_ALL=True,
            )  # fmt: skip
    for start in range(middle, high, TILE):
        m, l, acc = _add_tile(
            m, l, acc, q, q_rest, keys, values, table, head, start, length, position, is_row, key_stride, value_stride,
            factor, SIZE_K, HEAD_K, REST_K, SIZE_V, WIDE_V, BLOCK, TILE, WINDOW, SEES_ALL=False,
        )  # fmt: skip
    return m, l, acc


@triton.jit
def _bring_item(
    items, num_items, tables, row_of, length_of, BLOCK: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Number of items. Also bring what tells where this program's first one is into a cache, by volatile loads."""
    if AHEAD:
        at = items + tl.program_id(0) * 4
        unit, split = tl.load(at, volatile=True), tl.load(at + 2, volatile=True)
        table_at = tl.load(at + 3, volatile=True)
        tl.load(length_of + unit, volatile=True)
        tl.load(row_of + unit, volatile=True)
        tl.load(tables + table_at + tl.maximum(split, 0) * (SPLIT // BLOCK), volatile=True)
    return tl.load(num_items)


@triton.jit
def _merge_parts(
    part_acc, part_ml, first, end, r, dv, is_row, ROWS: tl.constexpr, SIZE_V: tl.constexpr, WIDE_V: tl.constexpr
):  # fmt: skip
    """Join the stored reductions of items first .. end - 1, which other programs may have stored."""
    m, l, acc = _nothing(ROWS, WIDE_V)
    is_part = is_row[:, None] & (dv < SIZE_V)[None, :]
    for item in range(first, end):
        place = ((item * tl.num_programs(1) + tl.program_id(1)) * ROWS + r).to(tl.int64)
        m_s = tl.load(part_ml + place * 2, is_row, NEGATIVE, cache_modifier=".cg")
        l_s = tl.load(part_ml + place * 2 + 1, is_row, 0.0, cache_modifier=".cg")
        acc_at = part_acc + place[:, None] * SIZE_V + dv[None, :]
        m, l, acc = _merge(m, l, acc, m_s, l_s, tl.load(acc_at, is_part, 0.0, cache_modifier=".cg"))
    return m, l, acc


@triton.jit
def _join_splits(
    part_acc, part_ml, arrival, item, first_item, num_splits, m, l, acc, r, dv, is_row,
    ROWS: tl.constexpr, SIZE_V: tl.constexpr, WIDE_V: tl.constexpr,
):  # fmt: skip
    """Store the reduction of a split, and join all of its unit if the others are there: (whether, m, l, acc)."""
    place = ((item * tl.num_programs(1) + tl.program_id(1)) * ROWS + r).to(tl.int64)
    tl.store(part_ml + place * 2, m, is_row)
    tl.store(part_ml + place * 2 + 1, l, is_row)
    tl.store(part_acc + place[:, None] * SIZE_V + dv[None, :], acc, is_row[:, None] & (dv < SIZE_V)[None, :])
    tl.debug_barrier()  # the parts of all threads come before the arrival
    is_last = tl.atomic_add(arrival, 1, sem="acq_rel") == num_splits - 1
    if is_last:
        tl.store(arrival, 0)
        end = first_item + num_splits
        m, l, acc = _merge_parts(part_acc, part_ml, first_item, end, r, dv, is_row, ROWS, SIZE_V, WIDE_V)
    return is_last, m, l, acc


@triton.jit
def attend(
    query, keys, values, out, part_acc, part_ml, arrived, sinks, tables, row_of, length_of, items, num_items,
    query_stride, key_stride, value_stride, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, TAKEN: tl.constexpr, SIZE_K: tl.constexpr, HEAD_K: tl.constexpr,
    REST_K: tl.constexpr, SIZE_V: tl.constexpr, WIDE_V: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, HAS_SINK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Attend: one program takes every num_programs(0)th item, for TAKEN of the SHARED query heads of a KV head.

    Args:
        items: int32[items, 4]: unit, its first query, split (-1: all), begin of its table. The splits of a unit follow
            each other, and only tiles of NARROW rows have splits.
        part_acc, part_ml: float32[items, groups of heads, ROWS, SIZE_V or 2], reductions of splits.
        arrived: int32[units, groups of heads], splits that are stored; 0 before and after.
        HEAD_K, REST_K: SIZE_K as two powers of two, the last filled up, the second may be 0. WIDE_V: SIZE_V filled up.
        Row r of a tile is query r // TAKEN, head r % TAKEN.
    """
    keys, values = find(keys, query.dtype.element_ty), find(values, query.dtype.element_ty)
    group = tl.program_id(1)
    GROUPS_A_HEAD: tl.constexpr = (SHARED + TAKEN - 1) // TAKEN
    head, first_head = group // GROUPS_A_HEAD, group % GROUPS_A_HEAD * TAKEN
    r, dv = tl.arange(0, ROWS), tl.arange(0, WIDE_V)
    q_head = head * SHARED + first_head + r % TAKEN
    is_head = (r < QUERIES * TAKEN) & (first_head + r % TAKEN < SHARED)
    end = _bring_item(items, num_items, tables, row_of, length_of, BLOCK, SPLIT, AHEAD)
    wait(AHEAD)
    for item in range(tl.program_id(0), end, tl.num_programs(0)):
        unit, first = tl.load(items + item * 4), tl.load(items + item * 4 + 1)
        split, table = tl.load(items + item * 4 + 2), tables + tl.load(items + item * 4 + 3)
        length, begin_row = tl.load(length_of + unit), tl.load(row_of + unit)
        num_new = tl.load(row_of + unit + 1) - begin_row
        at = first + r // TAKEN  # query in the unit
        is_row, position, row = is_head & (at < num_new), length - num_new + at, (begin_row + at).to(tl.int64)
        q, q_rest = _read_rows(query + row * query_stride + q_head * SIZE_K, is_row, SIZE_K, HEAD_K, REST_K)
        oldest, newest, first_split, end_split = _range_of(length, num_new, first, QUERIES, WINDOW, SPLIT)
        num_splits, first_item = end_split - first_split, item - (split - first_split)
        if split >= 0:
            first_split, end_split = split, split + 1
        m, l, acc = _nothing(ROWS, WIDE_V)
        for s in range(first_split, end_split):
            low, high = tl.maximum(s * SPLIT, oldest // TILE * TILE), tl.minimum(s * SPLIT + SPLIT, newest)
            m_s, l_s, acc_s = _reduce_keys(
                q, q_rest, keys, values, table, head, low, high, length, position, is_row, key_stride, value_stride,
                scale * LOG2E, length - num_new + first + 1,
                ROWS, SIZE_K, HEAD_K, REST_K, SIZE_V, WIDE_V, BLOCK, TILE, WINDOW,
            )  # fmt: skip
            m, l, acc = _merge(m, l, acc, m_s, l_s, acc_s)
        is_whole = split < 0
        if ROWS <= NARROW:
            if split >= 0:
                is_whole, m, l, acc = _join_splits(
                    part_acc, part_ml, arrived + unit * tl.num_programs(1) + group, item, first_item, num_splits,
                    m, l, acc, r, dv, is_row, ROWS, SIZE_V, WIDE_V,
                )  # fmt: skip
        if is_whole:
            result = _finish(m, l, acc, sinks, q_head, is_row, out.dtype.element_ty, HAS_SINK)
            is_out = is_row[:, None] & (dv < SIZE_V)[None, :]
            tl.store(out + (row * HEADS + q_head)[:, None] * SIZE_V + dv[None, :], result, is_out)
