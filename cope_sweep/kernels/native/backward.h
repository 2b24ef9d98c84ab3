// Backward: visits the tiles as forward does, and computes the weights again from the saved log-sum-exp.
//
// The gate of key k adds to the positions of all keys j ≤ k, so its gradient is the sum D of all dp of the row, minus those
// of the keys right of k: dgate_k = D − Σ_{j > k} dp_j. D is known only after the row's last tile. Tiles with unsaturated
// rows are therefore held as X and Y until then, with dlogits = X + D·Y. At most MAX_HELD_TILES are held; if more tiles are
// unsaturated, the rest is visited twice, first for D. If a row's bias is linear in p from some position on (after the last
// knot, or with a slope alone), the rest of D follows without a visit: dp_j = slope·dscore_j, and a row's dscore_j sum to 0.
#pragma once

#include <vector>

#include "backward_row.h"

// Not inlined: in a loop over rows, the compiler would add the products in another order.
__attribute__((noinline)) static float dot(const float* a, const float* b, int64_t count) {
    float result = 0;
#pragma omp simd reduction(+ : result)
    for (int64_t n = 0; n < count; ++n) result += a[n] * b[n];
    return result;
}

template <Kind kind>
static void backward_block(const NativeProblem& x, BackwardScratch& m, const Gradients& to, const View& out, const View& rest, const float* lse,
                           const View& dout, int64_t b, int64_t h, int64_t block, float& dm, float& dgate_bias, float* dbias) {
    const long width = x.width();
    const Rows rows(x, block, x.tokens(b));
    const int64_t first = block * TILE, queries = x.query(b, h, first - x.start());
    const float saturation = x.saturation();
    const float* base_q = m.begin(x, rows, b, h, block);
    rows.pack(x, dout, b, h, block, 1, m.dout);
    zero(m.dq, TILE * width);
    float* dbase_q = x.rotated() ? m.dbase_q : m.dq;
    if (x.rotated()) zero(m.dbase_q, TILE * width);
    for (int r = rows.first; r < rows.end; ++r) {
        const int64_t query = queries + r;
        m.sums[r] = RowSums{};
        m.lse[r] = lse[query];
        const float *o = read_row(out, b, h, first + r - x.start(), x.D, m.out_row, rest), *g = m.dout + r * width;
        m.delta[r] = dot(o, g, x.D);
        if (x.knots) SegmentGradients(x, to, query).clear(x);
    }

    const auto unsaturated = [&] { return m.unsaturated<kind>(rows, saturation); };
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
        const float* gate_logits = m.begin_tile<kind>(x, rows, tile, diagonal, xs != nullptr, base_q);
        logits(rows, diagonal, m.dout, width, m.v_columns + tile * TILE * x.D, x.D, m.da);
        const auto row = x.simple() && !diagonal ? backward_row<kind, true> : backward_row<kind, false>;
        for (int r = rows.first; r < rows.end; ++r) {
            const long at = r * TILE;
            const int share_segment = m.rows[r].share_segment;
            row(x, m, to, b, h, first + r, tile * TILE, r, saturation, m.s + at, gate_logits + at, m.da + at, ds ? ds + at : nullptr,
                xs ? xs + at : nullptr, ys ? ys + at : nullptr);
            if (!m.only_total && (x.relative || x.distance_bias))
                distance_gradients(x, m.distances.gradient(r), dbias, first + r, tile * TILE, ds + at);
            const int visible = int(std::min<int64_t>(TILE, first + r - tile * TILE + 1));
            if (!m.only_total && x.share_slope)
                share_gradients(x, m.dshares, h, first + r, tile * TILE, row_vectors<false>(visible), share_segment, ds + at);
            if (!m.only_total && x.key_bias) {
                for (int l = 0; l < visible; ++l) m.dkey_bias[tile * TILE + l] += ds[at + l];
            }
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

    // The gradients of scores are needed separately if gates have logits of their own, and for biases by distance or key.
    float* own = x.separate() || x.relative || x.distance_bias || x.key_bias || x.share_slope ? static_cast<float*>(m.ds) : nullptr;
    const int64_t last = x.first_tile(first + rows.first);
    int64_t tile = block;
    int held = 0;
    for (; tile >= last && held < MAX_HELD_TILES && unsaturated() && !linear(); --tile, ++held) {
        walk(tile, own, m.x_tiles + held * TILE * TILE, m.y_tiles + held * TILE * TILE);
        value_products(tile);
        if (x.separate()) key_products(tile, m.ds);
    }
    if (tile >= last && linear()) {
        for (int r = rows.first; r < rows.end; ++r) {
            const float slope = kind == SEGMENTS ? m.rows[r].slope[m.rows[r].segment] + m.rows[r].m : m.rows[r].m;
            m.dp_total[r] = m.sums[r].positions - slope * sum(m.sums[r].scores);
        }
    } else if (tile >= last && unsaturated()) {  // more tiles than can be held: visit the rest for D, then again
        Row saved_rows[TILE];
        RowSums saved_sums[TILE];
        std::copy(m.rows, m.rows + TILE, saved_rows);
        std::copy(m.sums, m.sums + TILE, saved_sums);
        m.only_total = true;
        for (int64_t rest = tile; rest >= last && unsaturated(); --rest) walk(rest, own, m.x_tile, m.y_tile);
        m.only_total = false;
        for (int r = rows.first; r < rows.end; ++r) m.dp_total[r] = m.sums[r].positions;
        std::copy(saved_rows, saved_rows + TILE, m.rows);
        std::copy(saved_sums, saved_sums + TILE, m.sums);
    } else {
        for (int r = rows.first; r < rows.end; ++r) m.dp_total[r] = m.sums[r].positions;
    }
    for (int n = 0; n < held; ++n) gate_products(block - n, m.x_tiles + n * TILE * TILE, m.y_tiles + n * TILE * TILE);
    for (; tile >= last && !m.exhausted<kind>(rows); --tile) {
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
            const SegmentGradients of_query(x, to, queries + r);
            of_query.slope[m.rows[r].segment] += sum(sums.segment_position);
            of_query.intercept[m.rows[r].segment] += sum(sums.segment_score);
            if (std::isfinite(x.limit)) {
                const int last = segment_of(x, x.limit);
                const float far = sum(sums.far);
                of_query.slope[last] += x.limit * far;
                of_query.intercept[last] += far;
            }
        }
        if (x.m) dm += sum(sums.slope);
        if (x.gate_bias) dgate_bias += sum(m.dp_total[r] * sums.gate_slope - sums.gate_right);
        if (kind == STICK) {
            const float remainder = remainder_weight(x, b, h, first + r, m.lse[r]);
            for (int64_t d = 0; remainder != 0 && d < x.D; ++d) m.dv[(first + r) * width + d] += remainder * m.dout[r * width + d];
        }
    }
    if (x.e) m.positions.products(x, rows, base_q, dbase_q, m.de);
    if (x.relative) m.distances.products(x, rows, base_q, dbase_q, m.drelative);
    for (int r = rows.first; r < rows.end; ++r) {
        const int64_t t = first + r - x.start();
        write_row(to.q, b, h, t, x.D, m.dq + r * width, x.scale);
        if (x.rotated()) write_row(to.base_q, b, h, t, x.D, m.dbase_q + r * width, x.scale);
    }
}

