"""One training run on a sanity environment, with the package's own engine, and its score."""

from typing import Any

import torch
from gymnasium.vector import AutoresetMode
from lightning.fabric import Fabric

from puffer_lightning.engines import PPO, RolloutDataModule, iterations
from puffer_lightning.envs.sanity import SANITY_ENVS

DATA: dict[str, Any] = {"num_envs": 64, "horizon": 32, "total_timesteps": 60_000}
"""Thirty iterations of sixteen optimizer steps, with the default coefficients; about a second."""

# A multiple of the 128 environments that evaluation plays in and of the four windows after which the policy
# that leaves the garden of TruncatedValue is back in it.
EVAL_EPISODES = 1024

MODE_MATTERS = ("puffer/TruncatedValue-v0", "puffer/TerminatedValue-v0", "puffer/ResetStep-v0")
"""The environments that are about how an episode ends."""

EXCEPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    # A bonus that counts beside the advantages, so that its sign does.
    "puffer/Stochastic-v0": {"model": {"ent_coef": 0.5}},
    # Sampled actions must not dally between two targets that are worth almost the same.
    "puffer/Squared-v0": {"data": {"total_timesteps": 80_000}, "model": {"gamma": 0.95}},
    # Convolutions cost ten times as much a sample, and see at once what there is to see.
    "puffer/ImageTarget-v0": {"data": {"total_timesteps": 20_000}, "model": {"update_epochs": 1}},
}
"""What single environments need instead: ``{id: {"data": ..., "model": ...}}``."""


def score(env_id: str, mode: AutoresetMode, seed: int = 0, fabric: Fabric | None = None) -> float:
    """Train from scratch and play.

    Args:
        env_id: A key of ``SANITY_ENVS``.
        mode: How the environment resets.
        seed: Of everything random.
        fabric: Launched already, for several ranks, which divide the environments among them.

    Returns:
        The mean episode return on this rank, of sampled or of greedy actions as the environment's
        ``solved_by`` says.
    """
    torch.manual_seed(seed)
    exceptions = EXCEPTIONS.get(env_id, {})
    data = RolloutDataModule(
        env_id,
        env_kwargs={"autoreset_mode": mode},
        split_envs=True,
        eval_episodes=EVAL_EPISODES,
        eval_greedy=SANITY_ENVS[env_id].solved_by == "greedy",
        **(DATA | exceptions.get("data", {})),
    )
    model = PPO(**exceptions.get("model", {}))
    for _ in iterations(fabric or Fabric(accelerator="cpu", devices=1), model, data):
        pass
    mean_return = float(data.evaluate(model.policy).returns.mean())
    data.close()
    return mean_return
