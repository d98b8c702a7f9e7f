"""Every place of SGLang where the name `flashinfer` or its MLA classes decide, with our verdict.

Walks the source of the installed SGLang and of 0.5.22, and holds each place against
`audit_verdicts.json`. A new or changed place fails with its text: judge it, then run

    python tests/contract/test_audit.py --write [DIRECTORY OF A SGLANG PACKAGE ...]

which rewrites the table with the verdict "?" for what is new (docs/upgrading.md). Reads source
only: nothing of SGLang is imported, and no GPU is needed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sglang_wheels import SGLANG_0522, IndexUnreachable, fetch_sglang

TABLE = Path(__file__).with_name("audit_verdicts.json")
BACKEND_NAME = "flashinfer_mla_fp8"
VERDICTS = {
    "same": "our name gets what flashinfer gets without our doing",
    "hooked": "a seam of integration.py makes it the same; `why` begins with the seam's name",
    "na": "not about this backend: another subsystem, another platform, or a model without MLA",
}
# directories of the package that serve language models; multimodal_gen is another server
ROOTS = ("srt", "benchmark", "cli", "entrypoints", "kernels", "lang", "*.py")
CLASS_NAME = re.compile(r"^FlashInfer(MLA|Mla|Mha)\w*$|^Flashinfer(MLA|Mla)\w*$")
# nodes that a string passes through on its way up to the expression that decides
_CARRIERS = (
    ast.Set,
    ast.List,
    ast.Tuple,
    ast.Dict,
    ast.IfExp,
    ast.Starred,
    ast.BinOp,
    ast.BoolOp,
    ast.FormattedValue,
    ast.JoinedStr,
)
_SET_CALLS = {"frozenset", "set", "list", "tuple"}


@dataclass(frozen=True, order=True)
class Place:
    """One place: file below the package, qualified name, and the expression, normalised."""

    file: str
    where: str
    expr: str


class _Shorten(ast.NodeTransformer):
    """Reduce an expression to what matters here: other names of a list or dict become `...`."""

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return ast.Set(elts=self._elements(node.elts))

    def visit_List(self, node: ast.List) -> ast.expr:
        return ast.List(elts=self._elements(node.elts), ctx=node.ctx)

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        return ast.Tuple(elts=self._elements(node.elts), ctx=node.ctx)

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        pairs = [
            (key, self.visit(value))
            for key, value in zip(node.keys, node.values, strict=True)
            if _mentions(key) or _mentions(value)
        ]
        return ast.Dict(
            keys=[*(key for key, _ in pairs), None],
            values=[*(value for _, value in pairs), ast.Name(id="...", ctx=ast.Load())],
        )

    def _elements(self, elements: list[ast.expr]) -> list[ast.expr]:
        kept = [self.visit(element) for element in elements if _mentions(element)]
        return [*kept, ast.Constant(value=...)] if len(kept) < len(elements) else kept


def _mentions(node: ast.AST | None) -> bool:
    return node is not None and any(_is_ours(child) for child in ast.walk(node))


def _is_ours(node: ast.AST) -> bool:
    """Is this node the name, or one of the classes?"""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and (
            node.value == "flashinfer" or bool(CLASS_NAME.match(node.value))
        )
    if isinstance(node, ast.Name):
        return bool(CLASS_NAME.match(node.id))
    if isinstance(node, ast.Attribute):
        return bool(CLASS_NAME.match(node.attr))
    return False


def _is_fuzzy(node: ast.AST) -> bool:
    """A test by a part of a name or by a class, where a backend is concerned.

    `name.startswith("flash")` and `"mla" in name` would be true of ours by accident, and
    `type(backend).__name__ == ...`, `backend.__class__ is ...` false of ours by accident.
    """
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("startswith", "endswith", "removeprefix", "split", "partition")
        and "attention_backend" in ast.unparse(node.func.value)
    ):
        return True
    if not isinstance(node, ast.Compare):
        return False
    text = ast.unparse(node)
    about_backend = "backend" in text.lower() and "tokenizer" not in text
    if about_backend and re.search(r"__class__|\btype\(", text):
        return True
    left = node.left
    return (
        isinstance(node.ops[0], (ast.In, ast.NotIn))
        and isinstance(left, ast.Constant)
        and isinstance(left.value, str)
        and (left.value in BACKEND_NAME or left.value in "flashinfermlafp8backend")
        and "backend" in ast.unparse(node.comparators[0])
    )


def find_places(package: Path) -> Iterator[Place]:
    """Every place in one SGLang package directory."""
    for root in ROOTS:
        files = package.glob(root) if "*" in root else (package / root).rglob("*.py")
        for file in sorted(files):
            relative = file.relative_to(package).as_posix()
            text = file.read_text(encoding="utf-8")
            if "/test/" in f"/{relative}" or not re.search("flashinfer|backend", text, re.I):
                continue
            yield from _find_in(ast.parse(text), relative)


def _find_in(tree: ast.Module, file: str) -> Iterator[Place]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    seen: set[Place] = set()
    for node in ast.walk(tree):
        if not (_is_ours(node) or _is_fuzzy(node)):
            continue
        # names in annotations decide nothing
        if _in_annotation(node, parents):
            continue
        place = Place(file, _qualified_name(node, parents), _expression(node, parents))
        if place not in seen:
            seen.add(place)
            yield place


def _in_annotation(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    child = node
    while (parent := parents.get(child)) is not None and isinstance(child, ast.expr):
        if isinstance(parent, (ast.AnnAssign, ast.arg)) and parent.annotation is child:
            return True
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)) and parent.returns is child:
            return True
        child = parent
    return False


def _qualified_name(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    names: list[str] = []
    while (node := parents.get(node)) is not None:  # type: ignore[assignment]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
    return ".".join(reversed(names)) or "<module>"


def _expression(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """The smallest expression around `node` that decides or stores something, normalised."""
    start, parent = node, parents[node]
    while isinstance(parent, _CARRIERS) or (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Name)
        and parent.func.id in _SET_CALLS
    ):
        node, parent = parent, parents[parent]
    shown: ast.AST = start if _is_fuzzy(start) else parent
    if isinstance(shown, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        role = "base" if isinstance(shown, ast.ClassDef) else "default or decorator"
        return f"{role} of {shown.name}: {_text(node)}"
    if isinstance(shown, ast.Assert):
        shown = shown.test
    if isinstance(shown, (ast.If, ast.While)):
        shown = shown.test
    if isinstance(shown, ast.match_case):
        shown = shown.pattern
    return _text(shown)


def _text(node: ast.AST) -> str:
    copy = ast.parse(ast.unparse(node)) if isinstance(node, (ast.expr, ast.stmt)) else node
    text = ast.unparse(ast.fix_missing_locations(_Shorten().visit(copy)))
    return re.sub(r"\s+", " ", text)


def load_table() -> dict[Place, tuple[str, str]]:
    """The verdicts: place -> (verdict, why)."""
    rows = json.loads(TABLE.read_text())["places"]
    return {
        Place(row["file"], row["where"], row["expr"]): (row["verdict"], row["why"]) for row in rows
    }


def installed_package() -> Path:
    """The directory of the installed SGLang, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def write_table(packages: list[Path]) -> None:
    """Rewrite the table for `packages`: known verdicts are kept, new places get "?"."""
    known = load_table() if TABLE.exists() else {}
    places = sorted({place for package in packages for place in find_places(package)})
    lines = [
        json.dumps({**asdict(place), "verdict": verdict, "why": why})
        for place in places
        for verdict, why in [known.get(place, ("?", ""))]
    ]
    head = json.dumps(VERDICTS)
    TABLE.write_text('{"verdicts": ' + head + ',\n"places": [\n' + ",\n".join(lines) + "\n]}\n")


