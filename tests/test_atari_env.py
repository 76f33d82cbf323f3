"""Real Atari games: what the agent sees, and where games and lives end."""

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch

import rainbow_mooss_atari as atari

gym.register_envs(ale_py)
CPU = torch.device("cpu")


def plain_env(game, seed):
    """Gymnasium's own preprocessing, and its first frame."""
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    obs, _ = env.reset(seed=seed)
    return env, obs


@pytest.mark.parametrize("game", ["Breakout", "Pong", "MsPacman"])
def test_evaluation_agrees_with_gymnasiums_preprocessing(game):
    """Frames, rewards and game ends over whole games, through lost lives."""
    args = atari.resolve_args(atari.Args(env_id=game))
    ours = atari.make_env(args, CPU, training=False)
    theirs, expected = plain_env(game, 3)
    obs, _ = ours.reset(seed=3)
    assert obs.shape == ours.observation_space.shape == (4, 1, 84, 84)
    assert obs.dtype == ours.observation_space.dtype == np.uint8
    assert ours.action_space.n == len(theirs.unwrapped.ale.getMinimalActionSet())
    assert (obs[-1, 0] == expected).all()
    assert (obs[:-1] == 0).all()
    rng = np.random.default_rng(0)
    steps = 0
    done = False
    while not done and steps < 1500:
        before = obs
        action = int(rng.integers(ours.action_space.n))
        obs, reward, terminated, truncated, _ = ours.step(action)
        expected, their_reward, their_end, their_cut, _ = theirs.step(action)
        assert (obs[-1, 0] == expected).all()
        assert (obs[:-1] == before[1:]).all()
        assert reward == their_reward
        assert (terminated, truncated) == (their_end, their_cut)
        done = terminated or truncated
        steps += 1
    assert steps > 100


def test_training_shows_all_five_lives_of_one_game():
    """Breakout: four lost lives end episodes while the game goes on, the fifth ends the game.

    What the agent sees agrees with gymnasium's preprocessing all the way, given the no-op that
    follows a lost life.
    """
    args = atari.resolve_args(atari.Args(env_id="Breakout"))
    ours = atari.make_env(args, CPU)
    theirs, expected = plain_env("Breakout", 7)
    obs, _ = ours.reset(seed=7)
    rng = np.random.default_rng(1)
    lives = set()
    frame_numbers = []
    lost = 0
    game_over = False
    for _ in range(20_000):
        lives.add(ours.unwrapped.ale.lives())
        frame_numbers.append(ours.unwrapped.ale.getEpisodeFrameNumber())
        action = int(rng.integers(4))
        obs, reward, terminated, truncated, info = ours.step(action)
        expected, their_reward, their_end, _, _ = theirs.step(action)
        assert (obs[-1, 0] == expected).all()
        assert reward == their_reward
        assert not truncated
        game_over = info["game_over"]
        assert game_over == their_end
        if game_over:
            break
        if terminated:
            lost += 1
            obs, _ = ours.reset()
            expected, *_ = theirs.step(0)
            assert (obs[-1, 0] == expected).all()
            assert (obs[:-1] == 0).all()  # no frame of the earlier life
    assert game_over and terminated
    assert lost == 4
    assert lives == {1, 2, 3, 4, 5}
    assert frame_numbers == sorted(frame_numbers)  # never restarted


class ScriptedGame(gym.Env):
    """A game in which the lives after each step, and whether it ends, are written down."""

    observation_space = gym.spaces.Discrete(1000)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, lives, game_over=(), cut=()):
        self.lives_after = lives
        self.game_over = game_over
        self.cut = cut
        self.resets = 0
        self.actions = []

    @property
    def ale(self):
        return self

    def lives(self):
        return self.lives_after[self.time]

    def reset(self, *, seed=None, options=None):
        self.time = 0
        self.resets += 1
        return 100 * self.resets, {}

    def step(self, action):
        self.time += 1
        self.actions.append(action)
        over = self.time in self.game_over
        return 100 * self.resets + self.time, 0.0, over, self.time in self.cut, {}


def test_a_life_lost_during_the_no_op_ends_no_second_episode():
    game = ScriptedGame(lives=(5, 5, 4, 3, 3))
    env = atari.LifeEpisodes(game)
    env.reset(seed=0)
    assert [env.step(1)[2] for _ in range(2)] == [False, True]
    obs, _ = env.reset()  # the no-op, in which another life goes
    assert obs == 103
    assert not env.step(1)[2]
    assert game.actions == [1, 1, 0, 1]
    assert game.resets == 1


