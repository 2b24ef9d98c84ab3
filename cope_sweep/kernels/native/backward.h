// Backward: visits the tiles as forward does, and computes the weights again from the saved log-sum-exp.
//
// The gate of key k adds to the positions of all keys j ≤ k, so its gradient is the sum D of all dp of the row, minus those
// of the keys right of k: dgate_k = D − Σ_{j > k} dp_j. D is known only after the row's last tile. Tiles with unsaturated
// rows are therefore held as X and Y until then, with dlogits = X + D·Y. At most MAX_HELD_TILES are held; if more tiles are
// unsaturated, the rest is visited twice, first for D. If a row's bias is linear in p from some position on (after the last
// knot, or with a slope alone), the rest of D follows without a visit: dp_j = slope·dscore_j, and a row's dscore_j sum to 0.
#pragma once

#include <vector>

#include "tables.h"

constexpr int MAX_HELD_TILES = 16;

struct Gradients {  // outputs; every element is written
    View q, k, v, base_q, gate_k;
    float *e, *segment_slope, *segment_intercept;  // as in NativeProblem
    float *m, *relative, *distance_bias;
};

// Sums of a row between tiles.
struct RowSums {
    float positions;  // Σ of dp so far
    vf far;           // Σ of dscore over saturated keys, of each lane
    vf slope;         // Σ dscore·p, of each lane, where m is
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

struct BackwardScratch {
    Scratch k_columns, k_rows, v_columns, gate_columns, gate_rows;                 // of the head
    Table positions, distances;                                                    // of the head, and of the block
    Scratch own_dk, own_dv, own_dgate_k;                                           // of the item, if it is a whole head
    Scratch q, base_q, dout, dq, dbase_q;                                          // of the block
    Scratch s, gate_s, da, ds, x_tile, y_tile;                                     // of a tile
    Scratch x_tiles, y_tiles;                                                      // of MAX_HELD_TILES tiles
    Row rows[TILE];
    RowSums sums[TILE];
    float lse[TILE], delta[TILE];
    float dp_total[TILE];    // D
    bool only_total = false;  // visit tiles for D only
    float *dk, *dv, *dgate_k, *de, *drelative;  // sums of the item
    int64_t packed = -1;   // the head whose keys and values are packed