@pytest.fixture(scope="module")
def installed() -> set[Place]:
    return set(find_places(installed_package()))


@pytest.fixture(scope="module")
def previous() -> set[Place]:
    try:
        package = fetch_sglang(SGLANG_0522)
    except IndexUnreachable as error:
        pytest.skip(f"sglang {SGLANG_0522} cannot be downloaded: {error}")
    return set(find_places(package))


def assert_judged(found: set[Place]) -> None:
    """Every place has a verdict; the failure shows each that has none, as JSON to judge."""
    table = load_table()
    new = [json.dumps(asdict(place)) for place in sorted(found) if place not in table]
    assert not new, (
        f"{len(new)} places of SGLang decide by the name and have no verdict "
        f"(docs/upgrading.md):\n" + "\n".join(new)
    )


@pytest.mark.sglang
def test_every_place_of_the_installed_sglang_has_a_verdict(installed: set[Place]) -> None:
    assert_judged(installed)


@pytest.mark.sglang
def test_every_place_of_the_previous_sglang_has_a_verdict(previous: set[Place]) -> None:
    assert_judged(previous)


@pytest.mark.sglang
def test_no_verdict_outlives_its_place(installed: set[Place], previous: set[Place]) -> None:
    """A verdict about code that is gone would hide that a seam went with it."""
    stale = sorted(set(load_table()) - installed - previous)
    assert not stale, f"verdicts without a place: {stale}"


