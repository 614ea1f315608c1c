"""The package layout: layers, no circles, a sentence for every module (docs/architecture.md).

How many files and lines there are is no test: `python -m scripts.sizes` prints it.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import meshwright
from meshwright.commands.plan import trace
from meshwright.models import attention, decoder, layers, loss, table
from meshwright.models.families import MODELS, llama
from meshwright.parallelisms import activation_checkpoint, parallelize, tensor_parallel
from meshwright.parallelisms.cpu_kernels import attention as cpu_attention
from meshwright.train.optim import gradients, in_backward, matrices, optimizers, registry, update
from scripts import draw_diagrams, draw_house

PACKAGE = Path(meshwright.__file__).parent
FILES = {file.relative_to(PACKAGE).as_posix(): file for file in sorted(PACKAGE.rglob("*.py"))}
FOLDERS = sorted({file.parent for file in FILES.values()})

FLOORS = (
    "system models",
    "config",
    "parallelisms metrics datasets",
    "checkpoint launch",
    "train",
    "commands",
    "api",
)
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts.split()}
MOST_PRIVATE_NAMES = 67
"""Of torch, and of Python: a new one is a decision, behind one function or one import, with a
comment on its failure if it goes. `_scaled_dot_product_...` are operators without another name."""
OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")  # public, documented by Python

WITH_NAMES_OF_FAMILIES = {
    "commands/prove/plain_decoder.py",  # what plain PyTorch computes for each
    "config/job_config.py",  # the family of a config that names none
    "config/section.py",  # chat templates, some of which are called as a family is
    "datasets/tokenizers/kinds.py",  # the repository of each release's tokenizer
}

LATE_WITHOUT_A_REASON = {
    "checkpoint/manager.py": 3,
    "launch/__main__.py": 1,
    "models/attention.py": 1,
    "system/hardware.py": 3,
}
"""The exceptions of today. A limit that they keep again fails, so that its line goes."""


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text("utf-8"))


@cache
def functions_of(name: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(parsed(name)) if isinstance(node, ast.FunctionDef)]


def code_of(name: str) -> list[ast.stmt]:
    """The statements of a module, without its docstring."""
    body = parsed(name).body
    return body[1:] if ast.get_docstring(parsed(name)) is not None else body


def test_a_module_begins_with_a_sentence() -> None:
    """A folder with one to four, of which one says the things that are elsewhere."""
    for name in FILES:
        text = ast.get_docstring(parsed(name)) or ""
        first = text.split("\n\n")[0]
        assert re.match(r"[\w`]", first), (name, first)
        assert re.search(r"\w.*[.\]]$", first, re.DOTALL), (name, first)  # ] ends a usage line
    for folder in FOLDERS:
        name = (folder / "__init__.py").relative_to(PACKAGE).as_posix()
        text = ast.get_docstring(parsed(name)) or ""
        assert 1 <= len(re.findall(r"\.(?=\s|$)", text)) <= 4, (name, text)


def test_a_docstring_tells_of_arguments_that_are_there() -> None:
    for name in FILES:
        for node in ast.walk(parsed(name)):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                continue
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            makers = (one for one in inside if isinstance(one, ast.FunctionDef))
            maker = next((one for one in makers if one is node or one.name == "__init__"), None)
            told = (ast.get_docstring(node) or "").partition("\nArgs:\n")[2].split("\n\n")[0]
            if maker is not None:
                there = {one.arg for one in ast.walk(maker.args) if isinstance(one, ast.arg)}
                words = re.findall(r"(?m)^    (\w[^:\n]*):", told.replace("`", ""))
                assert {*", ".join(words).split(", ")} - {""} <= there, (name, node.name)


def test_no_file_only_forwards() -> None:
    """A file that imports does something with it: more than other names for the same things."""
    for name in FILES:
        forwards = [
            isinstance(node, (ast.Import, ast.ImportFrom))
            or (isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)))
            or ast.unparse(node).startswith("__all__")
            for node in code_of(name)
        ]
        assert not (forwards and all(forwards)), name


@cache
def imported_by(name: str) -> tuple[str, ...]:
    """Modules and names that a file imports, in functions and for types, too."""
    found: list[str] = []
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return tuple(found)


def graph_of(folder: Path) -> dict[str, set[str]]:
    """Which files and folders of a folder each of them imports."""
    inside = {Path(file.relative_to(folder).parts[0]).stem for file in files_in(folder).values()}
    graph: dict[str, set[str]] = {entry: set() for entry in inside}
    prefix = ".".join((PACKAGE.name, *folder.relative_to(PACKAGE).parts, ""))
    for name, file in files_in(folder).items():
        here = Path(file.relative_to(folder).parts[0]).stem
        for module in imported_by(name):
            if module.startswith(prefix):
                there = module.removeprefix(prefix).split(".")[0]
                graph[here].add(there if there in inside else "__init__")
        graph[here].discard(here)
    return graph


def files_in(folder: Path) -> dict[str, Path]:
    return {name: file for name, file in FILES.items() if file.is_relative_to(folder)}


def test_imports_inside_a_folder_have_no_circle() -> None:
    """Imports in functions count, since a late one may be there to hide a circle."""
    for folder in FOLDERS:
        try:
            TopologicalSorter(graph_of(folder)).prepare()
        except CycleError as error:
            raise AssertionError(f"{folder.name}: {' imports '.join(error.args[1])}") from None


def test_imports_point_down() -> None:
    """A part may import parts of lower floors only; a new part must be given a floor."""
    assert {folder.name for folder in FOLDERS if folder.parent == PACKAGE} == FLOOR.keys()
    for name in FILES:
        here = Path(name).parts[0]
        for module in imported_by(name) if here in FLOOR else ():
            package, there, *_ = [*module.split("."), ""]
            if package == PACKAGE.name and there in FLOOR:
                assert there == here or FLOOR[there] < FLOOR[here], f"{name} imports {module}"


def late_without_a_reason(name: str) -> int:
    """Imports inside of functions with no comment on them or on the line before their group."""
    lines = FILES[name].read_text("utf-8").splitlines()
    count, end, has_reason = 0, 0, False
    inside = {
        node.lineno: node
        for function in functions_of(name)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    for line, node in sorted(inside.items()):
        is_next = line <= end + 2 and not any(lines[end : line - 1])
        end = node.end_lineno or line
        has_reason = (is_next and has_reason) or "#" in " ".join(lines[line - 2 : end])
        count += not has_reason
    return count


def test_only_tables_outside_the_models_name_a_family() -> None:
    """What is true of a family follows from its table of layers."""
    others = [file for file in FILES if not file.startswith("models/")]
    texts = {
        file: {node.value for node in ast.walk(parsed(file)) if isinstance(node, ast.Constant)}
        for file in others
    }
    assert {file for file, own in texts.items() if own & MODELS.keys()} == WITH_NAMES_OF_FAMILIES


def test_a_late_import_says_why() -> None:
    found = {name: late_without_a_reason(name) for name in FILES}
    assert {name: count for name, count in found.items() if count} == LATE_WITHOUT_A_REASON


def is_private(name: str) -> bool:
    parts = [part for part in name.split(".") if part not in OF_NAMED_TUPLES]
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def own_names() -> Iterator[str]:
    for node in (node for name in FILES for node in ast.walk(parsed(name))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def roots_of(tree: ast.Module) -> set[str]:
    """Names by which a module has torch, or something of it."""
    roots = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            roots |= {alias.asname or alias.name for alias in node.names}
    return roots


def private_names(tree: ast.Module, own: set[str]) -> set[str]:
    """Private names of torch that a module uses. One that is `own` as well counts where what it
    is taken of is plainly torch's."""
    roots, found = roots_of(tree), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_of_torch = ast.unparse(node).split(".")[0] in roots
            found |= {node.attr} if is_of_torch else {node.attr} - own
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {node.module or "", *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch")}
    return {name for name in found if is_private(name)}


def test_private_names_of_torch_become_no_more() -> None:
    own = {*own_names()}
    found = {name: private_names(parsed(name), own) for name in FILES}
    assert sum(map(len, found.values())) <= MOST_PRIVATE_NAMES, found


def test_a_name_of_ours_hides_none_of_torchs() -> None:
    tree = ast.parse("import torch\ntorch._C._autograd._f()\nself._autograd()\nx._mine()")
    assert private_names(tree, {"_autograd", "_mine"}) == {"_C", "_autograd", "_f"}


def file_of(thing: object) -> str:
    return inspect.getsourcefile(thing) or ""  # type: ignore[arg-type]


def test_the_plan_knows_the_loss_and_the_optimizers() -> None:
    """Or logits would count as temporary, and an update as anything else, in every plan."""
    assert trace._kind_of(file_of(loss.SummedLoss), "f")[0] == trace.LOSS
    for module in (optimizers, registry, matrices, update, in_backward):
        assert trace._kind_of(file_of(module), "f")[0] == trace.UPDATE
    for module in (decoder, gradients):  # the norm of gradients comes before the update
        assert trace._kind_of(file_of(module), "f")[0] not in (trace.LOSS, trace.UPDATE)


def test_a_compiled_graph_is_of_the_code_that_it_is_made_of() -> None:
    """Or stale graphs of the version before would be found again after an upgrade."""
    parts = (attention, cpu_attention, decoder, layers, llama, loss, table)
    for module in (*parts, activation_checkpoint, tensor_parallel, parallelize):
        inside = Path(file_of(module)).relative_to(parallelize.OURS)
        assert inside.parts[0] in parallelize.FOLDERS


def test_the_drawings_are_up_to_date() -> None:
    """Otherwise: make docs."""
    images = PACKAGE.parent / "docs/images"
    assert (images / "house.svg").read_text("utf-8") == draw_house.draw() + "\n"
    assert (images / "job.svg").read_text("utf-8") == draw_diagrams.job() + "\n"
    assert (images / "pieces.svg").read_text("utf-8") == draw_diagrams.pieces() + "\n"
    for files in draw_house.WAYS.values():
        assert FILES.keys() >= {*files}
