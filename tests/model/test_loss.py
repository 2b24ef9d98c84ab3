import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.model import Transformer, loss
from cope_sweep.model.loss import next_token_loss, output_loss, predict
from cope_sweep.tasks import IGNORED
from tests.helpers.tiny import tiny_run

D, V = 5, 11


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of three tokens."""
    monkeypatch.setitem(loss.CHUNK_LOGITS, "cpu", 3 * V)


def inputs(tokens, ignored, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, D, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, V, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = IGNORED
    return hidden, weight, targets


@given(tokens=st.integers(1, 13), ignored=st.sampled_from([0, 0.5, 1]), scale=st.sampled_from([1.0, -0.25]))
@settings(max_examples=40, deadline=None)
def test_chunks_have_the_plain_loss_and_gradient(tokens, ignored, scale):
    hidden, weight, targets = inputs(tokens, ignored, seed=tokens)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum", ignore_index=IGNORED)
    value = output_loss(hidden, weight, targets)
    torch.testing.assert_close(value, expected)
    got = torch.autograd.grad(scale * value, (hidden, weight))
    torch.testing.assert_close(got, torch.autograd.grad(scale * expected, (hidden, weight)))


@pytest.mark.parametrize("needed", [0, 1])
def test_one_gradient_alone(needed):
    hidden, weight, targets = inputs(8, 0.3)
    both = torch.autograd.grad(output_loss(hidden, weight, targets), (hidden, weight))
    (hidden, weight)[1 - needed].requires_grad_(False)
    (one,) = torch.autograd.grad(output_loss(hidden, weight, targets), ((hidden, weight)[needed],))
    assert torch.equal(one, both[needed])


def test_a_second_backward_pass_is_an_error():
    hidden, weight, targets = inputs(8, 0)
    value = output_loss(hidden, weight, targets)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        value.backward()


def test_bf16_products_and_float32_sums():
    """Under autocast the error is that of the plain loss under autocast: three digits."""
    hidden, weight, targets = inputs(13, 0.2, torch.float32)
    expected = torch.autograd.grad(next_token_loss(hidden @ weight.T, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        value = output_loss(hidden, weight, targets)
    gradients = torch.autograd.grad(value, (hidden, weight))
    for got, wanted in zip(gradients, expected, strict=True):
        assert got.dtype == torch.float32
        assert 0 < (got - wanted).norm() < 2e-2 * wanted.norm()


def test_predictions_are_those_of_the_whole_logits():
    hidden, weight, targets = inputs(12, 0.3)
    nats, most_probable = predict(hidden.view(3, 4, D), weight, targets.view(3, 4))
    assert torch.equal(most_probable, (hidden @ weight.T).argmax(-1).view(3, 4))
    torch.testing.assert_close(nats, next_token_loss(hidden @ weight.T, targets).detach())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
def test_a_model_s_gradients_are_those_of_its_logits(tied, family):
    model = Transformer(tiny_run(**{"model.tied": tied, "model.family": family, "model.position": ["cope"]})).double()
    tokens, targets = torch.randint(0, 6, (2, 3, 9))
    targets[0, :4] = IGNORED
    names, parameters = zip(*model.named_parameters(), strict=True)
    plain = torch.autograd.grad(next_token_loss(model(tokens), targets), parameters)
    chunked = torch.autograd.grad(model.loss(tokens, targets), parameters)
    for name, got, wanted in zip(names, chunked, plain, strict=True):
        torch.testing.assert_close(got, wanted, msg=name)


def test_tasks_and_loss_agree_on_tokens_without_a_target():
    assert loss.IGNORED == IGNORED
