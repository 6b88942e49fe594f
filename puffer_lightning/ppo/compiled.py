"""Acting and minibatches, each compiled into one graph that is called without checking what it is for.

Between two operators of a small network torch takes longer than within them, and autograd, the optimizer's
bookkeeping and the checks that guard compiled functions take longer still. See docs/adr/0027.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.optim import Adam, Optimizer
from torch.optim.adam import adam
from torch.utils._pytree import tree_unflatten

from puffer_lightning.distributed import clip_grad_norm
from puffer_lightning.policies import Action, Policy, State
from puffer_lightning.ppo.config import PPOConfig
from puffer_lightning.ppo.gradients import num_parts
from puffer_lightning.ppo.graphs import Graph, tensors_in
from puffer_lightning.ppo.loss import minibatch_loss
from puffer_lightning.ppo.steps import count_step, step_if_finite, unwrapped
from puffer_lightning.rollout import Batch

# Of batches, for each of which acting is compiled once. Environments that answer when they are ready come in
# batches of any size.
_MOST_SIZES = 4


class CompiledAct:
    """Stands in for ``policy.act``: compiled at the first call for each number of environments.

    What cannot be compiled, or where there is no compiler, is done as before, after a warning.

    Args:
        policy: Acts without gradients; its parameters may change, but not what they are.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._one_action = isinstance(policy.head.empty_actions(0), Tensor)
        self._by_kind: dict[tuple[int, bool], Graph] = {}

    def __call__(self, observations: Any, noise: Tensor, state: State = (), values: bool = True) -> Action:
        """See :meth:`~puffer_lightning.policies.Policy.act`."""
        kind = noise.shape[0], values
        graph = self._by_kind.get(kind)
        if graph is None and len(self._by_kind) < _MOST_SIZES:
            graph = self._by_kind[kind] = Graph(_act, "acting")
        if graph is not None:
            # Most observations and actions are one tensor, and a pytree's ways take long.
            stateless = isinstance(state, tuple) and not state
            plain = stateless and self._one_action and isinstance(observations, Tensor)
            tensors = (observations, noise) if plain else tensors_in((observations, noise, state))
            leaves = graph(tensors, self._policy, observations, noise, state, values)
            if leaves is not None:
                action: Any = (*leaves, ()) if plain else tree_unflatten(leaves, graph.spec)
                return Action(*action)
        return self._policy.act(observations, noise, state, values)


class CompiledMinibatches:
    """A minibatch from its indices to the optimizer's step, for a policy on one device.

    Nobody else is told of its gradients. The step of an Adam is within the graph; other optimizers take
    theirs, as does Adam where a minibatch is divided. Compiled at the first use, again where sizes change.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Policy) -> None:
        self._loss = _Loss(policy)
        self._graphs: defaultdict[tuple[object, ...], Graph] = defaultdict(
            partial(Graph, _minibatch, "the update")
        )

    def begin(
        self, batch: Batch, config: PPOConfig, optimizer: Optimizer
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
        """Prepare for the minibatches of a rollout.

        Args:
            batch: The rollout.
            config: The coefficients.
            optimizer: Steps all the policy's parameters that have gradients; see
                :func:`~puffer_lightning.ppo.steps.step_if_finite`.

        Returns:
            Trains on a minibatch, given its indices and its moments [3] (mean, std and weight, see
            :func:`~puffer_lightning.ppo.loss.minibatch_loss`), and returns its sums [5] of ``STATISTICS``
            and the norm of its gradients. Returns None, and nothing is done, if it cannot be compiled or
            memory runs out. It is itself None for sequences, and before an Adam's first step, which makes its
            state.
        """
        if batch.started is not None:
            # A graph of all steps of the sequences would take minutes to compile.
            return None
        trained = {name: part for name, part in self._loss.named_parameters() if part.requires_grad}
        detached = {name: parameter.detach() for name, parameter in trained.items()}
        in_graph: _Adam | None = None
        if _is_plain_adam(inner := unwrapped(optimizer)):
            if not all(parameter in inner.state for parameter in trained.values()):
                return None
            in_graph = _adam(inner, list(trained.values()))
        learning_rate = inner.param_groups[0]["lr"]
        coefficients = config.clip_coef, config.vf_coef, config.ent_coef, config.max_grad_norm, learning_rate
        # A tensor, so that nothing is compiled anew where one of them changes from iteration to iteration.
        scalars = torch.tensor(coefficients, device=batch.values.device)
        # In the order of a pytree's leaves, whose own ways would take as long as a minibatch.
        fixed = [*detached.values(), *tensors_in(batch), scalars]
        stepped = [] if in_graph is None else [*in_graph.averages, *in_graph.squares, *in_graph.steps]

        def train(indices: Tensor, moments: Tensor) -> tuple[Tensor, Tensor] | None:
            parts = indices.chunk(num_parts(indices, config))
            whole = len(parts) == 1
            stepping = in_graph if whole else None
            tensors_of_all = [*fixed, *(stepped if whole else ())]
            constants = None if stepping is None else stepping.constants
            gradients: list[Tensor] = []
            sums: list[Tensor] = []
            for rows in parts:
                arguments = self._loss, rows, moments, detached, batch, scalars, stepping, config, whole
                kind = batch.size, len(rows), whole, config.clip_value_loss, constants
                try:
                    result = self._graphs[kind]((rows, moments, *tensors_of_all), *arguments)
                except torch.OutOfMemoryError:
                    return None
                if result is None:
                    return None
                statistics, *rest = result
                if whole:
                    norm, *gradients = rest
                    continue
                sums.append(statistics)
                if gradients:
                    torch._foreach_add_(gradients, rest)
                else:
                    gradients = rest
            if stepping is not None:
                count_step(optimizer)
                return statistics, norm
            for parameter, gradient in zip(trained.values(), gradients, strict=True):
                parameter.grad = gradient
            if not whole:
                statistics = torch.stack(sums).sum(0)
                norm = clip_grad_norm(trained.values(), config.max_grad_norm)
            step_if_finite(optimizer, norm)
            return statistics, norm

        return train


class _Adam(NamedTuple):
    """What ``torch.optim.adam.adam`` needs to know of an Adam."""

    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]

    @property
    def constants(self) -> tuple[float, ...]:
        """What a graph is compiled for."""
        return self.beta1, self.beta2, self.weight_decay, self.eps


def _is_plain_adam(optimizer: Optimizer) -> bool:
    """Whether it is an Adam with no more to it than the graph holds."""
    special = ("amsgrad", "maximize", "differentiable", "capturable")
    [group, *others] = optimizer.param_groups
    return type(optimizer) is Adam and not others and not any(group[name] for name in special)


def _adam(optimizer: Optimizer, parameters: list[nn.Parameter]) -> _Adam | None:
    """None where it counts steps on another device than the parameters'."""
    states = [optimizer.state[parameter] for parameter in parameters]
    averages, squares, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
    if any(step.device != parameter.device for step, parameter in zip(steps, parameters, strict=True)):
        return None
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    return _Adam(beta1, beta2, group["weight_decay"], group["eps"], averages, squares, steps)


