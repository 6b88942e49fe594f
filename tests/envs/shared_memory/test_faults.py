import os
import pickle
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs import EnvironmentFaultError
from puffer_lightning.envs.shared_memory import EnvironmentFaultWarning, Fault
from puffer_lightning.rollout.stepper import Stepper
from tests.envs.shared_memory.conftest import Make
from tests.envs.shared_memory.environments import Counting, Unmakeable

ROOT = Path(__file__).parents[3]
GO = np.zeros(4, dtype=np.int64)
LOST = ["raise", "kill", "hang"]


def four(**options: Any) -> list[partial[Counting]]:
    return [partial(Counting, number, **options) for number in range(4)]


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def is_anothers(segment: str) -> bool:
    """Whether a living process has just made it: another test's, as they run side by side."""
    maker = re.match(r"pym-(\d+)-", segment)
    return maker is not None and psutil.pid_exists(int(maker[1]))


def open_descriptors() -> int:
    return len(names("/proc/self/fd"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"environment 2 \(seed 12\): RuntimeError: what a day\n\nTraceback(.|\n)*in step"),
        ("kill", r"environment 2 \(seed 12\): the process of environments 2 to 3 died with exit code -9"),
        ("hang", r"environment 2 \(seed 12\): it hangs: .*environments 2 to 3.*step_timeout"),
        ("nan", r"environment 2 \(seed 12\): its observation is NaN or infinite.*on_non_finite"),
        ("reward", r"environment 2 \(seed 12\): its reward is NaN or infinite.*on_non_finite"),
    ],
)
def test_faults_reach_the_user_with_environment_and_seed(how: str, message: str, make: Make) -> None:
    env = make(four(who=2, how=how), num_workers=2, step_timeout=0.5)
    env.reset(seed=10)
    env.step(GO)
    env.step(GO)
    processes = [worker.process.pid for worker in env._supervisor.workers]
    begin = time.monotonic()
    with pytest.raises(EnvironmentFaultError, match=message) as caught:
        env.step(GO)
    assert time.monotonic() - begin < 2.0
    assert caught.value.fault[:2] == (2, 12)
    assert pickle.loads(pickle.dumps(caught.value)).fault == caught.value.fault
    assert env.closed
    assert not any(psutil.pid_exists(process) for process in processes)


def test_a_fault_in_a_reset_reaches_the_user(make: Make) -> None:
    env = make(four(who=1, how="reset"), num_workers=2)
    env.reset(seed=10)
    with pytest.raises(EnvironmentFaultError, match=r"environment 1 \(seed 21\): RuntimeError: not again"):
        env.reset(seed=20)


def test_an_environment_that_cannot_be_made(make: Make) -> None:
    kinds = [partial(Unmakeable, number) for number in (0, 0, 1)]
    before = psutil.Process().children()
    with pytest.raises(EnvironmentFaultError, match=r"environment 2 .*OSError: no such level"):
        make(kinds, num_workers=2)
    assert psutil.Process().children() == before


