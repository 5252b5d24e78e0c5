"""What the README shows is what happens."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_readme_runs_and_prints_what_it_says(tmp_path: Path):
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "train", "train.py", "--devices", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "110"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = readme.partition("$ shardwise train train.py --devices 2\n")[2].partition("```")[0]
    assert without_times(done.stdout) == without_times(shown)


def without_times(printed: str) -> list[str]:
    """Its lines up to the first step's loss, predicted times and what is not chosen aside."""
    plan, _, steps = re.sub(r"\d[\d.e-]* s\b", "T s", printed).partition("step 1/200")
    return [line.rstrip() for line in plan.splitlines() if not line.startswith("not chosen")] + [steps.split()[1]]


def test_every_link_in_the_pages_leads_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert len(links) > 10
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []
