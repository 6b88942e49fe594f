"""Rollouts of random numbers and policies in float64, for what has to hold to the last digits."""

import torch
from gymnasium import spaces
from torch import Tensor, nn

from puffer_lightning.policies import Evaluation, Policy, State, make_head
from puffer_lightning.rollout import Rollout

NUM_FEATURES, NUM_ACTIONS = 3, 4


class ExactPolicy(Policy):
    """A small network whose log-probabilities, entropies and values are float64 throughout."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = nn.Linear(NUM_FEATURES, 8)
            self.head = make_head(8, spaces.Discrete(NUM_ACTIONS))
            self.critic = nn.Linear(8, 1)
            nn.init.normal_(self.head.linear.weight)
        self.double()

    def forward(self, observations: Tensor, state: State = ()) -> tuple[Tensor, Tensor, State]:
        features = self.encoder(observations).tanh()
        return self.head(features), self.critic(features).squeeze(-1), state

    def evaluate(
        self, observations: Tensor, actions: Tensor, state: State = (), started: Tensor | None = None
    ) -> Evaluation:
        params, values, _ = self(observations, state)
        log_probs = params.log_softmax(-1)
        chosen = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return Evaluation(chosen, -(log_probs.exp() * log_probs).sum(-1), values)


def random_rollout(policy: Policy, horizon: int = 8, num_envs: int = 8, seed: int = 0) -> Rollout:
    """A NEXT_STEP rollout, in float64, of random transitions that the policy might have made.

    Its advantages spread widely, episodes end in both ways, and a reset step follows each end. The further an
    environment from the first, the more of them.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = (horizon, num_envs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*steps, *shape, generator=generator, dtype=torch.float64)

    observations = normal(NUM_FEATURES)
    actions = torch.randint(NUM_ACTIONS, steps, generator=generator)
    with torch.no_grad():
        log_probs, _, values = policy.evaluate(observations, actions)
    ended = torch.rand(steps, generator=generator) < torch.linspace(0.0, 0.6, num_envs)
    valid = torch.ones(steps, dtype=torch.bool)
    for t in range(1, horizon):
        valid[t] = ~ended[t - 1]
        ended[t] &= valid[t]
    terminated = ended & (torch.rand(steps, generator=generator) < 0.5)
    return Rollout(
        observations=observations,
        actions=actions,
        log_probs=log_probs + 0.1 * normal(),
        values=values,
        next_values=torch.cat((values[1:], normal()[:1])),
        rewards=3.0 * normal() + 1.0,
        terminated=terminated,
        truncated=ended & ~terminated,
        valid=valid,
        started=~valid,
    )


def parameters_of(module: nn.Module) -> Tensor:
    """All parameters side by side, copied."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])
