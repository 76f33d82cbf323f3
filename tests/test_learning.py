"""The agents learn: a pixel task with a known optimum, and the contrastive task on random-policy data.

The task is the dot of conftest.py: an episode starts with a bright square anywhere on a line, and the reward is
highest with the square in the middle. Without learning it is not solved, because the square starts on either side.
"""

import csv

import numpy as np
import pytest
import torch

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import TINY, TINY_ATARI, DotEnv, make_dot_env, make_dot_game

DMC = dict(TINY, total_timesteps=1600, init_steps=200, num_filters=8, hidden_dim=64, state_dim=16, batch_size=48,
           aux_batch_size=6, buffer_size=2000, action_repeat=1, aux_warmup_steps=200, eval_episodes=20,
           eval_every=10_000, checkpoint_every=0, preset="laptop")
ATARI = dict(TINY_ATARI, total_timesteps=1500, min_replay=300, channels=(8, 16, 16), hidden_units=64, state_dim=16,
             num_atoms=21, batch_size=16, buffer_size=2000, learning_rate=1e-3, crop_pad=1, target_ema=0.9,
             eval_episodes=20, checkpoint_every=0, preset="laptop")


def final_return(module, make_env, flags, root, monkeypatch):
    """Mean return of the last evaluation of a run through `main(args)`."""
    monkeypatch.setattr(module, "make_env", make_env)
    assert module.main(module.Args(**flags, run_root=str(root))) == 0
    with open(next(root.glob("*/eval.csv"))) as file:
        rows = list(csv.DictReader(file))
    return float(np.mean([float(row["return"]) for row in rows if row["step"] == rows[-1]["step"]]))


def test_sac_with_mooss_solves_the_dot(tmp_path, monkeypatch):
    """Best possible: the square moves 0.2 a step to the middle and stays, 15 steps long."""
    starts = np.linspace(-1, 1, 1001)
    best = np.mean([sum(1 - max(0.0, abs(start) - 0.2 * t) for t in range(1, 16)) for start in starts])
    learned = final_return(dmc, make_dot_env, DMC, tmp_path / "learned", monkeypatch)
    frozen = final_return(dmc, make_dot_env, {**DMC, "rl_lr": 0.0, "aux_lr": 0.0, "alpha_lr": 0.0,
                                              "total_timesteps": 300}, tmp_path / "frozen", monkeypatch)
    print(f"SAC + MOOSS {learned:.2f}, without learning {frozen:.2f}, best {best:.2f}")
    assert learned > 0.93 * best > frozen + 2


def test_rainbow_with_mooss_solves_the_dot(tmp_path, monkeypatch):
    """Best possible: the square reaches the middle and stays; each of 33 steps there scores 2.5."""
    starts = np.linspace(-1, 1, 1001)
    best = 2.5 * np.mean([sum(max(0.0, abs(start) - 0.2 * t) < 0.2 for t in range(1, 34)) for start in starts])
    learned = final_return(atari, make_dot_game, ATARI, tmp_path / "learned", monkeypatch)
    frozen = final_return(atari, make_dot_game, {**ATARI, "learning_rate": 0.0, "total_timesteps": 350},
                          tmp_path / "frozen", monkeypatch)
    print(f"Rainbow + MOOSS {learned:.2f}, without learning {frozen:.2f}, best {best:.2f}")
    assert learned > 0.75 * best > 2 * frozen


class RollingDot(DotEnv):
    """The dot rolls to and fro by itself; actions only disturb it. Near in time is then near in place."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.speed = self.np_random.choice([-0.15, 0.15])
        return self.frame(), {}

    def step(self, action):
        self.place += self.speed + 0.03 * action
        if abs(self.place) > 1:
            self.place, self.speed = float(np.sign(self.place)), -self.speed
        return self.frame()


VARIANTS = pytest.mark.parametrize("inputs,mask_type", [
    ("none", "walk"), ("s", "walk"), ("sa", "walk"), ("sar", "walk"), ("sa", "cube")])


def rank_accuracy_rises(step, agent):
    """From chance to a clear majority within 300 auxiliary updates."""
    accuracy = []
    for update in range(300):
        step(update)
        accuracy.append(float(agent.metrics["mooss/rank_accuracy"]))
    before, after = np.mean(accuracy[:5]), np.mean(accuracy[-30:])
    print(f"{agent.args.decoder_inputs} {agent.args.mask_type}: rank accuracy {before:.2f} -> {after:.2f}")
    assert 0.4 < before < 0.6 and after > 0.65


@VARIANTS
def test_mooss_on_dmc_learns_to_rank_by_time(inputs, mask_type):
    args = dmc.resolve_args(dmc.Args(**{**DMC, "decoder_inputs": inputs, "mask_type": mask_type, "render_size": 29,
                                        "image_size": 28, "aux_lr": 3e-3, "aux_warmup_steps": 50,
                                        "aux_batch_size": 12}))
    torch.manual_seed(0)
    agent = dmc.Agent(args, (3, 3, 29, 29), 1, torch.device("cpu"))
    replay = dmc.SequenceReplay(2000, (3, 29, 29), 1, 3, 0, torch.device("cpu"))
    env, rng = RollingDot(29), np.random.default_rng(0)
    for episode in range(30):
        replay.add(env.reset(seed=episode)[0])
        for action in rng.uniform(-1, 1, (40, 1)).astype(np.float32):
            replay.add(env.step(action[0]), action, float(rng.random()), False)

    def step(update):
        agent.mooss_step(replay, update, log=True)
        dmc.ema_update(agent.key_encoder, agent.critic.encoder, args.target_ema)

    rank_accuracy_rises(step, agent)


@VARIANTS
def test_mooss_on_atari_learns_to_rank_by_time(inputs, mask_type):
    args = atari.resolve_args(atari.Args(**{**ATARI, "decoder_inputs": inputs, "mask_type": mask_type}))
    torch.manual_seed(0)
    agent = atari.Agent(args, (4, 1, 28, 28), 3, torch.device("cpu"))
    replay = atari.SequenceReplay(2000, (1, 28, 28), 4, args.seq_len, args.multi_step, torch.device("cpu"))
    env, rng = RollingDot(28), np.random.default_rng(0)
    for episode in range(30):
        frame, _ = env.reset(seed=episode)
        for time, action in enumerate(rng.integers(3, size=40)):
            replay.add(frame[:1], action, float(rng.random()), time == 39)
            frame = env.step(int(action) - 1)
    rank_accuracy_rises(lambda update: agent.update(replay, update, 0.5, log=True), agent)
