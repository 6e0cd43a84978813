#include <cmath>

struct Stats {
  float mean, scale;
};

static inline Stats stats_of(const float* __restrict__ in, float eps) {
  double sum = 0.0, square = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int c = 0; c < COLS; ++c) sum += in[c];
  const double mean = sum / COLS;
#pragma omp simd reduction(+ : square)
  for (int c = 0; c < COLS; ++c) square += (in[c] - mean) * (in[c] - mean);
  return {static_cast<float>(mean), static_cast<float>(1.0 / std::sqrt(square / COLS + eps))};
}

void forward(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
             float* __restrict__ y, long long rows, float eps) {
#pragma omp parallel for schedule(static)
  for (long long r = 0; r < rows; ++r) {
    const float* in = x + r * COLS;
    const Stats s = stats_of(in, eps);
    for (int c = 0; c < COLS; ++c) y[r * COLS + c] = (in[c] - s.mean) * s.scale * weight[c] + bias[c];
  }
}

void backward(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ grad,
              float* __restrict__ dx, float* __restrict__ partial, long long rows, float eps) {
  const long long blocks = (rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static)
  for (long long b = 0; b < blocks; ++b) {
    float* pw = partial + b * 2 * COLS;
    float* pb = pw + COLS;
    for (int c = 0; c < COLS; ++c) pw[c] = pb[c] = 0.0f;
    const long long end = (b + 1) * BLOCK < rows ? (b + 1) * BLOCK : rows;
    for (long long r = b * BLOCK; r < end; ++r) {
      const float* in = x + r * COLS;
      const float* g = grad + r * COLS;
      float* out = dx + r * COLS;
      const Stats s = stats_of(in, eps);
      double sum = 0.0, dot = 0.0;
#pragma omp simd reduction(+ : sum, dot)
      for (int c = 0; c < COLS; ++c) {
        const double gw = static_cast<double>(g[c]) * weight[c];
        sum += gw;
        dot += gw * ((in[c] - s.mean) * s.scale);
      }
      const float mean_g = static_cast<float>(sum / COLS), mean_dot = static_cast<float>(dot / COLS);
      for (int c = 0; c < COLS; ++c) {
        const float normed = (in[c] - s.mean) * s.scale;
        out[c] = s.scale * (g[c] * weight[c] - mean_g - normed * mean_dot);
        pw[c] += g[c] * normed;
        pb[c] += g[c];
      }
    }
  }
}

void add_up(const float* __restrict__ partial, float* __restrict__ dw, float* __restrict__ db, long long blocks) {
#pragma omp parallel for schedule(static)
  for (int c = 0; c < COLS; ++c) {
    double w = 0.0, b = 0.0;
    for (long long i = 0; i < blocks; ++i) {
      w += partial[(i * 2) * COLS + c];
      b += partial[(i * 2 + 1) * COLS + c];
    }
    dw[c] = static_cast<float>(w);
    db[c] = static_cast<float>(b);
  }
}

