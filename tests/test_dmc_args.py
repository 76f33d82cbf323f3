"""Flags of the DMC script: the paper's table, what wins over what, and one sentence for what cannot
work."""

import dataclasses

import numpy as np
import pytest
import torch

import mooss_common as common
import sac_mooss_dmc as dmc
from helpers import flags, tiny
from helpers.tiny import dmc_args

CPU = torch.device("cpu")

# The paper's table of hyper-parameters, and what the ledger fixes beside it.
PAPER_TABLE = dict(
    frame_stack=3, render_size=100, image_size=84, augmentations=("crop", "intensity"),
    buffer_size=100_000, init_steps=1000, eval_episodes=10, optimizer="adam", beta1=0.9,
    beta2=0.999, alpha_beta1=0.5, alpha_beta2=0.999, aux_warmup_steps=6000, alpha_lr=0.0001,
    batch_size=512, aux_batch_size=128, critic_ema=0.99, critic_target_update_freq=2, gamma=0.99,
    init_temperature=0.1, target_update_period=1, state_dim=64, aux_weight=0.1, seq_len=16,
    cube_size=7, tau0=0.07, tau_step=0.075, decoder_depth=2, mask_ratio=0.5, temporal_window=6,
    num_filters=64, hidden_dim=1024, critic_encoder_ema=0.95, actor_update_freq=2, decoder_heads=4,
    head_dim=100, intensity_scale=0.05, pixel_scale=255.0, walk_root="random", share_mask=False,
    level_reduction="mean", normalize_embeddings=True, walk_connectivity=26, aux_lr_decay=True,
    rl_intensity=False, crop_per_sequence=False, mask_type="walk", decoder_inputs="sa",
    total_timesteps=100_000, eval_every=5000, run_root="runs", camera_id=0)
# Action repeat, RL rate, MOOSS rate, key encoder EMA, cube length.
PER_TASK = {
    "finger-spin": (2, 0.001, 0.0005, 0.95, 8),
    "cartpole-swingup": (8, 0.001, 0.0005, 0.95, 4),
    "reacher-easy": (4, 0.001, 0.0005, 0.95, 4),
    "cheetah-run": (4, 0.0002, 0.0001, 0.95, 8),
    "walker-walk": (2, 0.001, 0.0005, 0.9, 8),
    "ball_in_cup-catch": (4, 0.001, 0.0005, 0.95, 8),
    "walker-run": (4, 0.001, 0.0005, 0.95, 8),
    "reacher-hard": (4, 0.001, 0.0005, 0.95, 8),
}


# ----------------------------------------------------------------------------------------- presets
@pytest.mark.quick
@pytest.mark.parametrize("task", PER_TASK)
def test_paper_preset_equals_the_papers_table(task):
    args = flags.typed(dmc, "--env-id", task)
    assert {name: getattr(args, name) for name in PAPER_TABLE} == PAPER_TABLE
    of_task = (args.action_repeat, args.rl_lr, args.aux_lr, args.target_ema, args.cube_len)
    assert of_task == PER_TASK[task]
    assert flags.unset_fields(args) == ["checkpoint", "wandb_entity", "wandb_group"]


def test_authors_preset_sets_the_ledger_rows_of_their_code():
    authors = flags.typed(dmc, "--preset", "authors")
    theirs = dict(
        preset="authors", temporal_window=5, walk_root="fixed", share_mask=True,
        target_update_period=2, pixel_scale=1.0)
    assert flags.changed_fields(authors, flags.typed(dmc)) == set(theirs)
    assert {name: getattr(authors, name) for name in theirs} == theirs


def test_laptop_preset_changes_sizes_only():
    changed = flags.changed_fields(flags.typed(dmc, "--preset", "laptop"), flags.typed(dmc))
    assert changed == {
        "preset", "eval_episodes", "render_size", "image_size", "batch_size", "num_filters",
        "hidden_dim", "aux_batch_size"}


@pytest.mark.quick
def test_an_explicit_flag_wins_even_with_the_papers_value():
    words = "--env-id walker-walk --preset laptop --batch-size 512 --target-ema 0.95"
    args = flags.typed(dmc, *words.split(), "--action-repeat", "4")
    assert (args.batch_size, args.target_ema, args.action_repeat) == (512, 0.95, 4)
    assert args.num_filters == 48
    words = "--preset authors --no-share-mask --temporal-window 6"
    args = flags.typed(dmc, *words.split())
    assert (args.share_mask, args.temporal_window, args.walk_root) == (False, 6, "fixed")


def test_arguments_made_in_python_take_the_same_presets():
    typed = flags.typed(dmc, "--env-id", "walker-walk", "--preset", "laptop", "--seq-len", "24")
    made = dmc.Args(env_id="walker-walk", preset="laptop", seq_len=24)
    assert dmc.resolve_args(made) == typed


def test_resolving_twice_changes_nothing():
    args = dmc.resolve_args(dmc.Args(env_id="cheetah-run", preset="authors"))
    assert dmc.resolve_args(args) == args


def test_fields_that_presets_set_start_unset():
    """Otherwise a preset could not tell a value that was typed from the default."""
    touched = set().union(*dmc.PRESETS.values(), *dmc.TASK_PRESETS.values())
    assert touched <= set(dmc.PAPER)
    fields = {field.name: field for field in dataclasses.fields(dmc.Args)}
    assert all(fields[name].default is None for name in dmc.PAPER)


