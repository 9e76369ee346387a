import pickle

import pytest

from dprs_kernels import ConstantRate, CustomRate, GradualCooling


def test_gradual_cooling_is_the_papers_ramp():
    schedule = GradualCooling(final_rate=0.9, epochs=48)
    assert schedule(0) == 0.0
    assert schedule(47) == 0.9
    for epoch in range(48):
        assert schedule(epoch) == pytest.approx(0.9 * epoch / 47, rel=1e-15)


def test_a_single_epoch_keeps_everything():
    assert GradualCooling(final_rate=0.5, epochs=1)(0) == 0.0


def test_refresh_draws_new_masks_at_the_epochs_rate():
    schedule = GradualCooling(final_rate=0.6, epochs=3, refresh=4)
    assert [schedule(1, tick) for tick in range(4)] == [0.3] * 4
    indices = [schedule.draw_index(e, t) for e in range(3) for t in range(4)]
    assert indices == list(range(12))


@pytest.mark.parametrize(("refresh", "steps"), [(1, 7), (3, 10), (4, 4), (5, 3)])
def test_ticks_are_monotone_and_within_refresh(refresh, steps):
    schedule = ConstantRate(0.5, epochs=2, refresh=refresh)
    ticks = [schedule.tick(step, steps) for step in range(steps)]
    assert ticks == sorted(ticks)
    assert ticks[0] == 0
    assert max(ticks) < refresh
    if steps >= refresh:
        assert set(ticks) == set(range(refresh))


def test_constant_and_custom():
    assert [ConstantRate(0.25, epochs=3)(e) for e in range(3)] == [0.25] * 3
    schedule = CustomRate(lambda epoch, tick: 0.1 * epoch + 0.01 * tick, epochs=3, refresh=2)
    assert schedule(2, 1) == pytest.approx(0.21)


def test_schedules_pickle():
    schedule = pickle.loads(pickle.dumps(GradualCooling(final_rate=0.7, epochs=9, refresh=2)))
    assert (schedule.final_rate, schedule.epochs, schedule.refresh, schedule(8)) == (0.7, 9, 2, 0.7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradualCooling(final_rate=1.0, epochs=3), r"final_rate: got 1.0; expected a number in \[0, 1\)"),
        (lambda: GradualCooling(final_rate=-0.1, epochs=3), "final_rate: got -0.1"),
        (lambda: GradualCooling(final_rate=float("nan"), epochs=3), "final_rate: got nan"),
        (lambda: GradualCooling(final_rate=0.5, epochs=0), "epochs: got 0; expected an integer of at least 1"),
        (lambda: GradualCooling(final_rate=0.5, epochs=2, refresh=0), "refresh: got 0"),
        (lambda: GradualCooling(final_rate=0.5, epochs=2)(2), "epoch: got 2; expected 0 <= epoch < 2"),
        (lambda: GradualCooling(final_rate=0.5, epochs=2)(0, tick=1), "tick: got 1; expected 0 <= tick < 1"),
        (lambda: GradualCooling(final_rate=0.5, epochs=2).tick(5, 5), "step: got 5"),
        (lambda: ConstantRate(rate="0.5", epochs=2), "rate: got '0.5'"),
        (lambda: CustomRate(0.5, epochs=2), "function: got 0.5; expected a callable"),
        (lambda: CustomRate(lambda e, t: 1.5, epochs=2)(1), "drop rate of epoch 1, tick 0: got 1.5"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
