// The experts kernel, part 1 of 3: sizes, arguments, small instructions, the activation, tiles and the ring of stages.
//
// Generated before this file: GROUPS consumer warpgroups, N_SMALL and N_LARGE, the rows of x a tile may have, and
// WGMMA<N> for both (m64nNk16, f32 += bf16 in registers x bf16 in shared memory). With three widths in one kernel the
// assembler runs out of registers and serialises every product, hence two widths a kernel and one kernel for a range of
// rows per expert. `kernel_grouped.cu` explains the whole.

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
        "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(bar), "r"(parity)
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
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(dst), "l"((u64)map), "r"(c0), "r"(c1), "r"(bar)
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
__device__ __forceinline__ void store_shared_4(u32 a, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v));
}
__device__ __forceinline__ void store_shared_2(u32 a, u32 v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"((u16)v));
}
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
// (1 - u) / (1 + u): two exponentials and one reciprocal an element. The exponents are capped so that the product of
// the denominators stays finite; beyond the caps tanh is -1 and the sigmoid below 1e-17.
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
        : row_start(row_start_), tile_start(tile_start_), m_tiles(m_tiles_), experts(p.experts), rows(p.rows),
          expert(0), tile(blockIdx.x) {}
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
        // Never past the rows there are, whatever the counts say.
        valid = max(min(min(chunk, total - j * chunk), rows - row0), 0);
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
