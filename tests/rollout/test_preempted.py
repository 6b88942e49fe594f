"""A rollout that ends early is a shorter rollout: the rows that were not made count for nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.envs import make_vector_env
from puffer_lightning.functional import gae
from puffer_lightning.policies import RewardNormalizer, make_policy
from puffer_lightning.ppo import Learner, PPOConfig
from puffer_lightning.rollout import Collector, Rollout

HORIZON, MADE, NUM_ENVS = 32, 20, 4
ENVS = {"NEXT_STEP": "CartPole-v1", "SAME_STEP": "Acrobot-v1", "device": "puffer/TorchCartPole-v0"}


class After:
    """Stands in for ``Preemption``: due at the polls of all rollouts but the first."""

    def __init__(self, polls: int) -> None:
        self.rollouts = self.polls = self.finished = 0
        self._due_after = polls

    def begin(self) -> None:
        self.rollouts += 1
        self.polls = 0

    def finish(self) -> None:
        self.finished += 1

    def due(self) -> bool:
        self.polls += 1
        return self.rollouts > 1 and self.polls > self._due_after


def collected(env: str, horizon: int, preemption: Any = None) -> tuple[Rollout, Rollout, Any, Any]:
    """A whole rollout and the one after it, the policy and the environments' next observations."""
    kwargs = {"max_episode_steps": 15} if env == "Acrobot-v1" else {}
    envs = make_vector_env(env, NUM_ENVS, kwargs)
    torch.manual_seed(0)
    policy = make_policy(envs.single_observation_space, envs.single_action_space)
    collector = Collector(envs, HORIZON, seed=1, preemption=preemption)
    first = copy.deepcopy(collector.collect(policy))
    # The noise of a shorter rollout is not that of a longer one.
    collector.horizon = horizon
    second = copy.deepcopy(collector.collect(policy))
    envs.close()
    return first, second, policy, collector._stepper.observations


def rows(rollout: Rollout) -> dict[str, Tensor]:
    names = ("observations", "actions", "log_probs", "values", "next_values", "rewards")
    names += ("terminated", "truncated", "valid")
    return {name: getattr(rollout, name)[:MADE] for name in names}


@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
def test_it_is_the_beginning_of_the_rollout_that_would_have_been(env: str) -> None:
    preemption = After(polls=MADE - HORIZON // 4)
    whole, cut, policy, following = collected(env, HORIZON, preemption)
    also_whole, uncut, *_ = collected(env, HORIZON)
    assert (whole.made, cut.made, uncut.made) == (HORIZON, MADE, HORIZON)
    assert cut.num_steps == MADE * NUM_ENVS
    assert preemption.finished == 1
    assert_close(rows(whole), rows(also_whole), rtol=0, atol=0)
    got, expected = rows(cut), rows(uncut)
    # What the last step led to is valued alone rather than by the next step.
    bootstrap, last = got["next_values"][-1].clone(), expected["next_values"][-1].clone()
    got["next_values"][-1] = expected["next_values"][-1] = 0.0
    assert_close(got, expected, rtol=0, atol=1e-6)
    goes_on = ~(cut.truncated | cut.terminated)[MADE - 1]
    assert goes_on.any()
    assert_close(bootstrap[goes_on], last[goes_on])
    with torch.no_grad():
        assert_close(bootstrap[goes_on], policy.value(torch.as_tensor(following))[goes_on])


@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
def test_the_rows_that_were_not_made_are_nothing(env: str) -> None:
    _, cut, *_ = collected(env, HORIZON, After(polls=MADE - HORIZON // 4))
    rest = (cut.valid, cut.terminated, cut.truncated, cut.rewards, cut.values, cut.next_values)
    assert not any(tensor[MADE:].any() for tensor in rest)
    arguments = (cut.rewards, cut.values, cut.next_values, cut.terminated, cut.truncated)
    whole = gae(*arguments, 0.99, 0.95)
    alone = gae(*(tensor[:MADE] for tensor in arguments), 0.99, 0.95)
    assert_close(whole[:MADE], alone, rtol=0, atol=0)
    assert not whole[MADE:].any()


def test_episodes_go_on_through_a_rollout_that_ended_early() -> None:
    lengths = []
    envs = make_vector_env("Acrobot-v1", NUM_ENVS, {"max_episode_steps": 15})
    policy = make_policy(envs.single_observation_space, envs.single_action_space)
    collector = Collector(envs, 16, seed=1, preemption=After(polls=3))
    for _ in range(6):
        lengths += collector.collect(policy).episode_lengths.tolist()
    envs.close()
    assert len(lengths) == NUM_ENVS * ((16 + 5 * 7) // 15)
    assert set(lengths) == {15.0}


def test_none_is_cut_short_of_a_quarter() -> None:
    _, cut, *_ = collected("CartPole-v1", HORIZON, After(polls=0))
    assert cut.made == HORIZON // 4


def test_steps_that_were_not_made_are_not_counted_and_discount_no_return() -> None:
    _, cut, policy, _ = collected("CartPole-v1", HORIZON, After(polls=MADE - HORIZON // 4))
    policy.reward_normalizer = RewardNormalizer()
    learner = Learner(policy, PPOConfig(num_minibatches=1, gamma=0.5), seed=1)
    learner.learn(cut, torch.optim.SGD(policy.parameters(), 0.0))
    assert learner.env_steps == MADE * NUM_ENVS
    assert policy.reward_normalizer.moments.count == cut.valid.sum()
    under_way = ~(cut.terminated | cut.truncated)[MADE - 1] & cut.valid[MADE - 1]
    assert under_way.any()
    assert learner._discounted is not None
    # γ · G, and CartPole's reward of 1 a step makes G at least 1.
    assert (learner._discounted[under_way] >= 0.5).all()
