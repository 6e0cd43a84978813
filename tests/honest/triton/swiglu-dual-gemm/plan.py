from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, x):
    gate, up = module.gate.weight, module.up.weight
    cols, depth = gate.shape
    if any(t.dtype != "bfloat16" or not t.is_contiguous() for t in (x, gate, up)):
        raise Unsupported("needs contiguous bfloat16 tensors")
    if up.shape != gate.shape or x.shape[-1] != depth or x.dim() < 2:
        raise Unsupported("shapes that do not fit")
    y = empty((*x.shape[:-1], cols), x.dtype)
    rows = x.numel() // depth
    if rows == 0:
        return y
    m, n, k, warps = (128, 128, 64, 8) if rows > 64 else (16, 64, 128, 4)
    launch(
        "gated_up",
        grid=((rows + m - 1) // m) * ((cols + n - 1) // n),
        args=(x, gate, up, y, rows, cols, depth),
        constants={"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8},
        num_warps=warps,
        num_stages=3,
    )
    return y
