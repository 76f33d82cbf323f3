"""Flags, presets and refusals: the paper's table, what wins over what, and one sentence for what cannot work."""

import ast
import dataclasses
import re

import pytest

import mooss_common as common
import sac_mooss_dmc as dmc
from conftest import ROOT, tiny_args

PAPER_TABLE = dict(  # the paper's hyper-parameter table for DMC, and what the issue of record fixes beside it
    frame_stack=3, render_size=100, image_size=84, augmentations=("crop", "intensity"), buffer_size=100_000,
    init_steps=1000, eval_episodes=10, optimizer="adam", beta1=0.9, beta2=0.999, alpha_beta1=0.5, alpha_beta2=0.999,
    aux_warmup_steps=6000, alpha_lr=0.0001, batch_size=512, aux_batch_size=128, critic_ema=0.99,
    critic_target_update_freq=2, gamma=0.99, init_temperature=0.1, target_update_period=1, state_dim=64,
    aux_weight=0.1, seq_len=16, cube_size=7, tau0=0.07, tau_step=0.075, decoder_depth=2, mask_ratio=0.5,
    temporal_window=6, num_filters=64, hidden_dim=1024, critic_encoder_ema=0.95, actor_update_freq=2,
    decoder_heads=4, head_dim=100,
    intensity_scale=0.05, pixel_scale=255.0, walk_root="random", share_mask=False, level_reduction="mean",
    normalize_embeddings=True, walk_connectivity=26, aux_lr_decay=True, rl_intensity=False, crop_per_sequence=False,
    mask_type="walk", decoder_inputs="sa", total_timesteps=100_000, eval_every=5000, run_root="runs", camera_id=0)
PER_TASK = {  # action repeat, RL rate, MOOSS rate, key encoder EMA, cube length
    "finger-spin": (2, 0.001, 0.0005, 0.95, 8), "cartpole-swingup": (8, 0.001, 0.0005, 0.95, 4),
    "reacher-easy": (4, 0.001, 0.0005, 0.95, 4), "cheetah-run": (4, 0.0002, 0.0001, 0.95, 8),
    "walker-walk": (2, 0.001, 0.0005, 0.9, 8), "ball_in_cup-catch": (4, 0.001, 0.0005, 0.95, 8),
    "walker-run": (4, 0.001, 0.0005, 0.95, 8), "reacher-hard": (4, 0.001, 0.0005, 0.95, 8)}


@pytest.mark.parametrize("task", PER_TASK)
def test_paper_preset_equals_the_papers_table(task):
    args = dmc.resolve_args(dmc.Args(env_id=task))
    assert {name: getattr(args, name) for name in PAPER_TABLE} == PAPER_TABLE
    assert (args.action_repeat, args.rl_lr, args.aux_lr, args.target_ema, args.cube_len) == PER_TASK[task]
    unset = [f.name for f in dataclasses.fields(args) if getattr(args, f.name) is None]
    assert unset == ["checkpoint", "wandb_entity", "wandb_group"]


def test_full_environment_id_names_the_same_task():
    full, short = (dmc.resolve_args(dmc.Args(env_id=name)) for name in ("dm_control/walker-walk-v0", "walker-walk"))
    assert full == short


def test_authors_preset_sets_the_ledger_rows_of_their_code():
    args, paper = dmc.resolve_args(dmc.Args(preset="authors")), dmc.resolve_args(dmc.Args())
    changed = {f.name for f in dataclasses.fields(args) if getattr(args, f.name) != getattr(paper, f.name)}
    assert changed == {"preset", "temporal_window", "walk_root", "share_mask", "target_update_period", "pixel_scale"}
    assert (args.temporal_window, args.walk_root, args.share_mask, args.target_update_period, args.pixel_scale) == \
        (5, "fixed", True, 2, 1.0)


def test_laptop_preset_changes_sizes_only():
    args, paper = dmc.resolve_args(dmc.Args(preset="laptop")), dmc.resolve_args(dmc.Args())
    changed = {f.name for f in dataclasses.fields(args) if getattr(args, f.name) != getattr(paper, f.name)}
    assert changed == {"preset", "eval_episodes", "render_size", "image_size", "batch_size", "num_filters",
                       "hidden_dim", "aux_batch_size"}


def test_an_explicit_flag_wins_even_with_the_papers_value():
    args = dmc.resolve_args(dmc.Args(env_id="walker-walk", preset="laptop", batch_size=512, target_ema=0.95,
                                     action_repeat=4))
    assert (args.batch_size, args.target_ema, args.action_repeat, args.num_filters) == (512, 0.95, 4, 48)
    args = dmc.resolve_args(dmc.Args(preset="authors", share_mask=False, temporal_window=6))
    assert args.share_mask is False and args.temporal_window == 6 and args.walk_root == "fixed"


def test_resolving_twice_changes_nothing():
    args = dmc.resolve_args(dmc.Args(env_id="cheetah-run", preset="authors"))
    assert dmc.resolve_args(args) == args


def test_preset_fields_start_unset_and_tell_the_papers_value():
    fields = {f.name: f for f in dataclasses.fields(dmc.Args)}
    touched = set().union(*dmc.PRESETS.values(), *dmc.TASK_PRESETS.values())
    assert touched <= set(dmc.PAPER)
    assert all(fields[name].default is None for name in dmc.PAPER)


@pytest.mark.parametrize("typed,value", [
    ("--share-mask", True), ("--no-share-mask", False), ("--share-mask True", True)])
def test_optional_switches_read_like_any_other(typed, value):
    seen = []
    with pytest.raises(SystemExit):
        common.run_cli(dmc.Args, seen.append, [*typed.split(), "--seed", "3"])
    assert seen[0].share_mask is value and seen[0].seed == 3


def test_every_args_field_is_read():
    """A flag that nothing reads is a lie: each field occurs as an attribute access outside the class itself."""
    read = set()
    for file in ("sac_mooss_dmc.py", "mooss_common.py"):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    assert [f.name for f in dataclasses.fields(dmc.Args) if f.name not in read] == []


def test_every_args_field_has_a_help_line():
    source = (ROOT / "sac_mooss_dmc.py").read_text()
    body = source[source.index("class Args:"):source.index("PAPER = dict(")]
    for field in dataclasses.fields(dmc.Args):
        assert re.search(rf"^    {field.name}: .* = .*  # \S", body, re.M), field.name


REFUSED = {
    "cube_size": 5, "mask_ratio": 1.5, "temporal_window": 8, "seed": -1, "exp_name": "../x", "batch_size": 0,
    "aux_batch_size": 0, "image_size": 30, "seq_len": 0, "gamma": 1.1, "beta1": 1.0, "cube_len": 3, "decoder_heads": 3,
    "buffer_size": 10, "init_steps": 4, "total_timesteps": 0, "eval_every": 0, "tau0": 0.0, "num_filters": 0,
    "target_ema": -0.1, "rl_lr": float("nan"), "aux_weight": float("inf"), "action_repeat": 0, "render_size": 5,
    "log_every": 0, "eval_only": True, "env_id": "../../etc"}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_work_get_one_sentence(name):
    with pytest.raises(common.UsageError) as refusal:
        tiny_args(**{name: REFUSED[name]})
    sentence = str(refusal.value)
    assert "\n" not in sentence and "--" + name.replace("_", "-") in sentence


def test_two_rng_parts_never_give_the_same_stream():
    words = ("training", "evaluation")
    seeds = {common.derive_seed(a, word, b) for a in range(20) for b in range(20) for word in words}
    assert len(seeds) == 800
