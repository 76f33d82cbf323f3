"""`benchmark/speed.py`: the stages of an update, a ratio where it means something, and counts.

Nothing here judges how fast anything is.
"""

import json
import re
import sys

import pytest
import torch

import mooss_common as common
from conftest import ROOT
from helpers import dot_run, flags, tiny

sys.path.insert(0, str(ROOT / "benchmark"))
import speed

SCRIPTS = {"dmc": tiny.DMC_FLAGS, "atari": tiny.ATARI_FLAGS}
BOTH = pytest.mark.parametrize("script", SCRIPTS)
SHARED_STAGES = set(
    "act|env step|render|sample|gather|augment|mask|key encode|query encode|decode|loss|backward|"
    "optimise|logging|target updates".split("|"))
STAGES = {
    "dmc": SHARED_STAGES | {"critic", "actor"},
    "atari": SHARED_STAGES | {"rl loss", "priorities"},
}


@pytest.fixture(autouse=True)
def dots(dot_env, dot_game, monkeypatch):
    """No simulator is needed; the tool asks an environment what its pictures are like."""
    for environment in (tiny.DotEnv, tiny.DotGame):
        monkeypatch.setattr(environment, "render_mode", "rgb_array")


def run(script, capsys, *words):
    """What the tool prints for a tiny agent."""
    line = ["--script", script, "--repeats", "2", *words, *flags.as_words(SCRIPTS[script])]
    assert speed.main(line) == 0
    return capsys.readouterr().out


# ------------------------------------------------------------------------------------------- times
@BOTH
def test_every_stage_is_measured(script, capsys):
    result = json.loads(run(script, capsys, "--json", "--growth"))
    assert set(result["stages_ms"]) == STAGES[script]
    assert all(value >= 0 for value in result["stages_ms"].values())
    # What is no difference of two measurements took its time.
    for stage in STAGES[script] - {"env step", "backward"}:
        assert result["stages_ms"][stage] > 0, stage
    assert result["update_ms"] > 0 and result["floor_ms"] > 0
    assert (result["ratio"] is None) == (result["too_busy"] is not None)
    assert result["replay_bytes"] > 0 and result["torch"] == torch.__version__
    assert re.search(r"\d+ threads$", result["hardware"])
    growth = {(row["what"], row["stage"]) for row in result["growth"]}
    assert growth == {("batch size", "loss"), ("sequence length", "loss"), ("window L", "loss"),
                      ("replay fill", "sample")}
    assert all(row["ms"] > 0 and row["mb"] > 0 for row in result["growth"])


@BOTH
def test_the_table_has_a_row_for_every_stage(script, capsys):
    text = run(script, capsys)
    assert text.startswith(f"{script}, preset paper, ")
    rows = re.findall(r"^\| (.+) \| \d+\.\d\d \|$", text, re.M)
    assert set(rows) == STAGES[script] and len(rows) == len(set(rows))
    numbers = r"\d+\.\d ms \(\d+\.\d to \d+\.\d\)"
    assert re.search(rf"^update {numbers}, floor {numbers}$", text, re.M)
    assert ("update / floor" in text) != ("no result" in text)


@BOTH
def test_the_floor_is_the_encoder_passes_that_an_update_makes(script):
    """With a backward pass and without; DMC encodes for the actor in every second update."""
    module = speed.CASES[script].module
    args = module.resolve_args(module.Args(**SCRIPTS[script]))
    case = speed.CASES[script](args, torch.device("cpu"), module.make_env(args, None), 60)
    convs = case.agent.critic.encoder.convs if script == "dmc" else case.agent.online.convs
    networks = {"dmc": ["critic", "critic_target", "key_encoder"], "atari": ["online", "target"]}
    passes = []

    def note(convs, inputs, _):
        passes.append((len(inputs[0]), torch.is_grad_enabled()))

    for name in networks[script]:
        for layer in getattr(case.agent, name).modules():
            if isinstance(layer, type(convs)) and len(layer) == len(convs):
                layer.register_forward_hook(note)
    long = args.seq_len * getattr(args, "aux_batch_size", args.batch_size)
    case.inputs = {
        size: torch.rand(size, 9 if script == "dmc" else 4, args.image_size, args.image_size)
        for size in (args.batch_size, long)}
    for index in range(2):
        case.index = index
        passes.clear()
        case.floor()
        floor = sorted(passes)
        passes.clear()
        case.update()
        assert floor == sorted(passes) and len(floor) >= 5


# ------------------------------------------------------------------------------------------- noise
CALM = dict(updates=[30.0, 31.0, 30.5, 30.2], floors=[20.0, 20.4, 20.2, 20.1], others=0.05)


def test_a_calm_machine_gives_a_ratio_of_what_ran_in_turn():
    result = speed.compared(**CALM)
    assert result["too_busy"] is None
    assert result["ratio"] == pytest.approx(1.506, abs=0.002)
    assert result["ratio_range"] == pytest.approx((1.5, 1.52), abs=0.003)
    assert result["updates_per_second"] == pytest.approx(33, abs=0.2)


@pytest.mark.parametrize("change,reason", [
    (dict(others=0.9), "other processes used 0.9 cores meanwhile"),
    (dict(updates=[30.0, 60.0, 31.0, 75.0]), "half of the updates took from"),
    (dict(floors=[20.0, 4.0, 21.0, 3.0]), "half of the floors took from"),
    (dict(updates=[18.0, 18.1, 18.2, 18.1]), "an update seemed faster than the encoder passes"),
])
def test_a_busy_machine_gives_a_sentence_and_no_ratio(change, reason):
    result = speed.compared(**{**CALM, **change})
    assert result["too_busy"].startswith(reason)
    assert result["ratio"] is None and result["ratio_range"] is None
    assert result["updates_per_second"] is None
    assert result["update_ms"] > 0 and result["floor_ms"] > 0


