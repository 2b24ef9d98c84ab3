// Forward: key tiles from the diagonal leftwards, a running maximum and sum of the softmax, positions carried along.
#pragma once

#include "tables.h"

// Rescale a row only when a score exceeds its maximum by more than this: float32 has room for e⁸.
constexpr float RESCALE_THRESHOLD = 8.0f;

struct Softmax {
    float most;
    vf total;
};

// Turns the logits of one row of a tile into unnormalised weights, 0 after the query, and rescales `out` with the maximum.
// FULL: no key is after the query, and there are no distance scores, no dropout and no slope m.
template <Kind kind, bool FULL>
static inline void forward_row(const NativeProblem& x, int64_t b, int64_t h, int64_t i, int64_t j, float saturation, Row& row, Softmax& softmax,
                               float* s, const float* gate_logits, float* out, long width) {
    const int64_t visible = i - j + 1;
    const int vectors = FULL || visible >= TILE ? VECTORS : int((visible + W - 1) / W);
    vf scores[VECTORS];
    if (kind != NONE && row.position < saturation) {
        vf gates[VECTORS], positions[VECTORS];
        row.position = walk<FULL>(gate_logits, vectors, visible, row.position, gates, positions);
        if (kind == TABLE && row.position >= saturation) row.far = row.table[x.P - 1];
#pragma GCC unroll 16
        for (int v = VECTORS - 1; v >= 0; --v) {
            if (!FULL && v >= vectors) continue;
            scores[v] = load(s + v * W);
            if (kind == TABLE) {
                const TableBias entry(row.table, float(x.P - 1), positions[v]);
                scores[v] += entry.bias;
            } else if (kind == SEGMENTS) {
                const SegmentBias entry(x, row, positions[v], row.segment);
                scores[v] += entry.bias;
            }
            if (!FULL && x.m) scores[v] += row.m * positions[v];
        }
    } else {
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v)
            if (FULL || v < vectors) scores[v] = load(s + v * W) + row.far;
    }
    if (!FULL) {
        if (x.distances()) add_distance_scores(x, row, h, i, j, vectors, scores);
        for (int v = 0; v < vectors; ++v)
            scores[v] = select(visible_lanes(visible - v * W), scores[v], splat(-std::numeric_limits<float>::infinity()));
    }
    vf most = scores[0];
#pragma GCC unroll 16
    for (int v = 1; v < VECTORS; ++v)
        if (FULL || v < vectors) most = vmax(most, scores[v]);
    if (any_above(most, splat(softmax.most + RESCALE_THRESHOLD))) {
        const float now = largest(most);
        const float factor = std::exp(softmax.most - now);
        softmax.total *= factor;
        for (long d = 0; d < width; d += W) store(out + d, load(out + d) * factor);
        softmax.most = now;
    }
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v)
        if (FULL || v < vectors) {
            scores[v] = vexp(scores[v] - softmax.most);
            if (!FULL) scores[v] = select(visible_lanes(visible - v * W), scores[v], vf{});
        }
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v)
        if (FULL || v < vectors) softmax.total += scores[v];
    if (!FULL && x.threshold) {
        const uint32_t dropout = dropout_row(x.seed, b * x.H + h, i);
        for (int v = 0; v < vectors; ++v) scores[v] *= dropout_factor(x, dropout, j + v * W);
    }
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) store(s + v * W, FULL || v < vectors ? scores[v] : vf{});
}

struct ForwardScratch {
    Scratch k_columns, v_rows, gate_columns, q, base_q, s, gate_s, out;
    Table positions, distances;
    Row rows[TILE];
    Softmax softmax[TILE];
    int64_t packed = -1;  // the head whose keys and values are packed
    explicit ForwardScratch(const NativeProblem& x)
        : k_columns(x, x.tiles() * TILE * x.D), v_rows(x, x.tiles() * TILE * x.width()),
          gate_columns(x, x.separate() ? x.tiles() * TILE * x.D : 1), q(x, TILE * x.width()), base_q(x, TILE * x.width()),
          s(x, TILE * TILE), gate_s(x, TILE * TILE), out(x, TILE * x.width()), positions(x, x.e ? x.P : 0, POSITIONS_AHEAD, false),
          distances(x, x.relative ? x.R : 0, DISTANCES_AHEAD, false) {}
};

