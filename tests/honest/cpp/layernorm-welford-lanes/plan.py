from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, x):
    if not x.is_contiguous() or x.dim() < 1 or x.shape[-1] < 1:
        raise Unsupported("needs a contiguous x with columns")
    cols = x.shape[-1]
    y = empty(x.shape, x.dtype)
    launch("layer_norm", args=(x, module.weight, module.bias, y, x.numel() // cols, cols, module.eps))
    return y
