"""Kernels that work row by row: norms, heads (norm, rotation, K and V), the choice of experts, and their ordered sum.

A row belongs to one program, whose shape never depends on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moestro.model.cuda.source.launches import find, wait

NOT_CHOSEN = tl.constexpr(-(1 << 62))  # below the order of every score


@triton.jit
def _read(source, at, part_stride, known, SEGMENTS: tl.constexpr, kind: tl.constexpr):
    """Numbers of a product, in float32: as stored, or the sum of its segments rounded to `kind`."""
    total = tl.load(source + at, known, 0.0).to(tl.float32)
    if SEGMENTS > 1:
        for s in tl.static_range(1, SEGMENTS):
            total += tl.load(source + s * part_stride + at, known, 0.0)
        total = total.to(kind).to(tl.float32)
    return total


@triton.jit
def add_norm(
    stream, update, weight, out_stream, out_normed, num_rows, part_stride, epsilon,
    SIZE: tl.constexpr, WIDE: tl.constexpr, HAS_UPDATE: tl.constexpr, SEGMENTS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """out_stream = stream + update; out_normed = its RMS norm. `update`: a product [rows, SIZE], or its segments."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    known = c < SIZE
    kind: tl.constexpr = out_normed.dtype.element_ty
    count, w = tl.load(num_rows), tl.load(find(weight, kind) + c, known, 0.0).to(tl.float32)
    wait(AHEAD)
    if row >= count:
        return
    at = row * SIZE + c
    x = tl.load(stream + at, known, 0.0).to(tl.float32)
    if HAS_UPDATE:
        x = (x + _read(update, at, part_stride, known, SEGMENTS, kind)).to(kind).to(tl.float32)
        tl.store(out_stream + at, x.to(kind), known)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + epsilon))
    tl.store(out_normed + at, (normed.to(kind).to(tl.float32) * w).to(kind), known)


