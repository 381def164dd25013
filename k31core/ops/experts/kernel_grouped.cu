// Grouped MXFP4 expert products for Hopper (sm_90a): out^T = W_e x_e^T with W decoded in registers.
//
// A block is one producer warpgroup and two or four consumer warpgroups, persistent over tiles (expert, 128 rows of W a
// consumer, up to 152 rows of x). The producer copies packed codes and x tiles with the bulk tensor engine and turns E8M0 bytes into bfloat16
// factors; a consumer reads codes from shared memory, decodes them straight into the A operand of wgmma (registers) and
// multiplies with x as the B operand (shared memory, 128-byte swizzle). Which row of W stands in which row of the A
// operand is free, so each thread owns neighbouring output features and stores them without a transpose.
//
// Modes (rows of W are input-contiguous, two codes a byte):
//   0 gate           K = latent  A = w1 | w3 (64 + 64 rows a warpgroup)   out h = SiTU-GLU(a, b), optional a | b
//   1 down           K = ffn     A = w2                                   out y
//   2 down backward  K = latent  A = w2 transposed                        out da | db from a | b and dh, optional h
//   3 gate backward  K = 2 ffn   A = w1 transposed, then w3 transposed    out dx
// With LoRA one more step multiplies the bfloat16 factor (`lora0`, `lora1`) with the rows' projections (`map_u`).
//
// Generated before this file: GROUPS consumer warpgroups, N_SMALL and N_LARGE, the rows of x a tile may have, and WGMMA<N> for both (m64nNk16, f32 +=
// bf16 in registers x bf16 in shared memory). With three widths in one kernel the assembler runs out of registers and
// serialises every product, hence two widths a kernel and one kernel a range of rows per expert.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int BOX_ROWS = 32;
constexpr int X_BYTES = (N_LARGE + BOX_ROWS - 1) / BOX_ROWS * BOX_ROWS * 128;
constexpr int M_BLOCK = GROUPS * 128;  // rows of W a tile takes, from two matrices in mode 0
constexpr int W_BYTES = M_BLOCK * 32;
constexpr int W_BOX_BYTES = 128 * 32;  // of one bulk copy; transposed weights take 64 x 128
constexpr int FACTOR_BYTES = 2 * M_BLOCK * 4;
constexpr int THREADS = 128 * (1 + GROUPS);
// Registers move from the producer to the consumers; the sum over the block is what it was launched with.
constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = GROUPS == 2 ? 240 : 112;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES + FACTOR_BYTES;
constexpr int STAGES = 7;
constexpr int MAX_EXPERTS = 256;

struct alignas(64) TensorMap { u64 opaque[16]; };

struct Params {
    const long long* counts;  // [experts] rows of each
    const u8* scale0;         // E8M0 bytes of w1 or w2
    const u8* scale1;         // of w3
    const u16* lora0;         // bf16 [., M, 32 or 64]; null without LoRA
    const u16* lora1;         // mode 0: the factor of w3
    const u16* pre_in;        // mode 2: a | b [rows, 2 ffn]
    u16* out;
    u16* extra;               // mode 0: a | b; mode 2: h; null when not wanted
    int rows, experts, latent, ffn;
    int lora_stride;          // elements of one expert's LoRA factor; 0 when the experts share it
    float linear_beta;
};

