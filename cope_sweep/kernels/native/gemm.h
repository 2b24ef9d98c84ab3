// Products of small matrices in registers: C (rows × n) (+)= A (rows × depth) · B (depth × n).
#pragma once

#include "simd.h"

// A(r, k) is at a[r·a_row + k·a_depth]; rows of B and C are contiguous. NV vectors of each of MR rows are kept in registers.
template <int MR, int NV>
static inline void product(const float* a, long a_row, long a_depth, const float* b, long b_row, float* c, long c_row, int depth, bool add) {
    vf sums[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sums[r][v] = add ? load(c + r * c_row + v * W) : vf{};
    for (int k = 0; k < depth; ++k) {
        vf line[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) line[v] = load(b + k * b_row + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            const float factor = a[r * a_row + k * a_depth];
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sums[r][v] += factor * line[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store(c + r * c_row + v * W, sums[r][v]);
}

template <int MR, int NV>
static inline void columns(const float* a, long a_row, long a_depth, const float* b, long b_row, float* c, long c_row, int rows, int depth, bool add) {
    for (int r = 0; r < rows; r += MR) product<MR, NV>(a + r * a_row, a_row, a_depth, b, b_row, c + r * c_row, c_row, depth, add);
}

// `rows` is a multiple of 8, n of W.
static void gemm(const float* a, long a_row, long a_depth, const float* b, long b_row, float* c, long c_row, int rows, int n, int depth, bool add) {
    int v = 0, vectors = n / W;
    if (W == 16) {
        for (; v + 4 <= vectors; v += 4) columns<4, 4>(a, a_row, a_depth, b + v * W, b_row, c + v * W, c_row, rows, depth, add);
        if (v + 3 == vectors) columns<4, 3>(a, a_row, a_depth, b + v * W, b_row, c + v * W, c_row, rows, depth, add), v += 3;
        if (v + 2 == vectors) columns<8, 2>(a, a_row, a_depth, b + v * W, b_row, c + v * W, c_row, rows, depth, add), v += 2;
    } else {
        // 16 registers: 12 sums, a line of 3, and a factor.
        for (; v + 3 <= vectors && v + 4 != vectors; v += 3) columns<4, 3>(a, a_row, a_depth, b + v * W, b_row, c + v * W, c_row, rows, depth, add);
        for (; v + 2 <= vectors; v += 2) columns<4, 2>(a, a_row, a_depth, b + v * W, b_row, c + v * W, c_row, rows, depth, add);
    }
    if (v < vectors) columns<8, 1>(a, a_row, a_depth, b + v * W, b_row, c + v * W, c_row, rows, depth, add);
}
