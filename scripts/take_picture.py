"""Take a picture of a page that Meshwright writes, or of one section of it, in Chromium.

meshwright prove debug_model_2d --job.dump_folder RUN_DIR && meshwright report RUN_DIR
python -m scripts.take_picture RUN_DIR/report.html docs/images/proof.png --section Proof
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]

HEIGHT = """<script>document.body.style.width = "{}px"  // a window may not be as narrow
document.title = Math.ceil(document.querySelector("main").scrollHeight)</script>"""


def cut(page: str, section: str) -> str:
    """Return the page with one section only, by its heading, and nothing in it folded."""
    head, *sections = re.split("(?=<h2>)", page)
    (found,) = [each for each in sections if each.startswith(f"<h2>{section}</h2>")]
    return head.partition("<main>")[0] + f"<main>{found.replace('<details>', '<details open>')}"


def take(page: str, output: Path, width: int, *, is_dark: bool) -> None:
    """Write a PNG of the whole page.

    Args:
        width: of the window, in pixels.
    """
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        file.write_text(page + HEIGHT.format(width), "utf-8")

        def chromium(height: int, *words: str) -> str:
            window = [*CHROMIUM, scheme, f"--window-size={width},{height}", *words, file.as_uri()]
            return subprocess.run(window, capture_output=True, text=True, check=True).stdout

        (height,) = re.findall(r"<title>(\d+)", chromium(100, "--dump-dom"))
        chromium(int(height), f"--screenshot={output.absolute()}")


def main() -> None:
    """Take the picture that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--section", help="a heading of the page")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    page = given.page.read_text("utf-8")
    page = cut(page, given.section) if given.section else page
    take(page, given.picture, given.width, is_dark=given.dark)


if __name__ == "__main__":
    main()
