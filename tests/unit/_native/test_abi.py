"""The headers, the library's exported symbols, the ctypes prototypes and structures: all agree.

So does api.h, which C programs use and the package does not, with the prototypes of its tests.
"""

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from dlfs import __version__
from dlfs._native import abi, library
from tests.golden import c_reader
from tests.support import faults

ROOT = Path(__file__).parents[3]
LAYERS = ("codes", "memory", "device", "nvme", "directory", "sequence", "arena", "reader", "stream")
HEADERS = tuple(f"{name}.h" for name in (*LAYERS, "import", "part", "channel", "handle"))
HEADER = "".join((ROOT / "native/include/dlfs" / name).read_text() for name in HEADERS)
API_HEADER = (ROOT / "native/include/dlfs/api.h").read_text()
CODE, API_CODE = (re.sub(r"/\*.*?\*/", "", h, flags=re.DOTALL) for h in (HEADER, API_HEADER))
DECLARATION = re.compile(r"DLFS_API\s+([^;(]*?[\s*])(dlfs_\w+)\(([^;]*)\);")

PROTOTYPES = abi.PROTOTYPES


def structures_of(module: ModuleType) -> dict[str, type[ctypes.Structure]]:
    """The structures that a module defines, by the name in C with which their docstrings begin."""
    return {
        (value.__doc__ or "").split("``")[1]: value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, ctypes.Structure)
        and value.__module__ == module.__name__
    }


STRUCTURES = structures_of(abi)
CONSTANTS = {
    name: value for name, value in vars(abi).items() if name.isupper() and type(value) is int
}

# Passed as arrays of numpy, thus not mirrored as ctypes structures.
NUMPY_STRUCTURES = {"dlfs_location"}

INTEGERS = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "uint8_t": ctypes.c_uint8,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "void": None,
}

FUNCTIONS, API_FUNCTIONS = (
    {
        name: (restype.strip(), [part.strip() for part in parameters.split(",")])
        for restype, name, parameters in DECLARATION.findall(code)
    }
    for code in (CODE, API_CODE)
)


def is_pointer(ctype: object) -> bool:
    if ctype in (ctypes.c_void_p, ctypes.c_char_p):
        return True
    return isinstance(ctype, type) and issubclass(ctype, ctypes._Pointer)


def assert_matches(declared: str, ctype: object, where: str) -> None:
    """A ctypes type stands for a C type: a pointer for a pointer, else the same integer."""
    if "*" in declared or "[" in declared:
        assert is_pointer(ctype), f"{where}: {declared} against {ctype}"
        return
    words = [word for word in declared.split() if word != "const"]
    assert words[0] in INTEGERS, f"{where}: {declared}"
    assert ctype is INTEGERS[words[0]], f"{where}: {declared} against {ctype}"


def test_every_function_is_bound_and_no_other() -> None:
    assert len(FUNCTIONS) == CODE.count("DLFS_API") - 1  # its own #define
    assert set(FUNCTIONS) == set(PROTOTYPES)
    assert len(API_FUNCTIONS) == API_CODE.count("DLFS_API ")
    assert set(API_FUNCTIONS) == set(c_reader.PROTOTYPES)


@pytest.mark.parametrize("name", sorted({**FUNCTIONS, **API_FUNCTIONS}))
def test_prototype(name: str) -> None:
    restype, parameters = (FUNCTIONS | API_FUNCTIONS)[name]
    bound_restype, bound_parameters = {**PROTOTYPES, **c_reader.PROTOTYPES}[name]
    assert_matches(restype, bound_restype, f"{name} returns")
    if parameters == ["void"]:
        parameters = []
    assert len(parameters) == len(bound_parameters)
    for parameter, bound in zip(parameters, bound_parameters, strict=True):
        assert_matches(parameter, bound, name)


def test_exports_are_the_header() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm (package binutils)")
    command = [nm, "-D", "--defined-only", library.library()._name]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    symbols = {line.split()[2].split("@")[0] for line in listing.splitlines() if " T " in line}
    assert symbols == {*FUNCTIONS, *API_FUNCTIONS}


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler")
    return found


def run_c(body: str, folder: Path, *headers: str) -> list[str]:
    """Compile and run a main() with headers included, by default ``HEADERS``; return its lines."""
    source, program = folder / "main.c", folder / "main"
    named = headers or tuple(f"dlfs/{name}" for name in HEADERS)
    includes = "".join(f"#include <{name}>\n" for name in (*named, "stddef.h", "stdio.h"))
    source.write_text(f"{includes}int main(void)\n{{\n{body}\nreturn 0;\n}}\n")
    flags = ["-std=c17", "-Wall", "-Wextra", "-Werror"]
    folders = ("include", "spdk", "fuse", "tests")
    flags += [f"-I{ROOT}/native/{folder}" for folder in folders]
    subprocess.run([compiler(), *flags, str(source), "-o", str(program)], check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")


def layout(structures: dict[str, type[ctypes.Structure]]) -> tuple[list[str], list[str]]:
    """The sizes and offsets that ctypes gives structures, and C that prints them."""
    expected, body = [], []
    for name, structure in structures.items():
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        body.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in structure._fields_:
            descriptor = getattr(structure, field)
            expected.append(f"{name}.{field} {descriptor.offset} {descriptor.size}")
            body.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                f"sizeof((({name} *)0)->{field}));"
            )
    return expected, body


