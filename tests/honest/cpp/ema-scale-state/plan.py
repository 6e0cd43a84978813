from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, x):
    if x.dim() != 2 or not x.is_contiguous() or x.shape[0] < 1:
        raise Unsupported("needs a contiguous x of two dimensions")
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    scale = empty((cols,), x.dtype)
    launch("ema_scale", args=(x, module.scale, y, scale, rows, cols, module.decay, 1.0 - module.decay))
    return [y, {"scale": scale}]
