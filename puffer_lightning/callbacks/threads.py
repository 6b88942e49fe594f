"""``Threads``: one CPU thread for networks too small to share."""

import os

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from typing_extensions import override

from puffer_lightning.callbacks.protocols import ppo_parts
from puffer_lightning.policies import Policy

# Rows × parameters of a backward pass; below, handing work to other threads costs more than they save.
_LEAST_WORK = 2e7


class Threads(Callback):
    """Runs a small network on one CPU thread, in training and evaluation.

    Torch takes a thread for each core. On a network of some thousand parameters they wait for one another
    longer than they work, and on a machine that has other things to do many times longer. How many are used
    follows from the sizes alone and not from a measurement, because it decides in which order numbers are
    added up, and two runs with one seed shall be equal to the last bit.

    Does nothing where there is a GPU, where ``OMP_NUM_THREADS`` is set, and for convolutional networks. The
    number is put back afterwards.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_parts(trainer, self)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._limit(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._limit(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._limit(trainer)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._limit(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._put_back()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._put_back()

    def _limit(self, trainer: Trainer) -> None:
        module, data = ppo_parts(trainer, self)
        parts = module.config.num_minibatches * module.config.accumulate_grad_batches
        rows = data.horizon * data.num_envs // parts
        if self._before is None and "OMP_NUM_THREADS" not in os.environ and is_small(module.policy, rows):
            self._before = torch.get_num_threads()
            torch.set_num_threads(1)

    def _put_back(self) -> None:
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None


def is_small(policy: Policy, rows: int) -> bool:
    """Whether a network does too little work at a time for more than one CPU thread.

    Args:
        policy: The network.
        rows: Transitions of one backward pass.
    """
    if any(isinstance(part, nn.Conv2d) for part in policy.modules()):
        return False
    parameters = list(policy.parameters())
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    return on_cpu and rows * sum(parameter.numel() for parameter in parameters) < _LEAST_WORK
