"""A tiny run of a script in this process, through `main(args)`; it takes a second.

The tests that call it put the dot in the place of the simulator: fixtures `dot_env`, `dot_game`.
"""

import pytest

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers import tiny

# DMC: 60 agent steps of two env steps, 40 updates, episodes of 15 agent steps.
# Atari: 70 agent steps, 80 updates, games of three lives of 11 steps.
FLAGS = {
    dmc: dict(
        tiny.DMC_FLAGS, total_timesteps=120, eval_every=40, checkpoint_every=40, log_every=4),
    atari: dict(
        tiny.ATARI_FLAGS, total_timesteps=70, eval_every=30, checkpoint_every=30, log_every=4),
}
BOTH = pytest.mark.parametrize("module", [dmc, atari], ids=["dmc", "atari"])


def run(module, root, **changes):
    """The exit code of a run below `root`."""
    return module.main(module.Args(**{**FLAGS[module], "run_root": str(root), **changes}))


def folder(module, root, exp_name="mooss", seed=1):
    """Where it has left everything."""
    return root / f"{FLAGS[module]['env_id']}__{exp_name}__s{seed}"
