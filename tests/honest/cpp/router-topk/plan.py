from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, logits):
    if logits.dim() != 2 or not logits.is_contiguous():
        raise Unsupported("needs contiguous logits of two dimensions")
    tokens, experts = logits.shape
    if module.k > experts or module.k < 1:
        raise Unsupported("k out of range")
    weights = empty((tokens, module.k), logits.dtype)
    chosen = empty((tokens, module.k), "int64")
    launch("gate", args=(logits, weights, chosen, tokens, experts), constants={"K": module.k})
    return weights, chosen
