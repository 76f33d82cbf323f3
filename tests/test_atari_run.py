"""Atari: real games, flags, and whole runs through `main(args)` and the command line."""

import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
from conftest import ROOT, TINY_ATARI, DotGame, make_dot_game, tiny_atari_args
from test_run import assert_same_run, rows

gym.register_envs(ale_py)
GAMES = [game for game in json.loads((ROOT / "benchmark" / "paper_scores.json").read_text())["atari100k"]
         if not game.startswith("_")]
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------- flags
PAPER_TABLE = dict(
    gray_scale=True, frame_stack=4, image_size=84, augmentations=("crop", "intensity"), action_repeat=4,
    total_timesteps=100_000, max_frames=108_000, buffer_size=100_000, min_replay=2000, batch_size=32, optimizer="adam",
    learning_rate=0.0001, beta1=0.9, beta2=0.999, adam_eps=0.00015, max_grad_norm=10, distributional=True,
    dueling=True, num_atoms=51, v_min=-10, v_max=10, gamma=0.99, reward_clip=1, priority_exponent=0.5,
    priority_correction=(0.4, 1.0), noisy=True, noisy_std=0.5, eval_episodes=100, replay_period=1, updates_per_step=2,
    multi_step=10,
    channels=(32, 64, 64), filter_sizes=(8, 4, 3), strides=(4, 2, 1), hidden_units=256, target_update_period=1,
    target_ema=0, aux_weight=0.1, seq_len=16, cube_size=7, cube_len=4, tau0=0.07, tau_step=0.075, decoder_depth=2,
    state_dim=64, aux_is_weights=True, aux_adam_eps=0.00015, eval_epsilon=0.001)


@pytest.mark.parametrize("game", GAMES)
def test_paper_preset_equals_the_papers_table(game):
    args = atari.resolve_args(atari.Args(env_id=game))
    assert {name: getattr(args, name) for name in PAPER_TABLE} == PAPER_TABLE
    fast = game in ("Gopher", "Kangaroo", "MsPacman", "Pong", "Seaquest")
    assert (args.mask_ratio, args.temporal_window) == ((0.1, 2) if fast else (0.5, 6))


def test_the_three_names_of_a_game_are_one():
    resolved = [atari.resolve_args(atari.Args(env_id=name)) for name in ("Pong", "ALE/Pong-v5", "PongNoFrameskip-v4")]
    assert resolved[0] == resolved[1] == resolved[2] and resolved[0].env_id == "Pong"


def test_the_benchmark_has_26_games_that_exist():
    assert len(GAMES) == 26 and all(f"ALE/{game}-v5" in gym.registry for game in GAMES)


def test_every_args_field_is_read():
    read = set()
    for file in ("rainbow_mooss_atari.py", "mooss_common.py"):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    assert [f.name for f in dataclasses.fields(atari.Args) if f.name not in read] == []


def test_an_explicit_flag_wins_over_preset_and_game():
    args = atari.resolve_args(atari.Args(env_id="Pong", preset="laptop", mask_ratio=0.5, batch_size=32))
    assert (args.mask_ratio, args.batch_size, args.temporal_window) == (0.5, 32, 2)
    assert args.eval_episodes == atari.PRESETS["laptop"]["eval_episodes"]


REFUSED = {"cube_size": 5, "mask_ratio": 1.5, "temporal_window": 8, "multi_step": 0, "num_atoms": 1, "v_min": 11.0,
           "channels": (4, 4), "strides": (0, 1, 1), "min_replay": 5, "buffer_size": 5, "priority_exponent": -1.0,
           "priority_correction": (0.4, 2.0), "image_size": 7, "exp_name": "a/b", "epsilon": 1.5}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_work_get_one_sentence(name):
    with pytest.raises(common.UsageError) as refusal:
        tiny_atari_args(**{name: REFUSED[name]})
    sentence = str(refusal.value)
    assert "\n" not in sentence and "--" + name.replace("_", "-") in sentence


# ---------------------------------------------------------------------------------------------- real games
def plain_env(game, seed):
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    obs, _ = env.reset(seed=seed)
    return env, obs


