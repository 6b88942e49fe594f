"""The state of environments as plain data, from which a resumed run goes on.

A vector environment, or a single one within ``SyncVectorEnv`` or ``SharedMemoryVectorEnv``, offers its state
by the two methods of :class:`SupportsState`. Of gymnasium's classic-control and toy-text environments and of
its wrappers the attributes are the state, and so they are of any class derived from :class:`PlainState`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch import Tensor

State = dict[str, Any]

_GENERATOR = "generator"
_PLAIN_MODULES = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.toy_text.",
    "gymnasium.wrappers.",
)
# Large tables that toy-text environments make once and only read.
_TABLES = ("P", "desc", "initial_state_distrib")
# What an attribute may be besides data; a run that is resumed makes these itself.
_NO_DATA = (
    gym.Space,
    EnvSpec,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    type,
    np.dtype,
)


class NoStateError(Exception):
    """An environment does not offer its state, or cannot take up a saved one; the message says why."""


@runtime_checkable
class SupportsState(Protocol):
    """An environment that can go on from where another one of its kind stood."""

    def get_state(self) -> State:
        """Everything that later steps depend on, its random generator's state included.

        Returns:
            Copies by name, of tensors, arrays, numbers, strings, and lists, tuples and dictionaries of these.
            In a vector environment each entry but ``"generator"`` has a row for each environment, a tensor or
            an array [N, ...] or a list of N, if the run is to be resumed on another number of ranks.
        """

    def set_state(self, state: State) -> None:
        """Take up what ``get_state`` returned, after a reset."""


class PlainState:
    """Mixed into an environment whose attributes are all of its state: ``class Mine(PlainState, gym.Env)``.

    Its attributes are what :class:`SupportsState` allows, or NumPy's random generators. Spaces, functions and
    classes are left as they are, so they must not change.
    """

    def get_state(self) -> State:
        """A copy of all attributes that are data.

        Raises:
            NoStateError: One of them is something else.
        """
        return attributes(self)

    def set_state(self, state: State) -> None:
        """Set the attributes."""
        set_attributes(self, state)


def attributes(owner: object, leave_out: Sequence[str] = ()) -> State:
    """Copies of the attributes of an object that are data.

    Raises:
        NoStateError: One of them is neither data nor what a new object has as well.
    """
    copies = {}
    for name, value in vars(owner).items():
        if not isinstance(value, _NO_DATA) and name.strip("_") != "metadata" and name not in leave_out:
            try:
                copies[name] = unpack(pack(value))
            except TypeError as problem:
                raise NoStateError(f"{type(owner).__name__}.{name} cannot be saved: {problem}") from None
    return copies


def set_attributes(owner: object, state: State) -> None:
    """Set attributes to what :func:`attributes` returned."""
    vars(owner).update(unpack(pack(state)))


def pack(value: Any) -> Any:
    """Data as what ``torch.load`` reads with ``weights_only``; a copy, without tensors on other devices.

    Arrays become pairs of a name and a tensor; so do other types that are not read as they are.

    Raises:
        TypeError: It holds something that is not data.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.str_):
        return str(value)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray | np.generic):
        return "array" if isinstance(value, np.ndarray) else "scalar", torch.from_numpy(np.array(value))
    if isinstance(value, np.random.Generator):
        return "random", pack(value.bit_generator.state)
    if isinstance(value, deque):
        return "deque", [pack(item) for item in value], value.maxlen
    if type(value) in (list, tuple, set):
        items = [pack(item) for item in value]
        return items if type(value) is list else (type(value).__name__, items)
    if type(value) is dict and all(type(key) in (bool, int, float, str) for key in value):
        return {key: pack(item) for key, item in value.items()}
    raise TypeError(f"it holds a {type(value).__name__}")


def unpack(value: Any) -> Any:
    """What :func:`pack` was given."""
    if type(value) is list:
        return [unpack(item) for item in value]
    if type(value) is dict:
        return {key: unpack(item) for key, item in value.items()}
    if type(value) is not tuple:
        return value.clone() if isinstance(value, Tensor) else value
    kind, content = value[:2]
    if kind in ("array", "scalar"):
        array = content.numpy().copy()
        return array if kind == "array" else array[()]
    if kind == "random":
        state = unpack(content)
        generator = np.random.Generator(_bit_generator(state["bit_generator"]))
        generator.bit_generator.state = state
        return generator
    if kind == "deque":
        return deque(unpack(content), maxlen=value[2])
    makers: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set}
    return makers[kind](unpack(content))


def _bit_generator(name: str) -> np.random.BitGenerator:
    kinds = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    return {kind.__name__: kind for kind in kinds}[name]()


