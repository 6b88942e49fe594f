"""Ways to break PPO, applied to the real code one at a time, and the environments that notice.

The first argument of each mutation is the function that it stands in for.
"""

import importlib
from dataclasses import replace
from typing import Any

import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch.utils._pytree import tree_map

from puffer_lightning.policies.categorical import MultiCategoricalHead
from puffer_lightning.policies.cnn import ImageEncoder
from puffer_lightning.policies.encoders import MLPEncoder
from puffer_lightning.policies.gaussian import GaussianHead
from puffer_lightning.ppo import learner, loss
from puffer_lightning.rollout import Rollout
from puffer_lightning.rollout.buffers import RolloutBuffers, StepBuffers
from puffer_lightning.rollout.collector import Collector
from tests.learning.registry import MUTATIONS, Function, mutation

# The package exports the function of the same name, which hides the module.
update = importlib.import_module("puffer_lightning.ppo.update")

NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
EVERY_MODE = tuple(AutoresetMode)

__all__ = ["MUTATIONS"]


# Advantages.


@mutation(update, "gae", "TruncatedValue", modes=EVERY_MODE)
def truncation_counts_as_termination(gae: Function, *args: Any, **valid: Any) -> Any:
    *values, terminated, truncated, gamma, gae_lambda = args
    return gae(*values, terminated | truncated, truncated, gamma, gae_lambda, **valid)


@mutation(update, "gae", "TerminatedValue")
def termination_counts_as_truncation(gae: Function, *args: Any, **valid: Any) -> Any:
    *values, terminated, truncated, gamma, gae_lambda = args
    never = torch.zeros_like(terminated)
    return gae(*values, never, terminated | truncated, gamma, gae_lambda, **valid)


@mutation(update, "gae", "ResetStep")
def advantages_flow_over_the_end_of_episodes(gae: Function, *args: Any, valid: Tensor) -> Any:
    *values, nexts, terminated, _, gamma, gae_lambda = args
    never = torch.zeros_like(terminated)
    return gae(*values, nexts.masked_fill(terminated, 0.0), never, never, gamma, gae_lambda)


@mutation(update, "gae", "DelayedCredit", "Password")
def no_credit_is_carried_back(gae: Function, *args: Any, **valid: Any) -> Any:
    return gae(*args[:-1], 0.0, **valid)


@mutation(update, "gae", "DelayedCredit", "Squared")
def advantages_accumulate_forwards_in_time(gae: Function, *args: Any, **valid: Any) -> Any:
    args, valid = tree_map(lambda arg: arg.flip(0) if isinstance(arg, Tensor) else arg, (args, valid))
    return gae(*args, **valid).flip(0)


@mutation(update, "gae", "DelayedCredit", "MultiDiscreteMatch")
def advantages_accumulate_over_environments(gae: Function, *args: Any, **valid: Any) -> Any:
    args, valid = tree_map(lambda arg: arg.T if isinstance(arg, Tensor) else arg, (args, valid))
    return gae(*args, **valid).T


@mutation(update, "gae", "TerminatedValue", "ResetStep")
def each_step_bootstraps_from_where_it_began(gae: Function, *args: Any, **valid: Any) -> Any:
    rewards, values, _, *rest = args
    return gae(rewards, values, values, *rest, **valid)


@mutation(update, "gae", "ResetStep", modes=(SAME_STEP,))
def advantages_are_one_step_late(gae: Function, *args: Any, **valid: Any) -> Any:
    return gae(*args, **valid).roll(1, dims=0)


# What is collected.


@mutation(Collector, "_fill_next_values", "ResetStep", modes=EVERY_MODE)
def truncated_steps_bootstrap_from_the_observation_after_the_reset(
    fill: Function, self: Collector, policy: Any, buffers: RolloutBuffers
) -> None:
    fill(self, policy, buffers)
    rollout, last = buffers.rollout, policy.value(buffers.on_device(self._stepper.observations))
    after = torch.cat((rollout.values[1:], last.unsqueeze(0)))
    if self._stepper.autoreset_mode is NEXT_STEP:
        after = after.roll(-1, dims=0)
    rollout.next_values.copy_(torch.where(rollout.truncated, after, rollout.next_values))


