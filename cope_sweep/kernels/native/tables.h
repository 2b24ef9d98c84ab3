// Tables of products q·e[p] for a block of queries, computed only as far as the positions of the block have come; and the
// gradients of q and e, given those of such a table.
#pragma once

#include <algorithm>

#include "tiles.h"

// Token i reads at most i + this many entries: a position includes the token's own gate, and interpolation reads the next.
constexpr int POSITIONS_AHEAD = 2, DISTANCES_AHEAD = 0;

class Table {
  public:
    // `entries` rows of D floats. A block whose last query is token i reads at most i + `ahead` of them.
    Table(const NativeProblem& x, int64_t entries, int ahead, bool backward)
        : entries_(reachable(x, entries, ahead)), tiles_((entries_ + TILE - 1) / TILE),
          stride_(W + tiles_ * TILE + 2 * W),
          columns_(x, entries_ ? tiles_ * TILE * x.D : 1), rows_(x, entries_ && backward ? tiles_ * TILE * x.width() : 1),
          values_(x, entries_ ? TILE * stride_ : 1), gradients_(x, entries_ && backward ? TILE * stride_ : 1) {}

    // Copy a head's table, times `scale`.
    void pack(const NativeProblem& x, const float* e, float scale, bool backward) {
        pack_columns(x.D, entries_, scale, columns_, [&](int64_t p) { return e + p * x.D; });
        if (!backward) return;
        const long width = x.width();
        zero(rows_, tiles_ * TILE * width);
        for (int64_t p = 0; p < entries_; ++p)
            for (int64_t d = 0; d < x.D; ++d) rows_[p * width + d] = e[p * x.D + d] * scale;
    }

    // Begin a block of queries, without products.
    void begin(const Rows& rows, bool backward) {
        reached_ = 0;
        if (!entries_ || !backward) return;
        for (int r = rows.first8; r < rows.end8; ++r) zero(gradients_ + r * stride_, W);
    }

    // Compute the products of the block's queries with entries 0 … end − 1, except those computed before.
    void reach(const NativeProblem& x, const Rows& rows, int64_t end, const float* q, bool backward) {
        end = std::min(end, entries_);
        const long width = x.width();
        while (reached_ < end) {
            const int64_t p = reached_;
            reached_ = std::min(entries_, p + TILE);
            const int n = int((reached_ - p + W - 1) / W * W);
            gemm(q + rows.first8 * width, width, 1, columns_ + p * x.D, TILE, values_ + rows.first8 * stride_ + W + p, stride_,
                 rows.end8 - rows.first8, n, int(x.D), false);
            for (int r = rows.first8; r < rows.end8; ++r) {
                if (reached_ == entries_) zero(values_ + r * stride_ + W + p + n, 2 * W);
                if (backward) zero(gradients_ + r * stride_ + W + p, n + 2 * W);
            }
        }
    }

    // Row r of the block; W floats after its last entry can be read.
    const float* row(int r) const { return values_ + r * stride_ + W; }
    float* gradient(int r) const { return gradients_ + r * stride_ + W; }
    int64_t reached() const { return reached_; }

    // Given the gradients dz of the block's products: dq += dz·e, de += dzᵀ·q.
    void products(const NativeProblem& x, const Rows& rows, const float* q, float* dq, float* de) const {
        const long width = x.width();
        const int count = rows.end8 - rows.first8;
        const float* dz = gradients_ + rows.first8 * stride_ + W;
        gemm(dz, stride_, 1, rows_, width, dq + rows.first8 * width, width, count, int(width), int(reached_), true);
        gemm(dz, 1, stride_, q + rows.first8 * width, width, de, width, int((reached_ + 7) / 8 * 8), int(width), count, true);
    }

    // The number of entries that some query can read.
    static int64_t reachable(const NativeProblem& x, int64_t entries, int ahead) { return std::min(entries, x.S + ahead); }

    // Floats of the gradient of the entries that can be read, in padded rows.
    static size_t size(const NativeProblem& x, int64_t entries, int ahead) {
        return (reachable(x, entries, ahead) + TILE - 1) / TILE * TILE * x.width();
    }

  private:
    int64_t entries_, tiles_, stride_, reached_ = 0;
    Scratch columns_, rows_, values_, gradients_;
};

// Write the gradient of e: the partial sums of all items added in order, over all heads or for each head.
static void write_table(const NativeProblem& x, float* to, int64_t entries, int ahead, bool per_head, float scale, const float* parts, size_t part) {
    const long width = x.width();
    std::fill(to, to + (per_head ? x.H : 1) * entries * x.D, 0.0f);
    for (int64_t item = 0; item < x.items(); ++item) {
        float* e = to + (per_head ? item / x.groups % x.H * entries * x.D : 0);
        for (int64_t p = 0; p < Table::reachable(x, entries, ahead); ++p)
            for (int64_t d = 0; d < x.D; ++d) e[p * x.D + d] += parts[item * part + p * width + d] * scale;
    }
}
