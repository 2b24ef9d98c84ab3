// Causal attention with scores of contextual and relative positions, forward and backward, on a CPU.
// A plain C interface for ctypes: see kernels/native/abi.py. What is computed: kernels/problem.py.
#include "backward.h"
#include "forward.h"

extern "C" {

void cope_forward(const abi::Problem* problem, const View* out, float* lse) {
    const NativeProblem x(*problem);
    switch (kind_of(x)) {
        case TABLE: return forward<TABLE>(x, *out, lse);
        case SEGMENTS: return forward<SEGMENTS>(x, *out, lse);
        case SLOPE_ONLY: return forward<SLOPE_ONLY>(x, *out, lse);
        case NONE: return forward<NONE>(x, *out, lse);
    }
}

void cope_backward(const abi::Problem* problem, const View* out, const float* lse, const View* dout, const Gradients* to) {
    const NativeProblem x(*problem);
    switch (kind_of(x)) {
        case TABLE: return backward<TABLE>(x, *out, lse, *dout, *to);
        case SEGMENTS: return backward<SEGMENTS>(x, *out, lse, *dout, *to);
        case SLOPE_ONLY: return backward<SLOPE_ONLY>(x, *out, lse, *dout, *to);
        case NONE: return backward<NONE>(x, *out, lse, *dout, *to);
    }
}
}
