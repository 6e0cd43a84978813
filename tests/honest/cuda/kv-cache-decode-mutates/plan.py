from pytest_cudaforge.plan import Unsupported, empty, launch

CHUNK = 256


def plan(module, query, key, value, position):
    keys, values, group = module.keys, module.values, module.group
    batch, heads, size = query.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    if keys.shape != (batch, kv_heads, length, size) or values.shape != keys.shape:
        raise Unsupported("caches of another batch")
    if key.shape != (batch, kv_heads, size) or value.shape != key.shape or position.shape != (batch,):
        raise Unsupported("shapes that do not fit")
    if heads != group * kv_heads or size not in (64, 128, 256) or group > 8:
        raise Unsupported("needs heads of 64, 128 or 256 in small groups")
    tensors = (query, key, value, keys, values)
    if any(t.dtype != "float16" or not t.is_contiguous() for t in tensors) or position.dtype != "int64":
        raise Unsupported("needs contiguous float16 tensors and int64 positions")
    if group * size * 16 > 40 * 1024:
        raise Unsupported("too much shared memory")
    chunks = (length + CHUNK - 1) // CHUNK
    constants = {"SIZE": size, "GROUP": group, "CHUNK": CHUNK}
    every = batch * kv_heads
    launch(
        "append",
        grid=every,
        block=size,
        args=(key, value, position, keys, values, kv_heads, length),
        constants=constants,
    )
    sums = empty((every, chunks, group, size), "float32")
    tops, weights = empty((every, chunks, group), "float32"), empty((every, chunks, group), "float32")
    launch(
        "attend",
        grid=(every, chunks),
        block=128,
        args=(query, keys, values, position, sums, tops, weights, kv_heads, length, module.scale),
        constants=constants,
    )
    out = empty(query.shape, query.dtype)
    launch(
        "join",
        grid=every,
        block=128,
        args=(sums, tops, weights, position, out, kv_heads, chunks),
        constants=constants,
    )
    return out
