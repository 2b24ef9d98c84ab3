import weakref

import pytest
import torch

from cope_sweep.tasks import SelectiveCopy
from cope_sweep.train import Runtime, Trainer
from tests.helpers.tiny import tiny_run


def test_clipping_bounds_the_gradient():
    run = tiny_run(**{"train.clip": 1e-3})
    trainer = Trainer(run, Runtime())
    trainer.train_step()
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


GPT2_LIKE = {
    "model.layers": 2,
    "model.position": [{"kind": "cope", "share_layers": True}, "absolute"],
    "train.batch": 7,
    "task.blanks": 30,
}


FLIP_FLOP = GPT2_LIKE | {"task": {"kind": "flip_flop", "pairs": 9}, "train.clip": None}


def gradients(run, runtime, steps=1):
    trainer = Trainer(run, runtime)
    for _ in range(steps):
        trainer.train_step()
    return trainer.mean_loss(), {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "micro_batch"), [*(("gpt2", size) for size in (1, 2, 3, 6, 7, 100)), ("llama", 3), ("post_norm", 3)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_parts_of_a_batch_add_up_to_its_loss_and_gradient(family, micro_batch, dropout):
    """Sequences of flip-flop have different numbers of targets, so the mean of the parts' means is another loss."""
    run = tiny_run(**FLIP_FLOP, **{"model.dropout": dropout, "model.family": family})
    loss, whole = gradients(run, Runtime())
    parts_loss, parts = gradients(run, Runtime(micro_batch=micro_batch))
    assert parts_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_checkpointed_activations_give_the_same_gradient_to_the_bit(family, dropout, micro_batch):
    run = tiny_run(**GPT2_LIKE, **{"model.family": family, "model.dropout": dropout})
    saved = gradients(run, Runtime(micro_batch=micro_batch), steps=3)
    again = gradients(run, Runtime(micro_batch=micro_batch, checkpoint_activations=True), steps=3)
    assert saved[0] == again[0]
    for name, gradient in saved[1].items():
        assert torch.equal(again[1][name], gradient), name


def test_checkpointed_activations_are_not_saved():
    """Compares the bytes that the graph of a forward pass saves."""

    def saved_bytes(checkpoint_activations):
        run = tiny_run(**GPT2_LIKE | {"model.layers": 6})
        trainer = Trainer(run, Runtime(checkpoint_activations=checkpoint_activations))
        trainer.model.train()
        tokens = torch.from_numpy(run.task.sequences("train", 0, 0, 7).inputs_NT)
        sizes = {}

        def pack(tensor):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = trainer.model(tokens)
        assert logits.grad_fn is not None
        return sum(sizes.values())

    assert saved_bytes(checkpoint_activations=True) < saved_bytes(checkpoint_activations=False) / 5


@pytest.mark.parametrize(
    "position",
    [
        ["cope"],
        *(
            pytest.param(kinds, marks=pytest.mark.thorough)
            for kinds in ([], ["rope", "relative"], ["cope_mlp", "alibi"])
        ),
    ],
)
def test_bf16_trains_like_fp32(position):
    """Weights and gradients stay in float32, and the losses agree to the three digits of bfloat16."""
    run = tiny_run(
        **{"model.position": position, "model.dim": 32, "train.steps": 40, "train.batch": 16, "task.blanks": 30}
    )
    losses = []
    for precision in ("fp32", "bf16"):
        trainer = Trainer(run, Runtime(precision=precision, micro_batch=9, checkpoint_activations=True))
        for _ in range(40):
            trainer.train_step()
        losses.append(trainer.mean_loss())
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


PINNED = {"model.layers": 3, "model.dim": 16, "model.ffn_dim": 24, "train.steps": 9}


@pytest.mark.parametrize(
    ("overrides", "losses"),
    [
        ({}, [1.910201, 1.821087, 1.777851, 1.720924, 1.729455]),
        (
            {"model.family": "llama", "model.position": ["cope"], "train.schedule": "linear"}
            | {"model.ffn_dim": None, "train.warmup": 1, "seed": 1},
            [1.814708, 1.856303, 1.756300, 1.833511, 1.797849],
        ),
        (
            {
                "model.family": "post_norm",
                "model.position": [{"kind": "absolute", "std": 0.02}, "rope"],
                "train.schedule": "cosine",
            }
            | {"train.warmup": 2, "seed": 2},
            [2.655374, 2.451982, 2.784050, 2.271033, 2.272934],
        ),
    ],
)
def test_the_losses_of_a_seed_are_pinned(overrides, losses):
    """Initialisation, data, gradient, optimiser and schedule together, in float32: rounding changes the sixth digit."""
    trainer = Trainer(tiny_run(**PINNED | overrides), Runtime())
    measured = []
    for _ in losses:
        trainer.train_step()
        measured.append(trainer.mean_loss())
    assert measured == pytest.approx(losses, rel=1e-4)


def test_evaluation_counts_wrong_answers_and_wrong_sequences():
    trainer = Trainer(tiny_run(), Runtime())
    task = trainer.spec.task
    batch = task.sequences("in_dist", 0, 0, 8)
    predicted = trainer.model.eval()(torch.from_numpy(batch.inputs_NT)).argmax(-1).numpy()
    wrong = (predicted != batch.targets_NT) & batch.answers_NT
    metrics = trainer.evaluate(8)
    assert metrics["in_dist/token_error"] == pytest.approx(100 * wrong.sum() / batch.answers_NT.sum())
    assert metrics["in_dist/sequence_error"] == pytest.approx(100 * wrong.any(1).mean())
    assert set(metrics) == {f"{split}/{name}" for split in task.TESTS for name in task.METRICS}


def test_a_large_test_set_is_generated_in_parts(monkeypatch):
    """No more than a batch of sequences exists at a time, so the size of a test set needs no memory."""
    trainer, alive, most = Trainer(tiny_run(**{"train.batch": 50}), Runtime()), [], 0
    generate = SelectiveCopy.sequences

    def counted(task, split, seed, start, count):
        nonlocal most
        batch = generate(task, split, seed, start, count)
        alive.append((weakref.ref(batch), len(batch)))
        most = max(most, sum(size for each, size in alive if each() is not None))
        return batch

    monkeypatch.setattr(SelectiveCopy, "sequences", counted)
    measured = trainer.evaluate(3000)
    assert 0 < most <= 150
    # The smallest difference is one of 6000 answers.
    assert measured["in_dist/token_error"] * 6000 / 100 == pytest.approx(round(measured["in_dist/token_error"] * 60))


def test_test_sets_do_not_depend_on_the_run_s_seed():
    """Runs that differ by seed alone are measured on the same sequences."""
    one, other = (Trainer(tiny_run(**{"seed": seed, "task.blanks": 20}), Runtime()) for seed in (1, 2))
    assert one.evaluate(8) != other.evaluate(8)  # other weights
    other.model.load_state_dict(one.model.state_dict())
    assert one.evaluate(8) == other.evaluate(8)


def test_dropout_masks_depend_on_seed_and_step():
    def masks(seed):
        trainer = Trainer(tiny_run(**{"model.dropout": 0.5, "seed": seed}), Runtime())
        seen = []
        trainer.model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0] == 0))
        trainer.train_step()
        trainer.train_step()
        return seen

    (first, second), again, other = masks(0), masks(0), masks(1)
    assert not torch.equal(first[0], first[1])  # of two sequences
    assert not torch.equal(first, second)
    assert torch.equal(first, again[0])
    assert not torch.equal(first, other[0])


def test_the_validation_set_is_measured_beside_the_test_sets():
    plain, validated = (
        Trainer(tiny_run(**{"evaluate.validation": wanted}), Runtime(threads=1)) for wanted in (False, True)
    )
    measured = validated.evaluate(8)
    assert {name.split("/")[0] for name in measured} == {*plain.spec.task.TESTS, "validation"}
    assert {name: measured[name] for name in plain.evaluate(8)} == plain.evaluate(8)
    assert measured["validation/loss"] != measured["in_dist/loss"]
