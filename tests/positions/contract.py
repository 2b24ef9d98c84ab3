"""What every position encoding must do, whatever it computes. Each encoding's test subclasses this suite."""

import json

import pytest
import torch

from cope_sweep.kernels import using
from cope_sweep.model import Transformer
from cope_sweep.spec import RunSpec
from tests.tiny import tiny_run

T = 9


class EncodingContract:
    """Subclasses set `position`, the list of encodings under test."""

    position: list
    extrapolates = True
    """Whether it works past the longest sequence of its task."""

    def run(self, **overrides) -> RunSpec:
        return tiny_run(**{"model.position": self.position, "model.layers": 2, "task.blanks": 7} | overrides)

    def model(self, **overrides) -> Transformer:
        """In float64, its position parameters not at their zeros, where much would be true by chance."""
        model = Transformer(self.run(**overrides)).double().eval()
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.position.parameters():
                parameter.normal_(0, 1, generator=rng)
            for name, parameter in model.named_parameters():
                if name.endswith("qkv.weight"):
                    parameter.mul_(30)  # gates away from ½, attention away from even
        return model

    def tokens(self, length: int = T, batch: int = 2) -> torch.Tensor:
        return torch.randint(0, 6, (batch, length), generator=torch.Generator().manual_seed(2))

    def test_future_tokens_change_nothing(self):
        model, tokens = self.model(), self.tokens()
        changed = tokens.clone()
        changed[:, 5:] = (changed[:, 5:] + 1) % 6
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :5], after[:, :5])
        assert not torch.equal(before[:, 5:], after[:, 5:])

    def test_no_gradient_flows_to_the_future(self):
        model, tokens = self.model(), self.tokens(batch=1)
        embedded = model.embedding(tokens).detach().requires_grad_()
        model.embedding.forward = lambda _: embedded
        model(tokens)[0, 4].square().sum().backward()
        gradient = embedded.grad[0].abs().sum(-1)
        assert (gradient[:5] > 0).all()
        assert (gradient[5:] == 0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients_are_finite(self, dtype):
        model = self.model().to(dtype)
        model(self.tokens()).float().square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name

    def test_every_position_parameter_learns(self):
        model = self.model()
        model(self.tokens()).square().mean().backward()
        for name, parameter in model.position.named_parameters():
            assert parameter.grad.abs().sum() > 0, name

    def test_cached_decoding_equals_the_full_pass(self):
        model, tokens = self.model(), self.tokens()
        full = model(tokens)
        cache = [{} for _ in model.blocks]
        steps = [model(tokens[:, :3], cache), *(model(tokens[:, t : t + 1], cache) for t in range(3, T))]
        torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=1e-12, atol=1e-12)

    def test_right_padding_changes_nothing_before_it(self):
        model, tokens = self.model(), self.tokens()
        padded = torch.cat((tokens, torch.zeros(2, 2, dtype=torch.long)), dim=1)
        torch.testing.assert_close(model(padded)[:, :T], model(tokens), rtol=1e-12, atol=1e-12)

    def test_sequences_of_mixed_lengths_equal_each_alone(self):
        model, tokens, lengths = self.model(), self.tokens(batch=4), [T, 1, 5, 7]
        batched = model(tokens, lengths_B=torch.tensor(lengths))
        for row, length in enumerate(lengths):
            alone = model(tokens[row : row + 1, :length])
            torch.testing.assert_close(batched[row : row + 1, :length], alone, rtol=1e-12, atol=1e-12)

    def test_padding_attends_to_nothing(self):
        model, tokens = self.model(), self.tokens(batch=1)
        embedded = model.embedding(tokens).detach().requires_grad_()
        model.embedding.forward = lambda _: embedded
        model(tokens, lengths_B=torch.tensor([4]))[0, 6].square().sum().backward()
        gradient = embedded.grad[0].abs().sum(-1)
        assert gradient[6] > 0
        assert (gradient[:6] == 0).all()

    @pytest.mark.parametrize(
        ("implementation", "dtype", "tolerance"),
        [("blocked", torch.float64, 1e-9), ("native", torch.float32, 5e-3), ("auto", torch.float32, 5e-3)],
    )
    def test_fused_equals_the_reference(self, implementation, dtype, tolerance):
        model, tokens = self.model(**{"task.blanks": 40}).to(dtype), self.tokens(40)

        def output_and_gradients():
            model.zero_grad()
            logits = model(tokens)
            logits.square().mean().backward()
            return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

        with using("reference"):
            expected = output_and_gradients()
        with using(implementation):
            got = output_and_gradients()
        for one, other in zip(got, expected, strict=True):
            # In the mean: in float32, a position that rounding takes across an integer has another slope.
            assert (one - other).abs().mean() <= tolerance * max(1.0, other.abs().max().item())

    def test_state_dict_round_trip(self):
        model, again = self.model(), Transformer(self.run(seed=7)).double().eval()
        again.load_state_dict(model.state_dict())
        assert torch.equal(model(self.tokens()), again(self.tokens()))

    def test_beyond_the_context(self):
        model = self.model()
        longer = self.tokens(self.run().dims.context + 5)
        if self.extrapolates:
            assert model(longer).isfinite().all()
        else:
            with pytest.raises(ValueError, match="model.context"):
                model(longer)

    def test_order_matters(self):
        model, tokens = self.model(), self.tokens(batch=1)
        swapped = tokens.clone()
        swapped[0, 1], swapped[0, 2] = 3, 4
        tokens[0, 1], tokens[0, 2] = 4, 3
        assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])

    def test_spec_survives_json(self):
        run = self.run()
        again = RunSpec.model_validate_json(json.dumps(run.model_dump(mode="json")))
        assert again == run
        assert again.run_id == run.run_id
