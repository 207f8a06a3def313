"""Products whose sums have one order, whatever the number of rows: dense layers, and experts by expert.

Weights are the first operand (tiles of outputs by few rows), so that a decode uses the matrix instruction of a prompt.
A sum over k is cut into segments by the weight's shape alone. Each is summed from zero by the matrix units in ascending
k, and segments are added in order in float32: by the program that walks all, or by the kernel that reads the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moestro.model.cuda.source.launches import find, wait


@triton.jit
def load_weight(
    at, is_inside, scales, block, start,
    OUT: tl.constexpr, IN: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, BEGINS: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """The tile [OUTS, DEPTH] of a weight [OUT, IN] at outputs `block` * OUTS and inputs `start`.

    Args:
        HEIGHT, WIDTH: of blocks with a scale in `scales`, float32[row blocks, column blocks], of a weight in float8.
            The tile has the bits of a weight that was dequantised at load. 0: the weight has the dtype of the rows.
        BEGINS: a number whose multiples, with those of DEPTH added, are all `start`.
        kind: dtype of the rows.
    """
    w = tl.load(at, is_inside, 0.0)
    if WIDTH:
        # A tile inside a block has one scale. Few tiles cross blocks: those of odd sizes, or of uneven segments.
        if HEIGHT % OUTS == 0:
            row = block * OUTS // HEIGHT
        else:
            row = tl.minimum(block * OUTS + tl.arange(0, OUTS), OUT - 1)[:, None] // HEIGHT
        if WIDTH % DEPTH == 0 and BEGINS % DEPTH == 0:
            column = start // WIDTH
        else:
            column = tl.minimum(start + tl.arange(0, DEPTH), IN - 1)[None, :] // WIDTH
        scale = tl.load(scales + row * ((IN + WIDTH - 1) // WIDTH) + column)
        w = (w.to(tl.float32) * scale).to(kind)
    return w


@triton.jit
def linear(
    rows, weight, bias, out, num_rows, row_stride, weight_stride, part_stride, head_stride, scales,
    OUT: tl.constexpr, IN: tl.constexpr, SEGMENTS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_HEADS: tl.constexpr, TOKENS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out = rows @ weight.T + bias. Without IS_WHOLE, `out` is float32[SEGMENTS, rows, OUT], the sums of segments.

    HAS_HEADS: each head has rows, `head_stride` apart, a weight [OUT, IN] and an output, `part_stride` apart.
    scales, HEIGHT, WIDTH: as in `load_weight`.
    """
    block, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kind: tl.constexpr = rows.dtype.element_ty
    weight = find(weight, tl.float8e4nv if WIDTH else kind)
    bias, scales = find(bias, kind), find(scales, tl.float32)
    if HAS_HEADS:
        rows += part.to(tl.int64) * head_stride
        weight += part.to(tl.int64) * OUT * weight_stride
        out += part.to(tl.int64) * part_stride
    LENGTH: tl.constexpr = (IN + SEGMENTS - 1) // SEGMENTS
    BEGINS: tl.constexpr = LENGTH if SEGMENTS > 1 else DEPTH
    FLAT: tl.constexpr = IS_WHOLE and SEGMENTS > 1 and LENGTH % DEPTH == 0  # one loop, whose loads never pause
    n = block * OUTS + tl.arange(0, OUTS)
    count = tl.load(num_rows)
    wait(AHEAD)
    if tile * TOKENS >= count:
        return
    t, k = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    is_row, is_out = t < count, n < OUT
    t_at, n_at = t.to(tl.int64)[None, :], n.to(tl.int64)[:, None]
    whole = tl.zeros([OUTS, TOKENS], tl.float32)
    for s in range(1 if FLAT or not IS_WHOLE else SEGMENTS):
        begin = (s if IS_WHOLE else part) * LENGTH
        end = IN if FLAT else tl.minimum(begin + LENGTH, IN)
        total = tl.zeros([OUTS, TOKENS], tl.float32)
        for start in range(begin, end, DEPTH):
            is_in = start + k < end
            x = tl.load(rows + t_at * row_stride + (start + k)[:, None], is_row[None, :] & is_in[:, None], 0.0)
            w = load_weight(
                weight + n_at * weight_stride + (start + k)[None, :], is_out[:, None] & is_in[None, :], scales, block,
                start, OUT, IN, OUTS, DEPTH, HEIGHT, WIDTH, BEGINS, rows.dtype.element_ty,
            )  # fmt: skip
            total = tl.dot(w, x, total, input_precision="ieee")
            if FLAT:
                if (start + DEPTH) % LENGTH == 0:
                    whole = tl.where(start < LENGTH, total, whole + total)
                    total = tl.zeros([OUTS, TOKENS], tl.float32)
        if not FLAT:
            if s == 0:
                whole = total
            else:
                whole = whole + total
    inside = is_out[:, None] & is_row[None, :]
    if IS_WHOLE:
        if HAS_BIAS:
            whole = whole + tl.load(bias + n, is_out, 0.0).to(tl.float32)[:, None]
        tl.store(out + t_at * OUT + n_at, whole.to(out.dtype.element_ty), inside)
    else:
        tl.store(out + part.to(tl.int64) * part_stride + t_at * OUT + n_at, whole, inside)


