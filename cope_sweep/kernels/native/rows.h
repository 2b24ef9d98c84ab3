// One row of a tile, from logits to scores: keys are visited from the query to earlier tokens. Forward and backward use it.
#pragma once

#include "problem.h"

// How a contextual position becomes a bias. STICK has none: its weights are those of stick-breaking, and a row's position is
// the logarithm of what the visited keys have left.
enum Kind { NONE, TABLE, SEGMENTS, SLOPE_ONLY, STICK };

static inline Kind kind_of(const NativeProblem& x) {
    return x.stick_breaking ? STICK : x.e ? TABLE : x.knots ? SEGMENTS : x.m ? SLOPE_ONLY : NONE;
}

// The state of a query between tiles.
struct Row {
    double position;  // the sum of gates so far; in double, so that rounding errors do not add up
    int segment;     // how many knots are ≤ position
    int share_segment;  // the same of the share of the distance
    float far;       // the bias of all keys from the saturation position on
    float m;
    float gate_bias;
    const float* table;  // products with the table of positions; W floats after its last entry can be read
    const float *slope, *intercept;
    const float* relative;  // products with the table of distances
    const float* key_bias;  // of each key
};

// The bias of W keys at positions p, by a table whose last entry is `last`.
struct TableBias {
    vi index;
    vf fraction, difference, bias;
    inline TableBias(const float* table, float last, vf p) {
        vf stopped = vmin(splat(last), p);
        vi whole = truncate(vmax(stopped, vf{}));  // entry 0 for NaN, whose fraction is NaN
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
    inline SegmentBias(const float* knots, int64_t count, const float* slopes, const float* intercepts, vf p, int& segment) : stopped(p) {
        slope = splat(slopes[segment]);
        vf intercept = splat(intercepts[segment]);
        const float last = stopped[0];
        while (segment < count && knots[segment] <= last) {
            vi beyond = stopped >= knots[segment];
            ++segment;
            slope = select(beyond, splat(slopes[segment]), slope);
            intercept = select(beyond, splat(intercepts[segment]), intercept);
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
// and no key is after the query. `gate` makes gates from logits.
template <bool FULL, class Gate>
static inline double walk(Gate gate, int vectors, int64_t visible, double position, vf* gates, vf* positions) {
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) {
        if (!FULL && v >= vectors) break;
        gates[v] = gate(v);
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

// The numerators of the shares of W keys, the farthest of which is at this distance; 0 after the query.
static inline vf share_distances(const NativeProblem& x, int64_t farthest) {
    if (farthest >= W - 1) return reversed(load(x.share_distance + farthest - (W - 1)));
    vf u{};
    for (int l = 0; l <= farthest; ++l) u[l] = x.share_distance[farthest - l];
    return u;
}

// Add the scores by distance of query i, and by key, to the keys j … j + W·vectors − 1; those after the query get arbitrary
// values.
static inline void add_biases(const NativeProblem& x, Row& row, int64_t h, int64_t i, int64_t j, int vectors, vf* scores) {
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
    if (x.share_slope) {
        const int64_t first = h * x.share_segments();
        const float factor = x.share_query[i - x.start()];
        for (int v = vectors - 1; v >= 0; --v) {
            const vf share = share_distances(x, i - j - v * W) * factor;
            scores[v] += SegmentBias(x.share_knots, x.share_N, x.share_slope + first, x.share_intercept + first, share, row.share_segment).bias;
        }
    }
    for (int v = 0; row.key_bias && v < vectors; ++v) {
        const int64_t first = j + v * W;
        if (first + W <= x.S)
            scores[v] += load(row.key_bias + first);
        else
            for (int l = 0; first + l < x.S; ++l) scores[v][l] += row.key_bias[first + l];
    }
}

// How the scores of a row depend on its positions, for the backward pass.
struct Details {
    vf gates[VECTORS], positions[VECTORS];
    vf slopes[VECTORS];     // of the bias
    vf fractions[VECTORS];  // TABLE: how far a position is from its entry to the next
    vi indices[VECTORS];    // TABLE: the entry
};

// The scores of a row: logits s, minus the log-sum-exp `lse` (BACKWARD), plus all biases. Returns whether positions counted,
// so that there are details (all of them with BACKWARD). FULL: no key is after the query, and there are no distance scores,
// no dropout and no slope m.
template <Kind kind, bool FULL, bool BACKWARD>
static inline bool row_scores(const NativeProblem& x, Row& row, int64_t h, int64_t i, int64_t j, int vectors, float saturation, const float* s,
                              const float* gate_logits, float lse, vf* scores, Details& details) {
    const bool counts = kind != NONE && kind != STICK && row.position < saturation;
    const vf base = splat(-lse);
    if (counts) {
        const auto gate = [&](int v) { return sigmoid(load(gate_logits + v * W) + row.gate_bias); };
        const auto log_gate = [&](int v) { return log_sigmoid(load(gate_logits + v * W)); };
        row.position = kind == SLOPE_ONLY && x.log_gates
                           ? walk<FULL>(log_gate, vectors, i - j + 1, row.position, details.gates, details.positions)
                           : walk<FULL>(gate, vectors, i - j + 1, row.position, details.gates, details.positions);
        if (kind == TABLE && row.position >= saturation) row.far = row.table[x.P - 1];
#pragma GCC unroll 16
        for (int v = VECTORS - 1; v >= 0; --v) {
            if (!FULL && v >= vectors) continue;
            if (kind == SLOPE_ONLY && x.log_gates) details.positions[v] -= details.gates[v];  // of the keys after this one
            const vf p = details.positions[v];
            scores[v] = BACKWARD ? load(s + v * W) + base : load(s + v * W);
            if (BACKWARD) details.slopes[v] = vf{};
            if (kind == TABLE) {
                const TableBias entry(row.table, float(x.P - 1), p);
                scores[v] += entry.bias;
                if (BACKWARD) {
                    details.slopes[v] = select(p < float(x.P - 1), entry.difference, vf{});
                    details.fractions[v] = entry.fraction;
                    details.indices[v] = entry.index;
                }
            } else if (kind == SEGMENTS) {
                const SegmentBias entry(x.knots, x.N, row.slope, row.intercept, vmin(splat(x.limit), p), row.segment);
                scores[v] += entry.bias;
                if (BACKWARD) details.slopes[v] = select(p < x.limit, entry.slope, vf{});
            }
            if (!FULL && x.m) {
                scores[v] += row.m * p;
                if (BACKWARD) details.slopes[v] += row.m;
            }
        }
    } else {
        const vf constant = BACKWARD ? base + row.far : splat(row.far);
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v)
            if (FULL || v < vectors) scores[v] = load(s + v * W) + constant;
    }
    if (!FULL && x.additive()) add_biases(x, row, h, i, j, vectors, scores);
    return counts;
}

// The weights of stick-breaking, from a row's scores: those of earlier keys, before dropout, and the keys' shares σ(score).
template <bool FULL>
static inline void break_stick(Row& row, int vectors, int64_t earlier, const vf* scores, vf* shares, vf* weights) {
    vf left[VECTORS];  // the logarithm of what a key leaves; then of what is left before it
    row.position = walk<FULL>([&](int v) { return log_sigmoid(-scores[v]); }, vectors, earlier, row.position, left, weights);
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) {
        if (!FULL && v >= vectors) continue;
        shares[v] = sigmoid(scores[v]);
        weights[v] = shares[v] * vexp(weights[v] - left[v]);
        if (!FULL) weights[v] = select(visible_lanes(earlier - v * W), weights[v], vf{});
    }
}

// Below this logarithm, nothing is left of a stick.
constexpr float EXHAUSTED = -87;

// Vectors of a row whose first keys are visible.
template <bool FULL> static inline int row_vectors(int64_t visible) {
    return FULL || visible >= TILE ? VECTORS : int((visible + W - 1) / W);
}

// The dropout mask of kernels/dropout.py: `seed` is that of the sequence, `head` an index among its heads.
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

// The weight of query i's own value, after dropout, if what no key has taken is kept: `left` is its logarithm.
static inline float remainder_weight(const NativeProblem& x, int64_t b, int64_t h, int64_t i, float left) {
    if (!x.keep_remainder) return 0;
    return std::exp(left) * (x.threshold ? dropout_factor(x, dropout_row(x.seeds[b], h, i), i)[0] : 1.0f);
}
