"""What the tests share: a tiny configuration and a pixel task of their own that needs no simulator."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import gymnasium as gym
import numpy as np
import pytest
import torch

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc

TINY = dict(env_id="cartpole-swingup", render_size=24, image_size=21, num_filters=4, hidden_dim=16, state_dim=8,
            decoder_heads=2, head_dim=8, batch_size=6, aux_batch_size=3, seq_len=8, cube_len=4, temporal_window=3,
            buffer_size=300, init_steps=20, action_repeat=2, eval_episodes=2, device="cpu")


def tiny_args(**changes):
    return dmc.resolve_args(dmc.Args(**{**TINY, **changes}))


class DotEnv(gym.Env):
    """A bright square on a line; the action moves it, and the reward is high while it is near the middle."""

    def __init__(self, size, length=15, terminates=False):
        self.size, self.length, self.terminates = size, length, terminates
        self.observation_space = gym.spaces.Box(0, 255, (3, size, size), np.uint8)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.place = 0, self.np_random.uniform(-1, 1)
        return self.frame(), {}

    def step(self, action):
        self.time += 1
        self.place = float(np.clip(self.place + 0.2 * action[0], -1, 1))
        terminated = self.terminates and abs(self.place) > 0.95
        return self.frame(), 1 - abs(self.place), terminated, self.time >= self.length, {}

    def frame(self):
        frame = np.full((3, self.size, self.size), 30, np.uint8)
        centre, half = int((self.place + 1) / 2 * (self.size - 1)), self.size // 8
        frame[:, self.size // 2 - half:self.size // 2 + half, max(0, centre - half):centre + half] = 220
        return frame


def make_dot_env(args, device):
    env = DotEnv(args.render_size)
    return gym.wrappers.FrameStackObservation(env, args.frame_stack, padding_type="reset")


@pytest.fixture
def dot_env(monkeypatch):
    """The DMC script with its environment replaced."""
    monkeypatch.setattr(dmc, "make_env", make_dot_env)


def filled_replay(args, steps=120, action_dim=1, seed=0):
    """A replay with a few random episodes of the dot task, one of them ending in a real termination."""
    rng = np.random.default_rng(seed)
    replay = dmc.SequenceReplay(args.buffer_size, (3, args.render_size, args.render_size), action_dim,
                                args.frame_stack, seed, torch.device("cpu"))
    env, done = DotEnv(args.render_size, terminates=True), True
    for _ in range(steps):
        if done:
            frame, _ = env.reset(seed=int(rng.integers(1000)))
            replay.add(frame)
        action = rng.uniform(-1, 1, action_dim).astype(np.float32)
        frame, reward, terminated, truncated, _ = env.step(action)
        replay.add(frame, action, reward, terminated)
        done = terminated or truncated
    return replay


def tiny_agent(args, seed=0, action_dim=1):
    torch.manual_seed(seed)
    return dmc.Agent(args, (args.frame_stack, 3, args.render_size, args.render_size), action_dim, torch.device("cpu"))


# ---------------------------------------------------------------------------------------------- Atari
TINY_ATARI = dict(env_id="Breakout", image_size=28, cube_size=7, channels=(4, 6, 6), filter_sizes=(4, 3, 2),
                  strides=(3, 2, 1), hidden_units=12, num_atoms=11, state_dim=8, decoder_heads=2, head_dim=8,
                  batch_size=4, seq_len=8, multi_step=3, temporal_window=3, buffer_size=200, min_replay=30,
                  eval_episodes=2, device="cpu", mask_ratio=0.5)


def tiny_atari_args(**changes):
    return atari.resolve_args(atari.Args(**{**TINY_ATARI, **changes}))


class DotGame(gym.Env):
    """The dot with three actions and lives: a life lasts `life` steps, a game three lives. In training a lost life
    ends the episode and a reset without a seed goes on with the game, as in the Atari script."""

    def __init__(self, size, training, life=11):
        self.size, self.training, self.life = size, training, life
        self.observation_space = gym.spaces.Box(0, 255, (1, size, size), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            super().reset(seed=seed)
            self.time, self.place = 0, self.np_random.uniform(-1, 1)
        return self.frame(), {}

    def step(self, action):
        self.time += 1
        self.place = float(np.clip(self.place + 0.2 * (int(action) - 1), -1, 1))
        game_over, life_over = self.time >= 3 * self.life, self.time % self.life == 0
        ended = game_over or (self.training and life_over)
        return self.frame(), 2.5 * (abs(self.place) < 0.2), ended, False, {"game_over": game_over}

    def frame(self):
        frame = np.full((1, self.size, self.size), 30, np.uint8)
        centre, half = int((self.place + 1) / 2 * (self.size - 1)), self.size // 8
        frame[:, self.size // 2 - half:self.size // 2 + half, max(0, centre - half):centre + half] = 220
        return frame


def make_dot_game(args, device, training=True):
    game = DotGame(args.image_size, training)
    return gym.wrappers.FrameStackObservation(game, args.frame_stack, padding_type="zero")


@pytest.fixture
def dot_game(monkeypatch):
    """The Atari script with its environment replaced."""
    monkeypatch.setattr(atari, "make_env", make_dot_game)


def filled_atari_replay(args, steps=120, seed=0):
    rng = np.random.default_rng(seed)
    replay = atari.SequenceReplay(args.buffer_size, (1, args.image_size, args.image_size), args.frame_stack,
                                  args.seq_len, args.multi_step, torch.device("cpu"))
    env = DotGame(args.image_size, training=True)
    frame, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = int(rng.integers(3))
        following, reward, ended, _, info = env.step(action)
        replay.add(frame, action, min(1.0, reward), ended)
        frame = following if not ended else env.reset(seed=int(rng.integers(999)) if info["game_over"] else None)[0]
    return replay


def tiny_atari_agent(args, seed=0):
    torch.manual_seed(seed)
    return atari.Agent(args, (args.frame_stack, 1, args.image_size, args.image_size), 3, torch.device("cpu"))
