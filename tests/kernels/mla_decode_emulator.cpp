// Runs sglang_fp8mla/kernels/mla_decode.cu on a CPU: the instructions below follow the PTX manual's fragment and
// descriptor layouts, every CUDA thread is a fiber, and shared memory starts as NaN. Asynchronous copies land
// only when they are waited for, so a missing wait shows. Compiled by test_mla_decode_emulated.py with g++.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

#define MLA_DECODE_EMULATED 1
#ifdef EMULATE_WGMMA
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#endif
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Dim3 { unsigned x, y, z; };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int atomicAdd(int* p, int v) { int old = *p; *p += v; return old; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned sel) {
  uint64_t v = ((uint64_t)b << 32) | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= (unsigned)((v >> (8 * ((sel >> (4 * i)) & 7))) & 0xff) << (8 * i);
  return r;
}

static Dim3 threadIdx, blockIdx, gridDim;
alignas(1024) static unsigned char g_shared[256 * 1024];
#define DYNAMIC_SHARED(name) unsigned char* name = g_shared

// ---- fibers: one per CUDA thread, resumed in turn; a barrier yields until its generation moves
struct Pending { unsigned dst; const void* src; unsigned bytes; int group; };
struct Fiber {
  ucontext_t ctx;
  std::vector<char> stack;
  bool done;
  std::vector<Pending> pending;
  int group;
};
struct Gate { int waiting = 0, generation = 0, any = 0; };
static std::vector<Fiber> g_fibers;
static ucontext_t g_main;
static int g_now;
static Gate g_block, g_warp[32];
static unsigned char g_exchange[32][32][16];
static std::function<void()> g_body;

static void yield_() { swapcontext(&g_fibers[g_now].ctx, &g_main); }
static void gate(Gate& b, int count) {
  const int mine = b.generation;
  if (++b.waiting == count) { b.waiting = 0; ++b.generation; return; }
  while (b.generation == mine) yield_();
}
static void warp_gate() { gate(g_warp[threadIdx.x / 32], 32); }
static void __syncthreads() { gate(g_block, (int)g_fibers.size()); }
static Gate g_compute[4];
static int gate_or(Gate& b, int count, int v) {
  b.any |= v;
  gate(b, count);
  const int r = b.any;
  gate(b, count);
  b.any = 0;
  gate(b, count);
  return r;
}
static int __syncthreads_or(int v) { return gate_or(g_block, (int)g_fibers.size(), v); }
static void __syncwarp() { warp_gate(); }
template <class T>
static T shuffle(T v, int from) {
  const int w = threadIdx.x / 32, l = threadIdx.x % 32;
  memcpy(g_exchange[w][l], &v, sizeof v);
  warp_gate();
  memcpy(&v, g_exchange[w][from], sizeof v);
  warp_gate();
  return v;
}
template <class T> static T __shfl_sync(unsigned, T v, int from) { return shuffle(v, from & 31); }
template <class T> static T __shfl_xor_sync(unsigned, T v, int d) { return shuffle(v, (threadIdx.x % 32) ^ d); }
template <class T> static T __shfl_up_sync(unsigned, T v, int d) {
  const int l = threadIdx.x % 32;
  return shuffle(v, l >= d ? l - d : l);
}

