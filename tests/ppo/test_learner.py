import copy
import dataclasses
import time
from importlib import import_module
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from puffer_lightning.functional import running_returns
from puffer_lightning.policies import ObservationNormalizer, RewardNormalizer
from puffer_lightning.ppo import Learner, Metrics, PPOConfig, update
from puffer_lightning.rollout import Rollout
from tests.transitions import ExactPolicy, parameters_of, random_rollout

LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


class Run:
    """A learner with its optimizer and the rollouts it is given, one after the other."""

    def __init__(self, seed: int = 0, **coefficients: Any) -> None:
        self.policy = ExactPolicy()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.05)
        self.learner = Learner(self.policy, PPOConfig(**coefficients), seed)
        self.iterations = 0

    def rollout(self, *returns: float) -> Rollout:
        ended = torch.tensor(returns, dtype=torch.float64)
        return dataclasses.replace(
            random_rollout(ExactPolicy(), seed=self.iterations),
            episode_returns=ended,
            episode_lengths=10 * ended,
            began=time.perf_counter() - 2.0,
            seconds=1.5,
        )

    def iterate(self, *returns: float) -> Metrics:
        metrics = self.learner.learn(self.rollout(*returns), self.optimizer)
        self.iterations += 1
        return metrics

    def parameters(self) -> Tensor:
        return parameters_of(self.policy)


def test_counts_environment_steps() -> None:
    run = Run()
    for steps in (64, 128, 192):
        run.iterate()
        assert run.learner.env_steps == steps
        assert isinstance(run.learner.env_steps, int)


def test_metrics_have_their_logged_names() -> None:
    metrics = Run().iterate(3.0, 5.0)
    assert set(metrics) == {
        "rollout/episode_return",
        "rollout/episode_length",
        "rollout/episodes",
        *(f"train/{name}" for name in LOSSES),
        "train/grad_norm",
        "train/skipped",
        "train/explained_variance",
        "train/learning_rate",
        "time/sps",
        "time/rollout_share",
        "time/update_share",
    }
    assert all(type(value) is float for value in metrics.values())
    assert metrics["train/learning_rate"] == 0.05
    assert metrics["rollout/episode_return"] == 4.0
    assert metrics["rollout/episode_length"] == 40.0


def test_mean_returns_of_types_of_agents() -> None:
    run = Run()

    def iterate(rows: list[int], *returns: float) -> Metrics:
        rollout = dataclasses.replace(
            run.rollout(*returns), episode_rows=torch.tensor(rows), agent_types=("fox", "hare", "hare", "fox")
        )
        return run.learner.learn(rollout, run.optimizer)

    assert "rollout/episode_return/hare" not in iterate([0, 7, 4], 1.0, 2.0, 6.0)
    metrics = iterate([6, 5, 3], 10.0, 20.0, 7.0)
    assert metrics["rollout/episode_return/fox"] == (1 + 2 + 6 + 7) / 4
    assert metrics["rollout/episode_return/hare"] == 15.0
    resumed = Run()
    resumed.learner.load_state_dict(copy.deepcopy(run.learner.state_dict()))
    run = resumed
    assert iterate([1], 30.0)["rollout/episode_return/hare"] == 20.0


def test_mean_returns_are_left_out_until_an_episode_has_ended() -> None:
    run = Run()
    first = run.iterate()
    assert "rollout/episode_return" not in first
    assert "rollout/episode_length" not in first
    assert first["rollout/episodes"] == 0.0
    assert run.iterate(7.0)["rollout/episode_return"] == 7.0
    assert run.iterate()["rollout/episode_return"] == 7.0
    assert run.iterate(1.0)["rollout/episodes"] == 2.0


def test_shares_and_speed_are_of_the_time_since_the_rollout_began() -> None:
    metrics = Run().iterate()
    elapsed = 64 / metrics["time/sps"]
    assert elapsed >= 2.0
    assert metrics["time/rollout_share"] == pytest.approx(1.5 / elapsed)
    assert 0.0 < metrics["time/update_share"] <= 1.0 - 2.0 / elapsed + 1e-9


def test_coefficients_may_change_between_iterations() -> None:
    changed, unchanged = Run(), Run()
    for run in (changed, unchanged):
        run.iterate()
    changed.learner.config.ent_coef = 10.0
    for run in (changed, unchanged):
        run.iterate()
    assert not torch.equal(changed.parameters(), unchanged.parameters())


def test_the_seed_decides_the_order_of_the_transitions() -> None:
    runs = [Run(seed) for seed in (3, 3, 4)]
    for run in runs:
        run.iterate()
    assert torch.equal(runs[0].parameters(), runs[1].parameters())
    assert not torch.equal(runs[0].parameters(), runs[2].parameters())


