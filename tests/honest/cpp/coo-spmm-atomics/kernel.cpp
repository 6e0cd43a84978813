void spmm(const long long* __restrict__ target, const long long* __restrict__ source, const float* __restrict__ weight,
          const float* __restrict__ x, float* __restrict__ y, long long edges, long long nodes, long long width) {
#pragma omp parallel for schedule(static, 64)
  for (long long e = 0; e < edges; ++e) {
    const long long to = target[e], from = source[e];
    if (to < 0 || to >= nodes || from < 0 || from >= nodes) continue;  // the reference raises there
    const float w = weight[e];
    const float* in = x + from * width;
    float* out = y + to * width;
    for (long long c = 0; c < width; ++c) {
      const float v = in[c] * w;
#pragma omp atomic
      out[c] += v;
    }
  }
}