def test_every_verdict_is_known_and_says_why() -> None:
    """A "hooked" verdict begins with the seam that does it, and every seam has a verdict."""
    from sglang_fp8mla.integration import SEAMS

    used = set()
    for place, (verdict, why) in load_table().items():
        assert verdict in VERDICTS, f"{place}: verdict must be one of {list(VERDICTS)}"
        assert why, f"{place}: a verdict needs its reason"
        if verdict == "hooked":
            seam = why.partition(":")[0]
            assert seam in SEAMS, f"{place}: no seam {seam!r} in integration.py"
            used.add(seam)
    assert used == set(SEAMS)


# what the walker must see, each a way in which a name has decided somewhere
@pytest.mark.parametrize(
    ("source", "expr"),
    [
        ("if backend == 'flashinfer': pass", "backend == 'flashinfer'"),
        ("def f(x):\n  return x not in ('fa3', 'flashinfer')", "x not in ('flashinfer', ...)"),
        ("A = {'fa3', 'flashinfer'} | B", "A = {'flashinfer', ...} | B"),
        ("m = {'flashinfer': make, 'fa3': other}", "m = {'flashinfer': make, **...}"),
        ("f(backend='flashinfer')", "backend='flashinfer'"),
        ("def f(b='flashinfer'): pass", "b='flashinfer'"),
        ("isinstance(b, FlashInferMLAAttnBackend)", "isinstance(b, FlashInferMLAAttnBackend)"),
        (
            "S = frozenset({'FlashInferMLAAttnBackend'})",
            "S = frozenset({'FlashInferMLAAttnBackend'})",
        ),
        ("x = attention_backend.startswith('flash')", "attention_backend.startswith('flash')"),
        ("x = 'mla' in backend_name", "'mla' in backend_name"),
        ("x = type(attn_backend).__name__ == K", "type(attn_backend).__name__ == K"),
        ("match b:\n  case 'flashinfer': pass", "'flashinfer'"),
    ],
)
def test_walker_sees(source: str, expr: str) -> None:
    assert [place.expr for place in _find_in(ast.parse(source), "f.py")] == [expr]


@pytest.mark.parametrize(
    "source",
    [
        "runner == 'flashinfer_cutlass'",
        "help = 'use flashinfer here'",
        "def f(b: FlashInferMLAAttnBackend) -> FlashInferMLAAttnBackend: pass",
        "x = 'mla' in weight_name",
        "import flashinfer",
    ],
)
def test_walker_ignores(source: str) -> None:
    assert list(_find_in(ast.parse(source), "f.py")) == []


def test_a_new_place_fails_with_its_text() -> None:
    """The guard itself: one unknown comparison must be named in the failure."""
    place = Place("srt/new.py", "gate", "backend == 'flashinfer'")
    with pytest.raises(AssertionError, match=r"srt/new\.py.*gate.*backend == 'flashinfer'"):
        assert_judged({place})


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    write_table([installed_package(), fetch_sglang(SGLANG_0522), *map(Path, sys.argv[2:])])
