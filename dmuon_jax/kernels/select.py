"""Which implementation and tile sizes a product gets, and why."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from dmuon_jax.kernels.support import DTYPES, Device, refusal, target_device
from dmuon_jax.kernels.tiles import ChainConfig, TileConfig, next_power, round_up

PRODUCTS = ("gram", "symmetric_matmul")
CHAINS = ("polynomial_chain", "direct_chain")
PALLAS = ("pallas_triton", "pallas_mosaic_sm90")
INTERPRETED = "pallas_triton_interpret"
NAMES = ("xla", "pallas", *PALLAS, INTERPRETED)

# Without measurements: XLA below these sides, where a product has too few tiles to pay.
_MIN_SIDE = {"pallas_triton": 256, "pallas_mosaic_sm90": 512}

# Multiprocessors assumed of a GPU that does not tell how many it has.
_DEFAULT_NUM_CORES = 108

TILES = {
    "pallas_triton": (
        TileConfig(128, 128, num_warps=8, num_stages=3),
        TileConfig(128, 64, num_warps=4, num_stages=3),
        TileConfig(64, 64, num_warps=4, num_stages=4),
    ),
    "pallas_mosaic_sm90": (
        TileConfig(128, 128, num_warps=8, num_stages=4),
        TileConfig(256, 128, num_warps=8, num_stages=3),
        TileConfig(128, 64, num_warps=8, num_stages=5),
    ),
}

# Further tiles, which only a measurement may choose.
MORE_TILES = {
    "pallas_triton": (
        TileConfig(128, 128, num_warps=8, num_stages=4),
        TileConfig(128, 128, depth=32, num_warps=8, num_stages=4),
        TileConfig(128, 64, num_warps=4, num_stages=4),
        TileConfig(64, 64, num_warps=4, num_stages=3),
        TileConfig(64, 64, depth=32, num_warps=4, num_stages=4),
        TileConfig(128, 128, num_warps=8, num_stages=3, supertile=16),
    ),
    "pallas_mosaic_sm90": (
        TileConfig(128, 128, num_warps=8, num_stages=5),
        TileConfig(128, 128, num_warps=8, num_stages=4, supertile=16),
        TileConfig(256, 128, num_warps=8, num_stages=3, supertile=4),
    ),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of a kernel: operands `[batch, rows, columns]` of *dtype*."""

    kernel: str
    batch: int
    rows: int
    columns: int
    dtype: str

    @classmethod
    def of(cls, kernel: str, x: jax.Array | jax.ShapeDtypeStruct) -> "Problem":
        """The problem *kernel* has with a first operand `[..., rows, columns]`."""
        *batch, rows, columns = x.shape
        return cls(kernel, math.prod(batch), rows, columns, str(jnp.dtype(x.dtype)))


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs, and why.

    Attributes:
      implementation: "xla", "pallas_triton", "pallas_mosaic_sm90" or, for tests,
        "pallas_triton_interpret"; for a chain also "composed": product by product,
        each with a choice of its own.
      config: Its sizes; None for "xla" and "composed".
      reason: One sentence.
    """

    implementation: str
    config: TileConfig | ChainConfig | None
    reason: str

    @property
    def tiles(self) -> TileConfig:
        """The sizes of a product's kernel; raises ``TypeError`` for any other choice."""
        if not isinstance(self.config, TileConfig):
            raise TypeError(f"config must be a TileConfig, got {self}")
        return self.config

    @property
    def chain(self) -> ChainConfig:
        """The sizes of a chain's kernel; raises ``TypeError`` for any other choice."""
        if not isinstance(self.config, ChainConfig):
            raise TypeError(f"config must be a ChainConfig, got {self}")
        return self.config


@dataclasses.dataclass(frozen=True)
class Verdicts:
    """Measured choices for one kind of device; made and stored by the tuner.

    Hashable, and accepted wherever the name of an implementation is.
    """

    device_kind: str
    entries: tuple[tuple[Problem, Choice], ...]

    def find(self, problem: Problem, device: Device) -> Choice | None:
        """The choice for *problem* on *device*, or None where it was not measured."""
        if device.kind != self.device_kind:
            return None
        for multiple_of in (lambda choice: 64, _tile_rows):
            for measured, choice in self.entries:
                multiple = multiple_of(choice)
                if _padded(measured, multiple) == _padded(problem, multiple):
                    return choice
        return None


Implementation = str | Verdicts | None


def check_implementation(implementation: Implementation) -> None:
    """Raises ValueError for a name that is none."""
    named = not (implementation is None or isinstance(implementation, Verdicts))
    if named and implementation not in NAMES:
        raise ValueError(
            f"implementation must be None, measured Verdicts or one of {NAMES}, "
            f"got {implementation!r}"
        )


def choose(problem: Problem, implementation: Implementation = None) -> Choice:
    """What *problem* runs on the device the code now traced is for.

    Args:
      problem: The call.
      implementation: A name insists; Verdicts decide where they have an entry; None,
        and Verdicts without one, leave it to a heuristic.

    Raises:
      ValueError: *implementation* is no name of one.
      NotImplementedError: The named implementation cannot run there.
    """
    check_implementation(implementation)
    if implementation == "xla":
        return Choice("xla", None, "named")
    device = target_device()
    if isinstance(implementation, str):
        return _named(problem, implementation, device)
    if isinstance(implementation, Verdicts):
        found = implementation.find(problem, device)
        if found is not None:
            return found
    return _heuristic(problem, device)


