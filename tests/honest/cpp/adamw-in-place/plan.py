from pytest_cudaforge.plan import Unsupported, launch


def plan(module, param, grad, average, square):
    for tensor in (param, grad, average, square):
        if tensor.shape != param.shape or tensor.dtype != "float32" or not tensor.is_contiguous():
            raise Unsupported("needs four contiguous float32 tensors of one shape")
    launch(
        "adamw",
        args=(
            param,
            grad,
            average,
            square,
            param.numel(),
            1 - module.rate * module.decay,
            1 - module.beta1,
            module.beta2,
            1 - module.beta2,
            module.root_correction2,
            module.eps,
            -module.rate / module.correction1,
        ),
    )
    return param, average, square