// ---- instructions
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
static inline u32 smem_addr(const void* p) {
  const auto off = (const unsigned char*)p - g_shared;
  if (off < 0 || off > (long)sizeof g_shared) { fprintf(stderr, "not a shared address\n"); abort(); }
  return (u32)off;
}
static inline float half_to_float(u16 h) { _Float16 f; memcpy(&f, &h, 2); return (float)f; }
static inline u16 float_to_half(float f) { _Float16 h = (_Float16)f; u16 r; memcpy(&r, &h, 2); return r; }
static float f16_to_float(u16 b) { return half_to_float(b); }
static u32 pack_f16(float lo, float hi) { return float_to_half(lo) | (u32)float_to_half(hi) << 16; }
static u16 to_bf16(float f) {
  if (f != f) return 0x7fff;
  u32 u = __float_as_uint(f);
  return (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static u32 pack_bf16(float lo, float hi) { return to_bf16(lo) | (u32)to_bf16(hi) << 16; }
static float exp2_fast(float x) { return exp2f(x); }
static float e4m3(unsigned b) {
  const int e = (b >> 3) & 15, m = b & 7;
  float v = e == 15 && m == 7 ? NAN : e ? ldexpf(1 + m / 8.0f, e - 7) : ldexpf(m / 8.0f, -6);
  return b & 0x80 ? -v : v;
}
template <int HALF>
static u32 e4m3x2(u32 w) {
  w >>= 16 * HALF;
  return pack_f16(e4m3(w & 0xff), e4m3((w >> 8) & 0xff));
}
template <bool TRANS>
static void ldmatrix(u32 (&r)[4], u32 addr) {
  if (addr % 16) { fprintf(stderr, "ldmatrix: unaligned row\n"); abort(); }
  const int w = threadIdx.x / 32, l = threadIdx.x % 32, g = l / 4, t = l % 4;
  memcpy(g_exchange[w][l], &addr, 4);
  warp_gate();
  for (int i = 0; i < 4; ++i) {
    u16 lo, hi;
    u32 row;
    if (!TRANS) {
      memcpy(&row, g_exchange[w][8 * i + g], 4);
      memcpy(&lo, g_shared + row + 4 * t, 2), memcpy(&hi, g_shared + row + 4 * t + 2, 2);
    } else {
      memcpy(&row, g_exchange[w][8 * i + 2 * t], 4), memcpy(&lo, g_shared + row + 2 * g, 2);
      memcpy(&row, g_exchange[w][8 * i + 2 * t + 1], 4), memcpy(&hi, g_shared + row + 2 * g, 2);
    }
    r[i] = lo | (u32)hi << 16;
  }
  warp_gate();
}
static void ldsm(u32 (&r)[4], u32 addr) { ldmatrix<false>(r, addr); }
static void ldsm_t(u32 (&r)[4], u32 addr) { ldmatrix<true>(r, addr); }

static void land(const Pending& c) { memcpy(g_shared + c.dst, c.src, c.bytes); }
static void copy16(u32 dst, const void* src) {
  auto& f = g_fibers[g_now];
  if (dst % 16 || (uintptr_t)src % 16) { fprintf(stderr, "cp.async: unaligned\n"); abort(); }
  f.pending.push_back({dst, src, 16, f.group});
}
static void copy_commit() { ++g_fibers[g_now].group; }
template <int N>
static void copy_wait() {
  auto& f = g_fibers[g_now];
  std::vector<Pending> keep;
  for (auto& c : f.pending) {
    if (c.group < f.group - N) land(c);
    else keep.push_back(c);
  }
  f.pending.swap(keep);
}
struct Bar { u32 addr; int count, pending, phase; long bytes; std::vector<Pending> rows; };
static std::vector<Bar> g_bars;
static Bar& bar_at(u32 addr) {
  for (auto& b : g_bars) if (b.addr == addr) return b;
  fprintf(stderr, "no such barrier\n"); abort();
}
static void barrier_init(u32 a, int arrivals) { g_bars.push_back({a, arrivals, arrivals, 0, 0, {}}); }
// a phase with bytes to come ends in the wait that needs it: as late as it may
static bool barrier_try(Bar& b) {
  if (b.pending) return false;
  long have = 0;
  for (auto& c : b.rows) have += c.bytes;
  if (have != b.bytes) return false;
  for (auto& c : b.rows) land(c);
  b.rows.clear(), b.bytes = 0, b.pending = b.count, ++b.phase;
  return true;
}
static void barrier_arrive(u32 a) {
  Bar& b = bar_at(a);
  if (b.pending == 0) { fprintf(stderr, "barrier: one arrival too many\n"); abort(); }
  --b.pending;
  if (b.rows.empty() && b.bytes == 0) barrier_try(b);
}
static void barrier_expect(u32 a, u32 bytes) {
  bar_at(a).bytes += bytes;
  barrier_arrive(a);
}
static void copy_row_bytes(u32 dst, const void* src, u32 bytes, u32 a) {
  if (dst % 16 || (uintptr_t)src % 16) { fprintf(stderr, "cp.async.bulk: unaligned\n"); abort(); }
  bar_at(a).rows.push_back({dst, src, bytes, 0});
}
static void barrier_wait(u32 a, u32 parity) {
  while ((bar_at(a).phase & 1) == (int)parity)
    if (!barrier_try(bar_at(a))) yield_();
}
template <int N> static void take_registers() {}
template <int N> static void give_registers() {}
static void launch_dependents() {}
static void wait_primary() {}
static void proxy_fence() {}
static void mma_fence() {}
static void mma_commit() {}
template <int N> static void mma_wait() {}

static float b_element(u64 b, int k, int n, bool trans, int heads) {
#ifdef EMULATE_WGMMA
  (void)heads;
  const u32 start = (u32)(b & 0x3fff) << 4, lead = (u32)((b >> 16) & 0x3fff) << 4, stride = (u32)((b >> 32) & 0x3fff) << 4;
#else
  const u32 start = (u32)b, lead = heads * 16, stride = 128;
#endif
  u16 h;
  const u32 in = trans ? (k % 8) * 16 + (n % 8) * 2 : (n % 8) * 16 + (k % 8) * 2;
  memcpy(&h, g_shared + start + (n / 8) * stride + (k / 8) * lead + in, 2);
  return half_to_float(h);
}
extern const int g_heads;
template <int N8, int TRANS>
struct Mma {
  static void run(float (&d)[N8][4], const u32 (&a)[4], u64 b, int accumulate) {
    const int w = threadIdx.x / 32, l = threadIdx.x % 32, g = l / 4, t = l % 4;
    memcpy(g_exchange[w][l], a, 16);
    warp_gate();
    for (int n = 0; n < N8; ++n)
      for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i / 2), col = 8 * n + 2 * t + (i & 1);
        float sum = accumulate ? d[n][i] : 0.0f;
        for (int k = 0; k < 16; ++k) {
          u32 frag[4];
          memcpy(frag, g_exchange[w][(row % 8) * 4 + (k % 8) / 2], 16);
          const u32 reg = frag[(row / 8) + 2 * (k / 8)];
          sum += half_to_float((u16)(k & 1 ? reg >> 16 : reg)) * b_element(b, k, col, TRANS, g_heads);
        }
        d[n][i] = sum;
      }
    warp_gate();
  }
};
#if BULK
static void compute_sync(int group) { gate(g_compute[APART ? group : 0], APART ? 128 : GROUPS * 128); }
static int compute_sync_or(int group, int v) {
  return gate_or(g_compute[APART ? group : 0], APART ? 128 : GROUPS * 128, v);
}
#else
static void compute_sync(int) { __syncthreads(); }
static int compute_sync_or(int, int v) { return __syncthreads_or(v); }
#endif
#define copy_row(dst, src, bar) copy_row_bytes(dst, src, K_DIM, bar)

