// Causal attention with scores of contextual and relative positions, forward and backward, on a CPU.
// A plain C interface for ctypes: see kernels/native/abi.py. What is computed: kernels/arguments.py.
#include <type_traits>

#include "backward.h"
#include "forward.h"

// Call `compute` with the problem's kind as a constant.
template <class Compute> static void with_kind(const NativeProblem& x, Compute compute) {
    switch (kind_of(x)) {
        case TABLE: return compute(std::integral_constant<Kind, TABLE>());
        case SEGMENTS: return compute(std::integral_constant<Kind, SEGMENTS>());
        case SLOPE_ONLY: return compute(std::integral_constant<Kind, SLOPE_ONLY>());
        case STICK: return compute(std::integral_constant<Kind, STICK>());
        case NONE: return compute(std::integral_constant<Kind, NONE>());
    }
}

extern "C" {

// `rest`: what the output is off by, where it is bfloat16, so that the backward pass has it exactly enough.
void cope_forward(const abi::Problem* problem, const View* out, const View* rest, float* lse) {
    const NativeProblem x(*problem);
    with_kind(x, [&](auto kind) { forward<kind>(x, *out, *rest, lse); });
}

void cope_backward(const abi::Problem* problem, const View* out, const View* rest, const float* lse, const View* dout, const Gradients* to) {
    const NativeProblem x(*problem);
    with_kind(x, [&](auto kind) { backward<kind>(x, *out, *rest, lse, *dout, *to); });
}
}
