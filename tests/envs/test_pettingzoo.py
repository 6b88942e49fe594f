"""PettingZoo's environments, and small ones whose agents die early, appear late and mask their actions."""

import sys
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from lightning.fabric import Fabric

from puffer_lightning.engines import PPO, RolloutDataModule, iterations
from puffer_lightning.envs import check_env, make_vector_env
from puffer_lightning.envs.pettingzoo import PettingZooVectorEnv, make_pettingzoo_env
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.functional import gae
from puffer_lightning.policies import make_policies, make_policy
from puffer_lightning.ppo import PPOConfig, update
from puffer_lightning.rollout import Collector, play
from tests.environments import KnownValues, Place, RunningSum, places, reward, value
from tests.envs.parallel_environments import PLACES, Choosing, Crew, Telling
from tests.transitions import parameters_of

MODULE = "tests.envs.parallel_environments"


VALID = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 1]], dtype=torch.bool)
"""Who acts, by step of an episode and agent."""


def crews(number: int = 2, **options: Any) -> PettingZooVectorEnv:
    return PettingZooVectorEnv([Crew(3 * first) for first in range(number)], **options)


NOTHING = np.zeros(6, np.int64)


@pytest.mark.parametrize(
    ("name", "policies"),
    [
        ("simple_spread_v3", "shared"),
        ("simple_tag_v3", "per_type"),
        ("simple_speaker_listener_v4", "per_type"),
    ],
)
def test_rows_are_those_of_the_environments_stepped_by_hand(name: str, policies: Any) -> None:
    env = make_vector_env(f"mpe2.{name}", 5, {"policies": policies, "max_cycles": 7})
    assert isinstance(env, PettingZooVectorEnv)
    raw = [
        import_module(f"mpe2.{name}").parallel_env(max_cycles=7)
        for _ in range(env.num_envs // len(env.agents))
    ]
    assert len(raw) == -(-5 // len(env.agents)), "rounded up to whole environments"
    env.action_space.seed(0)

    def own(batch: Any, row: int) -> Any:
        return (batch[env.agent_types[row % len(env.agents)]] if policies == "per_type" else batch)[row]

    observations, infos = env.reset(seed=3)
    seen = [one.reset(seed=3 + len(env.agents) * number)[0] for number, one in enumerate(raw)]
    for step in range(16):
        assert env.observation_space.contains(observations)
        for row in range(env.num_envs):
            number, agent = divmod(row, len(env.agents))
            np.testing.assert_array_equal(own(observations, row), seen[number][env.agents[agent]])
        actions = env.action_space.sample()
        observations, rewards, terminated, truncated, infos = env.step(actions)
        assert not infos["masked"].any()
        for number, one in enumerate(raw):
            rows = range(number * len(env.agents), (number + 1) * len(env.agents))
            final, earned, ends, cuts, _ = one.step(
                {agent: own(actions, row) for agent, row in zip(env.agents, rows, strict=True)}
            )
            for agent, row in zip(env.agents, rows, strict=True):
                assert rewards[row] == earned[agent]
                assert (
                    (terminated[row], truncated[row]) == (ends[agent], cuts[agent]) == (False, step % 7 == 6)
                )
                if truncated[row]:
                    last = infos["final_obs"][row]
                    last = last[env.agent_types[row % len(env.agents)]] if policies == "per_type" else last
                    np.testing.assert_array_equal(last, final[agent])
            seen[number] = one.reset()[0] if step % 7 == 6 else final
    env.close()


@pytest.mark.slow
def test_agents_of_pettingzoo_that_die_are_gone_until_the_environment_begins_anew() -> None:
    env = make_vector_env(
        "pettingzoo.butterfly.knights_archers_zombies_v11", 8, {"spawn_delay": 3, "max_zombies": 30}
    )
    observations, _ = env.reset(seed=0)
    env.action_space.seed(0)
    present, deaths, reset = np.ones(8, np.bool_), 0, np.zeros(2, np.bool_)
    for _ in range(300):
        observations, rewards, terminated, truncated, infos = env.step(env.action_space.sample())
        ended = terminated | truncated
        np.testing.assert_array_equal(infos["masked"], ~present)
        assert not (ended | (rewards != 0))[~present].any()
        present &= ~ended
        over = ~present.reshape(2, 4).any(1)
        deaths += int(ended.sum()) * (not over.any())
        reset |= over
        np.testing.assert_array_equal(infos["started"], over.repeat(4))
        present |= over.repeat(4)
        assert not observations[~present].any()
    assert deaths
    assert reset.any()
    env.close()


def test_who_is_not_there_is_masked() -> None:
    env = crews()
    observations, _ = env.reset(seed=0)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.agent_types == ("walker", "walker", "sitter")
    for step in range(15):
        at = step % 5
        present = VALID[at].repeat(2).numpy()
        assert not observations[~present].any()
        shown = places(observations)
        observations, rewards, terminated, truncated, infos = env.step(NOTHING)
        np.testing.assert_array_equal(infos["masked"], ~present)
        earned = [reward(place) if there else 0.0 for place, there in zip(shown, present, strict=True)]
        assert rewards.tolist() == earned
        assert terminated.tolist() == [at == 1, False, at == 4] * 2
        assert truncated.tolist() == [False, at == 4, False] * 2
        assert infos["started"].tolist() == [at == 4, at == 0, at == 4] * 2
        if at == 4:
            assert places(infos["final_obs"][4][None]) == [Place(4, step // 5, 4)]


def test_advantages_do_not_cross_the_gap_between_an_agents_episodes() -> None:
    horizon, gamma, gae_lambda = 13, 0.9, 0.8
    rollout = Collector(crews(), horizon).collect(KnownValues())
    assert torch.equal(rollout.valid, VALID.repeat(3, 2)[:horizon])
    advantages = gae(
        rollout.rewards,
        rollout.values,
        rollout.next_values,
        rollout.terminated,
        rollout.truncated,
        gamma,
        gae_lambda,
    )
    for row in range(6):
        agent = Crew.possible_agents[row % 3]
        length, ending = Crew.lives[agent]
        for episode in range(3):
            begin = 5 * episode + Crew.arrivals[agent]
            steps = [Place(row, episode, step) for step in range(min(length, horizon - begin))]
            assert places(rollout.observations[begin : begin + len(steps), row]) == steps
            following = 0.0
            for place in reversed(steps):
                bootstrap = value(place._replace(step=place.step + 1))
                if place.step + 1 == length and ending == "terminated":
                    bootstrap = 0.0
                following = reward(place) + gamma * bootstrap - value(place) + gamma * gae_lambda * following
                assert advantages[begin + place.step, row].item() == pytest.approx(following, rel=1e-5)


def test_nothing_of_a_row_without_its_agent_is_trained_on_or_counted() -> None:
    def trained(poison: float) -> tuple[Any, Any]:
        torch.manual_seed(0)
        policy = make_policy(PLACES, spaces.Discrete(2))
        rollout = Collector(crews(), horizon=12).collect(policy)
        gone = ~rollout.valid
        assert gone.any()
        for part in (rollout.observations, rollout.rewards, rollout.log_probs):
            part[gone] = poison
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        config = PPOConfig(num_minibatches=2)
        metrics = update(policy, optimizer, rollout, config, torch.Generator().manual_seed(0))
        return parameters_of(policy), metrics

    (weights, metrics), (again, others) = trained(0.0), trained(50.0)
    assert torch.equal(weights, again)
    assert {name: metric.item() for name, metric in metrics.items()} == {
        name: metric.item() for name, metric in others.items()
    }


def test_episodes_are_counted_for_each_agent() -> None:
    rollout = Collector(crews(), horizon=12).collect(KnownValues())
    # In order of time: the first walkers die, at the end of the environments' episodes the others follow.
    assert rollout.episode_rows.tolist() == [0, 3, 1, 2, 4, 5] * 2 + [0, 3]
    assert rollout.episode_lengths.tolist() == [2, 2, 4, 5, 4, 5] * 2 + [2, 2]
    expected = [
        sum(reward(Place(row, number // 6, step)) for step in range(int(length)))
        for number, (row, length) in enumerate(
            zip(rollout.episode_rows.tolist(), rollout.episode_lengths.tolist(), strict=True)
        )
    ]
    assert rollout.episode_returns.tolist() == expected
    assert rollout.agent_types == ("walker", "walker", "sitter")


def test_the_memory_of_a_policy_begins_with_each_agents_episode() -> None:
    rollout = Collector(crews(), horizon=14).collect(RunningSum())
    steps = rollout.observations[..., 2] + 1
    assert torch.equal(rollout.values[rollout.valid], (steps * (steps + 1) / 2)[rollout.valid])


def test_evaluation_plays_the_episodes_of_agents() -> None:
    episodes = play(KnownValues(), crews(), 8, seed=0, record=True)
    assert episodes.lengths.tolist() == [2, 4, 5, 2, 4, 5, 2, 4]
    for index, trajectory in enumerate(episodes.trajectories):
        length = int(episodes.lengths[index])
        assert places(trajectory.observations) == [
            Place(index % 6, index // 6, step) for step in range(length)
        ]
        assert trajectory.terminated == (index % 3 != 1)
    assert episodes.agent_types == ("walker", "walker", "sitter")


def test_types_come_from_the_names_or_from_the_user() -> None:
    per_type = crews(policies="per_type")
    assert list(per_type.single_action_space) == ["sitter", "walker"]  # type: ignore[call-overload]
    observations, _ = per_type.reset()
    assert observations["agent_type"].tolist() == [1, 1, 0] * 2
    assert not observations["sitter"][[0, 1, 3, 4]].any()
    assert places(observations["sitter"][[2, 5]]) == [Place(2, 0, 0), Place(5, 0, 0)]

    named = crews(policies={"walker_0": "b", "walker_1": "a", "sitter_0": "b"})
    assert named.agent_types == ("b", "a", "b")
    one = crews(policies=dict.fromkeys(Crew.possible_agents, "all"))
    assert one.single_observation_space == PLACES, "one policy after all"


@pytest.mark.parametrize("where", ["observation", "info"])
@pytest.mark.parametrize("policies", ["shared", "per_type"])
def test_masked_actions_are_never_chosen(where: Any, policies: Any) -> None:
    env = PettingZooVectorEnv([Choosing(where, equal=policies == "shared") for _ in range(3)], policies)
    torch.manual_seed(0)
    both = env.single_observation_space, env.single_action_space
    policy = make_policies(make_policy, *both)
    rollout = Collector(env, horizon=9).collect(policy)
    assert (~rollout.valid).sum() == 3 * 4
    assert (rollout.log_probs[rollout.valid] == 0).all(), "there is only one choice"
    assert play(policy, env, 6, seed=0).returns.tolist() == [4, 2] * 3


@pytest.mark.parametrize(
    ("env", "kwargs", "message"),
    [
        ("nowhere.some_v3", {}, r"No module named 'nowhere'.*puffer-lightning\[pettingzoo\]"),
        (
            "mpe2.simple_tag_v3",
            {"max_cycle": 3},
            r"env_kwargs {'max_cycle': 3} do not fit env mpe2.simple_tag_v3",
        ),
        ("mpe2.simple_tag_v3", {}, r"adversary_0 the spaces Box.*and agent_0 .*per_type, or name a policy"),
        ("mpe2.simple_spread_v3", {"policies": "own"}, "policies is 'own': set it to shared or per_type"),
        (f"{__name__}.make_nobody", {}, "list them in possible_agents"),
        (
            f"{MODULE}.Crew",
            {"policies": {"walker_0": "a"}},
            "policies names walker_0, and the agents are walker_0, w",
        ),
        ("json", {}, "json has no parallel_env"),
    ],
)
def test_what_cannot_work_is_one_sentence(env: str, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_pettingzoo_env(4, env, **kwargs)


def make_nobody() -> Any:
    nobody = Crew()
    nobody.possible_agents = []
    return nobody


def test_a_module_without_parallel_environment_is_refused_before_any_is_made() -> None:
    with pytest.raises(ConfigurationError, match=r"pettingzoo.classic.tictactoe_v3 has no parallel_env"):
        check_env("pettingzoo.classic.tictactoe_v3")


@pytest.mark.parametrize("package", ["mpe2", "pettingzoo"])
def test_a_missing_package_is_one_of_an_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=r'pip install "puffer-lightning\[pettingzoo\]"'):
        check_env(f"{package}.some_v3")


def test_an_agent_that_just_vanishes_is_named() -> None:
    class Vanishing(Crew):
        def step(self, actions: Any) -> Any:
            observations, rewards, terminations, *rest = super().step(actions)
            return observations, rewards, dict.fromkeys(terminations, False), *rest

    env = PettingZooVectorEnv([Vanishing()])
    env.reset()
    env.step(NOTHING[:3])
    with pytest.raises(ConfigurationError, match=r"walker_0 of env .* left without an end"):
        env.step(NOTHING[:3])


def test_workers_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"num_workers is 2 but env mpe2.simple_tag_v3 makes its own"
    ):
        make_vector_env("mpe2.simple_tag_v3", 4, {"policies": "per_type"}, num_workers=2)


def test_frames_are_those_of_the_rows_environments() -> None:
    env = make_pettingzoo_env(3, Crew, render_mode="rgb_array")
    frames = PettingZooVectorEnv([Crew(0, "rgb_array"), Crew(3, "rgb_array")]).render()
    assert frames is not None
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 0, 0, 3, 3, 3]
    assert env.metadata["render_fps"] == 7
    assert crews().render() is None
    env.close()
    assert env._envs[0].closed


@pytest.mark.slow
def test_two_types_with_different_spaces_learn_to_understand_each_other() -> None:
    torch.manual_seed(1)
    make = partial(make_pettingzoo_env, env=Telling, policies="per_type")
    data = RolloutDataModule(make, num_envs=64, horizon=16, total_timesteps=40_000, eval_episodes=200)
    model = PPO(gamma=1.0, ent_coef=0.02)
    *_, metrics = iterations(Fabric(accelerator="cpu", devices=1), model, data)
    episodes = data.evaluate(model.policy)
    data.close()
    # Without an understanding it is 1/3, and 2/3 where two numbers have one word.
    assert episodes.returns.mean() > 0.95
    assert metrics["rollout/episode_return/speaker"] == metrics["rollout/episode_return/listener"] > 0.6
