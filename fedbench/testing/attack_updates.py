"""Checks of an attack's loss, its projection, and the updates that it sends."""

from __future__ import annotations

import dataclasses
from itertools import product

import torch
from torch import Tensor, nn

from fedbench.attack import Attack, AttackView
from fedbench.engine.flat_parameters import ParameterLayout
from fedbench.testing.compare import Unchanged, bits, no_global_randomness
from fedbench.testing.contract import check
from fedbench.testing.rounds import SMALL, honest, noise
from fedbench.testing.verify import verify_tensor

DTYPES = (torch.float32, torch.float64)


def attack_view(global_params: Tensor, n_malicious: int = 3) -> AttackView:
    """Return a view with everything that an attack may request."""
    dtype = global_params.dtype
    return AttackView(
        index=0,
        global_params=global_params,
        layers=SMALL.layers,
        n_clients=10,
        n_malicious=n_malicious,
        server_lr=0.5,
        rng=torch.Generator().manual_seed(0),
        clean_update=honest(1, seed=5)[0].to(dtype),
        benign=honest(10 - n_malicious, seed=6).to(dtype),
    )


def unchanged_view(view: AttackView) -> Unchanged:
    return Unchanged(
        global_params=view.global_params, clean_update=view.clean_update, benign=view.benign
    )


@check("plugin_class", cases=(("away from the global model",), ("at the global model",)))
def objective(attack: Attack, where: str) -> None:
    """`objective` is a finite number with a gradient for every parameter."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    layout = ParameterLayout(network)
    moved = 0.1 if where.startswith("away") else 0  # at the first step, parameters equal G
    global_params = layout.read_params() + moved
    loss = nn.functional.cross_entropy(network(torch.randn(16, 6)), torch.arange(16) % 3)
    view = dataclasses.replace(attack_view(global_params), clean_update=torch.randn(53))
    unchanged = unchanged_view(view)
    found = attack.objective(loss, layout.params, view)
    unchanged.verify("objective")
    verify_tensor("objective", found, (), loss.dtype)
    assert found.requires_grad, (
        "objective has no gradient; compute it with torch from loss and params, without .item()"
    )
    found.backward()
    for name, param in network.named_parameters():
        assert param.grad is not None, f"objective has no gradient for {name}"
        verify_tensor(f"the gradient of {name}", param.grad, tuple(param.shape))
        assert param.grad.abs().max() > 0, f"the gradient of {name} is zero"


@check("plugin_class")
def project(attack: Attack) -> None:
    """`project` changes the parameters only, in place, and keeps them finite and trainable."""
    parts = honest(1)[0].split([param.numel() for param in SMALL.params])
    shapes = [param.shape for param in SMALL.params]
    params = [nn.Parameter(p.reshape(s).clone()) for p, s in zip(parts, shapes, strict=True)]
    before = [(param.data_ptr(), param.shape, param.dtype) for param in params]
    view = attack_view(noise(SMALL.n_params, seed=1))
    unchanged = unchanged_view(view)
    attack.project(params, view)
    unchanged.verify("project")
    for param, old in zip(params, before, strict=True):
        in_place = (param.data_ptr(), param.shape, param.dtype) == old
        assert in_place, "project must change parameters in place; use param.copy_(...)"
        verify_tensor("a projected parameter", param, tuple(param.shape))
        assert param.requires_grad, "project must keep parameters trainable; use torch.no_grad()"
        assert param.grad is None, "project must not leave gradients; use torch.no_grad()"


@check("plugin_class", cases=product(DTYPES))
def craft(attack: Attack, dtype: torch.dtype) -> None:
    """`craft` returns a finite update, leaves its inputs unchanged and draws from `view.rng`."""
    update = honest(1)[0].to(dtype)
    view = attack_view(noise(SMALL.n_params, seed=1).to(dtype))
    unchanged, unchanged_update = unchanged_view(view), Unchanged(update=update)
    with no_global_randomness("craft"):
        sent = attack.craft(update, view)
    unchanged.verify("craft")
    unchanged_update.verify("craft")
    verify_tensor("a crafted update", sent, (SMALL.n_params,), dtype)
    again = attack.craft(update, attack_view(view.global_params))
    assert bits(again) == bits(sent), "craft differs between two calls with equal generators"


@check("plugin_class", cases=product((1, 3, 9, 10), DTYPES))
def collude(attack: Attack, n_malicious: int, dtype: torch.dtype) -> None:
    """`collude` returns a finite update per malicious client, like `craft`."""
    updates = honest(n_malicious).to(dtype)
    view = attack_view(noise(SMALL.n_params, seed=1).to(dtype), n_malicious)
    unchanged, unchanged_updates = unchanged_view(view), Unchanged(updates=updates)
    with no_global_randomness("collude"):
        sent = [*attack.collude(updates, view)]
    unchanged.verify("collude")
    unchanged_updates.verify("collude")
    n_sent = len(sent)
    assert n_sent == n_malicious, f"collude must return {n_malicious} updates, got {n_sent}"
    for row in sent:
        verify_tensor("an update of collude", row, (SMALL.n_params,), dtype)
    again = [*attack.collude(updates, attack_view(view.global_params, n_malicious))]
    assert bits(again) == bits(sent), "collude differs between two calls with equal generators"
