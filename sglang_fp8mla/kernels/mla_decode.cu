// MLA decode over an FP8 pool, read in place: out[r, h] = softmax(q[r, h] . K[r]^T * scale) . K[r][:, :512].
//
// The latent row is both K and V, so a tile of 64 rows is fetched once, as bytes. The tokens (for
// q.k) and the latent columns (for p.v) lie on the wide side of the matrix unit:
//   S^T[token, head] = K[token, :] q^T        A = K bytes -> fp16 in registers, B = q in shared memory
//   O^T[column, head] = V^T[column, :] p^T    A = V bytes -> fp16 in registers, B = p in shared memory
// so 8 or 16 heads pad nothing, and no fp16 copy of a tile exists. A warp group owns 64 tokens of S^T
// and V_DIM / GROUPS columns of O^T. On sm_90a the products are `wgmma` with A from registers; elsewhere
// `mma.sync`, whose A and C fragments are the same, with B read by `ldmatrix` from the same place.
//
// Compile-time: HEADS (8, 16, 32, 64 heads of one block), GROUPS (warp groups), APART, STAGES, KPE (0 or 64),
// E5M2, Q_BF16, BULK (rows by the bulk copy engine), MIN_BLOCKS (blocks of one multiprocessor).
// No header is included: NVRTC alone must compile this file.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WGMMA 1
#else
#define WGMMA 0
#endif
// the conversion instruction needs sm_89; before, the bits are moved and the bias is left to SCALE_BIAS
#if __CUDA_ARCH__ >= 890 || E5M2
#define SCALE_BIAS 1.0f
#else
#define SCALE_BIAS 256.0f
#endif

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

static constexpr int V_DIM = 512;
static constexpr int K_DIM = V_DIM + KPE;
static constexpr int TILE = 64;              // tokens of a tile: the M of one warp group's wgmma
static constexpr int PITCH = K_DIM + 16;     // 37 or 33 times 16 bytes: odd, so ldmatrix has no bank conflict
static constexpr int WARPS = 4 * GROUPS;     // that compute
// With two or more groups a whole group of warps fetches and hands its registers over. With one, two warps do:
// a quarter of a multiprocessor then has three warps of two blocks, and no fewer registers than with one.
#define REBALANCE (WGMMA && BULK && GROUPS > 1)
static constexpr int FETCH_WARPS = REBALANCE ? 4 : BULK ? 2 : 0;
static constexpr int THREADS = 32 * (WARPS + FETCH_WARPS);
// a block owns what it was launched with and no more: asking for one register above it waits for ever
static constexpr int LAUNCH_REGISTERS = 65536 / MIN_BLOCKS / THREADS / 8 * 8;
static constexpr int FETCH_REGISTERS = 40;
static constexpr int COMPUTE_REGISTERS = ((GROUPS + 1) * LAUNCH_REGISTERS - FETCH_REGISTERS) / GROUPS / 8 * 8;
static_assert(!REBALANCE || (GROUPS * COMPUTE_REGISTERS + FETCH_REGISTERS <= (GROUPS + 1) * LAUNCH_REGISTERS), "registers");
static constexpr int HEADS_S = HEADS / GROUPS;  // heads whose logits one group computes
// Groups either share p, each with all heads of its own columns of O^T, or stay apart, each with all columns of
// its own heads: twice the conversions, but one group's softmax hides behind the other's products.
static constexpr int HEADS_O = APART ? HEADS_S : HEADS;
static constexpr int COLS = APART ? V_DIM : V_DIM / GROUPS;
static constexpr int SYNC_THREADS = APART ? 128 : 128 * GROUPS;
static constexpr int NS = HEADS_S / 8;
static constexpr int NO = HEADS_O / 8;
static constexpr int BLOCKS_O = COLS / 64;
static constexpr int STAGE_BYTES = TILE * PITCH;
static constexpr int Q_BYTES = HEADS * K_DIM * 2;
static constexpr int P_BYTES = HEADS * TILE * 2;
static constexpr float LOG2_SHIFT = 7.0f;  // p in (0, 2^15], largest at least 2^7: fp16 keeps small ones normal
// parts are averages of rows, at most 448 (57344 for e5m2): scaled up they use fp16's range, and small rows
// stay clear of its subnormals
static constexpr float PART_SCALE = E5M2 ? 1.0f : 128.0f;
static constexpr float LOWEST = -3.0e38f;  // m before the first logit; finite, so that no -inf meets another

// The plan, int32: [8] units, units per worker, batch size, lengths of the merge lists; [workers][4] first
// segment (request, tile, first index, length); [3][max_bs][4] merge lists; [max_bs + 1] prefix sums of units.

