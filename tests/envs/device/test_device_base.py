"""What holds for every environment in torch: spaces, seeds, autoreset modes, saved state, compilation."""

import pickle
import warnings
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from puffer_lightning.envs.device import (
    TORCH_ENVS,
    TorchBreakout,
    TorchCartPole,
    TorchMemoryMaze,
    TorchVectorEnv,
)
from puffer_lightning.errors import ConfigurationError

every_env = pytest.mark.parametrize("cls", TORCH_ENVS.values(), ids=lambda cls: cls.__name__)
every_mode = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)

Step = tuple[Any, ...]


def make(cls: type[TorchVectorEnv], num_envs: int = 4, **options: Any) -> TorchVectorEnv:
    """Episodes short enough to be truncated within a test, and some to be terminated."""
    return cls(num_envs, **({"max_episode_steps": 12} | options))


def sample_actions(env: TorchVectorEnv, steps: int, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(int(env.single_action_space.n), (steps, env.num_envs), generator=generator)  # type: ignore[attr-defined]


def drive(env: TorchVectorEnv, actions: Tensor) -> list[Step]:
    """Step through actions [steps, N], resetting by mask where nobody else does."""
    record = []
    for action in actions:
        step = env.step(action)
        if env.autoreset_mode is AutoresetMode.DISABLED:
            step = (env.reset(options={"reset_mask": step[2] | step[3]})[0], *step[1:])
        record.append(step)
    return record


def same(left: list[Step], right: list[Step]) -> bool:
    return all(
        torch.equal(a, b)
        for one, two in zip(left, right, strict=True)
        for a, b in zip(one[:4], two[:4], strict=True)
    )


@every_env
@every_mode
def test_everything_returned_is_a_tensor_in_its_space(cls: type[TorchVectorEnv], mode: AutoresetMode) -> None:
    env = make(cls, 3, autoreset_mode=mode)
    observations, infos = env.reset(seed=0)
    assert infos == {}
    steps = drive(env, sample_actions(env, 40))
    for seen in (observations, *(step[0] for step in steps)):
        assert seen.numpy() in env.observation_space
    for _, rewards, terminated, truncated, _ in steps:
        assert (rewards.dtype, rewards.shape) == (torch.float32, (3,))
        assert (terminated.dtype, terminated.shape) == (torch.bool, (3,))
        assert (truncated.dtype, truncated.shape) == (torch.bool, (3,))
    assert any(step[3].any() for step in steps)


@every_env
@every_mode
def test_a_seed_fixes_every_step(cls: type[TorchVectorEnv], mode: AutoresetMode) -> None:
    one, two = make(cls, autoreset_mode=mode), make(cls, autoreset_mode=mode)
    actions = sample_actions(one, 40)
    torch.manual_seed(0)
    assert torch.equal(one.reset(seed=3)[0], two.reset(seed=3)[0])
    first = drive(one, actions)
    torch.manual_seed(1)
    assert same(first, drive(two, actions))
    one.reset(seed=3)
    assert same(first, drive(one, actions)), "a second reset with the same seed starts afresh"
    one.reset(seed=4)
    assert not same(first, drive(one, actions))


@every_env
def test_the_modes_agree_until_an_episode_ends_and_differ_as_gymnasium_says(
    cls: type[TorchVectorEnv],
) -> None:
    envs = {mode: make(cls, 6, autoreset_mode=mode) for mode in AutoresetMode}
    actions = sample_actions(envs[AutoresetMode.SAME_STEP], 40)
    for env in envs.values():
        env.reset(seed=1)
    for action in actions:
        steps = {mode: env.step(action) for mode, env in envs.items()}
        after, rewards, terminated, truncated, _ = steps[AutoresetMode.DISABLED]
        ended = terminated | truncated
        for mode, step in steps.items():
            assert all(
                torch.equal(a, b) for a, b in zip(step[1:4], (rewards, terminated, truncated), strict=True)
            )
            same_step = mode is AutoresetMode.SAME_STEP
            assert set(step[4]) == ({"final_obs"} if same_step else set())
            assert torch.equal(step[4]["final_obs"] if same_step else step[0], after)
        fresh = steps[AutoresetMode.SAME_STEP][0]
        assert torch.equal(fresh[~ended], after[~ended])
        if ended.any():
            break
    assert ended.any()
    starts = envs[AutoresetMode.NEXT_STEP]
    _, rewards, terminated, truncated, _ = starts.step(actions[0])
    assert not rewards[ended].any()
    assert not (terminated | truncated)[ended].any()
    assert (starts.get_state()["elapsed"][ended] == 0).all()
    assert (starts.get_state()["elapsed"][~ended] > 1).all()


@every_env
def test_a_reset_mask_leaves_the_other_rows_alone(cls: type[TorchVectorEnv]) -> None:
    env = make(cls, 3, autoreset_mode="DISABLED")
    env.reset(seed=0)
    before = drive(env, sample_actions(env, 2))[-1][0]
    after, _ = env.reset(options={"reset_mask": torch.tensor([True, False, False])})
    assert torch.equal(after[1:], before[1:])
    assert not torch.equal(after[0], before[0])
    assert env.get_state()["elapsed"].tolist() == [0, 2, 2]
    unchanged, _ = env.reset(options={"reset_mask": torch.zeros(3, dtype=torch.bool)})
    assert torch.equal(unchanged, after)


@every_env
@every_mode
def test_steps_after_set_state_repeat_bit_for_bit(cls: type[TorchVectorEnv], mode: AutoresetMode) -> None:
    env = make(cls, autoreset_mode=mode)
    env.reset(seed=9)
    actions = sample_actions(env, 43)
    drive(env, actions[:13])
    state = pickle.loads(pickle.dumps(env.get_state()))
    expected = drive(env, actions[13:])
    fresh = make(cls, autoreset_mode=mode)
    for _ in range(2):
        fresh.set_state(state)
        assert same(expected, drive(fresh, actions[13:])), "stepping must not change the state handed in"


@every_env
@every_mode
def test_the_transition_compiles_in_one_graph(cls: type[TorchVectorEnv], mode: AutoresetMode) -> None:
    env = make(cls, autoreset_mode=mode)
    env.reset(seed=2)
    state = env.get_state()
    state.pop("generator")
    torch.compiler.reset()
    compiled = torch.compile(env.transition, fullgraph=True, backend="aot_eager")
    noise = 2 * torch.rand(4, env.noise_size, generator=torch.Generator().manual_seed(0)) - 1
    for action in sample_actions(env, 20):
        expected, outcome = env.transition(state, action, noise), compiled(state, action, noise)
        state = expected.state
        for name, tensor in state.items():
            assert torch.equal(outcome.state[name], tensor), name
        for one, other in zip(outcome[1:], expected[1:], strict=True):
            assert one is other is None or torch.equal(one, other)


@every_env
def test_what_was_returned_is_never_overwritten(cls: type[TorchVectorEnv]) -> None:
    env = make(cls)
    first, _ = env.reset(seed=0)
    kept = first.clone()
    drive(env, sample_actions(env, 20))
    assert torch.equal(first, kept)


@every_env
def test_starts_are_spread_over_all_there_are(cls: type[TorchVectorEnv]) -> None:
    observations, _ = cls(4096).reset(seed=0)
    flat = observations.flatten(1).float()
    varying = flat.std(0) > 0
    assert varying.any()
    again, _ = cls(4096).reset(seed=1)
    assert (flat.mean(0) - again.flatten(1).float().mean(0)).abs().max() < 0.06


@every_mode
@pytest.mark.parametrize("env_id", TORCH_ENVS)
def test_make_vec_builds_each_without_a_warning(env_id: str, mode: AutoresetMode) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make_vec(env_id, num_envs=8, autoreset_mode=mode, device="cpu")
    assert type(env) is TORCH_ENVS[env_id]
    assert env.num_envs == 8
    assert env.metadata["autoreset_mode"] is mode


def test_a_state_of_something_else_is_refused() -> None:
    env = TorchCartPole(2)
    env.reset()
    with pytest.raises(ConfigurationError, match="set num_envs=2"):
        TorchCartPole(3).set_state(env.get_state())
    with pytest.raises(ConfigurationError, match="not of TorchMemoryMaze"):
        TorchMemoryMaze(2).set_state(env.get_state())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0"),
        ({"autoreset_mode": "sometimes"}, "autoreset_mode is 'sometimes'"),
        ({"max_episode_steps": -1}, "max_episode_steps is -1"),
        ({"device": "nowhere"}, "device nowhere cannot be used"),
        ({"render_mode": "human"}, "render_mode 'human' is not offered by TorchBreakout"),
    ],
)
def test_bad_options_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TorchBreakout(**kwargs)


@pytest.mark.parametrize("mask", [[True, False], torch.tensor([1, 0]), torch.tensor([True])], ids=str)
def test_bad_reset_masks_are_refused(mask: Any) -> None:
    env = TorchCartPole(2, autoreset_mode="Disabled")
    env.reset()
    with pytest.raises(ConfigurationError, match="reset_mask"):
        env.reset(options={"reset_mask": mask})
