from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(x, state):
    if not (x.is_contiguous() and state.level.is_contiguous() and state.gates.is_contiguous()):
        raise Unsupported("contiguous tensors only")
    y = empty(x.shape, x.dtype)
    launch("decay", args=(x, state.level, state.gates, y, x.shape[0], x.shape[1]))
    return y


def plan_backward(x, state, grad_out):
    if not grad_out.is_contiguous():
        raise Unsupported("a contiguous gradient only")
    level, gates = state
    dx, dlevel, dgates = empty(x.shape, x.dtype), empty(level.shape, x.dtype), empty(gates.shape, x.dtype)
    launch("decay_backward", args=(x, level, gates, grad_out, dx, dlevel, dgates, x.shape[0], x.shape[1]))
    return {"x": dx, "state.0": dlevel, "state.1": dgates}
