#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

inline float bits(std::uint32_t value) {
  float f;
  std::memcpy(&f, &value, 4);
  return f;
}

// exp within about 2 ulp, results that are denormal included; NaN stays NaN, -inf gives 0.
inline float exp_of(float x) {
  float c = x < -104.0f ? -104.0f : x;
  c = c > 89.0f ? 89.0f : c;
  const float k = std::nearbyint(c * 1.44269504088896341f);
  float r = std::fma(k, -0.693145751953125f, c);
  r = std::fma(k, -1.428606820309417e-6f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  p = std::fma(p, r * r, r) + 1.0f;
  const int n = c == c ? static_cast<int>(k) : 0;
  const int half = n / 2;
  return p * bits(static_cast<std::uint32_t>(half + 127) << 23) * bits(static_cast<std::uint32_t>(n - half + 127) << 23);
}

}  // namespace

void masked_softmax(const float* __restrict__ scores, const bool* __restrict__ mask, float* __restrict__ y,
                    long long batch, long long heads, long long queries, long long keys, bool causal, float scale) {
#pragma omp parallel for collapse(2) schedule(static)
  for (long long bh = 0; bh < batch * heads; ++bh) {
    for (long long q = 0; q < queries; ++q) {
      const float* in = scores + (bh * queries + q) * keys;
      float* out = y + (bh * queries + q) * keys;
      const bool* seen = mask ? mask + (bh / heads) * keys : nullptr;
      const long long end = causal ? (q + 1 < keys ? q + 1 : keys) : keys;
      float top = -std::numeric_limits<float>::infinity();
      bool any = false, nan = false;
      for (long long k = 0; k < end; ++k) {
        if (seen && !seen[k]) continue;
        const float v = in[k] * scale;
        any = true;
        nan |= v != v;
        top = v > top ? v : top;
      }
      if (!any || nan || std::isinf(top)) {
        for (long long k = 0; k < keys; ++k) out[k] = std::numeric_limits<float>::quiet_NaN();
        continue;
      }
      float sum = 0.0f;
      if (seen) {
        for (long long k = 0; k < end; ++k) out[k] = seen[k] ? exp_of(in[k] * scale - top) : 0.0f;
      } else {
        for (long long k = 0; k < end; ++k) out[k] = exp_of(in[k] * scale - top);
      }
#pragma omp simd reduction(+ : sum)
      for (long long k = 0; k < end; ++k) sum += out[k];
      for (long long k = 0; k < end; ++k) out[k] /= sum;
      for (long long k = end; k < keys; ++k) out[k] = 0.0f;
    }
  }
}

