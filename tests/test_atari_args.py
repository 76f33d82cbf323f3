"""Flags of the Atari script: the paper's table, what wins over what, and one sentence for what
cannot work."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
from helpers import flags, tiny
from helpers.tiny import atari_args

CPU = torch.device("cpu")
SCORES = Path(atari.__file__).parent / "benchmark" / "paper_scores.json"
GAMES = [name for name in json.loads(SCORES.read_text())["atari100k"] if not name.startswith("_")]

# The paper's table of hyper-parameters, and what the ledger fixes beside it.
PAPER_TABLE = dict(
    gray_scale=True, frame_stack=4, image_size=84, augmentations=("crop", "intensity"),
    action_repeat=4, total_timesteps=100_000, max_frames=108_000, buffer_size=100_000,
    min_replay=2000, batch_size=32, optimizer="adam", learning_rate=0.0001, beta1=0.9, beta2=0.999,
    adam_eps=0.00015, max_grad_norm=10, distributional=True, dueling=True, num_atoms=51, v_min=-10,
    v_max=10, gamma=0.99, reward_clip=1, priority_exponent=0.5, priority_correction=(0.4, 1.0),
    noisy=True, noisy_std=0.5, eval_episodes=100, replay_period=1, updates_per_step=2,
    multi_step=10, channels=(32, 64, 64), filter_sizes=(8, 4, 3), strides=(4, 2, 1),
    hidden_units=256, target_update_period=1, target_ema=0, aux_weight=0.1, seq_len=16,
    cube_size=7, cube_len=4, tau0=0.07, tau_step=0.075, decoder_depth=2, state_dim=64,
    aux_is_weights=True, aux_adam_eps=0.00015, eval_epsilon=0.001)
# Games with a mask ratio of 10% and a temporal window of 2.
FAST_GAMES = ("Gopher", "Kangaroo", "MsPacman", "Pong", "Seaquest")


# ----------------------------------------------------------------------------------------- presets
@pytest.mark.quick
@pytest.mark.parametrize("game", GAMES)
def test_paper_preset_equals_the_papers_table(game):
    args = flags.typed(atari, "--env-id", game)
    assert {name: getattr(args, name) for name in PAPER_TABLE} == PAPER_TABLE
    expected = (0.1, 2) if game in FAST_GAMES else (0.5, 6)
    assert (args.mask_ratio, args.temporal_window) == expected
    assert flags.unset_fields(args) == ["checkpoint", "wandb_entity", "wandb_group"]


def test_laptop_preset_changes_sizes_only():
    changed = flags.changed_fields(flags.typed(atari, "--preset", "laptop"), flags.typed(atari))
    assert changed == {"preset", "eval_episodes", "batch_size"}


@pytest.mark.quick
def test_an_explicit_flag_wins_over_preset_and_game():
    words = "--env-id Pong --preset laptop --mask-ratio 0.5 --batch-size 32"
    args = flags.typed(atari, *words.split())
    assert (args.mask_ratio, args.batch_size, args.temporal_window) == (0.5, 32, 2)
    assert args.eval_episodes == atari.PRESETS["laptop"]["eval_episodes"]


def test_arguments_made_in_python_take_the_same_presets():
    typed = flags.typed(atari, "--env-id", "Gopher", "--preset", "laptop", "--multi-step", "5")
    made = atari.Args(env_id="Gopher", preset="laptop", multi_step=5)
    assert atari.resolve_args(made) == typed


def test_resolving_twice_changes_nothing():
    args = atari.resolve_args(atari.Args(env_id="ALE/Seaquest-v5", preset="laptop"))
    assert atari.resolve_args(args) == args


def test_fields_that_presets_set_start_unset():
    """Otherwise a preset could not tell a value that was typed from the default."""
    touched = set().union(*atari.PRESETS.values(), *atari.TASK_PRESETS.values())
    assert touched <= set(atari.PAPER)
    fields = {field.name: field for field in dataclasses.fields(atari.Args)}
    assert all(fields[name].default is None for name in atari.PAPER)


# ------------------------------------------------------------------------------------ names, help
def test_the_three_names_of_a_game_are_one():
    names = ("Pong", "ALE/Pong-v5", "PongNoFrameskip-v4")
    plain, full, old = [flags.typed(atari, "--env-id", name) for name in names]
    assert plain == full == old
    assert plain.env_id == "Pong" and plain.temporal_window == 2


@pytest.mark.quick
def test_every_args_field_is_read():
    """A flag that nothing reads is a lie."""
    assert flags.fields_never_read(atari) == []


@pytest.mark.quick
def test_help_tells_the_meaning_of_every_flag():
    told = flags.help_lines(atari)
    for field in dataclasses.fields(atari.Args):
        meaning = told[field.name].partition("(default:")[0]
        assert len(meaning.split()) >= 4, told[field.name]  # the flag, its kind, and some words


def test_help_shows_the_values_that_would_be_used():
    assert "(default: 6)" in flags.help_lines(atari, "--env-id", "Breakout")["temporal_window"]
    chosen = flags.help_lines(atari, "--preset", "laptop", "--env-id", "ALE/Pong-v5")
    assert "(default: 2)" in chosen["temporal_window"]
    assert "(default: 16)" in chosen["batch_size"]


# ---------------------------------------------------------------------------------------- refusals
REFUSED = {
    "cube_size": 5, "mask_ratio": 1.5, "temporal_window": 8, "multi_step": 0, "num_atoms": 1,
    "v_min": 11.0, "channels": (4, 4), "filter_sizes": (10**21, 3, 3),
    "strides": (0, 1, 1), "min_replay": 5, "buffer_size": 5,
    "priority_exponent": -1.0, "priority_correction": (0.4, 2.0), "image_size": 7,
    "exp_name": "a/b", "epsilon": 1.5, "tau0": float("nan"), "seed": -1, "eval_only": True}


@pytest.mark.quick
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_work_get_one_sentence(name):
    flags.assert_refused(atari_args, name, REFUSED[name])


def try_agent(args):
    """A replay, an agent, two updates and an action."""
    args = atari.resolve_args(args)
    frame_shape = (1 if args.gray_scale else 3, args.image_size, args.image_size)
    obs_shape = (args.frame_stack, *frame_shape)
    replay = common.place_replay(
        "cpu", CPU, atari.SequenceReplay,
        args.buffer_size, frame_shape, args.frame_stack, args.seq_len, args.multi_step)
    agent = atari.Agent(args, obs_shape, 3, CPU)
    replay.begin_episode(np.zeros(frame_shape, np.uint8))
    for step in range(args.min_replay):
        frame = np.full(frame_shape, step % 256, np.uint8)
        ended = step % 13 == 12
        replay.add(step % 3, 1.0, ended, frame)
        if ended:
            replay.begin_episode(frame)
    for index in range(2):
        agent.update(replay, index, 0.5, log=True)
    assert agent.act(np.zeros((1, *obs_shape), np.uint8), noisy=True).shape == (1,)


def test_any_command_line_works_or_is_one_sentence():
    base = {name: value for name, value in tiny.ATARI_FLAGS.items() if name != "device"}
    flags.assert_any_line_works_or_is_one_sentence(atari, base, try_agent)


@pytest.mark.parametrize("words,expected", [
    ("--env-id Brakeout", "Breakout"),
    ("--env-id Backgammon", "no-op"),
    ("--env-id ../Pong", "--env-id"),
    ("--channels 4 8", "--channels"),
    ("--v-min 3 --v-max 3", "--v-min"),
    ("--preset authors", "preset"),
    ("--eval-only --checkpoint nowhere.pt", "nowhere.pt")])
def test_a_refusal_leaves_nothing_behind(words, expected, tmp_path):
    done = flags.script(atari, *words.split(), cwd=tmp_path)
    flags.assert_refused_without_a_trace(done, expected, tmp_path)
