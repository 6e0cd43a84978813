from pytest_cudaforge.plan import Unsupported, device, empty, launch


def plan(module, x, state):
    gru = module.gru
    if gru.num_layers != 1 or gru.bidirectional or gru.batch_first or not gru.bias:
        raise Unsupported("is one layer in one direction, time first, with biases")
    if x.dim() != 3 or state.dim() != 3 or x.dtype != "float32" or state.dtype != "float32":
        raise Unsupported("needs batches of float32")
    steps, batch, inputs = x.shape
    hidden = gru.hidden_size
    if state.shape != (1, batch, hidden) or not x.is_contiguous() or not state.is_contiguous():
        raise Unsupported("needs contiguous inputs that fit")
    if steps == 0 or batch == 0:
        raise Unsupported("nothing to do")
    units = (hidden + device.sm_count - 1) // device.sm_count  # of one block: one block a multiprocessor is resident
    shared = (units * 3 * hidden + batch * hidden) * 4
    if shared > device.max_shared_bytes:
        raise Unsupported("weights and states that do not fit into shared memory")
    gates = empty((steps, batch, 3 * hidden), "float32")
    across, down = (3 * hidden + 63) // 64, (steps * batch + 63) // 64
    launch(
        "input_gates",
        grid=across * down,
        block=256,
        args=(x, gru.weight_ih_l0, gru.bias_ih_l0, gates, steps * batch, 3 * hidden, inputs, across),
    )
    out, last = empty((steps, batch, hidden), x.dtype), empty((1, batch, hidden), x.dtype)
    launch(
        "gru_scan",
        grid=(hidden + units - 1) // units,
        block=256,
        shared_bytes=shared,
        args=(gates, gru.weight_hh_l0, gru.bias_hh_l0, state, out, last, steps, batch, hidden, units),
        cooperative=True,
    )
    return out, last
