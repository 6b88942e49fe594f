import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from puffer_lightning.envs.device import TorchCartPole

N = 64


@pytest.mark.parametrize("seed", [0, 1])
def test_every_step_is_that_of_gymnasiums_vectorised_cart_pole(seed: int) -> None:
    """From the same states each time; also the steps at which episodes end and those that reset."""
    theirs = gymnasium.make_vec("CartPole-v1", N, vectorization_mode="vector_entry_point")
    ours = TorchCartPole(N)
    theirs.reset(seed=seed)
    ours.reset(seed=seed)
    rng = np.random.default_rng(seed)
    ends = resets = 0
    for _ in range(120):
        waiting = theirs.prev_done.copy()
        state = ours.get_state()
        state["physics"] = torch.from_numpy(theirs.state.T.astype(np.float32))
        state["ended"] = torch.from_numpy(waiting)
        ours.set_state(state)
        actions = rng.integers(2, size=N)
        expected = theirs.step(actions)
        found = ours.step(torch.from_numpy(actions))
        np.testing.assert_allclose(found[0][~waiting], expected[0][~waiting], rtol=1e-5, atol=1e-6)
        assert found[0][waiting].abs().le(0.05).all()
        for one, other in zip(found[1:4], expected[1:4], strict=True):
            np.testing.assert_array_equal(one, other)
        ends += int(theirs.prev_done.sum())
        resets += int(waiting.sum())
    assert ends > N
    assert resets > N


def test_every_step_of_a_long_episode_in_float64_is_that_of_cart_pole_v1() -> None:
    """From the same state each time, since a pole on its tip multiplies rounding errors."""
    env = CartPoleEnv()
    env.reset(seed=0)
    for _ in range(400):
        assert env.state is not None
        before = torch.from_numpy(np.array(env.state))
        action = int(before[2] + 0.3 * before[3] > 0)
        _, reward, terminated, _, _ = env.step(action)
        after, rewards, ended = TorchCartPole().advance({"physics": before[None]}, torch.tensor([action]))
        np.testing.assert_allclose(after["physics"][0], env.state, rtol=0, atol=1e-13)
        assert rewards.item() == reward
        assert not ended
        assert not terminated


def test_an_episode_is_as_long_as_of_cart_pole_v1() -> None:
    spec = gymnasium.spec("CartPole-v1")
    assert TorchCartPole.default_max_episode_steps == spec.max_episode_steps


def test_spaces_are_those_of_cart_pole_v1() -> None:
    ours, theirs = TorchCartPole(2), CartPoleEnv()
    assert ours.single_observation_space == theirs.observation_space
    assert ours.single_action_space == theirs.action_space
