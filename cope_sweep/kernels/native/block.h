// What the forward and the backward pass share of a head, of a block of queries, and of a tile.
#pragma once

#include "rows.h"
#include "tables.h"

// Number of entries that the rows of a block may read in the next tile: gates are at most 1.
static inline int64_t reachable_entries(const Rows& rows, const Row* walking) {
    double most = 0;
    for (int r = rows.first; r < rows.end; ++r) most = std::max(most, walking[r].position);
    return int64_t(most) + TILE + POSITIONS_AHEAD;
}

// The state of query i, row r of its block, before its first tile.
static inline Row begin_row(const NativeProblem& x, const Table& positions, const Table& distances, int64_t b, int64_t h, int64_t i, int r) {
    Row row{};
    if (x.m) row.m = x.m[h];
    if (x.gate_bias) row.gate_bias = x.gate_bias[h];
    if (x.e) {
        row.table = positions.row(r);
        if (x.P == 1) row.far = row.table[0];
    }
    if (x.relative) row.relative = distances.row(r);
    if (x.key_bias) row.key_bias = x.key_bias + (b * x.H + h) * x.S;
    if (x.knots) {
        const int64_t first = x.query(b, h, i - x.start()) * x.segments();
        row.slope = x.segment_slope + first;
        row.intercept = x.segment_intercept + first;
        row.segment = segment_of(x, 0.0f);
        if (std::isfinite(x.limit)) {
            const int last = segment_of(x, x.limit);
            row.far = row.intercept[last] + row.slope[last] * x.limit;
        }
    }
    return row;
}

struct BlockScratch {
    Scratch k_columns, gate_columns;  // of the head
    Table positions, distances;       // of the head, and of the block
    Scratch q, base_q;                // of the block
    Scratch s, gate_s;                // logits of a tile
    Row rows[TILE];
    bool backward;
    int64_t packed = -1;  // the head whose keys, values and tables are packed

    BlockScratch(const NativeProblem& x, bool backward)
        : k_columns(x, x.tiles() * TILE * x.D), gate_columns(x, x.separate() ? x.tiles() * TILE * x.D : 0),
          positions(x, x.e ? x.P : 0, POSITIONS_AHEAD, backward), distances(x, x.relative ? x.R : 0, DISTANCES_AHEAD, backward),
          q(x, TILE * x.width()), base_q(x, TILE * x.width()), s(x, TILE * TILE), gate_s(x, TILE * TILE), backward(backward) {}

    // Copy a head's keys and tables.
    void pack_head(const NativeProblem& x, int64_t b, int64_t h) {
        const int64_t tokens = x.tokens(b);
        pack_columns(x, x.k, b, h, tokens, k_columns);
        if (x.separate()) pack_columns(x, x.gate_k, b, h, tokens, gate_columns);
        // Packed queries are q·scale.
        if (x.e) positions.pack(x, x.e + h * x.e_head, x.e_scale / x.scale, backward);
        if (x.relative) distances.pack(x, x.relative + h * x.relative_head, x.relative_scale / x.scale, backward);
    }

    // Copy a block's queries and begin its rows. Returns the queries of gates and tables.
    const float* begin(const NativeProblem& x, const Rows& block_rows, int64_t b, int64_t h, int64_t block) {
        block_rows.pack(x, x.q, b, h, block, x.scale, q);
        const float* base = x.rotated() ? base_q : q;
        if (x.rotated()) block_rows.pack(x, x.base_q, b, h, block, x.scale, base_q);
        positions.begin(block_rows, backward), positions.reach(x, block_rows, 1, base, backward);
        distances.begin(block_rows, backward), distances.reach(x, block_rows, (block + 1) * TILE, base, backward);
        for (int r = block_rows.first; r < block_rows.end; ++r) rows[r] = begin_row(x, positions, distances, b, h, block * TILE + r, r);
        return base;
    }

    // Compute the logits of a tile, and of its gates if `gates`, and what its rows may read of the table of positions.
    // Returns the logits of the gates.
    template <Kind kind>
    const float* begin_tile(const NativeProblem& x, const Rows& block_rows, int64_t tile, bool diagonal, bool gates, const float* base) {
        logits(block_rows, diagonal, q, x.width(), k_columns + tile * TILE * x.D, x.D, s);
        if (x.separate() && gates) logits(block_rows, diagonal, base, x.width(), gate_columns + tile * TILE * x.D, x.D, gate_s);
        if (kind == TABLE) positions.reach(x, block_rows, reachable_entries(block_rows, rows), base, backward);
        return x.separate() ? gate_s : s;
    }

    // Whether earlier keys have no weight in any row, because nothing is left of the sticks.
    template <Kind kind> bool exhausted(const Rows& block_rows) const {
        if (kind != STICK) return false;
        for (int r = block_rows.first; r < block_rows.end; ++r)
            if (!(rows[r].position < EXHAUSTED)) return false;
        return true;
    }

    // Whether a row of the block has not reached the position `saturation`.
    template <Kind kind> bool unsaturated(const Rows& block_rows, float saturation) const {
        if (kind != NONE && kind != STICK)
            for (int r = block_rows.first; r < block_rows.end; ++r)
                if (rows[r].position < saturation) return true;
        return false;
    }
};

// Rows of a head for the tokens of a sequence, and 0 up to the end of the last tile.
static void pack_tokens(const NativeProblem& x, const View& from, int64_t b, int64_t h, float* to) {
    const int64_t tokens = x.tokens(b);
    pack_rows(x, from, b, h, 0, tokens, 1, to);
    zero(to + tokens * x.width(), ((TILE - tokens % TILE) % TILE) * x.width());
}

// Call `work(b, h, block)` for each block of an item that has queries. An item is a group of the blocks of a head.
template <class Work> static void for_blocks(const NativeProblem& x, int64_t item, Work work) {
    const int64_t b = item / x.groups / x.H, h = item / x.groups % x.H, tokens = x.tokens(b);
    for (int64_t block = x.start() / TILE; block < x.tiles(); ++block)
        if (block % x.groups == item % x.groups && !Rows(x, block, tokens).none()) work(b, h, block);
}

// Call `write(b, h, t)` for each query that is padding, once for all groups of a head.
template <class Write> static void for_padding(const NativeProblem& x, int64_t item, Write write) {
    const int64_t b = item / x.groups / x.H, h = item / x.groups % x.H;
    if (item % x.groups) return;
    for (int64_t t = std::max<int64_t>(0, x.tokens(b) - x.start()); t < x.T; ++t) write(b, h, t);
}
