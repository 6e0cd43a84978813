from pytest_cudaforge.plan import Unsupported, device, empty, launch


def plan(module, logits):
    if logits.dim() != 2 or logits.dtype != "float32" or not logits.is_contiguous():
        raise Unsupported("needs a contiguous float32 matrix")
    tokens, experts = logits.shape
    chosen = module.chosen
    if experts % 32 != 0 or not 32 <= experts <= 256 or not 1 <= chosen <= 32 or tokens == 0:
        raise Unsupported("needs 32 to 256 experts, in steps of 32, and at most 32 of them chosen")
    weights, indices = empty((tokens, chosen), "float32"), empty((tokens, chosen), "int64")
    blocks = min((tokens + 7) // 8, 4 * device.sm_count)
    partial, load = empty((blocks, experts), "float32"), empty((experts,), "float32")
    constants = {"EXPERTS": experts, "CHOSEN": chosen}
    launch("route", grid=blocks, block=256, args=(logits, weights, indices, partial, tokens), constants=constants)
    launch("mean_load", grid=experts, block=32, args=(partial, load, blocks, tokens), constants=constants)
    return weights, indices, load
