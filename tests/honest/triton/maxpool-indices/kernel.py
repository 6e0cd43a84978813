import triton
import triton.language as tl


# One output a lane. As torch: the first of equals counts, and a NaN takes the place of whatever was before it.
@triton.jit
def max_pool(
    x,
    values,
    indices,
    height,
    width,
    out_height,
    out_width,
    total,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    column = (at % out_width).to(tl.int32)
    line = at // out_width
    row = (line % out_height).to(tl.int32)
    plane = x + line // out_height * height * width
    top, left = row * STRIDE - PAD, column * STRIDE - PAD
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.maximum(top, 0) * width + tl.maximum(left, 0)
    for dy in tl.static_range(SIZE):
        for dx in tl.static_range(SIZE):
            iy, ix = top + dy, left + dx
            there = inside & (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)
            place = iy * width + ix
            value = tl.load(plane + place, mask=there, other=float("-inf")).to(tl.float32)
            take = there & ((value > best) | (value != value))
            best = tl.where(take, value, best)
            index = tl.where(take, place, index)
    tl.store(values + at, best, mask=inside)
    tl.store(indices + at, index.to(tl.int64), mask=inside)
