"""Every Python block of the README runs, in order, in one namespace, as a reader would type it."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_readme_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert BLOCKS
    namespace = {"__name__": "readme"}
    for number, block in enumerate(BLOCKS, start=1):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)


def test_files_and_commands_that_the_readme_names_exist():
    root = Path(__file__).parent.parent
    makefile = (root / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)`", README)):
        assert f"\n{target}:" in makefile, f"make {target}"
    for module in set(re.findall(r"python -m ([a-z_.]+)", README)):
        path = module.replace(".", "/")
        homes = [root / f"{path}.py", root / path / "__main__.py", root / "kernels" / f"{path}.py"]
        assert any(home.exists() for home in homes), f"python -m {module}"
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert "://" in target or (root / target).exists(), target
