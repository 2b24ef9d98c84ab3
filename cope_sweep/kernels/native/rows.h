// One row of a tile, from logits to scores: keys are visited from the query to earlier tokens.
#pragma once

#include "gemm.h"
#include "problem.h"

enum Kind { NONE, TABLE, SEGMENTS, SLOPE_ONLY };  // how a contextual position becomes a bias

static inline Kind kind_of(const NativeProblem& x) { return x.e ? TABLE : x.knots ? SEGMENTS : x.m ? SLOPE_ONLY : NONE; }

// The state of a query between tiles.
struct Row {
    double position;  // the sum of gates so far; in double, so that rounding errors do not add up
    int segment;     // how many knots are ≤ position
    float far;       // the bias of all keys from the saturation position on
    float m;
    const float* table;  // products with the table of positions; W floats after its last entry can be read
    const float *slope, *intercept;
    const float* relative;  // products with the table of distances
};

// The bias of W keys at positions p, by a table whose last entry is `last`.
struct TableBias {
    vi index;
    vf fraction, difference, bias;
    inline TableBias(const float* table, float last, vf p) {
        vf stopped = vmin(p, splat(last));
        vi whole = truncate(stopped);
        // W consecutive keys span less than W positions: one load holds all their entries, and one the next ones.
        // Rounding can make it W: the line through the last pair is then followed a little further.
        const int base = whole[W - 1];
        vi lane = vmin(whole - base, splat(int32_t(W - 1)));
        index = lane + base;
        fraction = stopped - to_float(index);
        vf below = pick(load(table + base), lane);
        difference = pick(load(table + base + 1), lane) - below;
        bias = below + fraction * difference;
    }
};

// The bias of W keys by the segments between knots; updates `segment`.
struct SegmentBias {
    vf stopped, slope, bias;
    inline SegmentBias(const NativeProblem& x, const Row& row, vf p, int& segment) {
        stopped = vmin(p, splat(x.limit));
        slope = splat(row.slope[segment]);
        vf intercept = splat(row.intercept[segment]);
        const float last = stopped[0];
        while (segment < x.N && x.knots[segment] <= last) {
            vi beyond = stopped >= x.knots[segment];
            ++segment;
            slope = select(beyond, splat(row.slope[segment]), slope);
            intercept = select(beyond, splat(row.intercept[segment]), intercept);
        }
        bias = intercept + slope * stopped;
    }
};

static inline int segment_of(const NativeProblem& x, float p) {
    int segment = 0;
    while (segment < x.N && x.knots[segment] <= p) ++segment;
    return segment;
}

// A mask of the first `visible` of W keys.
static inline vi visible_lanes(int64_t visible) { return iota() < int32_t(visible < W ? visible : W); }

// Compute gates and positions of the tile's keys; returns the row's position after this tile. FULL: all VECTORS are used,
// and no key is after the query.
template <bool FULL> static inline double walk(const float* logits, int vectors, int64_t visible, double position, vf* gates, vf* positions) {
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) {
        if (!FULL && v >= vectors) break;
        gates[v] = sigmoid(load(logits + v * W));
        if (!FULL) gates[v] = select(visible_lanes(visible - v * W), gates[v], vf{});
        positions[v] = suffix_sums(gates[v]);
    }
#pragma GCC unroll 16
    for (int v = VECTORS - 1; v >= 0; --v) {
        if (!FULL && v >= vectors) continue;
        const double here = position;
        position += double(positions[v][0]);
        positions[v] += float(here);
    }
    return position;
}

// Add the scores by distance of query i to the keys j … j + W·vectors − 1; those after the query get arbitrary values.
static inline void add_distance_scores(const NativeProblem& x, const Row& row, int64_t h, int64_t i, int64_t j, int vectors, vf* scores) {
    auto add = [&](const float* table, int64_t size, bool far_last) {
        for (int v = 0; v < vectors; ++v) {
            const int64_t nearest = i - j - v * W - (W - 1), farthest = i - j - v * W;
            if (nearest >= 0 && farthest < size) {
                scores[v] += reversed(load(table + nearest));
            } else if (nearest >= size) {
                if (far_last) scores[v] += table[size - 1];
            } else {
                for (int l = 0; l < W; ++l) {
                    const int64_t distance = farthest - l;
                    if (distance >= 0 && (distance < size || far_last)) scores[v][l] += table[distance < size ? distance : size - 1];
                }
            }
        }
    };
    if (x.relative) add(row.relative, x.R, x.far_last);
    if (x.distance_bias) add(x.distance_bias + h * x.biases, x.biases, true);
    if (x.distance_slope) {
        const float m = x.distance_slope[h];
        for (int v = 0; v < vectors; ++v) scores[v] += m * to_float(int32_t(i - j - v * W) - iota());
    }
}

// The dropout mask of kernels/dropout.py.
static inline uint32_t dropout_row(uint64_t seed, uint64_t head, uint64_t query) {
    uint64_t x = seed + ((head << 32) | query) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return uint32_t(x ^ (x >> 31));
}

// 1/(1 − p) where the weight is kept, else 0, for keys j … j + W − 1.
static inline vf dropout_factor(const NativeProblem& x, uint32_t row, int64_t j) {
    vu bits = row + ((vu)iota() + uint32_t(j)) * 0x9E3779B9u;
    bits ^= bits >> 16;
    bits *= 0x7FEB352Du;
    bits ^= bits >> 15;
    bits *= 0x846CA68Bu;
    bits ^= bits >> 16;
    return select((vi)(bits >= uint32_t(x.threshold)), splat(x.keep_scale), vf{});
}

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