#ifndef MLA_DECODE_EMULATED  // the instructions; tests/kernels gives them in C++ and runs this file on a CPU
__device__ __forceinline__ u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void ldsm(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldsm_t(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void copy16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 pack_f16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <int HALF>
__device__ __forceinline__ u32 e4m3x2(u32 w) {  // sm_89 and newer
  u32 r;
  if (HALF)
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, hi;}" : "=r"(r) : "r"(w));
  else
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, lo;}" : "=r"(r) : "r"(w));
  return r;
}
__device__ __forceinline__ float f16_to_float(u16 bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("{.reg .b16 l, h; cvt.rn.bf16.f32 l, %1; cvt.rn.bf16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(r) : "f"(lo), "f"(hi));
  return r;
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
#if WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
#if WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_primary() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#if WGMMA
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

template <int N8, int TRANS>
struct Mma;
#define D4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANS)
#define MMA_HEAD(pred) "{.reg .pred p; setp.ne.b32 p, " pred ", 0; wgmma.mma_async.sync.aligned."
template <int TRANS>
struct Mma<1, TRANS> {
  static __device__ __forceinline__ void run(float (&d)[1][4], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(MMA_HEAD("%9") "m64n8k16.f32.f16.f16 {%0,%1,%2,%3},{%4,%5,%6,%7},%8,p,1,1,%10;}"
                 : D4(d, 0) : A4 : "memory");
  }
};
template <int TRANS>
struct Mma<2, TRANS> {
  static __device__ __forceinline__ void run(float (&d)[2][4], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(MMA_HEAD("%13") "m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},%12,p,1,1,%14;}"
                 : D4(d, 0), D4(d, 1) : A4 : "memory");
  }
};
template <int TRANS>
struct Mma<4, TRANS> {
  static __device__ __forceinline__ void run(float (&d)[4][4], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(MMA_HEAD("%21") "m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
                 "{%16,%17,%18,%19},%20,p,1,1,%22;}"
                 : D4(d, 0), D4(d, 1), D4(d, 2), D4(d, 3) : A4 : "memory");
  }
};
template <int TRANS>
struct Mma<8, TRANS> {
  static __device__ __forceinline__ void run(float (&d)[8][4], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(MMA_HEAD("%37") "m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},{%32,%33,%34,%35},%36,p,1,1,%38;}"
                 : D4(d, 0), D4(d, 1), D4(d, 2), D4(d, 3), D4(d, 4), D4(d, 5), D4(d, 6), D4(d, 7) : A4 : "memory");
  }
};
#else
__device__ __forceinline__ void mma_fence() {}
__device__ __forceinline__ void mma_commit() {}
template <int N>
__device__ __forceinline__ void mma_wait() {}
// d += a . b with b as 8x8 blocks of 128 bytes: [k / 8][head / 8], HEADS / 8 blocks per k / 8
template <int N8, int TRANS>
struct Mma {
  static __device__ __forceinline__ void run(float (&d)[N8][4], const u32 (&a)[4], u64 b, int accumulate) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < N8; ++n) {
      u32 b0, b1;
      // lanes 0-7 name the rows of k block 0, lanes 8-15 those of k block 1
      u32 addr = (u32)b + n * 128 + (lane & 7) * 16 + ((lane >> 3) & 1) * (HEADS * 16);
      if (TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(addr) : "memory");
      else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(addr) : "memory");
      if (!accumulate) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.0f;
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                   : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }
};
#endif

