"""``TorchBreakout``: a small game of ball, paddle and bricks."""

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray
from torch import Tensor

from puffer_lightning.envs.device.base import GameState, TorchVectorEnv

_PADDLE_WIDTH = 2
_TOP_BRICK_ROW, _BRICK_ROWS = 1, 3
_COLORS = ((255, 255, 255), (255, 220, 60), (110, 90, 30), (200, 70, 60))


class TorchBreakout(TorchVectorEnv):
    """Keep the ball in play and hit bricks, on a grid of 10 × 10.

    Observation: four planes of 0 and 1, uint8 ``[4, 10, 10]``: paddle, ball, where the ball was before, and
    bricks. Action: paddle to the left (0), stay (1) or to the right (2). The ball moves diagonally, one cell
    a step, and bounces off walls, ceiling, bricks and the paddle; the half of the paddle that it meets
    decides whether it leaves to the left or to the right. Each brick pays 1 and is gone; when all 30 are
    gone, new ones appear. The episode terminates when the ball passes the paddle, and is truncated after 500
    steps.

    Random actions get about 0.3 an episode, a paddle that always meets the ball about 40.
    """

    size: ClassVar[int] = 10
    default_max_episode_steps: ClassVar[int] = 500
    noise_size: ClassVar[int] = 2
    render_modes: ClassVar[tuple[str, ...]] = ("rgb_array",)

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        """Spaces of one environment: four planes, three actions."""
        return Box(0, 1, (4, self.size, self.size), np.uint8), Discrete(3)

    def begin(self, noise: Tensor) -> GameState:
        """A full wall, the paddle in the middle and the ball under the wall, for noise [N, 2] in [-1, 1)."""
        rows, device = len(noise), noise.device

        def filled(value: int) -> Tensor:
            return torch.full((rows,), value, dtype=torch.int64, device=device)

        x, y = ((noise[:, 0] + 1) * (self.size / 2)).long(), filled(_TOP_BRICK_ROW + _BRICK_ROWS)
        return {
            "x": x,
            "y": y,
            "dx": (noise[:, 1] < 0).long() * 2 - 1,
            "dy": filled(1),
            "last_x": x,
            "last_y": y,
            "paddle": filled((self.size - _PADDLE_WIDTH) // 2),
            "bricks": torch.ones(rows, _BRICK_ROWS * self.size, dtype=torch.bool, device=device),
        }

    def advance(self, state: GameState, actions: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Move paddle, then ball; returns the next states, rewards [N] and terminated [N]."""
        x, y, dx, dy, bricks = (state[name] for name in ("x", "y", "dx", "dy", "bricks"))
        paddle = (state["paddle"] + actions - 1).clamp(0, self.size - _PADDLE_WIDTH)

        dx = torch.where((x + dx < 0) | (x + dx >= self.size), -dx, dx)
        dy = torch.where(y + dy < 0, -dy, dy)
        to_x, to_y = x + dx, y + dy

        brick = ((to_y - _TOP_BRICK_ROW) * self.size + to_x).unsqueeze(1)
        in_wall = (to_y >= _TOP_BRICK_ROW) & (to_y < _TOP_BRICK_ROW + _BRICK_ROWS)
        brick = brick.clamp(0, bricks.shape[1] - 1)
        stood = bricks.gather(1, brick)
        hit = stood & in_wall.unsqueeze(1)
        bricks = bricks.scatter(1, brick, stood & ~hit)
        bricks = bricks | ~bricks.any(1, keepdim=True)
        hit = hit.squeeze(1)

        at_bottom = to_y == self.size - 1
        offset = to_x - paddle
        caught = at_bottom & (offset >= 0) & (offset < _PADDLE_WIDTH)
        bounced = hit | caught
        after = {
            "x": to_x,
            "y": torch.where(bounced, y, to_y),
            "dx": torch.where(caught, 2 * offset - 1, dx),
            "dy": torch.where(bounced, -dy, dy),
            "last_x": x,
            "last_y": y,
            "paddle": paddle,
            "bricks": bricks,
        }
        return after, hit.float(), at_bottom & ~caught

    def observe(self, state: GameState) -> Tensor:
        """Planes [N, 4, 10, 10] uint8."""
        line = torch.arange(self.size, device=state["x"].device)

        def cell(x: Tensor, y: Tensor) -> Tensor:
            return (y.unsqueeze(1) == line).unsqueeze(2) & (x.unsqueeze(1) == line).unsqueeze(1)

        offset = line - state["paddle"].unsqueeze(1)
        on_paddle = ((offset >= 0) & (offset < _PADDLE_WIDTH)).unsqueeze(1)
        below = self.size - _TOP_BRICK_ROW - _BRICK_ROWS
        wall = state["bricks"].view(-1, _BRICK_ROWS, self.size)
        planes = (
            (line == self.size - 1).unsqueeze(1) & on_paddle,
            cell(state["x"], state["y"]),
            cell(state["last_x"], state["last_y"]),
            torch.nn.functional.pad(wall, (0, 0, _TOP_BRICK_ROW, below)),
        )
        return torch.stack(planes, dim=1).to(torch.uint8)

    def render(self) -> tuple[NDArray[Any], ...] | None:
        """One frame [80, 80, 3] uint8 an environment, on the host; None without a render mode."""
        if self.render_mode is None:
            return None
        assert self._state is not None, "call reset before render"
        planes = self.observe(self._state).cpu().numpy()
        frames = np.zeros((self.num_envs, self.size, self.size, 3), dtype=np.uint8)
        # The ball over its trace.
        for plane in (3, 2, 1, 0):
            frames[planes[:, plane] == 1] = _COLORS[plane]
        return tuple(frames.repeat(8, axis=1).repeat(8, axis=2))
