from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(module, image, grid):
    if not image.is_contiguous() or not grid.is_contiguous():
        raise Unsupported("contiguous inputs only")
    batch, channels, height, width = image.shape
    rows, columns = grid.shape[1], grid.shape[2]
    out = empty((batch, channels, rows, columns), image.dtype)
    launch("warp", args=(image, grid, out, batch, channels, height, width, rows * columns))
    return out


def plan_backward(module, image, grid, grad_out):
    batch, channels, height, width = image.shape
    rows, columns = grid.shape[1], grid.shape[2]
    d_image, d_grid = empty(image.shape, image.dtype), empty(grid.shape, grid.dtype)
    launch(
        "warp_backward",
        args=(image, grid, grad_out, d_image, d_grid, batch, channels, height, width, rows * columns),
    )
    return {"image": d_image, "grid": d_grid}
