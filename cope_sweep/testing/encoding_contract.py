"""The contract of position encodings: tests that every encoding has to pass.

Shapes: B batch, T tokens, D model dim.
"""

# ruff: noqa: S101 - test suites assert

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cope_sweep.config import RunSpec
from cope_sweep.kernels import Inputs, LayerEncoding, attend, reference, using
from cope_sweep.model import Transformer
from cope_sweep.model.attention import by_head, cached_attention
from cope_sweep.model.shares import even_shares
from cope_sweep.positions import Attention, Dims, Encoding
from cope_sweep.positions.cope import ContextualEncoding

TOKENS = 9
VOCABULARY = 6

ROUNDING = 1e-12
"""Tolerance of equal float64 computations in another order: about 50 terms of size 1, each rounded by 1.1e-16, through
two layers that amplify errors by less than 100."""


HALF_PRECISION = 4e-4
"""Largest mean error of outputs in bfloat16. Rounding the outputs gives 2e-4; positions that are summed in bfloat16
give 6e-4 for a table of 4 positions and 9e-3 for one of 512."""

ROUNDED_OUTPUT, ROUNDED_QUERIES = 0.003, 0.02
"""Largest error of outputs in bfloat16, relative to their norm. Rounding the outputs gives 0.002, and a product of
matrices in bfloat16 on the way to a score 0.008 and more. Rounding queries and keys again, once they are mixed or
rotated, gives up to 0.011 (more for larger ones), and such a product on the way to an angle 0.08 and more."""


