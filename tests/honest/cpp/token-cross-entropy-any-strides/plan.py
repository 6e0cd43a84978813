from pytest_cudaforge.plan import Unsupported, empty, launch


def check(logits, labels):
    if logits.dim() != 2 or labels.dim() != 1 or logits.dtype != "float32" or labels.dtype != "int64":
        raise Unsupported("needs (rows, vocabulary) float32 and (rows,) int64")
    if logits.shape[0] != labels.shape[0]:
        raise Unsupported("one label for each row")


def plan(logits, labels):
    check(logits, labels)
    rows, cols = logits.shape
    losses = empty((rows,), "float32")
    loss, tokens = empty((), "float32"), empty((), "int64")
    launch(
        "cross_entropy",
        args=(logits, labels, losses, loss, tokens, rows, cols, logits.stride(0), logits.stride(1), labels.stride(0)),
    )
    return {"loss": loss, "tokens": tokens}


def plan_backward(logits, labels, out, grad_out):
    check(logits, labels)
    rows, cols = logits.shape
    d = empty((rows, cols), "float32")
    launch(
        "cross_entropy_backward",
        args=(
            logits,
            labels,
            out["tokens"],
            grad_out["loss"],
            d,
            rows,
            cols,
            logits.stride(0),
            logits.stride(1),
            labels.stride(0),
        ),
    )
    return {"logits": d}
