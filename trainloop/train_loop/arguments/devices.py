"""Read the six arguments about devices, of the loop and of ``fit``, as one request, and resolve it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from trainloop._support.user_line import warn
from trainloop.devices import find_usable_cuda_devices, is_all, is_auto, requested_number, resolve
from trainloop.errors import ConfigurationError, DeviceError
from trainloop.resources.enforce import devices_under
from trainloop.train_loop.arguments.checks import check_bool, check_count
from trainloop.train_loop.arguments.options import Options


@dataclass(frozen=True)
class Request:
    """Devices that a run requests on one node."""

    accelerator: Any
    """Kind of device, as for :func:`trainloop.devices.resolve`."""
    devices: Any
    """Number of devices, indices, or ``'auto'``, as for :func:`trainloop.devices.resolve`."""
    argument: str = "devices"
    """Name of the argument that :attr:`devices` is from, for messages."""
    one: bool = False
    """True if the mode uses one device only."""
    pick_free: bool = False
    """True to choose GPUs that no other run uses, and lease them."""

    def resolved(self, quota: Any) -> list[torch.device]:
        """Return the devices in rank order; with ``devices='auto'``, at most as many as the quota has.

        Raises
        ------
        ConfigurationError
            If the request does not fit the mode.
        DeviceError
            If this machine lacks the devices.
        ResourceError
            If the quota has fewer GPUs than requested.
        """
        devices = self.devices
        if self.one and is_auto(devices) and (self.accelerator != "auto" or torch.cuda.is_available()):
            devices = 1 if self.accelerator != "cpu" else "auto"
        found = resolve(self.accelerator, devices)
        if self.one and len(found) > 1:
            raise ConfigurationError(
                f"devices={self.devices!r}: gpu_mode='single' uses only one device. Use gpu_mode='ddp' (or 'dp') for "
                "several devices."
            )
        if self.pick_free:
            if found[0].type != "cuda":
                raise ConfigurationError(
                    "auto_select_gpus=True, but this machine has no GPU. Leave auto_select_gpus out."
                )
            number = -1 if is_all(self.devices) and not self.one else len(found)
            found = [torch.device("cuda", i) for i in find_usable_cuda_devices(number)]
        return devices_under(quota, found, self.devices, self.argument)


def requested(options: Options, num_gpus: Any = None, on_gpu: Any = None, *, select: bool = False) -> Request:
    """Return the request of a run: the loop's arguments, changed by ``fit``'s ``num_gpus`` and ``on_gpu``.

    The documentation uses ``num_gpus=torch.cuda.device_count()``, which must also work on a machine without GPUs: with
    0, the run trains on the CPU, after one warning. The loop's own ``devices`` take precedence over ``num_gpus``.

    Parameters
    ----------
    options : Options
    num_gpus, on_gpu
    select : bool
        True for a run that starts now: with ``auto_select_gpus``, it chooses free GPUs. The lease lasts as long as the
        process, and ``fit`` may be called hours after the loop is created.

    Raises
    ------
    ConfigurationError
        If arguments contradict each other.
    """
    if num_gpus is not None:
        num_gpus = check_count(num_gpus, "num_gpus", 0)
    if on_gpu is not None:
        check_bool(on_gpu, "on_gpu")
    accelerator = options.accelerator.strip().lower() if isinstance(options.accelerator, str) else options.accelerator
    _check_contradictions(accelerator, num_gpus, on_gpu)
    request = Request(
        accelerator,
        options.devices,
        one=options.gpu_mode == "single",
        # With indices, the user has selected the GPUs.
        pick_free=select and options.auto_select_gpus and requested_number(options.devices) is not None,
    )
    if on_gpu is False:
        return replace(request, accelerator="cpu")
    if num_gpus == 0 and accelerator != "cpu":
        warn(
            "num_gpus=0: training on the CPU. Use accelerator='cpu' to silence this warning, and devices=k for k "
            "processes."
        )
        return replace(request, accelerator="cpu")
    if num_gpus and not request.one and is_auto(options.devices):
        kind = "gpu" if accelerator == "auto" else accelerator
        return replace(request, accelerator=kind, devices=num_gpus, argument="num_gpus")
    return request


def _check_contradictions(accelerator: Any, num_gpus: int | None, on_gpu: bool | None) -> None:
    """Raise an error for arguments of which it is unknown which one was intended."""
    if on_gpu is False and num_gpus:
        raise ConfigurationError(
            f"num_gpus={num_gpus} with on_gpu=False: these contradict each other. To use GPUs, leave on_gpu out. To "
            "use the CPU, leave num_gpus out. For several processes (ddp) or replicas (dp) on the CPU, use "
            f"accelerator='cpu', devices={num_gpus}."
        )
    if on_gpu and accelerator == "cpu":
        raise ConfigurationError(
            "on_gpu=True with accelerator='cpu': these contradict each other. Use accelerator='auto' for GPUs if the "
            "machine has any, or leave on_gpu out."
        )
    if on_gpu:
        _check_gpu(num_gpus)
    if num_gpus and accelerator == "cpu" and on_gpu is not False:
        raise ConfigurationError(
            f"num_gpus={num_gpus} with accelerator='cpu': these contradict each other. Use devices={num_gpus} for that "
            "many processes, or accelerator='gpu'."
        )


def _check_gpu(num_gpus: int | None) -> None:
    """Raise an error for ``on_gpu=True`` if the run would train on the CPU."""
    try:
        resolve("gpu", 1)
    except DeviceError as error:
        raise DeviceError(
            "on_gpu=True: no GPU is visible here. Leave on_gpu out to train on the CPU, or check "
            "CUDA_VISIBLE_DEVICES and the CUDA build of torch."
        ) from error
    if num_gpus == 0:
        raise ConfigurationError("num_gpus=0 with on_gpu=True: these contradict each other. Leave one of them out.")
