from pytest_cudaforge.plan import Unsupported, empty, launch

TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half"}


def plan(module, hidden, residual):
    width = module.width
    if str(hidden.dtype) not in TYPES or residual.dtype != hidden.dtype or module.weight.dtype != "float32":
        raise Unsupported("needs half precision inputs and float32 weights")
    if hidden.shape != residual.shape or hidden.shape[-1] != width:
        raise Unsupported("shapes that do not fit")
    if not hidden.is_contiguous() or not residual.is_contiguous():
        raise Unsupported("needs contiguous inputs")
    vector = 8 if width % 8 == 0 else 1
    vectors = width // vector
    if vectors > 8192:
        raise Unsupported("rows too long for the registers of a block")
    normed, total = empty(hidden.shape, hidden.dtype), empty(hidden.shape, hidden.dtype)
    rows = hidden.numel() // width
    if rows == 0:
        return normed, total
    threads = min([t for t in (32, 64, 128, 256, 512, 1024) if t * 2 >= vectors] or [1024])
    launch(
        f"add_norm<{TYPES[hidden.dtype]}, {vector}>",
        grid=rows,
        block=threads,
        args=(hidden, residual, module.weight, module.bias, normed, total, module.eps),
        constants={"COLS": width, "THREADS": threads},
    )
    return normed, total
