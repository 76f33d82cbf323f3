"""What the pages promise exists: metrics, flags, commands, ledger rows, tests, links, files."""

import dataclasses
import itertools
import re
import shlex
import sys

import numpy as np
import pytest

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import ROOT
from helpers import tiny

sys.path.insert(0, str(ROOT / "benchmark"))
import figures
import probe
import report
import speed
import sweep

PAGES = {name: (ROOT / name).read_text() for name in (
    "README.md", "benchmark/README.md", "benchmark/LEDGER.md", "tests/README.md")}
README = PAGES["README.md"]
TOOLS = {
    "sac_mooss_dmc.py": dmc.Args, "rainbow_mooss_atari.py": atari.Args,
    "benchmark/figures.py": figures.FigureArgs, "benchmark/probe.py": probe.ProbeArgs,
    "benchmark/report.py": report.ReportArgs, "benchmark/speed.py": speed.SpeedArgs,
    "benchmark/sweep.py": sweep.SweepArgs}
TAKES_FLAGS_OF = {  # what else the tool's parser hands to a script
    "benchmark/speed.py": (dmc.Args, atari.Args), "benchmark/sweep.py": (dmc.Args, atari.Args)}
EACH_PAGE = pytest.mark.parametrize("page", PAGES)


def without_code(text):
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


def code_blocks(text, language):
    """The lines of all blocks of a language, those that go on put together."""
    blocks = re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, flags=re.M | re.S)
    return [line.strip() for block in blocks
            for line in re.sub(r"\\\n *", "", block).splitlines()]


def flags_of(*kinds):
    names = {field.name.replace("_", "-") for kind in kinds for field in dataclasses.fields(kind)}
    return {prefix + name for name in names for prefix in ("--", "--no-")}


# -------------------------------------------------------------------------------------------- size
def test_the_readme_is_read_in_five_minutes():
    lines = README.splitlines()
    assert len(lines) <= 200
    assert len(README.split()) <= 2000


@EACH_PAGE
def test_lines_of_prose_fit_a_screen(page):
    prose = without_code(PAGES[page]).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith("|")] == []


# ------------------------------------------------------------------------------------------- names
def logged_keys():
    """All that an update of either agent leaves to log, of MOOSS and of Base."""
    keys = set()
    for aux_weight in (0.1, 0.0):
        args = tiny.dmc_args(aux_weight=aux_weight)
        agent = tiny.dmc_agent(args)
        agent.update(tiny.dmc_replay(args), 0, True)
        keys |= set(agent.metrics)
        args = tiny.atari_args(aux_weight=aux_weight)
        agent = tiny.atari_agent(args)
        agent.update(tiny.atari_replay(args), 0, 0.5, True)
        keys |= set(agent.metrics)
    return keys


def logger_keys():
    """What the logger adds by itself, and the names of the pictures."""
    sources = [(ROOT / name).read_text() for name in (
        "mooss_common.py", "sac_mooss_dmc.py", "rainbow_mooss_atari.py")]
    return set(re.findall(r'"((?:charts|eval|mooss)/\w+)"', "\n".join(sources)))


def keys_in_the_table():
    rows = re.findall(r"^\| (`\w+/.*?) \|", PAGES["benchmark/README.md"], flags=re.M)
    return set(re.findall(r"`([^`]+)`", " ".join(rows)))


def test_every_metric_has_a_row_in_the_table_and_every_row_is_a_metric():
    logged = logged_keys() | {
        "charts/episodic_return", "charts/SPS", "eval/return_mean", "eval/return_std"}
    assert len(logged) > 20
    assert keys_in_the_table() == logged
    assert logger_keys() - {"mooss/masked_observations", "mooss/query_key_similarity"} <= logged


