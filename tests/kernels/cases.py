"""Random attention problems: what they are made from, their tensors, and hypothesis strategies for them.

Shapes: B batch, H heads, T queries (the last of the S tokens), S keys, K head dim, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cope_sweep.kernels import Inputs, LayerEncoding, make_problem, operator
from cope_sweep.kernels.arguments import Arguments
from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Dims, Encoding, Relative
from cope_sweep.positions.fox import FoX


def dropout_seeds(batch: int) -> Tensor:
    """Seeds for the dropout masks of a batch, int64 (B,)."""
    return 1234567890123456789 + 987654321987654321 * torch.arange(batch)


@dataclass(frozen=True)
class Case:
    """What a random attention problem is made from."""

    encodings: tuple[Encoding, ...]
    batch: int = 2
    heads: int = 2
    queries: int = 17
    cached: int = 0
    """Tokens before the first query."""
    head_dim: int = 8
    query_std: float = 1.0
    key_std: float = 1.0
    logit_shift: float = 0.0
    """Added to all logits, so that gates are near 0 or 1: ±30 gives gates of exactly 0 and 1 in float32."""
    rotated: bool = False
    dropout: float = 0.0
    lengths: tuple[int, ...] | None = None
    smooth: bool = False
    """Position tables in which each entry is near the next, so that slopes on both sides of an integer are alike."""
    seed: int = 0
    dims: Dims = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", Dims(self.heads * self.head_dim, self.heads, 1, self.tokens))

    @property
    def tokens(self) -> int:
        return self.queries + self.cached

    @property
    def exact_positions(self) -> bool:
        """Whether all gates are exactly ½: positions have no rounding errors, and fall on integers."""
        biased = any(getattr(encoding, "gate_bias_learned", False) for encoding in self.encodings)
        return 0 in (self.query_std, self.key_std) and self.logit_shift == 0 and not self.rotated and not biased


def random_tensors(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """By name: inputs, "0.e" for parameter e of encoding 0, and the output's weights in the loss. In float64, exact in `dtype`.

    Parameters with the same name and shape are drawn independently for each encoding.
    """
    rng = torch.Generator().manual_seed(case.seed)
    B, H, T, S, K = case.batch, case.heads, case.queries, case.tokens, case.head_dim

    def exact(x: Tensor) -> Tensor:
        return x.to(torch.float32 if dtype == torch.float64 else dtype).double()

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return exact(torch.randn(*shape, generator=rng) * std)

    tensors = {
        "q": normal(B, H, T, K, std=case.query_std),
        "k": normal(B, H, S, K, std=case.key_std),
        "v": normal(B, H, S, K),
    }
    if case.logit_shift:
        # One component of the queries is 1; that of the keys shifts q·k/√K.
        tensors["q"][..., 0] = 1
        tensors["k"][..., 0] = exact(torch.tensor(case.logit_shift * K**0.5))
    if case.rotated:
        tensors |= {"rotated_q": normal(B, H, T, K), "rotated_k": normal(B, H, S, K)}
    # Scores of a few units: with larger ones, attention would go to single keys.
    std = {"e": 2 * K**-0.5, "w1": 0.2, "w2": K**-0.5, "m": 0.3}
    for index, encoding in enumerate(case.encodings):
        for name, parameter in encoding.parameters(case.dims).items():
            if name.startswith(("gate_", "forget_")):  # the features made with them are given instead
                continue
            value = normal(*parameter.shape, std=std.get(name, 1.0))
            if case.smooth and name == "e":
                wave_P1 = torch.arange(value.shape[-2])[:, None] / 300
                value = exact(value[..., :1, :] + (wave_P1 * value[..., :1, :].sign()).sin())
            tensors[f"{index}.{name}"] = value
        if getattr(encoding, "gate", None) == "separate":
            tensors[f"features{index}"] = normal(B, H, S, K)
        if encoding.kind == "fox":
            tensors[f"features{index}"] = normal(B, H, S, 1)
    return tensors | {"weight": normal(B, H, T, K)}


def make_inputs(case: Case, tensors: dict[str, Tensor]) -> tuple[Inputs, list[LayerEncoding]]:
    """What `attend` takes, from the tensors of `random_tensors`."""
    inputs = Inputs(
        tensors["q"],
        tensors["k"],
        tensors["v"],
        tensors.get("rotated_q", tensors["q"]),
        tensors.get("rotated_k", tensors["k"]),
        [tensors.get(f"features{index}") for index in range(len(case.encodings))],
        lengths_B=None if case.lengths is None else torch.tensor(case.lengths),
    )
    positions = [
        LayerEncoding(encoding, {n.split(".")[1]: x for n, x in tensors.items() if n.startswith(f"{index}.")})
        for index, encoding in enumerate(case.encodings)
    ]
    return inputs, positions


def problem_of(case: Case, dtype: torch.dtype) -> Arguments:
    """The case as fused kernels are given it, with tensors that have gradients."""
    tensors = {name: x.to(dtype).requires_grad_() for name, x in random_tensors(case, dtype).items()}
    return fused(*make_inputs(case, tensors), case.dropout, dropout_seeds(case.batch))


def fused(*given: Any) -> Arguments:
    problem = make_problem(*given)
    assert isinstance(problem, Arguments), problem
    return problem


def attention_by(kernel: str) -> Callable[..., Tensor]:
    """Attention by a fused kernel, with the arguments of `reference`."""
    return lambda *given: operator.attention(fused(*given), kernel)


gates = st.sampled_from(["keys", "values", "separate"])


@st.composite
def encodings(draw: Any, tokens: int) -> tuple[Encoding, ...]:
    """One encoding or several; contextual ones have the same gates."""
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
        "relative": Relative(
            positions=rows, far=draw(st.sampled_from(["none", "last"])), per_head=draw(st.booleans()),
            scale_positions=draw(st.booleans()),
        ),
        "alibi": ALiBi(),
        "t5": T5(buckets=4, max_distance=draw(st.integers(3, 40))),
        "fox": FoX(),
    }  # fmt: skip
    names = draw(
        st.one_of(
            st.just(["cope"]),
            st.sampled_from([[name] for name in choices]),
            st.lists(st.sampled_from(["relative", "alibi", "t5", "fox"]), unique=True).map(
                lambda others: ["cope", *others]
            ),
            st.just(["mlp", "relative"]),
            st.sampled_from([["cope_alibi", "t5"], ["mlp", "cope_alibi"], ["cope", "cope_alibi"]])
            if gate != "separate"
            else st.just(["cope_alibi", "t5"]),
        )
    )
    if after and "relative" not in names and draw(st.booleans()):
        # Beside a relative table, which has the query before the rotation, there is no fused kernel.
        rotated = {"gate_after_rotation": False, "rotated_query": True}
        return tuple(
            choices[name].model_copy(update=rotated) if name in ("cope", "mlp", "cope_alibi") else choices[name]
            for name in names
        )
    contextual = [name for name in names if name in ("cope", "mlp", "cope_alibi")]
    # Two encodings would have a bias each, so gates that differ. The others have cases of their own in the tests:
    # CoPE-MLP's knots are computed in the type of its parameters, so in bfloat16 they are off, for more keys with a bias.
    # Native takes a row's Σ dp of CoPE-ALiBi from Σ dscore = 0; what rounding leaves of that is in every gate of the row,
    # so their sum over one head, the bias's gradient, was off by 3.3 times what other roundings explain.
    if contextual == ["cope"] and draw(st.booleans()):
        choices |= {name: choices[name].model_copy(update={"gate_bias_learned": True}) for name in contextual}
    return tuple(choices[name] for name in names)


@st.composite
def cases(draw: Any, max_tokens: int = 150) -> Case:
    queries = draw(st.one_of(st.integers(1, 40), st.integers(1, max_tokens)))
    cached = draw(st.one_of(st.just(0), st.integers(0, 40)))
    batch = draw(st.integers(1, 3))
    tokens = queries + cached
    head_dim = draw(st.one_of(st.sampled_from([1, 8, 16, 32, 64, 128]), st.integers(1, 80)))
    return Case(
        encodings=draw(encodings(tokens)),
        batch=batch,
        heads=draw(st.integers(1, 3)),
        queries=queries,
        cached=cached,
        head_dim=head_dim,
        query_std=draw(st.sampled_from([0.0, 1.0, 3.0])),
        logit_shift=draw(st.sampled_from([0.0, 0.0, -3.0, 3.0, -30.0, 30.0])),
        rotated=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
        lengths=draw(st.one_of(st.none(), st.lists(st.integers(0, tokens), min_size=batch, max_size=batch).map(tuple))),
        smooth=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


@st.composite
def long_cases(draw: Any, max_tokens: int = 700) -> Case:
    """One head of one sequence: the memory of the reference grows with the square of the tokens."""
    case = draw(cases(max_tokens))
    queries = draw(st.integers(150, max_tokens))
    return replace(case, batch=1, lengths=None, heads=1, head_dim=min(32, case.head_dim), queries=queries, cached=0)
