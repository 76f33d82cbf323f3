"""Tiny configurations, agents and filled replays of both scripts, and environments of their own.

A run of these sizes takes a second, needs no simulator, and still goes through every line of an
update.
"""

import gymnasium as gym
import numpy as np
import torch

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc

CPU = torch.device("cpu")

# ----------------------------------------------------------------------------------------- the dot
DMC_FLAGS = dict(
    env_id="cartpole-swingup", render_size=24, image_size=21, num_filters=4, hidden_dim=16,
    state_dim=8, decoder_heads=2, head_dim=8, batch_size=6, aux_batch_size=3, seq_len=8,
    cube_len=4, temporal_window=3, buffer_size=300, init_steps=20, action_repeat=2,
    eval_episodes=2, device="cpu")
ATARI_FLAGS = dict(
    env_id="Breakout", image_size=28, cube_size=7, channels=(4, 6, 6), filter_sizes=(4, 3, 2),
    strides=(3, 2, 1), hidden_units=12, num_atoms=11, state_dim=8, decoder_heads=2, head_dim=8,
    batch_size=4, seq_len=8, multi_step=3, temporal_window=3, buffer_size=200, min_replay=30,
    eval_episodes=2, device="cpu", mask_ratio=0.5)


def dot_frame(place, channels, size):
    """A bright square on a dark ground, at a place in [-1, 1] on the middle line: (C, H, W)."""
    frame = np.full((channels, size, size), 30, np.uint8)
    centre = int((place + 1) / 2 * (size - 1))
    half = size // 8
    middle = slice(size // 2 - half, size // 2 + half)
    frame[:, middle, max(0, centre - half):centre + half] = 220
    return frame


class DotEnv(gym.Env):
    """The action moves the dot, and the reward is high while it is near the middle."""

    def __init__(self, size, length=15, terminates=False):
        self.size = size
        self.length = length
        self.terminates = terminates
        self.observation_space = gym.spaces.Box(0, 255, (3, size, size), np.uint8)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.place = self.np_random.uniform(-1, 1)
        return dot_frame(self.place, 3, self.size), {}

    def step(self, action):
        self.time += 1
        self.place = float(np.clip(self.place + 0.2 * action[0], -1, 1))
        terminated = self.terminates and abs(self.place) > 0.95
        truncated = self.time >= self.length
        return dot_frame(self.place, 3, self.size), 1 - abs(self.place), terminated, truncated, {}

    def render(self):
        return dot_frame(self.place, 3, self.size).transpose(1, 2, 0)


class DotGame(gym.Env):
    """The dot with three actions and three lives of `life` steps each.

    In training a lost life ends the episode and a reset without a seed goes on with the game, as
    in the Atari script.
    """

    def __init__(self, size, training, life=11):
        self.size = size
        self.training = training
        self.life = life
        self.observation_space = gym.spaces.Box(0, 255, (1, size, size), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            super().reset(seed=seed)
            self.time = 0
            self.place = self.np_random.uniform(-1, 1)
        return dot_frame(self.place, 1, self.size), {}

    def step(self, action):
        self.time += 1
        self.place = float(np.clip(self.place + 0.2 * (int(action) - 1), -1, 1))
        game_over = self.time >= 3 * self.life
        life_over = self.time % self.life == 0
        ended = game_over or (self.training and life_over)
        reward = 2.5 * (abs(self.place) < 0.2)
        return dot_frame(self.place, 1, self.size), reward, ended, False, {"game_over": game_over}

    def render(self):
        return dot_frame(self.place, 3, self.size).transpose(1, 2, 0)


# --------------------------------------------------------------------------------------------- DMC
def dmc_args(**changes):
    return dmc.resolve_args(dmc.Args(**{**DMC_FLAGS, **changes}))


def make_dot_env(args, device):
    """What stands in the place of the DMC script's `make_env`."""
    env = DotEnv(args.render_size)
    return gym.wrappers.FrameStackObservation(env, args.frame_stack, padding_type="reset")


def dmc_replay(args, steps=120, action_dim=1, seed=0):
    """A replay with some random episodes of the dot, some of them with a real termination."""
    rng = np.random.default_rng(seed)
    frame_shape = (3, args.render_size, args.render_size)
    replay = dmc.SequenceReplay(args.buffer_size, frame_shape, action_dim, args.frame_stack, CPU)
    env = DotEnv(args.render_size, terminates=True)
    done = True
    for _ in range(steps):
        if done:
            frame, _ = env.reset(seed=int(rng.integers(1000)))
            replay.begin_episode(frame)
        action = rng.uniform(-1, 1, action_dim).astype(np.float32)
        frame, reward, terminated, truncated, _ = env.step(action)
        replay.add(action, reward, terminated, frame)
        done = terminated or truncated
    return replay


def dmc_agent(args, seed=0, action_dim=1):
    torch.manual_seed(seed)
    obs_shape = (args.frame_stack, 3, args.render_size, args.render_size)
    return dmc.Agent(args, obs_shape, action_dim, CPU)


# ------------------------------------------------------------------------------------------- Atari
def atari_args(**changes):
    return atari.resolve_args(atari.Args(**{**ATARI_FLAGS, **changes}))


def make_dot_game(args, device, training=True):
    """What stands in the place of the Atari script's `make_env`."""
    game = DotGame(args.image_size, training)
    return gym.wrappers.FrameStackObservation(game, args.frame_stack, padding_type="zero")


def atari_replay(args, steps=120, seed=0):
    """A replay with some random games of the dot."""
    rng = np.random.default_rng(seed)
    frame_shape = (1, args.image_size, args.image_size)
    replay = atari.SequenceReplay(
        args.buffer_size, frame_shape, args.frame_stack, args.seq_len, args.multi_step, CPU)
    game = DotGame(args.image_size, training=True)
    frame, _ = game.reset(seed=seed)
    replay.begin_episode(frame)
    for _ in range(steps):
        action = int(rng.integers(3))
        frame, reward, ended, _, info = game.step(action)
        replay.add(action, min(1.0, reward), ended, frame)
        if ended:
            frame, _ = game.reset(seed=int(rng.integers(999)) if info["game_over"] else None)
            replay.begin_episode(frame)
    return replay


def atari_agent(args, seed=0):
    torch.manual_seed(seed)
    obs_shape = (args.frame_stack, 1, args.image_size, args.image_size)
    return atari.Agent(args, obs_shape, 3, CPU)
