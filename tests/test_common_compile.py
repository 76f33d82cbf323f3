"""--compile: the numbers of an eager run, and a run that goes on where there is no compiler."""

import functools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers import dot_run, runs, tiny

# With DMC, the graph of the critic's loss is made anew once the actor has gradients.
GRAPHS = {dmc: {"critic", "critic again", "mooss", "actor"}, atari: {"both losses"}}


@pytest.fixture(autouse=True)
def forget():
    """Graphs and their counts do not outlive a test."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


def use_backend(monkeypatch, backend):
    """What the scripts compile is handed to this instead of inductor, torch's own."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))


# --------------------------------------------------------------------------------- the same numbers
def trained(module, compile, updates=20):
    """An agent after some updates, and what each of them logged."""
    kind = "dmc" if module is dmc else "atari"
    args = getattr(tiny, f"{kind}_args")(compile=compile)
    agent = getattr(tiny, f"{kind}_agent")(args)
    replay = getattr(tiny, f"{kind}_replay")(args)
    torch.manual_seed(1)
    logged = []
    for index in range(updates):
        if module is dmc:
            agent.update(replay, index, True)
        else:
            agent.update(replay, index, 0.4 + 0.03 * index, True)
        logged.append({name: float(value) for name, value in agent.metrics.items()})
    return agent, logged


@dot_run.BOTH
@pytest.mark.parametrize("backend,tolerance", [
    ("aot_eager", 1e-6), pytest.param("inductor", 2e-3, marks=pytest.mark.slow)])
def test_compiled_updates_equal_eager_ones_over_20_updates(module, backend, tolerance, monkeypatch):
    """Losses, all else that is logged, and parameters; each loss with its backward is one graph."""
    use_backend(monkeypatch, backend)
    eager, expected = trained(module, compile=False)
    assert not counters["stats"]
    compiled, logged = trained(module, compile=True)
    assert counters["stats"]["unique_graphs"] == len(GRAPHS[module])
    assert not counters["graph_break"]
    assert len({row["losses/mooss"] for row in expected}) == len(expected)
    for row, expected_row in zip(logged, expected):
        assert row == pytest.approx(expected_row, rel=tolerance, abs=tolerance)
    parameters = compiled.state_dict()
    start = getattr(tiny, "dmc_agent" if module is dmc else "atari_agent")(eager.args).state_dict()
    for name, value in eager.state_dict().items():
        assert not torch.equal(value, start[name]), name
        assert torch.allclose(parameters[name], value, rtol=tolerance, atol=tolerance), name


# ------------------------------------------------------------------------------------- no compiler
def failing_compiler(where, asked):
    """A compiler that cannot compile anything, or nothing of a backward pass."""
    def compile(graph, inputs):
        is_backward = any("backward" in str(node.target) for node in graph.graph.nodes)
        asked.append(is_backward)
        if where == "anything" or is_backward:
            raise RuntimeError("no compiler here")
        return make_boxed_func(graph.forward)

    def compile_backward(graph, inputs):
        asked.append(True)
        raise RuntimeError("no compiler here")

    return aot_autograd(
        fw_compiler=compile, inference_compiler=compile, bw_compiler=compile_backward)


def assert_goes_on_without(module, root, capsys, reason):
    """A run with --compile says once why it cannot, and does what it does without."""
    assert dot_run.run(module, root / "eager") == 0
    capsys.readouterr()
    assert dot_run.run(module, root / "compiled", compile=True) == 0
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if "--compile" in line]
    assert len(lines) == 1 and reason in lines[0]
    assert "Traceback" not in error
    for name in ("train.csv", "eval.csv"):
        eager, compiled = (
            runs.table(dot_run.folder(module, root / kind) / name)
            for kind in ("eager", "compiled"))
        assert len(eager) > 3
        assert compiled == eager


@dot_run.BOTH
@pytest.mark.parametrize("where", ["anything", "the backward pass"])
def test_a_run_goes_on_where_a_compiler_fails(
        module, where, tmp_path, monkeypatch, capsys, dot_env, dot_game):
    asked = []
    use_backend(monkeypatch, failing_compiler(where, asked))
    assert_goes_on_without(module, tmp_path, capsys, "no compiler here")
    assert where == "anything" or True in asked


@dot_run.BOTH
@pytest.mark.slow
def test_a_run_goes_on_without_a_c_compiler(
        module, tmp_path, monkeypatch, capsys, dot_env, dot_game):
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with inductor.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        assert_goes_on_without(module, tmp_path, capsys, "No working C++ compiler")
