"""The pages of the documentation."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
