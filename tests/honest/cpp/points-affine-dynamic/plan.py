from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, points):
    if points.dim() != 2 or points.shape[1] != 2 or not points.is_contiguous():
        raise Unsupported("needs points of two dense coordinates")
    n = points.shape[0]
    p, radius = empty((n, 2), points.dtype), empty((n,), points.dtype)
    launch("encode", args=(points, module.scale, module.offset, p, radius, n))
    return p, radius
