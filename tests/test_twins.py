"""Pieces that both scripts carry are the same text."""

import ast

import pytest

from conftest import ROOT

TWINS = ("random_walk_masks", "uniform_cube_masks", "MaskBank", "PredictiveDecoder", "temporal_contrastive_loss",
         "rank_accuracy", "ema_update")


def pieces(file):
    source = (ROOT / file).read_text()
    named = [node for node in ast.parse(source).body if hasattr(node, "name")]
    return {node.name: ast.get_source_segment(source, node) for node in named}


@pytest.mark.parametrize("name", TWINS)
def test_twin_is_the_same_text(name):
    assert pieces("sac_mooss_dmc.py")[name] == pieces("rainbow_mooss_atari.py")[name]


def test_flags_that_steer_a_run_have_the_same_names_in_both_scripts():
    import dataclasses

    import rainbow_mooss_atari as atari
    import sac_mooss_dmc as dmc
    shared = ("env_id seed exp_name run_root preset total_timesteps eval_every eval_episodes checkpoint_every "
              "log_every resume eval_only checkpoint capture_video track wandb_project wandb_entity wandb_group "
              "device replay_device torch_deterministic compile amp").split()
    for script in (dmc, atari):
        assert [field.name for field in dataclasses.fields(script.Args) if field.name in shared] == shared
