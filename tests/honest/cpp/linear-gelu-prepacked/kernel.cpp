#include <cmath>

constexpr int NB = 16;

void pack(const float* __restrict__ w, float* __restrict__ packed, long long n, long long k) {
  const long long panels = (n + NB - 1) / NB;
#pragma omp parallel for schedule(static)
  for (long long p = 0; p < panels; ++p)
    for (long long i = 0; i < k; ++i)
      for (int j = 0; j < NB; ++j) packed[(p * k + i) * NB + j] = p * NB + j < n ? w[(p * NB + j) * k + i] : 0.0f;
}

static inline float gelu(float v) { return 0.5f * v * (1.0f + std::erf(v * 0.70710678118654752f)); }

template <int MB>
static void tile(const float* __restrict__ x, const float* __restrict__ panel, const float* __restrict__ bias,
                 float* __restrict__ y, long long n, long long k, int width) {
  float acc[MB][NB];
  for (int m = 0; m < MB; ++m)
    for (int j = 0; j < NB; ++j) acc[m][j] = 0.0f;
  for (long long i = 0; i < k; ++i) {
    const float* b = panel + i * NB;
    for (int m = 0; m < MB; ++m) {
      const float a = x[m * k + i];
#pragma omp simd
      for (int j = 0; j < NB; ++j) acc[m][j] += a * b[j];
    }
  }
  for (int m = 0; m < MB; ++m)
    for (int j = 0; j < width; ++j) y[m * n + j] = gelu(acc[m][j] + bias[j]);
}

void linear_gelu(const float* __restrict__ x, const float* __restrict__ packed, const float* __restrict__ bias,
                 float* __restrict__ y, long long rows, long long n, long long k) {
  const long long panels = (n + NB - 1) / NB, blocks = (rows + 3) / 4;
#pragma omp parallel for collapse(2) schedule(static)
  for (long long p = 0; p < panels; ++p) {
    for (long long b = 0; b < blocks; ++b) {
      const int width = static_cast<int>(n - p * NB < NB ? n - p * NB : NB);
      const long long row = b * 4;
      const float* from = x + row * k;
      float* to = y + row * n + p * NB;
      const float* panel = packed + p * k * NB;
      switch (rows - row) {
        case 1: tile<1>(from, panel, bias + p * NB, to, n, k, width); break;
        case 2: tile<2>(from, panel, bias + p * NB, to, n, k, width); break;
        case 3: tile<3>(from, panel, bias + p * NB, to, n, k, width); break;
        default: tile<4>(from, panel, bias + p * NB, to, n, k, width); break;
      }
    }
  }
}

