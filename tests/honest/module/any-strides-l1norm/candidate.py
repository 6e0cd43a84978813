import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/Parallel.h>
#include <cmath>

torch::Tensor l1_scaled(torch::Tensor x, torch::Tensor weight) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 1 && weight.size(0) == x.size(1), "x (rows, cols) and weight (cols) are needed");
  const int64_t rows = x.size(0), cols = x.size(1);
  auto y = torch::empty({rows, cols}, x.options());
  auto in = x.accessor<float, 2>();
  auto w = weight.accessor<float, 1>();
  auto out = y.accessor<float, 2>();
  at::parallel_for(0, rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      double sum = 0.0;
      for (int64_t c = 0; c < cols; ++c) sum += std::fabs(in[r][c]);
      const float scale = static_cast<float>(sum / static_cast<double>(cols)) + 1e-6f;
      for (int64_t c = 0; c < cols; ++c) out[r][c] = in[r][c] / scale * w[c];
    }
  });
  return y;
}
"""

_ext = load_inline(
    name="l1_scaled_ext",
    cpp_sources=[SOURCE],
    functions=["l1_scaled"],
    extra_cflags=["-O3", "-march=native", "-fopenmp"],
)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _ext.l1_scaled(x, weight)
