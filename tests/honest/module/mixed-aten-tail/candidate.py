import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/Parallel.h>
#include <cmath>
#include <vector>

std::vector<torch::Tensor> attention_pool(torch::Tensor input, torch::Tensor query, torch::Tensor bias) {
  auto x = input.contiguous(), q = query.contiguous(), b = bias.contiguous();
  const int64_t n = x.size(0), steps = x.size(1), width = x.size(2);
  TORCH_CHECK(q.numel() == width && b.numel() == width, "query and bias do not fit");
  auto scores = torch::empty({n, steps}, x.options());
  const float *px = x.data_ptr<float>(), *pq = q.data_ptr<float>(), *pb = b.data_ptr<float>();
  float* ps = scores.data_ptr<float>();
  at::parallel_for(0, n * steps, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float sum = 0.0f;
      for (int64_t c = 0; c < width; ++c) sum += std::tanh(px[i * width + c] + pb[c]) * pq[c];
      ps[i] = sum;
    }
  });
  auto weights = at::softmax(scores, -1);
  auto pooled = at::bmm(weights.unsqueeze(1), x).squeeze(1);
  return {pooled, weights};
}
"""

_ext = load_inline(
    name="attention_pool_ext",
    cpp_sources=[SOURCE],
    functions=["attention_pool"],
    extra_cflags=["-O3", "-march=native", "-fopenmp"],
)


class ModelNew(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, weights = _ext.attention_pool(x, self.query, self.bias)
        return pooled, weights
