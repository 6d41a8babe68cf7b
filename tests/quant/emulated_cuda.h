// Enough of CUDA for k3rl/quant/mx_grouped.cu on a CPU: a context a thread, which gives way at barriers; tensor cores by
// their documented fragments.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
using std::min;
struct uint4 { uint32_t x, y, z, w; };
struct Index { int x, y; };
static Index threadIdx, blockIdx;
static ucontext_t scheduler, threads[128];
static uint32_t fragments[4][32][6];

static inline uint32_t __float_as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline float as_float(uint32_t half) { half <<= 16; float f; memcpy(&f, &half, 4); return f; }

struct Barrier {
  int size, arrived, generation;
  void wait() {
    const int mine = generation;
    if (++arrived == size) arrived = 0, generation++;
    while (generation == mine) {
      const int i = threadIdx.x;
      swapcontext(&threads[i], &scheduler);
    }
  }
};
static Barrier everyone = {128, 0, 0}, warps[4] = {{32, 0, 0}, {32, 0, 0}, {32, 0, 0}, {32, 0, 0}};
static inline void __syncthreads() { everyone.wait(); }
static inline uint4 streamed(const uint4* p) { return *p; }
static inline uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xFFFF) | b << 16; }
static inline uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xFFFF0000); }

static inline uint32_t times(uint32_t a, uint32_t b) {
  uint32_t both = 0;
  for (int i = 0; i < 32; i += 16) {
    float product = as_float(a >> i & 0xFFFF) * as_float(b >> i & 0xFFFF);
    uint32_t bits = __float_as_uint(product);
    uint32_t half = product != product ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    both |= (half & 0xFFFF) << i;
  }
  return both;
}

// m16n8k16: lane (g, t) holds rows g and g + 8 of A and column g of B, at k = 2t, 2t + 1, 2t + 8, 2t + 9.
static inline void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(fragments[warp][lane], mine, sizeof mine);
  warps[warp].wait();
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++) {
      const uint32_t* a = fragments[warp][row % 8 * 4 + k % 8 / 2];
      const uint32_t* b = fragments[warp][column * 4 + k % 8 / 2];
      const int shift = k % 2 * 16;
      c[i] += as_float(a[row / 8 + k / 8 * 2] >> shift & 0xFFFF) * as_float(b[4 + k / 8] >> shift & 0xFFFF);
    }
  }
  warps[warp].wait();
}

// Runs a kernel of 128 threads a block, block after block. A block's threads return all at once or pass all barriers.
static void (*body)();
static bool done[128];
static void thread() {
  body();
  done[threadIdx.x] = true;
}

static void launch(int grid_x, int grid_y, void (*kernel)()) {
  std::vector<char> stacks(128 << 16);
  body = kernel;
  for (int at = 0; at < grid_x * grid_y; at++) {
    blockIdx = {at % grid_x, at / grid_x};
    for (int i = 0; i < 128; i++) {
      getcontext(&threads[i]);
      threads[i].uc_stack.ss_sp = &stacks[i << 16];
      threads[i].uc_stack.ss_size = 1 << 16;
      threads[i].uc_link = &scheduler;
      makecontext(&threads[i], thread, 0);
      done[i] = false;
    }
    for (int running = 128; running;) {
      running = 0;
      for (int i = 0; i < 128; i++) {
        if (done[i]) continue;
        threadIdx = {i, 0};
        swapcontext(&scheduler, &threads[i]);
        running += !done[i];
      }
    }
  }
}