@pytest.mark.parametrize("game", ["Breakout", "Pong", "MsPacman"])
def test_evaluation_agrees_with_gymnasiums_preprocessing(game):
    """Frames, rewards and game ends on the same seed and actions, over whole games, lost lives included."""
    args = atari.resolve_args(atari.Args(env_id=game))
    ours, (theirs, expected) = atari.make_env(args, CPU, training=False), plain_env(game, 3)
    obs, _ = ours.reset(seed=3)
    assert (obs[-1, 0] == expected).all() and (obs[:-1] == 0).all()
    rng, done, steps = np.random.default_rng(0), False, 0
    while not done and steps < 1500:
        action = int(rng.integers(ours.action_space.n))
        obs, reward, terminated, truncated, _ = ours.step(action)
        expected, their_reward, their_end, their_cut, _ = theirs.step(action)
        assert (obs[-1, 0] == expected).all() and reward == their_reward
        assert (terminated, truncated) == (their_end, their_cut)
        done, steps = terminated or truncated, steps + 1
    assert steps > 100
    assert ours.action_space.n == len(theirs.unwrapped.ale.getMinimalActionSet())


def test_training_shows_all_five_lives_of_one_game():
    """Breakout: four lost lives end episodes while the game goes on, the fifth ends the game. What the agent sees
    agrees with gymnasium's preprocessing all the way, given the no-op that follows a lost life."""
    args = atari.resolve_args(atari.Args(env_id="Breakout"))
    ours, (theirs, expected) = atari.make_env(args, CPU), plain_env("Breakout", 7)
    obs, _ = ours.reset(seed=7)
    rng, lives, frame_numbers, game_over, steps = np.random.default_rng(1), [], [], False, 0
    while not game_over and steps < 20_000:
        lives.append(ours.unwrapped.ale.lives())
        frame_numbers.append(ours.unwrapped.ale.getEpisodeFrameNumber())
        action = int(rng.integers(4))
        obs, reward, terminated, truncated, info = ours.step(action)
        expected, their_reward, their_end, _, _ = theirs.step(action)
        assert (obs[-1, 0] == expected).all() and reward == their_reward and not truncated
        game_over = info["game_over"]
        assert game_over == their_end
        if terminated and not game_over:
            obs, _ = ours.reset()
            expected, *_ = theirs.step(0)
            assert (obs[-1, 0] == expected).all() and (obs[:-1] == 0).all()  # no frame of the earlier life
        steps += 1
    assert game_over and sorted(set(lives)) == [1, 2, 3, 4, 5]
    assert frame_numbers == sorted(frame_numbers)  # never restarted


def test_a_life_lost_during_the_no_op_ends_no_second_episode():
    class Game(gym.Env):
        """Lives fall by one at the second and third step."""

        ale = property(lambda self: self)
        observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Discrete(1)

        def lives(self):
            return (5, 5, 4, 3, 3)[self.time]

        def reset(self, *, seed=None, options=None):
            self.time = 0
            return 0, {}

        def step(self, action):
            self.time += 1
            return 0, 0.0, False, False, {}

    env = atari.LifeEpisodes(Game())
    env.reset(seed=0)
    assert [env.step(0)[2] for _ in range(2)] == [False, True]
    env.reset()  # the no-op, in which another life goes
    assert not env.step(0)[2]


def test_frame_limit_is_terminal():
    args = atari.resolve_args(atari.Args(env_id="Pong", max_frames=200))
    env = atari.make_env(args, CPU)
    env.reset(seed=0)
    for _ in range(50):
        _, _, terminated, truncated, info = env.step(0)
        if terminated:
            break
    assert terminated and info["game_over"] and not truncated


def test_colour_frames_work():
    args = atari.resolve_args(atari.Args(env_id="Pong", gray_scale=False, image_size=42))
    obs, _ = atari.make_env(args, CPU).reset(seed=0)
    assert obs.shape == (4, 3, 42, 42)


