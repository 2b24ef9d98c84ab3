// Vectors of W floats: 16 with AVX-512, 8 with AVX2, else 4.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef float vf_unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));

static inline vf load(const float* p) { return *(const vf_unaligned*)p; }
static inline void store(float* p, vf x) { *(vf_unaligned*)p = x; }
static inline vf splat(float x) { return x - vf{}; }
static inline vi splat(int32_t x) { return x - vi{}; }
static inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }
static inline vi as_int(vf x) { return (vi)x; }
static inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
static inline vi truncate(vf x) { return __builtin_convertvector(x, vi); }

static inline vi iota() {
    vi x;
    for (int l = 0; l < W; ++l) x[l] = l;
    return x;
}

// vmin and vmax return b where a or b is NaN. So the bound comes first where a NaN has to stay, and last where not.
#if defined(__AVX512F__)
static inline vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
static inline vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vi vmin(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
static inline float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
static inline float largest(vf x) { return _mm512_reduce_max_ps((__m512)x); }
static inline bool any_above(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0; }
// Lane l takes lane l + N, or 0 beyond the last.
template <int N> static inline vf from_right(vf x) {
    return (vf)_mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_setzero_si512(), (__m512i)(vi)x, N));
}
// Lane l takes x[index[l]], indices taken modulo W.
static inline vf pick(vf x, vi index) { return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)x); }
// Lane l takes entry index[l] of a and b, one after the other.
static inline vf pick(vf a, vf b, vi index) { return (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)index, (__m512)b); }
static inline vf reciprocal(vf x) {
    vf y = (vf)_mm512_rcp14_ps((__m512)x);
    return y * (2.0f - x * y);  // 14 correct bits, doubled by a Newton step
}
#elif defined(__AVX2__)
static inline vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
static inline vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vi vmin(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
static inline bool any_above(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0; }
static inline vf pick(vf x, vi index) { return (vf)_mm256_permutevar8x32_ps((__m256)x, (__m256i)index); }
static inline vf reciprocal(vf x) { return 1.0f / x; }
#else
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vi vmin(vi a, vi b) { return a < b ? a : b; }
static inline bool any_above(vf a, vf b) {
    vi above = a > b;
    int32_t any = 0;
    for (int l = 0; l < W; ++l) any |= above[l];
    return any != 0;
}
static inline vf pick(vf x, vi index) { return __builtin_shuffle(x, index); }
static inline vf reciprocal(vf x) { return 1.0f / x; }
#endif

#if !defined(__AVX512F__)
static inline float sum(vf x) {
    for (int n = W / 2; n; n /= 2)
        for (int l = 0; l < n; ++l) x[l] += x[l + n];
    return x[0];
}
static inline float largest(vf x) {
    float most = x[0];
    for (int l = 1; l < W; ++l) most = x[l] > most ? x[l] : most;
    return most;
}
template <int N> static inline vf from_right(vf x) { return __builtin_shuffle(x, vf{}, iota() + N); }
static inline vf pick(vf a, vf b, vi index) { return __builtin_shuffle(a, b, index); }
#endif

static inline vf reversed(vf x) { return pick(x, (W - 1) - iota()); }

// Transpose W rows of W floats in place.
static inline void transpose(vf* rows) {
    const vi lane = iota();
#pragma GCC unroll 4
    for (int s = 1; s < W; s *= 2) {
        const vi first = (lane & s) == 0;
        const vi low = first ? lane : lane + (W - s), high = first ? lane + s : lane + W;
#pragma GCC unroll 16
        for (int r = 0; r < W; ++r) {
            if (r & s) continue;
            const vf a = rows[r], b = rows[r + s];
            rows[r] = pick(a, b, low);
            rows[r + s] = pick(a, b, high);
        }
    }
}

// Lane l: the sum of lanes l … W − 1.
static inline vf suffix_sums(vf x) {
    x += from_right<1>(x);
    x += from_right<2>(x);
    if (W > 4) x += from_right<4 % W>(x);
    if (W > 8) x += from_right<8 % W>(x);
    return x;
}

// e^x within 2 units in the last place, for x < 88. Smaller x than −87 give 0, as masked keys have: e^−87 would make their
// gradients subnormal, with which products of matrices take many times as long. NaN gives NaN.
static inline vf vexp(vf x) {
    const float magic = 12582912.0f;  // 1.5·2²³: adding it leaves the rounded integer in the lowest bits
    const vi is_zero = x < -87.0f;
    x = vmax(splat(-87.0f), x);
    vf shifted = x * 1.44269504088896341f + magic;
    vf r = x - (shifted - magic) * 0.693147180559945309f;
    // Least relative error on ±ln 2/2 with the first two coefficients 1: 3e-9.
    vf y = r * 0.0013814468371981814f + 0.008368780642603211f;
    y = y * r + 0.041668394202417004f;
    y = y * r + 0.16666520105755328f;
    y = y * r + 0.49999993412486776f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return (vf)(~is_zero & (as_int(y) + (as_int(shifted) << 23)));
}

// log σ(x) within a few units in the last place; NaN gives NaN.
static inline vf log_sigmoid(vf x) {
    const vf t = vexp(-vmax(x, -x));  // ≤ 1, and log(1 + t) = 2·artanh(t/(2 + t)), whose argument is ≤ 1/3
    const vf s = t * reciprocal(2.0f + t), s2 = s * s;
    vf y = s2 * (2.0f / 15) + 2.0f / 13;
    y = y * s2 + 2.0f / 11;
    y = y * s2 + 2.0f / 9;
    y = y * s2 + 2.0f / 7;
    y = y * s2 + 2.0f / 5;
    y = y * s2 + 2.0f / 3;
    y = y * s2 + 2.0f;
    return vmin(vf{}, x) - y * s;
}

static inline vf sigmoid(vf x) { return reciprocal(1.0f + vexp(-vmax(splat(-86.0f), x))); }