// ---------------------------------------------------------------------------------------------- small instructions

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ bool barrier_test(u32 bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return __all_sync(~0u, done);
}
__device__ __forceinline__ void copy_tile(u32 dst, const TensorMap* map, int c0, int c1, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
        "l"((u64)map), "r"(c0), "r"(c1), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ u32 load_shared_2(u32 a) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
    return v;
}
__device__ __forceinline__ void store_shared_4(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v)); }
__device__ __forceinline__ void store_shared_2(u32 a, u32 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"((u16)v)); }
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float low_float(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_float(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float exp2_fast(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
__device__ __forceinline__ float reciprocal(float x) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

// ------------------------------------------------------------------------------------------------------- SiTU-GLU

// h = 4 tanh(a / 4) sigmoid(a) * B tanh(b / B). With u = exp(-a / 2) the sigmoid is 1 / (1 + u^2) and tanh(a / 4) is
// (1 - u) / (1 + u): two exponentials and one reciprocal an element. The exponents are capped so that the product of the
// denominators stays finite; beyond the caps tanh is -1 and the sigmoid below 1e-17.
struct Situ {
    float linear_beta, rate;
    __device__ explicit Situ(const Params& p) : linear_beta(p.linear_beta), rate(-2.885390082f / p.linear_beta) {}
    __device__ __forceinline__ void exponentials(float a, float b, float& u, float& v) const {
        u = exp2_fast(fminf(a * -0.7213475204f, 28.8f));
        v = exp2_fast(fminf(b * rate, 23.0f));
    }
    __device__ __forceinline__ float forward(float a, float b) const {
        float u, v;
        exponentials(a, b, u, v);
        const float scale = 4.0f * linear_beta * reciprocal((1.0f + u) * fmaf(u, u, 1.0f) * (1.0f + v));
        return (1.0f - u) * (1.0f - v) * scale;
    }
    __device__ __forceinline__ void backward(float a, float b, float dh, float& h, float& da, float& db) const {
        float u, v;
        exponentials(a, b, u, v);
        const float pu = 1.0f + u, pw = fmaf(u, u, 1.0f), pv = 1.0f + v;
        const float r = reciprocal(pu * pw * pv), q = pv * r;
        const float t = (1.0f - u) * (pw * q), s = pu * q, y = (1.0f - v) * (pu * pw * r);
        const float gate = 4.0f * t * s, scaled = linear_beta * y;
        h = gate * scaled;
        da = dh * scaled * fmaf(fmaf(-t, t, 1.0f), s, gate * (1.0f - s));
        db = dh * gate * fmaf(-y, y, 1.0f);
    }
};

// ---------------------------------------------------------------------------------------------------------- tiles

struct Tiles {
    const int* row_start;   // [experts + 1]
    const int* tile_start;  // [experts + 1] in row tiles
    int m_tiles, experts, rows, expert, tile, row0, valid, m;

    __device__ Tiles(const int* row_start_, const int* tile_start_, int m_tiles_, const Params& p)
        : row_start(row_start_), tile_start(tile_start_), m_tiles(m_tiles_), experts(p.experts), rows(p.rows), expert(0), tile(blockIdx.x) {}
    // Fills in the current tile; false after the last one. Row tiles of an expert are neighbours, so W stays in L2.
    __device__ __forceinline__ bool locate() {
        if (tile >= tile_start[experts] * m_tiles) return false;
        while (tile >= tile_start[expert + 1] * m_tiles) ++expert;
        const int count = tile_start[expert + 1] - tile_start[expert];
        const int local = tile - tile_start[expert] * m_tiles;
        const int total = row_start[expert + 1] - row_start[expert];
        const int chunk = (total + count - 1) / count;
        const int j = local % count;
        m = local / count;
        row0 = row_start[expert] + j * chunk;
        valid = max(min(min(chunk, total - j * chunk), rows - row0), 0);  // never past the rows there are, whatever the counts say
        return true;
    }
    __device__ __forceinline__ void next() { tile += gridDim.x; }
};

__device__ void prefix_counts(const long long* counts, int experts, int* row_start, int* tile_start) {
    const int lane = threadIdx.x;
    const int each = (experts + 31) / 32;
    int rows = 0, tiles = 0;
    for (int i = lane * each; i < min(experts, (lane + 1) * each); ++i) {
        rows += (int)counts[i];
        tiles += ((int)counts[i] + N_LARGE - 1) / N_LARGE;
    }
    int rows_before = rows, tiles_before = tiles;
    for (int d = 1; d < 32; d *= 2) {
        const int r = __shfl_up_sync(~0u, rows_before, d), t = __shfl_up_sync(~0u, tiles_before, d);
        if (lane >= d) { rows_before += r; tiles_before += t; }
    }
    rows_before -= rows;
    tiles_before -= tiles;
    for (int i = lane * each; i < min(experts, (lane + 1) * each); ++i) {
        row_start[i] = rows_before;
        tile_start[i] = tiles_before;
        rows_before += (int)counts[i];
        tiles_before += ((int)counts[i] + N_LARGE - 1) / N_LARGE;
        if (i == experts - 1) { row_start[experts] = rows_before; tile_start[experts] = tiles_before; }
    }
}

// Position in the ring of stages; both sides advance it once a step.
struct Ring {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
};

// ------------------------------------------------------------------------------------------------------- producer

// A scale byte s as the bfloat16 2^(s - 1), which also undoes the decoder's 2^-126. Above s = 128 that leaves bfloat16:
// such a byte is passed as it is with bit 15 set, and the consumer multiplies twice.
__device__ __forceinline__ u32 factor_code(u32 s) { return s <= 128 ? (s + 126) << 7 : 0x8000u | s; }

__device__ __forceinline__ u32 byte_of(u32 word, u32 index) { return __byte_perm(word, 0, 0x4440u + index); }

template <int MODE>
__device__ void produce(const TensorMap* map_x, const TensorMap* map_w0, const TensorMap* map_w1, const TensorMap* map_u,
                        const Params& p, Tiles tiles, u32 smem, u32 full, u32 empty) {
    constexpr bool TRANSPOSED = MODE >= 2;
    constexpr int GROUP_ROWS = MODE == 0 ? 64 : 128;  // rows of one matrix that a consumer warpgroup takes
    constexpr int PREFETCH = 6;                       // steps that scale bytes are fetched to the cache ahead
    const int tid = threadIdx.x;
    const long long to_second = MODE == 3 ? p.scale1 - p.scale0 : 0;
    const int m_rows = MODE == 0 ? p.ffn : p.latent;                        // rows of one expert's packed weight
    const int k_iters = (MODE == 0 || MODE == 2 ? p.latent : MODE == 1 ? p.ffn : 2 * p.ffn) / 64;
    const int w_rows = MODE == 0 || MODE == 3 ? p.ffn : p.latent;           // rows an expert takes in the weight's map
    const int pitch = (MODE == 0 || MODE == 3 ? p.latent : p.ffn) / 32;     // scale bytes of one row
    Ring ring;
    for (; tiles.locate(); tiles.next()) {
        const int boxes = (tiles.valid + BOX_ROWS - 1) / BOX_ROWS;
        const u8* scale;
        uint4 bytes[GROUPS];    // forward: the next 512 inputs' scale bytes of one row a group
        u32 words[GROUPS / 2];  // transposed: the next input's scale bytes of four features a word
        if (!TRANSPOSED) {
            const int warp = tid / 32, g = (tid % 32) / 4, i = tid % 4;
            const int row = MODE == 0 ? tiles.m * (M_BLOCK / 2) + warp * 16 + g * 2 + (i & 1) : tiles.m * M_BLOCK + tid;
            scale = (MODE == 0 && i >= 2 ? p.scale1 : p.scale0) + ((long long)tiles.expert * m_rows + row) * pitch;
#pragma unroll
            for (int b = 0; b < GROUPS; ++b) bytes[b] = *(const uint4*)(scale + b * GROUP_ROWS * pitch);
        } else {
            scale = p.scale0 + ((long long)tiles.expert * w_rows + tid / 2) * pitch + tiles.m * (M_BLOCK / 32) + (tid & 1) * 2 * GROUPS;
            for (int k = 1; k < PREFETCH; ++k) prefetch(scale + k * 64 * pitch);
#pragma unroll
            for (int b = 0; b < GROUPS / 2; ++b) words[b] = *(const u32*)(scale + b * 4);
        }
        if (MODE == 2) {  // the epilogue reads a | b of the tile: have them in the cache by then
            constexpr int LINES = M_BLOCK * 2 / 128;
            for (int i = tid; i < tiles.valid * LINES * 2; i += 128) {
                const int row = i / (2 * LINES), line = i % LINES, half = i / LINES % 2;
                prefetch(p.pre_in + ((long long)(tiles.row0 + row) * 2 + half) * p.ffn + tiles.m * M_BLOCK + line * 64);
            }
        }
        for (int k = 0; k < k_iters + (p.lora0 != nullptr); ++k, ring.next()) {
            const u32 base = smem + ring.stage * STAGE_BYTES, bar = full + ring.stage * 8;
            barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
            if (tid == 0) {
                const bool lora = k == k_iters;
                barrier_expect(bar, boxes * BOX_ROWS * 128 + (lora ? 0 : W_BYTES));
                const TensorMap* source = lora ? map_u : map_x;
                for (int b = 0; b < boxes; ++b)
                    copy_tile(base + b * BOX_ROWS * 128, source, lora ? 0 : k * 64, tiles.row0 + b * BOX_ROWS, bar);
                const u32 w = base + X_BYTES;
                if (lora) {
                } else if (MODE == 0) {
                    const int row = tiles.expert * w_rows + tiles.m * (M_BLOCK / 2);
#pragma unroll
                    for (int b = 0; b < GROUPS / 2; ++b) {
                        copy_tile(w + b * W_BOX_BYTES, map_w0, k * 32, row + b * 128, bar);
                        copy_tile(w + W_BYTES / 2 + b * W_BOX_BYTES, map_w1, k * 32, row + b * 128, bar);
                    }
                } else if (MODE == 1) {
                    const int row = tiles.expert * w_rows + tiles.m * M_BLOCK;
#pragma unroll
                    for (int b = 0; b < GROUPS; ++b) copy_tile(w + b * W_BOX_BYTES, map_w0, k * 32, row + b * 128, bar);
                } else {
                    const bool second = MODE == 3 && k >= k_iters / 2;
                    const int row = tiles.expert * w_rows + (second ? k - k_iters / 2 : k) * 64;
#pragma unroll
                    for (int b = 0; b < GROUPS / 2; ++b)
                        copy_tile(w + b * 2 * W_BOX_BYTES, second ? map_w1 : map_w0, tiles.m * (M_BLOCK / 2) + b * 128, row, bar);
                }
            }
            if (k < k_iters) {
                const u32 factors = base + X_BYTES + W_BYTES;
                if (!TRANSPOSED) {
#pragma unroll
                    for (int b = 0; b < GROUPS; ++b) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const u32 code = factor_code(byte_of(bytes[b].x, (k & 1) * 2 + half));
                            store_shared_4(factors + (half * M_BLOCK + b * 128 + tid) * 4, code * 0x10001u);
                        }
                        if (k & 1) bytes[b] = make_uint4(bytes[b].y, bytes[b].z, bytes[b].w, 0);
                    }
                    if (k % 8 == 2 && k + 8 < k_iters)
#pragma unroll
                        for (int b = 0; b < GROUPS; ++b) prefetch(scale + b * GROUP_ROWS * pitch + (k + 6) * 2);
                    if (k % 8 == 7 && k + 1 < k_iters)
#pragma unroll
                        for (int b = 0; b < GROUPS; ++b) bytes[b] = *(const uint4*)(scale + b * GROUP_ROWS * pitch + (k + 1) * 2);
                } else {
                    const int f = tid / 2;  // input row of this step: 16 s + 8 h + 2 t + j
                    const int slot = ((f >> 1) & 3) * 16 + (f >> 3) * 2 + (f & 1);
#pragma unroll
                    for (int i = 0; i < 2 * GROUPS; ++i)
                        store_shared_2(factors + (((tid & 1) * 2 * GROUPS + i) * 64 + slot) * 2, factor_code(byte_of(words[i / 4], i % 4)));
                    const int half = k_iters / 2;
                    if (k + PREFETCH < k_iters) {
                        const bool second = MODE == 3 && k + PREFETCH >= half;
                        prefetch(scale + (second ? to_second : 0) + (long long)(second ? k + PREFETCH - half : k + PREFETCH) * 64 * pitch);
                    }
                    if (k + 1 < k_iters) {
                        const bool second = MODE == 3 && k + 1 >= half;
                        const u8* source = scale + (second ? to_second : 0) + (long long)(second ? k + 1 - half : k + 1) * 64 * pitch;
#pragma unroll
                        for (int b = 0; b < GROUPS / 2; ++b) words[b] = *(const u32*)(source + b * 4);
                    }
                }
            }
            barrier_arrive(bar);
        }
    }
}

// ------------------------------------------------------------------------------------------------------- consumer

// Byte `pick` of the word (two codes) to two bfloat16 times 2^-126: sign to bit 15, the three other bits to bits 8..6.
__device__ __forceinline__ u32 decode_byte(u32 word, u32 pick) {
    const u32 q = __byte_perm(word, 0, pick) * 0x40040u;
    return ((q << 6) & 0x80008000u) | (q & 0x01c001c0u);
}

// What a thread reads from shared memory for 32 inputs, before it is decoded.
template <int MODE> struct Codes {
    static constexpr bool TRANSPOSED = MODE >= 2;
    u32 words[16];  // forward: 16 bytes of four rows; transposed: two features of eight inputs, even and odd input of a pair
    u32 factors[4];

    // `w` is this thread's first row (or even input), `odd` the odd input; both for half 0 of the stage.
    __device__ __forceinline__ void load(u32 w, u32 odd, u32 factor_address, int half) {
        const uint4 f = load_shared_16(factor_address + half * (TRANSPOSED ? 16 : M_BLOCK * 4));
        factors[0] = f.x, factors[1] = f.y, factors[2] = f.z, factors[3] = f.w;
        if (TRANSPOSED) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                words[c] = load_shared_2(w + (half * 32 + c * 8) * 128);
                words[4 + c] = load_shared_2(odd + (half * 32 + c * 8) * 128);
            }
        } else {
            const u32 base = w ^ (half * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 v = load_shared_16(base + (MODE == 0 ? (i % 2) * 32 + (i / 2) * (M_BLOCK / 2) * 32 : i * 32));
                words[i * 4] = v.x, words[i * 4 + 1] = v.y, words[i * 4 + 2] = v.z, words[i * 4 + 3] = v.w;
            }
        }
    }

    // A operands a[block][step][register], exact in bfloat16 for every code and scale.
    __device__ __forceinline__ void decode(u32 (&a)[2][2][4], u32 pick) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // output feature i of this thread: block i / 2, register row i % 2
#pragma unroll
            for (int c = 0; c < 4; ++c) {  // inputs 8 c + 2 t and 8 c + 2 t + 1: step c / 2, register column c % 2
                u32& v = a[i / 2][c / 2][i % 2 + 2 * (c % 2)];
                if (TRANSPOSED) {
                    const u32 pair = __byte_perm(words[c], words[4 + c], 0x5410);
                    const u32 sign = (pair << (12 - 4 * i)) & 0x80008000u;
                    v = sign | ((i < 2 ? pair << (6 - 4 * i) : pair >> (4 * i - 6)) & 0x01c001c0u);
                } else {
                    v = decode_byte(words[i * 4 + c], pick);
                }
            }
        }
        u32 factor[4] = {factors[0], factors[1], factors[2], factors[3]};
        if ((factor[0] | factor[1] | factor[2] | factor[3]) & 0x80008000u) {  // some scale is above 2: multiply twice
            u32 extra[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const u32 even = factor[q] & 0xffff, odd = factor[q] >> 16;
                extra[q] = (even & 0x8000 ? ((even & 255) - 1) << 7 : 0x3f80u) | (odd & 0x8000 ? ((odd & 255) - 1) << 23 : 0x3f800000u);
                factor[q] = (even & 0x8000 ? 0x7f00u : even) | (odd & 0x8000 ? 0x7f000000u : odd << 16);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    u32& v = a[i / 2][c / 2][i % 2 + 2 * (c % 2)];
                    v = mul_bf16x2(v, extra[TRANSPOSED ? c : i]);
                }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                u32& v = a[i / 2][c / 2][i % 2 + 2 * (c % 2)];
                v = mul_bf16x2(v, factor[TRANSPOSED ? c : i]);
            }
    }
};

