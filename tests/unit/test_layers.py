"""The shape of the code: layers, who may know ctypes, lengths of functions and files, prose."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "dlfs").rglob("*.py"))
C_FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "native").rglob("*.[ch]"))

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
LONG_FILES: dict[str, int] = {}  # a file above the limit, with its own limit
COLUMNS_MAX = 100


def parse(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def test_imports_point_down() -> None:
    """import-linter holds the list of layers, in pyproject.toml."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", [name for name in MODULES if "/_native/" not in name])
def test_only_native_knows_ctypes(module: str) -> None:
    assert not {name.split(".")[0] for name in imports(parse(module))} & {"ctypes", "cffi"}


@pytest.mark.parametrize("module", [name for name in MODULES if "/cli/" not in name])
def test_nobody_imports_the_command_line(module: str) -> None:
    assert not [name for name in imports(parse(module)) if name.startswith("dlfs.cli")]


@pytest.mark.parametrize(
    "module", [f"dlfs/{name}.py" for name in ("arguments", "errors", "units", "wording")]
)
def test_the_ground_floor_is_standard_library_only(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(parse(module))}
    assert roots <= set(sys.stdlib_module_names) | {"dlfs", "__future__"}


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_functions_are_of_readable_length(module: str) -> None:
    tree = parse(module)
    assert len((ROOT / module).read_text().splitlines()) <= FILE_LINES_MAX
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            body = node.end_lineno - node.lineno + 1
            docstring = ast.get_docstring(node, clean=False)
            body -= len(docstring.splitlines()) if docstring else 0
            assert body <= FUNCTION_LINES_MAX, f"{module}:{node.lineno} {node.name}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_open_with_prose(module: str) -> None:
    assert ast.get_docstring(parse(module)), f"{module} needs a docstring"


@pytest.mark.parametrize("name", C_FILES)
def test_c_files_open_with_prose_and_keep_to_the_columns(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert lines[0].startswith("/*"), f"{name} needs a comment at its head"
    assert len(lines) <= LONG_FILES.get(name, FILE_LINES_MAX)
    long = [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS_MAX]
    assert not long, f"{name}: lines over {COLUMNS_MAX} columns: {long}"
    functions = [number for number, line in enumerate(lines) if line == "{"]
    ends = [number for number, line in enumerate(lines) if line == "}"]
    for start in functions:
        end = min(number for number in ends if number > start)
        assert end - start <= FUNCTION_LINES_MAX, f"{name}:{start + 1}"
