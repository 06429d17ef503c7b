"""TensorBoard's pages besides the curves: the layout of charts, and the run's description and settings."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainloop import __version__
from trainloop.callbacks.train_schedule import groups_with_rates
from trainloop.optim import optimizers_of

__all__ = ["chart_layout", "description_of", "quantity_of", "settings_of"]

_DATASETS = "train|val|test"
# Sections that are first, by a word in a quantity's name; other sections are named by the part before a slash.
_SECTIONS = {"loss": "loss", "acc": "accuracy"}


def quantity_of(name: str) -> str:
    """Return the metric's name without the prefix of its data set."""
    return re.sub(f"^({_DATASETS})_", "", name)


def chart_layout(names: Iterable[str]) -> Any:
    """Return the ``Summary`` of a layout for TensorBoard's page of custom scalars.

    It has a chart for each quantity, with its values by step and by epoch, of all data sets; charts are in
    sections: ``loss``, ``accuracy``, one for each name before a slash (``lr/group0``), and ``metrics``.

    Parameters
    ----------
    names : iterable of str
        Names of metrics, without the prefixes that only the reader of this file adds.
    """
    from torch.utils.tensorboard.summary import custom_scalars

    sections: dict[str, dict[str, list[Any]]] = {section: {} for section in _SECTIONS.values()}
    for quantity in dict.fromkeys(map(quantity_of, names)):
        tags = f"^(epoch/)?(({_DATASETS})_)?{re.escape(quantity)}$"
        sections.setdefault(_section(quantity), {})[quantity] = ["Multiline", [tags]]
    sections["lr"] = sections.pop("lr", {})  # the last one
    return custom_scalars({section: charts for section, charts in sections.items() if charts})


def _section(quantity: str) -> str:
    for word, section in _SECTIONS.items():
        if word in quantity.lower():
            return section
    first, slash, _ = quantity.partition("/")
    return first if slash or first == "lr" else "metrics"


def settings_of(loop: Any) -> dict[str, Any]:
    """Return the settings that tables of runs usually compare, if known: mode, batch, optimizer, rates."""
    optimizers = optimizers_of(loop.optimizer)
    device = loop.site.devices[0]
    settings = {
        "gpu_mode": loop.gpu_mode,
        "devices": f"{len(loop.site.devices) * loop.num_nodes} x {device.type}",
        "effective_batch_size": loop.effective_batch_size,
        "grad_accumulation": loop.grad_accumulation,
        "amp": loop.options.amp.described(device).removeprefix(", AMP ") or "off",
        "seed": loop.seed,
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
    }
    for name, group in groups_with_rates(loop.optimizer):
        settings[name] = float(group.get("initial_lr", group["lr"]))
    first = optimizers[0].param_groups[0]
    if "weight_decay" in first:
        settings["weight_decay"] = float(first["weight_decay"])
    return {name: value for name, value in settings.items() if value is not None}


def description_of(loop: Any, settings: Mapping[str, Any]) -> str:
    """Return a description of the run in Markdown: devices, settings, versions."""
    devices = [str(device) for device in loop.site.devices]
    if loop.device.type == "cuda":
        devices.append(torch.cuda.get_device_name(loop.device))
    rows = {
        "loop": repr(loop),
        "devices": ", ".join(devices),
        "host": platform.node(),
        "versions": f"trainloop {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "script": os.path.basename(sys.argv[0]),  # without arguments, since they may contain a token
        **settings,
    }
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