def candidates(problem: Problem, device: Device) -> tuple[Choice, ...]:
    """Everything worth measuring for *problem* on *device*; XLA always, and first."""
    found = [Choice("xla", None, "candidate")]
    for implementation in PALLAS:
        if refusal(implementation, device, problem.dtype):
            continue
        if problem.kernel in CHAINS:
            config = _chain_config(problem, implementation, device)
            configs = () if config is None else (config,)
        else:
            configs = TILES[implementation] + MORE_TILES[implementation]
        found += [Choice(implementation, config, "candidate") for config in configs]
    if problem.kernel in CHAINS and not _pallas_refusal(problem, device):
        found.append(Choice("composed", None, "candidate"))
    return tuple(found)


def _pallas_refusal(problem: Problem, device: Device) -> str:
    """Why no Pallas kernel can run; "" where one can."""
    refusals = [refusal(each, device, problem.dtype) for each in PALLAS]
    return "; ".join(refusals) if all(refusals) else ""


def _named(problem: Problem, name: str, device: Device) -> Choice:
    if name == INTERPRETED:
        return _interpreted(problem, device)
    names = PALLAS if name == "pallas" else (name,)
    refusals = {each: refusal(each, device, problem.dtype) for each in names}
    able = [each for each in names if not refusals[each]]
    if not able:
        raise NotImplementedError(
            f"implementation={name!r} cannot run here: {'; '.join(refusals.values())}"
        )
    best = able[-1]
    if problem.kernel in PRODUCTS:
        return Choice(best, _best_tiles(problem, best, device), "named")
    for each in able:
        config = _chain_config(problem, each, device)
        if config is not None:
            return Choice(each, config, "named")
    return Choice("composed", None, f"too large for one program, so {name} products")


def _interpreted(problem: Problem, device: Device) -> Choice:
    """The Triton kernels in Pallas' interpreter: for tests, on any device."""
    if problem.dtype not in DTYPES:
        raise NotImplementedError(
            f"implementation={INTERPRETED!r} needs {DTYPES}, got {problem.dtype}"
        )
    if problem.kernel in PRODUCTS:
        return Choice(INTERPRETED, TILES["pallas_triton"][-1], "named")
    config = _chain_config(problem, "pallas_triton", device)
    if config is None:
        return Choice("composed", None, f"too large for one program: {INTERPRETED}")
    return Choice(INTERPRETED, config, "named")


def _heuristic(problem: Problem, device: Device) -> Choice:
    why_not = _pallas_refusal(problem, device)
    if why_not:
        return Choice("xla", None, why_not)
    able = [each for each in PALLAS if not refusal(each, device, problem.dtype)]
    if problem.batch == 0:
        return Choice("xla", None, "nothing to compute")
    if problem.kernel in CHAINS:
        for each in able:
            config = _chain_config(problem, each, device)
            if config is not None:
                return Choice(each, config, "heuristic: a whole matrix fits on chip")
        return Choice("composed", None, "heuristic: too large for one program")
    able = [each for each in able if problem.rows >= _MIN_SIDE[each]]
    if not able:
        return Choice("xla", None, "heuristic: too few tiles to halve")
    config = _best_tiles(problem, able[-1], device)
    return Choice(able[-1], config, "heuristic: fewest waves of tiles; not measured")


def _chain_config(
    problem: Problem, implementation: str, device: Device
) -> ChainConfig | None:
    """How the on-chip kernel runs *problem*; None where it would not fit."""
    if implementation != "pallas_triton" or problem.batch == 0:
        return None
    rows = max(32, next_power(problem.rows))
    columns = max(32, next_power(problem.columns))
    largest = 128
    if problem.kernel == "polynomial_chain" and device.capability == (8, 0):
        largest = 64
    if rows > largest or rows * columns > 128 * 128:
        return None
    elements = rows * columns
    return ChainConfig(1 if elements <= 32 * 32 else 4 if elements <= 64 * 128 else 8)


def _best_tiles(problem: Problem, implementation: str, device: Device) -> TileConfig:
    """The tiles with the least `waves x tile area / rate`.

    The rate is taken as `intensity / (intensity + 16)` of the full one, intensity being
    the FLOPs per operand byte of a tile: an assumption, for want of measurements.
    """
    num_cores = device.num_cores or _DEFAULT_NUM_CORES

    def cost(config: TileConfig) -> float:
        num_rows = round_up(problem.rows, config.rows) // config.rows
        tiles = max(1, problem.batch) * config.ratio * num_rows * (num_rows + 1) // 2
        waves = -(-tiles // num_cores)
        area = config.rows * config.columns
        intensity = area / (config.rows + config.columns)
        return waves * area * (intensity + 16) / intensity

    return min(TILES[implementation], key=cost)


def _padded(problem: Problem, multiple: int) -> Problem:
    """*problem* with sides rounded up to *multiple*."""
    return dataclasses.replace(
        problem,
        rows=round_up(problem.rows, multiple),
        columns=round_up(problem.columns, multiple),
    )


def _tile_rows(choice: Choice) -> int:
    """What the sides of operands are zero-padded to; that must not change the choice."""
    return choice.config.rows if isinstance(choice.config, TileConfig) else 64
