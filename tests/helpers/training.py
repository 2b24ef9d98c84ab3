"""Helpers for tests that train runs in a store."""

from safetensors.torch import load_file

from cope_sweep.model.checkpoint import save_model
from cope_sweep.train import Runtime, Trainer
from tests.helpers.tiny import tiny_run


def stop_after(steps):
    """A `should_stop` that asks for an interruption when it is called for the `steps + 1`st time."""
    answers = iter(range(steps))
    return lambda: "interrupted" if next(answers, None) is None else None


def weights(folder):
    """The tensors of a run's checkpoint."""
    return load_file(folder.checkpoint / "model.safetensors")


def trained_on_text(folder, checkpoint):
    """A trainer that has trained a model for a few steps on the text of `write_corpus(folder)`, and saved it."""
    task = {"kind": "wikitext", "corpus": "small", "folder": str(folder), "tokens": 16, "vocabulary": 300}
    trainer = Trainer(text_run(task, **{"train.steps": 20, "train.lr": 0.01}), Runtime())
    while not trainer.done:
        trainer.train_step()
    save_model(checkpoint, trainer.model, trainer.spec)
    trainer.spec.task.save_tokenizer(checkpoint)
    return trainer


def text_run(text, **overrides):
    """A tiny run on a text with CoPE."""
    return tiny_run(**{"task": text, "model.position": ["cope"]} | overrides)