// Write a head's gradient of keys or values: the partial sums of its groups, added in order to the first.
static void write_head(const NativeProblem& x, const View& to, int64_t b, int64_t h, float* parts, int count, size_t part) {
    const long width = x.width();
    for (int64_t t = 0; t < x.S; ++t) {
        float* row = t < x.tokens(b) ? parts + t * width : nullptr;
        for (int n = 1; row && n < count; ++n)
            for (int64_t d = 0; d < x.D; ++d) row[d] += row[n * part + d];
        write_row(to, b, h, t, x.D, row);
    }
}

// The partial sums of the items, which are added in order: the same bits at any number of threads.
struct PartialSums {
    const size_t head, table, distances;  // floats of an item
    Scratch heads;                        // of dk, of dv and of dgate_k of all items, if a head has several items
    Scratch tables, distance_tables;
    Scratch key_biases;
    std::vector<float> dm, dgate_bias, dbias, dshares;

    explicit PartialSums(const NativeProblem& x)
        : head(BackwardScratch::head(x)), table(Table::size(x, x.e ? x.P : 0, POSITIONS_AHEAD)),
          distances(Table::size(x, x.relative ? x.R : 0, DISTANCES_AHEAD)), heads(x, x.groups > 1 ? head * x.items() * (x.separate() ? 3 : 2) : 0),
          tables(x, table * x.items()), distance_tables(x, distances * x.items()),
          key_biases(x, x.key_bias ? x.items() * x.S : 0), dm(x.items()), dgate_bias(x.items()), dbias(x.distance_bias ? x.items() * x.biases : 0),
          dshares(x.items() * shares_size(x)) {}

