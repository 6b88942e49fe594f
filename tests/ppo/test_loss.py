import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from puffer_lightning.policies import Evaluation, Policy, State
from puffer_lightning.ppo import PPOConfig, minibatch_loss
from puffer_lightning.rollout import Batch

ENTROPY = 1.25


class Fixed(Policy):
    """Evaluates to what it was told, plus a parameter that is 0."""

    def __init__(self, log_probs: Tensor, values: Tensor) -> None:
        super().__init__()
        self.log_probs, self.values = log_probs, values
        self.actor = torch.nn.Parameter(torch.zeros_like(log_probs))
        self.critic = torch.nn.Parameter(torch.zeros_like(values))

    def forward(self, observations: Tensor, state: State = ()) -> tuple[Tensor, Tensor, State]:
        raise NotImplementedError

    def evaluate(
        self, observations: Tensor, actions: Tensor, state: State = (), started: Tensor | None = None
    ) -> Evaluation:
        log_probs = self.log_probs + self.actor
        return Evaluation(log_probs, torch.full_like(log_probs, ENTROPY), self.values + self.critic)


# Ratios 1, 1.5 (clipped, advantage > 0), 1.5 (not clipped, advantage < 0), and a reset step.
RATIOS = torch.tensor([1.0, 1.5, 1.5, 9.0], dtype=torch.float64)
VALUES = torch.tensor([1.0, 2.0, 3.0, 50.0], dtype=torch.float64)
MEAN, STD, WEIGHT = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(1.0 / 3.0, dtype=torch.float64)
CONFIG = PPOConfig(clip_coef=0.2, vf_coef=0.5, ent_coef=0.01)


def make_batch() -> Batch:
    old = torch.full((4,), -0.7, dtype=torch.float64)
    return Batch(
        observations=torch.zeros(4, 1),
        actions=torch.zeros(4),
        log_probs=old,
        values=VALUES - torch.tensor([0.0, 1.0, 0.1, 0.0]),
        advantages=torch.tensor([5.0, 3.0, -1.0, 1e4], dtype=torch.float64),
        returns=VALUES + torch.tensor([1.0, -2.0, 0.0, 1e4]),
        valid=torch.tensor([True, True, True, False]),
    )


def make_policy() -> Fixed:
    return Fixed(RATIOS.log() - 0.7, VALUES)


def loss_of(batch: Batch, config: PPOConfig = CONFIG, policy: Policy | None = None) -> tuple[Tensor, Tensor]:
    return minibatch_loss(policy or make_policy(), batch, MEAN, STD, WEIGHT, config)


def test_equals_the_sum_worked_out_by_hand() -> None:
    loss, statistics = loss_of(make_batch())
    # Standardised advantages 2, 1, -1; the second ratio is clipped to 1.2, the third costs in full.
    policy_loss = (-2.0 - 1.2 + 1.5) / 3
    value_loss = (0.5 + 2.0 + 0.0) / 3
    assert loss.item() == pytest.approx(policy_loss + 0.5 * value_loss - 0.01 * ENTROPY)
    kl = 2 * (0.5 - math.log(1.5)) / 3
    assert statistics.tolist() == pytest.approx([policy_loss, value_loss, ENTROPY, kl, 2 / 3])
    assert not statistics.requires_grad


def test_values_are_clipped_only_where_asked_for() -> None:
    _, statistics = loss_of(make_batch(), PPOConfig(clip_value_loss=True))
    # The second value is held at 1.2: it is 1.0 old, 2.0 new, and 0.0 is wanted. The worse error counts.
    assert statistics[1].item() == pytest.approx((0.5 + 2.0 + 0.0) / 3)
    batch = make_batch()._replace(returns=VALUES + torch.tensor([1.0, 2.0, 0.0, 0.0]))
    _, clipped = loss_of(batch, PPOConfig(clip_value_loss=True))
    _, plain = loss_of(batch, PPOConfig(clip_value_loss=False))
    # Held at 1.2, the second value is 2.8 from the 4.0 that is wanted.
    assert clipped[1].item() == pytest.approx((0.5 + 0.5 * 2.8**2) / 3)
    assert plain[1].item() == pytest.approx((0.5 + 2.0) / 3)


def test_coefficients_weigh_the_terms() -> None:
    losses = [
        loss_of(make_batch(), PPOConfig(vf_coef=vf_coef, ent_coef=ent_coef))[0].item()
        for vf_coef, ent_coef in [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
    ]
    assert losses[1] - losses[0] == pytest.approx(2.5 / 3)
    assert losses[2] - losses[0] == pytest.approx(-ENTROPY)


def test_the_gradient_points_where_ppo_says() -> None:
    policy = make_policy()
    torch.autograd.backward(loss_of(make_batch(), policy=policy)[0])
    assert policy.actor.grad is not None
    assert policy.critic.grad is not None
    # d/dlogp of -ratio · A; none where clipping binds.
    assert_close(policy.actor.grad, torch.tensor([-2.0, 0.0, 1.5, 0.0], dtype=torch.float64) / 3)
    assert_close(policy.critic.grad, 0.5 * torch.tensor([-1.0, 2.0, 0.0, 0.0], dtype=torch.float64) / 3)


@pytest.mark.parametrize("junk", [1e9, -1e9, math.nan, math.inf, -math.inf])
def test_a_reset_step_counts_neither_in_the_loss_nor_in_the_gradient(junk: float) -> None:
    batch = make_batch()
    batch.log_probs[3] = junk
    policies = make_policy(), make_policy()
    results = [loss_of(make_batch(), policy=policies[0]), loss_of(batch, policy=policies[1])]
    for loss, _ in results:
        torch.autograd.backward(loss)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    for one, other in zip(policies[0].parameters(), policies[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_training_on_reset_steps_would_show() -> None:
    batch = make_batch()
    counted = batch._replace(valid=torch.ones(4, dtype=torch.bool))
    assert abs(loss_of(counted)[0].item() - loss_of(batch)[0].item()) > 1.0


def test_parts_of_a_minibatch_add_up_to_the_whole() -> None:
    batch = make_batch()
    whole, statistics = loss_of(batch)
    parts = []
    for rows in (torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([2])):
        policy = Fixed((RATIOS.log() - 0.7)[rows], VALUES[rows])
        parts.append(loss_of(batch.take(rows), policy=policy))
    assert_close(sum(loss for loss, _ in parts), whole)
    assert_close(torch.stack([part for _, part in parts]).sum(0), statistics)


def test_a_minibatch_without_a_valid_row_teaches_nothing() -> None:
    batch = make_batch()._replace(valid=torch.zeros(4, dtype=torch.bool))
    policy = make_policy()
    loss, statistics = loss_of(batch, policy=policy)
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert statistics.eq(0.0).all()
    assert all(p.grad is not None and p.grad.eq(0.0).all() for p in policy.parameters())


def test_an_infinite_loss_has_no_finite_gradient() -> None:
    # Too much to square, but twice as much is a number.
    policy = Fixed(RATIOS.log() - 0.7, torch.full_like(VALUES, 1e200))
    loss, _ = loss_of(make_batch(), policy=policy)
    torch.autograd.backward(loss)
    assert not loss.isfinite()
    assert policy.critic.grad is not None
    assert policy.critic.grad[:3].isnan().all()
