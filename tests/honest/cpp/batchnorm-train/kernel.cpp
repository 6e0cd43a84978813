#include <cmath>

void bn_relu(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
             float* __restrict__ running_mean, float* __restrict__ running_var, long long* __restrict__ batches,
             float* __restrict__ y, long long n, long long channels, long long area, double eps, double momentum) {
  *batches += 1;
#pragma omp parallel for schedule(static)
  for (long long c = 0; c < channels; ++c) {
    const double count = static_cast<double>(n) * static_cast<double>(area);
    double sum = 0.0;
    for (long long i = 0; i < n; ++i) {
      const float* in = x + (i * channels + c) * area;
      double part = 0.0;
#pragma omp simd reduction(+ : part)
      for (long long p = 0; p < area; ++p) part += in[p];
      sum += part;
    }
    const double mean = sum / count;
    double square = 0.0;
    for (long long i = 0; i < n; ++i) {
      const float* in = x + (i * channels + c) * area;
      double part = 0.0;
#pragma omp simd reduction(+ : part)
      for (long long p = 0; p < area; ++p) {
        const double d = in[p] - mean;
        part += d * d;
      }
      square += part;
    }
    const double scale = weight[c] / std::sqrt(square / count + eps);
    running_mean[c] = static_cast<float>((1.0 - momentum) * running_mean[c] + momentum * mean);
    running_var[c] = static_cast<float>((1.0 - momentum) * running_var[c] + momentum * (square / (count - 1.0)));
    const double offset = bias[c];
    for (long long i = 0; i < n; ++i) {
      const float* in = x + (i * channels + c) * area;
      float* out = y + (i * channels + c) * area;
#pragma omp simd
      for (long long p = 0; p < area; ++p) {
        const float v = static_cast<float>((in[p] - mean) * scale + offset);
        out[p] = v < 0.0f ? 0.0f : v;
      }
    }
  }
}

