#include <cmath>

extern "C" void norm(const float* x, const int* kinds, const float* weight, const float* table, float* y, long long batch, long long length, long long width, long long xb, long long xt, long long xd, long long kb, long long kt, double eps) {
#pragma omp parallel for collapse(2)
  for (long long b = 0; b < batch; ++b)
    for (long long t = 0; t < length; ++t) {
      const float* in = x + b * xb + t * xt;
      const float* add = table + (long long)kinds[b * kb + t * kt] * width;
      float* out = y + (b * length + t) * width;
      double sum = 0.0;
      for (long long d = 0; d < width; ++d) sum += (double)in[d * xd] * in[d * xd];
      const double inv = 1.0 / std::sqrt(sum / (double)width + eps);
      for (long long d = 0; d < width; ++d) out[d] = (float)(in[d * xd] * inv * weight[d] + add[d]);
    }
}
