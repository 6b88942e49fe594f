"""Updates that skip what is not finite, and runs that stop if that does not end."""

import io
import math
from typing import Any

import pytest
import torch
from gymnasium import spaces

from puffer_lightning.policies import ObservationNormalizer, RewardNormalizer
from puffer_lightning.ppo import Metrics, NonFiniteError
from tests.ppo.test_learner import LOSSES, Run

SKIPPED = "minibatches were skipped"


def spoilt(run: Run, name: str = "rewards") -> Metrics:
    """The metrics of an iteration with a NaN in one of its 64 transitions."""
    rollout = run.rollout()
    getattr(rollout, name)[5, 0] = math.nan
    run.iterations += 1
    return run.learner.learn(rollout, run.optimizer)


def test_only_the_minibatches_with_the_bad_number_are_skipped() -> None:
    run = Run(num_minibatches=8, update_epochs=1)
    before = run.parameters()
    with pytest.warns(
        UserWarning, match=f"^1 {SKIPPED}.*first for nan in observation of environment 0 at step"
    ):
        metrics = spoilt(run, "observations")
    assert metrics["train/skipped"] == 1
    assert run.parameters().isfinite().all()
    assert not torch.equal(run.parameters(), before)
    # Of the others.
    assert all(math.isfinite(metrics[f"train/{name}"]) for name in (*LOSSES, "grad_norm"))


def test_where_all_are_skipped_nothing_changes_and_nothing_is_averaged() -> None:
    run = Run(num_minibatches=1)
    before = run.parameters()
    with pytest.warns(UserWarning, match=f"^4 {SKIPPED}"):
        metrics = spoilt(run)
    assert torch.equal(run.parameters(), before)
    assert not {f"train/{name}" for name in LOSSES} & metrics.keys()


@pytest.mark.parametrize("target_kl", [1e9, 1e-9])
def test_what_is_skipped_does_not_count_for_the_target_kl(target_kl: float) -> None:
    run = Run(num_minibatches=8, target_kl=target_kl)
    with pytest.warns(UserWarning, match=SKIPPED):
        metrics = spoilt(run, "observations")
    assert metrics["train/skipped"] == (4 if target_kl == 1e9 else 1)


def test_the_statistics_of_normalisation_stay_finite() -> None:
    run = Run(num_minibatches=2)
    observed = run.policy.observation_normalizer = ObservationNormalizer(spaces.Box(-1.0, 1.0, (3,)))
    rewarded = run.policy.reward_normalizer = RewardNormalizer().double()
    counted, valid = [], [int(run.rollout().valid.sum())]
    for name in ("observations", "rewards"):
        with pytest.warns(UserWarning, match=f"nan in {name[:-1]}"):
            spoilt(run, name)
        assert all(statistic.isfinite().all() for statistic in run.policy.state_dict().values())
        counted.append((int(observed.moments.count), int(rewarded.moments.count)))
        valid.append(int(run.rollout().valid.sum()))
    assert counted[0] == (valid[0] - 1, valid[0])
    # A discounted return is NaN from there to the end of the episode.
    assert counted[1][0] == counted[0][0] + valid[1]
    assert 1 < counted[0][1] + valid[1] - counted[1][1] < 8
    assert run.iterate()["train/skipped"] == 0
    assert int(rewarded.moments.count) == counted[1][1] + valid[2], "none of it is carried over"


def test_stops_after_so_many_in_a_row() -> None:
    run = Run(num_minibatches=1, max_skipped_updates=2)
    with pytest.warns(UserWarning, match=SKIPPED):
        spoilt(run)
    assert run.iterate()["train/skipped"] == 0
    with pytest.warns(UserWarning, match=SKIPPED):
        spoilt(run)
    with pytest.raises(
        NonFiniteError, match=r"of 2 iterations in a row, max_skipped_updates.* first for nan in reward"
    ) as stop:
        spoilt(run)
    torch.save(stop.value.batch, file := io.BytesIO())
    file.seek(0)
    batch: dict[str, Any] = torch.load(file, weights_only=True)
    assert batch["rewards"].isnan().nonzero().tolist() == [[5, 0]]
    assert batch["observations"].shape == (8, 8, 3)
    assert batch["place"] == "nan in reward of environment 0 at step 5 of the rollout"