@mutation(Collector, "collect", "Stochastic", "Password")
def actions_are_greedy_while_collecting(
    collect: Function, self: Collector, policy: Any, act: Function, *rest: Any
) -> Any:
    def without_noise(seen: Any, noise: Tensor, *given: Any, **options: Any) -> Any:
        return act(seen, torch.zeros_like(noise), *given, **options)

    return collect(self, policy, without_noise, *rest)


@mutation(Collector, "collect", "Squared")
def observations_are_kept_by_reference(collect: Function, *args: Any) -> Any:
    rollout: Rollout = collect(*args)
    rollout.observations[:] = rollout.observations[-1].clone()
    return rollout


@mutation(Collector, "collect", "Squared")
def observations_are_those_after_the_step(collect: Function, *args: Any) -> Any:
    rollout: Rollout = collect(*args)
    rollout.observations.copy_(rollout.observations.roll(-1, dims=0))
    return rollout


@mutation(StepBuffers, "write_action", "Squared")
def log_probs_are_of_the_next_environments_action(
    write: Function, self: StepBuffers, t: int, action: Any
) -> None:
    write(self, t, action._replace(log_probs=action.log_probs.roll(1)))


# What is trained on.


@mutation(learner, "update", "ResetStep")
def reset_steps_are_trained_on(
    update: Function, policy: Any, optimizer: Any, rollout: Rollout, *rest: Any, **options: Any
) -> Any:
    rollout = replace(rollout, valid=torch.ones_like(rollout.valid))
    return update(policy, optimizer, rollout, *rest, **options)


@mutation(update, "make_batch", "ResetStep", "Bandit")
def last_steps_are_masked_rather_than_reset_steps(
    make_batch: Function, rollout: Rollout, advantages: Tensor
) -> Any:
    return make_batch(replace(rollout, valid=~(rollout.terminated | rollout.truncated)), advantages)


@mutation(update, "make_batch", "Bandit")
def advantages_are_shuffled_against_transitions(
    make_batch: Function, rollout: Rollout, advantages: Tensor
) -> Any:
    batch = make_batch(rollout, advantages)
    order = torch.arange(len(batch.advantages)).flip(0)
    return batch._replace(advantages=batch.advantages[order])


@mutation(update, "make_batch", "TruncatedValue")
def values_are_regressed_on_the_advantages(make_batch: Function, rollout: Rollout, advantages: Tensor) -> Any:
    return make_batch(rollout, advantages)._replace(returns=advantages.flatten())


@mutation(learner, "minibatch_loss", "Bandit")
def actions_are_those_of_other_transitions(
    minibatch_loss: Function, policy: Any, batch: Any, *rest: Any
) -> Any:
    return minibatch_loss(policy, batch._replace(actions=batch.actions.roll(1, dims=0)), *rest)


# The loss.


@mutation(loss, "clipped_surrogate", "Bandit")
def policy_gradient_has_the_wrong_sign(
    surrogate: Function, log_ratio: Tensor, advantages: Tensor, clip: float
) -> Any:
    return surrogate(log_ratio, -advantages, clip)


@mutation(loss, "clipped_surrogate", "Bandit")
def ratio_is_upside_down(surrogate: Function, log_ratio: Tensor, advantages: Tensor, clip: float) -> Any:
    return surrogate(-log_ratio, advantages, clip)


@mutation(
    loss,
    "clipped_surrogate",
    elsewhere="tests/ppo/test_loss.py::test_equals_the_sum_worked_out_by_hand",
)
def ratio_is_not_clipped(surrogate: Function, log_ratio: Tensor, advantages: Tensor, clip: float) -> Any:
    return surrogate(log_ratio, advantages, 1e9)