def test_replay_rebuilds_the_stacks_the_agent_saw():
    """Through lost lives of a real game: stacks from single frames equal those of the environment."""
    args = atari.resolve_args(atari.Args(env_id="Breakout", buffer_size=1000))
    env = atari.make_env(args, CPU)
    replay = atari.SequenceReplay(1000, (1, 84, 84), 4, 16, 10, CPU)
    obs, _ = env.reset(seed=0)
    rng, seen, ends = np.random.default_rng(0), [], 0
    for _ in range(400):
        action = int(rng.integers(4))
        following, reward, terminated, _, info = env.step(action)
        replay.add(obs[-1], action, reward, terminated)
        seen.append(obs)
        obs = following
        if terminated:
            ends += 1
            obs, _ = env.reset(seed=5 if info["game_over"] else None)
    frames = replay.frames_for(torch.arange(400), 1).numpy()
    assert ends > 3 and all((frames[i] == seen[i]).all() for i in range(400))


# ---------------------------------------------------------------------------------------------- whole runs
SHORT = dict(TINY_ATARI, total_timesteps=60, checkpoint_every=20, log_every=7)


def run(run_root, **changes):
    return atari.main(atari.Args(**{**SHORT, "run_root": str(run_root), **changes}))


def folder(run_root):
    return run_root / "Breakout__mooss__s1"


def test_a_run_leaves_everything_and_really_learns(tmp_path, dot_game, capsys):
    assert run(tmp_path, capture_video=True, eval_every=30) == 0
    evaluations, train = rows(folder(tmp_path) / "eval.csv"), rows(folder(tmp_path) / "train.csv")
    assert [(row["step"], row["update"]) for row in evaluations] == [
        (step, update) for step, update in (("0", "0"), ("30", "0"), ("60", "60")) for _ in range(2)]
    assert all(row["length"] == "33" and float(row["return"]) % 2.5 == 0 for row in evaluations)  # whole, unclipped
    assert [int(row["update"]) for row in train] == list(range(1, 60, 7))
    assert set(train[0]) == {"step", "update", *atari.METRICS}
    assert [row for row in train[1:] if "" in row.values()] == []  # before the first row no game had ended
    assert float(train[0]["rainbow/is_exponent"]) == 0.4 and 0.9 < float(train[-1]["rainbow/is_exponent"]) <= 1.0
    out = capsys.readouterr().out
    assert "human-normalised" in out and "the paper's MOOSS 16.8, Base 16.7" in out
    state = torch.load(folder(tmp_path) / "checkpoint.pt", weights_only=True)
    torch.manual_seed(1)
    untrained = atari.Agent(atari.Args(**state["args"]), *state["agent_shape"], CPU).state_dict()
    assert [name for name in untrained if torch.equal(untrained[name], state["agent"][name])] == []
    assert (folder(tmp_path) / "videos" / "step_000000060.mp4").stat().st_size > 0


def test_same_seed_gives_the_same_run_and_another_seed_another(tmp_path, dot_game):
    for name in ("a", "b"):
        run(tmp_path / name)
    run(tmp_path / "c", seed=2)
    a, b = (torch.load(folder(tmp_path / name) / "checkpoint.pt", weights_only=True)["replay"] for name in "ab")
    assert torch.equal(a["priorities"], b["priorities"])
    assert rows(folder(tmp_path / "a") / "train.csv") == rows(folder(tmp_path / "b") / "train.csv")
    assert rows(folder(tmp_path / "a") / "train.csv") != rows(tmp_path / "c" / "Breakout__mooss__s2" / "train.csv")


@pytest.mark.parametrize("stop_at", [5, 37, 50])
def test_resumed_run_equals_uninterrupted_run(tmp_path, monkeypatch, stop_at):
    """Stopped by a signal within a game: in the random phase, after a lost life, after the replay has wrapped."""
    monkeypatch.setattr(atari, "make_env", make_dot_game)
    run(tmp_path / "whole", buffer_size=35)
    steps = []

    class Interrupted(DotGame):
        def step(self, action):
            steps.append(1)
            if len(steps) == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            return super().step(action)

    monkeypatch.setattr(atari, "make_env", lambda args, device, training=True: gym.wrappers.FrameStackObservation(
        Interrupted(args.image_size, training), args.frame_stack, padding_type="zero"))
    assert run(tmp_path / "parts", buffer_size=35) == 128 + signal.SIGUSR1
    state = torch.load(folder(tmp_path / "parts") / "checkpoint.pt", weights_only=True)
    assert state["step"] == stop_at
    monkeypatch.setattr(atari, "make_env", make_dot_game)
    assert run(tmp_path / "parts", buffer_size=35, resume=True) == 0
    assert_same_run(folder(tmp_path / "whole"), folder(tmp_path / "parts"))


