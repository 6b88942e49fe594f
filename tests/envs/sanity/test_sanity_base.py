"""What holds for every sanity environment: spaces, seeds, autoreset modes, saved state, registration."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs.sanity import SANITY_ENVS, Bandit, ImageTarget, SanityVectorEnv, Squared
from puffer_lightning.envs.sanity import register_sanity_envs as register
from puffer_lightning.errors import ConfigurationError

every_env = pytest.mark.parametrize("cls", SANITY_ENVS.values(), ids=lambda cls: cls.__name__)
every_mode = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)

Step = tuple[Any, ...]


def drive(env: SanityVectorEnv, actions: np.ndarray) -> list[Step]:
    """Step through ``actions`` ``[steps, num_envs, ...]``, resetting by mask where nobody else does."""
    record = []
    for action in actions:
        if env.autoreset_mode is AutoresetMode.DISABLED and env.done.any():
            env.reset(options={"reset_mask": env.done.copy()})
        record.append(env.step(action))
    return record


def sample_actions(env: SanityVectorEnv, steps: int, seed: int = 77) -> np.ndarray:
    env.action_space.seed(seed)
    return np.stack([env.action_space.sample() for _ in range(steps)])


def same(left: list[Step], right: list[Step]) -> bool:
    return all(
        np.array_equal(a, b)
        for one, two in zip(left, right, strict=True)
        for a, b in zip(one[:4], two[:4], strict=True)
    )


def transitions(env: SanityVectorEnv, seed: int, table: np.ndarray) -> list[list[Step]]:
    """Each row's transitions, where its k-th one plays ``table[k, row]``; reset steps are left out."""
    rows: list[list[Step]] = [[] for _ in range(env.num_envs)]
    observation, _ = env.reset(seed=seed)
    waiting = np.zeros(env.num_envs, dtype=bool)
    while min(map(len, rows)) < len(table):
        if env.autoreset_mode is AutoresetMode.DISABLED and waiting.any():
            observation, _ = env.reset(options={"reset_mask": waiting})
            waiting = np.zeros_like(waiting)
        action = np.stack([table[len(row) % len(table), i] for i, row in enumerate(rows)])
        after, reward, terminated, truncated, infos = env.step(action)
        for i in np.flatnonzero(~waiting):
            ended = terminated[i] or truncated[i]
            final = infos["final_obs"][i] if ended and "final_obs" in infos else after[i]
            rows[i].append((observation[i], action[i], reward[i], terminated[i], truncated[i], final))
        waiting = (terminated | truncated) & (env.autoreset_mode is not AutoresetMode.SAME_STEP)
        observation = after
    return [row[: len(table)] for row in rows]


@every_env
@every_mode
def test_everything_returned_is_in_its_space(cls: type[SanityVectorEnv], mode: AutoresetMode) -> None:
    env = cls(3, autoreset_mode=mode)
    observation, infos = env.reset(seed=0)
    assert observation in env.observation_space
    assert infos == {}
    assert observation.dtype == env.single_observation_space.dtype
    for observation, reward, terminated, truncated, _ in drive(env, sample_actions(env, 40)):
        assert observation in env.observation_space
        assert (reward.dtype, reward.shape) == (np.float32, (3,))
        assert (terminated.dtype, terminated.shape) == (np.bool_, (3,))
        assert (truncated.dtype, truncated.shape) == (np.bool_, (3,))
        assert not (terminated & truncated).any()


@every_env
@every_mode
def test_a_seed_fixes_every_step(cls: type[SanityVectorEnv], mode: AutoresetMode) -> None:
    one, two = cls(4, autoreset_mode=mode), cls(4, autoreset_mode=mode)
    actions = sample_actions(one, 40)
    assert np.array_equal(one.reset(seed=3)[0], two.reset(seed=3)[0])
    first = drive(one, actions)
    assert same(first, drive(two, actions))
    one.reset(seed=3)
    assert same(first, drive(one, actions)), "a second reset with the same seed starts afresh"


@pytest.mark.parametrize("name", ["Bandit", "DelayedCredit", "ResetStep", "ContinuousTarget", "ImageTarget"])
def test_another_seed_gives_other_episodes(name: str) -> None:
    env = SANITY_ENVS[f"puffer/{name}-v0"](8)
    actions = sample_actions(env, 20)
    env.reset(seed=3)
    first = drive(env, actions)
    env.reset(seed=4)
    assert not same(first, drive(env, actions))


@every_env
def test_the_three_modes_live_through_the_same_episodes(cls: type[SanityVectorEnv]) -> None:
    table = sample_actions(cls(5), 60)
    by_mode = [transitions(cls(5, autoreset_mode=mode), seed=1, table=table) for mode in AutoresetMode]
    assert any(terminated or truncated for *_, terminated, truncated, _ in by_mode[0][0])
    for other in by_mode[1:]:
        for row, other_row in zip(by_mode[0], other, strict=True):
            for step, other_step in zip(row, other_row, strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(step, other_step, strict=True))


@every_env
def test_next_step_ignores_the_action_of_the_reset_step(cls: type[SanityVectorEnv]) -> None:
    env, twin = cls(2, "NextStep"), cls(2, "NextStep")
    env.reset(seed=5)
    actions = sample_actions(env, 200)
    ended = np.zeros(2, dtype=bool)
    steps = iter(actions)
    while not ended.all():
        *_, terminated, truncated, infos = env.step(next(steps))
        ended = terminated | truncated
        assert infos == {}
    twin.set_state(env.get_state())
    result, other = env.step(next(steps)), twin.step(next(steps))
    assert not np.any(result[1:4])
    assert same([result], [other])


