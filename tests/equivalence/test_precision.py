"""Whatever a network computes in, the update reckons in float32 and finds what the rollout found."""

from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from puffer_lightning.engines import PPO, RolloutDataModule, iterations
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import LSTMPolicy, MLPPolicy, TransformerPolicy
from puffer_lightning.ppo import minibatch_loss
from tests.equivalence.runs import quiet_trainer

POLICIES = [MLPPolicy, LSTMPolicy, partial(TransformerPolicy, context=4, num_blocks=1)]


def kls_and_dtypes(
    precision: Any, policy: Any, engine: str = "trainer", env: str = "Pendulum-v1"
) -> tuple[list[float], set[torch.dtype], PPO]:
    """The KL divergence of each minibatch from the rollout's policy; the dtypes of what is reckoned with."""
    L.seed_everything(1, verbose=False)
    data = RolloutDataModule(env, num_envs=8, horizon=16, total_timesteps=256)
    model = PPO(policy, update_epochs=2, num_minibatches=2)
    kls: list[float] = []
    dtypes: set[torch.dtype] = set()

    def recorded(policy: Any, batch: Any, mean: Tensor, std: Tensor, weight: Tensor, config: Any) -> Any:
        loss, statistics = minibatch_loss(policy, batch, mean, std, weight, config)
        evaluation = policy.evaluate(batch.observations, batch.actions, batch.state, batch.started)
        kls.append(statistics[3].item())
        reckoned = (batch.log_probs, batch.values, batch.advantages, batch.returns, mean, std, weight)
        dtypes.update(tensor.dtype for tensor in (*reckoned, *evaluation, loss, statistics))
        return loss, statistics

    with mock.patch.object(import_module("puffer_lightning.ppo.learner"), "minibatch_loss", recorded):
        if engine == "trainer":
            quiet_trainer(precision=precision, num_sanity_val_steps=0).fit(model, datamodule=data)
        else:
            list(iterations(Fabric(accelerator="cpu", devices=1, precision=precision), model, data))
            data.close()
    return kls, dtypes, model


@pytest.mark.parametrize("policy", POLICIES, ids=["mlp", "lstm", "transformer"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("engine", ["trainer", "fabric"])
def test_the_update_reckons_in_float32(precision: str, policy: Any, engine: str) -> None:
    kls, dtypes, model = kls_and_dtypes(precision, policy, engine)
    assert dtypes == {torch.float32}
    assert len(kls) == 8
    # Before the first optimizer step of each iteration the policy is the one that collected.
    assert max(kls[0], kls[4]) < 1e-5 < max(kls)
    weights = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {parameter.dtype for parameter in model.policy.parameters()} == {weights}


def test_bfloat16_is_computed_in() -> None:
    losses = [kls_and_dtypes(precision, MLPPolicy)[0][-1] for precision in ("32-true", "bf16-mixed")]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("precision", ["16-true"])
def test_half_precision_without_the_range_is_refused(precision: str) -> None:
    with pytest.raises(ConfigurationError, match=r"precision 16-true .*: set it to bf16-true"):
        kls_and_dtypes(precision, MLPPolicy)