def test_a_reward_that_is_not_a_number_stops_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    class Broken(DotGame):
        steps = 0

        def step(self, action):
            Broken.steps += 1
            frame, reward, *rest = super().step(action)
            return frame, float("nan") if Broken.steps == 60 else reward, *rest

    monkeypatch.setattr(atari, "make_env", lambda args, device, training=True: gym.wrappers.FrameStackObservation(
        Broken(args.image_size, training), args.frame_stack, padding_type="zero"))
    with pytest.raises(common.UsageError, match="losses/rl.*not a number.*checkpoint.pt"):
        run(tmp_path, total_timesteps=300, checkpoint_every=10, reward_clip=0.0, eval_every=0, log_every=7)
    saved = torch.load(folder(tmp_path) / "checkpoint.pt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in saved["agent"].values()) and saved["step"] <= 80


def test_a_longer_schedule_is_another_run(tmp_path, dot_game):
    run(tmp_path)
    with pytest.raises(common.UsageError, match="total_timesteps was 60, is 90"):
        run(tmp_path, total_timesteps=90, resume=True)


def test_epsilon_greedy_explores_without_noise(tmp_path, dot_game):
    assert run(tmp_path, noisy=False, epsilon=0.5) == 0
    assert all(float(row["losses/rl"]) > 0 for row in rows(folder(tmp_path) / "train.csv"))


def test_eval_only_and_loading(tmp_path, dot_game):
    run(tmp_path)
    final = [row["return"] for row in rows(folder(tmp_path) / "eval.csv")]
    path = str(folder(tmp_path) / "checkpoint.pt")
    assert atari.main(atari.Args(eval_only=True, checkpoint=path, eval_episodes=2)) == 0
    assert [row["return"] for row in rows(folder(tmp_path) / "eval_only.csv")] == final
    assert atari.main(atari.Args(eval_only=True, checkpoint=path, eval_episodes=2, eval_epsilon=1.0)) == 0
    assert [row["return"] for row in rows(folder(tmp_path) / "eval_only.csv")][2:] != final  # random play
    agent, step = atari.load_agent(folder(tmp_path) / "checkpoint.pt")
    obs, _ = make_dot_game(agent.args, None).reset(seed=0)
    assert step == 60 and agent.act(obs[None]).shape == (1,)


def test_a_checkpoint_of_the_other_script_is_refused(tmp_path, dot_game):
    run(tmp_path)
    import sac_mooss_dmc
    with pytest.raises(common.UsageError, match="rainbow_mooss_atari.py"):
        sac_mooss_dmc.load_agent(folder(tmp_path) / "checkpoint.pt")


def script(*words, cwd):
    return subprocess.run([sys.executable, str(ROOT / "rainbow_mooss_atari.py"), *words], cwd=cwd, capture_output=True,
                          text=True)


def test_end_to_end_on_a_real_game(tmp_path):
    words = ("--env-id ALE/Breakout-v5 --total-timesteps 150 --min-replay 120 --batch-size 4 --channels 4 8 8 "
             "--hidden-units 16 --eval-episodes 2 --max-frames 2000 --buffer-size 1000 --log-every 10 "
             "--device cpu").split()
    done = script(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "runs" / "Breakout__mooss__s1"
    assert [(row["step"], row["update"]) for row in rows(path / "eval.csv")] == [("150", "60")] * 2
    assert [row["update"] for row in rows(path / "train.csv")] == ["1", "11", "21", "31", "41", "51"]
    assert "human-normalised" in done.stdout


@pytest.mark.parametrize("words,expected", [
    ("--env-id Brakeout", "Breakout"), ("--env-id Backgammon", "no-op"),
    ("--channels 4 8", "--channels"), ("--preset authors", "preset")])
def test_bad_input_exits_2_without_traceback(words, expected, tmp_path):
    done = script(*words.split(), cwd=tmp_path)
    assert done.returncode == 2 and expected in done.stderr + done.stdout and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())