@every_env
def test_same_step_gives_final_observations_of_ended_rows_only(cls: type[SanityVectorEnv]) -> None:
    env = cls(4, autoreset_mode="SAME_STEP")
    env.reset(seed=0)
    seen = 0
    for _, _, terminated, truncated, infos in drive(env, sample_actions(env, 40)):
        done = terminated | truncated
        assert ("final_obs" in infos) == done.any()
        if done.any():
            seen += 1
            assert infos["final_obs"].dtype == object
            assert np.array_equal(infos["_final_obs"], done)
            for row, final in enumerate(infos["final_obs"]):
                assert final in env.single_observation_space if done[row] else final is None
    assert seen > 1


@every_env
def test_disabled_leaves_resets_to_the_caller(cls: type[SanityVectorEnv]) -> None:
    env = cls(3, autoreset_mode=AutoresetMode.DISABLED)
    env.reset(seed=0)
    steps = iter(sample_actions(env, 100))
    while not env.done.any():
        env.step(next(steps))
    with pytest.raises(AssertionError, match="ended rows"):
        env.step(next(steps))
    env.reset(options={"reset_mask": env.done.copy()})
    env.step(next(steps))


def test_a_reset_mask_leaves_the_other_rows_alone() -> None:
    env = Squared(3, autoreset_mode="DISABLED")
    env.reset()
    before = env.step(np.array([0, 1, 2]))[0]
    after, _ = env.reset(options={"reset_mask": np.array([True, False, False])})
    assert np.array_equal(after[1:], before[1:])
    assert not np.array_equal(after[0], before[0])
    assert env.elapsed.tolist() == [0, 1, 1]


@every_env
@every_mode
def test_steps_after_set_state_repeat_bit_for_bit(cls: type[SanityVectorEnv], mode: AutoresetMode) -> None:
    env = cls(4, autoreset_mode=mode)
    env.reset(seed=9)
    actions = sample_actions(env, 43)
    drive(env, actions[:13])
    state = pickle.loads(pickle.dumps(env.get_state()))
    expected = drive(env, actions[13:])
    fresh = cls(4, autoreset_mode=mode)
    fresh.set_state(state)
    assert same(expected, drive(fresh, actions[13:]))
    fresh.set_state(state)
    assert same(expected, drive(fresh, actions[13:])), "stepping must not change the state handed in"


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="set num_envs=2"):
        Bandit(3).set_state(Bandit(2).get_state())
    with pytest.raises(ConfigurationError, match="not of Bandit"):
        Bandit(3).set_state(Squared(3).get_state())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "num_envs"),
        ({"autoreset_mode": "sometimes"}, "autoreset_mode"),
        ({"render_mode": "rgb_array"}, "render_mode"),
    ],
)
def test_bad_options_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Bandit(**kwargs)


@pytest.mark.parametrize(
    "mask", [[True, False], np.array([1, 0]), np.array([True]), np.array([False, False])], ids=str
)
def test_bad_reset_masks_are_refused(mask: Any) -> None:
    env = Bandit(2, autoreset_mode="Disabled")
    env.reset()
    with pytest.raises(ConfigurationError, match="reset_mask"):
        env.reset(options={"reset_mask": mask})


def test_step_needs_a_reset_and_the_right_number_of_actions() -> None:
    env = Bandit(2)
    with pytest.raises(AssertionError, match="call reset"):
        env.step(np.zeros(2, dtype=np.int64))
    env.reset()
    with pytest.raises(AssertionError, match="shape"):
        env.step(np.zeros(3, dtype=np.int64))


def test_metadata_belongs_to_the_instance() -> None:
    one, two = Bandit(autoreset_mode="SAME_STEP"), Bandit(autoreset_mode="DISABLED")
    assert one.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert two.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert "autoreset_mode" not in Bandit.metadata


def test_returned_observations_are_never_overwritten() -> None:
    for cls in SANITY_ENVS.values():
        env = cls(3)
        first, _ = env.reset(seed=0)
        kept = first.copy()
        record = drive(env, sample_actions(env, 20))
        assert np.array_equal(first, kept)
        assert not any(np.shares_memory(first, step[0]) for step in record)


@every_mode
@pytest.mark.parametrize("env_id", SANITY_ENVS)
def test_make_vec_builds_each_without_a_warning(env_id: str, mode: AutoresetMode) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make_vec(env_id, num_envs=8, autoreset_mode=mode)
        register()
    assert type(env) is SANITY_ENVS[env_id]
    assert env.num_envs == 8
    assert env.metadata["autoreset_mode"] is mode
    assert env.spec is not None
    assert env.spec.id == env_id


def test_images_render_one_frame_a_row() -> None:
    env = ImageTarget(2, render_mode="rgb_array")
    observation, _ = env.reset(seed=0)
    frames = env.render()
    assert frames is not None
    assert [frame.shape for frame in frames] == [(64, 64, 3)] * 2
    assert frames[0].dtype == np.uint8
    assert np.array_equal(frames[1][::4, ::4, 0], observation[1, 0])
    assert ImageTarget(2).render() is None
