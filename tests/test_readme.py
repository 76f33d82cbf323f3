"""What the README promises about names exists: metrics, flags, ledger rows, files."""

import dataclasses
import itertools
import re
import sys

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import figures
import report
import speed
import sweep

README = (ROOT / "README.md").read_text()


def test_every_metric_has_a_row_in_the_table():
    rows = " ".join(line.split("|")[1] for line in README.splitlines() if line.startswith("| `"))
    assert [key for key in (*dmc.METRICS, *atari.METRICS) if f"`{key}`" not in rows] == []


def test_every_flag_named_exists():
    names = {field.name.replace("_", "-") for args in (dmc.Args, atari.Args) for field in dataclasses.fields(args)}
    flags = {prefix + name for name in names for prefix in ("--", "--no-")}
    others = {"--help", "--logdir"} | {
        "--" + field.name.replace("_", "-") for field in itertools.chain(*map(dataclasses.fields, (
            sweep.SweepArgs, report.ReportArgs, figures.FigureArgs, speed.SpeedArgs)))}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", README))
    assert named - flags - others == set()


def test_ledger_rows_stand_in_the_code():
    """Every D row that the code follows carries its number there."""
    source = (ROOT / "sac_mooss_dmc.py").read_text()
    assert [row for row in range(1, 20) if not re.search(rf"\bD{row}\b", source)] == []
    assert [row for row in range(1, 20) if f"| D{row} |" not in README] == []
    source = (ROOT / "rainbow_mooss_atari.py").read_text()
    assert [row for row in range(1, 9) if not re.search(rf"\bA{row}\b", source) or f"| A{row} |" not in README] == []


def test_pictures_exist():
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures and all((ROOT / picture).stat().st_size > 1000 for picture in pictures)
