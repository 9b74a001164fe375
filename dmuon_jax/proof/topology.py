"""Devices to compile for that this machine does not have."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.experimental import topologies

from dmuon_jax.planning.devices import DEVICES


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """What XLA must know of a GPU beside its memory, from NVIDIA's whitepapers.

    Attributes:
      label: name that the driver reports; an a800 is compiled for as the a100 that it
        is but for its links, a name that Pallas knows.
      capability: compute capability (major, minor).
      cores: streaming multiprocessors.
      l2_bytes: second-level cache.
      shared_bytes: shared memory of a multiprocessor; a block may have 1 KiB less.
      clock_ghz: boost clock.
    """

    label: str
    capability: tuple[int, int]
    cores: int
    l2_bytes: int
    shared_bytes: int
    clock_ghz: float


GPU_TARGETS = {
    "a100": GpuTarget("NVIDIA A100", (8, 0), 108, 41943040, 167936, 1.41),
    "a800": GpuTarget("NVIDIA A100", (8, 0), 108, 41943040, 167936, 1.41),
    "h100": GpuTarget("NVIDIA H100", (9, 0), 132, 52428800, 233472, 1.98),
    "h200": GpuTarget("NVIDIA H200", (9, 0), 132, 62914560, 233472, 1.98),
    "b200": GpuTarget("NVIDIA B200", (10, 0), 148, 132644864, 233472, 1.965),
}
TPU_VERSIONS = {"tpu-v5e": "v5e", "tpu-v6e": "v6e"}
CUDA_HINT = (
    "compiling for {} needs the CUDA plugin: pip install 'dmuon_jax[cuda13]' (and "
    "JAX_PLATFORMS=cpu where it is installed but there is no GPU)"
)
TPU_HINT = "compiling for {} needs libtpu: pip install 'dmuon_jax[tpu]'"


def gpu_config(name: str) -> str:
    """Text proto of a GPU, as XLA's ``GpuTargetConfigProto``."""
    target, device = GPU_TARGETS[name], DEVICES[name]
    major, minor = target.capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {target.shared_bytes}
  shared_memory_per_block_optin: {target.shared_bytes - 1024}
  threads_per_core_limit: 2048
  core_count: {target.cores}
  fpus_per_core: {64 if major == 8 else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(device.memory_bandwidth)}
  l2_cache_size: {target.l2_bytes}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {device.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{target.label}"
"""


def nodes_of(name: str, count: int) -> tuple[int, int]:
    """Nodes and devices on each for `count` devices."""
    per_node = min(count, DEVICES[name].devices_per_node)
    if count < 1 or count % per_node:
        raise ValueError(f"devices must fill nodes of {per_node}, got {count}")
    return count // per_node, per_node


def tpu_grid(count: int) -> str:
    """The most square grid of a power of two of chips: 2x4, 4x4, 4x8."""
    if count < 4 or count & (count - 1):
        raise ValueError(f"TPU chips must be a power of two from 4, got {count}")
    short = 1 << ((count.bit_length() - 1) // 2)
    return f"{short}x{count // short}"


def compile_devices(name: str, count: int) -> list[Any]:
    """Devices to put into a mesh and compile for.

    Args:
      name: entry of `DEVICES`. "cpu" gives devices of this machine, others need no
        hardware but their plugin (and ``JAX_PLATFORMS=cpu`` where there is none).
      count: how many.

    Raises:
      ValueError: this many do not make whole nodes, or there are too few CPUs.
      NotImplementedError: the plugin is missing, or cannot compile for `name`.
    """
    if name == "cpu":
        found = jax.devices("cpu")
        if len(found) < count:
            raise ValueError(f"count must be at most {len(found)} CPUs, got {count}")
        return found[:count]
    if name in TPU_VERSIONS:
        options = {"topology_name": f"{TPU_VERSIONS[name]}:{tpu_grid(count)}"}
        platform, hint = "tpu", TPU_HINT
    elif name in GPU_TARGETS:
        nodes, per_node = nodes_of(name, count)
        options = {
            "target_config": gpu_config(name),
            "topology": f"{nodes}x1x{per_node}",
        }
        platform, hint = "cuda", CUDA_HINT
    else:
        raise NotImplementedError(f"device must be one to compile for, got {name!r}")
    try:
        described = topologies.get_topology_desc(platform=platform, **options)
    except (RuntimeError, NotImplementedError) as error:
        raise NotImplementedError(hint.format(name)) from error
    return list(described.devices)
