"""Fake GPUs: tensors that compute on the CPU but claim to be on cuda:0, cuda:1, ...

Inside `fake_gpus()`, `device="cuda:1"` works without a GPU. A fake tensor wraps a real CPU tensor,
so values are real and code may branch on them. Any operation that mixes devices raises as on CUDA:

- all tensors must be on one device, except for copies, CPU scalars (0-dim) in pointwise operations,
  and CPU indices into a GPU tensor
- `.numpy()` works on the CPU only
- a CPU generator cannot draw on a GPU
- `torch.load` without `map_location` restores a tensor to the GPU that it was saved from

Torch itself sees a tensor on the meta device, `meta:1` for `cuda:1`, because the CPU build of torch
does not accept CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self
from unittest import mock

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
CPU = torch.device("cpu")
COPIES = (aten.copy_.default, aten._foreach_copy_.default)
# Operations that take CPU indices, and the positions of the tensors that must be on one device
INDEXED = {
    aten.index.Tensor: (0,),
    aten.index_put.default: (0, 2),
    aten.index_put_.default: (0, 2),
    aten._index_put_impl_.default: (0, 2),
}
_map_location: ContextVar[Any] = ContextVar("map_location", default=None)


class FakeGpuTensor(Tensor):
    """A tensor that claims to be on a GPU; `host` holds its values on the CPU."""

    host: Tensor
    gpu: torch.device

    @staticmethod
    def __new__(cls, real: Tensor, gpu: torch.device) -> FakeGpuTensor:
        wrapper: FakeGpuTensor = Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=torch.device("meta", gpu.index),
        )
        wrapper.host, wrapper.gpu = real, gpu
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return run(operation, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.gpu

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def get_device(self) -> int:
        return self.gpu.index

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return `self` if nothing changes, as on CUDA."""
        like = kwargs.get("other", args[0] if args else None)
        if isinstance(like, Tensor):
            args, kwargs = (like.device, like.dtype), {}
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        same = device in (None, self.gpu, torch.device("cuda")) and dtype in (None, self.dtype)
        if same and memory_format is None and not kwargs.get("copy"):
            return self
        return super().to(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.to("cuda")

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        dtype, device = self.dtype if dtype is None else dtype, device or self.gpu
        return torch.tensor(data, dtype=dtype, device=device)

    def tolist(self) -> Any:
        return self.host.tolist()

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError(
            f"can't convert {self.gpu} device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        raise AssertionError("a kernel would read GPU memory from the CPU")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return restore, (self.host, self.gpu.index)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = FakeGpuTensor(self.host.clone(), self.gpu).requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]

    def __repr__(self, **kwargs: Any) -> str:
        return f"fake({self.host!r}, device='{self.gpu}')"


def restore(real: Tensor, index: int) -> Tensor:
    """A saved tensor: on the GPU it was saved from, or where `map_location` puts it."""
    where, n_gpus = _map_location.get(), torch.cuda.device_count()
    if where is None and index >= n_gpus:
        raise RuntimeError(f"Attempting to deserialize object on CUDA device {index} of {n_gpus}")
    gpu = torch.device("cuda", index) if where is None else _gpu(where)
    return real if gpu is None else FakeGpuTensor(real, gpu)


class FakeGpuMode(TorchDispatchMode):
    """Intercepts every operation of a thread, so that tensors can be created on fake GPUs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile is not used here, and its wrapper makes operations slower

    def __enter__(self) -> Self:
        # Without it, torch.tensor(..., device=...) copies to the device without dispatch.
        self.lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self.lifted)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return run(operation, args, kwargs or {})


def run(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the host tensors; raise if CUDA could not run it."""
    target = _target(operation, args, kwargs)
    wrappers = {id(t.host): t for t in _tensors(args, kwargs) if isinstance(t, FakeGpuTensor)}
    on_host = {key: CPU if key == "device" else _map(_host, kwargs[key]) for key in kwargs}
    result = operation(*(_map(_host, value) for value in args), **on_host)
    if target is None:
        return result
    if torch.Tag.inplace_view in operation.tags:  # such as squeeze_: the wrapper changes its shape
        with no_dispatch():
            operation(*args, **kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = wrappers.get(id(value))  # the result of an operation in place is its input
        return FakeGpuTensor(value, target) if known is None else known

    return _map(wrap, result)


def _target(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The GPU of the results, None for the CPU."""
    requested = kwargs.get("device")
    if operation is aten._to_copy.default:
        return _gpu(args[0].device if requested is None else requested)
    if operation in COPIES:
        return _gpu((args[0] if isinstance(args[0], Tensor) else args[0][0]).device)
    if operation in INDEXED:
        tensors = [args[i] for i in INDEXED[operation]]
        _check_indices(args)
    else:
        tensors = _tensors(args, kwargs)
    gpus = {t.gpu for t in tensors if isinstance(t, FakeGpuTensor)}
    if gpus:
        _check_devices(operation, args, tensors, gpus)
    target = _gpu(requested) if requested is not None or not gpus else next(iter(gpus))
    if target is not None and kwargs.get("generator") is not None:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    return target


def _check_devices(
    operation: Any, args: Sequence[Any], tensors: Sequence[Tensor], gpus: set[torch.device]
) -> None:
    others = [t for t in tensors if not isinstance(t, FakeGpuTensor)]
    scalars_fit = torch.Tag.pointwise in operation.tags or operation in INDEXED
    writes_to_cpu = operation._schema.is_mutable and not isinstance(args[0], FakeGpuTensor)
    if scalars_fit and not writes_to_cpu:
        others = [t for t in others if t.dim()]
    if len(gpus) > 1 or others:
        found = sorted({*map(str, gpus), *(str(t.device) for t in others)})
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(found)}! (in {operation})"
        )


def _check_indices(args: Sequence[Any]) -> None:
    for index in args[1]:
        if isinstance(index, FakeGpuTensor) and index.device != args[0].device:
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({args[0].device})"
            )


def _gpu(device: Any) -> torch.device | None:
    """The fake GPU that a device stands for; torch calls it by its meta name."""
    device = CPU if device is None else torch.device(device)
    return None if device.type == "cpu" else torch.device("cuda", device.index or 0)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, FakeGpuTensor) else value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to an argument or to each item of a list; operations do not nest lists."""
    return type(value)(map(function, value)) if type(value) in (list, tuple) else function(value)


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    listed = (v if isinstance(v, list | tuple) else [v] for v in (*args, *kwargs.values()))
    return [item for items in listed for item in items if isinstance(item, Tensor)]


@contextmanager
def fake_gpus(n: int = 2) -> Iterator[None]:
    """A machine with `n` GPUs, all of them fake."""
    load = torch.load

    def load_mapped(*args: Any, map_location: Any = None, **kwargs: Any) -> Any:
        token = _map_location.set(map_location)
        try:
            loaded = load(*args, map_location=map_location and "cpu", **kwargs)
            on_cpu = map_location is None or _gpu(map_location) is None
            return loaded if on_cpu else tree_map_only(Tensor, _moved_to(map_location), loaded)
        finally:
            _map_location.reset(token)

    with (
        mock.patch("torch.cuda._lazy_init"),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=n),
        mock.patch("torch.cuda.get_rng_state", _get_rng_state),
        mock.patch("torch.cuda.set_rng_state", _set_rng_state),
        mock.patch("torch.load", load_mapped),
        torch.backends.cudnn.flags(enabled=False),  # a CUDA build of torch would call it
        torch.serialization.safe_globals([restore]),
        FakeGpuMode(),
    ):
        yield


def _get_rng_state(device: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, device: Any) -> None:
    torch.set_rng_state(state)


def _moved_to(device: Any) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(device)


class FakeGpuStrategy(SingleDeviceStrategy):
    """Lightning's strategy for one GPU."""

    def setup_environment(self) -> None:
        pass

    def module_to_device(self, module: nn.Module) -> None:
        """Move parameters and buffers; tied ones stay tied, as by `Module.to` on CUDA."""
        moved: dict[Tensor, Any] = {}
        for layer in module.modules():
            for name, param in layer._parameters.items():
                if param is not None:
                    on_gpu = nn.Parameter(param.detach().to(self.root_device), param.requires_grad)
                    layer._parameters[name] = moved.setdefault(param, on_gpu)
            for name, buffer in layer._buffers.items():
                if buffer is not None:
                    layer._buffers[name] = buffer.to(self.root_device)


def fabric_on(device: str) -> Fabric:
    """Fabric with one rank on a fake GPU, or on the CPU."""
    if device == "cpu":
        return Fabric(accelerator="cpu", devices=1)
    strategy = FakeGpuStrategy(device=torch.device(device), accelerator=FakeGpuAccelerator())
    return Fabric(strategy=strategy)


class FakeGpuAccelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        pass
