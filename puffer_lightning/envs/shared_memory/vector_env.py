"""``SharedMemoryVectorEnv``: environments in other processes, their arrays in shared memory."""

import multiprocessing
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import error
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper, batch_space
from numpy.typing import NDArray
from typing_extensions import override

from puffer_lightning.envs.async_batches import Received
from puffer_lightning.envs.shared_memory.arguments import (
    EnvFn,
    assign,
    divide,
    environment_functions,
    next_seed,
    processors,
    seeds_of,
    split_options,
)
from puffer_lightning.envs.shared_memory.faults import (
    EnvironmentFaultError,
    EnvironmentFaultWarning,
    Fault,
    WorkerError,
)
from puffer_lightning.envs.shared_memory.infos import final_infos, merge_infos
from puffer_lightning.envs.shared_memory.layout import SharedBatch, check_space, tree_leaves, tree_map
from puffer_lightning.envs.shared_memory.stepping import Outcome
from puffer_lightning.envs.shared_memory.supervisor import Supervisor
from puffer_lightning.envs.shared_memory.worker import Job
from puffer_lightning.envs.state import NoStateError
from puffer_lightning.errors import ConfigurationError

Flags = NDArray[np.bool_]

# The longest to watch for the other side before sleeping, where each worker has a processor. Where they take
# turns, who watches keeps the others from being done.
_WATCH_SECONDS = 500e-6


class SharedMemoryVectorEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """Environments that step in worker processes, several in each, and leave the results in shared memory.

    Returns, bit for bit, what ``gymnasium.vector.SyncVectorEnv`` does with the same seeds, for any number of
    workers; actions are cast to the dtype of their space first. Nothing is pickled in a step unless an
    environment returns an info. Each worker has a run of consecutive environments, and the ``env_ids`` of
    ``send`` and ``recv`` are whole runs.

    With ``batch_size`` less than ``num_envs``, ``recv`` returns the first environments that are ready::

        observations, _ = env.reset(seed=1)
        env.send(policy(observations))
        while True:
            received = env.recv()  # the others step on meanwhile
            env.send(policy(received.observations), received.env_ids)

    A transition to leave out of training (see ``on_fault`` and ``on_non_finite``) is a truncated one with
    reward 0 for which ``infos["masked"]`` is set.

    Args:
        env: Gymnasium id, or what makes one environment, or as many of these as there are environments.
        num_envs: N; not needed if ``env`` is a sequence.
        num_workers: W; as many as there are processors, if not given.
        env_kwargs: Arguments of the environment, if ``env`` is an id or a function.
        batch_size: Environments that ``recv`` returns; all, if not given.
        autoreset_mode: What happens when an episode ends.
        context: How processes start: ``"forkserver"`` and ``"spawn"`` import the main module again, so that
            a script needs its ``if __name__ == "__main__":``; ``"fork"`` does not, but may hang where the
            process has threads or uses a GPU.
        step_timeout: Seconds that a worker may take for one step or reset of its environments.
        on_fault: When an environment raises or hangs, or its process dies: ``"raise"``, or ``"restart"``,
            which truncates the episodes of the process and goes on with new environments.
        on_non_finite: When an observation or reward is NaN or infinite: ``"raise"``, or ``"mask"``, which
            truncates the episode.
        max_faults: How many restarts and masked transitions there may be before the run stops with a report.
        copy: Return copies of the arrays rather than views, which the next step overwrites.

    Raises:
        ConfigurationError: An option or a space cannot be used; the message says what to do.
        EnvironmentFaultError: An environment cannot be made.

    Attributes:
        batch_size: Environments that ``recv`` returns.
        faults: What was restarted or masked, in order.
    """

    def __init__(
        self,
        env: str | EnvFn | Sequence[EnvFn],
        num_envs: int | None = None,
        num_workers: int | None = None,
        *,
        env_kwargs: dict[str, Any] | None = None,
        batch_size: int | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        context: Literal["forkserver", "spawn", "fork"] = "forkserver",
        step_timeout: float = 60.0,
        on_fault: Literal["raise", "restart"] = "raise",
        on_non_finite: Literal["raise", "mask"] = "raise",
        max_faults: int = 10,
        copy: bool = False,
    ) -> None:
        for name, value, choices in (
            ("on_fault", on_fault, ("raise", "restart")),
            ("on_non_finite", on_non_finite, ("raise", "mask")),
            ("context", context, multiprocessing.get_all_start_methods()),
        ):
            if value not in choices:
                raise ConfigurationError(f"{name} is {value!r}: set it to one of {', '.join(choices)}.")
        if step_timeout <= 0:
            raise ConfigurationError(
                f"step_timeout is {step_timeout}: set it to a number of seconds above 0."
            )
        env_fns = environment_functions(env, num_envs, env_kwargs)
        self.num_envs = len(env_fns)
        cores = processors()
        slices = divide(
            self.num_envs, min(cores, self.num_envs) if num_workers is None else num_workers, batch_size
        )
        self.batch_size = self.num_envs if batch_size is None else batch_size
        self._batch_workers = len(slices) if batch_size is None else batch_size // len(slices[0])
        self._worker_at = {rows.start: worker for worker, rows in enumerate(slices)}
        self._mode = AutoresetMode(autoreset_mode)
        self._on_fault, self._max_faults, self._copy = on_fault, max_faults, copy
        self.faults: list[Fault] = []
        self._seeds: list[int | None] = [None] * self.num_envs
        self._pending: list[int] = []
        # Not copies, so they need not be made each time.
        self._views: dict[tuple[int, ...], tuple[NDArray[np.intp], Any]] = {}

        self._describe(env_fns[0])
        starts = multiprocessing.get_context(context)
        if context == "forkserver":
            # Imported once, in the process from which the workers are then forked.
            multiprocessing.set_forkserver_preload(["__main__", Job.__module__])
        spaces = self.single_observation_space, self.single_action_space, self.num_envs, len(slices)
        memory = SharedBatch.allocate(starts, *spaces)
        self._batch = SharedBatch(memory, *spaces)
        seconds = _WATCH_SECONDS if cores >= len(slices) else 0.0
        jobs = [
            Job(
                worker,
                rows,
                [CloudpickleWrapper(env_fns[row]) for row in rows],
                memory,
                *spaces,
                self._mode,
                on_non_finite == "mask",
                seconds,
            )
            for worker, rows in enumerate(slices)
        ]
        self._slices = slices
        self._supervisor = Supervisor(jobs, starts, self._batch, step_timeout, seconds)
        # Also where nobody calls close: at the end of the program, or of this object.
        self._stop = weakref.finalize(self, self._supervisor.stop)
        try:
            self._supervisor.start()
        except BaseException:
            self.close()
            raise

    def _describe(self, env_fn: EnvFn) -> None:
        env = env_fn()
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.metadata = {**env.metadata, "autoreset_mode": self._mode}
        self.render_mode, self.spec = env.render_mode, env.spec
        env.close()
        check_space(self.single_observation_space, "observation space")
        check_space(self.single_action_space, "action space")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @override
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes; what these environments were sent and was not yet received is dropped.

        Args:
            seed: Environment i is given ``seed + i``, or the i-th of a sequence.
            options: Handed on, but for ``reset_mask``, [N] bool: which environments to reset.

        Returns:
            Observations [N, ...] and infos.

        Raises:
            EnvironmentFaultError: See the options of the class.
            ValueError: Seeds or mask are of another number of environments.
        """
        self._check_open()
        seeds = seeds_of(seed, self.num_envs)
        options, mask = split_options(options, self.num_envs)
        workers = [
            w for w, rows in enumerate(self._slices) if mask is None or mask[rows.start : rows.stop].any()
        ]
        dropped = [worker for worker in self._pending if worker in workers]
        if dropped:
            self._wait(dropped, len(dropped))
        for row, row_seed in enumerate(seeds):
            if row_seed is not None and (mask is None or mask[row]):
                self._seeds[row] = int(row_seed)
        requests = {}
        for worker in workers:
            part = slice(self._slices[worker].start, self._slices[worker].stop)
            requests[worker] = "reset", (seeds[part], options, None if mask is None else mask[part])
            self._supervisor.tell(worker, requests[worker])
        self._pending.extend(workers)
        outcomes = self._wait(workers, len(workers), requests)
        infos = merge_infos(np.arange(self.num_envs), list(outcomes.values()), {})
        return self._own(self._batch.observations), infos

    @override
    def step(self, actions: Any) -> tuple[Any, NDArray[Any], Flags, Flags, dict[str, Any]]:
        """Step all environments.

        Args:
            actions: Of all environments, as of ``action_space``.

        Returns:
            Observations [N, ...], rewards [N], terminated [N], truncated [N] and infos.

        Raises:
            EnvironmentFaultError: See the options of the class.
        """
        self.send(actions)
        received = self._receive(range(len(self._slices)))
        return received[1:]

    def send(self, actions: Any, env_ids: NDArray[Any] | Sequence[int] | None = None) -> None:
        """Let environments step; ``recv`` returns what became of it.

        Args:
            actions: Pytree of arrays [B, ...], in the order of ``env_ids``.
            env_ids: [B], which environments; all, if not given.

        Raises:
            AlreadyPendingCallError: Some step already.
            ValueError: ``env_ids`` are not those of whole workers.
        """
        self._check_open()
        workers = range(len(self._slices)) if env_ids is None else self._workers_of(env_ids)
        if not set(workers).isdisjoint(self._pending):
            raise error.AlreadyPendingCallError(
                "send: receive what was sent to these environments first", "send"
            )
        rows = slice(None) if env_ids is None else env_ids
        tree_map(lambda leaf, given: assign(leaf, rows, given), self._batch.actions, actions)
        for worker in workers:
            self._supervisor.tell(worker)
        self._pending.extend(workers)

    def recv(self, env_ids: NDArray[Any] | Sequence[int] | None = None) -> Received:
        """Wait for environments that were sent actions.

        Args:
            env_ids: Which ones to wait for; the first ``batch_size`` that are ready, if not given.

        Returns:
            What they returned, by ascending environment; of consecutive ones, and unless ``copy`` is set,
            views that are valid until these environments are sent actions again.

        Raises:
            EnvironmentFaultError: See the options of the class.
            NoAsyncCallError: Too few were sent actions.
        """
        self._check_open()
        workers = None if env_ids is None else sorted(self._workers_of(env_ids))
        if (
            len(self._pending) < self._batch_workers
            if workers is None
            else not set(workers) <= set(self._pending)
        ):
            raise error.NoAsyncCallError("recv: send actions to these environments first", "recv")
        return self._receive(workers)

    def _receive(self, workers: Sequence[int] | None) -> Received:
        if workers is None:
            outcomes = self._wait(self._pending, self._batch_workers)
        else:
            outcomes = self._wait(workers, len(workers))
        ids, views = self._rows_of(tuple(sorted(outcomes)))
        observations, rewards, terminated, truncated = self._own(views)
        said = list(outcomes.values())
        infos: dict[str, Any] = {}
        if self._mode is AutoresetMode.SAME_STEP and (ended := terminated | truncated).any():
            infos = final_infos(ids, ended, self._batch)
        if any(said):
            infos = merge_infos(ids, said, infos)
        return Received(ids.copy(), observations, rewards, terminated, truncated, infos)

    def _rows_of(self, workers: tuple[int, ...]) -> tuple[NDArray[np.intp], Any]:
        """The environments of some workers, ascending, and their parts of what is shared."""
        if workers in self._views:
            return self._views[workers]
        batch = self._batch
        ids = np.concatenate([self._slices[worker] for worker in workers])
        consecutive = len(workers) > workers[-1] - workers[0]
        rows = slice(int(ids[0]), int(ids[-1]) + 1) if consecutive else ids
        arrays = batch.observations, batch.rewards, batch.terminated, batch.truncated
        views = tree_map(lambda leaf: leaf[rows], arrays)
        if consecutive:
            self._views[workers] = ids, views
        return ids, views

    def _wait(
        self, workers: Sequence[int], count: int, requests: dict[int, Any] | None = None
    ) -> dict[int, Outcome | None]:
        """What the first ``count`` of the workers answered, dealing with what went wrong."""
        ready = self._supervisor.wait(workers, count)[:count]
        outcomes: dict[int, Outcome | None] = {}
        for worker in sorted(ready):
            answer = self._supervisor.answer(worker)
            if isinstance(answer, WorkerError):
                answer = self._restart(worker, answer, None if requests is None else requests[worker])
            elif answer is not None:
                for row, reason in answer.masked:
                    self._count(Fault(row, self._seeds[row], reason))
            outcomes[worker] = answer
            self._pending.remove(worker)
        return outcomes

    def _restart(self, worker: int, lost: Any, request: Any) -> Outcome:
        """Put new environments in the place of lost ones."""
        rows = self._slices[worker]
        part = slice(rows.start, rows.stop)
        before = tree_map(lambda leaf: leaf[part].copy(), self._batch.observations)
        while isinstance(lost, WorkerError):
            fault = Fault(lost.row, self._seeds[lost.row], lost.reason, lost.details)
            if self._on_fault == "raise" or lost.fatal:
                self._fail(EnvironmentFaultError(fault))
            self._count(fault)
            seeds = [next_seed(self._seeds[row], row, len(self.faults)) for row in rows]
            lost = self._supervisor.restart(worker, seeds)
            if request is not None and not isinstance(lost, WorkerError):
                self._supervisor.tell(worker, request)
                self._supervisor.wait([worker], 1)
                lost = self._supervisor.answer(worker)
        if request is not None:
            assert isinstance(lost, Outcome)
            return lost
        for final, last in zip(tree_leaves(self._batch.final_observations), tree_leaves(before), strict=True):
            final[part] = last
        batch = self._batch
        batch.rewards[part], batch.terminated[part], batch.truncated[part] = 0.0, False, True
        return Outcome(lost.infos, [(row, "restarted") for row in rows])

    def _count(self, fault: Fault) -> None:
        self.faults.append(fault)
        if len(self.faults) > self._max_faults:
            report = "\n".join(
                f"- {each.env_index} (seed {each.seed}): {each.reason}" for each in self.faults
            )
            self._fail(
                EnvironmentFaultError(
                    fault,
                    f"environments failed more often than max_faults={self._max_faults} allows:\n{report}\n\n"
                    f"The last one was {fault}",
                )
            )
        warnings.warn(str(fault), EnvironmentFaultWarning, stacklevel=2)

    def _fail(self, fault: EnvironmentFaultError) -> None:
        self.close()
        raise fault

    @override
    def render(self) -> tuple[Any, ...]:
        """A frame of each environment."""
        return self.call("render")

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or get an attribute.

        Returns:
            [N] results.

        Raises:
            EnvironmentFaultError: It raised in one of them; unless its process is lost, all is as before.
        """
        return self._ask("call", name, [(args, kwargs)] * self.num_envs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment; raises as :meth:`call`."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment.

        Args:
            name: Of the attribute.
            values: A list or tuple of N values, or one value for all.

        Raises:
            EnvironmentFaultError: As :meth:`call`.
            ValueError: There is another number of values.
        """
        values = list(values) if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"got {len(values)} values for {self.num_envs} environments")
        self._ask("set", name, values)

    def get_state(self) -> dict[str, Any]:
        """The state of every environment; see :class:`~puffer_lightning.envs.state.SupportsState`.

        Raises:
            NoStateError: They do not offer it.
        """
        states = self._ask("get_states", "", [None] * self.num_envs)
        for state in states:
            if isinstance(state, str):
                raise NoStateError(state)
        return {
            "environments": [state["layers"] for state in states],
            "ended": np.array([state["ended"] for state in states]),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take up what ``get_state`` returned, on any number of workers.

        Raises:
            NoStateError: It is of other environments.
        """
        rows = zip(state["environments"], state["ended"].tolist(), strict=True)
        reasons = self._ask("set_states", "", [{"layers": layers, "ended": ended} for layers, ended in rows])
        if reasons:
            raise NoStateError(reasons[0])

    def _ask(self, action: str, name: str, arguments: list[Any]) -> tuple[Any, ...]:
        self._check_open()
        if self._pending:
            raise error.AlreadyPendingCallError(f"{name}: receive what was sent first", action)
        for worker, rows in enumerate(self._slices):
            self._supervisor.tell(worker, (action, (name, arguments[rows.start : rows.stop])))
        workers = range(len(self._slices))
        self._supervisor.wait(workers, len(workers))
        answers = [self._supervisor.answer(worker) for worker in workers]
        for answer in answers:
            if isinstance(answer, WorkerError):
                fault = Fault(answer.row, self._seeds[answer.row], answer.reason, answer.details)
                if not all(worker.idle for worker in self._supervisor.workers):
                    self.close()
                raise EnvironmentFaultError(fault)
        return tuple(result for answer in answers for result in answer)

    @override
    def close_extras(self, **kwargs: Any) -> None:
        """End the worker processes, by force if need be."""
        self._stop()

    def _check_open(self) -> None:
        if self.closed:
            raise error.ClosedEnvironmentError("the environments are closed: make new ones")

    def _workers_of(self, env_ids: NDArray[Any] | Sequence[int]) -> list[int]:
        ids, workers, place = np.asarray(env_ids).tolist(), [], 0
        while place < len(ids):
            worker = self._worker_at.get(ids[place])
            if worker is None or ids[place : place + len(self._slices[worker])] != [*self._slices[worker]]:
                raise ValueError(f"env_ids {ids} are not those of whole workers, each of them in order")
            workers.append(worker)
            place += len(self._slices[worker])
        if not workers or len(set(workers)) < len(workers):
            raise ValueError(f"env_ids {ids} are none, or have some more than once")
        return workers

    def _own(self, tree: Any) -> Any:
        return tree_map(np.copy, tree) if self._copy else tree