// Between generic accesses to a place and the next use of it by the matrix unit or the copy engine. It also waits
// for the thread's own copies in flight, which is why another warp fetches the tiles.
__device__ __forceinline__ void proxy_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if BULK
__device__ __forceinline__ void barrier_init(u32 bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  u32 done;
#ifdef WATCHDOG
  int spins = 0;
#endif
  do {
#ifdef WATCHDOG
    if (++spins > WATCHDOG) __trap();
#endif
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void copy_row(u32 dst, const void* src, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
               "n"(K_DIM), "r"(bar) : "memory");
}
__device__ __forceinline__ void copy_arrive(u32 bar) {  // when this thread's copy16 have landed
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// a barrier of the computing warps alone
__device__ __forceinline__ void compute_sync(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(APART ? 1 + group : 1), "n"(SYNC_THREADS) : "memory");
}
__device__ __forceinline__ int compute_sync_or(int group, int v) {
  int r;
  asm volatile("{.reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.or.pred q, %3, %2, p; selp.s32 %0, 1, 0, q;}"
               : "=r"(r) : "r"(v), "n"(SYNC_THREADS), "r"(APART ? 1 + group : 1) : "memory");
  return r;
}
#else
static_assert(!APART, "apart, the groups need the fetching warps");
__device__ __forceinline__ void compute_sync(int) { __syncthreads(); }
__device__ __forceinline__ int compute_sync_or(int, int v) { return __syncthreads_or(v); }
#endif
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
#endif  // MLA_DECODE_EMULATED

// B of a product: 8x8 blocks of 128 contiguous bytes, [k / 8][head / 8]. For wgmma a descriptor (no swizzle;
// the leading offset goes along k, the stride offset along the heads), else an address.
__device__ __forceinline__ u64 operand(u32 addr) {
#if WGMMA
  return (u64)((addr & 0x3ffff) >> 4) | ((u64)(HEADS * 16 >> 4) << 16) | ((u64)(128 >> 4) << 32);
#else
  return addr;
#endif
}
__device__ __forceinline__ u64 advance(u64 b, int bytes) { return b + (u64)(WGMMA ? bytes >> 4 : bytes); }

// two FP8 bytes (the low or the high half of w) to two fp16, exactly, up to SCALE_BIAS
template <int HALF>
__device__ __forceinline__ u32 fp8x2(u32 w) {
#if E5M2
  return __byte_perm(w, 0, HALF ? 0x3424 : 0x1404);  // e5m2 is the upper byte of an fp16
#elif __CUDA_ARCH__ >= 890
  return e4m3x2<HALF>(w);
#else
  u32 x = __byte_perm(w, 0, HALF ? 0x3424 : 0x1404);
  u32 mag = x & 0x7f007f00u;
  u32 nan = (mag + 0x01000100u) & 0x80008000u;  // magnitude 0x7f is the only NaN
  return (x & 0x80008000u) | (mag >> 1) | (nan - (nan >> 5));
#endif
}

// tiles of one split in the fixed mode: a function of the request's own length only
__device__ __forceinline__ int split_tiles(int tiles, int fixed, int max_splits) {
  int need = (tiles + max_splits - 1) / max_splits;
  return need > fixed ? need : fixed;
}

// A worker's run of work units (tiles, or splits in the fixed mode), one segment of one request at a time.
struct Cursor {
  int pos, end, first;          // units
  int request, kv0, len;        // request, its first entry of kv_indices, its length
  int tile, tile_end, advance;  // tiles of this segment; units that it takes
  int slot;                     // partial result, or -1: the whole request, written to out

  __device__ __forceinline__ void describe(int worker, int fixed, int max_splits) {
    int tiles = (len + TILE - 1) / TILE;
    if (fixed == 0) {
      tile_end = min(tiles, tile + (end - pos));
      advance = tile_end - tile;
      slot = (tile == 0 && tile_end == tiles) ? -1 : 2 * worker + (pos == first ? 0 : 1);
    } else {
      int size = split_tiles(tiles, fixed, max_splits);
      tile_end = min(tiles, tile + size);
      advance = 1;
      slot = tiles <= size ? -1 : request * max_splits + tile / size;
    }
  }
  __device__ __forceinline__ void start(const int* header, const int4* workers, int worker, int fixed, int max_splits) {
    int4 w = workers[worker];
    int units = header[0], per = header[1];
    pos = first = worker * per;
    end = min(units, pos + per);
    request = w.x, tile = w.y, kv0 = w.z, len = w.w;
    if (pos < end) describe(worker, fixed, max_splits);
  }
  __device__ __forceinline__ bool alive() const { return pos < end; }
  __device__ __forceinline__ void next(const int* kv_indptr, int worker, int fixed, int max_splits) {
    pos += advance;
    if (pos >= end) return;
    tile = tile_end;
    if (tile * TILE >= len) {
      tile = 0;
      do {
        ++request;
        kv0 = kv_indptr[request];
        len = kv_indptr[request + 1] - kv0;
      } while (len <= 0);
    }
    describe(worker, fixed, max_splits);
  }
};

struct Params {
  const u16* q_nope;
  i64 q_nope_token, q_nope_head;
  const u16* q_pe;
  i64 q_pe_token, q_pe_head;
  const u8* pool;
  u32 pool_row;  // bytes
  const int* kv_indices;
  const int* kv_indptr;
  const int* plan;
  u16* out;
  i64 out_token, out_head;
  float* lse;
  i64 lse_token, lse_head;
  u16* part_out;    // [slots, head blocks, HEADS, V_DIM] fp16 times PART_SCALE
  float* part_lse;  // [slots, head blocks, HEADS]
  float scale_log2;
  int heads, head_blocks, workers, fixed, max_splits, max_bs, tokens;
};

__device__ __forceinline__ float q_to_float(u16 bits) {
#if Q_BF16
  return __uint_as_float((u32)bits << 16);
#else
  return f16_to_float(bits);
#endif
}
__device__ __forceinline__ u32 pack_out(float lo, float hi) {
#if Q_BF16
  return pack_bf16(lo, hi);
#else
  return pack_f16(lo, hi);
#endif
}

// q of one request as fp16 times a power of two per head, in 8x8 blocks [k / 8][head / 8] of 128 bytes.
// Column 16 m + 4 t + j is stored as k = 16 m + 2 t + 8 (j / 2) + j % 2: the order in which a thread of
// ldmatrix meets the bytes of a row.
__device__ __forceinline__ void load_q(const Params& p, int request, int head0, int group, int wq, u8* s_q,
                                       float* s_scale) {
  const int lane = threadIdx.x & 31;
  constexpr int PAIRS = K_DIM / 64;  // pairs of columns per lane
#pragma unroll
  for (int i = 0; i < HEADS_S / 4; ++i) {  // a group loads its own heads
    const int h = group * HEADS_S + wq + i * 4;
    const bool live = head0 + h < p.heads;
    u32 raw[PAIRS];
    const u16* qn = p.q_nope + request * p.q_nope_token + (head0 + h) * p.q_nope_head;
    const u16* qp = p.q_pe + request * p.q_pe_token + (head0 + h) * p.q_pe_head;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const u16* src = j < 8 ? qn + 2 * (lane + 32 * j) : qp + 2 * lane;
      raw[j] = live ? *(const u32*)src : 0u;
    }
    float top = 0.0f;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j)
      top = fmaxf(top, fmaxf(fabsf(q_to_float((u16)raw[j])), fabsf(q_to_float((u16)(raw[j] >> 16)))));
#pragma unroll
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    // largest element into [2^14, 2^15): bf16's range fits down to 2^-28 of it without rounding
    int e = top > 0.0f ? 14 + 127 - (int)(__float_as_uint(top) >> 23) : 0;
    e = max(-113, min(100, e));
    const float up = __uint_as_float((u32)(127 + e) << 23), down = __uint_as_float((u32)(127 - e) << 23);
    if (lane == 0) s_scale[h] = p.scale_log2 * SCALE_BIAS * down;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const int c = 2 * (lane + 32 * j), c16 = c & 15;
      const int block = ((c >> 4) * 2 + ((c16 >> 1) & 1)) * (HEADS / 8) + (h >> 3);
      *(u32*)(s_q + block * 128 + (h & 7) * 16 + (c16 >> 2) * 4) =
          pack_f16(q_to_float((u16)raw[j]) * up, q_to_float((u16)(raw[j] >> 16)) * up);
    }
  }
}

