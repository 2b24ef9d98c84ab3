// One row of a tile in the backward pass; backward.h describes X, Y and D.
#pragma once

#include "block.h"

constexpr int MAX_HELD_TILES = 16;

// Sums of a row between tiles.
struct RowSums {
    float positions;  // Σ of dp so far
    vf far;           // Σ of dscore over saturated keys, of each lane
    vf slope;         // Σ dscore·p, of each lane, where m is
    vf gate_slope;    // Σ y, of each lane, where gates have a bias: its gradient is D·Σ y − Σ right·y
    vf gate_right;    // Σ right·y
    vf scores;        // Σ dscore so far, of each lane, for a bias that becomes linear
    vf segment_score, segment_position;  // Σ dscore and Σ dscore·p in the current segment
};

// Add the gradients of a table's entries: a at `index`, b at the entry after.
static inline void add_to_table(float* table, vi index, vf a, vf b) {
#if defined(__AVX512F__)
    // Indices fall by 0 or 1 from lane to lane, so each run of equal ones is the next entry down: sums of runs are
    // differences of cumulative sums where runs begin.
    const __m512i i = (__m512i)index;
    const __m512i left = _mm512_alignr_epi32(i, _mm512_set1_epi32(-1), 15);
    const __mmask16 begins = _mm512_cmpneq_epi32_mask(i, left);
    const int top = index[0], runs = __builtin_popcount(begins);
    if (runs == top - index[W - 1] + 1) {
        vf sums_a = (vf)_mm512_maskz_compress_ps(begins, (__m512)suffix_sums(a));
        vf sums_b = (vf)_mm512_maskz_compress_ps(begins, (__m512)suffix_sums(b));
        sums_a -= from_right<1>(sums_a);
        sums_b -= from_right<1>(sums_b);
        // Lane 0 is entry top + 1, lane 1 is top, …
        vf shifted = (vf)_mm512_castsi512_ps(_mm512_alignr_epi32((__m512i)(vi)sums_a, _mm512_setzero_si512(), 15));
        float* to = table + top + 1 - (W - 1);
        store(to, load(to) + reversed(shifted + sums_b));
        if (runs == W) table[top - (W - 1)] += sums_a[W - 1];
        return;
    }
#endif
    for (int l = 0; l < W; ++l) {
        table[index[l]] += a[l];
        table[index[l] + 1] += b[l];
    }
}

struct BackwardScratch : BlockScratch {
    Scratch k_rows, v_columns, gate_rows;           // of the head
    Scratch own_dk, own_dv, own_dgate_k;            // of the item, if it is a whole head
    Scratch dout, dq, dbase_q, out_row;             // of the block
    Scratch da, ds, x_tile, y_tile;                 // of a tile
    Scratch x_tiles, y_tiles;                       // of MAX_HELD_TILES tiles
    RowSums sums[TILE];
    float lse[TILE], delta[TILE];
    float dp_total[TILE];    // D
    bool only_total = false;  // visit tiles for D only
    float *dk, *dv, *dgate_k, *de, *drelative, *dkey_bias, *dshares;  // sums of the item

    static size_t head(const NativeProblem& x, bool wanted = true) { return wanted ? x.tiles() * TILE * x.width() : 0; }
    explicit BackwardScratch(const NativeProblem& x)
        : BlockScratch(x, true), k_rows(x, head(x)), v_columns(x, head(x)), gate_rows(x, head(x, x.separate())), own_dk(x, head(x, x.groups == 1)),
          own_dv(x, head(x, x.groups == 1)), own_dgate_k(x, head(x, x.groups == 1 && x.separate())), dout(x, TILE * x.width()),
          dq(x, TILE * x.width()), dbase_q(x, TILE * x.width()), out_row(x, x.width()), da(x, TILE * TILE), ds(x, TILE * TILE),
          x_tile(x, TILE * TILE), y_tile(x, TILE * TILE), x_tiles(x, x.gates() ? TILE * TILE * MAX_HELD_TILES : 0),
          y_tiles(x, x.gates() ? TILE * TILE * MAX_HELD_TILES : 0) {}
};

// The gradients of the slopes and intercepts of a query's segments.
struct SegmentGradients {
    float *slope, *intercept;
    SegmentGradients(const NativeProblem& x, const Gradients& to, int64_t query)
        : slope(to.segment_slope + query * x.segments()), intercept(to.segment_intercept + query * x.segments()) {}
    void clear(const NativeProblem& x) const { zero(slope, x.segments()), zero(intercept, x.segments()); }
};

