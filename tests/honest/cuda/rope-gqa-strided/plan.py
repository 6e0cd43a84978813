from pytest_cudaforge.plan import Unsupported, device, empty, launch

TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}


def like(x):
    """A buffer laid out as the original lays out its result: as its operand, which is dense in one of two orders."""
    if x.is_contiguous():
        return empty(x.shape, x.dtype)
    if x.transpose(1, 2).is_contiguous():
        batch, heads, tokens, size = x.shape
        return empty((batch, tokens, heads, size), x.dtype).transpose(1, 2)
    raise Unsupported(
        "needs (batch, heads, tokens, size) that is dense, or transposed from (batch, tokens, heads, size)"
    )


def plan(query, key, cos, sin):
    if query.dim() != 4 or key.dim() != 4 or cos.dim() != 2 or sin.shape != cos.shape:
        raise Unsupported("needs four-dimensional queries and keys, and a matrix of angles")
    batch, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    if key.shape != (batch, kv_heads, tokens, size) or cos.shape != (tokens, size) or size % 2 != 0:
        raise Unsupported("shapes that do not fit")
    dtype = str(query.dtype)
    if dtype not in TYPES or any(t.dtype != query.dtype for t in (key, cos, sin)):
        raise Unsupported("mixed dtypes")
    out_query, out_key = like(query), like(key)
    most = max(query.numel(), key.numel()) // 2
    if most == 0:
        return out_query, out_key
    launch(
        f"rope<{TYPES[dtype]}>",
        grid=(min((most + 255) // 256, 16 * device.sm_count), 2),
        block=256,
        args=(
            *(query, key, cos, sin, out_query, out_key),
            *query.stride(),
            *key.stride(),
            *out_query.stride(),
            *out_key.stride(),
            *cos.stride(),
            *sin.stride(),
            *(batch, heads, kv_heads, tokens, size // 2),
        ),
    )
    return out_query, out_key
