// The problem, as Python passes it (native/abi.py declares the same fields), and scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

#include "simd.h"

constexpr int TILE = 64;            // queries, and keys, of a tile
constexpr int VECTORS = TILE / W;   // vectors in a row of a tile

struct View {  // (B, H, T, D): strides in floats; the last dimension is contiguous
    float* data;
    int64_t batch, head, token;
    float* row(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
};

struct NativeProblem {
    int64_t B, H, T, S, D;
    View q, k, v;
    View base_q;                        // queries before rotation, for gates and tables; no data: q
    View gate_k;                        // no data: gates see the attention logits
    float* e;                           // table of positions, (P, D) or (H, P, D), or null
    int64_t P, e_head;                  // e_head: floats between the tables of two heads; 0: one table
    float* knots;                       // (N,), or null
    int64_t N;
    float *segment_slope, *segment_intercept;  // (B, H, T, N + 1)
    float* m;                           // (H,), or null
    float* relative;                    // table of distances, (R, D) or (H, R, D), or null
    int64_t R, relative_head, far_last;  // relative_head: floats between the tables of two heads; 0: one table
    float* distance_bias;               // (H, biases), or null
    int64_t biases;
    float* distance_slope;              // (H,), or null
    int64_t* lengths;                   // (B,), or null
    uint64_t seed;
    int64_t threshold;                  // weights whose 32 bits are below are dropped; 0: no dropout
    float scale, limit, keep_scale;     // keep_scale = 1/(1 − dropout)
    float e_scale, relative_scale;      // of base_q·e
    int32_t groups;                     // number of groups of a head's queries, each with its own partial sums
    int32_t threads;
    int32_t poison;                     // whether to fill scratch memory with NaN (for tests)

    bool gates() const { return e || knots || m; }
    bool separate() const { return gate_k.data != nullptr; }
    bool rotated() const { return base_q.data != nullptr; }
    bool distances() const { return relative || distance_bias || distance_slope; }
    int64_t heads() const { return B * H; }
    int64_t start() const { return S - T; }  // the token of the first query
    int64_t tiles() const { return (S + TILE - 1) / TILE; }
    long width() const { return (D + W - 1) / W * W; }  // a row of D floats, padded to whole vectors
    int64_t tokens(int64_t b) const { return lengths ? (lengths[b] < S ? lengths[b] : S) : S; }
    // From this position on, the bias is constant and gates have no gradient.
    float saturation() const {
        const float never = std::numeric_limits<float>::infinity();
        if (m) return never;
        return e ? float(P - 1) : knots ? limit : 0.0f;
    }
};

// An array of floats, aligned to a cache line, freed at the end of the scope.
class Scratch {
  public:
    Scratch(const NativeProblem& problem, size_t floats) {
        const size_t bytes = (floats * sizeof(float) + 4096) / 64 * 64;
        data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
        if (!data_) throw std::bad_alloc();
        if (problem.poison)
            for (size_t n = 0; n < bytes / sizeof(float); ++n) data_[n] = std::numeric_limits<float>::quiet_NaN();
    }
    ~Scratch() { std::free(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    operator float*() const { return data_; }

  private:
    float* data_;
};

static inline void zero(float* p, size_t floats) { std::memset(p, 0, floats * sizeof(float)); }

// Tokens a … b − 1 of a head as rows of `width` floats, times `scale`; padding is 0.
static void pack_rows(const NativeProblem& x, const View& from, int64_t batch, int64_t head, int64_t a, int64_t b, float scale, float* to) {
    const long width = x.width();
    for (int64_t t = a; t < b; ++t, to += width) {
        const float* row = from.row(batch, head, t);
        for (int64_t d = 0; d < x.D; ++d) to[d] = row[d] * scale;
        for (long d = x.D; d < width; ++d) to[d] = 0;
    }
}

// `count` rows of D floats, transposed and times `scale`: a (D × TILE) matrix for each TILE of them; past the last, 0.
template <class RowOf> static void pack_columns(int64_t D, int64_t count, float scale, float* to, RowOf row_of) {
    for (int64_t first = 0; first < count; first += TILE, to += D * TILE)
        for (int j = 0; j < TILE; j += W) {
            const int rows = int(std::max<int64_t>(0, std::min<int64_t>(W, count - first - j)));
            int64_t d = 0;
            for (; rows == W && d + W <= D; d += W) {
                vf block[W];
                for (int l = 0; l < W; ++l) block[l] = load(row_of(first + j + l) + d) * scale;
                transpose(block);
                for (int l = 0; l < W; ++l) store(to + (d + l) * TILE + j, block[l]);
            }
            for (int l = 0; l < W; ++l) {
                const float* row = l < rows ? row_of(first + j + l) : nullptr;
                for (int64_t rest = d; rest < D; ++rest) to[rest * TILE + j + l] = row ? row[rest] * scale : 0;
            }
        }
}

static void pack_columns(const NativeProblem& x, const View& from, int64_t b, int64_t h, int64_t tokens, float* to) {
    pack_columns(x.D, tokens, 1, to, [&](int64_t t) { return from.row(b, h, t); });
}