__device__ __forceinline__ const u8* row_of(const Params& p, int slot) {
  return p.pool + (u64)(u32)max(slot, 0) * p.pool_row;  // 64 bits: slot * 576 passes 2^31 at 3.7 M slots
}
// Slot of row `row` of the cursor's tile. Past the request's end its last row stands in, with p = 0: finite bytes add
// nothing, and a NaN or an infinity is in that column of the output anyway. Zeros in place of it would be written by
// threads, which the copy engine then has to be fenced from.
__device__ __forceinline__ int fetch_slot(const Cursor& c, const int* kv_indices, int row) {
  return c.alive() ? kv_indices[c.kv0 + min(c.tile * TILE + row, c.len - 1)] : 0;
}

#if BULK
// A fetching warp: its rows of tile after tile of the block's run, as soon as a stage is free.
__device__ __forceinline__ void produce(const Params& p, Cursor c, int worker, u8* s_kv, u32 full, u32 empty) {
  constexpr int ROWS = TILE / FETCH_WARPS;  // one per lane: the copy engine takes them from a warp one by one
  const int lane = threadIdx.x & 31, row0 = ((int)(threadIdx.x >> 5) - WARPS) * ROWS;
  int stage = 0;
  u32 parity = 1;  // a fresh barrier counts as free
  int slot = fetch_slot(c, p.kv_indices, row0 + lane);
  while (c.alive()) {
    const int now = slot;  // its row is looked up behind the wait: before it, this cost up to 4 %
    if (++c.tile == c.tile_end) c.next(p.kv_indptr, worker, p.fixed, p.max_splits);
    slot = fetch_slot(c, p.kv_indices, row0 + lane);
    barrier_wait(empty + 8 * stage, parity);
    if (lane == 0) barrier_expect(full + 8 * stage, ROWS * K_DIM);
    __syncwarp();
    if (lane < ROWS) copy_row(smem_addr(s_kv + stage * STAGE_BYTES + (row0 + lane) * PITCH), row_of(p, now), full + 8 * stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}
#else
static constexpr int ROWS = TILE / WARPS;  // rows of a tile that a warp fetches; a lane keeps the slot of row lane % ROWS
static_assert(ROWS >= 8, "kpe is copied eight rows at a time");

__device__ __forceinline__ void issue_tile(const Params& p, u8* stage, int slot) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 dst = smem_addr(stage + warp * ROWS * PITCH);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) copy16(dst + r * PITCH + lane * 16, row_of(p, __shfl_sync(~0u, slot, r)) + lane * 16);
#if KPE
#pragma unroll
  for (int i = 0; i < ROWS / 8; ++i) {  // the four 16-byte pieces of kpe, eight rows at a time
    const int r = i * 8 + (lane >> 2), c = V_DIM + (lane & 3) * 16;
    copy16(dst + r * PITCH + c, row_of(p, __shfl_sync(~0u, slot, r)) + c);
  }
#endif
}
#endif

