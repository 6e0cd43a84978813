from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, scores, mask=None, causal=False):
    if scores.dim() != 4 or not scores.is_contiguous():
        raise Unsupported("needs contiguous scores of four dimensions")
    batch, heads, queries, keys = scores.shape
    if mask is not None:
        if not mask.is_contiguous() or mask.shape != (batch, 1, 1, keys):
            raise Unsupported("needs a key padding mask for each sample")
    y = empty(scores.shape, scores.dtype)
    launch(
        "masked_softmax",
        args=(scores, mask, y, batch, heads, queries, keys, bool(causal), module.scale),
    )
    return y