    static size_t head(const NativeProblem& x, bool wanted = true) { return wanted ? x.tiles() * TILE * x.width() : 0; }
    explicit BackwardScratch(const NativeProblem& x)
        : k_columns(x, head(x)), k_rows(x, head(x)), v_columns(x, head(x)), gate_columns(x, head(x, x.separate())),
          gate_rows(x, head(x, x.separate())), positions(x, x.e ? x.P : 0, POSITIONS_AHEAD, true), distances(x, x.relative ? x.R : 0, DISTANCES_AHEAD, true),
          own_dk(x, head(x, x.groups == 1)), own_dv(x, head(x, x.groups == 1)), own_dgate_k(x, head(x, x.groups == 1 && x.separate())),
          q(x, TILE * x.width()), base_q(x, TILE * x.width()), dout(x, TILE * x.width()), dq(x, TILE * x.width()),
          dbase_q(x, TILE * x.width()), s(x, TILE * TILE), gate_s(x, TILE * TILE), da(x, TILE * TILE), ds(x, TILE * TILE),
          x_tile(x, TILE * TILE), y_tile(x, TILE * TILE), x_tiles(x, x.gates() ? TILE * TILE * MAX_HELD_TILES : 0),
          y_tiles(x, x.gates() ? TILE * TILE * MAX_HELD_TILES : 0) {}
};

// Add the gradients of segments' slopes and intercepts; `segment` is the segment before this tile.
static inline void add_to_segments(const NativeProblem& x, RowSums& sums, int segment, int vectors, const vf* positions, const vf* ds,
                                   const Gradients& to, int64_t query) {
    float *dslope = to.segment_slope + query * (x.N + 1), *dintercept = to.segment_intercept + query * (x.N + 1);
    for (int v = vectors - 1; v >= 0; --v) {
        const vf stopped = vmin(positions[v], splat(x.limit));
        const float last = stopped[0];
        vf rest = ds[v];
        for (; segment < x.N && x.knots[segment] <= last; ++segment) {
            const vi before = stopped < x.knots[segment];
            const vf here = select(before, rest, vf{});
            rest = select(before, vf{}, rest);
            dslope[segment] += sum(sums.segment_position + here * stopped);
            dintercept[segment] += sum(sums.segment_score + here);
            sums.segment_score = sums.segment_position = vf{};
        }
        sums.segment_score += rest;
        sums.segment_position += rest * stopped;
    }
}

// One row of a tile. In: logits s and weight gradients da. Out: weights after dropout in s; gradients of scores in ds
// unless null; X and Y unless null, needed if any row of the tile is unsaturated. FULL: as in forward_row.
template <Kind kind, bool FULL>
static inline void backward_row(const NativeProblem& x, BackwardScratch& m, const Gradients& to, int64_t b, int64_t h, int64_t i, int64_t j, int r,
                                float saturation, float* s, const float* gate_logits, const float* da, float* ds, float* x_row, float* y_row) {
    Row& row = m.rows[r];
    RowSums& sums = m.sums[r];
    const int64_t visible = i - j + 1;
    const int vectors = FULL || visible >= TILE ? VECTORS : int((visible + W - 1) / W);
    const bool counts = kind != NONE && row.position < saturation;
    const vf base = splat(-m.lse[r]);
    vf scores[VECTORS], gates[VECTORS], positions[VECTORS], slopes[VECTORS], fractions[VECTORS];
    vi indices[VECTORS];
    const int segment = row.segment;
    if (counts) {
        row.position = walk<FULL>(gate_logits, vectors, visible, row.position, gates, positions);
        if (kind == TABLE && row.position >= saturation) row.far = row.table[x.P - 1];
#pragma GCC unroll 16
        for (int v = VECTORS - 1; v >= 0; --v) {
            if (!FULL && v >= vectors) continue;
            scores[v] = load(s + v * W) + base;
            slopes[v] = vf{};
            if (kind == TABLE) {
                const TableBias entry(row.table, float(x.P - 1), positions[v]);
                scores[v] += entry.bias;
                slopes[v] = select(positions[v] < float(x.P - 1), entry.difference, vf{});
                fractions[v] = entry.fraction;
                indices[v] = entry.index;
            } else if (kind == SEGMENTS) {
                const SegmentBias entry(x, row, positions[v], row.segment);
                scores[v] += entry.bias;
                slopes[v] = select(positions[v] < x.limit, entry.slope, vf{});
            }
            if (!FULL && x.m) {
                scores[v] += row.m * positions[v];
                slopes[v] += row.m;
            }
        }
    } else {
        const vf constant = base + row.far;
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v)
            if (FULL || v < vectors) scores[v] = load(s + v * W) + constant;
    }
    if (!FULL && x.distances()) add_distance_scores(x, row, h, i, j, vectors, scores);
    const uint32_t dropout = !FULL && x.threshold ? dropout_row(x.seed, b * x.H + h, i) : 0;
    const float delta = m.delta[r];
    // From scores to weights, and to their gradients.
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) {
        if (!FULL && v >= vectors) {
            store(s + v * W, vf{});
            continue;
        }
        vf weight = vexp(FULL ? scores[v] : vmin(scores[v], splat(80.0f))), dweight = load(da + v * W), kept = weight;
        if (!FULL && x.threshold) {
            const vf factor = dropout_factor(x, dropout, j + v * W);
            kept *= factor;
            dweight *= factor;
        }
        scores[v] = weight * (dweight - delta);
        if (!FULL) {  // keys after the query may have any value, even NaN
            kept = select(visible_lanes(visible - v * W), kept, vf{});
            scores[v] = select(visible_lanes(visible - v * W), scores[v], vf{});
        }
        store(s + v * W, kept);
    }
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
        if (kind == NONE || !x_row) return;
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
                const vf above = scores[v] * fractions[v];
                add_to_table(m.positions.gradient(r), indices[v], scores[v] - above, above);
            }
        if (kind == SEGMENTS)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v)
                if (FULL || v < vectors) sums.scores += scores[v];
        if (kind == SEGMENTS) add_to_segments(x, sums, segment, vectors, positions, scores, to, (b * x.H + h) * x.T + i - x.start());
        if (!FULL && x.m)
            for (int v = 0; v < vectors; ++v) sums.slope += scores[v] * positions[v];
    }
    float beyond = sums.positions;
