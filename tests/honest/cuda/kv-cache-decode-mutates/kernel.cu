// A decoding step: the new rows go into the caches, then every block attends to CHUNK positions of one key-value head
// for its GROUP query heads, and a last launch joins the chunks (flash decoding). SIZE, GROUP and CHUNK from plan.py.
#include <cuda_fp16.h>

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int PER_LANE = SIZE / 32;

struct alignas(2 * PER_LANE) Part {
  __half at[PER_LANE];
};

__global__ void append(const __half* __restrict__ key, const __half* __restrict__ value,
                       const long long* __restrict__ position, __half* __restrict__ keys, __half* __restrict__ values,
                       int kv_heads, int length) {
  const long long head = blockIdx.x;  // of all sequences
  const long long at = position[head / kv_heads];
  if (at < 0 || at >= length) return;
  for (int d = threadIdx.x; d < SIZE; d += blockDim.x) {
    keys[(head * length + at) * SIZE + d] = key[head * SIZE + d];
    values[(head * length + at) * SIZE + d] = value[head * SIZE + d];
  }
}

__global__ void __launch_bounds__(THREADS)
    attend(const __half* __restrict__ query, const __half* __restrict__ keys, const __half* __restrict__ values,
           const long long* __restrict__ position, float* __restrict__ sums, float* __restrict__ tops,
           float* __restrict__ weights, int kv_heads, int length, float scale) {
  __shared__ float warp_top[WARPS][GROUP], warp_weight[WARPS][GROUP], warp_sum[WARPS][GROUP][SIZE];
  const long long head = blockIdx.x;
  const int chunk = blockIdx.y, chunks = gridDim.y;
  const int end = min((chunk + 1) * CHUNK, static_cast<int>(position[head / kv_heads]) + 1);
  const int begin = chunk * CHUNK;
  if (begin >= end) return;  // join() knows by the position that nothing is here
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float q[GROUP][PER_LANE], sum[GROUP][PER_LANE], top[GROUP], weight[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    const Part part = reinterpret_cast<const Part*>(query + (head * GROUP + g) * SIZE)[lane];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      q[g][i] = __half2float(part.at[i]) * scale;
      sum[g][i] = 0.0f;
    }
    top[g] = -INFINITY;
    weight[g] = 0.0f;
  }
  for (int t = begin + warp; t < end; t += WARPS) {
    const Part k = reinterpret_cast<const Part*>(keys + (head * length + t) * SIZE)[lane];
    const Part v = reinterpret_cast<const Part*>(values + (head * length + t) * SIZE)[lane];
    float score[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      score[g] = 0.0f;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) score[g] = fmaf(q[g][i], __half2float(k.at[i]), score[g]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int g = 0; g < GROUP; ++g) score[g] += __shfl_xor_sync(0xffffffffu, score[g], offset);
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const float higher = fmaxf(top[g], score[g]);
      const float keep = expf(top[g] - higher), share = expf(score[g] - higher);
      weight[g] = weight[g] * keep + share;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) sum[g][i] = fmaf(share, __half2float(v.at[i]), sum[g][i] * keep);
      top[g] = higher;
    }
  }
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    if (lane == 0) {
      warp_top[warp][g] = top[g];
      warp_weight[warp][g] = weight[g];
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) warp_sum[warp][g][lane * PER_LANE + i] = sum[g][i];
  }
  __syncthreads();
  for (int at = threadIdx.x; at < GROUP * SIZE; at += THREADS) {
    const int g = at / SIZE, d = at % SIZE;
    float highest = warp_top[0][g];  // of a position that exists: begin < end
    for (int w = 1; w < WARPS; ++w) highest = fmaxf(highest, warp_top[w][g]);
    float total = 0.0f, value = 0.0f;
    for (int w = 0; w < WARPS; ++w) {
      const float share = expf(warp_top[w][g] - highest);
      total += warp_weight[w][g] * share;
      value += warp_sum[w][g][d] * share;
    }
    const long long place = (head * chunks + chunk) * GROUP + g;
    sums[place * SIZE + d] = value;
    if (d == 0) {
      tops[place] = highest;
      weights[place] = total;
    }
  }
}

__global__ void __launch_bounds__(THREADS)
    join(const float* __restrict__ sums, const float* __restrict__ tops, const float* __restrict__ weights,
         const long long* __restrict__ position, __half* __restrict__ out, int kv_heads, int chunks) {
  const long long head = blockIdx.x;
  const int filled = min(static_cast<int>(position[head / kv_heads]) / CHUNK + 1, chunks);
  for (int at = threadIdx.x; at < GROUP * SIZE; at += THREADS) {
    const int g = at / SIZE, d = at % SIZE;
    float highest = -INFINITY;
    for (int c = 0; c < filled; ++c) highest = fmaxf(highest, tops[(head * chunks + c) * GROUP + g]);
    float total = 0.0f, value = 0.0f;
    for (int c = 0; c < filled; ++c) {
      const long long place = (head * chunks + c) * GROUP + g;
      const float share = expf(tops[place] - highest);
      total = fmaf(weights[place], share, total);
      value = fmaf(sums[place * SIZE + d], share, value);
    }
    out[head * GROUP * SIZE + at] = __float2half_rn(value / total);
  }
}
