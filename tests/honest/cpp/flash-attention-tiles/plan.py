import math

from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(q, k, v, is_causal=False):
    if q.dim() != 4 or not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        raise Unsupported("needs contiguous q, k, v of four dimensions")
    b, h, queries, d = q.shape
    keys = k.shape[2]
    if k.shape != (b, h, keys, d) or v.shape != k.shape or keys < 1 or d > 256:
        raise Unsupported("needs matching heads of at most 256")
    out = empty(q.shape, q.dtype)
    args = (q, k, v, out, b * h, queries, keys, bool(is_causal), 1.0 / math.sqrt(d))
    launch("attention", args=args, constants={"D": d})
    return out
