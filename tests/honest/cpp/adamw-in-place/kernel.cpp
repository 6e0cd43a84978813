#include <cmath>

void adamw(float* __restrict__ param, const float* __restrict__ grad, float* __restrict__ average,
           float* __restrict__ square, long long count, float shrink, float weight1, float beta2, float weight2,
           float root2, float eps, float rate) {
#pragma omp parallel for simd schedule(static)
  for (long long i = 0; i < count; ++i) {
    const float g = grad[i];
    const float m = average[i] + weight1 * (g - average[i]);
    const float v = square[i] * beta2 + weight2 * g * g;
    average[i] = m;
    square[i] = v;
    param[i] = param[i] * shrink + rate * (m / (std::sqrt(v) / root2 + eps));
  }
}