__device__ __forceinline__ u64 x_descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

template <int N>
__device__ __forceinline__ void multiply(float (&acc)[2][N / 2], u32 (&a)[2][2][4], u64 desc) {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int b = 0; b < 2; ++b) WGMMA<N>::run(acc[b], a[b][s], desc + s * 2);
    wgmma_commit();
}

// One more step with a bfloat16 factor from global memory: `rank` is 32, or 64 for mode 3.
template <int MODE, int N>
__device__ __forceinline__ void multiply_lora(float (&acc)[2][N / 2], const Params& p, const Tiles& tiles, int feature, u32 x) {
    constexpr int RANK = MODE == 3 ? 64 : 32;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int part = 0; part < RANK / 32; ++part) {
        u32 a[2][2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u16* factor = MODE == 0 && i >= 2 ? p.lora1 : p.lora0;
            const int row = feature + (MODE == 0 ? i % 2 : i);
            const u32* source = (const u32*)(factor + (long long)tiles.expert * p.lora_stride + (long long)row * RANK) + part * 16 + t;
#pragma unroll
            for (int c = 0; c < 4; ++c) a[i / 2][c / 2][i % 2 + 2 * (c % 2)] = source[c * 4];
        }
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int b = 0; b < 2; ++b)
                WGMMA<N>::run(acc[b], a[b][s], x_descriptor(x) + part * 4 + (MODE == 0 ? b * 4 : 0) + s * 2);
        wgmma_commit();
        wgmma_wait<0>();
    }
}

