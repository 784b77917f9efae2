"""The small fused steps between the matrix products: norm with residual sum, rotation into pages, gated activation.

Each reads fp32 and rounds once, where kernels/reference.py does. One program a row, or a row and a head.
"""

import triton
import triton.language as tl

BLOCK_TOKENS = tl.constexpr(16)


@triton.jit
def add_rms_norm(
    x, added, added_weight, weight, normed, source_rows, width, eps, weight_offset, residual_scale,
    ADD: tl.constexpr, NORM_ADDED: tl.constexpr, NORM: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ADD: x += residual_scale times added, or its norm. NORM: normed [row] = rms norm of x [row], with GATHER of x
    [source_rows[row]]. Grid (row).

    x, added fp32 [row, width]; weights fp32 [width], weight_offset is added to them; BLOCK: a power of two >= width.
    """
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(source_rows + row).to(tl.int64) if GATHER else row
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + source * width + column, mask=inside, other=0.0)
    if ADD:
        more = tl.load(added + row * width + column, mask=inside, other=0.0)
        if NORM_ADDED:
            factor = tl.rsqrt(tl.sum(more * more, 0) / width + eps)
            more *= factor * (tl.load(added_weight + column, mask=inside, other=0.0) + weight_offset)
        values += more * residual_scale
        tl.store(x + source * width + column, values, mask=inside)
    if NORM:
        factor = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
        values *= factor * (tl.load(weight + column, mask=inside, other=0.0) + weight_offset)
        tl.store(normed + row * width + column, values.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["unit", "rope", "table_stride"])
def rotate_and_write_kv(
    qkv, bias, q_norm, k_norm, angles, q, pool, table, positions, row_sequence,
    unit, rope, table_stride, eps, weight_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_HALF: tl.constexpr,
    ROPES: tl.constexpr, PAIRS: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr, PAGE_ELEMENTS: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr,
    BIAS: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Bias, norm and rotation of each head; q goes to `q` [row, head, DIM], K and V into their units of the pool.

    Grid (row, head of q, k and v). qkv fp32 [row, HEADS + 2 KV_HEADS, DIM]; angles fp32 [row, rope, cos and sin,
    DIM / 2]. A row of position -1 is padding: nothing is written for it. Dimension i < PAIRS turns with i + PAIRS; of
    those beyond, pairs like any other here, cos is 1 and sin 0.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    half = tl.arange(0, PADDED_HALF)
    inside = half < DIM // 2
    first_dim, second_dim = half, half + DIM // 2
    if PAIRS < DIM // 2:
        first_dim = tl.where(half < PAIRS, half, half + PAIRS)
        second_dim = tl.where(half < PAIRS, half + PAIRS, half + DIM // 2)
    place = (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    first = tl.load(qkv + place + first_dim, mask=inside, other=0.0)
    second = tl.load(qkv + place + second_dim, mask=inside, other=0.0)
    if BIAS:
        first += tl.load(bias + head * DIM + first_dim, mask=inside, other=0.0)
        second += tl.load(bias + head * DIM + second_dim, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        if QK_NORM:
            norm = q_norm if head < HEADS else k_norm
            factor = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM + eps)
            first *= factor * (tl.load(norm + first_dim, mask=inside, other=0.0) + weight_offset)
            second *= factor * (tl.load(norm + second_dim, mask=inside, other=0.0) + weight_offset)
        angle = angles + (row * ROPES + rope) * DIM + half
        cos = tl.load(angle, mask=inside, other=0.0)
        sin = tl.load(angle + DIM // 2, mask=inside, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    if head < HEADS:
        target = q + (row * HEADS + head) * DIM
    else:  # the units of a layer: K of each kv head, then V of each
        own = unit + head - HEADS
        sequence = tl.load(row_sequence + row).to(tl.int64)
        block = position // BLOCK_TOKENS
        page = tl.load(table + sequence * table_stride + block * PAGES_PER_BLOCK + own // UNITS_PER_PAGE)
        start = page.to(tl.int64) * PAGE_ELEMENTS + (own % UNITS_PER_PAGE) * (BLOCK_TOKENS * DIM)
        target = pool + start + position % BLOCK_TOKENS * DIM
    tl.store(target + first_dim, first.to(pool.dtype.element_ty), mask=inside)
    tl.store(target + second_dim, second.to(pool.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["unit", "table_stride"])
def write_kv(
    kv, pool, table, positions, row_sequence, unit, table_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr, PAGE_ELEMENTS: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """kv [row, HEADS, DIM], K of each kv head and then V of each, into their units of the pool. Grid (row, head).

    A row of position -1 is padding: nothing is written for it.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    dim = tl.arange(0, PADDED_DIM)
    values = tl.load(kv + (row * HEADS + head) * DIM + dim, mask=dim < DIM, other=0.0)
    own, sequence = unit + head, tl.load(row_sequence + row).to(tl.int64)
    block = position // BLOCK_TOKENS
    page = tl.load(table + sequence * table_stride + block * PAGES_PER_BLOCK + own // UNITS_PER_PAGE)
    start = page.to(tl.int64) * PAGE_ELEMENTS + (own % UNITS_PER_PAGE) * (BLOCK_TOKENS * DIM)
    tl.store(pool + start + position % BLOCK_TOKENS * DIM + dim, values, mask=dim < DIM)


@triton.jit
def gated_activation(gate_up, product, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """product [row, width] = activation(gate) * up; gate_up fp32 [row, 2 width], the gates first. Grid (row, part)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    # gelu_tanh: x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
    inner = 2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    values = gate * tl.sigmoid(inner) * up
    tl.store(product + row * width + column, values.to(product.dtype.element_ty), mask=inside)


@triton.jit
def copy_pages(words, sources, targets, page_words, BLOCK: tl.constexpr):
    """Copies page sources[i] onto page targets[i]: the begun block of a fork. words int32 [page, page_words].

    Grid (pair, part). No page may be both source and target.
    """
    pair, word = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    source = tl.load(sources + pair).to(tl.int64) * page_words
    target = tl.load(targets + pair).to(tl.int64) * page_words
    tl.store(words + target + word, tl.load(words + source + word, mask=inside), mask=inside)