class _Loss(nn.Module):
    """``minibatch_loss`` as a module, for the sake of ``functional_call``."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(
        self, batch: Batch, rows: Tensor, moments: Tensor, scalars: Tensor, config: PPOConfig
    ) -> tuple[Tensor, Tensor]:
        clip_coef, vf_coef, ent_coef, *_ = scalars.unbind()
        given: Any = {"clip_coef": clip_coef, "vf_coef": vf_coef, "ent_coef": ent_coef}
        mean, std, weight = moments.unbind()
        return minibatch_loss(self.policy, batch.take(rows), mean, std, weight, replace(config, **given))


def _act(policy: Policy, observations: Any, noise: Tensor, state: State, values: bool) -> Action:
    return policy.act(observations, noise, state, values)


def _minibatch(
    loss: _Loss,
    rows: Tensor,
    moments: Tensor,
    parameters: dict[str, Tensor],
    batch: Batch,
    scalars: Tensor,
    stepping: _Adam | None,
    config: PPOConfig,
    whole: bool,
) -> list[Tensor]:
    """Sums [5], the norm if whole, and gradients unless stepping, each laid out as its parameter.

    Fused optimizers rely on that layout.
    """

    def of(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        arguments = batch, rows, moments, scalars, config
        result: tuple[Tensor, Tensor] = functional_call(loss, parameters, arguments)
        return result

    by_name, statistics = grad(of, has_aux=True)(parameters)
    gradients = [torch.empty_like(parameters[name]).copy_(of_one) for name, of_one in by_name.items()]
    if not whole:
        return [statistics, *gradients]
    # As in ``clip_grad_norm_``.
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    *_, max_norm, learning_rate = scalars.unbind()
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients = [gradient * coefficient for gradient in gradients]
    if stepping is None:
        return [statistics, norm, *gradients]
    _step(list(parameters.values()), gradients, stepping, learning_rate, norm.isfinite())
    return [statistics, norm]


def _step(
    parameters: list[Tensor], gradients: list[Tensor], of: _Adam, learning_rate: Tensor, finite: Tensor
) -> None:
    """Torch's own step, taken back where a number is not finite."""
    changed = [*parameters, *of.averages, *of.squares, *of.steps]
    before = [tensor.clone() for tensor in changed]
    adam(
        parameters,
        gradients,
        of.averages,
        of.squares,
        [],
        of.steps,
        foreach=False,
        capturable=True,
        lr=learning_rate,
        beta1=of.beta1,
        beta2=of.beta2,
        weight_decay=of.weight_decay,
        eps=of.eps,
        amsgrad=False,
        maximize=False,
    )
    for tensor, old in zip(changed, before, strict=True):
        tensor.copy_(torch.where(finite, tensor, old))
