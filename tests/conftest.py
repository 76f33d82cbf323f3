"""Where the tests find the scripts, and the fixtures that they share; see `helpers/`."""

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
for number in (signal.SIGINT, signal.SIGHUP):  # which `&` and nohup let their programs ignore
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else
                      signal.default_int_handler)

import pytest

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers import tiny


@pytest.fixture
def dot_env(monkeypatch):
    """The DMC script with its environment replaced."""
    monkeypatch.setattr(dmc, "make_env", tiny.make_dot_env)


@pytest.fixture
def dot_game(monkeypatch):
    """The Atari script with its environment replaced."""
    monkeypatch.setattr(atari, "make_env", tiny.make_dot_game)
