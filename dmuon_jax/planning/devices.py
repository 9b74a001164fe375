"""Accelerators by name: rates, memory and links, for planning and for models.

Peak figures are the vendors' (dense, no structured sparsity), one *device* being
what JAX shows as one: a GPU, or a TPU chip (v5p counts its two cores as one). The
efficiencies are this package's assumptions for large matmuls, long streams and
large messages; they are data, so a measured machine is
``dataclasses.replace(DEVICES["h200"], matrix_efficiency=...)``.

Sources:

* a100: NVIDIA A100 datasheet (SXM, 80 GB). a800: the same chip with NVLink cut to
  400 GB/s. h100: NVIDIA H100 datasheet (SXM). h200: NVIDIA H200 datasheet.
  b200: NVIDIA Blackwell architecture brief and HGX B200 datasheet (1000 W).
  NVLink figures there add both directions; the table holds one direction. Between
  nodes: one 200 Gb/s (a100, a800) or 400 Gb/s (others) network card per GPU, as in
  NVIDIA's DGX A100, H100, H200 and B200. TF32 is half the 16-bit rate in all.
* tpu-*: docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e. Chip-to-chip bandwidth
  there adds both directions of every port; the table holds one direction over all
  ports. A "node" of a TPU is its slice, the widest set joined by chip-to-chip
  links. Between slices: data-centre network per chip, from the v5e page (6.4 Tb/s
  for 256 chips), the v5p page (50 Gb/s) and the v6e page (4 x 200 Gb/s a host of 8).
  32-bit matmuls are six bf16 passes (``Precision.HIGHEST``).
* cpu: one core of a virtual device, an order of magnitude only.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, its memory and its links.

    Attributes:
      name: key in `DEVICES`.
      peak_16bit_flops: matmul FLOP/s in bf16 or fp16 with fp32 accumulation.
      peak_32bit_flops: matmul FLOP/s in fp32 at full precision.
      peak_tf32_flops: matmul FLOP/s on fp32 operands at XLA's default precision,
        which is TF32 on GPUs, one bf16 pass on TPUs and plain fp32 on CPUs.
      memory_bandwidth: device memory, bytes/s.
      memory_bytes: size of device memory.
      intra_bandwidth: bytes/s one device can send inside its node.
      intra_latency_us: start-up time of one collective inside a node.
      inter_bandwidth: bytes/s one device can send out of its node.
      inter_latency_us: start-up time of one collective across nodes.
      devices_per_node: devices joined by the fast link.
      kernel_latency_us: time no operation is shorter than.
      matrix_efficiency: share of the peak rate that large matmuls reach.
      memory_efficiency: share of the memory bandwidth that long streams reach.
      link_efficiency: share of the link bandwidth that large messages reach.
    """

    name: str
    peak_16bit_flops: float
    peak_32bit_flops: float
    peak_tf32_flops: float
    memory_bandwidth: float
    memory_bytes: int
    intra_bandwidth: float
    intra_latency_us: float
    inter_bandwidth: float
    inter_latency_us: float
    devices_per_node: int
    kernel_latency_us: float = 2.0
    matrix_efficiency: float = 0.61
    memory_efficiency: float = 0.75
    link_efficiency: float = 0.78

    def matmul_us(self, flops: float, itemsize: int = 2, precise: bool = True) -> float:
        """Time of `flops` of matmul.

        Args:
          flops: two for a multiplication and its addition.
          itemsize: bytes of an operand's element.
          precise: whether 4-byte operands are multiplied in full precision
            (``jax.lax.Precision.HIGHEST``) rather than as XLA does by default.
        """
        peak = self.peak_32bit_flops if precise else self.peak_tf32_flops
        if itemsize <= 2:
            peak = self.peak_16bit_flops
        return 1e6 * flops / (peak * self.matrix_efficiency)

    def stream_us(self, num_bytes: float) -> float:
        """Time to read and write `num_bytes` of device memory in all."""
        return 1e6 * num_bytes / (self.memory_bandwidth * self.memory_efficiency)

    def send_us(self, num_bytes: float, across_nodes: bool) -> float:
        """Time for one device to send `num_bytes`, without the start-up time."""
        bandwidth = self.inter_bandwidth if across_nodes else self.intra_bandwidth
        return 1e6 * num_bytes / (bandwidth * self.link_efficiency)

    def latency_us(self, across_nodes: bool) -> float:
        """Start-up time of one collective."""
        return self.inter_latency_us if across_nodes else self.intra_latency_us