@triton.jit
def heads(
    qkv, cos, sin, q_weight, k_weight, query, keys, values, slots, num_rows, part_stride, angle_stride, epsilon,
    HEADS_Q: tl.constexpr, HEADS_KV: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, HAS_NORM: tl.constexpr, SEGMENTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a query or key head of ROWS rows, or store a value head. K and V go to the rows' slots.

    Args:
        qkv: A product [rows, (HEADS_Q + 2 * HEADS_KV) * SIZE], or its segments.
        cos, sin: [rows, HALF or more].
        slots: int64[rows].
        HALF: SIZE / 2. WIDE: HALF filled up to a power of two.
    """
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    is_row = row < tl.load(num_rows)
    kind: tl.constexpr = query.dtype.element_ty
    i = tl.arange(0, WIDE)[None, :]
    known = (i < HALF) & is_row[:, None]
    wide_row = row.to(tl.int64)[:, None]
    slot = tl.load(slots + row, is_row, 0)[:, None]
    c = tl.load(cos + wide_row * angle_stride + i, known, 0.0).to(tl.float32)
    s = tl.load(sin + wide_row * angle_stride + i, known, 0.0).to(tl.float32)
    if HAS_NORM:
        w = find(q_weight, kind) if head < HEADS_Q else find(k_weight, kind)
        first_w = tl.load(w + i, i < HALF, 0.0).to(tl.float32)
        second_w = tl.load(w + HALF + i, i < HALF, 0.0).to(tl.float32)
    wait(AHEAD)
    at = wide_row * ((HEADS_Q + 2 * HEADS_KV) * SIZE) + head * SIZE + i
    x = _read(qkv, at, part_stride, known, SEGMENTS, kind)
    y = _read(qkv, at + HALF, part_stride, known, SEGMENTS, kind)
    if head >= HEADS_Q + HEADS_KV:
        place = find(values, kind) + (slot * HEADS_KV + head - HEADS_Q - HEADS_KV) * SIZE + i
        tl.store(place, x.to(kind), known)
        tl.store(place + HALF, y.to(kind), known)
    else:
        if HAS_NORM:
            scale = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / SIZE + epsilon)
            x = ((x * scale[:, None]).to(kind).to(tl.float32) * first_w).to(kind).to(tl.float32)
            y = ((y * scale[:, None]).to(kind).to(tl.float32) * second_w).to(kind).to(tl.float32)
        first = ((x * c).to(kind).to(tl.float32) + (-y * s).to(kind).to(tl.float32)).to(kind)
        second = ((y * c).to(kind).to(tl.float32) + (x * s).to(kind).to(tl.float32)).to(kind)
        if head < HEADS_Q:
            place = query + (wide_row * HEADS_Q + head) * SIZE + i
        else:
            place = find(keys, kind) + (slot * HEADS_KV + head - HEADS_Q) * SIZE + i
        tl.store(place, first, known)
        tl.store(place + HALF, second, known)


@triton.jit
def _keep_groups(
    scores, EXPERTS: tl.constexpr, BINS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """Whether an expert is in one of the KEPT groups whose two best scores have the largest sums."""
    e, g = tl.arange(0, BINS), tl.arange(0, WIDE)
    group_of = e // (EXPERTS // GROUPS)
    sums = tl.full([WIDE], float("-inf"), tl.float32)
    for n in tl.static_range(GROUPS):
        inside = tl.where(group_of == n, scores, float("-inf"))
        best = tl.max(inside, 0)
        which = tl.min(tl.where(inside == best, e, BINS), 0)
        second = tl.max(tl.where(e == which, float("-inf"), inside), 0)
        sums = tl.where(g == n, best + second, sums)
    kept = e < 0
    for _ in tl.static_range(KEPT):
        best = tl.max(sums, 0)
        which = tl.min(tl.where(sums == best, g, WIDE), 0)
        kept = kept | (group_of == which)
        sums = tl.where(g == which, float("-inf"), sums)
    return kept


@triton.jit
def choose(
    logits, bias, correction, ids, weights, num_rows, part_stride, factor,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, CHOSEN: tl.constexpr, WIDE: tl.constexpr, SEGMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_CORRECTION: tl.constexpr, NORMALIZES: tl.constexpr,
    GROUPS: tl.constexpr, WIDE_GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, KIND: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Choose the CHOSEN likeliest experts, the lowest of equal ids, and weigh them.

    Args:
        logits: A product [rows, EXPERTS], or its segments.
        bias: [EXPERTS], added to the logits.
        correction: float32[EXPERTS], added to the scores for the choice alone.
        ids: int64[rows, CHOSEN]. weights: float32[rows, CHOSEN].
        factor: Factor of all weights.
        IS_SIGMOID: Scores are sigmoids instead of a softmax. NORMALIZES: The weights of a row sum up to `factor`.
        KEPT_GROUPS: Of GROUPS equal groups of experts, those that a row may choose from.
        KIND: Type to which logits and weights are rounded.
    """
    token, count = tl.program_id(0).to(tl.int64), tl.load(num_rows)
    wait(AHEAD)
    if token >= count:
        return
    kind: tl.constexpr = KIND
    e, j = tl.arange(0, BINS), tl.arange(0, WIDE)
    known = e < EXPERTS
    x = _read(logits, token * EXPERTS + e, part_stride, known, SEGMENTS, kind)
    if HAS_BIAS:
        x = (x + tl.load(find(bias, kind) + e, known, 0.0).to(tl.float32)).to(kind).to(tl.float32)
    if IS_SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        x = tl.where(known, x, float("-inf"))
        score = tl.exp(x - tl.max(x, 0))
        score = score / tl.sum(score, 0)
    left = score
    if HAS_CORRECTION:
        left = score + tl.load(find(correction, tl.float32) + e, known, 0.0)
    left = tl.where(known & (left == left), left, float("-inf"))
    if GROUPS > 1:
        left = tl.where(_keep_groups(left, EXPERTS, BINS, GROUPS, WIDE_GROUPS, KEPT_GROUPS), left, float("-inf"))
    # One number has the order of an expert's score, and behind it that of its id. Those of a row of NaN are equal but
    # for the ids: it gets the first experts, which are distinct, and stays NaN.
    bits = (left + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) * BINS + (BINS - 1 - e)
    order = tl.where(known, order, NOT_CHOSEN)
    chosen = tl.zeros([WIDE], tl.int32)
    for n in tl.static_range(CHOSEN):
        best = tl.max(order, 0)
        chosen = tl.where(j == n, BINS - 1 - (best & (BINS - 1)).to(tl.int32), chosen)
        order = tl.where(order == best, NOT_CHOSEN, order)
    is_it = (e[:, None] == chosen[None, :]) & (j < CHOSEN)[None, :]
    weight = tl.sum(tl.where(is_it, score[:, None], 0.0), 0)
    if NORMALIZES:
        weight = weight / tl.sum(weight, 0)
    is_choice = j < CHOSEN
    tl.store(ids + token * CHOSEN + j, chosen.to(tl.int64), is_choice)
    tl.store(weights + token * CHOSEN + j, (weight * factor).to(kind).to(tl.float32), is_choice)


@triton.jit
def add_answers(
    answers, ids, weights, stream, out, num_rows, id_stride,
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, HAS_STREAM: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """out[row] = sum of weight * answer in float32, in ascending expert id, rounded; plus `stream` if there is one."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.load(num_rows)
    wait(AHEAD)
    if row >= count:
        return
    kind: tl.constexpr = out.dtype.element_ty
    j, known = tl.arange(0, WIDE), column < HIDDEN
    chosen = tl.load(ids + row * id_stride + j, j < CHOSEN, 1 << 30).to(tl.int32)
    total = tl.zeros([COLUMNS], tl.float32)
    for _ in tl.static_range(CHOSEN):
        least = tl.min(chosen, 0)
        choice = tl.sum(tl.where(chosen == least, j, 0))
        chosen = tl.where(chosen == least, 1 << 30, chosen)
        weight = tl.load(weights + row * CHOSEN + choice).to(tl.float32)
        place = (row * CHOSEN + choice) * HIDDEN + column
        total += weight * tl.load(answers + place, known, 0.0).to(tl.float32)
    total = total.to(kind).to(tl.float32)
    if HAS_STREAM:
        total = total + tl.load(stream + row * HIDDEN + column, known, 0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, total.to(kind), known)
