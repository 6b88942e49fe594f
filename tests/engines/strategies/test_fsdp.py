from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from puffer_lightning.callbacks import Checkpoint
from puffer_lightning.callbacks.checkpoint_io import consolidate, is_sharded
from puffer_lightning.cli import main
from puffer_lightning.engines import FSDP, PPO, RolloutDataModule
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import LSTMPolicy, TransformerPolicy
from tests.distributed.processes import run_ranks
from tests.equivalence.runs import quiet_trainer

POLICY = partial(TransformerPolicy, context=4, num_blocks=1, hidden_size=16)
# Environments of all ranks together.
ENVS, HORIZON, ITERATIONS = 8, 8, 2


def whole(tensor: Any) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else torch.as_tensor(tensor)
    return full.detach().clone().cpu()


def fit(
    rank: int,
    folder: str,
    strategy: Any,
    ranks: int,
    ckpt_path: str | None = None,
    policy: Any = POLICY,
    env: str = "CartPole-v1",
    **options: Any,
) -> dict[str, Any]:
    """Train, resumed from ckpt_path if given; what the policy and the optimizer hold then."""
    L.seed_everything(1, verbose=False)
    strategy = FSDP(**strategy) if isinstance(strategy, dict) else strategy
    groups = max(1, ranks // getattr(strategy, "tensor_parallel_size", 1))
    data = RolloutDataModule(
        env,
        num_envs=ENVS // groups,
        horizon=HORIZON,
        total_timesteps=ITERATIONS * ENVS * HORIZON,
        **options,
    )
    model = PPO(policy, num_minibatches=2, normalize_observations=True)
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=10**6,
        callbacks=[Checkpoint(folder, monitor="train/entropy")],
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    [optimizer] = trainer.optimizers
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "weights": {name: whole(tensor).numpy() for name, tensor in model.policy.state_dict().items()},
        "momenta": [whole(optimizer.state[parameter]["exp_avg"]).numpy() for parameter in parameters],
        "optimizer_steps": whole(optimizer.state[parameters[0]]["step"]).item(),
        "env_steps": model.env_steps,
    }


def assert_resumed(found: list[dict[str, Any]], left: dict[str, Any]) -> None:
    """Nothing was left to be done, so all is as it was."""
    for outcome in found:
        assert outcome["env_steps"] == left["env_steps"]
        assert outcome["optimizer_steps"] == left["optimizer_steps"]
        assert outcome["weights"].keys() == left["weights"].keys()
        for name, weights in left["weights"].items():
            assert (outcome["weights"][name] == weights).all(), name
        for one, other in zip(outcome["momenta"], left["momenta"], strict=True):
            assert (one == other).all()


STRATEGIES: dict[str, dict[str, Any]] = {
    "whole": {},
    "sharded": {"save_distributed_checkpoint": True},
    "divided": {"save_distributed_checkpoint": True, "tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """By strategy: the last checkpoint of two ranks, and what they held."""
    found = {}
    for name, strategy in STRATEGIES.items():
        folder = str(tmp_path_factory.mktemp(name))
        outcome, _ = run_ranks(fit, folder, strategy, 2)
        found[name] = (f"{folder}/last.ckpt", outcome)
    return found


def test_checkpoints_are_a_file_or_a_folder(left: dict[str, tuple[str, dict[str, Any]]]) -> None:
    kinds = {name: is_sharded(path) for name, (path, _) in left.items()}
    assert kinds == {"whole": False, "sharded": True, "divided": True}
    for path, _ in left.values():
        assert {entry.name for entry in Path(path).parent.iterdir()} == {"best.ckpt", "last.ckpt"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_without_sharding_goes_on(
    left: dict[str, tuple[str, dict[str, Any]]], name: str, tmp_path: Path
) -> None:
    path, outcome = left[name]
    assert_resumed([fit(0, str(tmp_path), "auto", 1, path)], outcome)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("strategy", ["ddp", {}, {"tensor_parallel_size": 2}], ids=str)
def test_two_ranks_go_on_by_any_strategy(
    left: dict[str, tuple[str, dict[str, Any]]], name: str, strategy: Any, tmp_path: Path
) -> None:
    path, outcome = left[name]
    assert_resumed(run_ranks(fit, str(tmp_path), strategy, 2, path), outcome)


def test_one_rank_s_checkpoint_is_sharded_when_loaded(tmp_path: Path) -> None:
    outcome = fit(0, str(tmp_path), "auto", 1)
    resumed = run_ranks(fit, str(tmp_path / "on"), {}, 2, str(tmp_path / "last.ckpt"))
    assert_resumed(resumed, outcome)


def test_a_folder_is_consolidated_to_a_file(
    left: dict[str, tuple[str, dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, outcome = left["sharded"]
    file = tmp_path / "whole.ckpt"
    main(["consolidate", path, str(file)])
    assert_resumed([fit(0, str(tmp_path), "auto", 1, str(file))], outcome)
    with pytest.raises(SystemExit):
        main(["consolidate", path, str(file)])
    assert "exists: give the path of a file to be made" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="not a checkpoint that is divided"):
        consolidate(str(tmp_path), str(tmp_path / "other.ckpt"))


def refusal(rank: int, folder: str, strategy: Any, options: dict[str, Any]) -> str:
    try:
        fit(rank, folder, strategy, 2, **options)
    except ConfigurationError as error:
        return str(error)
    return "none"


def test_what_does_not_fit_is_refused_in_a_sentence(
    left: dict[str, tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    wide = partial(TransformerPolicy, context=4, num_blocks=1, hidden_size=32)
    divided = {"tensor_parallel_size": 2}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("ckpt_path cannot be loaded", {}, {"ckpt_path": left["sharded"][0], "policy": wide}),
        ("ckpt_path cannot be loaded", {}, {"ckpt_path": left["whole"][0], "policy": wide}),
        ("data_parallel_size 1 × tensor_parallel_size 3 is not", {"tensor_parallel_size": 3}, {}),
        ("LSTMPolicy has none: set it to 1", divided, {"policy": LSTMPolicy}),
        ("a multiple of 2", divided, {"policy": partial(TransformerPolicy, num_heads=1)}),
        ("set preempt_at to null", divided, {"preempt_at": 0.5}),
        ("set overlap to halves", divided, {"env": "Acrobot-v1", "num_workers": 2, "overlap": "first_ready"}),
    ]
    for message, strategy, options in cases:
        for said in run_ranks(refusal, str(tmp_path), strategy, options):
            assert message in said


def test_the_short_name_stands_for_it_on_a_cpu() -> None:
    assert isinstance(quiet_trainer(strategy="fsdp", devices=2).strategy, FSDP)
    offloaded = quiet_trainer(strategy="fsdp_cpu_offload", devices=2).strategy
    assert isinstance(offloaded, FSDP)
    assert offloaded._sharding.cpu_offload
