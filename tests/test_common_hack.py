"""Copy a script, make the edits that the README's table names, and run the copy."""

import csv
import importlib.util
import sys

import pytest

import mooss_common as common
from conftest import ROOT
from helpers import tiny

# Where an edit goes in each script: what the tiny run needs, and the environment that is put in.
SCRIPTS = {
    "dmc": dict(
        file="sac_mooss_dmc.py",
        flags=dict(tiny.DMC_FLAGS, total_timesteps=60, eval_every=1000, preset="laptop"),
        make_env="def make_env(args, device):",
        dot="make_dot_env(args, device)",
        metrics='        self.metrics |= {"losses/critic": loss'),
    "atari": dict(
        file="rainbow_mooss_atari.py",
        flags=dict(tiny.ATARI_FLAGS, total_timesteps=36, preset="laptop"),
        make_env="def make_env(args, device, training=True):",
        dot="make_dot_game(args, device, training)",
        metrics='        self.metrics |= {\n            "losses/rl"'),
}
BOTH = pytest.mark.parametrize("script", SCRIPTS)


class Copy:
    """A copy of a script in a folder of its own, with an environment of its own, to be edited."""

    def __init__(self, script, folder, monkeypatch, name="my_variant"):
        self.script = SCRIPTS[script]
        self.path = folder / f"{name}.py"
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.text = (ROOT / self.script["file"]).read_text()
        head = self.script["make_env"]
        self.edit(head, f"{head}\n    from helpers import tiny\n\n    return tiny."
                        f"{self.script['dot']}\n\n\n{head.replace('make_env', 'first_make_env')}")

    def edit(self, old, new):
        assert self.text.count(old) == 1, old
        self.text = self.text.replace(old, new)

    def run(self, *words, **flags):
        """Parse a command line and run the copy's main; its exit code and its run folder."""
        self.path.write_text(self.text)
        spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
        module = importlib.util.module_from_spec(spec)
        self.monkeypatch.setitem(sys.modules, self.path.stem, module)
        spec.loader.exec_module(module)
        flags = {**self.script["flags"], "run_root": self.folder / "runs", "log_every": 2, **flags}
        for name, value in flags.items():
            values = value if isinstance(value, tuple) else (value,)
            words = [*words, common.flag(name), *map(str, values)]
        args = common.parse_args(module.Args, module.fill_presets, words)
        code = module.main(args)
        env_id = args.env_id.replace("/", "-")
        return code, self.folder / "runs" / f"{env_id}__{args.exp_name}__s{args.seed}"


@pytest.fixture
def copy(script, tmp_path, monkeypatch):
    return Copy(script, tmp_path, monkeypatch)


def train_rows(folder):
    with open(folder / "train.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.quick
@BOTH
def test_a_new_flag_is_one_line(copy):
    copy.edit("    tau_step: float", "    my_coef: float = 2.0  # mine\n    my_offset: int = 0\n"
                                      "    tau_step: float")
    copy.edit(copy.script["metrics"], '        self.metrics["my/coef"] = self.args.my_coef\n'
              + '        self.metrics["my/offset"] = self.args.my_offset\n'
              + copy.script["metrics"])
    code, folder = copy.run("--my-coef", "3.5", "--my-offset", "-7")
    last = train_rows(folder)[-1]
    assert code == 0
    assert (last["my/coef"], last["my/offset"]) == ("3.5", "-7")
    with pytest.raises(common.UsageError, match="--my-coef nan is not a finite number"):
        copy.run("--my-coef", "nan", exp_name="other")


@BOTH
def test_a_new_metric_lands_in_the_file_and_in_tensorboard(copy):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    copy.edit(copy.script["metrics"],
              '        self.metrics["my/metric"] = 4.25\n' + copy.script["metrics"])
    _, folder = copy.run()
    assert {row["my/metric"] for row in train_rows(folder)} == {"4.25"}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {event.value for event in events.Scalars("my/metric")} == {4.25}


@BOTH
def test_a_metric_that_comes_late_is_named_at_once(copy):
    copy.edit(copy.script["metrics"], '        self.count = getattr(self, "count", 0) + 1\n'
              '        if self.count > 3:\n            self.metrics["my/late"] = 1.0\n'
              + copy.script["metrics"])
    with pytest.raises(common.UsageError, match="my/late is not a column"):
        copy.run()


@BOTH
def test_a_copy_never_continues_the_run_of_the_original(script, tmp_path, monkeypatch):
    Copy(script, tmp_path, monkeypatch, "original").run()
    with pytest.raises(common.UsageError, match="script was 'original', is 'my_variant'"):
        Copy(script, tmp_path, monkeypatch).run("--resume")


@BOTH
def test_changed_source_is_said_at_a_resume(script, tmp_path, monkeypatch, capsys):
    Copy(script, tmp_path, monkeypatch).run()
    changed = Copy(script, tmp_path, monkeypatch)
    changed.text += "\n# another thought\n"
    assert changed.run("--resume")[0] == 0
    assert "my_variant.py has changed since" in capsys.readouterr().err


@pytest.mark.quick
@BOTH
def test_a_new_mask_is_a_function_a_word_and_a_branch(copy):
    copy.edit('mask_type: Literal["walk", "cube"]', 'mask_type: Literal["walk", "cube", "all"]')
    with pytest.raises(ValueError, match="unknown type of mask: all"):
        copy.run("--mask-type", "all", exp_name="no_branch")
    copy.edit('        elif args.mask_type == "cube":',
              '        elif args.mask_type == "all":\n'
              '            masks = everything_masked(count, self.grid)\n'
              '        elif args.mask_type == "cube":')
    copy.edit("def uniform_cube_masks(", "def everything_masked(count, grid):\n"
              "    return torch.ones(count, *grid, dtype=torch.bool)\n\n\n"
              "def uniform_cube_masks(")
    _, folder = copy.run("--mask-type", "all")
    assert {row["mooss/mask_fraction"] for row in train_rows(folder)} == {"1"}


@BOTH
def test_a_similarity_of_ones_own_is_one_method(copy):
    copy.edit("        return queries @ self.bilinear @ keys.T",
              "        return 0.0 * (queries @ self.bilinear @ keys.T)")
    _, folder = copy.run()
    # Nothing is more similar than anything else: no pair of keys is in the right order.
    assert {float(row["mooss/rank_accuracy"]) for row in train_rows(folder)} == {0.0}


@BOTH
def test_an_environment_of_ones_own_is_one_changed_make_env(copy):
    code, folder = copy.run(env_id="lab/Dot-v0")
    assert code == 0
    assert folder.name == "lab-Dot-v0__mooss__s1"
    assert len(train_rows(folder)) > 1