class EncodingContract:
    """Tests of position encodings in a small float64 transformer. Subclasses set `specs`."""

    specs: ClassVar[Sequence[Any]] = ()
    """The encodings under test. Each item is a spec, a `kind`, a mapping, or a list of these, which then compose."""

    extrapolates: ClassVar[bool | None] = None
    """Whether sequences may be longer than the model's context. None: either they work, or a ValueError is raised."""

    order_matters: ClassVar[bool] = True
    """Whether the order of earlier tokens changes the output."""

    model_fields: ClassVar[dict[str, Any]] = {}
    """Fields of the model spec to change, for example `{"heads": 4}`."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test that takes a `spec` once per item of `specs`."""
        if "spec" in metafunc.fixturenames:
            metafunc.parametrize("spec", self.specs, ids=[_name(spec) for spec in self.specs])

    # -- helpers

    def run(self, spec: Any, *, blanks: int = 7, seed: int = 0, **model_fields: Any) -> RunSpec:
        """A small run with these encodings: selective copy, 2 layers, 2 heads of 4 dims, a context of `blanks` + 4."""
        position = spec if isinstance(spec, (list, tuple)) else [spec]
        sizes = {"blanks": blanks, "dense_blanks": 1, "sparse_blanks": 4}
        task = {"kind": "selective_copy", "tokens": 2, "vocabulary": VOCABULARY, **sizes}
        model = {"layers": 2, "dim": 8, "heads": 2, "position": position}
        return RunSpec.model_validate({"task": task, "model": model | self.model_fields | model_fields, "seed": seed})

    def model(self, spec: Any, **fields: Any) -> Transformer:
        """The model of `run` in float64, with random position parameters and large query and key weights.

        With parameters at their initial zeros, and all gates near ½, many of the tests would pass by accident.
        """
        run = self.run(spec, **fields)
        model = Transformer(run).double().eval()
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for encoding, module in zip(run.model.position, model.position, strict=True):
                declared = encoding.parameters(run.dims)
                for name, parameter in module.named_parameters():
                    parameter.normal_(generator=rng)
                    parameter.add_(
                        torch.tensor(declared[name.split(".")[-1]].centre, dtype=torch.float64).to(parameter)
                    )
            for name, parameter in model.named_parameters():
                if name.endswith("qkv.weight"):
                    parameter.mul_(30)
        return model

    def tokens(self, length: int = TOKENS, batch: int = 2) -> Tensor:
        """Random token ids, (batch, length); the same in each call."""
        return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(2))

    # -- tests

    def test_outputs_do_not_depend_on_later_tokens(self, spec: Any) -> None:
        model, tokens = self.model(spec), self.tokens()
        changed = tokens.clone()
        changed[:, 5:] = (changed[:, 5:] + 1) % VOCABULARY
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :5], after[:, :5])
        assert not torch.equal(before[:, 5:], after[:, 5:])

    def test_gradients_do_not_reach_later_tokens(self, spec: Any) -> None:
        model, tokens = self.model(spec), self.tokens(batch=1)
        embedded = _embedding_leaf(model, tokens)
        model(tokens)[0, 4].square().sum().backward()
        assert embedded.grad is not None
        gradient = embedded.grad[0].abs().sum(-1)
        assert (gradient[:5] > 0).all()
        assert (gradient[5:] == 0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_gradients_are_finite(self, spec: Any, dtype: torch.dtype) -> None:
        model = self.model(spec).to(dtype)
        model(self.tokens()).float().square().mean().backward()
        for name, parameter in _learned(model).items():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name

    def test_every_position_parameter_has_a_gradient(self, spec: Any) -> None:
        model = self.model(spec)
        model(self.tokens()).square().mean().backward()
        for name, parameter in _learned(model.position).items():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name

    def test_cached_decoding_equals_the_full_pass(self, spec: Any) -> None:
        model, tokens = self.model(spec), self.tokens()
        full = model(tokens)
        cache: list[dict[str, Tensor]] = [{} for _ in model.blocks]
        steps = [model(tokens[:, :3], cache), *(model(tokens[:, t : t + 1], cache) for t in range(3, TOKENS))]
        torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=ROUNDING, atol=ROUNDING)

    def test_padding_does_not_change_the_tokens_before_it(self, spec: Any) -> None:
        model, tokens = self.model(spec), self.tokens()
        padded = torch.cat((tokens, torch.zeros(2, 2, dtype=torch.long)), dim=1)
        torch.testing.assert_close(model(padded)[:, :TOKENS], model(tokens), rtol=ROUNDING, atol=ROUNDING)

    def test_a_batch_of_mixed_lengths_equals_single_sequences(self, spec: Any) -> None:
        model, tokens, lengths = self.model(spec), self.tokens(batch=4), [TOKENS, 1, 5, 7]
        batched = model(tokens, lengths_B=torch.tensor(lengths))
        for row, length in enumerate(lengths):
            single = model(tokens[row : row + 1, :length])
            torch.testing.assert_close(batched[row : row + 1, :length], single, rtol=ROUNDING, atol=ROUNDING)

    def test_padding_attends_to_nothing(self, spec: Any) -> None:
        model, tokens = self.model(spec), self.tokens(batch=1)
        embedded = _embedding_leaf(model, tokens)
        model(tokens, lengths_B=torch.tensor([4]))[0, 6].square().sum().backward()
        assert embedded.grad is not None
        gradient = embedded.grad[0].abs().sum(-1)
        assert gradient[6] > 0
        assert (gradient[:6] == 0).all()

    @pytest.mark.parametrize(
        ("implementation", "dtype", "tolerance"),
        [
            # float64: 40 terms per sum, amplified by the large weights; 1e-9 leaves six digits for that.
            pytest.param("blocked", torch.float64, 1e-9, id="blocked"),
            # float32: a position that rounding moves across an integer has another slope, so only means agree.
            pytest.param("native", torch.float32, 5e-3, id="native"),
            pytest.param("auto", torch.float32, 5e-3, id="auto"),
        ],
    )
    def test_fused_kernels_equal_the_reference(
        self, spec: Any, implementation: Any, dtype: torch.dtype, tolerance: float
    ) -> None:
        # More tokens than a block of queries, and than a tile of the kernels.
        model, tokens = self.model(spec, blanks=80).to(dtype), self.tokens(80)

        def output_and_gradients() -> list[Tensor]:
            model.zero_grad()
            logits = model(tokens)
            logits.square().mean().backward()
            return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

        with using("reference"):
            expected = output_and_gradients()
        with using(implementation):
            actual = output_and_gradients()
        for one, other in zip(actual, expected, strict=True):
            assert (one - other).abs().mean() <= tolerance * max(1.0, other.abs().max().item())

    def test_positions_are_summed_in_float32(self, spec: Any) -> None:
        """Contextual positions of 512 tokens, on every path: sums of that many gates in bfloat16 are off by up to 1."""
        run = self.run(spec, blanks=508)
        contextual = [encoding for encoding in run.model.position if isinstance(encoding, ContextualEncoding)]
        if not contextual:
            pytest.skip("no contextual encoding")
        for encoding in contextual:
            inputs, exact, parameters = _half_precision_inputs(encoding, run.dims)
            half, full = _attention(inputs), _attention(exact)
            positions_BHQS = encoding.positions(parameters, half)
            assert positions_BHQS.dtype == torch.float32
            assert (positions_BHQS - encoding.positions(parameters, full)).abs().max() < 1e-3
            expected = reference(exact, [_double(LayerEncoding(encoding, parameters))])
            for implementation in ("reference", "blocked", "native", "auto"):
                with torch.autocast("cpu", torch.bfloat16):
                    actual = attend(inputs, [LayerEncoding(encoding, parameters)], implementation=implementation)
                assert actual.dtype == torch.bfloat16
                assert (actual.double() - expected).abs().mean() < HALF_PRECISION, implementation

    @torch.no_grad()
    def test_under_autocast_scores_and_angles_are_not_rounded(self, spec: Any) -> None:
        """Each encoding alone, with 256 tokens: only queries, keys, values, features and outputs are in bfloat16."""
        run, model = self.run(spec), self.model(spec).float()
        tokens, heads = 256, run.model.heads
        rng = torch.Generator().manual_seed(3)
        h_BTD = torch.randn(1, tokens, run.model.dim, generator=rng)
        q, k, v = torch.randn(3, 1, heads, tokens, run.dims.head_dim, generator=rng).bfloat16()
        in_layers = [position for layer in range(run.model.layers) for position in model._positions(layer)]
        for encoding, position in {position.encoding: position for position in in_layers}.items():
            largest = ROUNDED_QUERIES if encoding.mixes or encoding.rotates else ROUNDED_OUTPUT
            with torch.autocast("cpu", torch.bfloat16):
                features = _features(position, h_BTD, heads)
            exact_features = None if features is None else features.double()
            exact = cached_attention(q.double(), k.double(), v.double(), [_double(position)], [exact_features])
            for implementation in ("reference", "auto"):
                with using(implementation), torch.autocast("cpu", torch.bfloat16):
                    output = cached_attention(q, k, v, [position], [features])
                assert output.dtype == torch.bfloat16
                assert (output - exact).norm() <= largest * exact.norm(), (encoding.kind, implementation)

    def test_state_dict_round_trip(self, spec: Any) -> None:
        model, other = self.model(spec), Transformer(self.run(spec, seed=7)).double().eval()
        other.load_state_dict(model.state_dict())
        assert torch.equal(model(self.tokens()), other(self.tokens()))

    def test_sequences_longer_than_the_context(self, spec: Any) -> None:
        model = self.model(spec)
        longer = self.tokens(self.run(spec).dims.context + 5)
        logits, message = None, ""
        try:
            logits = model(longer)
        except ValueError as error:
            message = str(error)
        if logits is None:
            assert not self.extrapolates, f"extrapolates is true, and the encoding raised ValueError: {message}"
            assert "model.context" in message, "the message has to name model.context"
        else:
            assert self.extrapolates is not False, "extrapolates is false, and the encoding raised nothing"
            assert logits.isfinite().all()

    def test_order_matters(self, spec: Any) -> None:
        if not self.order_matters:
            pytest.skip("order_matters is false")
        model, tokens = self.model(spec), self.tokens(batch=1)
        tokens[0, 1], tokens[0, 2] = 4, 3
        swapped = tokens.clone()
        swapped[0, 1], swapped[0, 2] = 3, 4
        assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])

    def test_spec_round_trips_through_json(self, spec: Any) -> None:
        run = self.run(spec)
        again = RunSpec.model_validate_json(json.dumps(run.model_dump(mode="json")))
        assert again == run
        assert again.run_id == run.run_id


