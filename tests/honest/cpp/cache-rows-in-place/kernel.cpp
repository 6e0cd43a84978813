extern "C" void write_rows(const float* rows, _Float16* cache, const long long* slots, long long count, long long width) {
#pragma omp parallel for
  for (long long r = 0; r < count; ++r) {
    if (slots[r] < 0) continue;
    for (long long c = 0; c < width; ++c) cache[slots[r] * width + c] = (_Float16)rows[r * width + c];
  }
}