template <int MODE, int N>
__device__ __forceinline__ void store_tile(float (&acc)[2][N / 2], const Params& p, const Tiles& tiles, int feature) {
    const int first = threadIdx.x % 4 * 2;
    const Situ situ(p);
    // Elements from one row to the next of the output (and of a | b).
    const long long stride = MODE == 0 ? p.ffn : MODE == 2 ? 2 * p.ffn : p.latent;
    long long offset = (tiles.row0 + first) * stride + feature;
    long long second = (long long)(tiles.row0 + first) * (MODE == 0 ? 2 * p.ffn : p.ffn) + feature;  // of `extra`
    uint2 pre[2][2];  // mode 2: a and b of the next two columns
    auto load_pre = [&](int c, long long o, bool live) {
        pre[c][0] = pre[c][1] = make_uint2(0, 0);
        if (live) {
            pre[c][0] = *(const uint2*)(p.pre_in + o);
            pre[c][1] = *(const uint2*)(p.pre_in + o + p.ffn);
        }
    };
    if (MODE == 2)
        for (int c = 0; c < 2; ++c) load_pre(c, offset + c * stride, first + c < tiles.valid);
#pragma unroll
    for (int j = 0; j < N / 8; ++j, offset += 8 * stride, second += 8 * (MODE == 0 ? 2 * p.ffn : p.ffn)) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const bool live = j * 8 + first + c < tiles.valid;
            const long long o = offset + c * stride;
            const float v0 = acc[0][j * 4 + c], v1 = acc[0][j * 4 + 2 + c];
            const float v2 = acc[1][j * 4 + c], v3 = acc[1][j * 4 + 2 + c];
            if (MODE == 0) {
                const u32 h = pack_bf16x2(situ.forward(v0, v2), situ.forward(v1, v3));
                if (live) *(u32*)(p.out + o) = h;
                if (p.extra && live) {
                    u16* extra = p.extra + second + c * 2 * p.ffn;
                    *(u32*)extra = pack_bf16x2(v0, v1);
                    *(u32*)(extra + p.ffn) = pack_bf16x2(v2, v3);
                }
            } else if (MODE == 2) {
                const uint2 a = pre[c][0], b = pre[c][1];
                if (j + 1 < N / 8) load_pre(c, o + 8 * stride, j * 8 + 8 + first + c < tiles.valid);
                float h[4], da[4], db[4];
                situ.backward(low_float(a.x), low_float(b.x), v0, h[0], da[0], db[0]);
                situ.backward(high_float(a.x), high_float(b.x), v1, h[1], da[1], db[1]);
                situ.backward(low_float(a.y), low_float(b.y), v2, h[2], da[2], db[2]);
                situ.backward(high_float(a.y), high_float(b.y), v3, h[3], da[3], db[3]);
                if (live) {
                    *(uint2*)(p.out + o) = make_uint2(pack_bf16x2(da[0], da[1]), pack_bf16x2(da[2], da[3]));
                    *(uint2*)(p.out + o + p.ffn) = make_uint2(pack_bf16x2(db[0], db[1]), pack_bf16x2(db[2], db[3]));
                }
                if (p.extra && live)
                    *(uint2*)(p.extra + second + c * p.ffn) = make_uint2(pack_bf16x2(h[0], h[1]), pack_bf16x2(h[2], h[3]));
            } else if (live) {
                *(uint2*)(p.out + o) = make_uint2(pack_bf16x2(v0, v1), pack_bf16x2(v2, v3));
            }
        }
    }
}

