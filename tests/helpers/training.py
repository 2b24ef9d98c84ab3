"""Helpers for tests that train runs in a store."""

from safetensors.torch import load_file

from tests.helpers.tiny import tiny_run


def stop_after(steps):
    """A `should_stop` that asks for an interruption when it is called for the `steps + 1`st time."""
    answers = iter(range(steps))
    return lambda: "interrupted" if next(answers, None) is None else None


def weights(folder):
    """The tensors of a run's checkpoint."""
    return load_file(folder.checkpoint / "model.safetensors")


def text_run(text, **overrides):
    """A tiny run on a text with CoPE."""
    return tiny_run(**{"task": text, "model.position": ["cope"]} | overrides)
