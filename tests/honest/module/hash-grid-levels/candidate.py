import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

_ext = load_inline(
    name="hash_grid_ext",
    cpp_sources=r"""
#include <ATen/Parallel.h>
#include <cmath>
torch::Tensor look_up(torch::Tensor x_, torch::Tensor tables_) {
  auto x = x_.contiguous(), tables = tables_.contiguous();
  const int64_t points = x.size(0), levels = tables.size(0), entries = tables.size(1), features = tables.size(2);
  auto y = torch::empty({points, levels * features}, x.options());
  const float *px = x.data_ptr<float>(), *pt = tables.data_ptr<float>();
  float* py = y.data_ptr<float>();
  at::parallel_for(0, points, 64, [&](int64_t b, int64_t e) {
    for (int64_t i = b; i < e; ++i)
      for (int64_t level = 0; level < levels; ++level) {
        const float scale = float(int64_t(8) << level);
        const int64_t column = int64_t(std::floor(px[2 * i] * scale)), row = int64_t(std::floor(px[2 * i + 1] * scale));
        int64_t at = (column ^ int64_t(uint64_t(row) * 2654435761u)) % entries;
        if (at < 0) at += entries;
        for (int64_t f = 0; f < features; ++f)
          py[(i * levels + level) * features + f] = pt[(level * entries + at) * features + f];
      }
  });
  return y;
}
""",
    functions=["look_up"],
    extra_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def __init__(self, levels, log2_entries, features):
        super().__init__()
        self.tables = nn.Parameter(torch.randn(levels, 1 << log2_entries, features))

    def forward(self, x):
        return _ext.look_up(x, self.tables)
