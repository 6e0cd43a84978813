#include <cmath>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

struct Moments {
  double mean, m2, count;
};

inline void merge(Moments& into, double mean, double m2, double count) {
  if (count <= 0.0) return;
  const double total = into.count + count;
  const double delta = mean - into.mean;
  into.mean += delta * (count / total);
  into.m2 += m2 + delta * delta * (into.count * count / total);
  into.count = total;
}

constexpr int LANES = 16;

// Mean (less the shift) and sum of squared deviations of one row.
inline Moments row_moments(const float* in, long long cols, float shift) {
  alignas(64) float mean[LANES], m2[LANES];
  const long long whole = cols / LANES;
  const int rest = static_cast<int>(cols - whole * LANES);
#if defined(__AVX512F__)
  const __m512 by = _mm512_set1_ps(shift);
  __m512 vmean = _mm512_setzero_ps(), vm2 = _mm512_setzero_ps();
  for (long long i = 0; i < whole; ++i) {
    const __m512 v = _mm512_sub_ps(_mm512_loadu_ps(in + i * LANES), by);
    const __m512 delta = _mm512_sub_ps(v, vmean);
    vmean = _mm512_fmadd_ps(delta, _mm512_set1_ps(1.0f / static_cast<float>(i + 1)), vmean);
    vm2 = _mm512_fmadd_ps(delta, _mm512_sub_ps(v, vmean), vm2);
  }
  if (rest) {
    const __mmask16 mask = static_cast<__mmask16>((1u << rest) - 1u);
    const __m512 v = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, in + whole * LANES), by);
    const __m512 delta = _mm512_sub_ps(v, vmean);
    vmean = _mm512_mask3_fmadd_ps(delta, _mm512_set1_ps(1.0f / static_cast<float>(whole + 1)), vmean, mask);
    vm2 = _mm512_mask3_fmadd_ps(delta, _mm512_sub_ps(v, vmean), vm2, mask);
  }
  _mm512_store_ps(mean, vmean);
  _mm512_store_ps(m2, vm2);
#else
  for (int l = 0; l < LANES; ++l) mean[l] = m2[l] = 0.0f;
  for (long long i = 0; i < whole; ++i) {
    const float inverse = 1.0f / static_cast<float>(i + 1);
    for (int l = 0; l < LANES; ++l) {
      const float v = in[i * LANES + l] - shift;
      const float delta = v - mean[l];
      mean[l] += delta * inverse;
      m2[l] += delta * (v - mean[l]);
    }
  }
  for (int l = 0; l < rest; ++l) {
    const float v = in[whole * LANES + l] - shift;
    const float delta = v - mean[l];
    mean[l] += delta / static_cast<float>(whole + 1);
    m2[l] += delta * (v - mean[l]);
  }
#endif
  Moments all{0.0, 0.0, 0.0};
  for (int l = 0; l < LANES; ++l) merge(all, mean[l], m2[l], static_cast<double>(whole + (l < rest ? 1 : 0)));
  return all;
}

}  // namespace

void layer_norm(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                float* __restrict__ y, long long rows, long long cols, float eps) {
#pragma omp parallel for schedule(static)
  for (long long row = 0; row < rows; ++row) {
    const float* in = x + row * cols;
    float* out = y + row * cols;
    const float shift = in[0];
    const Moments m = row_moments(in, cols, shift);
    const float mean = static_cast<float>(m.mean);
    const float scale = static_cast<float>(1.0 / std::sqrt(m.m2 / static_cast<double>(cols) + static_cast<double>(eps)));
#pragma omp simd
    for (long long c = 0; c < cols; ++c) out[c] = ((in[c] - shift) - mean) * scale * weight[c] + bias[c];
  }
}