    // Begin an item with sums of 0.
    void begin(const NativeProblem& x, BackwardScratch& m, int64_t item) {
        const bool split = x.groups > 1;
        const auto of_heads = [&](int n) { return heads + (n * x.items() + item) * head; };
        m.dk = split ? of_heads(0) : m.own_dk;
        m.dv = split ? of_heads(1) : m.own_dv;
        m.dgate_k = split && x.separate() ? of_heads(2) : m.own_dgate_k;
        m.de = tables + item * table;
        m.drelative = distance_tables + item * distances;
        m.dkey_bias = key_biases + item * x.S;
        m.dshares = dshares.data() + item * shares_size(x);
        zero(m.dk, head), zero(m.dv, head), zero(m.de, table), zero(m.drelative, distances);
        if (x.separate()) zero(m.dgate_k, head);
        if (x.key_bias) zero(m.dkey_bias, x.S);
    }

    void write_tables(const NativeProblem& x, const Gradients& to) const {
        // Products were with q·scale.
        if (x.e) write_table(x, to.e, x.P, POSITIONS_AHEAD, x.e_head, x.e_scale / x.scale, tables, table);
        if (x.relative) write_table(x, to.relative, x.R, DISTANCES_AHEAD, x.relative_head, x.relative_scale / x.scale, distance_tables, distances);
        if (x.m) zero(to.m, x.H);
        if (x.gate_bias) zero(to.gate_bias, x.H);
        if (x.distance_bias) zero(to.distance_bias, x.H * x.biases);
        if (x.key_bias) zero(to.key_bias, x.heads() * x.S);
        const int64_t segments = x.share_segments();
        if (x.share_slope) zero(to.share_distance, x.S), zero(to.share_query, x.T), zero(to.share_slope, x.H * segments), zero(to.share_intercept, x.H * segments);
        for (int64_t item = 0; item < x.items(); ++item) {
            const int64_t h = item / x.groups % x.H;
            if (x.m) to.m[h] += dm[item];
            if (x.gate_bias) to.gate_bias[h] += dgate_bias[item];
            for (int64_t n = 0; x.distance_bias && n < x.biases; ++n) to.distance_bias[h * x.biases + n] += dbias[item * x.biases + n];
            for (int64_t t = 0; x.key_bias && t < x.S; ++t) to.key_bias[item / x.groups * x.S + t] += key_biases[item * x.S + t];
            if (!x.share_slope) continue;
            const float* from = dshares.data() + item * shares_size(x);
            const auto add = [&](float* to, int64_t count) {
                for (int64_t n = 0; n < count; ++n) to[n] += *from++;
            };
            add(to.share_distance, x.S), add(to.share_query, x.T);
            add(to.share_slope + h * segments, segments), add(to.share_intercept + h * segments, segments);
        }
    }
};

// Copy a head's keys, values and tables.
static void pack_head(const NativeProblem& x, BackwardScratch& m, int64_t b, int64_t h) {
    m.pack_head(x, b, h);
    pack_columns(x, x.v, b, h, x.tokens(b), m.v_columns);
    pack_tokens(x, x.k, b, h, m.k_rows);
    if (x.separate()) pack_tokens(x, x.gate_k, b, h, m.gate_rows);
}

template <Kind kind>
static void backward(const NativeProblem& x, const View& out, const View& rest, const float* lse, const View& dout, const Gradients& to) {
    PartialSums sums(x);
    const auto write_heads = [&](int64_t head, float* dk, float* dv, float* dgate_k) {
        const int64_t b = head / x.H, h = head % x.H;
        write_head(x, to.k, b, h, dk, x.groups, sums.head);
        write_head(x, to.v, b, h, dv, x.groups, sums.head);
        if (x.separate()) write_head(x, to.gate_k, b, h, dgate_k, x.groups, sums.head);
    };
#pragma omp parallel num_threads(x.threads)
    {
        BackwardScratch m(x);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < x.items(); ++item) {
            const int64_t head = item / x.groups;
            if (m.packed != head) pack_head(x, m, head / x.H, head % x.H);
            m.packed = head;
            sums.begin(x, m, item);
            for_blocks(x, item, [&](int64_t b, int64_t h, int64_t block) {
                backward_block<kind>(x, m, to, out, rest, lse, dout, b, h, block, sums.dm[item], sums.dgate_bias[item],
                                     sums.dbias.data() + (x.distance_bias ? item * x.biases : 0));
            });
            if (x.groups == 1) write_heads(head, m.dk, m.dv, m.dgate_k);
            for_padding(x, item, [&](int64_t b, int64_t h, int64_t t) {
                write_row(to.q, b, h, t, x.D, nullptr);
                if (x.rotated()) write_row(to.base_q, b, h, t, x.D, nullptr);
                if (x.knots) SegmentGradients(x, to, x.query(b, h, t)).clear(x);
            });
        }
        if (x.groups > 1) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < x.heads(); ++head) {
                float* dk = sums.heads + head * x.groups * sums.head;
                write_heads(head, dk, dk + x.items() * sums.head, dk + 2 * x.items() * sums.head);
            }
        }
    }
    sums.write_tables(x, to);
}
