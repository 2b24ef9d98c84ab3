// Products of a tile: a block of TILE queries with TILE keys.
#pragma once

#include "gemm.h"
#include "problem.h"

// The rows of a block that are queries and not padding, first … end − 1, and the same range in steps of 8 for products.
struct Rows {
    int first, end, first8, end8;
    Rows(const NativeProblem& x, int64_t block, int64_t tokens) {
        auto clip = [](int64_t r) { return int(r < 0 ? 0 : r > TILE ? TILE : r); };
        first = clip(x.start() - block * TILE);
        end = clip(tokens - block * TILE);
        if (end < first) end = first;
        first8 = first / 8 * 8;
        end8 = (end + 7) / 8 * 8;
    }
    bool none() const { return first == end; }

    // Write zeros to the rows that are in the range of products only.
    void clear_around(float* tile, long width) const {
        zero(tile + first8 * width, (first - first8) * width);
        zero(tile + end * width, (end8 - end) * width);
    }

    // The block's rows of a (B, H, T, D) tensor, times `scale`.
    void pack(const NativeProblem& x, const View& from, int64_t b, int64_t h, int64_t block, float scale, float* to) const {
        const int64_t query = block * TILE - x.start();
        pack_rows(x, from, b, h, query + first, query + end, scale, to + first * x.width());
        clear_around(to, x.width());
    }
};

// C = Q·Kᵀ of a tile, as far as it is not above the diagonal.
static inline void logits(const Rows& rows, bool diagonal, const float* q, long width, const float* k_columns, int64_t D, float* c) {
    if (!diagonal) {
        gemm(q + rows.first8 * width, width, 1, k_columns, TILE, c + rows.first8 * TILE, TILE, rows.end8 - rows.first8, TILE, int(D), false);
        return;
    }
    for (int r = rows.first8; r < rows.end8; r += 8)
        gemm(q + r * width, width, 1, k_columns, TILE, c + r * TILE, TILE, 8, (r + 8 + W - 1) / W * W, int(D), false);
}

// C += A·B for a tile A of weights or their gradients, and rows B of keys or values.
static inline void weighted(const Rows& rows, bool diagonal, const float* a, const float* b, long width, float* c) {
    if (!diagonal) {
        gemm(a + rows.first8 * TILE, TILE, 1, b, width, c + rows.first8 * width, width, rows.end8 - rows.first8, int(width), TILE, true);
        return;
    }
    for (int r = rows.first8; r < rows.end8; r += 8)
        gemm(a + r * TILE, TILE, 1, b, width, c + r * width, width, 8, int(width), r + 8, true);
}

// C += Aᵀ·B for a tile A, and rows B of queries or output gradients.
static inline void weighted_back(const Rows& rows, bool diagonal, const float* a, const float* b, long width, float* c) {
    if (!diagonal) {
        const int r = rows.first8;
        gemm(a + r * TILE, 1, TILE, b + r * width, width, c, width, TILE, int(width), rows.end8 - r, true);
        return;
    }
    for (int j = 0; j < rows.end8; j += 8) {
        const int r = j > rows.first8 ? j : rows.first8;
        gemm(a + r * TILE + j, 1, TILE, b + r * width, width, c + j * width, width, 8, int(width), rows.end8 - r, true);
    }
}