#include MLA_DECODE_SOURCE

const int g_heads = HEADS;

static void trampoline() {
  g_body();
  g_fibers[g_now].done = true;
  swapcontext(&g_fibers[g_now].ctx, &g_main);
}
static int run_block(int threads) {
  memset(g_shared, 0xff, sizeof g_shared);
  g_bars.clear();
  g_block = Gate(), g_compute[0] = g_compute[1] = g_compute[2] = g_compute[3] = Gate();
  for (auto& w : g_warp) w = Gate();
  if ((int)g_fibers.size() != threads) {
    g_fibers.clear();
    g_fibers.resize(threads);
    for (auto& f : g_fibers) f.stack.resize(96 * 1024);
  }
  for (auto& f : g_fibers) {
    f.done = false, f.pending.clear(), f.group = 0;
    getcontext(&f.ctx);
    f.ctx.uc_stack.ss_sp = f.stack.data(), f.ctx.uc_stack.ss_size = f.stack.size(), f.ctx.uc_link = nullptr;
    makecontext(&f.ctx, trampoline, 0);
  }
  for (int left = threads, idle = 0; left;) {
    const int before = left;
    // one warp at a time, at random, and often the same for long: a race needs one warp far ahead of another
    static uint64_t seed = 88172645463325252ull;
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    const int warp = (int)(seed >> 33) % (threads / 32), rounds = 1 << ((seed >> 20) % 9);
    for (int k = 0; k < rounds; ++k)
      for (int i = warp * 32; i < warp * 32 + 32; ++i) {
        if (g_fibers[i].done) continue;
        g_now = i, threadIdx = {(unsigned)i, 0, 0};
        swapcontext(&g_main, &g_fibers[i].ctx);
        if (g_fibers[i].done) --left;
      }
    idle = left == before ? idle + 1 : 0;
    if (idle > 200000) return 1;  // a barrier that not every thread reaches
  }
  return 0;
}
extern "C" int emulate(const char* name, unsigned gx, unsigned gy, int threads, const void* args) {
  gridDim = {gx, gy, 1};
  const std::string_view which(name);
  if (which == "mla_decode_plan") {
    struct A { const int* indptr; int bs, workers, fixed, max_splits, max_bs; int* plan; } a;
    memcpy(&a, args, sizeof a);
    g_body = [a] { mla_decode_plan(a.indptr, a.bs, a.workers, a.fixed, a.max_splits, a.max_bs, a.plan); };
  } else {
    Params p;
    memcpy(&p, args, sizeof p);
    if (which == "mla_decode") g_body = [p] { mla_decode(p); };
    else g_body = [p] { mla_decode_merge(p); };
  }
  for (unsigned y = 0; y < gy; ++y)
    for (unsigned x = 0; x < gx; ++x) {
      blockIdx = {x, y, 0};
      if (int rc = run_block(threads)) return rc;
    }
  return 0;
}
