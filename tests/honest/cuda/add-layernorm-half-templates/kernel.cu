// Residual addition and layer norm, one block a row. The sum (rounded to T, as the original rounds it) stays in
// registers between mean, deviations and output. COLS and THREADS come from plan.py; VEC elements of T are read at once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ void narrow(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }
__device__ __forceinline__ void narrow(float value, __half& to) { to = __float2half_rn(value); }

template <typename T, int VEC>
struct alignas(sizeof(T) * VEC) Pack {
  T at[VEC];
};

__device__ __forceinline__ float block_sum(float value, float* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) sum += scratch[w];
  return sum;
}

template <typename T, int VEC>
__global__ void __launch_bounds__(THREADS)
    add_norm(const T* __restrict__ hidden, const T* __restrict__ residual, const float* __restrict__ weight,
             const float* __restrict__ bias, T* __restrict__ normed, T* __restrict__ total, float eps) {
  using Vector = Pack<T, VEC>;
  constexpr int VECTORS = COLS / VEC;
  constexpr int PER_THREAD = (VECTORS + THREADS - 1) / THREADS;
  __shared__ float sums[THREADS / 32], squares[THREADS / 32];
  const long long row = blockIdx.x;
  const Vector* in = reinterpret_cast<const Vector*>(hidden + row * COLS);
  const Vector* add = reinterpret_cast<const Vector*>(residual + row * COLS);
  Vector* out = reinterpret_cast<Vector*>(normed + row * COLS);
  Vector* kept = reinterpret_cast<Vector*>(total + row * COLS);

  float value[PER_THREAD][VEC];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int at = i * THREADS + threadIdx.x;
    if (at < VECTORS) {
      const Vector u = in[at], v = add[at];
      Vector w;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        narrow(widen(u.at[j]) + widen(v.at[j]), w.at[j]);
        value[i][j] = widen(w.at[j]);
        sum += value[i][j];
      }
      kept[at] = w;
    }
  }
  const float mean = block_sum(sum, sums) / COLS;
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    if (i * THREADS + threadIdx.x < VECTORS) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        value[i][j] -= mean;
        square = fmaf(value[i][j], value[i][j], square);
      }
    }
  }
  const float inverse = 1.0f / sqrtf(block_sum(square, squares) / COLS + eps);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int at = i * THREADS + threadIdx.x;
    if (at < VECTORS) {
      Vector w;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const int col = at * VEC + j;
        narrow(fmaf(value[i][j] * inverse, weight[col], bias[col]), w.at[j]);
      }
      out[at] = w;
    }
  }
}
