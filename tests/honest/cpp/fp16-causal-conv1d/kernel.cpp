#include <cmath>

void short_conv(const _Float16* __restrict__ x, const _Float16* __restrict__ weight, const _Float16* __restrict__ bias,
                _Float16* __restrict__ y, long long batch, long long channels) {
#pragma omp parallel for collapse(2) schedule(static)
  for (long long b = 0; b < batch; ++b) {
    for (long long c = 0; c < channels; ++c) {
      float row[STEPS + TAPS - 1];
      for (int t = 0; t < TAPS - 1; ++t) row[t] = 0.0f;
      const _Float16* in = x + (b * channels + c) * STEPS;
      for (int t = 0; t < STEPS; ++t) row[TAPS - 1 + t] = static_cast<float>(in[t]);
      float w[TAPS];
      for (int k = 0; k < TAPS; ++k) w[k] = static_cast<float>(weight[c * TAPS + k]);
      const float offset = static_cast<float>(bias[c]);
      _Float16* out = y + (b * channels + c) * STEPS;
      for (int t = 0; t < STEPS; ++t) {
        float sum = offset;
        for (int k = 0; k < TAPS; ++k) sum += row[t + k] * w[k];
        out[t] = static_cast<_Float16>(sum / (1.0f + std::exp(-sum)));
      }
    }
  }
}
