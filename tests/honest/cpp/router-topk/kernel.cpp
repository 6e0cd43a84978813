#include <cmath>

void gate(const float* __restrict__ logits, float* __restrict__ weights, long long* __restrict__ chosen,
          long long tokens, long long experts) {
#pragma omp parallel for schedule(static)
  for (long long t = 0; t < tokens; ++t) {
    const float* in = logits + t * experts;
    float value[K];
    long long place[K];
    int filled = 0;
    for (long long e = 0; e < experts; ++e) {
      const float v = in[e];
      if (filled == K && !(v > value[K - 1])) continue;
      int at = filled < K ? filled++ : K - 1;
      for (; at > 0 && v > value[at - 1]; --at) {
        value[at] = value[at - 1];
        place[at] = place[at - 1];
      }
      value[at] = v;
      place[at] = e;
    }
    // The common denominator of the softmax cancels but for what underflows beside the whole sum.
    const float top = value[0];
    float all = 0.0f;
    for (long long e = 0; e < experts; ++e) all += std::exp(in[e] - top);
    float sum = 0.0f;
    for (int i = 0; i < K; ++i) {
      value[i] = std::exp(value[i] - top) / all;
      sum += value[i];
    }
    for (int i = 0; i < K; ++i) {
      weights[t * K + i] = value[i] / sum;
      chosen[t * K + i] = place[i];
    }
  }
}