// The computing warps: S^T, softmax, O^T of every tile of the block's run, and the result of every segment.
__device__ __forceinline__ void compute(const Params& p, Cursor cur, int worker, int hb, u8* smem, u32 full, u32 empty) {
  u8* s_kv = smem;
  u8* s_q = s_kv + STAGES * STAGE_BYTES;
  u8* s_p = s_q + Q_BYTES;                  // two: one barrier a tile lets a warp write while another reads
  float* s_red = (float*)(s_p + 2 * P_BYTES);  // [4 warps of a group][HEADS]
  float* s_scale = s_red + 4 * HEADS;       // [HEADS] logit scale
  float* s_alpha = s_scale + HEADS;         // [HEADS] rescale of the running output
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  // the shuffle tells the compiler that the group is the same for a warp: its operands stay uniform
  const int group = GROUPS == 1 ? 0 : __shfl_sync(~0u, warp >> 2, 0);
  const int wq = warp & 3, g = lane >> 2, t = lane & 3;
  const int head0 = hb * HEADS, head_o = APART ? group * HEADS_S : 0, col0 = APART ? 0 : group * COLS;
#if !BULK
  Cursor ahead = cur;  // the tile to fetch next
  const int my_row = warp * ROWS + (lane & (ROWS - 1));
  int slot = fetch_slot(ahead, p.kv_indices, my_row);
  auto fetch = [&](int stage) {
    if (ahead.alive()) {
      issue_tile(p, s_kv + stage * STAGE_BYTES, slot);
      if (++ahead.tile == ahead.tile_end) ahead.next(p.kv_indptr, worker, p.fixed, p.max_splits);
      slot = fetch_slot(ahead, p.kv_indices, my_row);
    }
    copy_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(s);
#endif

  int stage = 0;
  u32 parity = 0;
  int half = 0;  // of s_p
  const u64 q_operand = operand(smem_addr(s_q) + group * NS * 128);
  const u64 p_operand = operand(smem_addr(s_p) + (APART ? group * NS * 128 : 0));

  while (cur.alive()) {
    // the group is past its last read of its part of s_q: those products ended before a barrier
    load_q(p, cur.request, head0, group, wq, s_q, s_scale);
    proxy_fence();
    compute_sync(group);

    float o[BLOCKS_O][NO][4];
#pragma unroll
    for (int b = 0; b < BLOCKS_O; ++b)
#pragma unroll
      for (int n = 0; n < NO; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][n][i] = 0.0f;
    float m[NS][2], l[NS][2];
#pragma unroll
    for (int n = 0; n < NS; ++n) m[n][0] = m[n][1] = LOWEST, l[n][0] = l[n][1] = 0.0f;

    for (int tile = cur.tile; tile < cur.tile_end; ++tile) {
#if BULK
      barrier_wait(full + 8 * stage, parity);
#else
      copy_wait<STAGES - 2>();
      __syncthreads();  // the tile is there for all; the stage before this one is free
      fetch(stage == 0 ? STAGES - 1 : stage - 1);
#endif
      const u32 kv = smem_addr(s_kv + stage * STAGE_BYTES);

      // S^T: 16 tokens of this warp
      float s[NS][4];
      {
        const u32 row = kv + (wq * 16 + (lane & 15)) * PITCH + (lane >> 4) * 16;
        u32 raw[2][4], a[2][4][4];
        ldsm(raw[0], row);
        ldsm(raw[1], row + 32);
#pragma unroll
        for (int b = 0; b < K_DIM / 64; ++b) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            a[b & 1][2 * i][0] = fp8x2<0>(raw[i][0]);
            a[b & 1][2 * i][1] = fp8x2<0>(raw[i][1]);
            a[b & 1][2 * i][2] = fp8x2<1>(raw[i][0]);
            a[b & 1][2 * i][3] = fp8x2<1>(raw[i][1]);
            a[b & 1][2 * i + 1][0] = fp8x2<0>(raw[i][2]);
            a[b & 1][2 * i + 1][1] = fp8x2<0>(raw[i][3]);
            a[b & 1][2 * i + 1][2] = fp8x2<1>(raw[i][2]);
            a[b & 1][2 * i + 1][3] = fp8x2<1>(raw[i][3]);
          }
          if (b + 1 < K_DIM / 64) {
            ldsm(raw[0], row + (b + 1) * 64);
            ldsm(raw[1], row + (b + 1) * 64 + 32);
          }
          mma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i)
            Mma<NS, 0>::run(s, a[b & 1][i], advance(q_operand, (b * 4 + i) * (HEADS * 32)), b + i > 0);
          mma_commit();
          mma_wait<1>();
        }
        mma_wait<0>();
      }

      // the first columns of V do not depend on p: fetch them over the wait
      const u32 vrow = kv + lane * PITCH + col0 + wq * 16;
      u32 raw[2][4];
      ldsm_t(raw[0], vrow);
      ldsm_t(raw[1], vrow + 32 * PITCH);

      const int tok = tile * TILE + wq * 16 + g;
      const bool in0 = tok < cur.len, in1 = tok + 8 < cur.len;
      float sum[NS][2];
      // p = exp2(logit - m) to shared memory; whether some p would leave fp16
      auto weigh = [&]() {
        int over = 0;
#pragma unroll
        for (int n = 0; n < NS; ++n) {
          float x[4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float scale = s_scale[group * HEADS_S + n * 8 + 2 * t + i];
            x[i] = in0 ? fmaf(s[n][i], scale, -m[n][i]) : -INFINITY;
            x[2 + i] = in1 ? fmaf(s[n][2 + i], scale, -m[n][i]) : -INFINITY;
            over |= fmaxf(x[i], x[2 + i]) > LOG2_SHIFT + 8.0f;
            x[i] = exp2_fast(x[i]), x[2 + i] = exp2_fast(x[2 + i]);
            sum[n][i] = x[i] + x[2 + i];
          }
          u8* dst = s_p + half * P_BYTES + (2 * wq * (HEADS / 8) + group * NS + n) * 128 + g * 16 + t * 4;
          *(u32*)dst = pack_f16(x[0], x[1]);
          *(u32*)(dst + HEADS * 16) = pack_f16(x[2], x[3]);
        }
        proxy_fence();
        return over;
      };
      // m is a reference, not the maximum: it moves only when p would leave fp16, which a segment's first
      // tile and few others cause; all warps then agree on it through shared memory
      bool move = tile == cur.tile;
      if (!move) move = compute_sync_or(group, weigh());
      if (move) {
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int h = group * HEADS_S + n * 8 + 2 * t + i;
            float top = fmaxf(in0 ? s[n][i] * s_scale[h] : -INFINITY, in1 ? s[n][2 + i] * s_scale[h] : -INFINITY);
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            if (g == 0) s_red[wq * HEADS + h] = top;
          }
        compute_sync(group);
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int h = group * HEADS_S + n * 8 + 2 * t + i;
            const float top = fmaxf(fmaxf(s_red[h], s_red[HEADS + h]), fmaxf(s_red[2 * HEADS + h], s_red[3 * HEADS + h]));
            float alpha = 1.0f;
            if (top > m[n][i] + (LOG2_SHIFT + 8.0f)) {
              alpha = exp2_fast(m[n][i] - (top - LOG2_SHIFT));
              m[n][i] = top - LOG2_SHIFT;
            }
            l[n][i] *= alpha;
            if (wq == 0 && g == 0) s_alpha[h] = alpha;
          }
        weigh();
        compute_sync(group);