// Add the gradients of segments' slopes and intercepts; `segment` is the segment before this tile.
static inline void add_to_segments(const NativeProblem& x, RowSums& sums, int segment, int vectors, const vf* positions, const vf* ds,
                                   const SegmentGradients& to) {
    for (int v = vectors - 1; v >= 0; --v) {
        const vf stopped = vmin(splat(x.limit), positions[v]);
        const float last = stopped[0];
        vf rest = ds[v];
        for (; segment < x.N && x.knots[segment] <= last; ++segment) {
            const vi before = stopped < x.knots[segment];
            const vf here = select(before, rest, vf{});
            rest = select(before, vf{}, rest);
            to.slope[segment] += sum(sums.segment_position + here * stopped);
            to.intercept[segment] += sum(sums.segment_score + here);
            sums.segment_score = sums.segment_position = vf{};
        }
        sums.segment_score += rest;
        sums.segment_position += rest * stopped;
    }
}

// One row of a tile. In: logits s and weight gradients da. Out: weights after dropout in s; gradients of scores in ds
// unless null; X and Y unless null, needed if any row of the tile is unsaturated. FULL: as in row_scores.
template <Kind kind, bool FULL>
static inline void backward_row(const NativeProblem& x, BackwardScratch& m, const Gradients& to, int64_t b, int64_t h, int64_t i, int64_t j, int r,
                                float saturation, float* s, const float* gate_logits, const float* da, float* ds, float* x_row, float* y_row) {
    Row& row = m.rows[r];
    RowSums& sums = m.sums[r];
    const int64_t visible = i - j + 1;
    const int vectors = row_vectors<FULL>(visible), segment = row.segment;
    vf scores[VECTORS];
    Details details;
    const bool counts = row_scores<kind, FULL, true>(x, row, h, i, j, vectors, saturation, s, gate_logits, kind == STICK ? 0 : m.lse[r], scores, details);
    const uint32_t dropout = !FULL && x.threshold ? dropout_row(x.seeds[b], h, i) : 0;
    const float delta = m.delta[r];
    vf shares[VECTORS], weights[VECTORS];
    if (kind == STICK) break_stick<FULL>(row, vectors, i - j, scores, shares, weights);
    float nearer = sums.positions;  // STICK: Σ weight·dweight of the keys visited
    // From scores to weights, and to their gradients.
#pragma GCC unroll 16
    for (int v = VECTORS - 1; v >= 0; --v) {
        if (!FULL && v >= vectors) {
            store(s + v * W, vf{});
            continue;
        }
        vf weight = kind == STICK ? weights[v] : vexp(FULL ? scores[v] : vmin(splat(80.0f), scores[v]));
        vf dweight = load(da + v * W), kept = weight;
        if (!FULL && x.threshold) {
            const vf factor = dropout_factor(x, dropout, j + v * W);
            kept *= factor;
            dweight *= factor;
        }
        const int64_t seen = (kind == STICK ? visible - 1 : visible) - v * W;
        if (kind == STICK) {
            // A share takes from its key's weight, and from those of all earlier keys: Σ weight·dweight is delta.
            vf taken = weight * dweight;
            if (!FULL) taken = select(visible_lanes(seen), taken, vf{});
            const vf sums_here = suffix_sums(taken);
            scores[v] = taken * (1.0f - shares[v]) - shares[v] * (delta - (sums_here + nearer));
            nearer += sums_here[0];
        } else {
            scores[v] = weight * (dweight - delta);
        }
        if (!FULL) {  // keys after the query may have any value, even NaN
            kept = select(visible_lanes(seen), kept, vf{});
            scores[v] = select(visible_lanes(seen), scores[v], vf{});
        }
        store(s + v * W, kept);
    }
    if (kind == STICK) sums.positions = nearer;
    if (ds)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) store(ds + v * W, FULL || v < vectors ? scores[v] : vf{});
    if (!counts) {
        if (kind == TABLE || kind == SEGMENTS) {
            vf far{};
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v)
                if (FULL || v < vectors) far += scores[v];
            if (!m.only_total) sums.far += far;
        }
        if (kind == NONE || kind == STICK || !x_row) return;
        for (int v = 0; v < VECTORS; ++v) {
            store(x_row + v * W, x.separate() || (!FULL && v >= vectors) ? vf{} : scores[v]);
            store(y_row + v * W, vf{});
        }
        return;
    }
    // From scores to tables, and to gates.
    if (!m.only_total) {
        if (kind == TABLE)
            for (int v = vectors - 1; v >= 0; --v) {
                const vf above = scores[v] * details.fractions[v];
                add_to_table(m.positions.gradient(r), details.indices[v], scores[v] - above, above);
            }
        if (kind == SEGMENTS)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v)
                if (FULL || v < vectors) sums.scores += scores[v];
        if (kind == SEGMENTS)
            add_to_segments(x, sums, segment, vectors, details.positions, scores, SegmentGradients(x, to, x.query(b, h, i - x.start())));
        if (!FULL && x.m)
            for (int v = 0; v < vectors; ++v) sums.slope += scores[v] * details.positions[v];
    }
    float beyond = sums.positions;
