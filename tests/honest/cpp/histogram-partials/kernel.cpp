void histogram(const long long* __restrict__ ids, int* __restrict__ partial, long long* __restrict__ counts,
               float* __restrict__ shares, long long rows, long long length) {
#pragma omp parallel
  {
#pragma omp for collapse(2) schedule(static)
    for (long long row = 0; row < rows; ++row) {
      for (int piece = 0; piece < PIECES; ++piece) {
        const long long begin = length * piece / PIECES, end = length * (piece + 1) / PIECES;
        int* mine = partial + (row * PIECES + piece) * BINS;
        const long long* in = ids + row * length;
        for (long long i = begin; i < end; ++i) {
          const long long id = in[i];
          if (id >= 0 && id < BINS) ++mine[id];
        }
      }
    }
    // The loop above ends in a barrier.
#pragma omp for schedule(static)
    for (long long row = 0; row < rows; ++row) {
      for (int bin = 0; bin < BINS; ++bin) {
        long long sum = 0;
        for (int piece = 0; piece < PIECES; ++piece) sum += partial[(row * PIECES + piece) * BINS + bin];
        counts[row * BINS + bin] = sum;
        shares[row * BINS + bin] = static_cast<float>(sum) / static_cast<float>(length);
      }
    }
  }
}

