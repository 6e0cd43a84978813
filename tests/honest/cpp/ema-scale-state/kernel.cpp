#include <cmath>

constexpr long long TILE = 32;

void ema_scale(const float* __restrict__ x, float* __restrict__ state, float* __restrict__ y, float* __restrict__ copy,
               long long rows, long long cols, float decay, float rest) {
  const long long tiles = (cols + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
  for (long long t = 0; t < tiles; ++t) {
    const long long begin = t * TILE, width = cols - begin < TILE ? cols - begin : TILE;
    double sum[TILE] = {};
    for (long long r = 0; r < rows; ++r) {
      const float* in = x + r * cols + begin;
      for (long long c = 0; c < width; ++c) sum[c] += std::fabs(in[c]);
    }
    float divisor[TILE];
    for (long long c = 0; c < width; ++c) {
      const float mean = static_cast<float>(sum[c] / static_cast<double>(rows));
      const float now = state[begin + c] * decay + rest * mean;
      state[begin + c] = now;
      copy[begin + c] = now;
      divisor[c] = now + 1e-6f;
    }
    for (long long r = 0; r < rows; ++r) {
      const float* in = x + r * cols + begin;
      float* out = y + r * cols + begin;
      for (long long c = 0; c < width; ++c) out[c] = in[c] / divisor[c];
    }
  }
}