#pragma GCC unroll 16
    for (int v = VECTORS - 1; v >= 0; --v) {
        if (!FULL && v >= vectors) {
            store(x_row + v * W, vf{});
            store(y_row + v * W, vf{});
            continue;
        }
        const bool log_gates = kind == SLOPE_ONLY && x.log_gates;
        const vf dp = scores[v] * details.slopes[v], through = suffix_sums(dp), gate = details.gates[v];
        const vf y = log_gates ? 1.0f - vexp(gate) : gate * (1.0f - gate);
        const vf right = (log_gates ? through : through - dp) + beyond;
        beyond += through[0];
        store(x_row + v * W, (x.separate() ? vf{} : scores[v]) - right * y);
        store(y_row + v * W, y);
        if (x.gate_bias && !m.only_total) {
            const vi visible_here = visible_lanes(visible - v * W);
            sums.gate_slope += FULL ? y : select(visible_here, y, vf{});
            sums.gate_right += FULL ? right * y : select(visible_here, right * y, vf{});
        }
    }
    sums.positions = beyond;
}

// The gradients of scores by distance; each (query, distance) occurs once.
static inline void distance_gradients(const NativeProblem& x, float* drelative, float* dbias, int64_t i, int64_t j, const float* ds) {
    const int visible = int(std::min<int64_t>(TILE, i - j + 1));
    auto add = [&](float* table, int64_t size, bool far_last) {
        if (i - j - (TILE - 1) >= 0 && i - j < size) {
            for (int v = 0; v < VECTORS; ++v) {
                float* entries = table + i - j - v * W - (W - 1);
                store(entries, load(entries) + reversed(load(ds + v * W)));
            }
            return;
        }
        vf far{};
        if (i - j - (TILE - 1) >= size) {
            if (!far_last) return;
            for (int v = 0; v < VECTORS; ++v) far += load(ds + v * W);
            table[size - 1] += sum(far);
            return;
        }
        for (int l = 0; l < visible; ++l) {
            const int64_t distance = i - j - l;
            if (distance < size)
                table[distance] += ds[l];
            else if (far_last)
                table[size - 1] += ds[l];
        }
    };
    if (x.relative) add(drelative, x.R, x.far_last);
    if (x.distance_bias) add(dbias, x.biases, true);
}

// The gradients of the bias by the share of the distance, in one array: of the S numerators, the T factors of queries, and the
// slopes and intercepts of a head.
static inline size_t shares_size(const NativeProblem& x) { return x.share_slope ? x.S + x.T + 2 * x.share_segments() : 0; }

// Add them for a row of a tile; `segment` is the segment before this tile.
static inline void share_gradients(const NativeProblem& x, float* to, int64_t h, int64_t i, int64_t j, int vectors, int segment, const float* ds) {
    float *distance = to, *query = distance + x.S + i - x.start(), *dslope = to + x.S + x.T, *dintercept = dslope + x.share_segments();
    const float factor = x.share_query[i - x.start()], *slopes = x.share_slope + h * x.share_segments();
    vf scores{}, shares{};  // of the segment: Σ ds, and Σ ds·numerator
    const auto finish_segment = [&] {
        const float total = sum(shares);
        dslope[segment] += total * factor;
        dintercept[segment] += sum(scores);
        *query += total * slopes[segment];
        scores = shares = vf{};
    };
    for (int v = vectors - 1; v >= 0; --v) {
        const int64_t farthest = i - j - v * W;
        const vf numerator = share_distances(x, farthest), share = numerator * factor;
        vf rest = load(ds + v * W), slope = splat(slopes[segment]);
        const vf all = rest;
        for (; segment < x.share_N && x.share_knots[segment] <= share[0]; ++segment) {
            const vi before = share < x.share_knots[segment];
            const vf here = select(before, rest, vf{});
            rest = select(before, vf{}, rest);
            scores += here;
            shares += here * numerator;
            finish_segment();
            slope = select(before, slope, splat(slopes[segment + 1]));
        }
        scores += rest;
        shares += rest * numerator;
        const vf added = all * slope * factor;
        if (farthest >= W - 1) {
            float* entries = distance + farthest - (W - 1);
            store(entries, load(entries) + reversed(added));
        } else {
            for (int l = 0; l <= farthest; ++l) distance[farthest - l] += added[l];
        }
    }
    finish_segment();
}
