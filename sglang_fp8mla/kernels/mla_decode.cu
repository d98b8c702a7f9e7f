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
// Compile-time: HEADS (8, 16, 32, 64 heads of one block), GROUPS (warp groups), STAGES, KPE (0 or 64),
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
static constexpr int WARPS = 4 * GROUPS;
static constexpr int THREADS = 32 * WARPS;
static constexpr int HEADS_S = HEADS / GROUPS;  // heads whose logits one group computes
static constexpr int COLS = V_DIM / GROUPS;     // latent columns whose output one group accumulates
static constexpr int NS = HEADS_S / 8;
static constexpr int NO = HEADS / 8;
static constexpr int BLOCKS_O = COLS / 64;
static constexpr int STAGE_BYTES = TILE * PITCH;
static constexpr int Q_BYTES = HEADS * K_DIM * 2;
static constexpr int P_BYTES = HEADS * TILE * 2;
static constexpr float LOG2_SHIFT = 7.0f;  // p in (0, 2^15], largest at least 2^7: fp16 keeps small ones normal

struct Plan {
  const int* header;   // [8]: units, units per worker, batch size
  const int4* worker;  // [workers]: request, tile, first index, length of the first segment
};

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
__device__ __forceinline__ void copy16(u32 dst, const void* src, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
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

__device__ __forceinline__ void operand_fence() {  // generic writes before the matrix unit reads them
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if BULK
__device__ __forceinline__ void barrier_init(u32 bar) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }" ::"r"(bar),
      "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_row(u32 dst, const void* src, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
               "n"(K_DIM), "r"(bar) : "memory");
}
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
  float* part_out;  // [slots, head blocks, HEADS, V_DIM]
  float* part_lse;  // [slots, head blocks, HEADS]
  float scale_log2;
  int heads, head_blocks, workers, fixed, max_splits;
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
__device__ __forceinline__ void load_q(const Params& p, int request, int head0, u8* s_q, float* s_scale) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr int PAIRS = K_DIM / 64;  // pairs of columns per lane
#pragma unroll
  for (int i = 0; i < HEADS / WARPS; ++i) {
    const int h = warp + i * WARPS;
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

// Rows of a warp in a tile; a lane keeps the slot of row (lane % ROWS), -1 past the request's end.
static constexpr int ROWS = TILE / WARPS;

__device__ __forceinline__ int fetch_slot(const Cursor& c, const int* kv_indices) {
  const int t = c.tile * TILE + (threadIdx.x >> 5) * ROWS + (threadIdx.x & (ROWS - 1));
  return c.alive() && t < c.len ? kv_indices[c.kv0 + t] : -1;
}

__device__ __forceinline__ void issue_tile(const Params& p, u8* stage, u32 bar, int slot, int valid) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u8* rows = stage + warp * ROWS * PITCH;
#if BULK
  if (threadIdx.x == 0) barrier_expect(bar, valid * K_DIM);
  if (lane < ROWS && slot >= 0) copy_row(smem_addr(rows + lane * PITCH), p.pool + (u64)(u32)slot * p.pool_row, bar);
  if (valid < TILE) {  // rows past the end must be zero: 0 times a stale NaN is NaN
    for (int i = valid * (PITCH / 16) + threadIdx.x; i < TILE * (PITCH / 16); i += THREADS)
      *(int4*)(stage + i * 16) = make_int4(0, 0, 0, 0);
    operand_fence();
  }
#else
  const u32 dst = smem_addr(rows) + lane * 16;
  const u8* src = p.pool + lane * 16;
  if (valid == TILE) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) copy16(dst + r * PITCH, src + (u64)(u32)__shfl_sync(~0u, slot, r) * p.pool_row, 16);
  } else {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int s = __shfl_sync(~0u, slot, r);
      copy16(dst + r * PITCH, src + (u64)(u32)max(s, 0) * p.pool_row, s < 0 ? 0 : 16);
    }
  }
