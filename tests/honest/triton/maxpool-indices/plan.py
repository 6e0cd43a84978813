from pytest_cudaforge.plan import Unsupported, empty, launch


def single(value):
    if isinstance(value, tuple):
        if value[0] != value[1]:
            raise Unsupported("windows that are no squares")
        return value[0]
    return value


def plan(module, x):
    pool = module.pool
    size, stride, pad = single(pool.kernel_size), single(pool.stride), single(pool.padding)
    if single(pool.dilation) != 1 or pool.ceil_mode or size > 8:
        raise Unsupported("dilation, ceil mode and large windows are not handled")
    if x.dim() != 4 or x.dtype not in ("float32", "float16", "bfloat16") or not x.is_contiguous():
        raise Unsupported("needs contiguous images")
    images, channels, height, width = x.shape
    out_height, out_width = (height + 2 * pad - size) // stride + 1, (width + 2 * pad - size) // stride + 1
    if min(out_height, out_width) < 1 or images * channels == 0 or height * width >= 2**30:
        raise Unsupported("no output, or planes too large")
    shape = (images, channels, out_height, out_width)
    values, indices = empty(shape, x.dtype), empty(shape, "int64")
    total = values.numel()
    launch(
        "max_pool",
        grid=(total + 255) // 256,
        args=(x, values, indices, height, width, out_height, out_width, total),
        constants={"SIZE": size, "STRIDE": stride, "PAD": pad, "BLOCK": 256},
    )
    return values, indices
