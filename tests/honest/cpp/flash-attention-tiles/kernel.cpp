#include <cmath>
#include <limits>

constexpr int QT = 8, KT = 32;

void attention(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
               float* __restrict__ out, long long heads, long long queries, long long keys, bool causal, float scale) {
  const long long tiles = (queries + QT - 1) / QT;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
  for (long long h = 0; h < heads; ++h) {
    for (long long t = 0; t < tiles; ++t) {
      const long long first = t * QT;
      const int here = static_cast<int>(queries - first < QT ? queries - first : QT);
      float acc[QT][D], top[QT], sum[QT], score[KT];
      for (int i = 0; i < here; ++i) {
        top[i] = -std::numeric_limits<float>::infinity();
        sum[i] = 0.0f;
        for (int d = 0; d < D; ++d) acc[i][d] = 0.0f;
      }
      for (long long begin = 0; begin < keys; begin += KT) {
        const int width = static_cast<int>(keys - begin < KT ? keys - begin : KT);
        if (causal && begin > first + here - 1) break;
        for (int i = 0; i < here; ++i) {
          const float* qi = q + (h * queries + first + i) * D;
          int seen = width;
          if (causal && begin + seen > first + i + 1) seen = static_cast<int>(first + i + 1 - begin);
          if (seen <= 0) continue;
          float best = top[i];
          for (int j = 0; j < seen; ++j) {
            const float* kj = k + (h * keys + begin + j) * D;
            float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int d = 0; d < D; ++d) dot += qi[d] * kj[d];
            score[j] = dot * scale;
            best = score[j] > best ? score[j] : best;
          }
          if (best == -std::numeric_limits<float>::infinity()) continue;
          const float keep = std::exp(top[i] - best);
          sum[i] *= keep;
          for (int d = 0; d < D; ++d) acc[i][d] *= keep;
          for (int j = 0; j < seen; ++j) {
            const float p = std::exp(score[j] - best);
            const float* vj = v + (h * keys + begin + j) * D;
            sum[i] += p;
#pragma omp simd
            for (int d = 0; d < D; ++d) acc[i][d] += p * vj[d];
          }
          top[i] = best;
        }
      }
      for (int i = 0; i < here; ++i) {
        float* o = out + (h * queries + first + i) * D;
        for (int d = 0; d < D; ++d) o[d] = acc[i][d] / sum[i];
      }
    }
  }
}

