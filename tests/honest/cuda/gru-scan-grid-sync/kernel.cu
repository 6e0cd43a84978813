// A GRU layer in two launches: the inputs' part of all gates as one product, then a cooperative kernel that keeps its
// rows of the recurrent weights in shared memory for the whole sequence and meets at a grid barrier after each step.
#include <cooperative_groups.h>

namespace cg = cooperative_groups;

constexpr int TILE = 64, DEPTH = 16, PITCH = TILE + 4;

// out[m, n] = sum over k of x[m, k] * weight[n, k] + bias[n]
__global__ void __launch_bounds__(256)
    input_gates(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                float* __restrict__ out, int rows, int cols, int depth, int tiles_across) {
  __shared__ __align__(16) float left[DEPTH][PITCH], right[DEPTH][PITCH];
  const int row0 = static_cast<int>(blockIdx.x) / tiles_across * TILE;
  const int col0 = static_cast<int>(blockIdx.x) % tiles_across * TILE;
  const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  const int line = threadIdx.x >> 2, k4 = (threadIdx.x & 3) * 4;
  float sum[4][4] = {};
  for (int k0 = 0; k0 < depth; k0 += DEPTH) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int k = k0 + k4 + j;
      const bool inside = k < depth;
      left[k4 + j][line] = inside && row0 + line < rows ? x[static_cast<long long>(row0 + line) * depth + k] : 0.0f;
      right[k4 + j][line] = inside && col0 + line < cols ? weight[static_cast<long long>(col0 + line) * depth + k] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      const float4 a = *reinterpret_cast<const float4*>(&left[k][ty * 4]);
      const float4 b = *reinterpret_cast<const float4*>(&right[k][tx * 4]);
      const float u[4] = {a.x, a.y, a.z, a.w}, v[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(u[i], v[j], sum[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row0 + ty * 4 + i, col = col0 + tx * 4 + j;
      if (row < rows && col < cols) out[static_cast<long long>(row) * cols + col] = sum[i][j] + bias[col];
    }
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// `out` is written by some blocks and read by others one step later, behind the barrier: no read-only loads of it.
__global__ void __launch_bounds__(256)
    gru_scan(const float* __restrict__ gates, const float* __restrict__ weight, const float* __restrict__ bias,
             const float* __restrict__ first, float* out, float* last, int steps, int batch, int hidden, int units) {
  extern __shared__ float memory[];
  float* rows = memory;                       // [unit][gate][hidden]
  float* state = memory + units * 3 * hidden;  // [batch][hidden]
  cg::grid_group grid = cg::this_grid();
  const int unit0 = blockIdx.x * units, mine = min(units, hidden - unit0);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int i = threadIdx.x; i < mine * 3 * hidden; i += 256) {
    const int k = i % hidden, gate = i / hidden % 3, unit = i / (3 * hidden);
    rows[i] = weight[static_cast<long long>(gate * hidden + unit0 + unit) * hidden + k];
  }
  for (int step = 0; step < steps; ++step) {
    const float* before = step == 0 ? first : out + static_cast<long long>(step - 1) * batch * hidden;
    for (int i = threadIdx.x; i < batch * hidden; i += 256) state[i] = __ldcg(before + i);
    __syncthreads();
    for (int pair = warp; pair < mine * batch; pair += 8) {
      const int unit = pair % mine, b = pair / mine, h = unit0 + unit;
      const float* w = rows + unit * 3 * hidden;
      float reset = 0.0f, update = 0.0f, fresh = 0.0f;
      for (int k = lane; k < hidden; k += 32) {
        const float s = state[b * hidden + k];
        reset = fmaf(w[k], s, reset);
        update = fmaf(w[hidden + k], s, update);
        fresh = fmaf(w[2 * hidden + k], s, fresh);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        reset += __shfl_down_sync(0xffffffffu, reset, offset);
        update += __shfl_down_sync(0xffffffffu, update, offset);
        fresh += __shfl_down_sync(0xffffffffu, fresh, offset);
      }
      if (lane == 0) {
        const float* in = gates + (static_cast<long long>(step) * batch + b) * 3 * hidden;
        const float r = sigmoid(in[h] + reset + bias[h]);
        const float z = sigmoid(in[hidden + h] + update + bias[hidden + h]);
        const float n = tanhf(in[2 * hidden + h] + r * (fresh + bias[2 * hidden + h]));
        const float value = (1.0f - z) * n + z * state[b * hidden + h];
        out[(static_cast<long long>(step) * batch + b) * hidden + h] = value;
        if (step == steps - 1) last[b * hidden + h] = value;
      }
    }
    grid.sync();
  }
}
