"""The site's reference has every public name; its pages are assembled from what is there."""

import importlib.util
import re
from pathlib import Path

import pytest

import curvlab

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "curvlab" / "guide"


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / ".ci" / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name_once(site):
    text = "\n".join(site.reference().values())
    documented = re.findall(r"^\.\. auto(?!module)\w+:: curvlab\.(\w+)$", text, flags=re.MULTILINE)
    names = [name for name in documented if name in site.PUBLIC]
    assert sorted(names) == sorted(site.PUBLIC)
    assert sorted(names) == sorted(set(curvlab.__all__) - {"__version__"})


def test_a_module_that_is_not_listed_has_a_page_for_its_public_names(site, monkeypatch):
    monkeypatch.setattr(site, "MODULES", ())
    pages = site.reference()
    assert "autofunction:: curvlab.lanczos" in pages["api/curvlab.eigen.rst"]


def test_every_page_of_the_guide_is_in_the_table_of_contents(site):
    listed = {page for pages in site.GUIDE.values() for page in pages}
    assert listed == {page.stem for page in GUIDE.glob("*.md")} | {"results"}


def test_the_front_page_links_inside_the_site_only(site, tmp_path):
    site.assemble(tmp_path)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (tmp_path / "index.md").read_text()):
        assert "://" in target or (tmp_path / target).exists(), target


def test_the_options_of_every_verb_are_shown(site):
    text = site.command()
    assert "--which {LM,LA,SA,both}" in text
    assert text.count("usage: curvlab ") == len(site.VERBS)


TOOLS = {"hessian_eigenthings": 0, "pyhessian": 1, "curvlinops": 2}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_code_of_other_tools_gives_the_same_top_eigenvalue(tool, tmp_path, monkeypatch):
    pytest.importorskip(tool)
    monkeypatch.chdir(tmp_path)
    text = (GUIDE / "coming_from.md").read_text()
    section = text[: text.index("## ")] + text.split("\n## ")[1 + TOOLS[tool]]
    namespace = {}
    for block in re.findall(r"^```py(?:thon)?\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, f"coming_from.md, {tool}", "exec"), namespace)
    top = max(float(value) for value in namespace["theirs"])
    assert top == pytest.approx(float(namespace["ours"][0]), rel=1e-2)