template <Kind kind>
static void forward_block(const NativeProblem& x, ForwardScratch& m, int64_t b, int64_t h, int64_t block, const View& result, float* lse) {
    const long width = x.width();
    const Rows rows(x, block, x.tokens(b));
    const int64_t first = block * TILE;
    rows.pack(x, x.q, b, h, block, x.scale, m.q);
    const float* base_q = x.rotated() ? m.base_q : m.q;
    if (x.rotated()) rows.pack(x, x.base_q, b, h, block, x.scale, m.base_q);
    m.positions.begin(rows, false), m.positions.reach(x, rows, 1, base_q, false);
    m.distances.begin(rows, false), m.distances.reach(x, rows, first + TILE, base_q, false);
    zero(m.out, TILE * width);
    for (int r = rows.first; r < rows.end; ++r) {
        m.rows[r] = begin(x, m.positions, m.distances, b, h, first + r, r);
        m.softmax[r] = {-std::numeric_limits<float>::infinity(), vf{}};
    }
    const float saturation = x.saturation();
    const bool simple = !x.distances() && !x.threshold && !x.m;
    bool saturated = kind == NONE;
    for (int64_t tile = block; tile >= 0; --tile) {
        const bool diagonal = tile == block;
        logits(rows, diagonal, m.q, width, m.k_columns + tile * TILE * x.D, x.D, m.s);
        if (x.separate() && !saturated) logits(rows, diagonal, base_q, width, m.gate_columns + tile * TILE * x.D, x.D, m.gate_s);
        const float* gate_logits = x.separate() ? m.gate_s : m.s;
        if (kind == TABLE) m.positions.reach(x, rows, reachable_entries(rows, m.rows), base_q, false);
        saturated = true;
        for (int r = rows.first; r < rows.end; ++r) {
            const auto row = simple && !diagonal ? forward_row<kind, true> : forward_row<kind, false>;
            row(x, b, h, first + r, tile * TILE, saturation, m.rows[r], m.softmax[r], m.s + r * TILE, gate_logits + r * TILE, m.out + r * width,
                width);
            saturated &= kind == NONE || m.rows[r].position >= saturation;
        }
        rows.clear_around(m.s, TILE);
        weighted(rows, diagonal, m.s, m.v_rows + tile * TILE * width, width, m.out);
    }
    for (int r = rows.first; r < rows.end; ++r) {
        const int64_t t = first + r - x.start();
        const float total = sum(m.softmax[r].total), factor = 1 / total;
        float* to = result.row(b, h, t);
        for (int64_t d = 0; d < x.D; ++d) to[d] = m.out[r * width + d] * factor;
        lse[(b * x.H + h) * x.T + t] = m.softmax[r].most + std::log(total);
    }
}

// Copy a head's keys, values and tables.
static void pack_head(const NativeProblem& x, ForwardScratch& m, int64_t b, int64_t h) {
    const int64_t tokens = x.tokens(b);
    pack_columns(x, x.k, b, h, tokens, m.k_columns);
    pack_rows(x, x.v, b, h, 0, tokens, 1, m.v_rows);
    zero(m.v_rows + tokens * x.width(), ((TILE - tokens % TILE) % TILE) * x.width());
    if (x.separate()) pack_columns(x, x.gate_k, b, h, tokens, m.gate_columns);
    // Packed queries are q·scale.
    if (x.e) m.positions.pack(x, x.e + h * x.e_head, x.e_scale / x.scale, false);
    if (x.relative) m.distances.pack(x, x.relative + h * x.relative_head, x.relative_scale / x.scale, false);
}

template <Kind kind> static void forward(const NativeProblem& x, const View& result, float* lse) {
    const int64_t items = x.heads() * x.groups;
#pragma omp parallel num_threads(x.threads)
    {
        ForwardScratch m(x);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; ++item) {
            const int64_t b = item / x.groups / x.H, h = item / x.groups % x.H;
            const int64_t tokens = x.tokens(b);
            if (m.packed != item / x.groups) pack_head(x, m, b, h);
            m.packed = item / x.groups;
            for (int64_t block = x.start() / TILE; block < x.tiles(); ++block) {
                if (block % x.groups != item % x.groups) continue;
                if (!Rows(x, block, tokens).none()) forward_block<kind>(x, m, b, h, block, result, lse);
            }
            if (item % x.groups) continue;
            for (int64_t t = tokens > x.start() ? tokens - x.start() : 0; t < x.T; ++t) {  // padding
                zero(result.row(b, h, t), x.D);
                lse[(b * x.H + h) * x.T + t] = 0;
            }
        }
    }
}
