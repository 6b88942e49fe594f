import pytest
import torch
from torch import Tensor

from puffer_lightning.envs.device import TorchBreakout

LEFT, STAY, RIGHT = 0, 1, 2


def state_of(env: TorchBreakout, **values: object) -> dict[str, Tensor]:
    """The state after a reset, with some values set."""
    env.reset(seed=0)
    state = env.get_state()
    for name, value in values.items():
        state[name] = torch.as_tensor(value).expand(state[name].shape).to(state[name].dtype)
    env.set_state(state)
    return state


def play(env: TorchBreakout, *actions: int) -> list[tuple[int, int, float, bool]]:
    """Where the ball is after each action (x, y), the reward and whether the episode terminated."""
    record = []
    for action in actions:
        _, rewards, terminated, _, _ = env.step(torch.tensor([action]))
        state = env.get_state()
        record.append((int(state["x"]), int(state["y"]), float(rewards), bool(terminated)))
    return record


def test_the_ball_bounces_off_side_walls_and_the_ceiling() -> None:
    env = TorchBreakout(1)
    state_of(env, x=8, y=7, dx=1, dy=-1)
    assert [step[:2] for step in play(env, STAY, STAY, STAY)] == [(9, 6), (8, 5), (7, 4)]
    state_of(env, x=4, y=1, dx=1, dy=-1, bricks=[[False] * 29 + [True]])
    assert [step[:2] for step in play(env, STAY, STAY)] == [(5, 0), (6, 1)]


def test_a_brick_pays_once_is_gone_and_throws_the_ball_back() -> None:
    env = TorchBreakout(1)
    state_of(env, x=2, y=4, dx=1, dy=-1)
    assert play(env, STAY, STAY) == [(3, 4, 1.0, False), (4, 5, 0.0, False)]
    bricks = env.get_state()["bricks"].view(3, 10)
    assert not bricks[2, 3]
    assert int(bricks.sum()) == 29
    state_of(env, x=2, y=4, dx=1, dy=-1, bricks=bricks.view(1, 30))
    assert play(env, STAY) == [(3, 3, 0.0, False)], "the way is free now"


def test_after_the_last_brick_there_is_a_new_wall() -> None:
    env = TorchBreakout(1)
    state_of(env, x=2, y=4, dx=1, dy=-1, bricks=[[index == 23 for index in range(30)]])
    assert play(env, STAY) == [(3, 4, 1.0, False)]
    assert env.get_state()["bricks"].all()


def test_the_half_of_the_paddle_decides_where_the_ball_goes() -> None:
    for x, dx, direction in ((3, 1, -1), (4, 1, 1), (5, -1, -1), (6, -1, 1)):
        env = TorchBreakout(1)
        state_of(env, x=x, y=8, dx=dx, dy=1, paddle=4)
        [(at, y, reward, terminated)] = play(env, STAY)
        assert (at, y, reward, terminated) == (x + dx, 8, 0.0, False)
        state = env.get_state()
        assert (int(state["dx"]), int(state["dy"])) == (direction, -1)


def test_a_ball_that_is_missed_ends_the_episode() -> None:
    env = TorchBreakout(1)
    state_of(env, x=1, y=8, dx=1, dy=1, paddle=4)
    assert play(env, STAY) == [(2, 9, 0.0, True)]
    state_of(env, x=2, y=8, dx=1, dy=1, paddle=4)
    assert play(env, LEFT) == [(3, 8, 0.0, False)], "the paddle moves first"


def test_the_paddle_stays_on_the_board() -> None:
    env = TorchBreakout(1)
    for action, end in ((LEFT, 0), (RIGHT, 8)):
        state_of(env, y=1, x=5, dy=1, bricks=[[False] * 29 + [True]])
        play(env, *[action] * 6)
        assert int(env.get_state()["paddle"]) == end


def test_the_planes_show_the_state() -> None:
    env = TorchBreakout(1)
    state_of(env, x=2, y=6, dx=1, dy=1, paddle=7)
    [planes] = env.step(torch.tensor([STAY]))[0]
    assert planes[0].nonzero().tolist() == [[9, 7], [9, 8]]
    assert planes[1].nonzero().tolist() == [[7, 3]]
    assert planes[2].nonzero().tolist() == [[6, 2]]
    assert planes[3].nonzero()[:, 0].unique().tolist() == [1, 2, 3]
    assert int(planes[3].sum()) == 30


def test_returns_are_as_documented() -> None:
    """Of random actions, and of a paddle that follows the ball."""
    for follows in (False, True):
        env = TorchBreakout(256)
        env.reset(seed=0)
        generator = torch.Generator().manual_seed(0)
        total, episodes = 0.0, 0
        for _ in range(501 if follows else 300):
            state = env.get_state()
            toward = (state["x"] + state["dx"] - state["paddle"]).clamp(-1, 1) + 1
            actions = toward if follows else torch.randint(3, (256,), generator=generator)
            _, rewards, terminated, truncated, _ = env.step(actions)
            total += float(rewards.sum())
            episodes += int((terminated | truncated).sum())
        assert total / episodes == pytest.approx(40 if follows else 0.3, rel=0.2)


def test_frames_show_paddle_ball_and_bricks() -> None:
    env = TorchBreakout(2, render_mode="rgb_array")
    env.reset(seed=0)
    frames = env.render()
    assert frames is not None
    assert [frame.shape for frame in frames] == [(80, 80, 3)] * 2
    assert len({tuple(color) for color in frames[0].reshape(-1, 3)}) == 4, "ground, paddle, ball and bricks"
    assert TorchBreakout(2).render() is None
