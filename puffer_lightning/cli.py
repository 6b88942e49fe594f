"""The command line: Lightning's, with PPO and its environments filled in."""

import difflib
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from puffer_lightning.callbacks import Checkpoint, EpisodeWriter, EvaluationReport, Progress, Video
from puffer_lightning.engines import PPO, RolloutDataModule
from puffer_lightning.errors import ConfigurationError

_TRAINER_DEFAULTS = {
    "max_epochs": -1,
    "check_val_every_n_epoch": 100,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
    "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "."}},
}


class _Parser(LightningArgumentParser):
    """Lightning's parser, which says what is wrong in one sentence instead of after a page of usage."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        print(f"error: {_one_sentence(message, parser)}", file=sys.stderr)
        print(f"Run {parser.prog.replace(' [options]', '')} --help for all options.", file=sys.stderr)
        sys.exit(2)


def _one_sentence(message: str, parser: LightningArgumentParser) -> str:
    if unknown := re.match(r"unrecognized arguments: (--\S+)", message, re.IGNORECASE):
        name = unknown[1].partition("=")[0]
        known = [option for action in parser._actions for option in action.option_strings]
        closest = difflib.get_close_matches(name, known, n=1)
        return f"there is no option {name}" + (f": did you mean {closest[0]}?" if closest else ".")
    key, reasons = re.search(r'Parser key "(\S+)"', message), re.findall(r"- (.+)", message)
    if key and reasons:
        given = re.search(r"Given value: (.+)", message)
        message = f"{'; or '.join(reasons)}" + (f" (given: {given[1]})" if given else "")
    else:
        message = re.sub(r'^Parser key "\S+":', "", " ".join(message.split())).strip()
    message = re.sub(r"<class '([\w.]+)'>|typing\.(?=Literal)", r"\1", message)
    return f"--{key[1]}: {message}" if key else message


class PufferCLI(LightningCLI):
    """``fit``, ``validate``, ``test`` and ``predict`` for PPO."""

    model: PPO
    datamodule: RolloutDataModule

    def __init__(self, args: Sequence[str]) -> None:
        super().__init__(
            PPO,
            RolloutDataModule,
            trainer_defaults=_TRAINER_DEFAULTS,
            seed_everything_default=1,
            auto_configure_optimizers=False,
            args=list(args),
            parser_class=_Parser,
            parser_kwargs={"description": "Train and evaluate PPO policies.", "prog": "puffer_lightning"},
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(find_configs(args))

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Checkpoint, "checkpoint")

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
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        asked_for = config["callbacks"] or []
        asked_for = asked_for if isinstance(asked_for, list) else [asked_for]
        ours: list[Callback] = [EvaluationReport()]
        if config["enable_progress_bar"] is not False and not any(
            isinstance(c, ProgressBar) for c in asked_for
        ):
            ours.append(Progress())
        if video := self._get(self.config_init, "video"):
            ours.append(Video(video))
        if output := self._get(self.config_init, "output"):
            ours.append(EpisodeWriter(output))
        return super()._instantiate_trainer(config, [*callbacks, *ours])

    def before_fit(self) -> None:
        """Refuse what cannot work before any other process starts."""
        self.model.config.check_sizes(self.datamodule.horizon, self.datamodule.num_envs)

    def after_fit(self) -> None:
        """Evaluate what was trained."""
        self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)


def find_configs(args: Sequence[str]) -> list[str]:
    """Replace the names of shipped configurations by their paths.

    ``--config NAME`` means the file NAME, relative to the working directory; if there is none, the one of
    that name that comes with the package.

    Args:
        args: A command line.

    Raises:
        ConfigurationError: There is neither; the message lists what is shipped.
    """
    found: list[str] = []
    for previous, arg in zip(["", *args], args, strict=False):
        option, equals, value = arg.partition("=")
        if previous in ("-c", "--config"):
            found.append(_find_config(arg))
        elif option in ("-c", "--config") and equals:
            found.append(f"{option}={_find_config(value)}")
        else:
            found.append(arg)
    return found


def shipped_configs() -> Path:
    """The folder of the configurations that come with the package, in a wheel or in a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _find_config(name: str) -> str:
    if Path(name).is_file():
        return name
    shipped = shipped_configs() / name
    if shipped.is_file():
        return str(shipped)
    names = ", ".join(sorted(path.name for path in shipped_configs().glob("*.yaml")))
    raise ConfigurationError(
        f"--config {name} is neither a file nor a shipped configuration; these are: {names}."
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; what the user can fix ends with one sentence and exit code 2."""
    # Lightning asks torch about pytrees in a way that torch deprecates; nothing a user could do about it.
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    try:
        PufferCLI(sys.argv[1:] if args is None else args)
    except (ConfigurationError, MisconfigurationException) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
