import triton
import triton.language as tl


# A program makes BLOCK_M rows of one head and walks over the keys up to its last row (online softmax). Tensors may have
# any strides but in the last dimension. The first column is visible to every row, so no maximum stays at -inf.
@triton.jit
def attention(
    query,
    key,
    value,
    out,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    o_batch,
    o_head,
    o_token,
    heads,
    group,
    tokens,
    scale,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The long programs (the last rows) begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    kv_head = (head // group).to(tl.int64)
    query += batch * q_batch + head.to(tl.int64) * q_head
    key += batch * k_batch + kv_head * k_head
    value += batch * v_batch + kv_head * v_head
    out += batch * o_batch + head.to(tl.int64) * o_head

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    element = tl.arange(0, SIZE)
    q = tl.load(query + rows[:, None] * q_token + element[None, :], mask=rows[:, None] < tokens, other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, SIZE], tl.float32)
    # Powers of two are cheaper than those of e.
    factor = scale * 1.4426950408889634
    for start in range(0, tl.minimum((tile + 1) * BLOCK_M, tokens), BLOCK_N):
        at = start + columns
        k = tl.load(key + at[None, :] * k_token + element[:, None], mask=at[None, :] < tokens, other=0.0)
        v = tl.load(value + at[:, None] * v_token + element[None, :], mask=at[:, None] < tokens, other=0.0)
        score = tl.dot(q, k) * factor
        visible = (at[None, :] <= rows[:, None]) & (at[None, :] < tokens)
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        share = tl.exp2(score - higher[:, None])
        keep = tl.exp2(highest - higher)
        weight = weight * keep + tl.sum(share, axis=1)
        total = tl.dot(share.to(v.dtype), v, total * keep[:, None])
        highest = higher
    total = total / weight[:, None]
    place = out + rows[:, None] * o_token + element[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=rows[:, None] < tokens)
