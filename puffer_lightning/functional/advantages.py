"""Advantage estimation over time-major rollouts."""

import torch
from torch import Tensor

# Elements; with more of them a CPU takes longer for passes over all than for steps one by one.
_SMALL = 16384


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
    out: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    r"""Generalised advantage estimation, with truncated steps bootstrapped.

    For ``t = T-1, ..., 0``, with ``A_T = 0``::

        δ_t = r_t + γ · (1 - terminated_t) · V(s'_t) - V(s_t)
        A_t = δ_t + γ · λ · (1 - terminated_t) · (1 - truncated_t) · A_{t+1}

    Row ``t`` of every argument belongs to the step that was taken from observation ``s_t``: the reward it
    earned, the flags it returned and the value of the observation ``s'_t`` it led to. Where an episode
    ended at ``t``, ``s'_t`` is its *final* observation and not the first one of the next episode;
    elsewhere ``s'_t`` is ``s_{t+1}``. A terminated step has no future; a truncated one has, so its value
    stays in ``δ_t``, but no advantage flows back over the end of an episode of either kind.

    A row that is not ``valid`` tells nothing: its ``δ_t`` is 0. That may be a reset step (gymnasium's
    NEXT_STEP autoreset, where the action is ignored), which reaches no other row anyway, as the step before
    it is terminated or truncated; or a truncated one whose transition was lost, so that the step before it
    is estimated from ``V(s'_t)`` alone.

    The returns to regress values on are ``A_t + V(s_t)``.

    Source: Schulman et al. 2016, eq. 16, arXiv 1506.02438; truncation after Pardo et al. 2018,
    arXiv 1712.00378.

    Args:
        rewards: ``[T, N]`` floating point.
        values: ``[T, N]``, ``V(s_t)``.
        next_values: ``[T, N]``, ``V(s'_t)``. Not read where ``terminated``: even NaN will do there.
        terminated: ``[T, N]`` bool.
        truncated: ``[T, N]`` bool. Where both flags are set, termination wins.
        gamma: Discount γ in [0, 1].
        gae_lambda: The λ of the exponential average, in [0, 1].
        out: ``[T, N]`` to write the result to; it may be one of the floating-point inputs.
        valid: ``[T, N]`` bool; where False, nothing but the flags is read. All are, if not given.

    Returns:
        ``[T, N]`` advantages (``out`` if given), of the inputs' dtype and device. They carry no gradient:
        advantages are constants of the loss.
    """
    bootstrap = next_values.masked_fill(terminated, 0.0)
    advantages = torch.sub(torch.add(rewards, bootstrap, alpha=gamma), values, out=out)
    if valid is not None:
        advantages.masked_fill_(~valid, 0.0)
    decay = (terminated | truncated).logical_not().to(advantages.dtype).mul_(gamma * gae_lambda)
    _accumulate_back(advantages, decay[:-1])
    return advantages


def _accumulate_back(sums: Tensor, decay: Tensor) -> None:
    """Make of x_t [T, N], in place, the sums s_t = x_t + decay_t · s_{t+1}, with s_{T-1} = x_{T-1}.

    Either step by step, or in log2(T) passes over all steps, the k-th of which adds what is 2^k steps on
    (Hillis and Steele 1986, doi:10.1145/7902.7903): more arithmetic in fewer operators, which is what takes
    the time of a small rollout, and of any on a GPU.
    """
    steps = len(sums)
    if sums.device.type != "cpu" or sums.numel() <= _SMALL:
        ahead = 1
        while ahead < steps:
            sums[:-ahead].addcmul_(decay, sums[ahead:].clone())
            decay = decay[:-ahead] * decay[ahead:]
            ahead *= 2
        return
    # Unbinding once makes the views of all rows in one call; indexing would make three of them every step.
    rows, decays = sums.unbind(), decay.unbind()
    for t in reversed(range(steps - 1)):
        rows[t].addcmul_(decays[t], rows[t + 1])


@torch.no_grad()
def running_returns(
    rewards: Tensor, valid: Tensor, ended: Tensor, gamma: float, carry: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Discounted sums of the rewards *so far* in each episode, whose spread is a scale for rewards.

    For ``t = 0, ..., T-1``::

        G_t = r_t + γ · (1 - ended_{t-1}) · G_{t-1}

    Source: Engstrom et al. 2020, section 3, arXiv 2005.12729.

    Args:
        rewards: ``[T, N]``. Not read where not ``valid``.
        valid: ``[T, N]`` bool, False on reset steps, which belong to no episode and return 0.
        ended: ``[T, N]`` bool, terminated or truncated at this step.
        gamma: Discount γ in [0, 1].
        carry: ``[N]`` float64, γ · G of the episodes under way before the first step.

    Returns:
        ``(G [T, N], carry [N])``, float64.
    """
    # Backwards in time, as advantages accumulate: what flows into a step decays with the one before it.
    returns = rewards.flip(0).double().where(valid.flip(0), 0.0)
    returns[-1].add_(carry)
    decay = ended.flip(0).logical_not().double().mul_(gamma)
    _accumulate_back(returns, decay[1:])
    return returns.flip(0), decay[0] * returns[0]
