// y = x W_e^T for the rows of each expert e, W in MXFP4 as stored. See mx_grouped.py.
//
// A block of 4 warps makes 16 outputs for up to 16 rows: each warp sums over every fourth stretch of 128 inputs, and
// shared memory adds the four. A thread's 16 bytes of codes are one scale block: 32 inputs of one output. Which inputs a
// tensor core takes together is free as long as both factors agree, so nothing is shuffled between threads: of the eight
// codes in a word, i and i + 4 lie 16 bits apart, where a pair of bfloat16 has its halves, and x is paired the same way.
//
// Lanes of a warp: g = lane / 4 is the output (and g + 8), or the row of x; t = lane % 4 the scale block of four.

typedef unsigned int u32;

const int WARPS = 4, OUTPUTS = 16, ROWS = 16, AHEAD = 4;  // AHEAD: stretches whose codes are under way at a time
const u32 TWO_TO_126 = 0x7E807E80u;

#ifdef __CUDACC_RTC__
// Products of bfloat16 pairs. As a sum with -0, which Ampere has too; subnormals stay.
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

__device__ __forceinline__ void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Codes are read once: they need no place in the L1 cache, where x and scales are.
__device__ __forceinline__ uint4 streamed(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
#endif

// 2^(scale - 127) as a pair of bfloat16; 2^-127 is a subnormal, 255 is NaN.
__device__ __forceinline__ u32 factor(u32 scale) {
  u32 half = scale == 0 ? 0x40u : scale == 255 ? 0x7FC0u : scale << 7;
  return half | half << 16;
}

// Eight codes to four pairs. A code's low three bits, put where bfloat16 has its lowest two bits of exponent and the
// highest of mantissa, are its value times 2^-126.
__device__ __forceinline__ void decode(u32 (&pairs)[4], u32 codes, u32 factor) {
  pairs[0] = (codes << 6 & 0x01C001C0u) | (codes << 12 & 0x80008000u);
  pairs[1] = (codes << 2 & 0x01C001C0u) | (codes << 8 & 0x80008000u);
  pairs[2] = (codes >> 2 & 0x01C001C0u) | (codes << 4 & 0x80008000u);
  pairs[3] = (codes >> 6 & 0x01C001C0u) | (codes & 0x80008000u);
#pragma unroll
  for (int j = 0; j < 4; j++) pairs[j] = times(times(pairs[j], TWO_TO_126), factor);
}

// Adds eight inputs: word i of both outputs' codes against eight values of x.
__device__ __forceinline__ void add(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[4], uint4 x) {
  multiply_add(sum, a[0], b[0], a[1], b[1], low_halves(x.x, x.z), high_halves(x.x, x.z));
  multiply_add(sum, a[2], b[2], a[3], b[3], low_halves(x.y, x.w), high_halves(x.y, x.w));
}

__device__ __forceinline__ unsigned short to_bfloat16(float value) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ uint4 nothing() {
  uint4 v;
  v.x = v.y = v.z = v.w = 0;
  return v;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) grouped_linear_mxfp4(
    const unsigned short* x, const unsigned char* codes, const unsigned char* scales, unsigned short* out,
    const int* expert_of, const int* start_of, const int* ends, int N, int K) {
  const int expert = expert_of[blockIdx.y];
  if (expert < 0) return;
  const long long first = start_of[blockIdx.y];
  const int rows = min(ends[expert] - (int)first, ROWS);
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int blocks = K / 32, output = blockIdx.x * OUTPUTS;
  // Outputs past the end are the last one once more, and are not stored.
  const long long row[2] = {(long long)expert * N + min(output + g, N - 1),
                            (long long)expert * N + min(output + g + 8, N - 1)};
  const uint4* code[2] = {(const uint4*)codes + row[0] * blocks, (const uint4*)codes + row[1] * blocks};
  const unsigned char* scale[2] = {scales + row[0] * blocks, scales + row[1] * blocks};
  const uint4* near = (const uint4*)(x + (first + g) * K);
  const uint4* far = (const uint4*)(x + (first + g + 8) * K);
  float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};

  for (int stretch = warp; stretch * 4 < blocks; stretch += WARPS * AHEAD) {
    uint4 words[AHEAD][2];
    u32 byte[AHEAD][2];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int block = (stretch + i * WARPS) * 4 + t;
#pragma unroll
      for (int o = 0; o < 2; o++) {
        words[i][o] = block < blocks ? streamed(code[o] + block) : nothing();
        byte[i][o] = block < blocks ? scale[o][block] : 127;
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int block = (stretch + i * WARPS) * 4 + t;
      if ((stretch + i * WARPS) * 4 >= blocks) break;
      const bool reads = g < rows && block < blocks, reads_far = g + 8 < rows && block < blocks;
      const u32 factors[2] = {factor(byte[i][0]), factor(byte[i][1])};
      const u32 low[4] = {words[i][0].x, words[i][0].y, words[i][0].z, words[i][0].w};
      const u32 high[4] = {words[i][1].x, words[i][1].y, words[i][1].z, words[i][1].w};
      uint4 values[4];
#pragma unroll
      for (int w = 0; w < 4; w++) values[w] = reads ? near[block * 4 + w] : nothing();
#pragma unroll
      for (int w = 0; w < 4; w++) {
        u32 a[4], b[4];
        decode(a, low[w], factors[0]);
        decode(b, high[w], factors[1]);
        add(sum[0], a, b, values[w]);
        if (rows > 8) add(sum[1], a, b, reads_far ? far[block * 4 + w] : nothing());
      }
    }
  }

  __shared__ float part[WARPS][ROWS][OUTPUTS];
#pragma unroll
  for (int tile = 0; tile < 2; tile++)
#pragma unroll
    for (int c = 0; c < 4; c++) part[warp][tile * 8 + 2 * t + c % 2][g + c / 2 * 8] = sum[tile][c];
  __syncthreads();
  for (int at = threadIdx.x; at < ROWS * OUTPUTS; at += 32 * WARPS) {
    const int r = at / OUTPUTS, o = at % OUTPUTS;
    if (r >= rows || output + o >= N) continue;
    float total = 0;
    for (int w = 0; w < WARPS; w++) total += part[w][r][o];
    out[(first + r) * N + output + o] = to_bfloat16(total);
  }
}
