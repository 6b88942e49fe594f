"""The command line: Lightning's, with PPO and its environments filled in."""

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from typing_extensions import override

from puffer_lightning import scaling
from puffer_lightning.callbacks import (
    Checkpoint,
    EpisodeWriter,
    EvaluationReport,
    Progress,
    RunOptions,
    StopOnSignal,
    Stragglers,
    Threads,
    Video,
    find_checkpoint,
)
from puffer_lightning.callbacks.checkpoint_io import check_checkpoint, consolidate
from puffer_lightning.credentials import refuse_credentials
from puffer_lightning.engines import PPO, RolloutDataModule
from puffer_lightning.engines.elastic import read_sizes
from puffer_lightning.engines.processes import prepare_processes, ranks_to_launch
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.launch import (
    end_rank,
    end_with_launcher,
    exit_code,
    is_rank,
    launch,
    launched_here,
)
from puffer_lightning.parsing import Parser, one_sentence
from puffer_lightning.ppo import NonFiniteError
from puffer_lightning.shipped import find_configs

_TRAINER_DEFAULTS = {
    "max_epochs": -1,
    "check_val_every_n_epoch": 100,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
    "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "."}},
}


class _NamedByClassPath(RolloutDataModule):
    """Owns the environments and gives Lightning one rollout an epoch.

    Args:
        env: Gymnasium id of the environment (``CartPole-v1``, or ``module:Name-v0`` to import a module
            first), or the dotted path of a class or function that takes the number of environments as its
            first argument and makes a ``gymnasium.vector.VectorEnv`` (``my_module.make``); its further
            arguments go to ``env_kwargs``, or both are given as ``class_path`` and ``init_args``.
        options: As ``RolloutDataModule``'s.
    """

    def __init__(
        self,
        env: str | dict[str, Any] = "CartPole-v1",
        env_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(env, dict):
            # The parser puts what follows --data.env.init_args beside init_args.
            spec = dict(env)
            path, init_args = spec.pop("class_path", None), spec.pop("init_args", {})
            if not isinstance(path, str) or not isinstance(init_args, dict):
                raise ConfigurationError(f"env is {env}: name it, or give it a class_path and init_args.")
            env, env_kwargs = path, {**init_args, **spec, **(env_kwargs or {})}
        super().__init__(env, env_kwargs, **options)


class _SaveConfig(SaveConfigCallback):
    """Saves the configuration with the metrics: in the logger's folder or, if it has none, as its parameters.

    Where there is no logger, or one without a folder, Lightning writes ``config.yaml`` to the working
    directory, over what the user may have there.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.save_to_log_dir = isinstance(trainer.logger, CSVLogger | TensorBoardLogger)
        super().setup(trainer, pl_module, stage)

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.logger is not None and not self.save_to_log_dir:
            trainer.logger.log_hyperparams(yaml.safe_load(self.parser.dump(self.config)))


class PufferCLI(LightningCLI):
    """``fit``, ``validate``, ``test`` and ``predict`` for PPO."""

    model: PPO
    datamodule: RolloutDataModule

    def __init__(self, args: Sequence[str]) -> None:
        self._args = list(args)
        super().__init__(
            PPO,
            _NamedByClassPath,
            save_config_callback=_SaveConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults=_TRAINER_DEFAULTS,
            seed_everything_default=1,
            auto_configure_optimizers=False,
            args=self._args,
            parser_class=Parser,
            parser_kwargs={"description": "Train and evaluate PPO policies.", "prog": "puffer_lightning"},
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(find_configs(args))

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Checkpoint, "checkpoint")

    @override
    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        # For the help alone, as it is not one of the Trainer's: see main.
        measures = Parser()
        scaling.add_options(measures)
        assert parser._subcommands_action is not None
        parser._subcommands_action.add_subcommand("scaling", measures, help=scaling.SUMMARY)

    @override
    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand in ("validate", "test"):
            parser.set_defaults(verbose=False)
            parser.add_argument("--video", type=str | None, help="Folder to write a video of an episode to.")
        if subcommand == "predict":
            parser.set_defaults(return_predictions=False)
            parser.add_argument(
                "--output", type=str, default="episodes.npz", help="File to write the episodes to."
            )
        return parser

    @override
    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as it is: Lightning would let the checkpoint win over the command line."""

    @override
    def instantiate_classes(self) -> None:
        if path := self._get(self.config, "ckpt_path"):
            _check_checkpoint(path)
        try:
            super().instantiate_classes()
        except ConfigurationError:
            raise
        except (ModuleNotFoundError, ValueError) as problem:
            message = one_sentence(str(problem), self.parser)
            for extra in ("wandb", "tensorboard"):
                if re.search(rf"Requirement '{extra}\b.*not met", str(problem)):
                    message = f'trainer.logger needs a package: pip install "puffer-lightning[{extra}]".'
            raise ConfigurationError(message) from problem

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if str(config["strategy"]).startswith("deepspeed"):
            raise ConfigurationError(
                "trainer.strategy deepspeed is left out on purpose: set it to ddp or, for a policy larger "
                "than a device, to fsdp."
            )
        if config["enable_checkpointing"] is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
        asked_for = config["callbacks"] or []
        asked_for = asked_for if isinstance(asked_for, list) else [asked_for]
        options = yaml.safe_load(self._parser(self.subcommand).dump(self.config[self.subcommand]))
        refuse_credentials(options)
        ours: list[Callback] = [
            RunOptions(options),
            EvaluationReport(),
            StopOnSignal(),
            Stragglers(),
            Threads(),
        ]
        if config["enable_progress_bar"] is not False and not any(
            isinstance(c, ProgressBar) for c in asked_for
        ):
            ours.append(Progress())
        if video := self._get(self.config_init, "video"):
            # Frames need no window, and SDL complains where it finds none to open.
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
            ours.append(Video(video))
        if output := self._get(self.config_init, "output"):
            ours.append(EpisodeWriter(output))
        try:
            trainer = super()._instantiate_trainer(config, [*callbacks, *ours])
        except (TypeError, ValueError) as problem:
            raise ConfigurationError(f"The options of trainer do not fit: {problem}") from problem
        assert isinstance(trainer, Trainer)
        prepare_processes(trainer)
        return trainer

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Run it; where that takes several processes which nobody has started yet, in these."""
        options = self.config_init[subcommand]
        options["ckpt_path"] = find_checkpoint(self.trainer, options["ckpt_path"], subcommand == "fit")
        logging.disable(logging.NOTSET)
        if type(self) is PufferCLI and (ranks := ranks_to_launch(self.trainer)):
            if subcommand == "fit":
                self.before_fit()
            number, first, environment = ranks
            command = [sys.executable, "-m", "puffer_lightning", *self._args]
            sys.exit(launch(command, number, environment, first))
        super()._run_subcommand(subcommand)

    def before_fit(self) -> None:
        """Refuse what cannot work before any other process starts."""
        processes = self.trainer.num_devices * self.trainer.num_nodes
        ranks = max(1, processes // getattr(self.trainer.strategy, "tensor_parallel_size", 1))
        self.datamodule.keep_batch(read_sizes(self.config_init["fit"]["ckpt_path"]), self.model.config, ranks)
        self.model.config.check_sizes(self.datamodule.horizon, self.datamodule.envs_of_each(ranks))

    def after_fit(self) -> None:
        """Evaluate what was trained."""
        self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)


def _check_checkpoint(path: str) -> None:
    if path == "best":
        raise ConfigurationError(
            "ckpt_path best needs the run that wrote it: give the path of its best.ckpt."
        )
    if path in ("auto", "last", "hpc") or path.startswith("registry") or "://" in path:
        return
    if not Path(path).exists():
        raise ConfigurationError(f"ckpt_path {path} does not exist: give the path of a checkpoint.")
    check_checkpoint(path)


def _consolidate(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "puffer_lightning consolidate", description="Write a checkpoint divided among ranks to one file."
    )
    parser.add_argument("folder", help="The checkpoint, as fit wrote it with save_distributed_checkpoint.")
    parser.add_argument("file", help="The file to write, which any strategy loads.")
    consolidate(**vars(parser.parse_args(args)))


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; what the user can fix ends with one sentence and exit code 2."""
    # Lightning asks torch about pytrees in a way that torch deprecates; nothing a user could do about it.
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    args = list(sys.argv[1:] if args is None else args)
    end_with_launcher()
    if launched_here():
        # What the launcher has said already, in setting up the same.
        logging.disable(logging.INFO)
    try:
        if args[:1] == ["consolidate"]:
            _consolidate(args[1:])
        elif args[:1] == ["scaling"] and not {"-h", "--help"} & set(args):
            scaling.measure(args[1:])
        else:
            PufferCLI(args)
    except (ConfigurationError, MisconfigurationException, NonFiniteError) as problem:
        if is_rank():
            end_rank(problem, str(problem))
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except Exception as failure:
        if is_rank():
            end_rank(failure)
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        raise SystemExit(exit_code(end)) from None
