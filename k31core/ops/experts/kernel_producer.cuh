// The experts kernel, part 2 of 3: the producer warpgroup. It fills the ring of stages: x and the packed codes by the
// bulk tensor engine, scale bytes turned into bfloat16 factors by its threads.

// A scale byte s as the bfloat16 2^(s - 1), which also undoes the decoder's 2^-126. Above s = 128 that leaves bfloat16:
// such a byte is passed as it is with bit 15 set, and the consumer multiplies twice.
__device__ __forceinline__ u32 factor_code(u32 s) { return s <= 128 ? (s + 126) << 7 : 0x8000u | s; }

__device__ __forceinline__ u32 byte_of(u32 word, u32 index) { return __byte_perm(word, 0, 0x4440u + index); }

template <int MODE>
__device__ void produce(const TensorMap* map_x, const TensorMap* map_w0, const TensorMap* map_w1,
                        const TensorMap* map_u, const Params& p, Tiles tiles, u32 smem, u32 full, u32 empty) {
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
            scale = p.scale0 + ((long long)tiles.expert * w_rows + tid / 2) * pitch + tiles.m * (M_BLOCK / 32) +
                    (tid & 1) * 2 * GROUPS;
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
                    for (int b = 0; b < GROUPS / 2; ++b) {
                        const int column = tiles.m * (M_BLOCK / 2) + b * 128;
                        copy_tile(w + b * 2 * W_BOX_BYTES, second ? map_w1 : map_w0, column, row, bar);
                    }
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
                        for (int b = 0; b < GROUPS; ++b)
                            bytes[b] = *(const uint4*)(scale + b * GROUP_ROWS * pitch + (k + 1) * 2);
                } else {
                    const int f = tid / 2;  // input row of this step: 16 s + 8 h + 2 t + j
                    const int slot = ((f >> 1) & 3) * 16 + (f >> 3) * 2 + (f & 1);
#pragma unroll
                    for (int i = 0; i < 2 * GROUPS; ++i) {
                        const u32 code = factor_code(byte_of(words[i / 4], i % 4));
                        store_shared_2(factors + (((tid & 1) * 2 * GROUPS + i) * 64 + slot) * 2, code);
                    }
                    const int half = k_iters / 2;
                    if (k + PREFETCH < k_iters) {
                        const bool second = MODE == 3 && k + PREFETCH >= half;
                        const int ahead = second ? k + PREFETCH - half : k + PREFETCH;
                        prefetch(scale + (second ? to_second : 0) + (long long)ahead * 64 * pitch);
                    }
                    if (k + 1 < k_iters) {
                        const bool second = MODE == 3 && k + 1 >= half;
                        const int next = second ? k + 1 - half : k + 1;
                        const u8* source = scale + (second ? to_second : 0) + (long long)next * 64 * pitch;
#pragma unroll
                        for (int b = 0; b < GROUPS / 2; ++b) words[b] = *(const u32*)(source + b * 4);
                    }
                }
            }
            barrier_arrive(bar);
        }
    }
}
