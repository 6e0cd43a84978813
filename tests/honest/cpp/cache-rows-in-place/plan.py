from pytest_cudaforge.plan import Unsupported, launch


def plan(rows, cache, slots):
    if not (rows.is_contiguous() and cache.is_contiguous() and slots.is_contiguous()):
        raise Unsupported("contiguous tensors only")
    launch("write_rows", args=(rows, cache, slots, rows.shape[0], rows.shape[1]))
