// x * W^T + bias with W in NF4: a block makes 64 x 64 outputs, takes 64 k at a time (one scale a row), turns the codes
// into halves in shared memory and multiplies on tensor cores with float accumulators.
#include <cuda_fp16.h>
#include <mma.h>

#include <cstdint>

using namespace nvcuda;

__constant__ float LEVELS[16] = {-1.0f,
                                 -0.6961928009986877f,
                                 -0.5250730514526367f,
                                 -0.39491748809814453f,
                                 -0.28444138169288635f,
                                 -0.18477343022823334f,
                                 -0.09105003625154495f,
                                 0.0f,
                                 0.07958029955625534f,
                                 0.16093020141124725f,
                                 0.24611230194568634f,
                                 0.33791524171829224f,
                                 0.44070982933044434f,
                                 0.5626170039176941f,
                                 0.7229568362236023f,
                                 1.0f};

constexpr int TILE = 64, DEPTH = 64, PITCH = DEPTH + 8, OUT_PITCH = TILE + 4;

__global__ void __launch_bounds__(128)
    linear_nf4(const __half* __restrict__ x, const uint8_t* __restrict__ packed, const float* __restrict__ absmax,
               const __half* __restrict__ bias, __half* __restrict__ y, int rows, int depth, int cols, int tiles_across) {
  __shared__ __align__(32) __half left[TILE * PITCH];
  __shared__ __align__(32) __half right[TILE * PITCH];
  __shared__ __align__(32) float result[TILE * OUT_PITCH];
  __shared__ float levels[16];  // threads ask for different ones, which constant memory would serve one by one
  const int tid = threadIdx.x, warp = tid >> 5;
  const int row0 = static_cast<int>(blockIdx.x) / tiles_across * TILE;
  const int col0 = static_cast<int>(blockIdx.x) % tiles_across * TILE;
  const int warp_row = (warp >> 1) * 32, warp_col = (warp & 1) * 32;
  if (tid < 16) levels[tid] = LEVELS[tid];
  __syncthreads();

  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) wmma::fill_fragment(sum[i][j], 0.0f);
  }
  for (int k0 = 0; k0 < depth; k0 += DEPTH) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 64 rows of 8 times 16 bytes
      const int at = tid + i * 128;
      const int row = at >> 3, k = (at & 7) * 8;
      uint4 v = make_uint4(0u, 0u, 0u, 0u);
      if (row0 + row < rows) {
        v = *reinterpret_cast<const uint4*>(x + static_cast<long long>(row0 + row) * depth + k0 + k);
      }
      *reinterpret_cast<uint4*>(left + row * PITCH + k) = v;
    }
    {  // 64 rows of 32 bytes: half a row a thread
      const int row = tid >> 1, half = tid & 1;
      const long long col = col0 + row;
      if (col < cols) {
        const float scale = absmax[col * (depth / DEPTH) + k0 / DEPTH];
        const uint4 v = *reinterpret_cast<const uint4*>(packed + col * (depth / 2) + k0 / 2 + half * 16);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        __half2* to = reinterpret_cast<__half2*>(right + row * PITCH + half * 32);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const uint32_t byte = words[w] >> (8 * b) & 255u;
            to[w * 4 + b] = __floats2half2_rn(levels[byte >> 4] * scale, levels[byte & 15u] * scale);
          }
        }
      } else {
        for (int j = 0; j < 16; ++j) reinterpret_cast<__half2*>(right + row * PITCH + half * 32)[j] = __floats2half2_rn(0.0f, 0.0f);
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> a[2];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        wmma::load_matrix_sync(a[i], left + (warp_row + i * 16) * PITCH + k, PITCH);
        wmma::load_matrix_sync(b[i], right + (warp_col + i * 16) * PITCH + k, PITCH);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) wmma::mma_sync(sum[i][j], a[i], b[j], sum[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      wmma::store_matrix_sync(result + (warp_row + i * 16) * OUT_PITCH + warp_col + j * 16, sum[i][j], OUT_PITCH,
                              wmma::mem_row_major);
    }
  }
  __syncthreads();
  for (int at = tid; at < TILE * TILE; at += 128) {
    const int row = at / TILE, col = at % TILE;
    if (row0 + row < rows && col0 + col < cols) {
      y[static_cast<long long>(row0 + row) * cols + col0 + col] =
          __float2half_rn(result[row * OUT_PITCH + col] + __half2float(bias[col0 + col]));
    }
  }
}
