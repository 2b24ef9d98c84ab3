from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.clock import Clock
from tests.tiny import tiny_run


class ManualTime:
    """A clock that tests advance by hand."""

    def __init__(self):
        self.at_s = 1000.0

    def __call__(self):
        return self.at_s


def test_training_time_excludes_setup_warm_up_and_pauses():
    time, trainer = ManualTime(), Trainer(tiny_run(), Runtime())
    tokens = 4 * trainer.spec.task.length("train")
    clock = Clock(time)
    time.at_s += 100  # the model is built, a text tokenised
    clock.start(trainer, {"train_s": 7.0, "wall_s": 70.0})
    trainer.train_step()
    time.at_s += 30  # the first step builds kernels
    clock.end_warm_up()
    assert clock.tokens_per_s() == round(tokens / 30, 1)  # there is no other step yet
    for _ in range(3):
        trainer.train_step()
        time.at_s += 2
        with clock.paused():
            time.at_s += 50  # an evaluation
    assert clock.tokens_per_s() == round(3 * tokens / 6, 1)
    assert clock.durations() == {"train_s": 7 + 30 + 6, "wall_s": 70 + 100 + 30 + 6 + 150}


def test_without_a_step_the_speed_is_zero():
    clock = Clock(ManualTime())
    clock.start(Trainer(tiny_run(), Runtime()), {})
    assert clock.tokens_per_s() == 0