def _learned(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _features(position: LayerEncoding, h_BTD: Tensor, heads: int) -> Tensor | None:
    """An encoding's features by head; positions that it samples are those of evaluations."""
    if position.encoding.samples:
        shares_BT = even_shares(torch.tensor([h_BTD.shape[1]]), h_BTD.shape[1])
        return shares_BT[:, None, :, None].expand(-1, heads, -1, -1)
    features_BTX = position.encoding.features(position.parameters, h_BTD)
    return None if features_BTX is None else by_head(features_BTX, heads)


def _double(position: LayerEncoding) -> LayerEncoding:
    """The same encoding, with its parameters in float64."""
    return LayerEncoding(position.encoding, {name: x.double() for name, x in position.parameters.items()})


def _half_precision_inputs(encoding: Encoding, dims: Dims) -> tuple[Inputs, Inputs, dict[str, Tensor]]:
    """Random inputs in bfloat16, the same numbers in float64, and parameters in float32, as autocast uses them."""
    rng = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    q, k, v, gate_k = normal(4, 1, dims.heads, dims.context, dims.head_dim).bfloat16()
    exact = Inputs(q.double(), k.double(), v.double(), torch.empty(0), torch.empty(0), [gate_k.double()])
    exact = replace(exact, rotated_q_BHTK=exact.q_BHTK, rotated_k_BHSK=exact.k_BHSK)
    parameters = {
        name: normal(*declared.shape) * (declared.std or 0.3) for name, declared in encoding.parameters(dims).items()
    }
    return Inputs(q, k, v, q, k, [gate_k]), exact, parameters


def _attention(inputs: Inputs) -> Attention:
    """Arguments of an encoding's `score`, with logits in float32 or float64."""
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (inputs.q_BHTK, inputs.k_BHSK))
    visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return Attention(inputs.q_BHTK, inputs.k_BHSK, inputs.v_BHSK, logits, visible, inputs.features_BHSF[0])


def _embedding_leaf(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """The token embeddings as a leaf tensor, (B, T, D), which the model uses from now on; its `grad` is filled."""
    embedded_BTD: Tensor = model.embedding(tokens_BT).detach().requires_grad_()
    model.embedding.register_forward_hook(lambda module, args, output: embedded_BTD)
    return embedded_BTD


def _name(spec: Any) -> str:
    """A short test id: the kinds of the encodings, and the fields that are set."""
    if isinstance(spec, (list, tuple)):
        return "+".join(map(_name, spec)) or "none"
    if isinstance(spec, str):
        return spec
    fields = spec if isinstance(spec, dict) else {"kind": spec.kind, **spec.model_dump(exclude_defaults=True)}
    set_fields = [f"{name}={_value(value)}" for name, value in fields.items() if name != "kind"]
    return ",".join([fields["kind"], *set_fields])


def _value(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
