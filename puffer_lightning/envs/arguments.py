"""Checks of the arguments that all vector environments of this package take."""

from gymnasium.vector import AutoresetMode

from puffer_lightning.errors import ConfigurationError


def check_arguments(name: str, num_envs: int, render_mode: str | None, render_modes: tuple[str, ...]) -> None:
    """Refuse a number of environments or a way to render that cannot work.

    Args:
        name: The environment's, for the message.
        num_envs: N.
        render_mode: The one asked for.
        render_modes: Those the environment has, besides None.

    Raises:
        ConfigurationError: There would be no environment, or it does not render so.
    """
    if num_envs < 1:
        raise ConfigurationError(f"num_envs is {num_envs}: set it to 1 or more.")
    if render_mode is not None and render_mode not in render_modes:
        offered = " or ".join(("None", *map(repr, render_modes)))
        raise ConfigurationError(
            f"render_mode {render_mode!r} is not offered by {name}: set it to {offered}."
        )


def parse_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """The mode that is given as such, by its name ("NEXT_STEP") or by its value ("NextStep").

    Raises:
        ConfigurationError: There is no such mode.
    """
    if isinstance(mode, AutoresetMode):
        return mode
    by_text = {text: member for member in AutoresetMode for text in (member.name, member.value)}
    if mode not in by_text:
        raise ConfigurationError(f"autoreset_mode is {mode!r}: set it to one of {sorted(by_text)}.")
    return by_text[mode]
