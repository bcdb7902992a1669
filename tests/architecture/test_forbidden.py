"""The product never runs code from data, unpickles, forks, has global state or modules for odds and ends."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import PRODUCT, faults_by_file, nodes_of, tree_of

# multiprocessing pickles what it passes, and forks unless told otherwise; child processes are started by subprocess.
MODULES = frozenset(
    {
        "pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "joblib",
        "shelve",
        "marshal",
        "multiprocessing",
        "torch.multiprocessing",
    }
)
BUILTINS = frozenset({"eval", "exec", "compile", "__import__", "breakpoint"})
ATTRIBUTES = frozenset(
    {
        "torch.load",
        "torch.save",
        "yaml.load",
        "yaml.unsafe_load",
        "numpy.load",
        "np.load",
        "os.fork",
        "os.forkpty",
        "os.system",
        "pty.fork",
        "concurrent.futures.ProcessPoolExecutor",
    }
)
# Names that are forbidden as attributes of any object, and as variables, parameters and keywords.
NAMES = frozenset(
    {
        "trust_remote_code",
        "ProcessPoolExecutor",
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
)


def found_in(tree: ast.AST) -> list[str]:
    """Return everything in a syntax tree that is forbidden, with its line."""
    return [f"line {getattr(node, 'lineno', '?')}: {what}" for node in nodes_of(tree) for what in _forbidden(node)]


def _forbidden(node: ast.AST) -> list[str]:
    match node:
        case ast.Global():
            return ["global"]
        case ast.Import():
            return [alias.name for alias in node.names if alias.name in MODULES]
        case ast.ImportFrom():
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            if node.module in MODULES:
                return [str(node.module)]
            return [name for name in full if name in MODULES | ATTRIBUTES or name.rpartition(".")[2] in NAMES]
        case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
            return [name]
        case ast.Attribute(attr=attribute) if attribute in NAMES or ast.unparse(node) in ATTRIBUTES:
            return [ast.unparse(node)]
        case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)) if name in NAMES:
            return [name]
    return []


def test_nothing_forbidden_is_used() -> None:
    assert faults_by_file(PRODUCT, lambda path: found_in(tree_of(path))) == {}


def test_no_module_collects_odds_and_ends() -> None:
    names = {"utils", "util", "helpers", "misc", "common"}
    assert faults_by_file(PRODUCT, lambda path: names & set(path.with_suffix("").parts)) == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch.multiprocessing as mp",
        "def f():\n    global state",
        "eval(text)",
        "torch.load(path)",
        "from torch import load",
        "os.fork()",
        "load(model, trust_remote_code=True)",
        "def load(trust_remote_code): ...",
        "from concurrent.futures import ProcessPoolExecutor",
        "dist.broadcast_object_list(things)",
    ],
)
def test_the_checker_finds_what_is_forbidden(code: str) -> None:
    assert len(found_in(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "re.compile(text)",
        "safetensors.torch.load_file(path)",
        "class F:\n    def load(self): ...",
        "json.load(f)",
    ],
)
def test_the_checker_lets_the_rest_pass(code: str) -> None:
    assert found_in(ast.parse(code)) == []
