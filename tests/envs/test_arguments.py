import pytest
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs.arguments import check_arguments, parse_autoreset_mode
from puffer_lightning.errors import ConfigurationError


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_mode_is_itself_its_name_or_its_value(mode: AutoresetMode) -> None:
    assert parse_autoreset_mode(mode) is parse_autoreset_mode(mode.name) is parse_autoreset_mode(mode.value)


def test_another_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="autoreset_mode is 'never': set it to one of"):
        parse_autoreset_mode("never")


def test_what_an_environment_offers_is_accepted() -> None:
    check_arguments("Maze", 1, None, ())
    check_arguments("Maze", 1, "rgb_array", ("rgb_array",))


def test_what_it_does_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_envs is 0: set it to 1 or more"):
        check_arguments("Maze", 0, None, ())
    with pytest.raises(ConfigurationError, match="'human' is not offered by Maze: set it to None"):
        check_arguments("Maze", 1, "human", ())
