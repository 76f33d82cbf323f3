"""The ranked loss and the rank accuracy against plain nested loops, and what the fast form costs.

Both scripts carry the same text, so one of them is tested.
"""

import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sac_mooss_dmc
from sac_mooss_dmc import rank_accuracy, temporal_contrastive_loss


def nested_loops(similarity, length, window, tau0, tau_step, reduction, weights, valid):
    """Eq. 7 read aloud: for each query, for each level, positives over all that is not nearer."""
    batch = len(similarity) // length
    total = 0.0
    pairs = 0
    queries = 0
    for b in range(batch):
        for t in range(length):
            if not valid[b, t]:
                continue
            queries += 1
            for level in range(window + 1):
                tau = tau0 + level * tau_step
                positives = []
                denominator = []
                for c in range(batch):
                    for u in range(length):
                        if not valid[c, u]:
                            continue
                        s = torch.exp(similarity[b * length + t, c * length + u] / tau)
                        if c == b and abs(t - u) == level:
                            positives.append(s)
                        if c != b or abs(t - u) >= level:
                            denominator.append(s)
                if positives:
                    total = total - weights[b] * torch.log(sum(positives) / sum(denominator))
                    pairs += 1
    return total / (pairs if reduction == "mean" else queries)


def some_valid(batch, length):
    """Sequences that end early, as after an episode's end; one keeps a single step."""
    ends = torch.arange(batch) % length + 1
    return torch.arange(length) < ends[:, None]


@pytest.mark.quick
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_valid", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("batch,length,window", [(3, 5, 3), (2, 6, 0), (4, 4, 3), (1, 5, 2)])
def test_loss_equals_nested_loops_in_value_and_gradient(
        batch, length, window, with_weights, with_valid, reduction):
    torch.manual_seed(batch * 100 + length)
    valid = some_valid(batch, length) if with_valid else None
    weights = torch.rand(batch, dtype=torch.float64) if with_weights else None
    fast = torch.randn(batch * length, batch * length, dtype=torch.float64, requires_grad=True)
    slow = fast.detach().clone().requires_grad_()

    result = temporal_contrastive_loss(fast, length, window, 0.07, 0.075, reduction, weights, valid)
    all_valid = torch.ones(batch, length, dtype=torch.bool)
    expected = nested_loops(
        slow, length, window, 0.07, 0.075, reduction,
        torch.ones(batch) if weights is None else weights, all_valid if valid is None else valid)
    result.backward()
    expected.backward()
    assert abs(result.item() - expected.item()) < 1e-9
    assert (fast.grad - slow.grad).abs().max() < 1e-9


@pytest.mark.quick
def test_window_beyond_half_the_sequence_skips_middle_queries():
    """With F = 5 and L = 4 the middle query has no key 3 or 4 steps away: 5 + 5 + 5 + 4 + 2 pairs
    of query and level count.
    """
    similarity = torch.zeros(10, 10, dtype=torch.float64)
    mean = temporal_contrastive_loss(similarity, 5, 4)
    total = temporal_contrastive_loss(similarity, 5, 4, reduction="sum")
    assert math.isclose(total.item() * 2 * 5, mean.item() * 2 * 21, rel_tol=1e-12)


@pytest.mark.quick
def test_extreme_similarities_keep_loss_and_gradient_finite():
    similarity = torch.tensor([1e4, -1e4]).repeat(8, 4).requires_grad_()
    loss = temporal_contrastive_loss(similarity, 4, 3, valid=some_valid(2, 4))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(similarity.grad).all()


@pytest.mark.quick
def test_nearest_key_first_is_the_minimum():
    """A similarity that falls with temporal distance beats a flat one, and that a reversed one."""
    time = torch.arange(8)
    distance = (time[:, None] - time).abs().float()
    ranked = torch.full((2, 8, 2, 8), -1.0)
    ranked[[0, 1], :, [0, 1]] = 1 - 0.2 * distance
    ranked = ranked.view(16, 16)
    best, middle, worst = [
        temporal_contrastive_loss(similarity, 8, 4).item()
        for similarity in (ranked, torch.zeros(16, 16), -ranked)]
    assert best < middle < worst
    assert rank_accuracy(ranked, 8, 4) == 1.0
    assert rank_accuracy(-ranked, 8, 4) == 0.0