# ----------------------------------------------------------------------------------- names, help
def test_full_environment_id_names_the_same_task():
    full = flags.typed(dmc, "--env-id", "dm_control/walker-walk-v0")
    assert full == flags.typed(dmc, "--env-id", "walker-walk")


@pytest.mark.parametrize("words,value", [
    ("--share-mask", True), ("--no-share-mask", False),
    ("--preset authors", True), ("--preset authors --no-share-mask", False)])
def test_switches_of_presets_read_like_any_other(words, value):
    args = flags.typed(dmc, *words.split(), "--seed", "3")
    assert args.share_mask is value
    assert args.seed == 3


@pytest.mark.quick
def test_every_args_field_is_read():
    """A flag that nothing reads is a lie."""
    assert flags.fields_never_read(dmc) == []


@pytest.mark.quick
def test_help_tells_the_meaning_of_every_flag():
    told = flags.help_lines(dmc)
    for field in dataclasses.fields(dmc.Args):
        meaning = told[field.name].partition("(default:")[0]
        assert len(meaning.split()) >= 4, told[field.name]  # the flag, its kind, and some words


def test_help_shows_the_values_that_would_be_used():
    assert "(default: 4)" in flags.help_lines(dmc)["action_repeat"]
    chosen = flags.help_lines(dmc, "--preset", "laptop", "--env-id", "walker-walk")
    assert "(default: 2)" in chosen["action_repeat"]
    assert "(default: 192)" in chosen["batch_size"]


# ---------------------------------------------------------------------------------------- refusals
REFUSED = {
    "cube_size": 5, "mask_ratio": 1.5, "temporal_window": 8, "seed": -1, "exp_name": "../x",
    "batch_size": 0, "aux_batch_size": 0, "image_size": 30, "seq_len": 0, "gamma": 1.1,
    "beta1": 1.0, "cube_len": 3, "decoder_heads": 3, "buffer_size": 10, "init_steps": 4,
    "total_timesteps": 0, "eval_every": 0, "tau0": 0.0, "num_filters": 0, "target_ema": -0.1,
    "rl_lr": float("nan"), "aux_weight": float("inf"), "action_repeat": 0, "render_size": 5,
    "log_every": 0, "eval_only": True, "env_id": "../../etc"}


@pytest.mark.quick
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_work_get_one_sentence(name):
    flags.assert_refused(dmc_args, name, REFUSED[name])


def try_agent(args):
    """A replay, an agent, two updates and an action."""
    args = dmc.resolve_args(args)
    frame_shape = (3, args.render_size, args.render_size)
    obs_shape = (args.frame_stack, *frame_shape)
    replay = common.place_replay(
        "cpu", CPU, dmc.SequenceReplay, args.buffer_size, frame_shape, 2, args.frame_stack)
    agent = dmc.Agent(args, obs_shape, 2, CPU)
    replay.begin_episode(np.zeros(frame_shape, np.uint8))
    for step in range(min(args.init_steps, 3 * args.seq_len)):
        frame = np.full(frame_shape, step, np.uint8)
        replay.add(np.zeros(2, np.float32), 1.0, False, frame)
    for index in range(2):
        agent.update(replay, index, log=True)
    assert agent.act(np.zeros(obs_shape, np.uint8)).shape == (2,)


def test_any_command_line_works_or_is_one_sentence():
    base = {name: value for name, value in tiny.DMC_FLAGS.items() if name != "device"}
    flags.assert_any_line_works_or_is_one_sentence(dmc, base, try_agent)


@pytest.mark.parametrize("words,expected", [
    ("--env-id reacher-eazy", "reacher-easy"),
    ("--env-id lqr-lqr_2_1", "time limit"),
    ("--camera-id 9", "--camera-id"),
    ("--render-size 640", "--render-size"),
    ("--env-id reacher-easy --action-repeat 200", "--seq-len"),
    ("--device cuda:7", "--device"),
    ("--device tpu", "--device"),
    ("--replay-device cuda --device cpu", "--replay-device")])
def test_what_only_the_run_can_know_is_refused_before_anything_is_written(
        words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said, _ = flags.run_line(dmc, dmc.main, words.split())
    assert code == 2
    assert expected in said
    assert said.startswith("error: ") and said.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words,expected", [
    ("--env-id reacher-eazy", "reacher-easy"),
    ("--cube-size 5", "--cube-size 5 does not divide --image-size 84"),
    ("--mask-ratio 1.5", "--mask-ratio 1.5"),
    ("--temporal-window 16", "--temporal-window 16"),
    ("--exp-name ../x", "--exp-name"),
    ("--seq-len 0", "--seq-len 0"),
    ("--tau0 nan", "--tau0"),
    ("--preset fast", "preset"),
    ("--batch-size many", "batch-size"),
    ("--eval-only --checkpoint nowhere.pt", "nowhere.pt")])
def test_a_refusal_leaves_nothing_behind(words, expected, tmp_path):
    done = flags.script(dmc, *words.split(), cwd=tmp_path)
    flags.assert_refused_without_a_trace(done, expected, tmp_path)