@mutation(
    loss,
    "clipped_surrogate",
    elsewhere="tests/ppo/test_loss.py::test_equals_the_sum_worked_out_by_hand",
)
def ratio_is_taken_against_the_new_policy(
    surrogate: Function, log_ratio: Tensor, advantages: Tensor, clip: float
) -> Any:
    return surrogate(log_ratio - log_ratio.detach(), advantages, clip)


@mutation(loss, "clipped_surrogate", "Squared", "MultiDiscreteMatch")
def clipping_takes_the_optimistic_bound(
    surrogate: Function, log_ratio: Tensor, advantages: Tensor, clip: float
) -> Any:
    return -surrogate(log_ratio, -advantages, clip)


@mutation(learner, "minibatch_loss", "TruncatedValue")
def advantages_are_not_detached(minibatch_loss: Function, policy: Any, batch: Any, *rest: Any) -> Any:
    live = batch.returns - policy.value(batch.observations)
    return minibatch_loss(policy, batch._replace(advantages=live), *rest)


@mutation(loss, "value_loss", "TruncatedValue")
def values_are_not_trained(value_loss: Function, *args: Any) -> Any:
    return 0.0 * value_loss(*args)


@mutation(loss, "value_loss", "TruncatedValue")
def value_loss_has_the_wrong_sign(value_loss: Function, *args: Any) -> Any:
    return -value_loss(*args)


@mutation(learner, "minibatch_loss", "Stochastic")
def entropy_bonus_has_the_wrong_sign(minibatch_loss: Function, *args: Any) -> Any:
    *others, config = args
    return minibatch_loss(*others, replace(config, ent_coef=-config.ent_coef))


@mutation(
    torch.optim.Optimizer,
    "zero_grad",
    elsewhere="tests/ppo/test_learner.py::test_saved_and_loaded_it_goes_on_as_if_never_stopped",
)
def gradients_are_never_zeroed(zero_grad: Function, *args: Any) -> None:
    pass


@mutation(
    torch.nn.utils,
    "clip_grad_norm_",
    elsewhere="tests/ppo/test_update.py::test_gradients_are_clipped_to_the_norm",
)
def gradients_are_not_clipped(clip: Function, parameters: Any, norm: float) -> Any:
    return clip(parameters, float("inf"))


# The policy.


@mutation(MLPEncoder, "forward", "Squared", "DelayedCredit", "ContinuousTarget", "MultiDiscreteMatch")
def policy_does_not_see(forward: Function, self: MLPEncoder, observations: Tensor) -> Any:
    return forward(self, torch.zeros_like(observations))


@mutation(ImageEncoder, "forward", "ImageTarget")
def images_of_a_batch_are_mixed_by_a_reshape(forward: Function, self: ImageEncoder, images: Tensor) -> Any:
    return forward(self, images.movedim(0, -1).reshape(images.shape))


@mutation(MultiCategoricalHead, "evaluate", "MultiDiscreteMatch")
def log_probs_leave_out_the_last_factor(
    evaluate: Function, self: MultiCategoricalHead, params: Tensor, actions: Tensor
) -> Any:
    full, entropies = evaluate(self, params, actions)
    log_probs = self._log_probs(params)
    return full - log_probs[:, -1].gather(-1, actions[:, -1:]).squeeze(-1), entropies


@mutation(GaussianHead, "to_env", "ContinuousTarget")
def actions_are_clipped_to_the_unit_box(to_env: Function, self: GaussianHead, actions: Tensor) -> Any:
    return to_env(self, actions.clamp(-1.0, 1.0))


@mutation(GaussianHead, "_log_prob", "ContinuousTarget")
def log_probs_are_averaged_over_the_batch(log_prob: Function, self: GaussianHead, *args: Tensor) -> Any:
    log_probs: Tensor = log_prob(self, *args)
    return log_probs.mean().expand_as(log_probs)