def test_an_unknown_reduction_is_refused():
    """It must not pass for one of the known ones."""
    with pytest.raises(ValueError, match="average"):
        temporal_contrastive_loss(torch.zeros(10, 10), 5, 4, reduction="average")


def test_rank_accuracy_without_pairs_is_zero():
    assert rank_accuracy(torch.randn(8, 8), 4, 0) == 0.0


@pytest.mark.quick
@pytest.mark.parametrize("with_valid", [False, True])
def test_rank_accuracy_equals_nested_loops(with_valid):
    torch.manual_seed(0)
    batch = 3
    length = 6
    window = 4
    similarity = torch.randn(batch * length, batch * length)
    valid = torch.ones(batch, length, dtype=torch.bool)
    if with_valid:
        valid = some_valid(batch, length)
    right = 0
    total = 0
    for b in range(batch):
        for t in range(length):
            row = similarity[b * length + t, b * length:(b + 1) * length]
            for u in range(length):
                for v in range(length):
                    one_further = abs(t - v) == abs(t - u) + 1
                    if one_further and abs(t - u) < window and valid[b, [t, u, v]].all():
                        total += 1
                        right += bool(row[u] > row[v])
    found = rank_accuracy(similarity, length, window, valid if with_valid else None)
    assert torch.isclose(found, torch.tensor(right / total))


# -------------------------------------------------------------------------------------------- cost
def materialised(similarity, length, window, tau0=0.07, tau_step=0.075):
    """The obvious vectorisation: one (B*F, B*F, L+1) tensor of logits."""
    index = torch.arange(len(similarity))
    same = (index[:, None] // length == index // length)[..., None]
    distance = (index[:, None] - index).abs()[..., None]
    levels = torch.arange(window + 1)
    nothing = torch.finfo(similarity.dtype).min
    logits = similarity[..., None] / (tau0 + levels * tau_step)
    positive = same & (distance == levels)
    denominator = ~same | (distance >= levels)
    log_positives = logits.masked_fill(~positive, nothing).logsumexp(1)
    losses = logits.masked_fill(~denominator, nothing).logsumexp(1) - log_positives
    return losses[positive.any(1)].mean()


MEASURE = """
import resource, sys, time, torch
sys.path.insert(0, sys.argv[1])
from sac_mooss_dmc import temporal_contrastive_loss

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

{materialised}

loss = dict(fast=temporal_contrastive_loss, plain=materialised)[sys.argv[2]]
torch.manual_seed(0)
similarity = torch.randn(2048, 2048, requires_grad=True)
loss(similarity[:64, :64].contiguous(), 16, 6).backward()
before = peak()
times = []
for _ in range(int(sys.argv[3])):
    began = time.perf_counter()
    value = loss(similarity, 16, 6)
    value.backward()
    times.append(time.perf_counter() - began)
print(min(times), peak() - before, value.item())
"""


def measured(which, times):
    """Seconds, memory (MB) and value at B = 128, F = 16, L = 6, forward and backward."""
    code = MEASURE.format(materialised=inspect.getsource(materialised))
    folder = Path(sac_mooss_dmc.__file__).parent
    out = subprocess.run(
        [sys.executable, "-c", code, str(folder), which, str(times)],
        capture_output=True, text=True, check=True).stdout
    return [float(word) for word in out.split()]


def test_loss_needs_half_the_memory_of_materialising_all_levels():
    _, fast_memory, fast_value = measured("fast", times=1)
    _, plain_memory, plain_value = measured("plain", times=1)
    print(f"memory {fast_memory:.0f} / {plain_memory:.0f} MB")
    assert abs(fast_value - plain_value) < 1e-4
    assert fast_memory <= plain_memory / 2


@pytest.mark.slow
def test_loss_takes_half_the_time_of_materialising_all_levels():
    ratios = []
    for _ in range(3):  # a shared machine can spoil a measurement
        fast_time, _, _ = measured("fast", times=3)
        plain_time, _, _ = measured("plain", times=3)
        print(f"time {fast_time:.3f} / {plain_time:.3f} s")
        ratios.append(fast_time / plain_time)
    assert min(ratios) <= 0.5
