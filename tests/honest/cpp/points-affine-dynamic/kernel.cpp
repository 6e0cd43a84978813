#include <cmath>
void encode(const float* __restrict__ points, const float* __restrict__ scale, const float* __restrict__ offset, float* __restrict__ p, float* __restrict__ radius, long long n) {
#pragma omp parallel for
  for (long long i = 0; i < n; ++i) {
    const float x = points[2 * i] * scale[0] + offset[0], y = points[2 * i + 1] * scale[1] + offset[1];
    p[2 * i] = x;
    p[2 * i + 1] = y;
    radius[i] = std::sqrt(x * x + y * y);
  }
}
