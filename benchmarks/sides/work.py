"""What is to be done: the rows of the table, the same for every side."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Network = Literal["separate", "shared", "nature", "lstm"]


@dataclass(frozen=True)
class Work:
    """An environment, a network and PPO's sizes; float32 throughout.

    Attributes:
        env: Gymnasium id.
        num_envs: N.
        horizon: T.
        num_minibatches: Optimizer steps a pass.
        update_epochs: Passes over each rollout.
        network: Two MLPs ("separate"), one with two heads ("shared"), NatureCNN, or an LSTM behind a layer.
        hidden_sizes: Units of each hidden layer; of "lstm" the one of encoder and memory.
        activation: After hidden layers.
        warm_up: Iterations before anything is timed.
        probes: Iterations in which each number of threads is tried, to find the faster.
        iterations: Iterations that are timed.
        options: Options of ours alone, such as the number of workers; other sides have their own ways.
    """

    env: str
    num_envs: int
    horizon: int
    num_minibatches: int
    update_epochs: int
    network: Network = "separate"
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: Literal["tanh", "relu"] = "tanh"
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    clip_value_loss: bool = True
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    max_grad_norm: float = 0.5
    warm_up: int = 2
    probes: int = 2
    iterations: int = 10
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Environment steps of an iteration."""
        return self.num_envs * self.horizon

    @property
    def minibatch(self) -> int:
        """Transitions of an optimizer step."""
        return self.steps // self.num_minibatches

    def describe(self) -> str:
        """In a line."""
        sizes = "-".join(map(str, self.hidden_sizes))
        networks = {
            "separate": f"MLP {sizes} for each of actor and critic",
            "shared": f"MLP {sizes} with two heads",
            "nature": "NatureCNN",
            "lstm": f"LSTM-{sizes} behind a layer of {sizes}",
        }
        return (
            f"{self.env}, {self.num_envs} × {self.horizon}, {self.num_minibatches} minibatches × "
            f"{self.update_epochs} epochs, {networks[self.network]}"
        )


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        work: What each side does; of "solve" what ours does is in ``ppo.yaml``.
        peers: Whom ours is compared with, and the least ratio it has to reach, if there is one.
        solve: Train until the task is solved, and compare seconds instead of environment steps a second.
        in_turn: The sides take turns iteration by iteration, in one process and on one thread.
    """

    work: Work
    peers: dict[str, float | None]
    solve: bool = False
    in_turn: bool = False

    def without_pufferlib(self) -> "Row":
        """With the loop held to the bar of PufferLib's own trainer, for which it stands in."""
        peers = dict(self.peers)
        if "PufferLib 3.0" in peers:
            peers["PufferLib's loop"] = peers.pop("PufferLib 3.0")
        return replace(self, peers=peers)


_COMPILED = {"model": {"compile": True}}
# CleanRL's settings.
_SMALL = Work("CartPole-v1", 4, 128, 4, 4, warm_up=5, probes=5, iterations=40, options=_COMPILED)
_LARGE = Work(
    "CartPole-v1", 1024, 64, 2, 1, "shared", (128,), learning_rate=2.5e-3, warm_up=3, probes=3, iterations=12,
    options=_COMPILED,
)  # fmt: skip
_PYTHON = Work(
    "LunarLander-v3", 64, 128, 16, 4, learning_rate=1e-3, gamma=0.999, gae_lambda=0.98, warm_up=1, probes=1,
    iterations=2, options={"data": {"num_workers": 2}},
)  # fmt: skip
_IMAGE = Work(
    "ale_py:ALE/Pong-v5", 16, 128, 4, 4, "nature", (512,), "relu", clip_coef=0.1, warm_up=1, probes=1,
    iterations=1,
    options={
        "data": {"env_kwargs": {"repeat_action_probability": 0.0}},
        "model": {"clip_rewards": 1.0},
    },
)  # fmt: skip
_RECURRENT = replace(_LARGE, network="lstm", warm_up=2, probes=2, iterations=4)
# That of ppo.yaml.
_DEFAULT = Work(
    "CartPole-v1", 128, 32, 4, 3, learning_rate=8e-3, gamma=0.98, gae_lambda=0.8, clip_value_loss=False,
    warm_up=10, probes=5, iterations=150,
)  # fmt: skip
_DEVICE = replace(_LARGE, env="puffer/TorchCartPole-v0", num_envs=4096, horizon=32, probes=1, iterations=4)

ROWS = {
    "small": Row(_SMALL, {"not compiled": None, "CleanRL": 4.0, "Stable-Baselines3": 4.0}),
    "large": Row(
        _LARGE,
        {"not compiled": None, "PufferLib 3.0": 2.0, "PufferLib's loop": None, "Stable-Baselines3": 12.0},
    ),
    "python envs": Row(_PYTHON, {"Stable-Baselines3": 3.0}),
    "image": Row(_IMAGE, {"CleanRL": 1.5}),
    "recurrent": Row(_RECURRENT, {"PufferLib 3.0": 2.0, "PufferLib's loop": None}),
    "time to solve": Row(_DEFAULT, {"CleanRL": 10.0, "Stable-Baselines3": 10.0}, solve=True),
    "framework": Row(_DEFAULT, {"bare loop": 0.97}, in_turn=True),
    "device 4096": Row(_DEVICE, {}),
    "device 65536": Row(replace(_DEVICE, num_envs=65536, horizon=16, warm_up=1, iterations=2), {}),
}