#pragma unroll
        for (int n = 0; n < NO; ++n) {
          const float2 alpha = *(const float2*)(s_alpha + head_o + n * 8 + 2 * t);
#pragma unroll
          for (int b = 0; b < BLOCKS_O; ++b) {
            o[b][n][0] *= alpha.x, o[b][n][1] *= alpha.y;
            o[b][n][2] *= alpha.x, o[b][n][3] *= alpha.y;
          }
        }
      }
#pragma unroll
      for (int n = 0; n < NS; ++n) l[n][0] += sum[n][0], l[n][1] += sum[n][1];

      // O^T: 16 columns of this warp in every block of 64; rows g and g + 8 are columns 2 g and 2 g + 1
      {
        u32 a[2][4][4];
        const u64 p_half = advance(p_operand, __shfl_sync(~0u, half, 0) * P_BYTES);
#pragma unroll
        for (int b = 0; b < BLOCKS_O; ++b) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const u32 x = __byte_perm(raw[i >> 1][2 * (i & 1)], 0, 0x3120), y = __byte_perm(raw[i >> 1][2 * (i & 1) + 1], 0, 0x3120);
            a[b & 1][i][0] = fp8x2<0>(x);
            a[b & 1][i][1] = fp8x2<1>(x);
            a[b & 1][i][2] = fp8x2<0>(y);
            a[b & 1][i][3] = fp8x2<1>(y);
          }
          if (b + 1 < BLOCKS_O) {
            ldsm_t(raw[0], vrow + (b + 1) * 64);
            ldsm_t(raw[1], vrow + (b + 1) * 64 + 32 * PITCH);
          }
          mma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i) Mma<NO, 1>::run(o[b], a[b & 1][i], advance(p_half, i * (HEADS * 32)), 1);
          mma_commit();
#if BULK
          if (b + 1 == BLOCKS_O) {  // the stage is read; the fence hides behind the products
            proxy_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
          }
#endif
          mma_wait<1>();
        }
        mma_wait<0>();
      }
      if (++stage == STAGES) stage = 0, parity ^= 1;
      half ^= 1;
    }

    // sums of the 4 warps' tokens, then one value per head
#pragma unroll
    for (int n = 0; n < NS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) l[n][i] += __shfl_xor_sync(~0u, l[n][i], d);
        if (g == 0) s_red[wq * HEADS + group * HEADS_S + n * 8 + 2 * t + i] = l[n][i];
      }
    compute_sync(group);
#pragma unroll
    for (int n = 0; n < NS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = group * HEADS_S + n * 8 + 2 * t + i;
        if (wq == 0 && g == 0 && head0 + h < p.heads) {
          float sum = (s_red[h] + s_red[HEADS + h]) + (s_red[2 * HEADS + h] + s_red[3 * HEADS + h]);
          float lse = sum == 0.0f ? -INFINITY : m[n][i] + log2f(sum);
          if (cur.slot >= 0)
            p.part_lse[((i64)cur.slot * p.head_blocks + hb) * HEADS + h] = lse;
          else if (p.lse)
            p.lse[cur.request * p.lse_token + (head0 + h) * p.lse_head] = lse;
        }
      }
#pragma unroll
    for (int n = 0; n < NO; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = head_o + n * 8 + 2 * t + i;
        float sum = (s_red[h] + s_red[HEADS + h]) + (s_red[2 * HEADS + h] + s_red[3 * HEADS + h]);
        // every logit -inf: the sum is 0, and so is the output
        const float inv = sum == 0.0f ? 0.0f : SCALE_BIAS / sum;
        if (head0 + h < p.heads) {
          const int col = col0 + wq * 16 + 2 * g;
          if (cur.slot >= 0) {
            u16* dst = p.part_out + (((i64)cur.slot * p.head_blocks + hb) * HEADS + h) * V_DIM + col;
            const float up = inv * PART_SCALE;
#pragma unroll
            for (int b = 0; b < BLOCKS_O; ++b) *(u32*)(dst + b * 64) = pack_f16(o[b][n][i] * up, o[b][n][2 + i] * up);
          } else {
            u16* dst = p.out + cur.request * p.out_token + (head0 + h) * p.out_head + col;
#pragma unroll
            for (int b = 0; b < BLOCKS_O; ++b) *(u32*)(dst + b * 64) = pack_out(o[b][n][i] * inv, o[b][n][2 + i] * inv);
          }
        }
      }
    cur.tile = cur.tile_end;
    cur.next(p.kv_indptr, worker, p.fixed, p.max_splits);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) mla_decode(const Params p) {
  DYNAMIC_SHARED(smem);
  const int warp = threadIdx.x >> 5;
  const int worker = blockIdx.x / p.head_blocks, hb = blockIdx.x % p.head_blocks;
  // [2][STAGES] a tile is there; its stage is free
  const u32 full = smem_addr(smem) + STAGES * STAGE_BYTES + Q_BYTES + 2 * P_BYTES + 6 * 4 * HEADS, empty = full + 8 * STAGES;
#if BULK
  if (threadIdx.x == 0)
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, FETCH_WARPS), barrier_init(empty + 8 * s, WARPS);
  proxy_fence();
  __syncthreads();
