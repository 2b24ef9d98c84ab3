// The problem, as Python passes it (abi.py declares its fields, and abi.h is made from them), scratch memory, and packing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

#include "abi.h"
#include "simd.h"

using abi::Gradients;
using abi::View;

constexpr int TILE = 64;            // queries, and keys, of a tile
constexpr int VECTORS = TILE / W;   // vectors in a row of a tile

struct NativeProblem : abi::Problem {
    explicit NativeProblem(const abi::Problem& given) : abi::Problem(given) {}
    bool gates() const { return e || knots || m; }
    bool separate() const { return gate_k.data != nullptr; }
    bool rotated() const { return base_q.data != nullptr; }
    bool additive() const { return relative || distance_bias || distance_slope || key_bias || share_slope; }  // biases without a position
    bool simple() const { return !additive() && !threshold && !m; }  // scores need no more than logits and a table or segments
    int64_t heads() const { return B * H; }
    int64_t items() const { return heads() * groups; }  // units of work; each has its own partial sums
    int64_t start() const { return S - T; }  // the token of the first query
    int64_t query(int64_t b, int64_t h, int64_t t) const { return (b * H + h) * T + t; }  // in arrays of all queries
    int64_t segments() const { return N + 1; }  // between knots
    int64_t share_segments() const { return share_N + 1; }
    // The first tile with a key that query `token`, or one after it, can see.
    int64_t first_tile(int64_t token) const { return window && token >= window ? (token - window + 1) / TILE : 0; }
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

static inline float from_bfloat16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

// The nearest bfloat16, ties to even.
static inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
    return x != x ? 0x7FC0 : uint16_t(rounded >> 16);
}

template <class Number> static inline Number* row_of(const View& x, int64_t b, int64_t h, int64_t t) {
    return static_cast<Number*>(x.data) + b * x.batch + h * x.head + t * x.token;
}

// Row t of a head, D floats: in place, or converted into `buffer`. `rest`, where it has data, is added to bfloat16 numbers.
static inline const float* read_row(const View& x, int64_t b, int64_t h, int64_t t, int64_t D, float* buffer, const View& rest = View()) {
    if (!x.is_bfloat16) return row_of<float>(x, b, h, t);
    const uint16_t* row = row_of<uint16_t>(x, b, h, t);
    for (int64_t d = 0; d < D; ++d) buffer[d] = from_bfloat16(row[d]);
    if (!rest.data) return buffer;
    const uint16_t* low = row_of<uint16_t>(rest, b, h, t);
    for (int64_t d = 0; d < D; ++d) buffer[d] += from_bfloat16(low[d]);
    return buffer;
}

// Write `from` times `factor` to row t of a head; null: zeros. What bfloat16 numbers are off by goes to `rest`, where that has data.
static inline void write_row(const View& x, int64_t b, int64_t h, int64_t t, int64_t D, const float* from, float factor = 1, const View& rest = View()) {
    if (x.is_bfloat16) {
        uint16_t* to = row_of<uint16_t>(x, b, h, t);
        if (!from || !rest.data) {
            for (int64_t d = 0; d < D; ++d) to[d] = from ? to_bfloat16(from[d] * factor) : 0;
            return;
        }
        uint16_t* low = row_of<uint16_t>(rest, b, h, t);
#pragma omp simd
        for (int64_t d = 0; d < D; ++d) {
            const uint16_t high = to_bfloat16(from[d] * factor);
            to[d] = high;
            low[d] = to_bfloat16(from[d] * factor - from_bfloat16(high));
        }
        return;
    }
    float* to = row_of<float>(x, b, h, t);
    if (!from) return zero(to, D);
    for (int64_t d = 0; d < D; ++d) to[d] = from[d] * factor;
}

// Tokens a … b − 1 of a head as rows of `width` floats, times `scale`; padding is 0.
static void pack_rows(const NativeProblem& x, const View& from, int64_t batch, int64_t head, int64_t a, int64_t b, float scale, float* to) {
    const long width = x.width();
    for (int64_t t = a; t < b; ++t, to += width) {
        const float* row = read_row(from, batch, head, t, x.D, to);
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
    if (!from.is_bfloat16) return pack_columns(x.D, tokens, 1, to, [&](int64_t t) { return row_of<float>(from, b, h, t); });
    Scratch rows(x, TILE * x.D);
    for (int64_t first = 0; first < tokens; first += TILE, to += x.D * TILE) {
        const int64_t count = std::min<int64_t>(TILE, tokens - first);
        for (int64_t t = 0; t < count; ++t) read_row(from, b, h, first + t, x.D, rows + t * x.D);
        pack_columns(x.D, count, 1, to, [&](int64_t t) -> const float* { return rows + t * x.D; });
    }
}
