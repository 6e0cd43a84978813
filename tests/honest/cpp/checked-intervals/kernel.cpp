#include <algorithm>

extern "C" void shared_share(const float* one, const float* other, float* y, long long rows, long long cols) {
#pragma omp parallel for
  for (long long r = 0; r < rows; ++r) {
    const float start = one[2 * r], end = one[2 * r + 1];
    for (long long c = 0; c < cols; ++c) {
      const float from = other[2 * c], to = other[2 * c + 1];
      const float both = std::max(0.0f, std::min(end, to) - std::max(start, from));
      y[r * cols + c] = both / ((end - start) + (to - from) - both);
    }
  }
}