@pytest.mark.parametrize(
    ("program", "flags", "name"),
    [("c++", ["-std=c++11"], "main.cc"), ("cc", ["-std=c99", "-Wconversion"], "main.c")],
)
def test_headers_compile_elsewhere(
    program: str, flags: list[str], name: str, tmp_path: Path
) -> None:
    """Programs in C++ and in older C include them without a warning."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program}")
    source = tmp_path / name
    source.write_text(
        '#include "dlfs/api.h"\n#include "dlfs/channel.h"\n#include "dlfs/import.h"\n'
        '#include "dlfs/part.h"\n'
    )
    flags = [*flags, "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/native/include"]
    subprocess.run([found, *flags, "-fsyntax-only", source], check=True)


def test_a_location_is_taken_apart_as_on_media(tmp_path: Path) -> None:
    address, length, crc32c = (1 << 56) - 77, (1 << 40) - 3, 0xDEADBEEF
    packed = struct.pack("<IIQ", crc32c, length & 0xFFFFFFFF, address | (length >> 32) << 56)
    body = f"""
        const unsigned char media[16] = {{{", ".join(map(str, packed))}}};
        dlfs_location location;
        __builtin_memcpy(&location, media, sizeof location);
        printf("%llu\\n%llu\\n%u\\n", (unsigned long long)dlfs_location_address(&location),
               (unsigned long long)dlfs_location_length(&location),
               dlfs_location_crc32c(&location));
    """
    assert run_c(body, tmp_path, "dlfs/dlfs.h") == [str(address), str(length), str(crc32c), ""]


def test_structures_have_the_sizes_and_offsets_of_c(tmp_path: Path) -> None:
    declared = set(re.findall(r"typedef struct (dlfs_\w+) \{", CODE))
    assert declared - NUMPY_STRUCTURES == set(STRUCTURES)
    expected, body = layout(STRUCTURES)
    body.append('printf("%zu\\n", sizeof(dlfs_location));')
    assert run_c("\n".join(body), tmp_path) == [*expected, "16", ""]
    assert set(re.findall(r"typedef struct (dlfs_\w+) \{", API_CODE)) == set(c_reader.STRUCTURES)
    expected, body = layout(c_reader.STRUCTURES)
    assert run_c("\n".join(body), tmp_path, "dlfs/api.h") == [*expected, ""]


def test_the_devices_of_tests_agree_with_their_header(tmp_path: Path) -> None:
    header = (ROOT / "native/tests/fault/fault.h").read_text()
    assert {name for _, name, _ in DECLARATION.findall(header)} == set(faults.PROTOTYPES)
    expected, body = layout({"dlfs_fault_config": faults.FaultConfig})
    assert run_c("\n".join(body), tmp_path, "fault/fault.h") == [*expected, ""]


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_structures_have_every_field(name: str) -> None:
    match = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", CODE, re.DOTALL)
    assert match is not None
    fields = re.findall(r"(\w+)(?:\[\w+\])?;", match[1])
    assert fields == [field for field, *_ in STRUCTURES[name]._fields_]


def test_constants_have_the_values_of_c(tmp_path: Path) -> None:
    names = [name for name in re.findall(r"#define DLFS_(\w+) ", CODE) if name in CONSTANTS]
    assert {"E_CHECKSUM", "E_END", "OPEN_WRITE", "PLAN_AUTO", "PERMUTATION_ROUNDS_MAX"} < set(names)
    body = "\n".join(f'printf("{name} %lld\\n", (long long)DLFS_{name});' for name in names)
    assert run_c(body, tmp_path) == [*(f"{name} {CONSTANTS[name]}" for name in names), ""]
    assert set(CONSTANTS) <= set(names)


def test_every_code_of_the_header_has_an_error() -> None:
    codes = {int(value) for value in re.findall(r"#define DLFS_E_\w+ \((-\d+)\)", CODE)}
    handled = {code for code in library._CODES if code < -10000}
    assert codes - {abi.E_END} == handled


def test_header_package_and_library_are_of_one_version() -> None:
    parts = re.findall(r"#define DLFS_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", CODE)
    assert ".".join(parts) == __version__ == ".".join(map(str, abi.VERSION))
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"VERSION {__version__} " in (ROOT / "native/CMakeLists.txt").read_text()
    got = library.library().dlfs_version()
    assert (got >> 16, got >> 8 & 0xFF, got & 0xFF) == abi.VERSION


def test_the_umbrella_includes_every_layer() -> None:
    umbrella = (ROOT / "native/include/dlfs/dlfs.h").read_text()
    assert set(re.findall(r"#include <dlfs/(\w+)\.h>", umbrella)) == set(LAYERS)
