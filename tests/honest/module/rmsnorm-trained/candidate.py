import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/Parallel.h>
#include <cmath>
#include <vector>

static inline float scale_of(const float* row, int64_t cols, double eps) {
  double square = 0.0;
#pragma omp simd reduction(+ : square)
  for (int64_t c = 0; c < cols; ++c) square += static_cast<double>(row[c]) * row[c];
  return static_cast<float>(1.0 / std::sqrt(square / static_cast<double>(cols) + eps));
}

torch::Tensor rms_forward(torch::Tensor input, torch::Tensor weight, double eps) {
  auto x = input.contiguous(), w = weight.contiguous();
  const int64_t cols = w.numel();
  TORCH_CHECK(x.size(-1) == cols && x.scalar_type() == at::kFloat, "x does not fit the weight");
  auto y = torch::empty_like(x);
  const float *px = x.data_ptr<float>(), *pw = w.data_ptr<float>();
  float* py = y.data_ptr<float>();
  at::parallel_for(0, x.numel() / cols, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float s = scale_of(px + r * cols, cols, eps);
      for (int64_t c = 0; c < cols; ++c) py[r * cols + c] = px[r * cols + c] * s * pw[c];
    }
  });
  return y;
}

std::vector<torch::Tensor> rms_backward(torch::Tensor grad, torch::Tensor input, torch::Tensor weight, double eps) {
  auto g = grad.contiguous(), x = input.contiguous(), w = weight.contiguous();
  const int64_t cols = w.numel(), rows = x.numel() / cols, block = 32, blocks = (rows + block - 1) / block;
  auto dx = torch::empty_like(x), dw = torch::empty_like(w);
  auto partial = torch::empty({blocks, cols}, x.options());
  const float *pg = g.data_ptr<float>(), *px = x.data_ptr<float>(), *pw = w.data_ptr<float>();
  float *pdx = dx.data_ptr<float>(), *pdw = dw.data_ptr<float>(), *pp = partial.data_ptr<float>();
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      float* sums = pp + b * cols;
      for (int64_t c = 0; c < cols; ++c) sums[c] = 0.0f;
      const int64_t end = (b + 1) * block < rows ? (b + 1) * block : rows;
      for (int64_t r = b * block; r < end; ++r) {
        const float *row = px + r * cols, *d = pg + r * cols;
        const float s = scale_of(row, cols, eps);
        double dot = 0.0;
#pragma omp simd reduction(+ : dot)
        for (int64_t c = 0; c < cols; ++c) dot += static_cast<double>(d[c]) * pw[c] * row[c];
        const float k = static_cast<float>(dot / static_cast<double>(cols)) * s * s;
        for (int64_t c = 0; c < cols; ++c) {
          pdx[r * cols + c] = s * (d[c] * pw[c] - row[c] * k);
          sums[c] += d[c] * row[c] * s;
        }
      }
    }
  });
  for (int64_t c = 0; c < cols; ++c) {
    double sum = 0.0;
    for (int64_t b = 0; b < blocks; ++b) sum += pp[b * cols + c];
    pdw[c] = static_cast<float>(sum);
  }
  return {dx, dw};
}
"""

_ext = load_inline(
    name="rms_trained_ext",
    cpp_sources=[SOURCE],
    functions=["rms_forward", "rms_backward"],
    extra_cflags=["-O3", "-march=native", "-fopenmp"],
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _ext.rms_forward(x, weight, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx, dw = _ext.rms_backward(grad, x, weight, ctx.eps)
        return dx, dw, None


class ModelNew(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)