@pytest.mark.parametrize("ends", [dict(game_over=(3,)), dict(cut=(3,))])
def test_a_game_that_ends_during_the_no_op_begins_anew(ends):
    game = ScriptedGame(lives=(2, 2, 1, 1), **ends)
    env = atari.LifeEpisodes(game)
    env.reset(seed=0)
    assert [env.step(1)[2] for _ in range(2)] == [False, True]
    obs, _ = env.reset()
    assert obs == 200
    assert game.resets == 2
    assert not env.step(1)[2]


def test_the_last_life_ends_the_game_once():
    """Some games show no life left a while before they are over."""
    env = atari.LifeEpisodes(ScriptedGame(lives=(2, 1, 0, 0), game_over=(3,)))
    env.reset(seed=0)
    _, _, terminated, _, info = env.step(1)
    assert terminated and not info["game_over"]
    env = atari.LifeEpisodes(ScriptedGame(lives=(1, 1, 0, 0), game_over=(3,)))
    env.reset(seed=0)
    found = [env.step(1) for _ in range(3)]
    assert [step[2] for step in found] == [False, False, True]
    assert [step[4]["game_over"] for step in found] == [False, False, True]


def test_a_reset_with_a_seed_begins_a_new_game():
    game = ScriptedGame(lives=(5, 4, 4))
    env = atari.LifeEpisodes(game)
    env.reset(seed=0)
    assert env.step(1)[2]
    obs, _ = env.reset(seed=1)
    assert obs == 200
    assert game.actions == [1]


@pytest.mark.parametrize("training", [True, False])
def test_the_frame_limit_ends_a_game(training):
    """In training it counts as terminal; an evaluation ends there in any way."""
    args = atari.resolve_args(atari.Args(env_id="Pong", max_frames=200))
    env = atari.make_env(args, CPU, training)
    env.reset(seed=0)
    frames = 0
    terminated = truncated = False
    while frames < 400 and not (terminated or truncated):
        _, _, terminated, truncated, info = env.step(0)
        frames += args.action_repeat
    # The no-ops at the start count too.
    assert 200 - args.noop_max <= frames < 200 + args.action_repeat
    if training:
        assert terminated and not truncated
        assert info["game_over"]
    else:
        assert truncated


def test_same_seed_same_game_another_seed_another():
    """The seed decides the number of no-ops, and with them the game."""
    args = atari.resolve_args(atari.Args(env_id="Breakout"))
    env = atari.make_env(args, CPU)
    games = []
    for seed in (0, 0, *range(1, 6)):
        obs, _ = env.reset(seed=seed)
        frames = [obs[-1].copy()]
        for action in (1, 2, 3) * 5:
            frames.append(env.step(action)[0][-1].copy())
        games.append(np.stack(frames))
    assert (games[0] == games[1]).all()
    assert any((games[0] != game).any() for game in games[2:])


def test_colour_frames_work():
    args = atari.resolve_args(atari.Args(env_id="Pong", gray_scale=False, image_size=42))
    env = atari.make_env(args, CPU)
    obs, _ = env.reset(seed=0)
    assert obs.shape == env.observation_space.shape == (4, 3, 42, 42)
    red, green, blue = obs[-1].astype(int)
    assert (red != green).any() and (green != blue).any()


def test_replay_rebuilds_the_stacks_the_agent_saw():
    """Through lost lives of a real game: stacks from single frames equal the environment's."""
    args = atari.resolve_args(atari.Args(env_id="Breakout", buffer_size=1000))
    env = atari.make_env(args, CPU)
    replay = atari.SequenceReplay(1000, (1, 84, 84), 4, 16, 10, CPU)
    rng = np.random.default_rng(0)
    obs, _ = env.reset(seed=0)
    replay.begin_episode(obs[-1])
    seen = [obs]
    ends = 0
    for _ in range(400):
        action = int(rng.integers(4))
        obs, reward, terminated, _, info = env.step(action)
        replay.add(action, reward, terminated, obs[-1])
        seen.append(obs)
        if terminated:
            ends += 1
            obs, _ = env.reset(seed=5 if info["game_over"] else None)
            replay.begin_episode(obs[-1])
            seen.append(obs)
    assert ends > 3
    frames = replay.frames_of(torch.arange(len(seen)), 1).numpy()
    for row, stack in enumerate(seen):
        assert (frames[row] == stack).all(), row