#endif
  wait_primary();
  launch_dependents();  // the merge may take its place now; it waits for this grid before it reads

  Cursor cur;
  cur.start(p.plan, (const int4*)(p.plan + 8), worker, p.fixed, p.max_splits);
  if (!cur.alive()) return;
#if BULK
  if (warp >= WARPS) {
    if (REBALANCE) give_registers<FETCH_REGISTERS>();
    produce(p, cur, worker, smem, full, empty);
  } else {
    if (REBALANCE) take_registers<COMPUTE_REGISTERS>();
    compute(p, cur, worker, hb, smem, full, empty);
  }
#else
  compute(p, cur, worker, hb, smem, full, empty);
#endif
}

// Parts of a request, from the plan: workers that hold its tiles, or its splits in the fixed mode.
__device__ __forceinline__ int count_parts(int u0, int u1, int per, int fixed) {
  if (u1 == u0) return 0;
  return fixed ? u1 - u0 : (u1 - 1) / per - u0 / per + 1;
}

static constexpr int MERGE_WARPS = 16;
static constexpr int MERGE_BLOCKS = __CUDA_ARCH__ >= 1000 ? 1 : 2;  // newer code needs a few registers more than 64
static constexpr int CLASSES = 3;  // by the warps that share one request's parts: 1, 4 and 16
__device__ __forceinline__ int merge_class(int parts) { return parts <= 4 ? 0 : parts <= 32 ? 1 : 2; }

struct MergeInput {
  const int4* list;  // request, first slot, parts, whether the first part lies one slot further
  int listed, entries;
};

// Merge requests of one class. A warp owns 128 * QUADS columns of one (request, head), and of its parts every
// WAYS-th; a block has 16 / WAYS such units.
template <int WAYS, int QUADS>
__device__ __forceinline__ void merge(const Params& p, const MergeInput in, float* s_x, bool& waited) {
  constexpr int UNITS = MERGE_WARPS / WAYS, CHUNKS = V_DIM / (128 * QUADS), BATCH = QUADS == 1 ? 8 : 2;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, way = warp % WAYS;
  const int blocks = (p.heads * CHUNKS + UNITS - 1) / UNITS;
  const int row_step = p.head_blocks * HEADS, part_step = p.fixed ? row_step : 2 * row_step;
  for (int item = blockIdx.x; item < in.entries * blocks; item += gridDim.x) {
    const int e = item / blocks, unit = (item - e * blocks) * UNITS + warp / WAYS;
    const int h = unit / CHUNKS, col = unit % CHUNKS * (128 * QUADS) + 4 * lane;
    int4 rec = make_int4(p.tokens - in.entries + e, 0, 0, 0);  // rows past the batch are the last ones
    if (e < in.listed) rec = in.list[e];
    if (h >= p.heads) rec.z = 0;
    const int parts = rec.z, row0 = rec.y * row_step + h;
    auto row_of = [&](int i) { return row0 + i * part_step + (i == 0 && rec.w ? row_step : 0); };
    if (!waited) wait_primary(), launch_dependents();
    waited = true;

    float4 acc[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; ++q) acc[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float lse = -INFINITY;
    if (parts) {
      uint2 x[BATCH][QUADS];
      auto load = [&](int first) {
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
          const int i = first + WAYS * j;
          if (i < parts) {
            const u16* src = p.part_out + (i64)row_of(i) * V_DIM + col;
#pragma unroll
            for (int q = 0; q < QUADS; ++q) x[j][q] = *(const uint2*)(src + 128 * q);
          }
        }
      };
      load(way);  // before the weights are known
      float top = -INFINITY, sum = 0.0f;
#pragma unroll(WAYS == 16 ? 8 : 1)
      for (int i = lane; i < parts; i += 32) {
        const float v = p.part_lse[row_of(i)];
        top = v != v ? v : fmaxf(top, v);
      }
#pragma unroll
      for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      const float ref = top == -INFINITY ? 0.0f : top;
#pragma unroll(WAYS == 16 ? 8 : 1)
      for (int i = lane; i < parts; i += 32) sum += exp2_fast(p.part_lse[row_of(i)] - ref);
#pragma unroll
      for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
      lse = sum == 0.0f ? -INFINITY : ref + log2f(sum);
      const float inv = sum == 0.0f ? 0.0f : 1.0f / (sum * PART_SCALE);
      // lane j keeps the weight of this warp's part j: 32 * 16 of them are more than there are workers
      const int own = way + WAYS * lane;
      const float weight = own < parts ? exp2_fast(p.part_lse[row_of(own)] - ref) * inv : 0.0f;
      for (int j0 = 0;;) {
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
          const float w = __shfl_sync(~0u, weight, j0 + j);
          if (way + WAYS * (j0 + j) < parts) {
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
              acc[q].x += w * f16_to_float((u16)x[j][q].x), acc[q].y += w * f16_to_float((u16)(x[j][q].x >> 16));
              acc[q].z += w * f16_to_float((u16)x[j][q].y), acc[q].w += w * f16_to_float((u16)(x[j][q].y >> 16));
            }
          }
        }
        j0 += BATCH;
        if (way + WAYS * j0 >= parts) break;
        load(way + WAYS * j0);
      }
    }
    if (WAYS > 1) {
      float4* mine = (float4*)(s_x + warp * (128 * QUADS)) + lane;
#pragma unroll
      for (int q = 0; q < QUADS; ++q) mine[32 * q] = acc[q];
      __syncthreads();
      // with as many quarters as ways, every warp sums one
#pragma unroll
      for (int q = 0; q < QUADS; ++q)
        if (QUADS == 1 || q == way) {
          acc[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
          for (int i = 0; i < WAYS; ++i) {
            const float4 y = ((const float4*)(s_x + (warp - way + i) * (128 * QUADS)) + lane)[32 * q];
            acc[q].x += y.x, acc[q].y += y.y, acc[q].z += y.z, acc[q].w += y.w;
          }
        }
      __syncthreads();
    }
    if (h < p.heads) {
      u16* out = p.out + rec.x * p.out_token + h * p.out_head + col;
#pragma unroll
      for (int q = 0; q < QUADS; ++q)
        if (WAYS == 1 || (QUADS == 1 ? way == 0 : q == way)) {
          *(u32*)(out + 128 * q) = pack_out(acc[q].x, acc[q].y);
          *(u32*)(out + 128 * q + 2) = pack_out(acc[q].z, acc[q].w);
        }
      if (p.lse && way == 0 && col == 0) p.lse[rec.x * p.lse_token + h * p.lse_head] = lse;
    }
  }
}