template <int MODE, int N>
__device__ __forceinline__ void consume_tile(const Params& p, const Tiles& tiles, Ring& ring, u32 smem, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int group = threadIdx.x / 128 - 1, warp = (threadIdx.x / 32) % 4;
    const int k_iters = (MODE == 0 || MODE == 2 ? p.latent : MODE == 1 ? p.ffn : 2 * p.ffn) / 64;
    // First output feature of this thread; it owns two (mode 0) or four neighbours.
    const int feature = MODE == 0 ? tiles.m * (M_BLOCK / 2) + group * 64 + warp * 16 + g * 2
                                  : tiles.m * M_BLOCK + group * 128 + warp * 32 + g * 4;
    // Where this thread reads in a stage. Forward: 32-byte rows, their halves swapped where bit 2 of the row is set.
    // Transposed: 128-byte rows, their 16-byte chunks permuted by the row's last three bits.
    u32 codes_at, odd_at = 0, factors_at = X_BYTES + W_BYTES;
    if (MODE >= 2) {
        const u32 chunk = (group % 2) * 4 + warp, box = X_BYTES + (group / 2) * 2 * W_BOX_BYTES;
        codes_at = box + (2 * t) * 128 + ((chunk ^ (2 * t)) << 4) + 2 * g;
        odd_at = box + (2 * t + 1) * 128 + ((chunk ^ (2 * t + 1)) << 4) + 2 * g;
        factors_at += (group * 4 + warp) * 128 + t * 32;
    } else {
        const u32 row = MODE == 0 ? group * 64 + warp * 16 + g * 2 : group * 128 + warp * 32 + g * 4;
        codes_at = X_BYTES + row * 32 + ((row >> 2) & 1) * 16;
        factors_at += (group * 128 + warp * 32 + g * 4) * 4;
    }
    const u32 pick = 0x4440u | t;
    float acc[2][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;

    Codes<MODE> codes;
    u32 base = smem + ring.stage * STAGE_BYTES, previous = 0;
    barrier_wait(full + ring.stage * 8, ring.parity);
    codes.load(base + codes_at, base + odd_at, base + factors_at, 0);
#pragma unroll 1
    for (int k = 0; k < k_iters; ++k) {
        const u64 desc = x_descriptor(base);
        const u32 stage = ring.stage;
        u32 a0[2][2][4], a1[2][2][4];
        codes.decode(a0, pick);
        codes.load(base + codes_at, base + odd_at, base + factors_at, 1);
        multiply<N>(acc, a0, desc);
        wgmma_wait<1>();
        if (k > 0 && lane == 0) barrier_arrive(empty + previous * 8);
        previous = stage;
        // The next stage's barrier is asked early and its codes are read before the products that hide the latency.
        ring.next();
        const bool more = k + 1 < k_iters;
        const bool ready = more && barrier_test(full + ring.stage * 8, ring.parity);
        codes.decode(a1, pick);
        base = smem + ring.stage * STAGE_BYTES;
        if (ready) codes.load(base + codes_at, base + odd_at, base + factors_at, 0);
        multiply<N>(acc, a1, desc + 4);
        if (more && !ready) {
            barrier_wait(full + ring.stage * 8, ring.parity);
            codes.load(base + codes_at, base + odd_at, base + factors_at, 0);
        }
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(empty + previous * 8);
    if (p.lora0 != nullptr) {
        barrier_wait(full + ring.stage * 8, ring.parity);
        multiply_lora<MODE, N>(acc, p, tiles, feature, smem + ring.stage * STAGE_BYTES);
        if (lane == 0) barrier_arrive(empty + ring.stage * 8);
        ring.next();
    }
    store_tile<MODE, N>(acc, p, tiles, feature);
}

template <int MODE>
__device__ __forceinline__ void grouped(const TensorMap* map_x, const TensorMap* map_w0, const TensorMap* map_w1,
                                        const TensorMap* map_u, const Params& p) {
    extern __shared__ u8 dynamic_smem[];
    __shared__ int row_start[MAX_EXPERTS + 1], tile_start[MAX_EXPERTS + 1];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    const u32 smem = (shared_address(dynamic_smem) + 1023) & ~1023u;
    const u32 full = shared_address(barriers), empty = full + STAGES * 8;
    if (threadIdx.x < 32) prefix_counts(p.counts, p.experts, row_start, tile_start);
    if (threadIdx.x == 64) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + s * 8, 129);  // the producer's threads and the byte count
            barrier_init(empty + s * 8, 4 * GROUPS);  // one arrival a consumer warp
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int m_tiles = (MODE == 0 ? 2 * p.ffn : MODE == 2 ? p.ffn : p.latent) / M_BLOCK;
    Tiles tiles(row_start, tile_start, m_tiles, p);
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        produce<MODE>(map_x, map_w0, map_w1, map_u, p, tiles, smem, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        Ring ring;
        for (; tiles.locate(); tiles.next()) {
            if (N_SMALL < N_LARGE && tiles.valid <= N_SMALL) consume_tile<MODE, N_SMALL>(p, tiles, ring, smem, full, empty);
            else consume_tile<MODE, N_LARGE>(p, tiles, ring, smem, full, empty);
        }
    }
}

#define ENTRY(NAME, MODE)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                   \
        NAME(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_w0,                            \
             const __grid_constant__ TensorMap map_w1, const __grid_constant__ TensorMap map_u, const __grid_constant__ Params p) { \
        grouped<MODE>(&map_x, &map_w0, &map_w1, &map_u, p);                                                                \
    }
ENTRY(experts_gate, 0)
ENTRY(experts_down, 1)
ENTRY(experts_down_backward, 2)
ENTRY(experts_gate_backward, 3)
