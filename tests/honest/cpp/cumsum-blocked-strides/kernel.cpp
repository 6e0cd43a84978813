void cumsum(const float* __restrict__ x, float* __restrict__ y, double* __restrict__ sums, long long rows,
            long long cols, long long blocks, long long s0, long long s1) {
#pragma omp parallel
  {
#pragma omp for collapse(2) schedule(static)
    for (long long r = 0; r < rows; ++r) {
      for (long long b = 0; b < blocks; ++b) {
        const long long begin = b * BLOCK, end = begin + BLOCK < cols ? begin + BLOCK : cols;
        double sum = 0.0;
        for (long long c = begin; c < end; ++c) sum += x[r * s0 + c * s1];
        sums[r * blocks + b] = sum;
      }
    }
#pragma omp for schedule(static)
    for (long long r = 0; r < rows; ++r) {
      double before = 0.0;
      for (long long b = 0; b < blocks; ++b) {
        const double sum = sums[r * blocks + b];
        sums[r * blocks + b] = before;
        before += sum;
      }
    }
#pragma omp for collapse(2) schedule(static)
    for (long long r = 0; r < rows; ++r) {
      for (long long b = 0; b < blocks; ++b) {
        const long long begin = b * BLOCK, end = begin + BLOCK < cols ? begin + BLOCK : cols;
        double sum = sums[r * blocks + b];
        for (long long c = begin; c < end; ++c) {
          sum += x[r * s0 + c * s1];
          y[r * cols + c] = static_cast<float>(sum);
        }
      }
    }
  }
}

