from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.clock import Clock
from tests.tiny import tiny_run


class Watch:
    """A time that passes when it is told to."""

    def __init__(self):
        self.at_s = 1000.0

    def __call__(self):
        return self.at_s


def test_time_is_told_by_what_it_went_into():
    watch, trainer = Watch(), Trainer(tiny_run(), Runtime())
    tokens = 4 * trainer.spec.task.length("train")
    clock = Clock(watch)
    watch.at_s += 100  # the model is built, a text tokenised
    clock.start(trainer, {"train_s": 7.0, "wall_s": 70.0})
    trainer.train_step()
    watch.at_s += 30  # the first step builds kernels
    clock.warm()
    assert clock.tokens_per_s() == round(tokens / 30, 1)  # there is no other step yet
    for _ in range(3):
        trainer.train_step()
        watch.at_s += 2
        with clock.apart():
            watch.at_s += 50  # an evaluation
    assert clock.tokens_per_s() == round(3 * tokens / 6, 1)
    assert clock.spent() == {"train_s": 7 + 30 + 6, "wall_s": 70 + 100 + 30 + 6 + 150}


def test_a_run_that_had_no_step_left_has_no_speed():
    clock = Clock(Watch())
    clock.start(Trainer(tiny_run(), Runtime()), {})
    assert clock.tokens_per_s() == 0
