// Rotary embedding of queries (blockIdx.y 0) and keys (1) in one launch. Works on any strides: a thread takes one pair
// (i, i + half) of a head at a time, neighbours take neighbouring pairs. The sums are made in float and rounded once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
__device__ __forceinline__ float widen(T value);
template <>
__device__ __forceinline__ float widen<__nv_bfloat16>(__nv_bfloat16 value) { return __bfloat162float(value); }
template <>
__device__ __forceinline__ float widen<__half>(__half value) { return __half2float(value); }
template <>
__device__ __forceinline__ float widen<float>(float value) { return value; }

template <typename T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) { return __float2bfloat16(value); }
template <>
__device__ __forceinline__ __half narrow<__half>(float value) { return __float2half(value); }
template <>
__device__ __forceinline__ float narrow<float>(float value) { return value; }

struct Strides {
  long long batch, head, token, element;
};

template <typename T>
__device__ void rotate(const T* __restrict__ x, T* __restrict__ y, const T* __restrict__ cosine,
                       const T* __restrict__ sine, Strides from, Strides to, long long cos_token, long long cos_element,
                       long long sin_token, long long sin_element, long long total, int heads, int tokens, int half) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    // Order of work: batch, token, head, pair, as the tensors lie in memory.
    const int pair = static_cast<int>(i % half);
    long long rest = i / half;
    const int head = static_cast<int>(rest % heads);
    rest /= heads;
    const int token = static_cast<int>(rest % tokens);
    const long long batch = rest / tokens;
    const T* in = x + batch * from.batch + head * from.head + token * from.token;
    T* out = y + batch * to.batch + head * to.head + token * to.token;
    const float a = widen<T>(in[pair * from.element]), b = widen<T>(in[(pair + half) * from.element]);
    const T* c = cosine + token * cos_token;
    const T* s = sine + token * sin_token;
    const float low_cos = widen<T>(c[pair * cos_element]), high_cos = widen<T>(c[(pair + half) * cos_element]);
    const float low_sin = widen<T>(s[pair * sin_element]), high_sin = widen<T>(s[(pair + half) * sin_element]);
    out[pair * to.element] = narrow<T>(a * low_cos - b * low_sin);
    out[(pair + half) * to.element] = narrow<T>(b * high_cos + a * high_sin);
  }
}

template <typename T>
__global__ void __launch_bounds__(256)
    rope(const T* __restrict__ query, const T* __restrict__ key, const T* __restrict__ cosine,
         const T* __restrict__ sine, T* __restrict__ query_out, T* __restrict__ key_out, long long q0, long long q1,
         long long q2, long long q3, long long k0, long long k1, long long k2, long long k3, long long qo0,
         long long qo1, long long qo2, long long qo3, long long ko0, long long ko1, long long ko2, long long ko3,
         long long c0, long long c1, long long s0, long long s1, int batch, int heads, int kv_heads, int tokens,
         int half) {
  const long long pairs = static_cast<long long>(batch) * tokens * half;
  if (blockIdx.y == 0) {
    rotate<T>(query, query_out, cosine, sine, Strides{q0, q1, q2, q3}, Strides{qo0, qo1, qo2, qo3}, c0, c1, s0, s1,
              pairs * heads, heads, tokens, half);
  } else {
    rotate<T>(key, key_out, cosine, sine, Strides{k0, k1, k2, k3}, Strides{ko0, ko1, ko2, ko3}, c0, c1, s0, s1,
              pairs * kv_heads, kv_heads, tokens, half);
  }
}
