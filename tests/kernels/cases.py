"""Random attention problems, and the comparison of a fused kernel with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cope_sweep.kernels import Inputs, Position, problem_of, reference
from cope_sweep.kernels.blocked import blocked
from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Dims, Encoding, Relative


@dataclass(frozen=True)
class Case:
    """What a random problem is made from."""

    encodings: tuple[Encoding, ...]
    batch: int = 2
    heads: int = 2
    queries: int = 17
    before: int = 0
    """Tokens before the first query."""
    head_dim: int = 8
    sharpness: float = 1.0
    shift: float = 0.0
    """Added to all logits, so that gates lean to 0 or 1: ±30 are gates of exactly 0 and 1 in float32."""
    rotated: bool = False
    dropout: float = 0.0
    lengths: tuple[int, ...] | None = None
    smooth: bool = False
    """Tables in which each entry is near the next. A position that rounding takes across an integer changes the slope
    there, so gradients in float32 are only as near to float64 as the slopes on both sides are to each other."""
    seed: int = 0
    dims: Dims = field(init=False)

    def __post_init__(self) -> None:
        tokens = self.queries + self.before
        object.__setattr__(self, "dims", Dims(self.heads * self.head_dim, self.heads, 1, tokens))


def random_inputs(case: Case) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Leaves in float64, exact in float32: of attention, and of each encoding."""
    rng = torch.Generator().manual_seed(case.seed)
    B, H, T, S, K = case.batch, case.heads, case.queries, case.queries + case.before, case.head_dim

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=rng) * std).double()

    leaves = {"q": normal(B, H, T, K, std=case.sharpness), "k": normal(B, H, S, K), "v": normal(B, H, S, K)}
    if case.shift:
        # One component of the queries is 1, and of the keys what shifts q·k/√K.
        leaves["q"][..., 0] = 1
        leaves["k"][..., 0] = case.shift * K**0.5
    if case.rotated:
        leaves |= {"rotated_q": normal(B, H, T, K), "rotated_k": normal(B, H, S, K)}
    # Scores of a few units: of a thousand, float32 would leave nothing to compare.
    std = {"e": 2 * K**-0.5, "w1": 0.2, "w2": K**-0.5, "m": 0.3}
    parameters = []
    for index, encoding in enumerate(case.encodings):
        shapes = {n: p.shape for n, p in encoding.parameters(case.dims).items() if not n.startswith("gate_")}
        own = {n: normal(*shape, std=std.get(n, 1.0)) for n, shape in shapes.items()}
        if case.smooth and "e" in own:
            P = own["e"].shape[-2]
            wave = (torch.arange(P)[:, None] / 300 * own["e"][..., :1, :].sign()).sin()
            own["e"] = (own["e"][..., :1, :] + wave).float().double()
        parameters.append(own)
        if getattr(encoding, "gate", None) == "separate":
            leaves[f"gate_k{index}"] = normal(B, H, S, K)
    return leaves, parameters


def asked(case: Case, leaves: dict[str, Tensor], parameters: list[dict[str, Tensor]]) -> tuple[Inputs, list[Position]]:
    inputs = Inputs(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        leaves.get("rotated_q", leaves["q"]),
        leaves.get("rotated_k", leaves["k"]),
        [leaves.get(f"gate_k{index}") for index in range(len(case.encodings))],
        lengths_B=None if case.lengths is None else torch.tensor(case.lengths),
    )
    return inputs, [Position(e, p) for e, p in zip(case.encodings, parameters, strict=True)]


SEED = torch.tensor(1234567890123456789)


def output_and_gradients(case: Case, attend: Any, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """By name: what `attend(inputs, positions, dropout, seed)` gives, and the gradient of every leaf."""
    leaves, parameters = random_inputs(case)
    leaves = {n: x.to(dtype).requires_grad_() for n, x in leaves.items()}
    parameters = [{n: x.to(dtype).requires_grad_() for n, x in own.items()} for own in parameters]
    inputs, positions = asked(case, leaves, parameters)
    out = attend(inputs, positions, case.dropout, SEED)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(case.seed + 1), dtype=torch.float64)
    # With a rotation that is not one, unrotated queries and keys may serve nothing: allowed.
    names = {**leaves, **{f"{i}.{n}": x for i, own in enumerate(parameters) for n, x in own.items()}}
    gradients = torch.autograd.grad((out * weight.to(out.dtype)).sum(), list(names.values()), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, names.values(), strict=True)]
    return {"out": out.detach(), **dict(zip(names, zeros, strict=True))}


