// Routing: one warp takes a token at a time, persistent blocks walk over all of them. A lane holds EXPERTS / 32 logits;
// the best are found one after another by a warp's maximum over (value, expert) in one 64-bit key. Probabilities are
// added up by lane, then by block, then by a second kernel, always in the same order.
#include <cstdint>

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int PER_LANE = EXPERTS / 32;

// Order of floats as order of unsigned numbers; a NaN is the largest, as it is to topk.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float restored(uint32_t key) {
  if (key == 0xffffffffu) return NAN;
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__global__ void __launch_bounds__(THREADS)
    route(const float* __restrict__ logits, float* __restrict__ weights, long long* __restrict__ experts,
          float* __restrict__ partial, int tokens) {
  __shared__ float loads[WARPS][EXPERTS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float load[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) load[i] = 0.0f;
  for (int token = blockIdx.x * WARPS + warp; token < tokens; token += gridDim.x * WARPS) {
    const float* row = logits + static_cast<long long>(token) * EXPERTS;
    float value[PER_LANE];
    unsigned long long key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * 32 + lane;
      value[i] = row[expert];
      key[i] = static_cast<unsigned long long>(ordered(value[i])) << 32 | (0xffffffffu - expert);
    }
    float mine = 0.0f, highest = 0.0f;
    int chosen = 0;
#pragma unroll
    for (int c = 0; c < CHOSEN; ++c) {
      unsigned long long best = key[0];
#pragma unroll
      for (int i = 1; i < PER_LANE; ++i) best = key[i] > best ? key[i] : best;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, offset);
        best = other > best ? other : best;
      }
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        if (key[i] == best) key[i] = 0;  // below every key there is
      }
      const float found = restored(static_cast<uint32_t>(best >> 32));
      if (c == 0) highest = found;
      if (lane == c) {
        mine = found;
        chosen = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
      }
    }
    const float power = lane < CHOSEN ? expf(mine - highest) : 0.0f;
    const float share = power / warp_sum(power);
    if (lane < CHOSEN) {
      weights[static_cast<long long>(token) * CHOSEN + lane] = share;
      experts[static_cast<long long>(token) * CHOSEN + lane] = chosen;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      value[i] = expf(value[i] - highest);
      sum += value[i];
    }
    const float scale = 1.0f / warp_sum(sum);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) load[i] = fmaf(value[i], scale, load[i]);
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) loads[warp][i * 32 + lane] = load[i];
  __syncthreads();
  for (int expert = threadIdx.x; expert < EXPERTS; expert += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += loads[w][expert];
    partial[static_cast<long long>(blockIdx.x) * EXPERTS + expert] = sum;
  }
}

// One warp an expert.
__global__ void __launch_bounds__(32)
    mean_load(const float* __restrict__ partial, float* __restrict__ load, int blocks, int tokens) {
  double sum = 0.0;
  for (int b = threadIdx.x; b < blocks; b += 32) sum += partial[static_cast<long long>(b) * EXPERTS + blockIdx.x];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
  if (threadIdx.x == 0) load[blockIdx.x] = static_cast<float>(sum / tokens);
}