@BOTH
def test_too_busy_is_said_instead_of_a_ratio(script, capsys, monkeypatch):
    began = speed.time.perf_counter()
    monkeypatch.setattr(speed, "busy_seconds", lambda: 5 * (speed.time.perf_counter() - began))
    text = run(script, capsys)
    busy = "no result: the machine was too busy for these figures: other processes used"
    assert re.search(rf"^{busy} \d+\.\d cores meanwhile$", text, re.M)
    assert "update / floor" not in text and "updates/s" not in text
    result = json.loads(run(script, capsys, "--json"))
    assert "other processes" in result["too_busy"] and result["ratio"] is None


# ---------------------------------------------------------------------------------------- counting
def test_calls_and_operations_are_counted_by_phase():
    """A view gives a device nothing to do; a product of matrices takes two operations a term."""
    counter = speed.Counter()
    a = torch.zeros(3, 4, device="meta")
    b = torch.zeros(4, 5, device="meta")
    with counter:
        counter.watched(lambda: (a @ b).t(), "products")()
        b.view(20)[:4] + 1
    assert counter.calls == {"products": 1, "rest": 1}
    assert counter.flop == {"products": 2 * 3 * 4 * 5}


@BOTH
def test_count_tells_calls_and_gflop_of_each_phase(script, capsys):
    """Nothing is computed, so it works at the paper's sizes too; here they are tiny."""
    text = run(script, capsys, "--count")
    rows = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    counts = {name: [float(x) for x in numbers] for name, *numbers in rows}
    phases = {"draw and gather", "augment", "masks", "keys", "MOOSS loss", "optimise",
              "target updates", "rest"}
    phases |= {
        "dmc": {"critic loss", "actor loss", "backward passes"},
        "atari": {"RL loss", "backward pass", "noise of the layers", "priorities"}}[script]
    assert set(counts) == phases | {"all"}
    calls, odd_calls = (sum(counts[name][i] for name in phases) for i in (0, 1))
    assert counts["all"][:2] == [calls, odd_calls]
    assert calls > 200 and odd_calls > 200
    if script == "dmc":  # the actor learns in every second update
        assert counts["actor loss"][0] > 20 and counts["actor loss"][1] == 0
    result = json.loads(run(script, capsys, "--count", "--json"))
    assert result["calls"] == {"even": calls, "odd": odd_calls}
    for parity, number in (("even", 0), ("odd", 1)):
        gflop = sum(phase[parity][1] for phase in result["phases"].values())
        assert result["gflop"][parity] == pytest.approx(gflop)
        by_hand = counted_gflop_of_convolutions(script, number)
        assert 1.0 < result["gflop"][parity] / by_hand < 1.5


def counted_gflop_of_convolutions(script, number):
    """Two operations for each weight and place; a backward pass costs as much for each of the two.

    Without the first layer's gradient into the pixels, which nobody asks for.
    """
    if script == "dmc":
        short, long = 6, 3 * 8
        layers = [9 * 4 * 9 * 10**2] + [4 * 4 * 9 * side**2 for side in (8, 6, 4)]
        forward = short * (3 + (number == 0)) + 2 * long
        trained = short + long
    else:
        short, long = 4, 4 * 8
        layers = [4 * 4 * 16 * 9**2, 4 * 6 * 9 * 4**2, 6 * 6 * 4 * 3**2]
        forward = 3 * short + 2 * long
        trained = short + long
    return 2 * (forward * sum(layers) + trained * (2 * sum(layers) - layers[0])) / 1e9


def test_estimates_say_that_they_are_and_what_they_assume():
    """The host queues calls while the device computes: the longer of the two counts."""
    lines = speed.estimates(1000, 3600.0)
    assert [line.split(":")[0] for line in lines] == list(speed.PEAKS)
    for line, peak in zip(lines, speed.PEAKS.values()):
        assert "estimate, not measured" in line
        queue = 1000 * speed.MICROSECONDS_A_CALL / 1000
        compute = 3600 / (speed.SHARE_OF_PEAK * peak)
        assert f" {max(queue, compute):.0f} ms an update" in line
        assert f"{queue:.0f} ms (1000 calls, assuming {speed.MICROSECONDS_A_CALL:.0f} us" in line
        assert f"{compute:.0f} ms (3,600 GFLOP, assuming {speed.SHARE_OF_PEAK:.0%} of" in line
        assert f"{peak:g} TFLOP/s" in line and "nothing else limits" in line
    launch_bound = speed.estimates(100_000, 1.0)
    assert {line.split("measured: ")[1].split(" ms")[0] for line in launch_bound} == {"800"}


# -------------------------------------------------------------------------------------------- flags
@pytest.mark.parametrize("words,expected", [
    ("--repeats 0", "--repeats 0 measures nothing"),
    ("--aux-weight 0", "--aux-weight 0 has no MOOSS step"),
    ("--script atari --cube-size 5", "--cube-size 5 does not divide"),
])
def test_what_cannot_be_measured_is_one_sentence(words, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        common.exit_with(lambda: speed.main(words.split()))
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"error: {expected}") and error.count("\n") == 1


@dot_run.BOTH
def test_flags_of_the_script_reach_it(module, capsys):
    script = "dmc" if module.__name__.startswith("sac") else "atari"
    result = json.loads(run(script, capsys, "--json", "--amp", "bf16", "--preset", "laptop"))
    assert result["amp"] == "bf16" and result["preset"] == "laptop"
