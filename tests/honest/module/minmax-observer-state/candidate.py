import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/Parallel.h>
#include <limits>
#include <utility>
#include <vector>

using Range = std::pair<float, float>;

std::vector<torch::Tensor> observe(torch::Tensor input, torch::Tensor low, torch::Tensor high, double momentum) {
  TORCH_CHECK(input.numel() > 0 && input.scalar_type() == at::kFloat, "values are needed");
  auto x = input.contiguous();
  const float* px = x.data_ptr<float>();
  const float inf = std::numeric_limits<float>::infinity();
  // NaN wins, as in torch.
  auto smaller = [](float a, float b) { return (a < b || a != a) ? a : b; };
  auto larger = [](float a, float b) { return (a > b || a != a) ? a : b; };
  const Range found = at::parallel_reduce(
      int64_t{0}, x.numel(), int64_t{8192}, Range{inf, -inf},
      [&](int64_t begin, int64_t end, Range part) {
        for (int64_t i = begin; i < end; ++i) part = {smaller(px[i], part.first), larger(px[i], part.second)};
        return part;
      },
      [&](Range a, Range b) { return Range{smaller(a.first, b.first), larger(a.second, b.second)}; });
  float *pl = low.data_ptr<float>(), *ph = high.data_ptr<float>();
  const float weight = static_cast<float>(momentum);
  *pl += weight * (found.first - *pl);
  *ph += weight * (found.second - *ph);
  const float least = *pl, most = *ph;
  auto y = torch::empty_like(x);
  float* py = y.data_ptr<float>();
  at::parallel_for(0, x.numel(), 8192, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float v = px[i] < least ? least : px[i];
      py[i] = v > most ? most : v;
    }
  });
  auto scale = torch::empty({}, x.options()), now_low = torch::empty({}, x.options()), now_high = torch::empty({}, x.options());
  *scale.data_ptr<float>() = (most - least) / 255.0f;
  *now_low.data_ptr<float>() = least;
  *now_high.data_ptr<float>() = most;
  return {y, scale, now_low, now_high};
}
"""

_ext = load_inline(
    name="observe_ext", cpp_sources=[SOURCE], functions=["observe"], extra_cflags=["-O3", "-march=native", "-fopenmp"]
)


class ModelNew(nn.Module):
    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))

    def forward(self, x: torch.Tensor):
        clipped, scale, low, high = _ext.observe(x, self.low, self.high, self.momentum)
        return (clipped, {"scale": scale, "range": [low, high]})
