"""The agents learn: a pixel task with a known optimum, and the contrastive task on random data.

The task is the dot of `helpers/tiny.py`: an episode starts with a bright square anywhere on a line,
and the reward is highest with the square in the middle. Without learning it is not solved, because
the square starts on either side.
"""

import csv

import numpy as np
import pytest

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers import tiny

DMC = dict(
    tiny.DMC_FLAGS, total_timesteps=1600, init_steps=200, num_filters=8, hidden_dim=64,
    state_dim=16, batch_size=48, aux_batch_size=6, buffer_size=2000, action_repeat=1,
    aux_warmup_steps=200, eval_episodes=20, eval_every=10_000, checkpoint_every=0, preset="laptop")
ATARI = dict(
    tiny.ATARI_FLAGS, total_timesteps=1500, min_replay=300, channels=(8, 16, 16), hidden_units=64,
    state_dim=16, num_atoms=21, batch_size=16, buffer_size=2000, learning_rate=1e-3, crop_pad=1,
    target_ema=0.9, eval_episodes=20, checkpoint_every=0, preset="laptop")

STARTS = np.linspace(-1, 1, 1001)


def final_return(module, flags, root):
    """Mean return of the last evaluation of a run through `main(args)`."""
    assert module.main(module.Args(**flags, run_root=str(root))) == 0
    with open(next(root.glob("*/eval.csv")), newline="") as file:
        rows = list(csv.DictReader(file))
    last = [float(row["return"]) for row in rows if row["step"] == rows[-1]["step"]]
    assert len(last) == flags["eval_episodes"]
    return float(np.mean(last))


def test_sac_with_mooss_solves_the_dot(tmp_path, dot_env):
    """Best possible: the square moves 0.2 a step to the middle and stays, 15 steps long."""
    steps = np.arange(1, 16)
    distance = np.maximum(0, np.abs(STARTS)[:, None] - 0.2 * steps)
    best = (1 - distance).sum(1).mean()
    learned = final_return(dmc, DMC, tmp_path / "learned")
    frozen_flags = dict(DMC, rl_lr=0.0, aux_lr=0.0, alpha_lr=0.0, total_timesteps=300)
    frozen = final_return(dmc, frozen_flags, tmp_path / "frozen")
    print(f"SAC + MOOSS {learned:.2f}, without learning {frozen:.2f}, best {best:.2f}")
    assert learned > 0.93 * best > frozen + 2


def test_rainbow_with_mooss_solves_the_dot(tmp_path, dot_game):
    """Best possible: the square reaches the middle and stays; each of 33 steps there scores 2.5."""
    steps = np.arange(1, 34)
    distance = np.maximum(0, np.abs(STARTS)[:, None] - 0.2 * steps)
    best = 2.5 * (distance < 0.2).sum(1).mean()
    learned = final_return(atari, ATARI, tmp_path / "learned")
    frozen_flags = dict(ATARI, learning_rate=0.0, total_timesteps=350)
    frozen = final_return(atari, frozen_flags, tmp_path / "frozen")
    print(f"Rainbow + MOOSS {learned:.2f}, without learning {frozen:.2f}, best {best:.2f}")
    assert learned > 0.75 * best > 2 * frozen


# ----------------------------------------------------------------------------------------- ranking
class RollingDot:
    """The dot rolls to and fro by itself; actions only disturb it.

    What is near in time is then near in place.
    """

    def __init__(self, size, channels, seed):
        dice = np.random.default_rng(seed)
        self.size = size
        self.channels = channels
        self.place = dice.uniform(-1, 1)
        self.speed = dice.choice([-0.15, 0.15])

    def step(self, action):
        self.place += self.speed + 0.03 * action
        if abs(self.place) > 1:
            self.place = float(np.sign(self.place))
            self.speed = -self.speed

    def frame(self):
        return tiny.dot_frame(self.place, self.channels, self.size)


VARIANTS = pytest.mark.parametrize("inputs,mask_type", [
    ("none", "walk"), ("s", "walk"), ("sa", "walk"), ("sar", "walk"), ("sa", "cube")])


def rank_accuracy_rises(step, agent):
    """From chance to a clear majority within 400 auxiliary updates.

    Some variants stay at chance for the first 150; from 350 on, the accuracy hardly rises.
    """
    accuracy = []
    for index in range(400):
        step(index)
        accuracy.append(float(agent.metrics["mooss/rank_accuracy"]))
    before = np.mean(accuracy[:5])
    after = np.mean(accuracy[-30:])
    args = agent.args
    print(f"{args.decoder_inputs} {args.mask_type}: rank accuracy {before:.2f} -> {after:.2f}")
    assert 0.4 < before < 0.6
    assert after > 0.65


@VARIANTS
def test_mooss_on_dmc_learns_to_rank_by_time(inputs, mask_type):
    args = dmc.resolve_args(dmc.Args(**dict(
        DMC, decoder_inputs=inputs, mask_type=mask_type, render_size=29, image_size=28,
        aux_lr=3e-3, aux_warmup_steps=50, aux_batch_size=12)))
    agent = tiny.dmc_agent(args)
    replay = dmc.SequenceReplay(args.buffer_size, (3, 29, 29), 1, args.frame_stack, tiny.CPU)
    dice = np.random.default_rng(0)
    for episode in range(30):
        dot = RollingDot(29, 3, seed=episode)
        replay.begin_episode(dot.frame())
        for action in dice.uniform(-1, 1, (40, 1)).astype(np.float32):
            dot.step(action[0])
            replay.add(action, float(dice.random()), False, dot.frame())

    def step(index):
        agent.mooss_step(replay, index, log=True)
        dmc.ema_update(agent.key_encoder, agent.critic.encoder, args.target_ema)

    rank_accuracy_rises(step, agent)


@VARIANTS
def test_mooss_on_atari_learns_to_rank_by_time(inputs, mask_type):
    args = atari.resolve_args(atari.Args(**dict(
        ATARI, decoder_inputs=inputs, mask_type=mask_type)))
    agent = tiny.atari_agent(args)
    replay = atari.SequenceReplay(
        args.buffer_size, (1, 28, 28), args.frame_stack, args.seq_len, args.multi_step, tiny.CPU)
    dice = np.random.default_rng(0)
    for episode in range(30):
        dot = RollingDot(28, 1, seed=episode)
        replay.begin_episode(dot.frame())
        for time, action in enumerate(dice.integers(3, size=40)):
            dot.step(int(action) - 1)
            replay.add(int(action), float(dice.random()), time == 39, dot.frame())
    rank_accuracy_rises(lambda index: agent.update(replay, index, 0.5, log=True), agent)
