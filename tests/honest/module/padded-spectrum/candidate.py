from torch import nn
from torch.utils.cpp_extension import load_inline

_ext = load_inline(
    name="half_wave_ext",
    cpp_sources=r"""
#include <ATen/Parallel.h>
#include <cmath>
torch::Tensor wave(torch::Tensor x_) {
  auto x = x_.contiguous();
  auto y = torch::empty_like(x);
  const float* px = x.data_ptr<float>();
  float* py = y.data_ptr<float>();
  at::parallel_for(0, x.numel(), 1024, [&](int64_t b, int64_t e) {
    for (int64_t i = b; i < e; ++i) py[i] = std::exp(px[i]) * std::sin(px[i]);
  });
  return y;
}
""",
    functions=["wave"],
    extra_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def forward(self, x):
        return _ext.wave(x)[:, :-1]
