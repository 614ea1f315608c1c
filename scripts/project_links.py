"""Write the project's address and authors, of pyproject.toml, into README.md and mkdocs.yml.

python -m scripts.project_links        # `make docs` runs it

`[project.urls] Repository` and `[project] authors` are the only place to set them. Without an
address the README keeps `<this repository>`, and the site has no links to a repository.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def readme(text: str, project: dict[str, Any]) -> str:
    """Return the README with the clone command, the place of bug reports and the citation."""
    address = project.get("urls", {}).get("Repository", "")
    authors = " and ".join(f"{{{author['name']}}}" for author in project["authors"])
    report = (
        f"open an issue at {address}/issues"
        if address
        else "fill in `.github/ISSUE_TEMPLATE/bug_report.md`"
    )
    link = f",\n  url = {{{address}}}" if address else ""
    text = re.sub(
        r"git clone .+ meshwright &&",
        f"git clone {address or '<this repository>'} meshwright &&",
        text,
    )
    text = re.sub(r"(?<=To report a bug, ).+?(?=\.\n)", report, text)
    text = re.sub(r"author = \{.+?\}(?=,\n)", f"author = {{{authors}}}", text)
    return re.sub(r"(version = \{[\d.]+\})[^`]*\}", rf"\1{link}}}", text)


def site(text: str, project: dict[str, Any]) -> str:
    """Return mkdocs.yml with the address of the repository and its edit links, if there is one."""
    address = project.get("urls", {}).get("Repository", "")
    text = re.sub(r"^(repo_url|edit_uri): .*\n", "", text, flags=re.MULTILINE)
    links = f"repo_url: {address}\nedit_uri: edit/main/docs/\n" if address else ""
    return text.replace("docs_dir: docs\n", f"{links}docs_dir: docs\n")


FILES = {"README.md": readme, "mkdocs.yml": site}


def main() -> None:
    """Write each file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for name, fill in FILES.items():
        path = ROOT / name
        path.write_text(fill(path.read_text("utf-8"), project), "utf-8")


if __name__ == "__main__":
    main()
