#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float widen(unsigned short h) {
  const std::uint32_t u = static_cast<std::uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline unsigned short narrow(float f) {
  std::uint32_t u;
  std::memcpy(&u, &f, 4);
  const std::uint32_t rounded = u + 0x7FFFu + ((u >> 16) & 1u);
  const bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<unsigned short>((nan ? (u | 0x400000u) : rounded) >> 16);
}

}  // namespace

void add_norm(const unsigned short* __restrict__ x, const unsigned short* __restrict__ residual,
              const unsigned short* __restrict__ weight, unsigned short* __restrict__ hidden,
              unsigned short* __restrict__ total, long long rows, float eps) {
#pragma omp parallel for schedule(static)
  for (long long row = 0; row < rows; ++row) {
    const unsigned short* a = x + row * COLS;
    const unsigned short* b = residual + row * COLS;
    unsigned short* t = total + row * COLS;
    unsigned short* h = hidden + row * COLS;
    float kept[COLS];
    float square = 0.0f;
#pragma omp simd reduction(+ : square)
    for (int c = 0; c < COLS; ++c) {
      const unsigned short sum = narrow(widen(a[c]) + widen(b[c]));
      t[c] = sum;
      kept[c] = widen(sum);
      square += kept[c] * kept[c];
    }
    const float scale = 1.0f / std::sqrt(square / COLS + eps);
#pragma omp simd
    for (int c = 0; c < COLS; ++c) h[c] = narrow(widen(narrow(kept[c] * scale)) * widen(weight[c]));
  }
}

