// Forward: key tiles from the diagonal leftwards, a running maximum and sum of the softmax, positions carried along.
#pragma once

#include "block.h"

// Rescale a row only when a score exceeds its maximum by more than this: float32 has room for e⁸.
constexpr float RESCALE_THRESHOLD = 8.0f;

struct Softmax {
    float most;
    vf total;
};

// Turns the logits of one row of a tile into unnormalised weights, 0 after the query, and rescales `out` with the maximum.
// FULL: as in row_scores.
template <Kind kind, bool FULL>
static inline void forward_row(const NativeProblem& x, int64_t b, int64_t h, int64_t i, int64_t j, float saturation, Row& row, Softmax& softmax,
                               float* s, const float* gate_logits, float* out, long width) {
    const int64_t visible = i - j + 1;
    const int vectors = row_vectors<FULL>(visible);
    vf scores[VECTORS];
    Details details;
    row_scores<kind, FULL, false>(x, row, h, i, j, vectors, saturation, s, gate_logits, 0, scores, details);
    const auto drop_and_store = [&] {
        if (!FULL && x.threshold) {
            const uint32_t dropout = dropout_row(x.seeds[b], h, i);
            for (int v = 0; v < vectors; ++v) scores[v] *= dropout_factor(x, dropout, j + v * W);
        }
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) store(s + v * W, FULL || v < vectors ? scores[v] : vf{});
    };
    if (kind == STICK) {
        vf shares[VECTORS], weights[VECTORS];
        break_stick<FULL>(row, vectors, i - j, scores, shares, weights);
        std::copy(weights, weights + vectors, scores);
        return drop_and_store();
    }
    if (!FULL)
        for (int v = 0; v < vectors; ++v)
            scores[v] = select(visible_lanes(visible - v * W), scores[v], splat(-std::numeric_limits<float>::infinity()));
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
    drop_and_store();
}

struct ForwardScratch : BlockScratch {
    Scratch v_rows;  // of the head
    Scratch out;     // of the block
    Softmax softmax[TILE];
    explicit ForwardScratch(const NativeProblem& x)
        : BlockScratch(x, false), v_rows(x, x.tiles() * TILE * x.width()), out(x, TILE * x.width()) {}
};

template <Kind kind>
static void forward_block(const NativeProblem& x, ForwardScratch& m, int64_t b, int64_t h, int64_t block, const View& result, const View& rest, float* lse) {
    const long width = x.width();
    const Rows rows(x, block, x.tokens(b));
    const int64_t first = block * TILE;
    const float* base_q = m.begin(x, rows, b, h, block);
    zero(m.out, TILE * width);
    for (int r = rows.first; r < rows.end; ++r) m.softmax[r] = {-std::numeric_limits<float>::infinity(), vf{}};
    const float saturation = x.saturation();
    bool unsaturated = kind != NONE;
    const int64_t last = x.first_tile(first + rows.first);
    for (int64_t tile = block; tile >= last && !m.exhausted<kind>(rows); --tile) {
        const bool diagonal = tile == block;
        const float* gate_logits = m.begin_tile<kind>(x, rows, tile, diagonal, unsaturated, base_q);
        const auto row = x.simple() && !diagonal ? forward_row<kind, true> : forward_row<kind, false>;
        for (int r = rows.first; r < rows.end; ++r)
            row(x, b, h, first + r, tile * TILE, saturation, m.rows[r], m.softmax[r], m.s + r * TILE, gate_logits + r * TILE, m.out + r * width,
                width);
        unsaturated = m.unsaturated<kind>(rows, saturation);
        rows.clear_around(m.s, TILE);
        weighted(rows, diagonal, m.s, m.v_rows + tile * TILE * width, width, m.out);
    }
    for (int r = rows.first; r < rows.end; ++r) {
        const int64_t t = first + r - x.start();
        if (kind == STICK) {
            const float remainder = remainder_weight(x, b, h, first + r, float(m.rows[r].position));
            for (int64_t d = 0; remainder != 0 && d < x.D; ++d) m.out[r * width + d] += remainder * m.v_rows[(first + r) * width + d];
            write_row(result, b, h, t, x.D, m.out + r * width, 1, rest);
            lse[x.query(b, h, t)] = float(m.rows[r].position);
            continue;
        }
        const float total = sum(m.softmax[r].total);
        write_row(result, b, h, t, x.D, m.out + r * width, 1 / total, rest);
        lse[x.query(b, h, t)] = m.softmax[r].most + std::log(total);
    }
}

template <Kind kind> static void forward(const NativeProblem& x, const View& result, const View& rest, float* lse) {
#pragma omp parallel num_threads(x.threads)
    {
        ForwardScratch m(x);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < x.items(); ++item) {
            const int64_t head = item / x.groups;
            if (m.packed != head) {
                m.pack_head(x, head / x.H, head % x.H);
                pack_tokens(x, x.v, head / x.H, head % x.H, m.v_rows);
            }
            m.packed = head;
            for_blocks(x, item, [&](int64_t b, int64_t h, int64_t block) { forward_block<kind>(x, m, b, h, block, result, rest, lse); });
            for_padding(x, item, [&](int64_t b, int64_t h, int64_t t) {
                write_row(result, b, h, t, x.D, nullptr);
                lse[x.query(b, h, t)] = 0;
            });
        }
    }
}