@EACH_PAGE
def test_every_flag_named_exists(page):
    known = flags_of(*TOOLS.values()) | {
        "--help", "--logdir",  # of tensorboard, and of chromium:
        "--headless", "--disable-gpu", "--hide-scrollbars", "--window-size", "--screenshot"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", PAGES[page]))
    assert named - known == set()


@EACH_PAGE
def test_every_command_runs_a_tool_with_flags_of_its_own(page):
    commands = [line for line in code_blocks(PAGES[page], "bash") if line.startswith("python ")]
    for words in (shlex.split(line, comments=True) for line in commands):
        if words[1] == "-m":
            assert words[2] == "pytest", words
            continue
        tool = TOOLS[words[1]]
        known = flags_of(tool, *TAKES_FLAGS_OF.get(words[1], ()))
        assert {word for word in words if word.startswith("--")} - known == set(), words
    assert commands or page == "benchmark/LEDGER.md"


def test_commands_of_the_scripts_are_accepted():
    """What stands in the README's blocks is a command line that parses and can work."""
    tried = 0
    for line in code_blocks(README, "bash"):
        for module in (dmc, atari):
            script = f"python {module.__name__}.py "
            if line.startswith(script):
                words = shlex.split(line, comments=True)[2:]
                module.resolve_args(module.common.parse_args(
                    module.Args, module.fill_presets, words))
                tried += 1
    assert tried >= 6


def test_ledger_rows_stand_in_the_code():
    """Every row of the ledger that the code follows carries its number there."""
    ledger = PAGES["benchmark/LEDGER.md"]
    rows = re.findall(r"^\| ([DA]\d+) \|", ledger, flags=re.M)
    assert rows == [f"D{row}" for row in range(1, 20)] + [f"A{row}" for row in range(1, 9)]
    sources = {"D": (ROOT / "sac_mooss_dmc.py").read_text(),
               "A": (ROOT / "rainbow_mooss_atari.py").read_text()}
    assert [row for row in rows if not re.search(rf"\b{row}\b", sources[row[0]])] == []
    cited = set(re.findall(r"\b[DA]\d{1,2}\b", "".join(sources.values())))
    assert cited - set(rows) == set()


@EACH_PAGE
def test_every_test_named_exists(page):
    """As `test_file.py`: `test_name`; names without a file are looked for in all of them."""
    files = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    named = set(re.findall(r"\btest_\w+(?:\.py)?(?!\w|\*)", PAGES[page]))
    everything = "\n".join(files.values())
    assert [name for name in named if name.endswith(".py") and name not in files] == []
    assert [name for name in named if not name.endswith(".py")
            and f"def {name}(" not in everything] == []


def test_a_test_stands_in_the_file_that_is_named_before_it():
    pairs = []
    for line in PAGES["tests/README.md"].splitlines():
        file = "test_common_faults.py" if line.count("|") == 5 else None
        for word in re.findall(r"`(test_[\w.]+)`", line.split("|")[-2] if "|" in line else ""):
            file = word if word.endswith(".py") else file
            if not word.endswith(".py"):
                pairs.append((file, word))
    assert len(pairs) > 50
    assert [pair for pair in pairs
            if f"def {pair[1]}(" not in (ROOT / "tests" / pair[0]).read_text()] == []


def test_what_the_table_of_edits_names_is_in_both_scripts():
    """Names of code in the table "to change, go to"."""
    table = README[README.index("| to change | go to |"):]
    table = table[:table.index("\n\n")]
    both = ["def similarity", "self.bilinear", "temporal_contrastive_loss", "uniform_cube_masks",
            "mask_type", "class MaskBank", "def draw", "class PredictiveDecoder", "self.metrics",
            "def resolve_args", "def make_env"]
    sources = [(ROOT / f"{module.__name__}.py").read_text() for module in (dmc, atari)]
    for name in both:
        assert name.split()[-1].removeprefix("self.") in table, name
        assert all(name in source for source in sources), name
    assert "`Encoder`" in table and hasattr(dmc, "Encoder")
    assert "`Network`" in table and hasattr(atari, "Network")


# ------------------------------------------------------------------------------------------- links
def anchors(text):
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EACH_PAGE
def test_every_link_and_every_picture_leads_somewhere(page):
    text = re.sub(r"<!--.*?-->", "", without_code(PAGES[page]), flags=re.S)
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    assert links or page == "tests/README.md"
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = ROOT / page if not path else (ROOT / page).parent / path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link
        if target.suffix == ".png":
            assert target.stat().st_size > 1000, link


def test_every_picture_that_the_pages_keep_is_shown():
    shown = set(re.findall(r"\.github/(\w+\.png)", "".join(PAGES.values())))
    assert {path.name for path in (ROOT / ".github").glob("*.png")} == shown


def test_a_page_is_one_click_away():
    for page in PAGES:
        assert page == "README.md" or f"({page}" in README


# ------------------------------------------------------------------------------------------- facts
def test_the_table_of_runs_is_the_reports():
    """Each row of the checked-in report's list of runs stands in the page on the runs."""
    text = (ROOT / "benchmark" / "results" / "report" / "report.md").read_text()
    rows = [line for line in text[text.index("## Runs"):].splitlines()
            if re.match(r"\| [\w-]+ \| \w+ \| \d", line)]
    assert len(rows) > 3
    assert [row for row in rows if row not in PAGES["benchmark/README.md"]] == []


def test_updates_of_the_suites_are_what_a_dry_run_prints():
    """Runs and updates of every suite, as the table gives them."""
    text = PAGES["benchmark/README.md"]
    lines = {name: line for line in text.splitlines() if line.startswith("| `")
             for name in re.findall(r"`(\w+)`", line.split("|")[1]) if name in sweep.SUITES}
    assert set(lines) == set(sweep.SUITES)
    for name, (module, tasks, variants, steps) in sweep.SUITES.items():
        each = [sweep.count_updates(module.resolve_args(
            module.Args(env_id=task, total_timesteps=steps))) for task in tasks]
        updates = f"{3 * len(variants) * sum(each):,}"
        assert re.search(rf"\b{3 * len(variants) * len(tasks)}\b", lines[name]), name
        assert updates in lines[name], (name, updates)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """The folder of a tiny run."""
    root = tmp_path_factory.mktemp("runs")
    flags = dict(tiny.DMC_FLAGS, total_timesteps=60, checkpoint_every=20, eval_every=1000,
                 run_root=str(root), capture_video=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dmc, "make_env", tiny.make_dot_env)
        assert dmc.main(dmc.Args(**flags)) == 0
    return next(root.iterdir())


def test_files_of_a_run_stand_in_the_table(tiny_run):
    """What a run leaves is in the README, and nothing else is."""
    left = {path.name for path in tiny_run.iterdir()} - {".lock"}
    table = README[README.index("| file | what it holds |"):]
    table = table[:table.index("\n\n")]
    named = list(itertools.chain(*(re.findall(r"`([^`]+)`", row.split("|")[1])
                                   for row in table.splitlines() if row.startswith("| `"))))
    patterns = [re.escape(name.rstrip("/")).replace(r"\*", ".*") for name in named]
    assert [name for name in left if not any(re.fullmatch(x, name) for x in patterns)] == []
    assert [x for x in patterns if not any(re.fullmatch(x, name) for name in left)] == []


def test_the_three_lines_of_python_work(tiny_run):
    lines = code_blocks(README, "python")
    assert len(lines) == 3
    code = re.sub(r'"runs/[^"]+/agent.pt"', repr(str(tiny_run / "agent.pt")), "\n".join(lines))
    size = tiny.DMC_FLAGS["render_size"]
    names = {"obs": np.zeros((3, 3, size, size), np.uint8)}
    exec(code, names)
    assert names["step"] == 60
    assert names["action"].shape == (1,)


def test_the_picture_of_the_curves_is_made_as_the_page_says(tmp_path, monkeypatch):
    """The block of Python that draws it, from the CSVs of the repository."""
    text = PAGES["benchmark/README.md"]
    text = text[text.index("The curves, from the CSVs here"):]
    code = re.search(r"```python\n(.*?)```", text, flags=re.S)[1]
    (tmp_path / "benchmark").symlink_to(ROOT / "benchmark")
    (tmp_path / ".github").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(code, {})
    made, kept = [report.plt.imread(root / ".github" / "curves.png") for root in (tmp_path, ROOT)]
    assert made.shape == kept.shape
    assert np.abs(made - kept).mean() < 0.01
