"""engine.parameters: a model as flat vectors, and back."""

from __future__ import annotations

import torch
from torch import nn

from fedbench.engine.flat_parameters import ParameterLayout


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))


def test_p_holds_the_trainable_parameters_in_named_order() -> None:
    module = small_network()
    module[2].weight.requires_grad_(False)
    layout = ParameterLayout(module)
    # Linear 3*2 + 2, batch norm 2 + 2; the frozen layer is not in P.
    assert layout.n_params == 12
    assert dict(layout.layers) == {
        "0.weight": slice(0, 6),
        "0.bias": slice(6, 8),
        "1.weight": slice(8, 10),
        "1.bias": slice(10, 12),
    }
    assert torch.equal(layout.read_params()[:6].view(2, 3), module[0].weight)


def test_q_holds_float_buffers_but_no_counters() -> None:
    layout = ParameterLayout(small_network())
    assert len(layout.read_buffers()) == 4
    assert layout.read_buffers().tolist() == [0, 0, 1, 1]  # running mean and variance


def test_read_returns_copies_of_what_was_written() -> None:
    module = small_network()
    layout = ParameterLayout(module)
    params, buffers = torch.arange(14.0), torch.arange(4.0)
    layout.write(params, buffers)
    assert module[2].weight.tolist() == [[12, 13]]
    assert module[1].running_var.tolist() == [2, 3]
    read = layout.read_params()
    assert torch.equal(read, params)
    assert torch.equal(layout.read_buffers(), buffers)
    read.zero_()
    assert torch.equal(layout.read_params(), params)
    row = torch.empty(2, 14)
    layout.read_params(out=row[1])
    assert torch.equal(row[1], params)


def test_write_resets_counters() -> None:
    module = small_network()
    layout = ParameterLayout(module)
    module.train()
    module(torch.randn(4, 3))
    assert module[1].num_batches_tracked == 1
    layout.write(layout.read_params(), layout.read_buffers())
    assert module[1].num_batches_tracked == 0


def test_tied_parameters_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 2)
            self.output = nn.Linear(2, 5, bias=False)
            self.output.weight = self.embedding.weight

    module = Tied()
    layout = ParameterLayout(module)
    assert layout.n_params == 10
    layout.write(torch.arange(10.0), torch.zeros(0))
    assert module.output.weight[4].tolist() == [8, 9]


def test_training_continues_from_written_parameters() -> None:
    module = nn.Linear(2, 1, bias=False)
    layout = ParameterLayout(module)
    layout.write(torch.tensor([1.0, 2.0]), torch.zeros(0))
    module(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert layout.read_params().tolist() == [0.5, 1.5]