def gpu(
    name: str,
    peak_tflops: tuple[float, float],
    memory: tuple[float, int],
    links: tuple[float, float],
) -> Device:
    """A GPU in nodes of eight.

    Args:
      name: key in `DEVICES`.
      peak_tflops: matmul TFLOP/s in 16 and in 32 bits.
      memory: bandwidth in GB/s, size in GB.
      links: GB/s in one direction inside and between nodes.
    """
    return Device(
        name=name,
        peak_16bit_flops=peak_tflops[0] * 1e12,
        peak_32bit_flops=peak_tflops[1] * 1e12,
        peak_tf32_flops=peak_tflops[0] / 2 * 1e12,
        memory_bandwidth=memory[0] * 1e9,
        memory_bytes=memory[1] * 10**9,
        intra_bandwidth=links[0] * 1e9,
        intra_latency_us=12.0,
        inter_bandwidth=links[1] * 1e9,
        inter_latency_us=30.0,
        devices_per_node=8,
    )


def tpu(
    name: str,
    peak_tflops: float,
    memory: tuple[float, int],
    links: tuple[float, float],
    slice_size: int,
) -> Device:
    """A TPU chip; the arguments are as for `gpu`, a slice standing for a node."""
    return Device(
        name=name,
        peak_16bit_flops=peak_tflops * 1e12,
        peak_32bit_flops=peak_tflops * 1e12 / 6,
        peak_tf32_flops=peak_tflops * 1e12,
        memory_bandwidth=memory[0] * 1e9,
        memory_bytes=memory[1] * 10**9,
        intra_bandwidth=links[0] * 1e9,
        intra_latency_us=5.0,
        inter_bandwidth=links[1] * 1e9,
        inter_latency_us=50.0,
        devices_per_node=slice_size,
        kernel_latency_us=0.5,
    )


CPU = Device(
    name="cpu",
    peak_16bit_flops=0.05e12,
    peak_32bit_flops=0.1e12,
    peak_tf32_flops=0.1e12,
    memory_bandwidth=20e9,
    memory_bytes=16 * 10**9,
    intra_bandwidth=5e9,
    intra_latency_us=20.0,
    inter_bandwidth=1e9,
    inter_latency_us=50.0,
    devices_per_node=8,
)

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        gpu("a100", (312, 19.5), (2039, 80), (300, 25)),
        gpu("a800", (312, 19.5), (2039, 80), (200, 25)),
        gpu("h100", (989, 67), (3350, 80), (450, 50)),
        gpu("h200", (989, 67), (4800, 141), (450, 50)),
        gpu("b200", (2250, 80), (8000, 180), (900, 50)),
        tpu("tpu-v5e", 197, (819, 16), (200, 3.125), 256),
        tpu("tpu-v5p", 459, (2765, 95), (600, 6.25), 6144),
        tpu("tpu-v6e", 918, (1638, 32), (400, 12.5), 256),
        CPU,
    )
}


def device_named(name: str) -> Device:
    """The entry of `DEVICES`; ValueError names those there are."""
    key = name.lower()
    if key not in DEVICES:
        known = ", ".join(sorted(DEVICES))
        raise ValueError(f"device must be one of {known}, got {name!r}")
    return DEVICES[key]


# What JAX calls a device kind, in lower case, and its entry here: the first that matches.
KINDS = (
    ("v6", "tpu-v6e"),
    ("v5 lite", "tpu-v5e"),
    ("v5e", "tpu-v5e"),
    ("v5", "tpu-v5p"),
    ("b200", "b200"),
    ("h200", "h200"),
    ("h100", "h100"),
    ("h800", "h100"),
    ("a800", "a800"),
    ("a100", "a100"),
)

FALLBACK = {"gpu": "a100", "tpu": "tpu-v5e"}


def device_of_kind(platform: str, kind: str) -> Device:
    """The entry nearest to a device that JAX calls `kind`; by `platform` if none is."""
    name = next((name for part, name in KINDS if part in kind.lower()), None)
    if platform in FALLBACK:
        return DEVICES[name or FALLBACK[platform]]
    return CPU


def axis_bandwidths(
    device: Device, mesh: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, float], ...]:
    """Bytes per microsecond along each mesh axis.

    The last axes, as long as their product fits a node, are taken to lie within one; the
    others to cross nodes.
    """
    found, inside = [], 1
    for name, size in reversed(mesh):
        inside *= size
        crosses = inside > device.devices_per_node
        bandwidth = device.inter_bandwidth if crosses else device.intra_bandwidth
        found.append((name, bandwidth * device.link_efficiency / 1e6))
    return tuple(reversed(found))


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the order of collectives depends on beside their own times.

    Attributes:
      start_us: start-up time of a collective.
      memory_bandwidth: bytes per microsecond of memory-bound work.
    """

    start_us: float
    memory_bandwidth: float

    def stream_us(self, num_bytes: float) -> float:
        """Time of memory-bound work that reads and writes `num_bytes` in all."""
        return num_bytes / self.memory_bandwidth


def overlap_rates(platform: str, device: Device, num_devices: int) -> Rates | None:
    """Rates of `device`; None where XLA does not run all-to-alls beside other work."""
    if platform != "gpu":
        return None
    return Rates(
        device.latency_us(num_devices > device.devices_per_node), 1e6 / device.stream_us(1e6)
    )
