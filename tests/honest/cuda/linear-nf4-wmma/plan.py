from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, x):
    cols, depth = module.out_features, module.in_features
    if x.dtype != "float16" or module.bias.dtype != "float16" or module.absmax.dtype != "float32":
        raise Unsupported("needs half precision inputs and bias, and float32 scales")
    if not x.is_contiguous() or x.shape[-1] != depth or depth % 64 != 0:
        raise Unsupported("needs contiguous rows of a multiple of 64")
    for t in (module.packed, module.absmax, module.bias):
        if not t.is_contiguous():
            raise Unsupported("needs contiguous weights")
    y = empty((*x.shape[:-1], cols), x.dtype)
    rows = x.numel() // depth
    if rows == 0:
        return y
    across, down = (cols + 63) // 64, (rows + 63) // 64
    launch(
        "linear_nf4",
        grid=across * down,
        block=128,
        args=(x, module.packed, module.absmax, module.bias, y, rows, depth, cols, across),
    )
    return y
