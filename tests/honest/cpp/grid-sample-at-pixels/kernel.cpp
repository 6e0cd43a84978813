// Bilinear sampling, align_corners, zeros outside: corners and weights of a place once for all channels.
#include <cmath>

struct Corners {
  long long offset[4];  // -1: outside
  float weight[4], by_x[4], by_y[4];
};

static Corners corners(const float* place, long long height, long long width) {
  Corners c;
  for (int k = 0; k < 4; ++k) c.offset[k] = -1, c.weight[k] = c.by_x[k] = c.by_y[k] = 0.0f;
  const float x = (place[0] + 1.0f) / 2.0f * (width - 1), y = (place[1] + 1.0f) / 2.0f * (height - 1);
  if (!(x > -1.0f && x < width && y > -1.0f && y < height)) return c;
  const float left = std::floor(x), top = std::floor(y);
  const float right = left + 1.0f, bottom = top + 1.0f;
  const float xs[2] = {left, right}, ys[2] = {top, bottom};
  const float wx[2] = {right - x, x - left}, wy[2] = {bottom - y, y - top};
  for (int k = 0; k < 4; ++k) {
    const int i = k & 1, j = k >> 1;
    if (xs[i] < 0 || xs[i] >= width || ys[j] < 0 || ys[j] >= height) continue;
    c.offset[k] = static_cast<long long>(ys[j]) * width + static_cast<long long>(xs[i]);
    c.weight[k] = wx[i] * wy[j];
    c.by_x[k] = (i ? 1.0f : -1.0f) * wy[j];
    c.by_y[k] = (j ? 1.0f : -1.0f) * wx[i];
  }
  return c;
}

void warp(const float* __restrict__ image, const float* __restrict__ grid, float* __restrict__ out, long long batch,
          long long channels, long long height, long long width, long long places) {
#pragma omp parallel for collapse(2) schedule(static)
  for (long long b = 0; b < batch; ++b)
    for (long long p = 0; p < places; ++p) {
      const Corners c = corners(grid + (b * places + p) * 2, height, width);
      for (long long ch = 0; ch < channels; ++ch) {
        const float* plane = image + (b * channels + ch) * height * width;
        float sum = 0.0f;
        for (int k = 0; k < 4; ++k)
          if (c.offset[k] >= 0) sum += plane[c.offset[k]] * c.weight[k];
        out[(b * channels + ch) * places + p] = sum;
      }
    }
}

void warp_backward(const float* __restrict__ image, const float* __restrict__ grid, const float* __restrict__ grad,
                   float* __restrict__ d_image, float* __restrict__ d_grid, long long batch, long long channels,
                   long long height, long long width, long long places) {
#pragma omp parallel for schedule(static)
  for (long long b = 0; b < batch; ++b) {
    const long long plane = height * width;
    for (long long i = 0; i < channels * plane; ++i) d_image[b * channels * plane + i] = 0.0f;
    for (long long p = 0; p < places; ++p) {
      const Corners c = corners(grid + (b * places + p) * 2, height, width);
      float gx = 0.0f, gy = 0.0f;
      for (long long ch = 0; ch < channels; ++ch) {
        const float g = grad[(b * channels + ch) * places + p];
        const long long base = (b * channels + ch) * plane;
        for (int k = 0; k < 4; ++k)
          if (c.offset[k] >= 0) {
            d_image[base + c.offset[k]] += g * c.weight[k];
            gx += g * image[base + c.offset[k]] * c.by_x[k];
            gy += g * image[base + c.offset[k]] * c.by_y[k];
          }
      }
      d_grid[(b * places + p) * 2] = gx * (width - 1) / 2.0f;
      d_grid[(b * places + p) * 2 + 1] = gy * (height - 1) / 2.0f;
    }
  }
}
