#include <cmath>

static inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

extern "C" void decay(const float* x, const float* level, const float* gates, float* y, long long rows, long long cols) {
#pragma omp parallel for
  for (long long r = 0; r < rows; ++r)
    for (long long c = 0; c < cols; ++c) {
      const long long i = r * cols + c;
      const float kept = sigmoid(gates[c]);
      y[i] = kept * level[i] + (1.0f - kept) * std::tanh(x[i]);
    }
}

extern "C" void decay_backward(const float* x, const float* level, const float* gates, const float* g, float* dx,
                               float* dlevel, float* dgates, long long rows, long long cols) {
#pragma omp parallel for
  for (long long c = 0; c < cols; ++c) {
    const float kept = sigmoid(gates[c]), gone = sigmoid(-gates[c]);
    double sum = 0;
    for (long long r = 0; r < rows; ++r) {
      const long long i = r * cols + c;
      const float bent = std::tanh(x[i]);
      dx[i] = g[i] * gone * (1.0f - bent * bent);
      dlevel[i] = g[i] * kept;
      sum += static_cast<double>(g[i]) * (level[i] - bent);
    }
    dgates[c] = static_cast<float>(sum * kept * gone);
  }
}
