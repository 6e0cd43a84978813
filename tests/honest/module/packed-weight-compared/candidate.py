import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/Parallel.h>
#include <cmath>
#include <cstring>

// (2H, K) -> (H / 8 up, K, 16): eight gate and eight up columns side by side, zeros behind the last.
torch::Tensor pack(torch::Tensor weight) {
  auto w = weight.contiguous();
  const int64_t hidden = w.size(0) / 2, k = w.size(1), panels = (hidden + 7) / 8;
  auto packed = torch::zeros({panels, k, 16}, w.options());
  const float* from = w.data_ptr<float>();
  float* to = packed.data_ptr<float>();
  for (int64_t h = 0; h < hidden; ++h)
    for (int64_t i = 0; i < k; ++i) {
      float* place = to + ((h / 8) * k + i) * 16 + h % 8;
      place[0] = from[h * k + i];
      place[8] = from[(hidden + h) * k + i];
    }
  return packed;
}

bool same(torch::Tensor a, torch::Tensor b) {
  if (a.sizes() != b.sizes() || !a.is_contiguous() || !b.is_contiguous()) return false;
  return std::memcmp(a.data_ptr<float>(), b.data_ptr<float>(), a.numel() * sizeof(float)) == 0;
}

torch::Tensor gated(torch::Tensor input, torch::Tensor packed, int64_t hidden) {
  auto x = input.contiguous();
  const int64_t k = packed.size(1), rows = x.numel() / k, panels = packed.size(0);
  TORCH_CHECK(x.size(-1) == k && x.scalar_type() == at::kFloat, "x does not fit");
  auto shape = x.sizes().vec();
  shape.back() = hidden;
  auto y = torch::empty(shape, x.options());
  const float *px = x.data_ptr<float>(), *pw = packed.data_ptr<float>();
  float* py = y.data_ptr<float>();
  at::parallel_for(0, rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t p = 0; p < panels; ++p) {
      const float* panel = pw + p * k * 16;
      for (int64_t r = begin; r < end; ++r) {
        float acc[16] = {};
        for (int64_t i = 0; i < k; ++i) {
          const float a = px[r * k + i];
          for (int j = 0; j < 16; ++j) acc[j] += a * panel[i * 16 + j];
        }
        for (int64_t j = 0; j < 8 && p * 8 + j < hidden; ++j)
          py[r * hidden + p * 8 + j] = acc[8 + j] / (1.0f + std::exp(-acc[j]));
      }
    }
  });
  return y;
}
"""

_ext = load_inline(
    name="gated_linear_ext",
    cpp_sources=[SOURCE],
    functions=["pack", "same", "gated"],
    extra_cflags=["-O3", "-march=native", "-fopenmp"],
)


class ModelNew(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight = nn.Parameter(torch.randn(2 * hidden, width) * width**-0.5)
        self._kept = None

    def __deepcopy__(self, memo):
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        import copy

        for name, value in self.__dict__.items():
            copied.__dict__[name] = None if name == "_kept" else copy.deepcopy(value, memo)
        return copied

    def _packed(self):
        live = self.weight.detach()
        kept = self._kept
        if kept is None or not _ext.same(kept[0], live):
            kept = (live.clone(memory_format=torch.contiguous_format), _ext.pack(live))
            self._kept = kept
        return kept[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ext.gated(x, self._packed(), self.hidden)