def get_env_state(env: gym.Env[Any, Any]) -> list[State]:
    """The state of a single environment: of each wrapper by its class's name, the outermost first.

    Raises:
        NoStateError: It, or a wrapper, does not offer its state.
    """
    return [{type(layer).__name__: _get_layer(layer)} for layer in _layers(env)]


def set_env_state(env: gym.Env[Any, Any], state: list[State]) -> None:
    """Take up what :func:`get_env_state` returned.

    Raises:
        NoStateError: It is of another environment, or of other wrappers.
    """
    layers = _layers(env)
    here, there = [type(layer).__name__ for layer in layers], [next(iter(saved)) for saved in state]
    if here != there:
        raise NoStateError(f"the checkpoint's environments are {'/'.join(there)}, not {'/'.join(here)}")
    for layer, saved in zip(layers, state, strict=True):
        try:
            if isinstance(layer, SupportsState):
                layer.set_state(*saved.values())
            else:
                set_attributes(layer, *saved.values())
        except Exception as problem:
            raise NoStateError(f"{type(layer).__name__} cannot take up its state: {problem}") from problem


def _layers(env: gym.Env[Any, Any]) -> list[gym.Env[Any, Any]]:
    return [env, *_layers(env.env)] if isinstance(env, gym.Wrapper) else [env]


def _get_layer(layer: gym.Env[Any, Any]) -> State:
    if isinstance(layer, SupportsState):
        return _ask(layer)
    module = type(layer).__module__
    if not module.startswith(_PLAIN_MODULES):
        raise NoStateError(f"{type(layer).__name__} has no get_state and set_state")
    return attributes(layer, ("env", *_TABLES) if "toy_text" in module else ("env",))


def _ask(env: SupportsState) -> State:
    try:
        return env.get_state()
    except NoStateError:
        raise
    except Exception as problem:
        raise NoStateError(f"get_state of {type(env).__name__} failed: {problem}") from problem


def get_state(env: VectorEnv[Any, Any, Any]) -> State:
    """The state of N environments.

    Returns:
        ``rows``: what there is of each, tensors or packed arrays [N, ...] or lists of N by name. ``rest``:
        the generator that they share, if they do, or all of a state without such rows.

    Raises:
        NoStateError: They do not offer it.
    """
    if isinstance(env, SupportsState):
        state = _ask(env)
    elif type(env) is SyncVectorEnv:
        layers = [get_env_state(single) for single in env.envs]
        state = {"environments": layers, "ended": env._autoreset_envs}
    elif type(env) is CartPoleVectorEnv:
        carts: Any = env
        state = {"state": carts.state.T, "steps": carts.steps, "prev_done": carts.prev_done}
        state[_GENERATOR] = carts.np_random
    else:
        raise NoStateError(f"{type(env).__name__} has no get_state and set_state")
    try:
        state = {name: pack(value) for name, value in state.items()}
    except TypeError as problem:
        raise NoStateError(f"get_state of {type(env).__name__} cannot be saved: {problem}") from None
    rest = {_GENERATOR} & state.keys()
    if any(num_rows(value) != env.num_envs for name, value in state.items() if name not in rest):
        rest = set(state)
    return {
        "rows": {name: value for name, value in state.items() if name not in rest},
        "rest": {name: state[name] for name in rest},
    }


def set_state(env: VectorEnv[Any, Any, Any], state: State) -> None:
    """Take up what :func:`get_state` returned; what it lacks stays as it is.

    Args:
        env: N environments that have been reset.
        state: Of as many of the same kind.

    Raises:
        NoStateError: They cannot; they have to be reset, then.
    """
    given = {**state["rows"], **state["rest"]}
    current = get_state(env)
    expected = current["rows"].keys() | current["rest"].keys()
    if given.keys() | current["rest"].keys() != expected:
        raise NoStateError(f"the checkpoint's environments are not {type(env).__name__}")
    unpacked = unpack({**current["rest"], **given})
    try:
        if isinstance(env, SupportsState):
            env.set_state(unpacked)
        elif isinstance(env, SyncVectorEnv):
            for single, layers in zip(env.envs, unpacked["environments"], strict=True):
                set_env_state(single, layers)
            env._autoreset_envs = unpacked["ended"]
        else:
            carts: Any = env
            carts.state = np.ascontiguousarray(unpacked["state"].T)
            carts.steps, carts.prev_done = unpacked["steps"], unpacked["prev_done"]
            carts.np_random = unpacked[_GENERATOR]
    except NoStateError:
        raise
    except Exception as problem:
        raise NoStateError(f"{type(env).__name__} cannot take up its state: {problem}") from problem


def num_rows(value: Any) -> int | None:
    """N of packed data that has a row for each of N environments."""
    if type(value) is tuple and value[0] == "array":
        value = value[1]
    if type(value) is list:
        return len(value)
    return len(value) if isinstance(value, Tensor) and value.ndim else None
