from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(one, other):
    if not (one.is_contiguous() and other.is_contiguous()):
        raise Unsupported("contiguous intervals only")
    y = empty((one.shape[0], other.shape[0]), one.dtype)
    launch("shared_share", args=(one, other, y, one.shape[0], other.shape[0]))
    return y
