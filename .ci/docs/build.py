"""The documentation site: ``make docs`` writes it to ``site/``.

Guide pages are those of ``curvlab/guide``. Front page, reference, options of the command, results
and changes are made here. Names in the reference come from the packages themselves, so that none
is forgotten. A link that leads nowhere fails the build.
"""

import argparse
import contextlib
import importlib
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from curvlab import public
from curvlab.cli.parser import build
from curvlab.cli.verbs import VERBS

PUBLIC = {name: thing for name, thing in vars(public).items() if not name.startswith("_")}
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
GUIDE = {
    "Start": ("quickstart", "choosing", "coming_from", "gallery"),
    "Guide": (
        "certificate",
        "memory",
        "projection",
        "protection",
        "learning",
        "distributed",
        "scaling",
    ),
    "Develop": ("extending", "kernels", "architecture"),
    "Evidence": ("paper", "measured", "results"),
}
# A page each, in this order; the home of a name of `curvlab` that is not among them comes after.
MODULES = (
    "curvlab.operators", "curvlab.eigen", "curvlab.rows", "curvlab.basis", "curvlab.layerwise",
    "curvlab.protection",
    "curvlab.learners", "curvlab.training", "curvlab.metrics", "curvlab.nets", "curvlab.tasks",
    "curvlab.losses", "curvlab.distributed", "curvlab.plan", "curvlab.doctor", "curvlab.plots",
    "curvlab.parameters", "curvlab.batches", "curvlab.probe", "curvlab.refusals",
    "curvlab.storage", "curvlab_kernels.ops", "curvlab_kernels.reference",
    "curvlab_kernels.audit.ptx", "curvlab.bench.problem", "curvlab.bench.solvers",
    "curvlab.bench.contest", "curvlab.bench.leaderboard", "curvlab.bench.timing",
)  # fmt: skip


def modules() -> list[str]:
    """The modules of the reference, the home of every name of ``curvlab`` among them."""
    homes = (thing.__module__.split(".")[:2] for thing in PUBLIC.values())
    return list(dict.fromkeys([*MODULES, *(".".join(home) for home in homes)]))


def names_of(module: ModuleType) -> list[str]:
    """What a module defines without an underscore, and what a package passes on."""
    listed = getattr(module, "__all__", None)
    passes_on = hasattr(module, "__path__") and listed is None
    own = {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and not isinstance(thing, ModuleType)
        and (
            passes_on
            or module.__name__ in (getattr(thing, "__module__", ""), type(thing).__module__)
        )
    }
    return sorted({*(listed or ()), *own}, key=str.lower)


def shown(module: ModuleType, name: str) -> str:
    """What a user writes: ``curvlab.lanczos`` where that is enough."""
    top = PUBLIC.get(name, PUBLIC) is getattr(module, name)
    return f"curvlab.{name}" if top else f"{module.__name__}.{name}"


def entry(module: ModuleType, name: str) -> str:
    """The directive that documents a name with all its options."""
    thing, title = getattr(module, name), shown(module, name)
    if isinstance(thing, type):
        kind = "autoexception" if issubclass(thing, BaseException) else "autoclass"
        bases = "" if thing.__bases__ == (object,) else "   :show-inheritance:\n"
        return f".. {kind}:: {title}\n   :members:\n{bases}"
    if callable(thing):
        return f".. {'autofunction' if hasattr(thing, '__code__') else 'autodata'}:: {title}\n"
    inside = f"Of {', '.join(map(str, thing))}." if isinstance(thing, dict) else f"``{thing!r}``"
    return f".. py:data:: {title}\n\n   {inside}\n"


def reference() -> dict[str, str]:
    """Pages by their name: one per module, and a table of the names of ``curvlab``."""
    pages, homes, seen = {}, {}, {}
    for name in modules():
        module = importlib.import_module(name)
        parts = [name, "=" * len(name), "", f".. automodule:: {name}\n   :no-index:\n"]
        for offered in names_of(module):
            thing = getattr(module, offered)
            if id(thing) in seen:
                parts.append(f"``{name}.{offered}`` is :py:obj:`{seen[id(thing)]}`.\n")
                continue
            title = shown(module, offered)
            if callable(thing):  # a constant may be the same object as another by chance
                seen[id(thing)] = title
            if title == f"curvlab.{offered}":
                homes[offered] = summary(thing)
            parts.append(entry(module, offered))
        pages[f"api/{name}.rst"] = "\n".join(parts)
    rows = [
        f"   * - :py:obj:`curvlab.{n}`\n     - {homes[n]}" for n in sorted(homes, key=str.lower)
    ]
    table = "\n".join([".. list-table::", "   :widths: 30 70", "", *rows])
    tree = "\n".join(f"   {name}" for name in ("command", *modules()))
    pages["api/index.rst"] = (
        f"Reference\n=========\n\n{table}\n\n.. toctree::\n   :caption: Pages\n\n{tree}\n"
    )
    return pages


def summary(thing: object) -> str:
    return " ".join((thing.__doc__ or "").strip().partition("\n\n")[0].split())


def command() -> str:
    """Every verb of the command with its options, as ``--help`` prints them."""
    os.environ["COLUMNS"] = "96"
    text = ["# The curvlab command\n", "`curvlab VERB --help` prints the same.\n"]
    for verb in VERBS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            build().parse_args([verb, "--help"])
        text.append(f"## {verb}\n\n```text\n{out.getvalue().strip()}\n```\n")
    return "\n".join(text)


def front() -> str:
    """The README, with its links inside the site, and the table of contents."""
    text = (ROOT / "README.md").read_text().replace("](curvlab/guide/", "](")
    text = text.replace("](benchmarks/RESULTS.md)", "](results.md)")
    text = text.replace("](CHANGELOG)", "](changes.md)").replace("](benchmarks/", "](")
    trees = [
        f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```"
        for title, pages in {**GUIDE, "Reference": ("api/index", "changes")}.items()
    ]
    return "\n\n".join([text, *trees])


def changes() -> str:
    text = (ROOT / "CHANGELOG").read_text()
    text = re.sub(r"^(?=[0-9])", "## ", text, flags=re.MULTILINE)  # versions, then their parts
    return "# " + re.sub(r"^(?=[A-Z])(?!Changes)", "### ", text, flags=re.MULTILINE)


def assemble(folder: Path) -> None:
    """All sources of the site in ``folder``."""
    shutil.copytree(ROOT / "curvlab" / "guide", folder, dirs_exist_ok=True)
    shutil.copytree(ROOT / "benchmarks" / "pictures", folder / "pictures", dirs_exist_ok=True)
    texts = {
        "index.md": front(),
        "results.md": (ROOT / "benchmarks" / "RESULTS.md").read_text(),
        "changes.md": changes(),
        "api/command.md": command(),
        **reference(),
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site")
    options = parser.parse_args()
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as folder:
        assemble(Path(folder) / "source")
        words = ["-c", str(HERE), "-b", "html", "-q", "-W", "--keep-going", "-d", f"{folder}/trees"]
        return build_main([*words, f"{folder}/source", str(options.out)])


if __name__ == "__main__":
    sys.exit(main())
