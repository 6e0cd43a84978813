namespace {

constexpr long long LEAF = 64, ALONE = 512;

// NaN is larger than everything, as torch sorts.
inline bool less(float a, float b) { return a < b || (b != b && a == a); }

void insertion(const float* x, long long* at, long long n) {
  for (long long i = 1; i < n; ++i) {
    const long long moved = at[i];
    long long j = i;
    for (; j > 0 && less(x[moved], x[at[j - 1]]); --j) at[j] = at[j - 1];
    at[j] = moved;
  }
}

// Sorts the indices in at[0..n); spare has as much room.
void merge_sort(const float* x, long long* at, long long* spare, long long n) {
  if (n <= LEAF) {
    insertion(x, at, n);
    return;
  }
  const long long half = n / 2;
#pragma omp task if (n > ALONE) firstprivate(x, at, spare, half)
  merge_sort(x, at, spare, half);
  merge_sort(x, at + half, spare + half, n - half);
#pragma omp taskwait
  long long left = 0, right = half, to = 0;
  while (left < half && right < n) {
    const bool second = less(x[at[right]], x[at[left]]);
    spare[to++] = second ? at[right++] : at[left++];
  }
  while (left < half) spare[to++] = at[left++];
  while (right < n) spare[to++] = at[right++];
  for (long long i = 0; i < n; ++i) at[i] = spare[i];
}

}  // namespace

void sort_rows(const float* __restrict__ x, float* __restrict__ values, long long* __restrict__ places,
               long long* __restrict__ spare, long long rows, long long cols) {
#pragma omp parallel
#pragma omp single
  for (long long r = 0; r < rows; ++r) {
#pragma omp task firstprivate(r)
    {
      const float* in = x + r * cols;
      long long* at = places + r * cols;
      for (long long c = 0; c < cols; ++c) at[c] = c;
      merge_sort(in, at, spare + r * cols, cols);
      for (long long c = 0; c < cols; ++c) values[r * cols + c] = in[at[c]];
    }
  }
}