def without_time(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def test_saved_and_loaded_it_goes_on_as_if_never_stopped() -> None:
    run = Run()
    run.iterate(1.0, 2.0)
    saved = copy.deepcopy(run.learner.state_dict())
    resumed, fresh = Run(), Run()
    for other in (resumed, fresh):
        other.policy.load_state_dict(run.policy.state_dict())
        other.iterations = run.iterations
    resumed.learner.load_state_dict(saved)
    for _ in range(2):
        metrics = [without_time(each.iterate(6.0)) for each in (run, resumed, fresh)]
        assert metrics[0] == metrics[1]
        assert torch.equal(run.parameters(), resumed.parameters())
    assert run.learner.env_steps == resumed.learner.env_steps == 192
    assert not torch.equal(run.parameters(), fresh.parameters()), "without the state the shuffles repeat"


def test_the_state_survives_a_file(tmp_path: Any) -> None:
    run, resumed = Run(), Run()
    run.iterate(1.0)
    torch.save(run.learner.state_dict(), tmp_path / "learner.pt")
    resumed.learner.load_state_dict(torch.load(tmp_path / "learner.pt"))
    assert resumed.learner.env_steps == 64
    assert resumed.iterate()["rollout/episode_return"] == 1.0


def test_the_wrapped_policy_is_the_one_that_evaluates() -> None:
    calls = []

    class Wrapped(ExactPolicy):
        def evaluate(self, *arguments: Any) -> Any:
            calls.append(len(arguments[0]))
            return run.policy.evaluate(*arguments)

    run = Run(num_minibatches=2, update_epochs=3)
    run.learner.learn(run.rollout(), run.optimizer, policy=Wrapped())
    assert calls == [32] * 6
    assert not torch.equal(run.parameters(), parameters_of(ExactPolicy()))


@pytest.mark.parametrize("normalize", [False, True])
def test_the_update_gets_clipped_rewards_and_the_rollout_keeps_its_own(normalize: bool) -> None:
    clipping, by_hand = Run(clip_rewards=0.25), Run()
    rollout, clipped = clipping.rollout(3.0), by_hand.rollout()
    rewards = rollout.rewards.clone()
    scale = 1.0
    if normalize:
        clipping.policy.reward_normalizer = normalizer = RewardNormalizer().double()
    metrics = clipping.learner.learn(rollout, clipping.optimizer)
    if normalize:
        scale = normalizer.moments.std.item()
    clipped.rewards.div_(scale).clamp_(-0.25, 0.25)
    assert 0.0 < (clipped.rewards.abs() == 0.25).double().mean() < 1.0
    by_hand.learner.learn(clipped, by_hand.optimizer)
    torch.testing.assert_close(clipping.parameters()[: len(by_hand.parameters())], by_hand.parameters())
    assert torch.equal(rollout.rewards, rewards)
    assert metrics["rollout/episode_return"] == 3.0


class TestNormalization:
    def test_the_update_gets_scaled_rewards_and_the_rollout_keeps_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = Run()
        run.policy.reward_normalizer = RewardNormalizer().double()
        given: list[Tensor] = []

        def recorded(policy: Any, optimizer: Any, rollout: Rollout, *rest: Any, **options: Any) -> Any:
            given.append(rollout.rewards)
            return update(policy, optimizer, rollout, *rest, **options)

        monkeypatch.setattr(import_module("puffer_lightning.ppo.learner"), "update", recorded)
        all_returns, carry = [], torch.zeros(8, dtype=torch.float64)
        for iteration in range(2):
            rollout = run.rollout(3.0)
            rewards = rollout.rewards.clone()
            metrics = run.learner.learn(rollout, run.optimizer)
            run.iterations += 1
            assert torch.equal(rollout.rewards, rewards)
            assert metrics["rollout/episode_return"] == 3.0
            ended = rollout.terminated | rollout.truncated
            returns, carry = running_returns(rewards, rollout.valid, ended, 0.99, carry)
            all_returns.append(returns[rollout.valid])
            std = torch.cat(all_returns).std(correction=0)
            assert std > 1.5, "scaling must show"
            torch.testing.assert_close(given[iteration], rewards / std, rtol=1e-9, atol=0)

    def test_observations_are_taken_in_after_the_update(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = Run()
        run.policy.observation_normalizer = normalizer = ObservationNormalizer(spaces.Box(-1.0, 1.0, (3,)))
        counts: list[int] = []

        def recorded(*arguments: Any, **options: Any) -> Any:
            counts.append(int(normalizer.moments.count))
            return update(*arguments, **options)

        monkeypatch.setattr(import_module("puffer_lightning.ppo.learner"), "update", recorded)
        first, second = run.rollout(), run.rollout()
        for rollout in (first, second):
            run.learner.learn(rollout, run.optimizer)
        valid = int(first.valid.sum())
        assert valid < first.valid.numel()
        assert counts == [0, valid]
        assert normalizer.moments.count == 2 * valid