#if KPE
#pragma unroll
  for (int i = 0; i < ROWS / 8; ++i) {  // the four 16-byte pieces of kpe, eight rows at a time
    const int r = i * 8 + (lane >> 2), c = V_DIM + (lane & 3) * 16;
    const int s = __shfl_sync(~0u, slot, r);
    copy16(smem_addr(rows) + r * PITCH + c, p.pool + (u64)(u32)max(s, 0) * p.pool_row + c, s < 0 ? 0 : 16);
  }
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) mla_decode(const Params p) {
  DYNAMIC_SHARED(smem);
  u8* s_kv = smem;
  u8* s_q = s_kv + STAGES * STAGE_BYTES;
  u8* s_p = s_q + Q_BYTES;
  float* s_red = (float*)(s_p + P_BYTES);   // [4 warps of a group][HEADS]
  float* s_scale = s_red + 4 * HEADS;       // [HEADS] logit scale
  float* s_alpha = s_scale + HEADS;         // [HEADS] rescale of the running output
  u64* s_bar = (u64*)(s_alpha + HEADS);     // [STAGES]

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  // the shuffle tells the compiler that the group is the same for a warp: its operands stay uniform
  const int group = GROUPS == 1 ? 0 : __shfl_sync(~0u, warp >> 2, 0);
  const int wq = warp & 3, g = lane >> 2, t = lane & 3;
  const int worker = blockIdx.x / p.head_blocks, hb = blockIdx.x % p.head_blocks;
  const int head0 = hb * HEADS;
  const int* header = p.plan;
  const int4* workers = (const int4*)(p.plan + 8);

  Cursor cur;
  cur.start(header, workers, worker, p.fixed, p.max_splits);
  if (!cur.alive()) return;
  Cursor ahead = cur;  // the tile to fetch next

#if BULK
  if (tid == 0)
    for (int s = 0; s < STAGES; ++s) barrier_init(smem_addr(s_bar + s));
  operand_fence();
  __syncthreads();
#endif
  int slot = fetch_slot(ahead, p.kv_indices);
  auto fetch = [&](int stage) {
    if (ahead.alive()) {
      issue_tile(p, s_kv + stage * STAGE_BYTES, smem_addr(s_bar + stage), slot, min(TILE, ahead.len - ahead.tile * TILE));
      if (++ahead.tile == ahead.tile_end) ahead.next(p.kv_indptr, worker, p.fixed, p.max_splits);
      slot = fetch_slot(ahead, p.kv_indices);
    }
#if !BULK
    copy_commit();
#endif
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(s);

  int stage = 0;
  u32 parity = 0;
  const u64 q_operand = operand(smem_addr(s_q) + group * NS * 128);
  const u64 p_operand = operand(smem_addr(s_p));

  while (cur.alive()) {
    // every warp is past its last read of s_q: the products that read it ended before a barrier
    load_q(p, cur.request, head0, s_q, s_scale);
    operand_fence();

    float o[BLOCKS_O][NO][4];
#pragma unroll
    for (int b = 0; b < BLOCKS_O; ++b)
#pragma unroll
      for (int n = 0; n < NO; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][n][i] = 0.0f;
    float m[NS][2], l[NS][2], scale[NS][2];
#pragma unroll
    for (int n = 0; n < NS; ++n) m[n][0] = m[n][1] = -INFINITY, l[n][0] = l[n][1] = 0.0f;

    bool first = true;
    for (int tile = cur.tile; tile < cur.tile_end; ++tile) {
#if BULK
      barrier_wait(smem_addr(s_bar + stage), parity);
#else
      copy_wait<STAGES - 2>();
#endif
      __syncthreads();  // the tile and q are there; the stage before this one is free
      fetch(stage == 0 ? STAGES - 1 : stage - 1);
      const u32 kv = smem_addr(s_kv + stage * STAGE_BYTES);
      if (first) {
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) scale[n][i] = s_scale[group * HEADS_S + n * 8 + 2 * t + i];
        first = false;
      }

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

      const int tok = tile * TILE + wq * 16 + g;
      const bool in0 = tok < cur.len, in1 = tok + 8 < cur.len;
#pragma unroll
      for (int n = 0; n < NS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float top = fmaxf(in0 ? s[n][i] * scale[n][i] : -INFINITY, in1 ? s[n][2 + i] * scale[n][i] : -INFINITY);
#pragma unroll
          for (int d = 4; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
          if (g == 0) s_red[wq * HEADS + group * HEADS_S + n * 8 + 2 * t + i] = top;
        }
      // the first columns of V do not depend on p: fetch them over the wait
      const u32 vrow = kv + lane * PITCH + group * COLS + wq * 16;
      u32 raw[2][4];
      ldsm_t(raw[0], vrow);
      ldsm_t(raw[1], vrow + 32 * PITCH);
      __syncthreads();

      int grew = 0;
#pragma unroll
      for (int n = 0; n < NS; ++n) {
        float prob[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int h = group * HEADS_S + n * 8 + 2 * t + i;
          float top = fmaxf(fmaxf(s_red[h], s_red[HEADS + h]), fmaxf(s_red[2 * HEADS + h], s_red[3 * HEADS + h]));
          // the reference moves only when p would leave fp16: a rescale is rare, and p the same function
          float alpha = 1.0f;
          if (top > m[n][i] + (LOG2_SHIFT + 8.0f)) {
            float fresh = top - LOG2_SHIFT;
            alpha = exp2_fast(m[n][i] - fresh);
            m[n][i] = fresh;
            grew = 1;
          }
          if (wq == 0 && g == 0) s_alpha[h] = alpha;
          const float ref = m[n][i] == -INFINITY ? 0.0f : m[n][i];
          prob[i] = in0 ? exp2_fast(fmaf(s[n][i], scale[n][i], -ref)) : 0.0f;
          prob[2 + i] = in1 ? exp2_fast(fmaf(s[n][2 + i], scale[n][i], -ref)) : 0.0f;
          l[n][i] = l[n][i] * alpha + (prob[i] + prob[2 + i]);
        }
        u8* dst = s_p + (2 * wq * NO + group * NS + n) * 128 + g * 16 + t * 4;
        *(u32*)dst = pack_f16(prob[0], prob[1]);
        *(u32*)(dst + NO * 128) = pack_f16(prob[2], prob[3]);
      }
      operand_fence();
      if (__syncthreads_or(grew)) {
#pragma unroll
        for (int n = 0; n < NO; ++n) {
          const float2 alpha = *(const float2*)(s_alpha + n * 8 + 2 * t);
#pragma unroll
          for (int b = 0; b < BLOCKS_O; ++b) {
            o[b][n][0] *= alpha.x, o[b][n][1] *= alpha.y;
            o[b][n][2] *= alpha.x, o[b][n][3] *= alpha.y;
          }
        }
      }

      // O^T: 16 columns of this warp in every block of 64; rows g and g + 8 are columns 2 g and 2 g + 1
      {
        u32 a[2][4][4];
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
          for (int i = 0; i < 4; ++i) Mma<NO, 1>::run(o[b], a[b & 1][i], advance(p_operand, i * (HEADS * 32)), 1);
          mma_commit();
          mma_wait<1>();
        }
        mma_wait<0>();
      }
      if (++stage == STAGES) stage = 0, parity ^= 1;
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
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = group * HEADS_S + n * 8 + 2 * t + i;
        if (wq == 0 && g == 0 && head0 + h < p.heads) {
          float sum = (s_red[h] + s_red[HEADS + h]) + (s_red[2 * HEADS + h] + s_red[3 * HEADS + h]);
          float lse = m[n][i] + log2f(sum);
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
        const int h = n * 8 + 2 * t + i;
        float sum = (s_red[h] + s_red[HEADS + h]) + (s_red[2 * HEADS + h] + s_red[3 * HEADS + h]);
        // every logit -inf: the sum is 0, and so is the output
        const float inv = sum == 0.0f ? 0.0f : SCALE_BIAS / sum;
        if (head0 + h < p.heads) {
          const int col = group * COLS + wq * 16 + 2 * g;
          if (cur.slot >= 0) {
            float* dst = p.part_out + (((i64)cur.slot * p.head_blocks + hb) * HEADS + h) * V_DIM + col;
#pragma unroll
            for (int b = 0; b < BLOCKS_O; ++b) *(float2*)(dst + b * 64) = make_float2(o[b][n][i] * inv, o[b][n][2 + i] * inv);
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
  launch_dependents();
}

// Merge the partial results of one (request, head); write zeros for an empty request. One block each.
static constexpr int MERGE_LANES = V_DIM / 8;   // threads over the columns, 8 columns each
static constexpr int MERGE_WAYS = 8;            // partial results read at the same time
static constexpr int MERGE_THREADS = MERGE_LANES * MERGE_WAYS;
static constexpr int MAX_PARTS = 1024;

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) mla_decode_merge(const Params p) {
  __shared__ float s_w[MAX_PARTS];
  __shared__ float s_x[MERGE_WAYS][V_DIM];
  __shared__ float s_t[MERGE_THREADS / 32];
  const int r = blockIdx.y, h = blockIdx.x, tid = threadIdx.x;
  const int col = (tid % MERGE_LANES) * 8, way = tid / MERGE_LANES;
  const int* header = p.plan;
  const int per = header[1], bs = header[2];
  const int* unit_indptr = p.plan + 8 + 4 * p.workers;
  const int len = r < bs ? p.kv_indptr[r + 1] - p.kv_indptr[r] : 0;
  int parts = 0, u0 = 0;
  if (len > 0) {
    u0 = unit_indptr[r];
    const int u1 = unit_indptr[r + 1];
    parts = p.fixed ? u1 - u0 : (u1 - 1) / per - u0 / per + 1;
  }
  wait_primary();
  u16* out = p.out + r * p.out_token + h * p.out_head;
  float* lse_out = p.lse ? p.lse + r * p.lse_token + h * p.lse_head : nullptr;
  if (parts == 0 && way == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) *(u32*)(out + col + 2 * i) = 0u;
    if (lse_out && tid == 0) *lse_out = -INFINITY;
  }
  if (parts <= 1) return;

  // consecutive workers hold one request's parts: the first may have begun with another request
  const int w0 = p.fixed ? 0 : u0 / per;
  auto slot_of = [&](int i) -> i64 {
    if (p.fixed) return (i64)r * p.max_splits + i;
    return 2 * (w0 + i) + (i == 0 && u0 != w0 * per ? 1 : 0);
  };
  const int hb = h / HEADS, hl = h % HEADS;
  float top = -INFINITY;
  for (int i = tid; i < parts; i += MERGE_THREADS) {
    float x = p.part_lse[(slot_of(i) * p.head_blocks + hb) * HEADS + hl];
    s_w[i] = x;
    top = (x != x) ? x : fmaxf(top, x);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if ((tid & 31) == 0) s_t[tid >> 5] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MERGE_THREADS / 32; ++i) top = fmaxf(top, s_t[i]);
  const float ref = top == -INFINITY ? 0.0f : top;

  float acc[8], total = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = 0.0f;
#pragma unroll 4
  for (int i = way; i < parts; i += MERGE_WAYS) {
    const float w = exp2_fast(s_w[i] - ref);
    const float4* src = (const float4*)(p.part_out + ((slot_of(i) * p.head_blocks + hb) * HEADS + hl) * V_DIM + col);
    const float4 x = src[0], y = src[1];
    total += w;
    acc[0] += w * x.x, acc[1] += w * x.y, acc[2] += w * x.z, acc[3] += w * x.w;
    acc[4] += w * y.x, acc[5] += w * y.y, acc[6] += w * y.z, acc[7] += w * y.w;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) s_x[way][col + i] = acc[i];
  __syncthreads();  // s_t was read by all before this barrier
  if (col == 0) s_t[way] = total;
  __syncthreads();
  if (tid < V_DIM / 2) {
    float a = 0.0f, b = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < MERGE_WAYS; ++i) a += s_x[i][2 * tid], b += s_x[i][2 * tid + 1], sum += s_t[i];
    const float inv = sum == 0.0f ? 0.0f : 1.0f / sum;
    *(u32*)(out + 2 * tid) = pack_out(a * inv, b * inv);
    if (lse_out && tid == 0) *lse_out = ref + log2f(sum);
  }
}

// Once per step: prefix sums of work units, the units of each worker, and each worker's first segment. One block.
extern "C" __global__ void __launch_bounds__(1024) mla_decode_plan(const int* kv_indptr, int bs, int workers, int fixed,
                                                                   int max_splits, int* plan) {
  __shared__ int s_sum[32];
  __shared__ int s_base;
  int* header = plan;
  int4* records = (int4*)(plan + 8);
  int* unit_indptr = plan + 8 + 4 * workers;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid == 0) s_base = 0, unit_indptr[0] = 0;
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
  if (tid == 0) header[0] = units, header[1] = per, header[2] = bs;
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
