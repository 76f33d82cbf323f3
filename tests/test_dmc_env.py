"""The DMC script on the real simulator: what its environment promises, and a whole run."""

import numpy as np
import pytest
import torch

import sac_mooss_dmc as dmc
from helpers import flags
from helpers.runs import rows

CPU = torch.device("cpu")


def make_env(**changes):
    args = dict(env_id="cartpole-swingup", render_size=32, image_size=28, device="cpu")
    args = dmc.resolve_args(dmc.Args(**{**args, **changes}))
    return dmc.make_env(args, CPU)


def play(env, seed):
    """An episode of waving about: its observations, rewards, and the flags of its last step."""
    obs, _ = env.reset(seed=seed)
    observations = [obs]
    rewards = []
    done = False
    while not done:
        action = np.array([np.sin(len(rewards))], np.float32)
        obs, reward, terminated, truncated, _ = env.step(action)
        observations.append(obs)
        rewards.append(reward)
        done = terminated or truncated
    return observations, rewards, (terminated, truncated)


@pytest.fixture(scope="module")
def episode():
    return play(make_env(), seed=5)


def test_observations_are_stacks_of_frames_in_bytes(episode):
    observations, _, _ = episode
    space = make_env().observation_space
    assert space.shape == (3, 3, 32, 32)
    assert all(obs in space for obs in observations)
    first = observations[0]
    assert (first == first[:1]).all()  # at a reset the first frame is repeated
    assert len(np.unique(first)) > 10  # and shows something
    moved = 0
    for previous, obs in zip(observations, observations[1:]):
        assert (obs[:-1] == previous[1:]).all()
        moved += (obs[-1] != previous[-1]).any()
    assert moved > 115  # of 125 steps: where it turns, the cart may rest for one


def test_an_episode_ends_by_its_time_limit_as_a_truncation(episode):
    _, rewards, (terminated, truncated) = episode
    assert len(rewards) == 125  # 1000 env steps, eight at a time
    assert truncated and not terminated


def test_the_same_seed_gives_the_same_episode_and_another_seed_another(episode):
    observations, rewards, _ = episode
    again, same_rewards, _ = play(make_env(), seed=5)
    assert (np.array(observations) == np.array(again)).all()
    assert rewards == same_rewards
    other, _ = make_env().reset(seed=6)
    assert (other != observations[0]).any()


def test_rewards_of_repeated_actions_are_summed(episode):
    _, rewards, _ = episode
    assert max(rewards) > 1  # eight rewards of at most 1
    single = make_env(action_repeat=1)
    single.reset(seed=5)
    action = np.array([np.sin(0)], np.float32)
    assert sum(single.step(action)[1] for _ in range(8)) == pytest.approx(rewards[0])


def test_actions_are_scaled_from_minus_one_to_one():
    env = make_env(env_id="quadruped-walk", action_repeat=1)
    assert (env.action_space.low == -1).all() and (env.action_space.high == 1).all()
    env.reset(seed=0)
    limits = env.unwrapped._env.action_spec()
    assert set(limits.maximum) != {1.0}  # otherwise nothing would be scaled
    for action, limit in ((1, limits.maximum), (-1, limits.minimum)):
        env.step(np.full(12, action, np.float32))
        assert env.unwrapped.physics.data.ctrl == pytest.approx(limit)


def test_end_to_end_on_a_real_task(tmp_path):
    words = (
        "--env-id ball_in_cup-catch --seed 1 --total-timesteps 1200 --init-steps 280 "
        "--batch-size 8 --aux-batch-size 2 --num-filters 4 --hidden-dim 32 --render-size 32 "
        "--image-size 28 --eval-every 2000 --eval-episodes 1 --buffer-size 500 --log-every 5 "
        "--device cpu").split()
    done = flags.script(dmc, *words, cwd=tmp_path, MUJOCO_GL="")
    assert done.returncode == 0, done.stderr
    assert "MUJOCO_GL=" in done.stdout
    path = tmp_path / "runs" / "ball_in_cup-catch__mooss__s1"
    evaluations = rows(path / "eval.csv")
    assert [(row["step"], row["update"], row["length"]) for row in evaluations] == [
        ("0", "0", "250"), ("1200", "20", "250")]
    train = rows(path / "train.csv")
    assert [row["update"] for row in train] == ["1", "6", "11", "16"]
    assert all(np.isfinite(float(row["losses/mooss"])) for row in train)

    again = flags.script(dmc, *words, cwd=tmp_path)
    assert again.returncode == 2
    assert "exists" in again.stderr
