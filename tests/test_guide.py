"""Every Python block of the guide runs, page by page, and every command in it parses."""

import re
import shlex
from pathlib import Path

import pytest

from curvlab.cli.parser import parse

GUIDE = Path(__file__).parent.parent / "curvlab" / "guide"
# guide/distributed.md needs several processes and is tested with them
PAGES = ["quickstart", "choosing", "memory", "certificate", "paper", "extending", "scaling"]
PAGES += ["kernels", "projection", "learning", "measured", "architecture", "coming_from"]
PAGES += ["gallery", "protection"]


def blocks(page, language):
    text = (GUIDE / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    namespace = {"__name__": page}
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"guide/{page}.md, block {number}", "exec"), namespace)
    shown = re.findall(r"!\[[^]]*\]\((pictures/[^)]+)\)", (GUIDE / f"{page}.md").read_text())
    assert all(Path(picture).exists() for picture in shown), "a block draws each picture"


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_parse(page):
    text = "\n".join(blocks(page, "console")).replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if line.startswith("$ curvlab"):
            assert parse(words[1:]).verb in (words[1], " ".join(words[1:3]))


def anchors(page):
    """The places that a link can name: titles in lower case, words joined by hyphens."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_links_between_pages_lead_somewhere():
    for page in GUIDE.glob("*.md"):
        prose = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, place in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", prose):
            found = page.parent / target if target else page
            assert found.exists(), f"{page.name}: {target}"
            assert not place or place[1:] in anchors(found), f"{page.name}: {target}{place}"


def test_every_page_of_the_guide_is_known():
    assert {page.stem for page in GUIDE.glob("*.md")} <= {*PAGES, "distributed"}
