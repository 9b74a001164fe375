"""Weight matrices of public models, as shipped with the package."""

import dataclasses
import functools
import importlib.resources
import json
import math


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Equal weight matrices of a model, as Flax kernels (reduction, output).

    Attributes:
      name: Name of the weight.
      shape: Reduction and output size.
      count: Matrices in the whole model.
      stack: Leading dimensions of the leaf of one layer, such as the experts.
    """

    name: str
    shape: tuple[int, int]
    count: int
    stack: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        """Elements of all the matrices."""
        return self.count * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Workload:
    """The matrices that Muon updates in a public model."""

    name: str
    layers: int
    matrices: tuple[Matrices, ...]


@functools.cache
def read_json() -> dict:
    """Returns the file of workloads; do not change what it returns."""
    source = importlib.resources.files("dmuon_jax.planning") / "workloads.json"
    return json.loads(source.read_text(encoding="utf-8"))


def workload_names() -> tuple[str, ...]:
    """Returns the names of all models."""
    return tuple(read_json()["models"])


def load_workload(name: str) -> Workload:
    """Returns the model called *name*.

    Raises:
      ValueError: There is no such model.
    """
    models = read_json()["models"]
    if name not in models:
        raise ValueError(f"name must be one of {sorted(models)}, got {name!r}")
    model = models[name]
    matrices = tuple(
        Matrices(m["name"], tuple(m["shape"]), m["count"], tuple(m.get("stack", ())))
        for m in model["matrices"]
    )
    return Workload(name, model["layers"], matrices)
