from pytest_cudaforge.plan import Unsupported, empty, launch, zeros

BINS = 200
PIECES = 4


def plan(ids):
    if ids.dim() != 2 or not ids.is_contiguous() or ids.shape[1] < 1:
        raise Unsupported("needs contiguous ids of two dimensions")
    rows, length = ids.shape
    partial = zeros((rows, PIECES, BINS), "int32")
    counts = empty((rows, BINS), "int64")
    shares = empty((rows, BINS), "float32")
    launch("histogram", args=(ids, partial, counts, shares, rows, length), constants={"BINS": BINS, "PIECES": PIECES})
    return counts, shares