@triton.jit
def sort_pairs(
    ids, num_rows, pairs, tiles, counts, id_stride,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Sort pairs (row, choice) by expert, those of an expert by row, in tiles of at most TOKENS. One program an expert.

    Args:
        ids: int32 or int64[rows, CHOSEN].
        num_rows: int32[1].
        pairs: int32[rows * CHOSEN], row * CHOSEN + choice.
        tiles: int32[1 + tiles * 3], their number, then expert, first place and pairs of each.
        counts: int64[EXPERTS], to which the pairs of each expert are added.
    """
    expert, num_pairs, counts = tl.program_id(0), tl.load(num_rows) * CHOSEN, find(counts, tl.int64)
    wait(AHEAD)
    bins, c = tl.arange(0, BINS), tl.arange(0, CHUNK)
    sizes = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        at = start + c
        chosen = tl.load(ids + at // CHOSEN * id_stride + at % CHOSEN, at < num_pairs, 0).to(tl.int32)
        sizes += tl.histogram(chosen, BINS, mask=at < num_pairs)
    first = tl.sum(tl.where(bins < expert, sizes, 0))
    count = tl.sum(tl.where(bins == expert, sizes, 0))
    num_tiles = (sizes + TOKENS - 1) // TOKENS
    first_tile = tl.sum(tl.where(bins < expert, num_tiles, 0))
    own_tiles = (count + TOKENS - 1) // TOKENS
    if expert == EXPERTS - 1:
        tl.store(tiles, first_tile + own_tiles)
    tl.store(counts + expert, tl.load(counts + expert) + count)
    if count > 0:
        for tile in range(own_tiles):
            place = tiles + 1 + (first_tile + tile) * 3
            tl.store(place, expert)
            tl.store(place + 1, first + tile * TOKENS)
            tl.store(place + 2, tl.minimum(count - tile * TOKENS, TOKENS))
        done = first
        for start in range(0, num_pairs, CHUNK):
            at = start + c
            chosen = tl.load(ids + at // CHOSEN * id_stride + at % CHOSEN, at < num_pairs, 0).to(tl.int32)
            mine = ((chosen == expert) & (at < num_pairs)).to(tl.int32)
            rank = tl.cumsum(mine, 0)
            tl.store(pairs + done + rank - 1, at, mine > 0)
            done += tl.sum(mine)


@triton.jit
def _find_tile(pairs, tiles, tile, CHOSEN: tl.constexpr):
    """(whether there is such a tile, its expert, its first place, its pairs).

    CHOSEN: `pairs` are the experts of one row, so many, and each is a tile; `tiles` is the number of rows. 0: as
    `sort_pairs` leaves them.
    """
    if CHOSEN:
        return tile < tl.load(tiles) * CHOSEN, tl.load(pairs + tile).to(tl.int64), tile, 1
    else:  # noqa: RET505 - the compiler must not see what it leaves out
        place = tiles + 1 + tile * 3
        return tile < tl.load(tiles), tl.load(place).to(tl.int64), tl.load(place + 1), tl.load(place + 2)


@triton.jit
def _up_tile(
    rows, weight, bias, inner, pairs, first, count, block, row_stride, limit, alpha, scales,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, CHOSEN: tl.constexpr, IS_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, TOKENS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The tile of `expert_up` that has so many pairs, at most TOKENS."""
    kind: tl.constexpr = rows.dtype.element_ty
    t, n, k = tl.arange(0, TOKENS), block * OUTS + tl.arange(0, OUTS), tl.arange(0, DEPTH)
    is_pair, is_out = t < count, n < INNER
    source = first + t
    if IS_ROW:
        source = tl.zeros([TOKENS], tl.int32)
    elif CHOSEN:
        source = tl.load(pairs + first + t, is_pair, 0) // CHOSEN
    x_at = rows + source.to(tl.int64)[None, :] * row_stride + k[:, None]
    g_at = weight + n.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    u_scales = scales
    if WIDTH:
        u_scales += (INNER + HEIGHT - 1) // HEIGHT * ((HIDDEN + WIDTH - 1) // WIDTH)
    g, u = tl.zeros([OUTS, TOKENS], tl.float32), tl.zeros([OUTS, TOKENS], tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        is_in = start + k < HIDDEN
        x = tl.load(x_at + start, is_pair[None, :] & is_in[:, None], 0.0)
        is_weight = is_out[:, None] & is_in[None, :]
        w = load_weight(
            g_at + start, is_weight, scales, block, start,
            INNER, HIDDEN, OUTS, DEPTH, HEIGHT, WIDTH, DEPTH, kind,
        )  # fmt: skip
        g = tl.dot(w, x, g, input_precision="ieee")
        w = load_weight(
            g_at + INNER * HIDDEN + start, is_weight, u_scales, block, start,
            INNER, HIDDEN, OUTS, DEPTH, HEIGHT, WIDTH, DEPTH, kind,
        )  # fmt: skip
        u = tl.dot(w, x, u, input_precision="ieee")
    if HAS_BIAS:
        g = g + tl.load(bias + n, is_out, 0.0).to(tl.float32)[:, None]
        u = u + tl.load(bias + INNER + n, is_out, 0.0).to(tl.float32)[:, None]
    g, u = g.to(kind).to(tl.float32), u.to(kind).to(tl.float32)  # as a product of torch's, which returns `kind`
    if CLAMPED:
        g, u = tl.minimum(g, limit), tl.minimum(tl.maximum(u, -limit), limit)
        value = (u + 1.0) * (g / (1.0 + tl.exp(-alpha * g)))
    else:
        value = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32) * u
    place = inner + (first + t).to(tl.int64)[None, :] * INNER + n[:, None]
    tl.store(place, value.to(kind), is_pair[None, :] & is_out[:, None])


@triton.jit
def expert_up(
    rows, weights, bias, inner, pairs, tiles, row_stride, limit, alpha, scales, counts,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, CHOSEN: tl.constexpr, IS_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, TOKENS: tl.constexpr, TAIL: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """inner[place] = activation(gate) * up of the pair at each place of a tile.

    Args:
        weights: int64[experts], addresses of [2 * INNER, HIDDEN]: gates, then ups.
        bias: [experts, 2 * INNER].
        CHOSEN: choices of a row. 0: the rows of `rows` are in the order of places.
        IS_ROW: There is one row: its experts, which differ, are not sorted. `pairs` are its experts, int64[CHOSEN],
            `tiles` is int32[1], the number of rows, and `counts` as in `sort_pairs`.
        CLAMPED: (up + 1) * gate * sigmoid(alpha * gate), both within `limit`, instead of silu(gate) * up.
        TAIL: A tile with so many pairs or fewer is computed with so many. 0: every tile takes the time of a full one.
        scales: int64[experts], addresses of the scales of gates, then ups; HEIGHT, WIDTH: as in `load_weight`.
    """
    wait(AHEAD)
    block, tile = tl.program_id(0), tl.program_id(1)
    is_there, expert, first, count = _find_tile(pairs, tiles, tile, CHOSEN if IS_ROW else 0)
    if not is_there:
        return
    if IS_ROW:
        if block == 0:
            tl.atomic_add(find(counts, tl.int64) + expert, 1)
    kind: tl.constexpr = rows.dtype.element_ty
    stored: tl.constexpr = tl.float8e4nv if WIDTH else kind
    weight = tl.multiple_of(tl.load(find(weights, tl.int64) + expert).to(tl.pointer_type(stored)), 16)
    own_bias = find(bias, kind) + expert * (2 * INNER)
    own_scales = tl.load(find(scales, tl.int64) + expert).to(tl.pointer_type(tl.float32))
    if TAIL:
        if count <= TAIL:
            _up_tile(
                rows, weight, own_bias, inner, pairs, first, count, block, row_stride, limit, alpha, own_scales,
                HIDDEN, INNER, CHOSEN, IS_ROW, HAS_BIAS, CLAMPED, TAIL, OUTS, DEPTH, HEIGHT, WIDTH,
            )  # fmt: skip
            return
    _up_tile(
        rows, weight, own_bias, inner, pairs, first, count, block, row_stride, limit, alpha, own_scales,
        HIDDEN, INNER, CHOSEN, IS_ROW, HAS_BIAS, CLAMPED, TOKENS, OUTS, DEPTH, HEIGHT, WIDTH,
    )  # fmt: skip


@triton.jit
def _down_tile(
    inner, weight, bias, answers, pairs, first, count, block, scales,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, SCATTERS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The tile of `expert_down` that has so many pairs, at most TOKENS."""
    kind: tl.constexpr = inner.dtype.element_ty
    t, n, k = tl.arange(0, TOKENS), block * OUTS + tl.arange(0, OUTS), tl.arange(0, DEPTH)
    is_pair, is_out = t < count, n < HIDDEN
    x_at = inner + (first + t).to(tl.int64)[None, :] * INNER + k[:, None]
    w_at = weight + n.to(tl.int64)[:, None] * INNER + k[None, :]
    total = tl.zeros([OUTS, TOKENS], tl.float32)
    for start in range(0, INNER, DEPTH):
        is_in = start + k < INNER
        x = tl.load(x_at + start, is_pair[None, :] & is_in[:, None], 0.0)
        w = load_weight(
            w_at + start, is_out[:, None] & is_in[None, :], scales, block, start,
            HIDDEN, INNER, OUTS, DEPTH, HEIGHT, WIDTH, DEPTH, kind,
        )  # fmt: skip
        total = tl.dot(w, x, total, input_precision="ieee")
    if HAS_BIAS:
        total = total + tl.load(bias + n, is_out, 0.0).to(tl.float32)[:, None]
    place = first + t
    if SCATTERS:
        place = tl.load(pairs + first + t, is_pair, 0)
    at = answers + place.to(tl.int64)[None, :] * HIDDEN + n[:, None]
    tl.store(at, total.to(kind), is_pair[None, :] & is_out[:, None])


@triton.jit
def expert_down(
    inner, weights, bias, answers, pairs, tiles, scales,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, SCATTERS: tl.constexpr, ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, TAIL: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """answers[pair, or place unless SCATTERS] = down-projection of inner[place].

    Args:
        weights: int64[experts], addresses of [HIDDEN, INNER].
        bias: [experts, HIDDEN].
        ROW: As CHOSEN of `expert_up` if there is one row, else 0.
        TAIL: As in `expert_up`.
        scales: int64[experts], addresses of the scales; HEIGHT, WIDTH: as in `load_weight`.
    """
    wait(AHEAD)
    block, tile = tl.program_id(0), tl.program_id(1)
    is_there, expert, first, count = _find_tile(pairs, tiles, tile, ROW)
    if not is_there:
        return
    kind: tl.constexpr = inner.dtype.element_ty
    stored: tl.constexpr = tl.float8e4nv if WIDTH else kind
    weight = tl.multiple_of(tl.load(find(weights, tl.int64) + expert).to(tl.pointer_type(stored)), 16)
    own_bias = find(bias, kind) + expert * HIDDEN
    own_scales = tl.load(find(scales, tl.int64) + expert).to(tl.pointer_type(tl.float32))
    if TAIL:
        if count <= TAIL:
            _down_tile(
                inner, weight, own_bias, answers, pairs, first, count, block, own_scales,
                HIDDEN, INNER, SCATTERS, HAS_BIAS, TAIL, OUTS, DEPTH, HEIGHT, WIDTH,
            )  # fmt: skip
            return
    _down_tile(
        inner, weight, own_bias, answers, pairs, first, count, block, own_scales,
        HIDDEN, INNER, SCATTERS, HAS_BIAS, TOKENS, OUTS, DEPTH, HEIGHT, WIDTH,
    )  # fmt: skip
