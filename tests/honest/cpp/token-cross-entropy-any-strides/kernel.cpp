#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// exp for x <= 0 (or NaN), in the form that g++ vectorizes; 0 for -inf.
static inline float exp_f(float x) {
  const float c = x < -87.3f ? -87.3f : x;
  const float n = (c * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  float r = c - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n == n ? n : 0.0f) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  const float y = p * scale;
  return x < -87.3f ? 0.0f : y;
}

struct Row {
  float top;
  double sum;
};

static Row statistics(const float* p, long long cols, long long step) {
  float top = -std::numeric_limits<float>::infinity();
  if (step == 1) {
#pragma omp simd reduction(max : top)
    for (long long i = 0; i < cols; ++i) top = p[i] > top ? p[i] : top;
    double sum = 0.0;
    for (long long at = 0; at < cols; at += 1024) {
      const long long end = at + 1024 < cols ? at + 1024 : cols;
      float part = 0.0f;
#pragma omp simd reduction(+ : part)
      for (long long i = at; i < end; ++i) part += exp_f(p[i] - top);
      sum += static_cast<double>(part);
    }
    return {top, sum};
  }
  for (long long i = 0; i < cols; ++i) top = p[i * step] > top ? p[i * step] : top;
  double sum = 0.0;
  for (long long i = 0; i < cols; ++i) sum += static_cast<double>(exp_f(p[i * step] - top));
  return {top, sum};
}

extern "C" void cross_entropy(const float* logits, const long long* labels, float* losses, float* loss,
                              long long* tokens, long long rows, long long cols, long long s0, long long s1,
                              long long sl) {
#pragma omp parallel for schedule(dynamic, 4)
  for (long long r = 0; r < rows; ++r) {
    const long long label = labels[r * sl];
    if (label == -100) {
      losses[r] = 0.0f;
      continue;
    }
    const float* p = logits + r * s0;
    const Row row = statistics(p, cols, s1);
    losses[r] = static_cast<float>(std::log(row.sum) - (static_cast<double>(p[label * s1]) - row.top));
  }
  double total = 0.0;
  long long count = 0;
  for (long long r = 0; r < rows; ++r) {
    total += static_cast<double>(losses[r]);
    count += labels[r * sl] != -100;
  }
  loss[0] = static_cast<float>(total / static_cast<double>(count));  // NaN where nothing counts, as torch has it
  tokens[0] = count;
}

extern "C" void cross_entropy_backward(const float* logits, const long long* labels, const long long* tokens,
                                       const float* grad, float* d, long long rows, long long cols, long long s0,
                                       long long s1, long long sl) {
  const double share = static_cast<double>(grad[0]) / static_cast<double>(tokens[0]);
#pragma omp parallel for schedule(dynamic, 4)
  for (long long r = 0; r < rows; ++r) {
    const long long label = labels[r * sl];
    float* q = d + r * cols;
    if (label == -100) {
      std::memset(q, 0, sizeof(float) * cols);
      continue;
    }
    const float* p = logits + r * s0;
    const Row row = statistics(p, cols, s1);
    const float top = row.top, scale = static_cast<float>(share / row.sum);
    if (s1 == 1) {
#pragma omp simd
      for (long long i = 0; i < cols; ++i) q[i] = exp_f(p[i] - top) * scale;
    } else {
      for (long long i = 0; i < cols; ++i) q[i] = exp_f(p[i * s1] - top) * scale;
    }
    const double e = std::exp(static_cast<double>(p[label * s1]) - row.top);
    // p - 1 from what is left where one probability is all but one
    double others = row.sum - e;
    if (e > 0.5 * row.sum) {
      others = 0.0;
      for (long long i = 0; i < cols; ++i)
        if (i != label) others += static_cast<double>(exp_f(p[i * s1] - top));
    }
    q[label] = static_cast<float>(-share * others / row.sum);
  }
}
