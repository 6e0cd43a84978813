import triton
import triton.language as tl


# Both products of a tile at once, so that x is read once and nothing is written between. Programs go through the tiles
# in groups of GROUP rows of tiles, whose parts of x stay in the L2.
@triton.jit
def gated_up(
    x,
    gate,
    up,
    y,
    rows,
    cols,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    group = program // (GROUP * across)
    first = group * GROUP
    size = tl.minimum(down - first, GROUP)
    tile_m = first + program % (GROUP * across) % size
    tile_n = program % (GROUP * across) // size

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None].to(tl.int64) * depth + k[None, :]
    w_at = col[None, :].to(tl.int64) * depth + k[:, None]
    row_mask, col_mask = row[:, None] < rows, col[None, :] < cols
    gates = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = k < depth - start
        a = tl.load(x_at, mask=row_mask & left[None, :], other=0.0)
        b = tl.load(gate + w_at, mask=col_mask & left[:, None], other=0.0)
        c = tl.load(up + w_at, mask=col_mask & left[:, None], other=0.0)
        gates = tl.dot(a, b, gates)
        ups = tl.dot(a, c, ups)
        x_at += BLOCK_K
        w_at += BLOCK_K
    result = gates / (1.0 + tl.exp(-gates)) * ups
    to = y + row[:, None].to(tl.int64) * cols + col[None, :]
    tl.store(to, result.to(tl.bfloat16), mask=row_mask & col_mask)
