import pytest
import torch

from puffer_lightning.envs.device import TorchMemoryMaze
from puffer_lightning.errors import ConfigurationError

FORWARD, LEFT, RIGHT = 0, 1, 2


def walk(env: TorchMemoryMaze, turn: torch.Tensor) -> tuple[torch.Tensor, list[list[float]]]:
    """Forward to the junction, then ``turn`` [N]; the last step's rewards, and what row 0 saw on its way."""
    seen = []
    for _ in range(env.length):
        observations, rewards, terminated, _, _ = env.step(torch.full((env.num_envs,), FORWARD))
        assert not rewards.any()
        assert not terminated.any()
        seen.append(observations[0].tolist())
    _, rewards, terminated, _, _ = env.step(turn)
    assert terminated.all()
    return rewards, seen


@pytest.mark.parametrize("remind", [False, True])
def test_the_sign_at_the_start_tells_the_way(remind: bool) -> None:
    for way in (1, -1):
        env = TorchMemoryMaze(256, length=3, remind=remind)
        sign = env.reset(seed=0)[0][:, 0]
        assert set(sign.tolist()) == {-1.0, 1.0}
        turn = torch.where(sign * way > 0, RIGHT, LEFT)
        rewards, seen = walk(env, turn)
        assert (rewards == (1.0 if way == 1 else 0.0)).all()
        shown = float(sign[0]) if remind else 0.0
        assert seen == [[shown, 1.0, 0.0], [shown, 1.0, 0.0], [shown, 0.0, 1.0]]


def test_without_memory_the_junctions_look_alike_and_half_of_the_turns_are_right() -> None:
    env = TorchMemoryMaze(4096, length=3)
    env.reset(seed=0)
    rewards, _ = walk(env, torch.full((4096,), RIGHT))
    assert rewards.mean().item() == pytest.approx(0.5, abs=0.03)


def test_walls_cost_time_and_nothing_else() -> None:
    env = TorchMemoryMaze(1, length=2)
    env.reset(seed=0)
    assert env.max_episode_steps == 8
    for _ in range(3):
        observations, rewards, terminated, truncated, _ = env.step(torch.tensor([LEFT]))
        assert observations.tolist() == [[0.0, 1.0, 0.0]]
        assert not (rewards.bool() | terminated | truncated).any()
    for action in (FORWARD, FORWARD, FORWARD, FORWARD):
        observations, _, terminated, truncated, _ = env.step(torch.tensor([action]))
        assert not (terminated | truncated).any()
    assert observations.tolist() == [[0.0, 0.0, 1.0]]
    assert env.step(torch.tensor([FORWARD]))[3].all()


def test_a_corridor_has_a_length() -> None:
    with pytest.raises(ConfigurationError, match="length is 0"):
        TorchMemoryMaze(1, length=0)
