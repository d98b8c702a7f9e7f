"""The documentation against the code: links, messages, settings, commands and diagrams."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_fp8mla import cli
from sglang_fp8mla.envs import ENVIRONMENT

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "sglang_fp8mla"
PAGES = sorted(DOCS.glob("*.md"))
README = ROOT / "README.md"

# written for a value in a documented message
GAP = "…"


# --- messages ---------------------------------------------------------------------------------


def _template(node: ast.expr) -> str | None:
    """The text of a string expression with GAP for each value in it; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # %-formats of logging calls
        return re.sub(r"%(?:\.\d+)?[sdfg]", GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else GAP for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        return None if left is None and right is None else (left or GAP) + (right or GAP)
    return None


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


# the errors of errors.py, the helpers that build them, and warnings
_SPEAKERS = {
    "IncompatibleEnvironment",
    "InvalidArgument",
    "refuse",
    "logger.warning",
    "logger.error",
    "warnings.warn",
}


def raised_messages() -> dict[str, str]:
    """Every message that the package raises on purpose or warns with: template -> where."""
    found = {}
    for where, tree in _modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = _called(node)
            if name in _SPEAKERS:
                arguments = node.args[:1]
            elif name == "_log_once" and "WARNING" in ast.unparse(node.args[0]):
                arguments = node.args[1:2]
            else:
                continue
            for argument in arguments:
                template = _template(argument)
                if template is not None and template.strip(GAP + " "):
                    found[template] = f"{where}:{node.lineno}"
    return found


def all_templates() -> set[str]:
    """Every string of the package, for the other direction."""
    return {
        template
        for _, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
        and (template := _template(node))
    }


def documented_messages() -> list[str]:
    """The messages that troubleshooting.md gives the package: headings and whole items in code."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    ours = text.partition("<!-- messages of SGLang -->")[0]
    return [
        message
        for line in ours.splitlines()
        if line.startswith("### ") or re.fullmatch(r"- `[^`]+`", line)
        for message in re.findall(r"`([^`]+)`", line)
    ]


def spelled_in(documented: str, template: str) -> bool:
    """Whether the documented message is the template, shortened or with values filled in."""
    position = 0
    for fragment in documented.split(GAP):
        position = template.find(fragment.strip(), position)
        if position < 0:
            break
        position += len(fragment.strip())
    else:
        return True
    # a template of gaps alone would take anything for its instance
    fixed = template.replace(GAP, "").split()
    if len("".join(fixed)) < 10:
        return False
    pattern = ".*".join(map(re.escape, template.split(GAP)))
    return re.fullmatch(pattern, documented) is not None


def test_documented_messages_exist():
    """A message that nobody prints any more, or prints otherwise, sends the reader astray."""
    templates = all_templates()
    missing = [
        message
        for message in documented_messages()
        if not any(spelled_in(message, template) for template in templates)
    ]
    assert missing == []


def test_every_message_is_documented():
    """Each error that we raise, and each warning, has an entry that says what to do."""
    documented = documented_messages()
    missing = {
        where: template
        for template, where in raised_messages().items()
        if not any(spelled_in(message, template) for message in documented)
    }
    assert missing == {}


def test_documented_messages_are_not_vague():
    """An entry of little but gaps would stand for everything."""
    vague = [m for m in documented_messages() if len(re.sub(rf"[{GAP}\s]", "", m)) < 7]
    assert vague == []


def test_spelling_is_compared_in_order():
    """The comparison itself can fail."""
    assert spelled_in("PATH must be a or b, got 'c'", "… must be … or …, got …")
    assert not spelled_in("PATH may be a or b, got 'c'", "… must be … or …, got …")
    assert not spelled_in("anything: at all", "…: …")
    assert spelled_in("x must be …, got …", "foo: x must be … or …, got …")
    assert not spelled_in("got …, x must be", "x must be …, got …")
    assert not spelled_in("y must be …", "x must be …, got …")


def test_every_documented_message_has_a_remedy():
    """An entry without text explains nothing."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    text = re.sub(r"^- `[^`]+`\n", "", text, flags=re.MULTILINE)
    entries = re.findall(r"^### (.*)\n([^#]*)", text, flags=re.MULTILINE)
    assert len(entries) > 30
    empty = [heading for heading, body in entries if not re.search(r"\w{3}", body)]
    assert empty == []


# --- links and names --------------------------------------------------------------------------


def _slug(heading: str) -> str:
    """The anchor that MkDocs and GitHub give a heading."""
    text = re.sub(r"[`*_]|\[|\]\([^)]*\)", "", heading) if "`" not in heading else heading
    text = re.sub(r"[^\w\s-]", "", text.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", text)


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {_slug(line.lstrip("#")) for line in text.splitlines() if re.match(r"#{1,6} ", line)}


@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda page: page.name)
def test_links_resolve(page):
    """Relative links and their anchors; nothing is fetched."""
    if not page.exists():
        pytest.skip(f"{page.name} is not there yet")
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (
            anchor and linked.suffix == ".md" and anchor not in _anchors(linked)
        ):
            broken.append(target)
    assert broken == []


def test_navigation_holds_every_page():
    """A page outside the navigation is not found by anybody."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": ([\w-]+\.md)$", text, flags=re.MULTILINE))
    assert listed == {page.name for page in PAGES}


def test_site_builds():
    """`mkdocs build --strict`: the site's own checks, as the reader gets it."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("needs mkdocs-material: pip install 'sglang-fp8mla[docs]'")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            "build/site",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # the theme's advertisement of its successor
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_configuration_lists_every_variable():
    """docs/configuration.md against envs.py, in both directions."""
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `SGLANG_FP8MLA_")]
    documented = {match.group(1): row for row in rows if (match := re.match(r"\| `(\w+)`", row))}
    assert set(documented) == {variable.name for variable in ENVIRONMENT}
    for variable in ENVIRONMENT:
        for choice in variable.choices:
            assert f"`{choice}`" in documented[variable.name], (variable.name, choice)
        if variable.default:
            assert f"`{variable.default}`" in documented[variable.name]


@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda page: page.name)
def test_settings_named_in_the_docs_exist(page):
    """A typo in a variable's name makes the server refuse to start: none in the docs."""
    if not page.exists():
        pytest.skip(f"{page.name} is not there yet")
    names = set(re.findall(r"\bSGLANG_FP8MLA_[A-Z_]+[A-Z]\b", page.read_text(encoding="utf-8")))
    assert names <= {variable.name for variable in ENVIRONMENT}


@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda page: page.name)
def test_commands_named_in_the_docs_exist(page):
    """`sglang-fp8mla WORD` in code style names a command that this checkout has."""
    if not page.exists():
        pytest.skip(f"{page.name} is not there yet")
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)sglang-fp8mla ([a-z]+)", text, flags=re.MULTILINE))
    listed = cli.build_parser().format_help()
    assert [name for name in sorted(named) if not re.search(rf"\n    {name}\b", listed)] == []


def test_diagrams_are_current():
    """The committed SVGs are what docs/diagrams.py draws."""
    drawn = runpy.run_path(str(DOCS / "diagrams.py"))["DIAGRAMS"]
    assert drawn
    for name, draw in drawn.items():
        assert (DOCS / "img" / name).read_text(encoding="utf-8") == draw(), name
