"""What the device a program is traced for can run."""

import dataclasses

import jax

# Compute capabilities by product name (NVIDIA, "CUDA GPU Compute Capability" tables).
# Longer names come before the shorter ones they contain.
_CAPABILITIES = (
    ("GB200", (10, 0)),
    ("B200", (10, 0)),
    ("GH200", (9, 0)),
    ("H200", (9, 0)),
    ("H100", (9, 0)),
    ("H800", (9, 0)),
    ("H20", (9, 0)),
    ("A100", (8, 0)),
    ("A800", (8, 0)),
    ("A30", (8, 0)),
    ("A10", (8, 6)),
    ("L40", (8, 9)),
    ("L4", (8, 9)),
    ("V100", (7, 0)),
    ("T4", (7, 5)),
)

# The capabilities each Pallas implementation is compiled and checked for.
SUPPORTED_CAPABILITIES = {
    "pallas_triton": ((8, 0), (9, 0), (10, 0)),
    "pallas_mosaic_sm90": ((9, 0),),
}

# The dtypes Pallas kernels take; wider ones would be rounded to TF32.
DTYPES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: Its name, for instance "NVIDIA H200".
      capability: CUDA compute capability; None where unknown or not a CUDA device.
      num_cores: Its streaming multiprocessors; None where unknown.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None
    num_cores: int | None

    def __str__(self) -> str:
        if self.capability is None:
            return f"{self.kind} ({self.platform})"
        major, minor = self.capability
        return f"{self.kind} (compute capability {major}.{minor})"


def describe_device(platform: str, kind: str, num_cores: int | None) -> Device:
    """The `Device` of JAX's names of a platform and of a kind of device."""
    if platform in ("cuda", "rocm"):
        platform = "gpu"
    capability = None
    if platform == "gpu":
        names = kind.replace("-", " ").split()
        for name, version in _CAPABILITIES:
            if any(word.startswith(name) for word in names):
                capability = version
                break
    return Device(platform, kind, capability, num_cores)


def target_device() -> Device:
    """The device the code now traced is for.

    It is the abstract device of the current mesh where there is one, as in
    `jax.shard_map` and when compiling for absent devices; else the default device.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is None:
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        if default is None or isinstance(default, str):
            default = jax.local_devices(backend=default)[0]
        mesh = jax.sharding.Mesh([default], ("device",))
        abstract = mesh.abstract_mesh.abstract_device
    return describe_device(abstract.platform, abstract.device_kind, abstract.num_cores)


def refusal(implementation: str, device: Device, dtype: str) -> str:
    """Why a Pallas *implementation* cannot run, with what it needs; "" where it can."""
    needed = SUPPORTED_CAPABILITIES[implementation]
    if device.capability not in needed:
        names = " or ".join(f"{major}.{minor}" for major, minor in needed)
        return f"{implementation} needs CUDA compute capability {names}, got {device}"
    if dtype not in DTYPES:
        return f"{implementation} needs {' or '.join(DTYPES)}, got {dtype}"
    if implementation == "pallas_mosaic_sm90" and jax.__version_info__ < (0, 11):
        return f"{implementation} needs jax 0.11 or newer, got {jax.__version__}"
    return ""