def test_a_worker_killed_while_idle_is_noticed(make: Make) -> None:
    env = make(four(), num_workers=2)
    env.reset()
    os.kill(env.call("process")[3], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(EnvironmentFaultError, match="environments 2 to 3 died with exit code -9"):
        env.step(GO)
    assert time.monotonic() - begin < 2.0


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("how", LOST)
@pytest.mark.filterwarnings("ignore::puffer_lightning.envs.shared_memory.EnvironmentFaultWarning")
def test_lost_environments_are_replaced(how: str, mode: AutoresetMode, make: Make, tmp_path: Path) -> None:
    kinds = four(who=2, how=how, once=tmp_path / "done")
    env = make(kinds, num_workers=2, autoreset_mode=mode, on_fault="restart", step_timeout=0.3)
    stepper = Stepper(env)
    stepper.reset(10)
    steps = [stepper.step(GO) for _ in range(2)]
    assert all(step.valid.all() for step in steps)
    step = stepper.step(GO)
    # Both environments of the process are lost, with nothing to learn of it, and the others know nothing.
    assert step.valid.tolist() == [True, True, False, False]
    assert step.truncated.tolist() == [False, False, True, True]
    assert step.rewards.tolist() == [3.0, 3.0, 0.0, 0.0]
    assert not step.terminated.any()
    assert len(env.faults) == 1
    assert env.faults[0][:2] == (2, 12)
    if mode is AutoresetMode.NEXT_STEP:
        assert stepper.step(GO).valid.tolist() == [True, True, False, False]
    else:
        assert step.final_rows.tolist() == [2, 3]
        assert step.final_observations[:, 0].tolist() == [2, 3]
    number, seed, steps_taken, episode = stepper.observations.T
    assert number.tolist() == [0, 1, 2, 3]
    assert steps_taken[2:].tolist() == [0, 0]
    assert episode.tolist() == [0, 0, 0, 0]
    assert seed[:2].tolist() == [10, 11]
    assert len({*seed.tolist(), 12, 13}) == 6
    after = stepper.step(GO)
    assert after.valid.all()
    assert not after.truncated.any()
    stepper.reset(20)
    assert stepper.observations[:, 1].tolist() == [20, 21, 22, 23]


def test_restarts_are_the_same_in_each_run(make: Make, tmp_path: Path) -> None:
    seeds = []
    for name in "ab":
        env = make(four(who=2, how="kill", once=tmp_path / name), num_workers=2, on_fault="restart")
        env.reset(seed=10)
        env.step(GO)
        env.step(GO)
        with pytest.warns(EnvironmentFaultWarning, match="died"):
            seeds.append(env.step(GO)[0][:, 1].tolist())
    assert seeds[0] == seeds[1]


def test_a_worker_lost_before_a_reset_is_replaced(make: Make) -> None:
    env = make(four(), num_workers=2, on_fault="restart")
    env.reset(seed=1)
    os.kill(env.call("process")[0], signal.SIGKILL)
    with pytest.warns(EnvironmentFaultWarning, match="died"):
        observations, infos = env.reset(seed=5)
    assert observations[:, 1].tolist() == [5, 6, 7, 8]
    assert not infos
    assert "masked" not in env.step(GO)[4]


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("how", ["nan", "reward"])
def test_what_is_not_finite_is_masked(how: str, mode: AutoresetMode, make: Make) -> None:
    env = make(four(who=1, how=how), num_workers=2, autoreset_mode=mode, on_non_finite="mask")
    stepper = Stepper(env)
    stepper.reset(10)
    stepper.step(GO)
    stepper.step(GO)
    with pytest.warns(EnvironmentFaultWarning, match=r"environment 1 \(seed 11\)"):
        step = stepper.step(GO)
    assert step.valid.tolist() == [True, False, True, True]
    assert step.truncated.tolist() == [False, True, False, False]
    assert step.rewards.tolist() == [3.0, 0.0, 3.0, 3.0]
    assert np.isfinite(stepper.observations).all()
    if step.final_rows.size:
        assert step.final_rows.tolist() == [1]
        assert step.final_observations[0].tolist() == [1, 11, 0 if how == "nan" else 3, 0]
    assert [fault.env_index for fault in env.faults] == [1]
    if mode is AutoresetMode.NEXT_STEP:
        assert stepper.step(GO).valid.tolist() == [True, False, True, True]
    assert stepper.observations[1].tolist() == [1, 11, 0, 1]
    assert stepper.step(GO).valid.all()


def test_the_failure_budget_ends_the_run_with_a_report(make: Make) -> None:
    # Each time it is made anew it kills its process again, at its third step.
    env = make(four(who=3, how="kill"), num_workers=2, on_fault="restart", max_faults=2)
    env.reset(seed=10)
    for _ in range(2):
        env.step(GO)
        env.step(GO)
        with pytest.warns(EnvironmentFaultWarning, match="environment 3"):
            env.step(GO)
    env.step(GO)
    env.step(GO)
    with pytest.raises(EnvironmentFaultError, match=r"max_faults=2(.|\n)*- 3 (.|\n)*- 3 (.|\n)*- 3 "):
        env.step(GO)
    assert len(env.faults) == 3
    assert env.closed


def test_a_fault_is_one_readable_line_and_a_traceback() -> None:
    assert str(Fault(3, 7, "no luck")) == "environment 3 (seed 7): no luck"
    assert (
        str(Fault(3, None, "no luck", "Traceback …")) == "environment 3 (seed None): no luck\n\nTraceback …"
    )


SCRIPT = """
import signal
import sys
from functools import partial
import numpy as np
from puffer_lightning.envs import SharedMemoryVectorEnv
from tests.envs.shared_memory.environments import Counting

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background
    kind = partial(Counting, 0, nap=float(sys.argv[2]))
    env = SharedMemoryVectorEnv(kind, 4, 2, context=sys.argv[1])
    env.reset(seed=1)
    print(*env.call("process"), flush=True)
    while True:
        env.step(np.zeros(4, int))
"""


@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("forkserver", "spawn"))]
)
@pytest.mark.parametrize("nap", [0.0, 1000.0])
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_trainer(context: str, nap: float, way: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    segments = names("/dev/shm")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), context, str(nap)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as trainer:
        assert trainer.stdout is not None
        trainer_and_its = psutil.Process(trainer.pid)
        workers = {int(process) for process in trainer.stdout.readline().split()}
        assert len(workers) == 2
        processes = [trainer_and_its, *trainer_and_its.children(recursive=True)]
        assert workers <= {process.pid for process in processes}
        if way is signal.SIGINT:
            os.killpg(trainer.pid, way)  # as the terminal does
        else:
            trainer.send_signal(way)
        try:
            trainer.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(trainer.pid, signal.SIGKILL)
            raise
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert not [name for name in names("/dev/shm") - segments if not is_anothers(name)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::puffer_lightning.envs.shared_memory.EnvironmentFaultWarning")
def test_random_kills_leak_nothing(make: Make) -> None:
    kills, rng = 200, np.random.default_rng(0)
    env = make(four(), num_workers=2, on_fault="restart", max_faults=kills)
    env.reset(seed=1)
    descriptors = open_descriptors()
    others = set(psutil.Process().children(recursive=True))
    others -= {psutil.Process(worker.process.pid) for worker in env._supervisor.workers}
    masked = 0
    for _ in range(kills):
        victim = env._supervisor.workers[rng.integers(2)].process.pid
        assert victim is not None
        if rng.random() < 0.5:
            env.send(GO)
            os.kill(victim, signal.SIGKILL)
            infos = env.recv().infos
        else:
            os.kill(victim, signal.SIGKILL)
            infos = env.step(GO)[4]
        masked += int(infos["masked"].sum()) if infos else 0
    # Who was killed after the step was done is noticed in the next.
    masked += int(env.step(GO)[4].get("masked", np.zeros(1)).sum())
    assert masked == 2 * len(env.faults)
    assert len(env.faults) > kills / 2
    assert open_descriptors() == descriptors
    env.close()
    assert set(psutil.Process().children(recursive=True)) == others
    assert open_descriptors() < descriptors
