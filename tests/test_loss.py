"""The ranked loss and the rank accuracy against plain nested loops, and what the fast form costs."""

import math
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT
from sac_mooss_dmc import rank_accuracy, temporal_contrastive_loss


def nested_loops(similarity, length, window, tau0, tau_step, reduction, weights, valid):
    """Eq. 7 read aloud: for each query, for each level, positives over positives and everything not nearer."""
    batch = len(similarity) // length
    total, pairs, queries = 0.0, 0, 0
    for b in range(batch):
        for t in range(length):
            if valid is not None and not valid[b, t]:
                continue
            queries += 1
            for level in range(window + 1):
                tau = tau0 + level * tau_step
                positives, denominator = [], []
                for c in range(batch):
                    for u in range(length):
                        if valid is not None and not valid[c, u]:
                            continue
                        s = torch.exp(similarity[b * length + t, c * length + u] / tau)
                        if c == b and abs(t - u) == level:
                            positives.append(s)
                        if c != b or abs(t - u) >= level:
                            denominator.append(s)
                if positives:
                    loss = -torch.log(sum(positives) / sum(denominator))
                    total = total + (1.0 if weights is None else weights[b]) * loss
                    pairs += 1
    return total / (pairs if reduction == "mean" else queries)


def some_valid(batch, length):
    """Sequences that end early, as after an episode's end; one keeps a single step."""
    ends = torch.arange(batch) % length + 1
    return torch.arange(length) < ends[:, None]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_valid", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("batch,length,window", [(3, 5, 3), (2, 6, 0), (4, 4, 3), (1, 5, 2)])
def test_loss_equals_nested_loops_in_value_and_gradient(batch, length, window, with_weights, with_valid, reduction):
    torch.manual_seed(batch * 100 + length)
    valid = some_valid(batch, length) if with_valid else None
    weights = torch.rand(batch, dtype=torch.float64) if with_weights else None
    fast = torch.randn(batch * length, batch * length, dtype=torch.float64, requires_grad=True)
    slow = fast.detach().clone().requires_grad_()
    a = temporal_contrastive_loss(fast, length, window, 0.07, 0.075, reduction, weights, valid)
    b = nested_loops(slow, length, window, 0.07, 0.075, reduction, weights, valid)
    a.backward()
    b.backward()
    assert abs(a.item() - b.item()) < 1e-9
    assert (fast.grad - slow.grad).abs().max() < 1e-9


def test_window_beyond_half_the_sequence_skips_middle_queries():
    """With F = 5 and L = 4 the middle query has no key 3 or 4 steps away: 5 + 5 + 5 + 4 + 2 pairs count."""
    similarity = torch.zeros(10, 10, dtype=torch.float64)
    mean = temporal_contrastive_loss(similarity, 5, 4)
    total = temporal_contrastive_loss(similarity, 5, 4, reduction="sum")
    assert math.isclose(total.item() * 2 * 5, mean.item() * 2 * 21, rel_tol=1e-12)


def test_extreme_similarities_keep_loss_and_gradient_finite():
    similarity = torch.tensor([1e4, -1e4]).repeat(8, 4).requires_grad_()
    loss = temporal_contrastive_loss(similarity, 4, 3, valid=some_valid(2, 4))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(similarity.grad).all()


def test_nearest_key_first_is_the_minimum():
    """A similarity that falls with temporal distance scores better than a flat one, and that than a reversed one."""
    time_ = torch.arange(8)
    distance = (time_[:, None] - time_).abs().float()
    ranked = torch.full((2, 8, 2, 8), -1.0)
    ranked[[0, 1], :, [0, 1]] = 1 - 0.2 * distance
    flat, reverse = torch.zeros(16, 16), -ranked.view(16, 16)
    losses = [temporal_contrastive_loss(x, 8, 4).item() for x in (ranked.view(16, 16), flat, reverse)]
    assert losses == sorted(losses) and losses[0] < losses[1] < losses[2]
    assert rank_accuracy(ranked.view(16, 16), 8, 4) == 1.0
    assert rank_accuracy(reverse, 8, 4) == 0.0


def test_rank_accuracy_without_pairs_is_zero():
    assert rank_accuracy(torch.randn(8, 8), 4, 0) == 0.0


@pytest.mark.parametrize("with_valid", [False, True])
def test_rank_accuracy_equals_nested_loops(with_valid):
    torch.manual_seed(0)
    batch, length, window = 3, 6, 4
    similarity = torch.randn(batch * length, batch * length)
    valid = some_valid(batch, length) if with_valid else torch.ones(batch, length, dtype=torch.bool)
    right = total = 0
    for b in range(batch):
        for t in range(length):
            for u in range(length):
                for v in range(length):
                    near, far = abs(t - u), abs(t - v)
                    if near < window and far == near + 1 and valid[b, [t, u, v]].all():
                        total += 1
                        row = similarity[b * length + t]
                        right += bool(row[b * length + u] > row[b * length + v])
    assert torch.isclose(rank_accuracy(similarity, length, window, valid if with_valid else None),
                         torch.tensor(right / total))


def materialised(similarity, length, window, tau0=0.07, tau_step=0.075):
    """The obvious vectorisation: one (B*F, B*F, L+1) tensor of logits."""
    index = torch.arange(len(similarity))
    same = (index[:, None] // length == index // length)[..., None]
    distance = (index[:, None] - index).abs()[..., None]
    levels = torch.arange(window + 1)
    logits = similarity[..., None] / (tau0 + levels * tau_step)
    positive, denominator = same & (distance == levels), ~same | (distance >= levels)
    numerator = logits.masked_fill(~positive, torch.finfo(logits.dtype).min).logsumexp(1)
    loss = logits.masked_fill(~denominator, torch.finfo(logits.dtype).min).logsumexp(1) - numerator
    return loss[positive.any(1)].mean()


MEASURE = """
import resource, sys, time, torch
sys.path[:0] = [{root!r}, {tests!r}]
from test_loss import materialised, temporal_contrastive_loss
loss = {{"fast": temporal_contrastive_loss, "plain": materialised}}[{which!r}]
torch.manual_seed(0)
similarity = torch.randn(2048, 2048, requires_grad=True)
loss(similarity[:64, :64].contiguous(), 16, 6).backward()
before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
for _ in range(3):
    began = time.perf_counter()
    value = loss(similarity, 16, 6)
    value.backward()
    times.append(time.perf_counter() - began)
print(min(times), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, value.item())
"""


def test_loss_costs_half_of_materialising_all_levels():
    """B = 128, F = 16, L = 6, forward and backward: at most half the time and half the memory, the same value."""
    def measure(which):
        code = MEASURE.format(root=str(ROOT), tests=str(ROOT / "tests"), which=which)
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        return [float(word) for word in out.split()]

    for _ in range(3):  # a shared machine can spoil a measurement
        fast_time, fast_memory, fast_value = measure("fast")
        plain_time, plain_memory, plain_value = measure("plain")
        print(f"time {fast_time:.3f} / {plain_time:.3f} s, "
              f"memory {fast_memory / 1024:.0f} / {plain_memory / 1024:.0f} MB")
        if fast_time <= plain_time / 2 and fast_memory <= plain_memory / 2:
            break
        time.sleep(2)
    assert abs(fast_value - plain_value) < 1e-4
    assert fast_time <= plain_time / 2
    assert fast_memory <= plain_memory / 2
