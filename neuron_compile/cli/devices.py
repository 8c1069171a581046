"""``neuron-compile ls``: devices, cores and memory, as ``neuron-ls`` shows them."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

from .console import Column, add_command, facts, print_json, say, size_text, table
from .environment import usable_cores

_MORE = """\
Memory is what PJRT says of a device; of the CPU's, the host's. '-' is what is not known.

exit status: 0."""


def add(commands: Any) -> None:
    """Add the command."""
    add_command(commands, "ls", _run, "devices, cores and memory", _MORE)


def _run(options: argparse.Namespace) -> int:
    from ..runtime import devices, platform_errors

    host = host_data()
    found = [dataclasses.asdict(device) for device in devices()]
    for device in found:
        if device["platform"] == "cpu":
            device["memory_limit"] = host["memory_total"]
            device["memory_used"] = _difference(host["memory_total"], host["memory_available"])
    failed = platform_errors()
    if options.json:
        print_json({"devices": found, "platform_errors": failed, "host": host})
        return 0
    sizes = ("memory_limit", "memory_used", "memory_peak")
    columns: list[Column | str] = [
        Column("platform", whole=True),
        Column("device", right=True),
        "kind",
        Column("process", right=True),
        Column("cores", right=True),
        Column("memory", right=True),
        Column("used", right=True),
        Column("peak", right=True),
    ]
    rows = [
        (
            *(_known(x[name]) for name in ("platform", "id", "kind", "process", "cores")),
            *(size_text(x[name]) for name in sizes),
        )
        for x in found
    ]
    _host_page(host)
    table("Devices", columns, rows)
    for name, error in failed.items():
        say(f"{name} does not open: {error}")
    return 0


def _host_page(host: dict[str, Any]) -> None:
    facts(
        {
            "CPU": host["cpu"],
            "cores": f"{host['cores_usable']} of {host['cores']} usable by this process",
            "threads": f"XLA {host['threads_xla']}, ATen {host['threads_torch']}",
            "RAM": f"{size_text(host['memory_total'])}, "
            f"{size_text(host['memory_available'])} available",
        }
    )


def host_data() -> dict[str, Any]:
    """The machine: names, cores, threads, and bytes of memory (``None``: not known)."""
    import torch

    from ..runtime import host_threads

    memory = _memory()
    return {
        "cpu": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "threads_xla": host_threads(),
        "threads_torch": torch.get_num_threads(),
        "memory_total": memory.get("MemTotal"),
        "memory_available": memory.get("MemAvailable"),
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> dict[str, int]:
    """Bytes by Linux's names, where there is ``/proc``."""
    information = Path("/proc/meminfo")
    if not information.exists():
        return {}
    lines = (line.split() for line in information.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def _difference(whole: int | None, rest: int | None) -> int | None:
    return None if whole is None or rest is None else whole - rest


def _known(value: Any) -> Any:
    return "-" if value is None else value
