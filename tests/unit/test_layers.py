"""The shape of the code: layers, who may know ctypes, lengths of functions and files, prose."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "dlfs").rglob("*.py"))
C_FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "native").rglob("*.[ch]"))

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 800
LONG_FILES: dict[str, int] = {}  # a file above the limit, with its own limit
COLUMNS_MAX = 100


@functools.cache
def parse(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def test_no_circle_of_python_files() -> None:
    """Imports in functions count, too; those for types do not."""
    files = {module.removesuffix(".py").removesuffix("/__init__"): module for module in MODULES}
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, module in files.items():
        for imported in runtime_imports(parse(module)):
            if imported in files and imported != name:
                graph[name].add(imported)
    graph["dlfs/cli"].discard("dlfs/cli/commands")  # its head says why it is loaded late
    TopologicalSorter(graph).prepare()  # raises CycleError


def runtime_imports(node: ast.AST) -> Iterator[str]:
    """Give the modules that are imported below a node, and names imported from packages."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name.replace(".", "/") for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            package = child.module.replace(".", "/")
            below = [f"{package}/{alias.name}" for alias in child.names]
            modules = [name for name in below if (ROOT / f"{name}.py").exists()]
            yield from modules
            if len(modules) < len(below):
                yield package
        yield from runtime_imports(child)


@pytest.mark.parametrize("part", ["native/src", "native/fuse", "native/spdk"])
def test_no_circle_of_c_files(part: str) -> None:
    """A file that calls a function of another one depends on it."""
    texts = {
        path.relative_to(ROOT).as_posix(): re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        for path in (ROOT / part).rglob("*.c")
    }
    defined: dict[str, str] = {}
    for name, text in texts.items():
        functions = re.findall(
            r"^(?!static)[A-Za-z_][\w *]*?[ *](\w+)\([^;{]*\)\s*\{", text, re.MULTILINE
        )
        defined.update(dict.fromkeys(functions, name))
    graph: dict[str, set[str]] = {name: set() for name in texts}
    for name, text in texts.items():
        for word in set(re.findall(r"\b(\w+)\(", text)) & set(defined):
            used = defined[word]
            if used != name:
                graph[name].add(used)
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_imports_point_down() -> None:
    """import-linter holds the list of layers, in pyproject.toml."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_native_knows_ctypes() -> None:
    knowing = [name for name in MODULES if roots_of(name) & {"ctypes", "cffi"}]
    assert all("/_native/" in name for name in knowing), knowing


def test_no_module_imports_the_command_line() -> None:
    for module in MODULES:
        if "/cli/" not in module:
            wrong = [name for name in imports(parse(module)) if name.startswith("dlfs.cli")]
            assert not wrong, module


def test_the_ground_floor_is_standard_library_only() -> None:
    for name in ("base/arguments", "errors", "base/units", "base/wording"):
        assert roots_of(f"dlfs/{name}.py") <= {*sys.stdlib_module_names, "dlfs", "__future__"}, name


def roots_of(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(parse(module))}


def test_modules_and_functions_are_of_readable_length() -> None:
    for module in MODULES:
        assert len((ROOT / module).read_text().splitlines()) <= FILE_LINES_MAX, module
        for node in ast.walk(parse(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                body = node.end_lineno - node.lineno + 1
                docstring = ast.get_docstring(node, clean=False)
                body -= len(docstring.splitlines()) if docstring else 0
                assert body <= FUNCTION_LINES_MAX, f"{module}:{node.lineno} {node.name}"


def test_modules_open_with_prose() -> None:
    assert not [module for module in MODULES if not ast.get_docstring(parse(module))]


def test_c_files_open_with_prose_and_keep_to_the_columns() -> None:
    for name in C_FILES:
        lines = (ROOT / name).read_text().splitlines()
        assert lines[0].startswith("/*"), f"{name} needs a comment at its head"
        assert len(lines) <= LONG_FILES.get(name, FILE_LINES_MAX), name
        long = [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS_MAX]
        assert not long, f"{name}: lines over {COLUMNS_MAX} columns: {long}"
        ends = [number for number, line in enumerate(lines) if line == "}"]
        for start in (number for number, line in enumerate(lines) if line == "{"):
            end = min(number for number in ends if number > start)
            assert end - start <= FUNCTION_LINES_MAX, f"{name}:{start + 1}"