def by_blocked(inputs: Inputs, positions: list[Position], dropout: float, seed: Tensor) -> Tensor:
    problem = problem_of(inputs, positions, dropout, seed)
    assert problem is not None
    return blocked(problem)


def assert_equals_reference(
    case: Case, attend: Any, dtype: torch.dtype, tolerance: float, mean_tolerance: float | None = None
) -> None:
    """Output and every gradient, each within `tolerance` of the largest number of its kind (or of 1, or of what it sums).

    `mean_tolerance` is of the mean error.
    """
    expected = output_and_gradients(case, reference)
    got = output_and_gradients(case, attend, dtype)
    assert expected.keys() == got.keys()
    for name, wanted in expected.items():
        # What cancels to 0, as the gradient of CoPE-MLP's b₂, is a sum of products of this size.
        scale = max(1.0, case.sharpness * case.head_dim**0.5, wanted.abs().max().item())
        error = (got[name].double() - wanted).abs() / scale
        assert error.isfinite().all(), f"{name} is not finite"
        worst, mean = error.max().item(), error.mean().item()
        assert worst <= tolerance, f"{name}: off by {worst:.2e} of its largest, {scale:.3g}"
        if mean_tolerance is not None:
            assert mean <= mean_tolerance, f"{name}: off by {mean:.2e} of its largest in the mean, {scale:.3g}"


gates = st.sampled_from(["keys", "values", "separate"])


@st.composite
def encodings(draw: Any, tokens: int) -> tuple[Encoding, ...]:
    """One encoding or a sum; contextual ones of a sum have the same gates."""
    gate = draw(gates)
    after = gate == "keys" and draw(st.booleans())
    p_max = draw(st.one_of(st.integers(1, min(tokens + 1, 20)), st.integers(1, tokens + 1), st.just("full")))
    rows = draw(st.one_of(st.integers(1, tokens), st.just("full")))
    choices: dict[str, Encoding] = {
        "cope": CoPE(
            p_max=p_max, gate=gate, gate_after_rotation=after, per_head=draw(st.booleans()),
            scale_positions=draw(st.booleans()),
        ),
        "mlp": CoPEMLP(
            hidden=draw(st.integers(1, 40)), p_max=draw(st.one_of(st.none(), st.integers(1, 30))), gate=gate,
            gate_after_rotation=after, scale_positions=draw(st.booleans()),
        ),
        "cope_alibi": CoPEALiBi(slopes=draw(st.sampled_from(["standard", "learned"])), gate=gate, gate_after_rotation=after),
        "relative": Relative(positions=rows, far=draw(st.sampled_from(["none", "last"]))),
        "alibi": ALiBi(),
        "t5": T5(buckets=4, max_distance=draw(st.integers(3, 40))),
    }  # fmt: skip
    names = draw(
        st.one_of(
            st.just(["cope"]),
            st.sampled_from([[name] for name in choices]),
            st.lists(st.sampled_from(["relative", "alibi", "t5"]), unique=True).map(lambda more: ["cope", *more]),
            st.just(["mlp", "relative"]),
            st.sampled_from([["cope_alibi", "t5"], ["mlp", "cope_alibi"], ["cope", "cope_alibi"]])
            if gate != "separate"
            else st.just(["cope_alibi", "t5"]),
        )
    )
    return tuple(choices[name] for name in names)


@st.composite
def cases(draw: Any, most_tokens: int = 150) -> Case:
    queries = draw(st.one_of(st.integers(1, 40), st.integers(1, most_tokens)))
    before = draw(st.one_of(st.just(0), st.integers(0, 40)))
    batch = draw(st.integers(1, 3))
    tokens = queries + before
    head_dim = draw(st.one_of(st.sampled_from([1, 8, 16, 32, 64, 128]), st.integers(1, 80)))
    return Case(
        encodings=draw(encodings(tokens)),
        batch=batch,
        heads=draw(st.integers(1, 3)),
        queries=queries,
        before=before,
        head_dim=head_dim,
        sharpness=draw(st.sampled_from([0.0, 1.0, 3.0])),
        shift=draw(st.sampled_from([0.0, 0.0, -3.0, 3.0, -30.0, 30.0])),
        rotated=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
        lengths=draw(st.one_of(st.none(), st.lists(st.integers(0, tokens), min_size=batch, max_size=batch).map(tuple))),
        smooth=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


@st.composite
def long_cases(draw: Any, most_tokens: int = 700) -> Case:
    """Up to `most_tokens`, of one sequence: the reference's memory goes with the square."""
    case = draw(cases(most_tokens))
    queries = draw(st.integers(150, most_tokens))
    return replace(case, batch=1, lengths=None, heads=1, head_dim=min(32, case.head_dim), queries=queries, before=0)
