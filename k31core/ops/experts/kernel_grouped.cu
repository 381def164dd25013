// Grouped MXFP4 expert products for Hopper (sm_90a): out^T = W_e x_e^T with W decoded in registers. Part 3 of 3: the
// consumers and the four entry points; `kernel_device.cuh` and `kernel_producer.cuh` stand before it in one source.
//
// A block is one producer warpgroup and two or four consumer warpgroups, persistent over tiles (expert, 128 rows of W a
// consumer, up to 152 rows of x). The producer copies packed codes and x tiles into a ring of seven stages. A consumer
// reads codes from shared memory, decodes them straight into the A operand of wgmma (registers) and multiplies with x
// as the B operand (shared memory, 128-byte swizzle). Which row of W stands in which row of the A operand is free, so
// each thread owns neighbouring output features and stores them without a transpose.
//
// Modes (rows of W are input-contiguous, two codes a byte):
//   0 gate           K = latent  A = w1 | w3 (64 + 64 rows a warpgroup)   out h = SiTU-GLU(a, b), optional a | b
//   1 down           K = ffn     A = w2                                   out y
//   2 down backward  K = latent  A = w2 transposed                        out da | db from a | b and dh, optional h
//   3 gate backward  K = 2 ffn   A = w1 transposed, then w3 transposed    out dx
// With LoRA one more step multiplies the bfloat16 factor (`lora0`, `lora1`) with the rows' projections (`map_u`).

// Byte `pick` of the word (two codes) to two bfloat16 times 2^-126: sign to bit 15, the three other bits to bits 8..6.
__device__ __forceinline__ u32 decode_byte(u32 word, u32 pick) {
    const u32 q = __byte_perm(word, 0, pick) * 0x40040u;
    return ((q << 6) & 0x80008000u) | (q & 0x01c001c0u);
}

// What a thread reads from shared memory for 32 inputs, before it is decoded.
template <int MODE> struct Codes {
    static constexpr bool TRANSPOSED = MODE >= 2;
    u32 words[16];  // forward: 16 bytes of four rows; transposed: four features of eight inputs, even then odd ones
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
                const int row = MODE == 0 ? i % 2 + (i / 2) * (M_BLOCK / 2) : i;
                const uint4 v = load_shared_16(base + row * 32);
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
                extra[q] = (even & 0x8000 ? ((even & 255) - 1) << 7 : 0x3f80u) |
                           (odd & 0x8000 ? ((odd & 255) - 1) << 23 : 0x3f800000u);
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
__device__ __forceinline__ void multiply_lora(float (&acc)[2][N / 2], const Params& p, const Tiles& tiles, int feature,
                                              u32 x) {
    constexpr int RANK = MODE == 3 ? 64 : 32;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int part = 0; part < RANK / 32; ++part) {
        u32 a[2][2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u16* factor = MODE == 0 && i >= 2 ? p.lora1 : p.lora0;
            const int row = feature + (MODE == 0 ? i % 2 : i);
            const long long offset = (long long)tiles.expert * p.lora_stride + (long long)row * RANK;
            const u32* source = (const u32*)(factor + offset) + part * 16 + t;
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
                if (p.extra && live) {
                    const uint2 packed = make_uint2(pack_bf16x2(h[0], h[1]), pack_bf16x2(h[2], h[3]));
                    *(uint2*)(p.extra + second + c * p.ffn) = packed;
                }
            } else if (live) {
                *(uint2*)(p.out + o) = make_uint2(pack_bf16x2(v0, v1), pack_bf16x2(v2, v3));
            }
        }
    }
}

template <int MODE, int N>
__device__ __forceinline__ void consume_tile(const Params& p, const Tiles& tiles, Ring& ring, u32 smem, u32 full,
                                             u32 empty) {
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
            if (N_SMALL < N_LARGE && tiles.valid <= N_SMALL)
                consume_tile<MODE, N_SMALL>(p, tiles, ring, smem, full, empty);
            else
                consume_tile<MODE, N_LARGE>(p, tiles, ring, smem, full, empty);
        }
    }
}

#define MAP const __grid_constant__ TensorMap
#define ENTRY(NAME, MODE)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                    \
        NAME(MAP map_x, MAP map_w0, MAP map_w1, MAP map_u, const __grid_constant__ Params p) {                  \
        grouped<MODE>(&map_x, &map_w0, &map_w1, &map_u, p);                                                     \
    }
ENTRY(experts_gate, 0)
ENTRY(experts_down, 1)
ENTRY(experts_down_backward, 2)
ENTRY(experts_gate_backward, 3)