// Merge the parts of the requests that the plan lists, and write zeros for empty requests and padded rows.
extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS, MERGE_BLOCKS) mla_decode_merge(const Params p) {
  __shared__ __align__(16) float s_x[MERGE_WARPS * V_DIM];
  bool waited = false;  // the plan is older than the decode grid, which alone is waited for
  const int4* lists = (const int4*)(p.plan + 8 + 4 * p.workers);
  const int bs = p.plan[2], few = p.plan[3], some = p.plan[4], many = p.plan[5];
  merge<1, 4>(p, {lists, few, few + max(p.tokens - bs, 0)}, s_x, waited);
  merge<4, 4>(p, {lists + p.max_bs, some, some}, s_x, waited);
  merge<16, 1>(p, {lists + 2 * p.max_bs, many, many}, s_x, waited);
  // every grid waits, also one with nothing to do: the next grid may rely on all before it
  if (!waited) wait_primary();
}

// Once per step: prefix sums of work units, the units of each worker, and each worker's first segment. One block.
extern "C" __global__ void __launch_bounds__(1024) mla_decode_plan(const int* kv_indptr, int bs, int workers, int fixed,
                                                                   int max_splits, int max_bs, int* plan) {
  __shared__ int s_sum[32], s_listed[CLASSES], s_base;
  int* header = plan;
  int4* records = (int4*)(plan + 8);
  int4* lists = (int4*)(plan + 8 + 4 * workers);
  int* unit_indptr = (int*)(lists + CLASSES * max_bs);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid == 0) s_base = 0, unit_indptr[0] = 0;
  if (tid < CLASSES) s_listed[tid] = 0;
  __syncthreads();
  for (int r0 = 0; r0 < bs; r0 += 1024) {
    const int r = r0 + tid;
    int n = 0;
    if (r < bs) {
      const int tiles = (max(kv_indptr[r + 1] - kv_indptr[r], 0) + TILE - 1) / TILE;
      n = tiles;
      if (fixed && tiles) {
        const int size = split_tiles(tiles, fixed, max_splits);
        n = (tiles + size - 1) / size;
      }
    }
    int x = n;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int y = __shfl_up_sync(~0u, x, d);
      if (lane >= d) x += y;
    }
    if (lane == 31) s_sum[warp] = x;
    __syncthreads();
    int before = s_base;
    for (int w = 0; w < warp; ++w) before += s_sum[w];
    if (r < bs) unit_indptr[r + 1] = before + x;
    __syncthreads();
    if (tid == 1023) s_base = before + x;
    __syncthreads();
  }
  const int units = s_base, per = max(1, (units + workers - 1) / workers);
  // requests that the merge must write; their order in a list does not matter
  for (int r = tid; r < bs; r += 1024) {
    const int parts = count_parts(unit_indptr[r], unit_indptr[r + 1], per, fixed);
    if (parts != 1) {
      const int c = merge_class(parts), w0 = unit_indptr[r] / per;
      // consecutive workers hold the parts: the first of them may have begun with another request
      lists[c * max_bs + atomicAdd(&s_listed[c], 1)] =
          fixed ? make_int4(r, r * max_splits, parts, 0) : make_int4(r, 2 * w0, parts, unit_indptr[r] != w0 * per);
    }
  }
  __syncthreads();
  if (tid == 0) {
    header[0] = units, header[1] = per, header[2] = bs;
    for (int c = 0; c < CLASSES; ++c) header[3 + c] = s_listed[c];
  }
  for (int w = tid; w < workers; w += 1024) {
    int4 rec = make_int4(0, 0, 0, 0);
    const int pos = w * per;
    if (pos < units) {
      int lo = 0, hi = bs - 1;  // the request whose units hold pos
      while (lo < hi) {
        const int mid = (lo + hi) >> 1;
        if (unit_indptr[mid + 1] > pos) hi = mid; else lo = mid + 1;
      }
      const int kv0 = kv_indptr[lo], len = kv_indptr[lo + 1] - kv0;
      int tile = pos - unit_indptr[lo];
      if (fixed) tile *= split_tiles((len + TILE - 1) / TILE, fixed, max_splits);
      rec = make_int4(lo, tile, kv0, len);
    }
    records[w] = rec;
  }
}
