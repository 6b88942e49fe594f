"""Policy × environments → rollout, where some environments step while the policy acts on others."""

from collections import deque
from typing import Any, cast

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from puffer_lightning.envs.async_batches import SupportsSendRecv
from puffer_lightning.policies import Policy, State
from puffer_lightning.rollout.batch_buffers import BatchBuffers, Places
from puffer_lightning.rollout.batch_stepper import BatchStepper, Overlap, check_overlap
from puffer_lightning.rollout.collector import Actor, Collector
from puffer_lightning.rollout.phases import Measure
from puffer_lightning.rollout.turns import Turns


class OverlappedCollector(Collector):
    """A ``Collector`` whose policy acts on a batch of the environments while the others step.

    The rollout is the same T steps of each of the N environments, each chosen by the policy of this rollout:
    who has made T steps waits for the next. Noise belongs to a step of an environment, so no result depends
    on the order in which batches come. Only rounding may: a network may round the same row differently
    in batches of other sizes and other rows.

    Args:
        env: The environments; see :class:`~puffer_lightning.envs.async_batches.SupportsSendRecv`.
        horizon: T.
        seed: As of ``Collector``.
        device: Likewise.
        overlap: ``"halves"``, which are the same halves in the same order at each step, so that a run can be
            repeated bit for bit; or ``"first_ready"``, the first ``env.batch_size`` environments that are
            ready, so that slow steps hold nobody up.

    Raises:
        ConfigurationError: The environments cannot be stepped so; and as of ``Collector``.
    """

    _stepper: BatchStepper
    _buffers: BatchBuffers

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        horizon: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        overlap: Overlap = "first_ready",
    ) -> None:
        check_overlap(env, overlap)
        self._halves = overlap == "halves"
        super().__init__(env, horizon, seed, device)

    @override
    def _begin(self, seed: int) -> BatchStepper:
        stepper = BatchStepper(self.env)
        stepper.reset(seed)
        return stepper

    @override
    def _allocate(self, policy: Policy) -> BatchBuffers:
        return BatchBuffers(self._stepper.observations, policy, self.horizon, self.device)

    @override
    def _fill(self, policy: Policy, act: Actor, measure: Measure) -> None:
        stepper, buffers, num_envs = self._stepper, self._buffers, self.env.num_envs
        batch_size = num_envs // 2 if self._halves else cast(SupportsSendRecv, self.env).batch_size
        write_observations = measure("rollout/copy", buffers.write_observations)
        write_action = measure("rollout/copy", buffers.write_action)
        write_step = measure("rollout/copy", buffers.write_step)
        to_env = measure("rollout/copy", lambda actions: stepper.to_env(policy.head.to_env(actions)))
        send, receive = measure("rollout/env", stepper.send), measure("rollout/env", stepper.receive)
        turns, times = Turns(self.horizon, num_envs, batch_size), np.zeros(num_envs, dtype=np.intp)
        stepping: deque[NDArray[np.intp]] = deque()
        # Rows of it are replaced; what it was before is kept with the rollout.
        self._state = tree_map(torch.clone, self._state)
        while not turns.over:
            env_ids = turns.take()
            if env_ids is not None:
                at = Places(times[env_ids], env_ids)
                observations, noise = write_observations(at, stepper.observations)
                action = act(observations, noise, self._state_of(env_ids))
                write_action(at, action)
                self._replace_state(env_ids, action.state)
                send(to_env(action.actions), env_ids)
                stepping.append(env_ids)
                continue
            env_ids, step = receive(stepping.popleft() if self._halves else None)
            state = self._state_of(env_ids)
            write_step(Places(times[env_ids], env_ids), step, state)
            if tree_leaves(state):
                started = torch.as_tensor(step.started, device=self.device)
                self._replace_state(env_ids, policy.restart(state, started))
            times[env_ids] += 1
            turns.done(env_ids)

    def _state_of(self, env_ids: NDArray[np.intp]) -> State:
        return tree_map(lambda leaf: leaf.index_select(0, self._index(env_ids)), self._state)

    def _replace_state(self, env_ids: NDArray[np.intp], state: State) -> None:
        index = self._index(env_ids)
        # Autocasting may have left the new state in another dtype than the initial one's.
        tree_map(lambda leaf, rows: leaf.index_copy_(0, index, rows.to(leaf.dtype)), self._state, state)

    def _index(self, env_ids: NDArray[np.intp]) -> Tensor:
        return torch.from_numpy(env_ids).to(self.device, non_blocking=True)
