from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, x):
    if x.dim() != 3 or not x.is_contiguous():
        raise Unsupported("dense")
    y = empty(x.shape, x.dtype)
    launch("rows", args=(x, module.bias, y, x.numel() // x.shape[2], x.shape[2]))
    return y, module.bias