#pragma GCC unroll 16
    for (int v = VECTORS - 1; v >= 0; --v) {
        if (!FULL && v >= vectors) {
            store(x_row + v * W, vf{});
            store(y_row + v * W, vf{});
            continue;
        }
        const vf dp = scores[v] * slopes[v], through = suffix_sums(dp), y = gates[v] * (1.0f - gates[v]);
        const vf right = (through - dp) + beyond;
        beyond += through[0];
        store(x_row + v * W, (x.separate() ? vf{} : scores[v]) - right * y);
        store(y_row + v * W, y);
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

template <Kind kind>
static void backward_block(const NativeProblem& x, BackwardScratch& m, const Gradients& to, const View& out, const float* lse, const View& dout,
                           int64_t b, int64_t h, int64_t block, float& dm, float* dbias) {
    const long width = x.width();
    const Rows rows(x, block, x.tokens(b));
    const int64_t first = block * TILE, queries = (b * x.H + h) * x.T + first - x.start();
    const float saturation = x.saturation();
    const bool simple = !x.distances() && !x.threshold && !x.m;
    rows.pack(x, x.q, b, h, block, x.scale, m.q);
    rows.pack(x, dout, b, h, block, 1, m.dout);
    zero(m.dq, TILE * width);
    const float* base_q = x.rotated() ? m.base_q : m.q;
    float* dbase_q = x.rotated() ? m.dbase_q : m.dq;
    if (x.rotated()) {
        rows.pack(x, x.base_q, b, h, block, x.scale, m.base_q);
        zero(m.dbase_q, TILE * width);
    }
    m.positions.begin(rows, true), m.positions.reach(x, rows, 1, base_q, true);
    m.distances.begin(rows, true), m.distances.reach(x, rows, first + TILE, base_q, true);
    for (int r = rows.first; r < rows.end; ++r) {
        const int64_t query = queries + r;
        m.rows[r] = begin(x, m.positions, m.distances, b, h, first + r, r);
        m.sums[r] = RowSums{};
        m.lse[r] = lse[query];
        const float* o = out.row(b, h, first + r - x.start());
        const float* g = m.dout + r * width;
        float delta = 0;
#pragma omp simd reduction(+ : delta)
        for (int64_t d = 0; d < x.D; ++d) delta += o[d] * g[d];
        m.delta[r] = delta;
        if (x.knots) {
            zero(to.segment_slope + query * (x.N + 1), x.N + 1);
            zero(to.segment_intercept + query * (x.N + 1), x.N + 1);
        }
    }

    const auto unsaturated = [&] {
        if (kind != NONE)
            for (int r = rows.first; r < rows.end; ++r)
                if (m.rows[r].position < saturation) return true;
        return false;
    };
    // Whether the bias of all rows is linear in p from here on.
    const auto linear = [&] {
        if (kind == SLOPE_ONLY) return true;
        if (kind != SEGMENTS || std::isfinite(x.limit)) return false;
        for (int r = rows.first; r < rows.end; ++r)
            if (m.rows[r].segment < x.N && std::isfinite(x.knots[m.rows[r].segment])) return false;
        return true;
    };
    // All rows of a tile.
    const auto walk = [&](int64_t tile, float* ds, float* xs, float* ys) {
        const bool diagonal = tile == block;
        logits(rows, diagonal, m.q, width, m.k_columns + tile * TILE * x.D, x.D, m.s);
        logits(rows, diagonal, m.dout, width, m.v_columns + tile * TILE * x.D, x.D, m.da);
        if (x.separate() && xs) logits(rows, diagonal, base_q, width, m.gate_columns + tile * TILE * x.D, x.D, m.gate_s);
        const float* gate_logits = x.separate() ? m.gate_s : m.s;
        if (kind == TABLE) m.positions.reach(x, rows, reachable_entries(rows, m.rows), base_q, true);
        const auto row = simple && !diagonal ? backward_row<kind, true> : backward_row<kind, false>;
        for (int r = rows.first; r < rows.end; ++r) {
            const long at = r * TILE;
            row(x, m, to, b, h, first + r, tile * TILE, r, saturation, m.s + at, gate_logits + at, m.da + at, ds ? ds + at : nullptr,
                xs ? xs + at : nullptr, ys ? ys + at : nullptr);
            if (!m.only_total && (x.relative || x.distance_bias))
                distance_gradients(x, m.distances.gradient(r), dbias, first + r, tile * TILE, ds + at);
        }
    };
    const auto value_products = [&](int64_t tile) {
        rows.clear_around(m.s, TILE);
        weighted_back(rows, tile == block, m.s, m.dout, width, m.dv + tile * TILE * width);
    };
    const auto key_products = [&](int64_t tile, float* ds) {
        rows.clear_around(ds, TILE);
        weighted_back(rows, tile == block, ds, m.q, width, m.dk + tile * TILE * width);
        weighted(rows, tile == block, ds, m.k_rows + tile * TILE * width, width, m.dq);
    };
    // X + D·Y of a tile is the gradient of the gates' logits, and of all logits where those are the same.
    const auto gate_products = [&](int64_t tile, float* xs, const float* ys) {
        for (int r = rows.first; r < rows.end; ++r)
            for (int v = r * TILE; v < (r + 1) * TILE; v += W) store(xs + v, load(xs + v) + m.dp_total[r] * load(ys + v));
        if (!x.separate()) return key_products(tile, xs);
        rows.clear_around(xs, TILE);
        weighted_back(rows, tile == block, xs, base_q, width, m.dgate_k + tile * TILE * width);
        weighted(rows, tile == block, xs, m.gate_rows + tile * TILE * width, width, dbase_q);
    };

    // The gradients of scores are needed separately if gates have logits of their own, and for distance tables.
    float* own = x.separate() || x.relative || x.distance_bias ? static_cast<float*>(m.ds) : nullptr;
    int64_t tile = block;
    int held = 0;
    for (; tile >= 0 && held < MAX_HELD_TILES && unsaturated() && !linear(); --tile, ++held) {
        walk(tile, own, m.x_tiles + held * TILE * TILE, m.y_tiles + held * TILE * TILE);
        value_products(tile);
        if (x.separate()) key_products(tile, m.ds);
    }
    if (tile >= 0 && linear()) {
        for (int r = rows.first; r < rows.end; ++r) {
            const float slope = kind == SEGMENTS ? m.rows[r].slope[m.rows[r].segment] + m.rows[r].m : m.rows[r].m;
            m.dp_total[r] = m.sums[r].positions - slope * sum(m.sums[r].scores);
        }
    } else if (tile >= 0 && unsaturated()) {  // more tiles than can be held: visit the rest for D, then again
        Row saved_rows[TILE];
        RowSums saved_sums[TILE];
        std::copy(m.rows, m.rows + TILE, saved_rows);
        std::copy(m.sums, m.sums + TILE, saved_sums);
        m.only_total = true;
        for (int64_t rest = tile; rest >= 0 && unsaturated(); --rest) walk(rest, own, m.x_tile, m.y_tile);
        m.only_total = false;
        for (int r = rows.first; r < rows.end; ++r) m.dp_total[r] = m.sums[r].positions;
        std::copy(saved_rows, saved_rows + TILE, m.rows);
        std::copy(saved_sums, saved_sums + TILE, m.sums);
    } else {
        for (int r = rows.first; r < rows.end; ++r) m.dp_total[r] = m.sums[r].positions;
    }
    for (int n = 0; n < held; ++n) gate_products(block - n, m.x_tiles + n * TILE * TILE, m.y_tiles + n * TILE * TILE);
    for (; tile >= 0; --tile) {
        const bool gates = unsaturated();
        walk(tile, gates ? own : static_cast<float*>(m.da), gates ? static_cast<float*>(m.x_tile) : nullptr, m.y_tile);
        value_products(tile);
        if (!gates || x.separate()) key_products(tile, gates ? m.ds : m.da);
        if (gates) gate_products(tile, m.x_tile, m.y_tile);
    }

    for (int r = rows.first; r < rows.end; ++r) {
        const RowSums& sums = m.sums[r];
        if (x.e && m.positions.reached() == x.P) m.positions.gradient(r)[x.P - 1] += sum(sums.far);
        if (x.knots) {
            const int64_t query = queries + r;
            float *dslope = to.segment_slope + query * (x.N + 1), *dintercept = to.segment_intercept + query * (x.N + 1);
            dslope[m.rows[r].segment] += sum(sums.segment_position);
            dintercept[m.rows[r].segment] += sum(sums.segment_score);
            if (std::isfinite(x.limit)) {
                const int last = segment_of(x, x.limit);
                const float far = sum(sums.far);
                dslope[last] += x.limit * far;
                dintercept[last] += far;
            }
        }
        if (x.m) dm += sum(sums.slope);
    }
    if (x.e) m.positions.products(x, rows, base_q, dbase_q, m.de);
    if (x.relative) m.distances.products(x, rows, base_q, dbase_q, m.drelative);
    for (int r = rows.first; r < rows.end; ++r) {
        const int64_t t = first + r - x.start();
        float* dq = to.q.row(b, h, t);
        for (int64_t d = 0; d < x.D; ++d) dq[d] = m.dq[r * width + d] * x.scale;
        if (!x.rotated()) continue;
        float* dbase = to.base_q.row(b, h, t);
        for (int64_t d = 0; d < x.D; ++d) dbase[d] = m.dbase_q[r * width + d] * x.scale;
    }
}

// Copy a head's keys, values and tables.
static void pack_head(const NativeProblem& x, BackwardScratch& m, int64_t b, int64_t h) {
    const int64_t tokens = x.tokens(b);
    const size_t rest = ((TILE - tokens % TILE) % TILE) * x.width();
    pack_columns(x, x.k, b, h, tokens, m.k_columns);
    pack_columns(x, x.v, b, h, tokens, m.v_columns);
    pack_rows(x, x.k, b, h, 0, tokens, 1, m.k_rows);
    zero(m.k_rows + tokens * x.width(), rest);
    if (x.separate()) {
        pack_columns(x, x.gate_k, b, h, tokens, m.gate_columns);
        pack_rows(x, x.gate_k, b, h, 0, tokens, 1, m.gate_rows);
        zero(m.gate_rows + tokens * x.width(), rest);
    }
    // Packed queries are q·scale.
    if (x.e) m.positions.pack(x, x.e + h * x.e_head, x.e_scale / x.scale, true);
    if (x.relative) m.distances.pack(x, x.relative + h * x.relative_head, x.relative_scale / x.scale, true);
}

// Write a head's gradient of keys or values: the partial sums of its groups, added in order.
static void write_head(const NativeProblem& x, const View& to, int64_t b, int64_t h, const float* parts, int count, size_t part) {
    const long width = x.width();
    for (int64_t t = 0; t < x.S; ++t) {
        float* row = to.row(b, h, t);
        const bool token = t < x.tokens(b);
        for (int64_t d = 0; d < x.D; ++d) row[d] = token ? parts[t * width + d] : 0;
        for (int n = 1; token && n < count; ++n)
            for (int64_t d = 0; d < x.D; ++d) row[d] += parts[n * part + t * width + d];
    }
}

template <Kind kind>
static void backward(const NativeProblem& x, const View& out, const float* lse, const View& dout, const Gradients& to) {
    const int64_t items = x.heads() * x.groups;
    const long width = x.width();
    const size_t part = BackwardScratch::head(x);
    const bool split = x.groups > 1;
    // Partial sums of each item are added in order below: the same bits at any number of threads.
    Scratch parts(x, split ? part * items * (x.separate() ? 3 : 2) : 0);
    const size_t table_part = Table::size(x, x.e ? x.P : 0, POSITIONS_AHEAD);
    const size_t distances_part = Table::size(x, x.relative ? x.R : 0, DISTANCES_AHEAD);
    Scratch table_parts(x, table_part * items), distances_parts(x, distances_part * items);
    const auto own = [](const Scratch& scratch) -> float* { return scratch; };
    std::vector<float> dm(items), dbias(x.distance_bias ? items * x.biases : 0);
#pragma omp parallel num_threads(x.threads)
    {
        BackwardScratch m(x);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; ++item) {
            const int64_t b = item / x.groups / x.H, h = item / x.groups % x.H;
            const int64_t tokens = x.tokens(b);
            if (m.packed != item / x.groups) pack_head(x, m, b, h);
            m.packed = item / x.groups;
            m.dk = split ? parts + item * part : own(m.own_dk);
            m.dv = split ? parts + (items + item) * part : own(m.own_dv);
            m.dgate_k = split && x.separate() ? parts + (2 * items + item) * part : own(m.own_dgate_k);
            m.de = table_parts + item * table_part;
            m.drelative = distances_parts + item * distances_part;
            zero(m.dk, part), zero(m.dv, part);
            if (x.separate()) zero(m.dgate_k, part);
            zero(m.de, table_part), zero(m.drelative, distances_part);
            for (int64_t block = x.start() / TILE; block < x.tiles(); ++block) {
                if (block % x.groups != item % x.groups || Rows(x, block, tokens).none()) continue;
                backward_block<kind>(x, m, to, out, lse, dout, b, h, block, dm[item], dbias.data() + (x.distance_bias ? item * x.biases : 0));
            }
            if (!split) {
                write_head(x, to.k, b, h, m.dk, 1, part);
                write_head(x, to.v, b, h, m.dv, 1, part);
                if (x.separate()) write_head(x, to.gate_k, b, h, m.dgate_k, 1, part);
            }
            if (item % x.groups) continue;
            for (int64_t t = std::max<int64_t>(0, tokens - x.start()); t < x.T; ++t) {  // padding
                const int64_t query = (b * x.H + h) * x.T + t;
                zero(to.q.row(b, h, t), x.D);
                if (x.rotated()) zero(to.base_q.row(b, h, t), x.D);
                if (x.knots) zero(to.segment_slope + query * (x.N + 1), x.N + 1), zero(to.segment_intercept + query * (x.N + 1), x.N + 1);
            }
        }
        if (split) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < x.heads(); ++head) {
                const int64_t b = head / x.H, h = head % x.H;
                const float* of_head = parts + head * x.groups * part;
                write_head(x, to.k, b, h, of_head, x.groups, part);
                write_head(x, to.v, b, h, of_head + items * part, x.groups, part);
                if (x.separate()) write_head(x, to.gate_k, b, h, of_head + 2 * items * part, x.groups, part);
            }
        }
    }
    // Products were with q·scale.
    if (x.e) write_table(x, to.e, x.P, POSITIONS_AHEAD, x.e_head, x.e_scale / x.scale, table_parts, table_part);
    if (x.relative) write_table(x, to.relative, x.R, DISTANCES_AHEAD, x.relative_head, x.relative_scale / x.scale, distances_parts, distances_part);
    if (x.m) {
        zero(to.m, x.H);
        for (int64_t item = 0; item < items; ++item) to.m[item / x.groups % x.H] += dm[item];
    }
    if (x.distance_bias) {
        zero(to.distance_bias, x.H * x.biases);
        for (int64_t item = 0; item < items; ++item)
            for (int64_t n = 0; n < x.biases; ++n) to.distance_bias[(item / x.groups % x.H) * x.biases + n] += dbias[item * x.biases + n];
    }
}
