from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, query, key, value):
    batch, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    if key.shape != (batch, kv_heads, tokens, size) or value.shape != key.shape or heads % kv_heads != 0:
        raise Unsupported("shapes that do not fit")
    if size not in (64, 128) or batch * heads > 65535:
        raise Unsupported("needs heads of 64 or 128")
    for x in (query, key, value):
        if x.dtype not in ("bfloat16", "float16") or x.dtype != query.dtype or x.stride(-1) != 1:
            raise Unsupported("needs half precision with a dense last dimension")
    out = empty(query.shape, query.dtype)
    if out.numel() == 0:
        return out
    block_m, block_n = 128, 64
    launch(
        "attention",
        grid=((tokens + block_m - 1) // block_m, batch * heads),
        args=(
            *(query, key, value, out),
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *out.stride()[:3],
            *(heads, heads // kv_heads, tokens, module.scale),
        ),
        constants={"SIZE": size, "BLOCK_M": block_m, "BLOCK_N": block_n},
        num_warps=8,
        num_stages=2,
    )
    return out
