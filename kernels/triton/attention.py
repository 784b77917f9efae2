"""Attention straight from pages: one ragged kernel for decodes and prefill chunks, and the merge of a split context.

A program answers the BLOCK_ROWS query rows of one tile for one kv head: the GROUP query heads that share it are packed
into the rows, so a decode of a grouped-query model reads each K and V once. Scores are kept relative to a running
maximum (online softmax: Milakov and Gimelshein, arXiv 1805.02867; tiling: FlashAttention, arXiv 2205.14135). With SPLIT
the context is cut into spans of fixed length, each a program of its own, merged by their log-sum-exp (Flash-Decoding);
a span begins at a multiple of its length, so where a context is cut does not depend on who else is in the batch.
"""

import triton
import triton.language as tl

BLOCK_TOKENS = tl.constexpr(16)
NOTHING = tl.constexpr(-1e30)  # the maximum of no scores: finite, so that differences of two of them are
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def unit_offsets(
    table, unit, blocks, seen,
    UNITS_PER_PAGE: tl.constexpr, PAGE_ELEMENTS: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Where `unit` of each block begins in the pool, in elements; the address is that of kernels/spec.py.

    table: the page ids of one sequence, [block, page in block]; blocks, seen [BLOCK]: -> int64 [BLOCK].
    """
    page = tl.load(table + blocks * PAGES_PER_BLOCK + unit // UNITS_PER_PAGE, mask=seen, other=0)
    return page.to(tl.int64) * PAGE_ELEMENTS + (unit % UNITS_PER_PAGE) * (BLOCK_TOKENS * DIM)


@triton.jit
def tanh(x):
    """The rational function of kernels/cpu/simd.h; libdevice's is not to be had in the interpreter."""
    x = tl.clamp(x, -7.90531110763549805, 7.90531110763549805, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    p = -2.76076847742355e-16 * square + 2.00018790482477e-13
    p = p * square - 8.60467152213735e-11
    p = p * square + 5.12229709037114e-08
    p = p * square + 1.48572235717979e-05
    p = p * square + 6.37261928875436e-04
    p = p * square + 4.89352455891786e-03
    q = 1.19825839466702e-06 * square + 1.18534705686654e-04
    q = q * square + 2.26843463243900e-03
    q = q * square + 4.89352518554385e-03
    return x * p / q


@triton.jit(do_not_specialize=["unit", "table_stride", "spans"])
def paged_attention(
    q, output, part_maximum, part_sum, part_output, pool, table,
    tile_sequence, tile_start, query_starts, context_lens,
    scale, unit, table_stride, spans,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr, PAGE_ELEMENTS: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    SPAN: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """output [row, head, DIM] = softmax(scale * q K^T) V. Grid (tile, kv head, span); does not modify the pages.

    q [row, head, DIM]; table [sequence, block, page in block] of the layer's group, sequences table_stride apart.
    Tile t holds BLOCK_ROWS // GROUP rows of sequence tile_sequence[t] from its row tile_start[t] on; a sequence of
    context_lens 0 is padding. unit: the layer's K of kv head 0. WINDOW, SOFTCAP: 0 for none. With SPLIT, part_* are
    [row, head, spans(, DIM)] for `merge_spans`. UPCAST computes in fp32 where the interpreter cannot in bf16.
    """
    tile, kv_head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequence + tile)
    start = tl.load(tile_start + tile)
    first_row = tl.load(query_starts + sequence)
    row_count = tl.load(query_starts + sequence + 1) - first_row
    context = tl.load(context_lens + sequence)

    lane = tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < DIM
    row = start + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    is_row = (row < row_count) & (lane < BLOCK_ROWS // GROUP * GROUP) & (context > 0)
    position = context - row_count + row
    query_place = ((first_row + row).to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * DIM + dim[None, :]
    queries = tl.load(q + query_place, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    # The keys that some row of the tile sees: first .. end - 1, and of them this program's span.
    end = tl.minimum(context, context - row_count + start + BLOCK_ROWS // GROUP)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, context - row_count + start - WINDOW + 1)
    begin = first // BLOCK_KEYS * BLOCK_KEYS
    if SPLIT:
        span_start = (first // SPAN + span) * SPAN
        begin = tl.maximum(begin, span_start)
        end = tl.minimum(end, span_start + SPAN)

    maximum = tl.full([BLOCK_ROWS], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, PADDED_DIM], tl.float32)
    pages = table + sequence.to(tl.int64) * table_stride
    for at in range(begin, end, BLOCK_KEYS):
        key = at + tl.arange(0, BLOCK_KEYS)
        is_key = key < end
        if WINDOW > 0:  # blocks wholly below the window are not held
            is_key &= key // BLOCK_TOKENS >= first // BLOCK_TOKENS
        slot = key % BLOCK_TOKENS * DIM
        k_place = slot + unit_offsets(
            pages, unit + kv_head, key // BLOCK_TOKENS, is_key, UNITS_PER_PAGE, PAGE_ELEMENTS, PAGES_PER_BLOCK, DIM
        )
        keys = tl.load(pool + k_place[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
        scores = tl.dot(queries, keys, input_precision="ieee")
        if SOFTCAP > 0:
            scores = tanh(scores * (scale / SOFTCAP)) * (SOFTCAP * LOG2_E)
        else:
            scores *= scale * LOG2_E
        seen = is_row[:, None] & is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, NOTHING)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.where(seen, tl.exp2(scores - new_maximum[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        v_place = slot + unit_offsets(
            pages, unit + KV_HEADS + kv_head, key // BLOCK_TOKENS, is_key,
            UNITS_PER_PAGE, PAGE_ELEMENTS, PAGES_PER_BLOCK, DIM,
        )  # fmt: skip
        values = tl.load(pool + v_place[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        weights = weights.to(values.dtype)
        if UPCAST:
            weights, values = weights.to(tl.float32), values.to(tl.float32)
        result = result * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
        maximum = new_maximum

    if SPLIT:
        part = ((first_row + row).to(tl.int64) * (KV_HEADS * GROUP) + head) * spans + span
        tl.store(part_maximum + part, maximum, mask=is_row)
        tl.store(part_sum + part, total, mask=is_row)
        tl.store(part_output + part[:, None] * DIM + dim[None, :], result, mask=is_row[:, None] & is_dim[None, :])
    else:
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(output + query_place, result.to(output.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["spans"])
def merge_spans(
    output, part_maximum, part_sum, part_output, tile_sequence, query_starts, context_lens, spans,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """output [row, head, DIM] from the spans of it. Grid (tile of one row, head); padding is left alone."""
    sequence, head = tl.load(tile_sequence + tl.program_id(0)), tl.program_id(1)
    if tl.load(context_lens + sequence) == 0:
        return
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < DIM
    place = tl.load(query_starts + sequence).to(tl.int64) * HEADS + head
    maximum = tl.load(part_maximum + place * spans)
    for span in range(1, spans):
        maximum = tl.maximum(maximum, tl.load(part_maximum + place * spans + span))
    total = 0.0
    result = tl.zeros([PADDED_DIM], tl.float32)
    for span in range(spans):
        part = place * spans + span
        factor = tl.exp2(tl.load(part_maximum + part) - maximum)
        total += factor * tl.load(part_sum + part)
        result += factor * tl.load(part_output + part * DIM + dim, mask=is_dim, other=0.0)
    tl.store(output + place * DIM + dim, (result / total).to(output.dtype.element_ty), mask=is_dim)
