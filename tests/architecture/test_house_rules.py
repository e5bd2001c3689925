"""House rules that import-linter and ruff cannot say: sizes, names, and one door to each outside thing.

Each rule is a function from a parsed file to the places that break it. It runs over the whole tree, and over a
planted line that it must notice.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("torchtrain", "models", "scripts")
TEXT_SUFFIXES = {".py", ".sh", ".yaml", ".yml", ".toml", ".md", ".sbatch", ".json"}
MAX_FILE_LINES = 500
MAX_BODY_LINES = 60

# One file per technique that reaches into private PyTorch API, and the technique.
PRIVATE_TORCH = {
    "torchtrain/distributed/fsdp2/shared_parameters.py": "parameters tied across units",
    "torchtrain/distributed/fsdp2/replicate.py": "parameters kept whole inside a sharded unit",
    "torchtrain/activation_checkpoint.py": "which attention ops selective checkpointing keeps",
    "torchtrain/checkpoint/safe_reader.py": "the records of a checkpoint's metadata",
    "torchtrain/distributed/collective_ops.py": "the group that a functional collective names",
    "torchtrain/distributed/context_parallel/block_attention.py": "attention that also returns its log-denominator",
    "torchtrain/distributed/comm_trace.py": "the dispatch mode that sees every operator",
    "torchtrain/distributed/dtensor_internals.py": "which rows of a DTensor a rank owns",
    "torchtrain/distributed/fsdp2/param_group_internals.py": "split or flat parameter groups for comm fusion",
    "torchtrain/distributed/fsdp2/hidden_hooks.py": "the stack of dispatch modes",
    "torchtrain/distributed/fsdp2/main_grad.py": "fp32 gradients of low-precision parameters",
    "torchtrain/distributed/fsdp2/unreduced_gradients.py": "sums of gradients that wait for their reduction",
    "torchtrain/distributed/gradient_norm.py": "norm and scaling of many tensors in one call",
    "torchtrain/optim/main_params.py": "copy of many tensors in one call",
    "torchtrain/runtime/device.py": "memory snapshots",
}


@dataclass(frozen=True)
class SourceFile:
    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


Rule = Callable[[SourceFile], Iterator[str]]


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of everything imported, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every attribute access such as ``os.environ``."""
    yield from ((node.lineno, ast.unparse(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def find_long_files(file: SourceFile) -> Iterator[str]:
    if (lines := file.text.count("\n")) > MAX_FILE_LINES:
        yield f"{lines} lines; a place to think again"


def find_long_functions(file: SourceFile) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and (lines := body[-1].end_lineno - body[0].lineno + 1) > MAX_BODY_LINES:
                yield f"{node.lineno}: the body of {node.name} has {lines} lines"


def find_code_in_init(file: SourceFile) -> Iterator[str]:
    if file.path.endswith("__init__.py"):
        body = file.tree.body[1:] if ast.get_docstring(file.tree) is not None else file.tree.body
        yield from (f"{node.lineno}: an __init__.py holds a docstring at most" for node in body)


def find_vague_names(file: SourceFile) -> Iterator[str]:
    vague = {"util", "utils", "helper", "helpers", "common", "misc"} & set(Path(file.path).with_suffix("").parts)
    yield from (f"'{name}' says nothing about what is inside" for name in vague)


def find_environment_reads(file: SourceFile) -> Iterator[str]:
    if file.path.startswith("scripts/") or file.path == "torchtrain/runtime/env.py":
        return
    pattern = re.compile(r"os\.(environb?|getenvb?|putenv|unsetenv)\b")
    for line, name in {*imported_names(file.tree), *dotted_names(file.tree)}:
        if pattern.match(name):
            yield f"{line}: {name}; only runtime/env.py reads the environment"


def find_device_apis(file: SourceFile) -> Iterator[str]:
    if file.path.startswith("scripts/") or file.path == "torchtrain/runtime/device.py":
        return
    pattern = re.compile(r"(torch\.(cuda|npu|xpu|mps|accelerator|get_device_module)|torch_npu)\b")
    for line, name in {*imported_names(file.tree), *dotted_names(file.tree)}:
        if pattern.match(name):
            yield f"{line}: {name}; only runtime/device.py names device APIs"


def find_private_torch(file: SourceFile) -> Iterator[str]:
    if file.path not in PRIVATE_TORCH:
        yield from private_torch_uses(file)


def private_torch_uses(file: SourceFile) -> Iterator[str]:
    private = re.compile(r"(torch|torchdata)\..*\b_(?!_)\w+")
    for line, name in imported_names(file.tree):
        if private.match(f"{name}"):
            yield f"{line}: {name} is private to PyTorch; see PRIVATE_TORCH"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            owner = ast.unparse(node.value)
            is_own = owner in ("self", "cls", "super()") or node.attr in ("_replace", "_asdict")
            if not is_own and owner not in sys.stdlib_module_names:
                yield f"{node.lineno}: {owner}.{node.attr} is private to its owner; see PRIVATE_TORCH"


def find_collectives_in_nn(file: SourceFile) -> Iterator[str]:
    if file.path.startswith("torchtrain/nn/"):
        for line, name in {*imported_names(file.tree), *dotted_names(file.tree)}:
            if name.startswith("torch.distributed"):
                yield f"{line}: {name}; nn is code for one device"


def find_foreign_code_in_the_oracle(file: SourceFile) -> Iterator[str]:
    if file.path.startswith("models/reference/"):
        for line, name in imported_names(file.tree):
            is_plain = name.split(".")[0] in ("torch", "__future__", "math", "dataclasses", "collections", "typing")
            if not is_plain and not name.startswith("models.reference."):
                yield f"{line}: {name}; the oracle is plain torch"


def find_unfinished_work(file: SourceFile) -> Iterator[str]:
    # Spelled apart, so that this file does not find itself.
    words, roots = "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)), "home|root|work|tmp|Users|opt"
    pattern = re.compile(rf"\b({words})\b|(?<![\w.\-}}\)*/<])/({roots})/\w")
    for number, line in enumerate(file.text.splitlines(), start=1):
        if match := pattern.search(line):
            yield f"{number}: '{match.group()}' is unfinished work or a path of one machine"


def source_files() -> list[SourceFile]:
    paths = sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    return [SourceFile(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


def text_files() -> list[SourceFile]:
    folders = (*SOURCES, "tests", "docs", "train_configs", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    texts = (path for path in sorted(paths) if path.is_file() and path.suffix in TEXT_SUFFIXES)
    return [SourceFile(str(path.relative_to(ROOT)), path.read_text()) for path in texts]


def assert_nothing_found(places: Iterator[str]) -> None:
    if found := "\n".join(places):
        pytest.fail(found, pytrace=False)


RULES: dict[Rule, tuple[str, str]] = {
    find_long_files: ("torchtrain/a.py", "a = 1\n" * 501),
    find_long_functions: ("torchtrain/a.py", "def f():\n" + "    a = 1\n" * 61),
    find_code_in_init: ("torchtrain/a/__init__.py", '"""Docstring."""\nfrom torchtrain.a.b import c\n'),
    find_vague_names: ("torchtrain/nn/utils.py", ""),
    find_environment_reads: ("torchtrain/a.py", "import os\nos.environ.get('RANK')\n"),
    find_device_apis: ("torchtrain/a.py", "import torch\ndef f():\n    torch.cuda.synchronize()\n"),
    find_private_torch: ("torchtrain/a.py", "from torch.distributed.fsdp._fully_shard import _fsdp_param\n"),
    find_collectives_in_nn: ("torchtrain/nn/a.py", "def f():\n    import torch.distributed as dist\n"),
    find_foreign_code_in_the_oracle: ("models/reference/a.py", "from torchtrain.nn import rope\n"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_is_kept(rule: Rule) -> None:
    assert_nothing_found(f"{file.path}:{place}" for file in source_files() for place in rule(file))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_notices_a_planted_break(rule: Rule) -> None:
    path, text = RULES[rule]
    assert list(rule(SourceFile(path, text))) != []


def test_no_unfinished_work_and_no_machine_paths() -> None:
    assert_nothing_found(f"{file.path}:{place}" for file in text_files() for place in find_unfinished_work(file))


@pytest.mark.parametrize("line", ["# TO" + "DO later", "path = '/home" + "/me/data'", "see /work" + "/main"])
def test_unfinished_work_is_noticed(line: str) -> None:
    assert list(find_unfinished_work(SourceFile("a.py", line))) != []


@pytest.mark.parametrize("path", PRIVATE_TORCH)
def test_the_list_of_private_uses_is_not_stale(path: str) -> None:
    assert list(private_torch_uses(SourceFile(path, (ROOT / path).read_text()))) != []


def test_links_in_documents_lead_somewhere() -> None:
    documents = [file for file in text_files() if file.path.endswith(".md")]
    links = [(file.path, link) for file in documents for link in re.findall(r"\]\(([^)#\s]+)", file.text)]
    relative = [(path, link) for path, link in links if "://" not in link]
    assert [(path, link) for path, link in relative if not (ROOT / path).parent.joinpath(link).exists()] == []


def test_long_test_files_are_split() -> None:
    tests = [file for file in text_files() if file.path.startswith("tests/") and file.path.endswith(".py")]
    assert [file.path for file in tests if list(find_long_files(file))] == []
