"""Compiles for GPUs that are not here, and reads the machine code.

Needs JAX's CUDA plugin and NVIDIA's `cuobjdump` and `nvdisasm` (wheels
`nvidia-cuda-cuobjdump`, `nvidia-cuda-nvdisasm`). Nothing is run: counts, registers and
spills are facts about such a program, times are not.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import subprocess

import jax
import numpy as np
from jax.experimental import topologies

_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: {shared_per_core}
  shared_memory_per_block_optin: {shared_per_block}
  threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98
  device_memory_size: 80000000000
  cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""

# kind, major compute capability, multiprocessors, shared memory per core and per block
_DEVICES = {
    "sm_80": ("NVIDIA A100", 8, 108, 167936, 166912),
    "sm_90": ("NVIDIA H200", 9, 132, 233472, 232448),
    "sm_100": ("NVIDIA B200", 10, 148, 233472, 232448),
}


@dataclasses.dataclass(frozen=True)
class Code:
    """One kernel's machine code: its name, stack bytes per thread, and SASS text."""

    name: str
    stack_bytes: int
    sass: str

    def count(self, operation):
        """How often an instruction whose name starts with *operation* occurs."""
        return len(re.findall(rf"\b{operation}", self.sass))

    def spills_in_loops_with(self, operation):
        """Accesses to local memory in the innermost loop that has *operation*.

        In all of the code where the assembler unrolled that loop.
        """
        lines = self.sass.splitlines()
        places = {}
        for number, line in enumerate(lines):
            if match := re.search(r"^\s*(\.L_x_\d+):", line):
                places[match[1]] = number
            if match := re.search(r"/\*([0-9a-f]{4,})\*/", line):
                places[f"0x{match[1].lstrip('0') or '0'}"] = number
        loops = []
        for end, line in enumerate(lines):
            match = re.search(r"\bBRA\b.*?(\.L_x_\d+|\b0x[0-9a-f]+)", line)
            if match and places.get(match[1], end) < end:
                body = "\n".join(lines[places[match[1]] : end])
                if re.search(rf"\b{operation}", body):
                    loops.append(body)
        assert self.count(operation), f"{self.name}: no {operation}"
        main = min(loops, key=len, default=self.sass)
        return len(re.findall(r"\b(?:LDL|STL)\b", main))


def mesh_of(architecture, size=1):
    """A mesh over *size* absent devices, one axis "a"."""
    kind, major, cores, shared_per_core, shared_per_block = _DEVICES[architecture]
    target = _TARGET.format(
        kind=kind,
        major=major,
        cores=cores,
        shared_per_core=shared_per_core,
        shared_per_block=shared_per_block,
    )
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{size}"
    )
    return jax.sharding.Mesh(np.array(topology.devices), ("a",))


def compile_for(architecture, function, *shapes):
    """*function* compiled for operands of the given (shape, dtype) pairs."""
    mesh = mesh_of(architecture)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*operands).compile()


def triton_code(compiled, directory):
    """The machine code of every kernel of a compiled program that XLA holds."""
    codes = {}
    for number, cubin in enumerate(_cubins(compiled.runtime_executable().serialize())):
        path = pathlib.Path(directory) / f"{number}.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "-res-usage", path)
        sass = _tool("cuobjdump", "-sass", path)
        for name, stack in re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+)", usage):
            parts = re.split(r"Function : ", sass)
            own = [part for part in parts if part.startswith(name)]
            if own:
                codes[name] = Code(name, int(stack), own[0])
    return codes


def mosaic_code(directory):
    """The machine code Mosaic left in *directory* (its MOSAIC_GPU_DUMP_TO)."""
    codes = {}
    for path in pathlib.Path(directory).glob("*.sass_ctrl"):
        report = path.with_suffix(".ptxas").read_text(errors="replace")
        stack = int(re.search(r"(\d+) bytes stack frame", report)[1])
        name = re.sub(r"_\d+$", "", path.stem)
        codes[name] = Code(name, stack, path.read_text(errors="replace"))
    return codes


def binaries():
    """The folder with `cuobjdump` and `nvdisasm`; None where they are missing."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        for path in pathlib.Path(root).glob("**/bin/cuobjdump"):
            if (path.parent / "nvdisasm").exists():
                return path.parent
    return None


def _tool(name, *arguments):
    folder = binaries()
    path = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    done = subprocess.run(
        [folder / name, *arguments],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def _cubins(data, depth=2):
    """CUDA ELF files in a serialized executable, plain or compressed by snappy.

    Older executables have compressed streams inside one another, up to *depth*.
    """
    found = _elves(data)
    for start in range(len(data) - 16):
        try:
            inner = _unsnappy(data, start)
        except IndexError:
            continue
        if inner:
            found += _elves(inner) or (_cubins(inner, depth - 1) if depth > 1 else [])
    return list(dict.fromkeys(found))


def _elves(data):
    """Whole CUDA ELF files (machine 190) in *data*."""
    found = []
    at = data.find(b"\x7fELF")
    while at >= 0:
        header = data[at : at + 64]
        offset = int.from_bytes(header[40:48], "little")
        size, count = (int.from_bytes(header[i : i + 2], "little") for i in (58, 60))
        segments = int.from_bytes(header[32:40], "little")
        segment_size, num_segments = (
            int.from_bytes(header[i : i + 2], "little") for i in (54, 56)
        )
        end = at + max(offset + size * count, segments + segment_size * num_segments)
        is_cuda = int.from_bytes(header[18:20], "little") == 190
        if is_cuda and size == 64 and end <= len(data) and b".text." in data[at:end]:
            found.append(bytes(data[at:end]))
            at = end - 4
        at = data.find(b"\x7fELF", at + 4)
    return found


def _unsnappy(data, at):
    """The snappy stream that starts at *at*, or None where none does."""
    size = shift = 0
    while True:
        byte = data[at]
        at += 1
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if not 512 <= size <= 1 << 26:
        return None
    out = bytearray()
    while len(out) < size:
        tag = data[at]
        at += 1
        kind, length = tag & 3, tag >> 2
        if kind == 0:
            if length >= 60:
                width = length - 59
                length = int.from_bytes(data[at : at + width], "little")
                at += width
            if at + length + 1 > len(data):
                return None
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if kind == 1:
            length, offset = 4 + (length & 7), (tag >> 5) << 8 | data[at]
            at += 1
        else:
            width = 2 if kind == 2 else 4
            length, offset = 1 + length, int.from_bytes(data[at : at + width], "little")
            at += width
        if not 0 < offset <= len(out):
            return None
        for _ in range(length):
            out.append(out[-offset])
    return bytes(out) if len(out) == size else None
